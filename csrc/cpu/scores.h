// What forward and backward share: packed queries, masks of tiles, the rows of a result.
#pragma once

#include <cmath>

#include "arena.h"
#include "band.h"
#include "dropout_mask.h"
#include "work.h"

namespace txl::TXL_LEVEL {

constexpr double kLog2e = 1.4426950408889634074, kLn2 = 0.6931471805599453094;

// (q + bias) * factor of the rows of a block as elements, `depth` of each part; zero for rows that see
// nothing.
template <class C, class S>
static void pack_queries(const Block& block, const View& q, const View& bias, typename C::Acc factor,
                         int64_t depth, typename C::Elem* out) {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  constexpr int W = kLanes<T>;
  const int64_t D = block.p.D;
  const S* u = bias.data ? bias.at<S>(0, block.h, 0) : nullptr;
  for (int m = 0; m < block.rows; ++m, out += a_pitch<C>(depth)) {
    const S* row = q.at<S>(block.b, block.h, block.i0 + m);
    if (block.keys_of_row(m).empty()) {
      memset(out, 0, static_cast<size_t>(C::parts * depth) * sizeof(Elem));
      continue;
    }
    for (int64_t k = 0; k < depth; k += W) {
      Vec<T> x[C::per_elem];
      for (int e = 0; e < C::per_elem; ++e) {
        const int64_t d = k * C::per_elem + e * W;
        x[e] = load_left(row + d, D - d);
        if (u) x[e] += load_left(u + d, D - d);
        x[e] *= factor;
      }
      const auto elems = C::along(x);
      if (k + W <= depth)
        store_parts(out + k, depth, elems);
      else  // depths of whole tiles have no rest
        store_some(out + k, elems.part[0], static_cast<int>(depth - k));
    }
  }
}

// Puts `masked` where a row of a tile does not see the key.
template <typename T, int kM, int kN>
TXL_INLINE void mask_tile(Vec<T> (&acc)[kM][kN], const Block& block, int64_t m0, int64_t tile_key, T masked) {
  const Vec<Int<T>> lane = lane_index<Int<T>>();
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) {
    const Range keys = block.keys_of_row(m0 + m);
    const Int<T> lo = static_cast<Int<T>>(min(max(keys.lo - tile_key, 0), kN * kLanes<T>));
    const Int<T> hi = static_cast<Int<T>>(min(max(keys.hi - tile_key, 0), kN * kLanes<T>));
    TXL_UNROLL
    for (int n = 0; n < kN; ++n) {
      const Vec<Int<T>> j = lane + n * kLanes<T>;
      acc[m][n] = ((j >= lo) & (j < hi)) ? acc[m][n] : splat(masked);
    }
  }
}

// The tiles of [lo, hi) that lie in the band: the far ones are left and right of them.
template <class C>
static Range band_tiles(const Block& block, int64_t lo, int64_t hi) {
  Range tiles{hi, lo};
  for (int64_t j = lo; j < hi; j += kPanel<C>)
    if (block.place(j, j + kPanel<C>) == Block::Place::band) tiles = {min(tiles.lo, j), j + kPanel<C>};
  return tiles;
}

// One row of the result from its running softmax: o unnormalised, m what scores are relative to, l the sum: 0
// if the query sees no key, or if all of its scores are -inf, which have no softmax.
template <typename T, class S>
static void write_row(const Problem& p, const Forward& t, int64_t b, int64_t h, int64_t i, const T* o, T m,
                      T l) {
  if (l == 0 && !p.keys_of_query(p.keys_of_batch(b), i).empty()) l = static_cast<T>(NAN);
  const T factor = l == 0 ? T{} : static_cast<T>(1 / (1 - p.dropout_p)) / l;
  S* out = t.out.at<S>(b, h, i);
  for (int64_t d = 0; d < p.D; ++d) store_as(out + d, l == 0 ? T{} : o[d] * factor);
  const T lse = l == 0 ? -static_cast<T>(INFINITY) : (m + std::log2(l)) * static_cast<T>(kLn2);
  static_cast<T*>(t.lse)[(b * p.H + h) * p.L + i] = lse;
}

}  // namespace txl::TXL_LEVEL

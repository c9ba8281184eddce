// What forward and backward share: work items on the caller's threads, packed queries, a tile of scores,
// masks and dropout.
#pragma once

#include <atomic>
#include <cmath>

#include "band.h"
#include "cpu.h"

namespace txl::TXL_LEVEL {

constexpr double kLog2e = 1.4426950408889634074, kLn2 = 0.6931471805599453094;

// Runs f(item, thread) for every item on the caller's pool, items in order of growing number.
template <class F>
TXL_INLINE void parallel_items(const Pool& pool, int64_t items, F f) {
  if (items == 0) return;
  struct Context {
    F& f;
    int64_t items;
    std::atomic<int64_t> next{0};
  } context{f, items};
  pool.run(
      static_cast<int>(min(pool.threads, items)),
      [](void* c, int thread) {
        Context& ctx = *static_cast<Context*>(c);
        for (int64_t i; (i = ctx.next.fetch_add(1, std::memory_order_relaxed)) < ctx.items;) ctx.f(i, thread);
      },
      &context);
}

// Philox words of one query for the keys of one DropoutMask group, in key order.
static inline void dropout_words(uint64_t seed, int64_t b, int64_t h, int64_t i, int64_t group,
                                 uint32_t (&word)[DropoutMask::kGroup]) {
  using V = Vec<uint32_t>;
  for (int x = 0; x < DropoutMask::kCalls; x += kLanes<uint32_t>) {
    V c[4] = {lane_index<uint32_t>() + static_cast<uint32_t>(group * DropoutMask::kCalls + x),
              splat(static_cast<uint32_t>(i)), splat(static_cast<uint32_t>(h)),
              splat(static_cast<uint32_t>(b))};
    Philox::rounds(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                   [](V v, uint32_t m, V& lo, V& hi) { multiply_wide(v, m, lo, hi); });
    for (int w = 0; w < 4; ++w) store(word + w * DropoutMask::kCalls + x, c[w]);
  }
}

// Zeroes the entries of x[lo, hi), which belong to keys `key0 + index`, that dropout takes away.
template <typename T>
static void drop(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t key0, int64_t lo, int64_t hi,
                 T* x) {
  uint32_t word[DropoutMask::kGroup];
  for (int64_t j = key0 + lo; j < key0 + hi;) {
    const int64_t group = j / DropoutMask::kGroup, first = group * DropoutMask::kGroup;
    const int64_t count = min(first + DropoutMask::kGroup, key0 + hi) - j;
    dropout_words(static_cast<uint64_t>(*p.dropout_seed), b, h, i, group, word);
    const uint32_t* w = word + (j - first);
    T* y = x + (j - key0);
    for (int64_t n = 0; n < count; ++n) y[n] = w[n] < p.dropout_threshold ? T{} : y[n];
    j += count;
  }
}

// (q + bias) * factor of the rows of a block as elements, `depth` of each part; zero for rows that see
// nothing.
template <class C, class S>
static void pack_queries(const Block& block, const View& q, const View& bias, int64_t b, int64_t h,
                         typename C::Acc factor, int64_t depth, typename C::Elem* out) {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  constexpr int W = kLanes<T>;
  const int64_t D = block.p.D;
  const S* u = bias.data ? bias.at<S>(0, h, 0) : nullptr;
  for (int m = 0; m < block.rows; ++m, out += a_pitch<C>(depth)) {
    const S* row = q.at<S>(b, h, block.i0 + m);
    if (block.p.keys_of_query(block.batch, block.i0 + m).empty()) {
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
    const Range keys = block.p.keys_of_query(block.batch, block.i0 + m0 + m);
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

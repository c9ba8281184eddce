// Operands of products, as product.h reads them, from rows in memory.
#pragma once

#include <utility>

#include "product.h"

namespace txl::TXL_LEVEL {

template <int kStep, class V, size_t... I>
TXL_INLINE void exchange(V& a, V& b, std::index_sequence<I...>) {
  constexpr int kW = sizeof...(I);
  const V lo = shuffled<((I & kStep) ? kW + I - kStep : I)...>(a, b);
  const V hi = shuffled<((I & kStep) ? kW + I : I + kStep)...>(a, b);
  a = lo;
  b = hi;
}

// Transposes a square of kLanes x kLanes in registers, by halves.
template <class E, int kStep = kLanes<E> / 2>
TXL_INLINE void transpose(Vec<E> (&v)[kLanes<E>]) {
  TXL_UNROLL
  for (int i = 0; i < kLanes<E>; ++i)
    if (!(i & kStep)) exchange<kStep>(v[i], v[i + kStep], std::make_index_sequence<kLanes<E>>{});
  if constexpr (kStep > 1) transpose<E, kStep / 2>(v);
}

// Lane i: the sum of v[i]'s lanes. A transposition of which only the sums are kept.
template <class T, int kStep = kLanes<T> / 2>
TXL_INLINE Vec<T> lane_sums(Vec<T> (&v)[kLanes<T>]) {
  TXL_UNROLL
  for (int i = 0; i < kStep; ++i) {
    exchange<kStep>(v[i], v[i + kStep], std::make_index_sequence<kLanes<T>>{});
    v[i] += v[i + kStep];
  }
  if constexpr (kStep > 1) {
    return lane_sums<T, kStep / 2>(v);
  } else {
    return v[0];
  }
}

// A vector of a stored row of which n values are left, zeros behind them.
template <class S>
TXL_INLINE auto load_left(const S* p, int64_t n) {
  using V = decltype(load_as_float(p));
  constexpr int W = kLanes<decltype(to_float(S{}))>;
  return n >= W ? load_as_float(p) : n > 0 ? load_some(p, static_cast<int>(n)) : V{};
}

// One panel from kPanel row pointers (null: a row of zeros).
template <class C, class S>
static void pack_panel(const S* const (&rows)[kPanel<C>], int64_t D, typename C::Elem* panel) {
  using E = typename C::Elem;
  using T = typename C::Acc;
  constexpr int W = kLanes<E>;
  const int64_t depth = depth_of<C>(D);
  for (int x = 0; x < kPanel<C>; x += W)
    for (int64_t k = 0; k < depth; k += W) {
      const int64_t n = min(W, depth - k), d = k * C::per_elem;
      // The next W rows, while these are turned. They are longer than a line: a stream each for the machine's
      // own prefetching, which are too many.
      if (kLong && x + W < kPanel<C>)
        for (int i = 0; i < W; ++i)
          if (rows[x + W + i]) __builtin_prefetch(rows[x + W + i] + d, 0, 3);
      E* out = panel + k * kPanelPitch<C> + x;
      if constexpr (C::per_elem > 1 && std::is_same_v<S, bf16>) {  // memory holds elements already
        const int64_t left = min(W * C::per_elem, D - d);
        Vec<E> v[W] = {};
        for (int i = 0; i < W; ++i) {
          E lane[W] = {};
          if (rows[x + i])
            memcpy(lane, rows[x + i] + d,
                   left == W * C::per_elem ? sizeof(lane) : static_cast<size_t>(left) * sizeof(S));
          v[i] = load(lane);
        }
        transpose<E>(v);
        for (int i = 0; i < n; ++i) store(out + i * kPanelPitch<C>, v[i]);
      } else {
        Vec<T> v[C::per_elem][W];
        for (int e = 0; e < C::per_elem; ++e) {
          TXL_UNROLL
          for (int i = 0; i < W; ++i)
            v[e][i] = rows[x + i] ? load_left(rows[x + i] + d + e * W, D - d - e * W) : Vec<T>{};
          transpose<T>(v[e]);
        }
        for (int i = 0; i < n; ++i) {
          Vec<T> column[C::per_elem];
          for (int e = 0; e < C::per_elem; ++e) column[e] = v[e][i];
          store_parts(out + i * kPanelPitch<C>, kPanel<C>, C::across(column));
        }
      }
    }
}

// Whether any of the values that it saw is not finite.
template <typename T>
struct NotFinite {
  Vec<T> sum = {};  // 0, or NaN

  TXL_INLINE void see(Vec<T> x) { sum += x - x; }
  bool any() const { return !(horizontal_sum<T>(sum) == 0); }
};

// Rows of elements, each made of `per_elem` stored rows, [parts][channels] with zeros past D: the B operand
// of a product whose depth runs over rows. row(i): row i, null for zeros; `count` of them, whole elements.
// kFinite: values that are not finite become zeros.
template <class C, bool kFinite, class F>
static void pack_rows(int64_t count, F row, int64_t D, int64_t channels, typename C::Elem* out,
                      NotFinite<typename C::Acc>& not_finite) {
  using T = typename C::Acc;
  using S = std::remove_const_t<std::remove_pointer_t<decltype(row(0))>>;
  constexpr int W = kLanes<T>;
  for (int64_t n = 0; n < count / C::per_elem; ++n, out += C::parts * channels) {
    const S* rows[C::per_elem];
    for (int e = 0; e < C::per_elem; ++e) rows[e] = row(C::value(n, e));
    for (int64_t d = 0; d < channels; d += W) {
      Vec<T> x[C::per_elem];
      for (int e = 0; e < C::per_elem; ++e) {
        x[e] = rows[e] ? load_left(rows[e] + d, D - d) : Vec<T>{};
        not_finite.see(x[e]);
        if constexpr (kFinite) x[e] = x[e] - x[e] == Vec<T>{} ? x[e] : Vec<T>{};
      }
      if constexpr (C::per_elem > 1 && std::is_same_v<S, bf16>)
        store(out + d, leading_pairs(x[0], x[1]));  // nothing is rounded
      else
        store_parts(out + d, channels, C::across(x));
    }
  }
}

// Elements of a matrix of values, where they are not values: those of its rows (columns: a multiple of
// `per_elem` vectors is written), or of `per_elem` rows ([rows / per_elem][columns], rows of whole elements,
// columns rounded up to a vector).
template <class C>
static void pack_along(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                       int64_t out_pitch) {
  constexpr int W = kLanes<float>;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; n += 2 * W)
      store_parts(out + m * out_pitch + n / 2, part_step<C::parts>(out_pitch),
                  C::along({load(x + m * pitch + n), load(x + m * pitch + n + W)}));
}
template <class C>
static void pack_across(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                        int64_t out_pitch) {
  for (int64_t m = 0; m < rows; m += 2)
    for (int64_t n = 0; n < columns; n += kLanes<float>)
      store_parts(out + m / 2 * out_pitch + n, part_step<C::parts>(out_pitch),
                  C::across({load(x + m * pitch + n), load(x + (m + 1) * pitch + n)}));
}

// The same elements as pack_across, turned: [columns][rows / 2]; rows and columns of whole tiles.
template <class C>
static void pack_turned(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                        int64_t out_pitch) {
  constexpr int W = kLanes<float>;
  for (int64_t m = 0; m < rows; m += 2 * W)
    for (int64_t n = 0; n < columns; n += W) {
      Vec<uint32_t> v[C::parts][W];
      TXL_UNROLL
      for (int i = 0; i < W; ++i) {
        const auto pairs =
            C::across({load(x + (m + 2 * i) * pitch + n), load(x + (m + 2 * i + 1) * pitch + n)});
        for (int part = 0; part < C::parts; ++part) v[part][i] = pairs.part[part];
      }
      for (int part = 0; part < C::parts; ++part) {
        transpose<uint32_t>(v[part]);
        uint32_t* turned = out + n * out_pitch + part * part_step<C::parts>(out_pitch) + m / 2;
        TXL_UNROLL
        for (int i = 0; i < W; ++i) store(turned + i * out_pitch, v[part][i]);
      }
    }
}

}  // namespace txl::TXL_LEVEL

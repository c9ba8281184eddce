// x w^T + bias for a few rows of x, as in generation. Every weight is read once, and the speed of memory is
// the limit: torch's product of a matrix and a vector uses one core, and not all of that.
#pragma once

#include "work.h"

namespace txl::TXL_LEVEL {

template <class S>
class LinearKernel {
  using T = decltype(to_float(S{}));
  static constexpr int W = kLanes<T>;
  // Outputs at once, of rows of w far apart: memory is faster when it is read in a few places in turns.
  static constexpr int kOutputs = 4, kRowsAtOnce = kVectorBytes == 64 ? 4 : 2;
  static constexpr int64_t kItems = 16, kItemBytes = 1 << 16;

 public:
  LinearKernel(const Linear& tensors, const Pool& pool) : t_(tensors), pool_(pool) {}

  void run() {
    const int64_t items =
        max(1, min(kItems, t_.outputs * t_.depth * static_cast<int64_t>(sizeof(S)) / kItemBytes));
    parallel_items(pool_, items, [&](int64_t item, int) {
      const int64_t lo = t_.outputs * item / items, hi = t_.outputs * (item + 1) / items;
      const int64_t apart = (hi - lo) / kOutputs;
      for (int64_t n = lo; n < lo + apart; ++n) dots<kOutputs>(n, apart);
      for (int64_t n = lo + kOutputs * apart; n < hi; ++n) dots<1>(n, 0);
    });
  }

 private:
  // Outputs n, n + apart, ... of all rows.
  template <int kN>
  void dots(int64_t n, int64_t apart) const {
    in_groups<kRowsAtOnce>(t_.rows, [&](int64_t m, auto km) {
      constexpr int kM = decltype(km)::value;
      const S* x = static_cast<const S*>(t_.x) + m * t_.depth;
      const S* w = static_cast<const S*>(t_.w) + n * t_.w_row;
      Vec<T> acc[kM][kN] = {};
      const int64_t whole = t_.depth / W * W;
      const int tail = static_cast<int>(t_.depth - whole);
      for (int64_t d = 0; d < whole; d += W)
        add<kM, kN>(
            acc, [&](int i) { return load_as_float(x + i * t_.depth + d); },
            [&](int i) { return load_as_float(w + i * apart * t_.w_row + d); });
      if (tail)
        add<kM, kN>(
            acc, [&](int i) { return load_some(x + i * t_.depth + whole, tail); },
            [&](int i) { return load_some(w + i * apart * t_.w_row + whole, tail); });
      for (int i = 0; i < kM; ++i)
        for (int j = 0; j < kN; ++j) {
          const int64_t at = n + j * apart;
          const T bias = t_.bias ? to_float(static_cast<const S*>(t_.bias)[at]) : T{};
          store_as(static_cast<S*>(t_.out) + (m + i) * t_.outputs + at, horizontal_sum<T>(acc[i][j]) + bias);
        }
    });
  }

  template <int kM, int kN, class X, class Weights>
  static TXL_INLINE void add(Vec<T> (&acc)[kM][kN], X x, Weights w) {
    Vec<T> weights[kN];
    TXL_UNROLL
    for (int j = 0; j < kN; ++j) weights[j] = w(j);
    TXL_UNROLL
    for (int i = 0; i < kM; ++i) {
      const Vec<T> row = x(i);
      TXL_UNROLL
      for (int j = 0; j < kN; ++j) acc[i][j] += row * weights[j];
    }
  }

  const Linear& t_;
  const Pool& pool_;
};

}  // namespace txl::TXL_LEVEL

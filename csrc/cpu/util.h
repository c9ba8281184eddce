// Small things that every kernel uses: whole numbers, ranges, sizes as types.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vec.h"

namespace txl::TXL_LEVEL {

template <int N>
using Size = std::integral_constant<int, N>;

// f(Size<n>) for a run-time n in [1, kMax].
template <int kMax, class F>
TXL_INLINE void with_size(int64_t n, F&& f) {
  if constexpr (kMax > 1) {
    if (n < kMax) return with_size<kMax - 1>(n, f);
  }
  f(Size<kMax>{});
}

TXL_INLINE int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
TXL_INLINE int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
TXL_INLINE int64_t floor_to(int64_t n, int64_t to) { return n - ((n % to) + to) % to; }
TXL_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
TXL_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// f(start, Size<n>) over [0, total) in groups of at most kMax that differ by at most one: no small group is
// left over.
template <int kMax, class F>
TXL_INLINE void in_groups(int64_t total, F&& f) {
  const int64_t groups = ceil_div(total, kMax);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = total * g / groups, end = total * (g + 1) / groups;
    with_size<kMax>(end - start, [&](auto size) { f(start, size); });
  }
}

template <typename T>
TXL_INLINE void zero(T* x, int64_t count) {
  memset(x, 0, static_cast<size_t>(count) * sizeof(T));
}

TXL_INLINE Range intersect(Range a, Range b) { return {max(a.lo, b.lo), min(a.hi, b.hi)}; }
// A range counted from `start`.
TXL_INLINE Range shifted(Range range, int64_t start) { return {range.lo - start, range.hi - start}; }

}  // namespace txl::TXL_LEVEL

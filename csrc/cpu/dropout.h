// Dropout of a tensor's elements, with ReLU before it if wanted. Nobody keeps a mask: the seed gives it
// again.
#pragma once

#include "dropout_mask.h"
#include "work.h"

namespace txl::TXL_LEVEL {

template <class S>
class ElementDropout {
  using T = decltype(to_float(S{}));
  static constexpr int64_t kItem = 1 << 14;  // elements, a multiple of a group

 public:
  ElementDropout(const Elements& tensors, const Pool& pool)
      : t_(tensors),
        pool_(pool),
        threshold_(DropoutMask::threshold(t_.p)),
        factor_(static_cast<T>(1 / (1 - t_.p))) {}

  void run() {
    parallel_items(pool_, ceil_div(t_.count, kItem), [&](int64_t item, int) {
      const int64_t end = min((item + 1) * kItem, t_.count);
      for (int64_t at = item * kItem; at < end; at += DropoutMask::kGroup)
        t_.gate ? group<true>(at, min(end - at, DropoutMask::kGroup))
                : group<false>(at, min(end - at, DropoutMask::kGroup));
    });
  }

 private:
  // Element n is dropped as the probability of key n of the first query of the first head is.
  template <bool gated>
  void group(int64_t at, int64_t count) const {
    uint32_t word[DropoutMask::kGroup];
    dropout_words(t_.seed, 0, 0, 0, at / DropoutMask::kGroup, word);
    const S *x = static_cast<const S*>(t_.x) + at, *gate = static_cast<const S*>(t_.gate) + at;
    S* out = static_cast<S*>(t_.out) + at;
    // Loops over arrays of our own, which become vectors: gates are shut as by a coin, and branches would
    // wait.
    T y[DropoutMask::kGroup] = {};
    for (int64_t n = 0; n < count; ++n) y[n] = to_float(x[n]) * factor_;
    for (int64_t n = 0; n < DropoutMask::kGroup; ++n) y[n] = word[n] < threshold_ ? T{} : y[n];
    if constexpr (gated) {
      T open[DropoutMask::kGroup] = {};
      for (int64_t n = 0; n < count; ++n) open[n] = to_float(gate[n]);
      for (int64_t n = 0; n < DropoutMask::kGroup; ++n) y[n] = open[n] <= 0 ? T{} : y[n];  // NaN passes
    }
    for (int64_t n = 0; n < count; ++n) store_as(out + n, y[n]);
  }

  const Elements& t_;
  const Pool& pool_;
  const uint32_t threshold_;
  const T factor_;
};

}  // namespace txl::TXL_LEVEL

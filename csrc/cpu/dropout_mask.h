// Which probabilities dropout drops: philox.h's mask, some keys of one query at a time.
#pragma once

#include "util.h"

namespace txl::TXL_LEVEL {

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

// Zeroes what dropout takes away of the probabilities of these keys. x: that of key `first_key`, and of those
// behind it.
template <typename T>
static void drop(const Problem& p, int64_t b, int64_t h, int64_t i, Range keys, int64_t first_key, T* x) {
  uint32_t word[DropoutMask::kGroup];
  for (int64_t j = keys.lo; j < keys.hi;) {
    const int64_t group = j / DropoutMask::kGroup, start = group * DropoutMask::kGroup;
    const int64_t count = min(start + DropoutMask::kGroup, keys.hi) - j;
    dropout_words(static_cast<uint64_t>(*p.dropout_seed), b, h, i, group, word);
    const uint32_t* w = word + (j - start);
    T* y = x + (j - first_key);
    for (int64_t n = 0; n < count; ++n) y[n] = w[n] < p.dropout_threshold ? T{} : y[n];
    j += count;
  }
}

}  // namespace txl::TXL_LEVEL

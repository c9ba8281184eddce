// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the one
// definition of the dropout mask, the same on every backend:
//
//   key     = the two halves of the 64-bit seed
//   counter = ((j >> 6) * 16 + (j & 15),  i,  h,  b)
//   keep(b, h, i, j)  <=>  word[(j >> 4) & 3] >= threshold,   threshold = p * 2^32
//
// 64 neighbouring keys share 16 calls, and word w of those calls belongs to the w-th group of 16 neighbouring
// keys: a SIMD lane, or a thread that holds every other n8 tile of an mma fragment, uses all four words
// without a shuffle.
#pragma once

#include <cmath>
#include <cstdint>

#include "rel_attn.h"

namespace txl {

struct Philox {
  static constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  static constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
  static constexpr int kRounds = 10;

  // One counter word per `T`, so that T may be an integer or a SIMD vector of them; `mul` returns the low and
  // the high half of the 64-bit product of a word with a constant.
  template <typename T, typename Mul>
  static TXL_HD void rounds(T (&c)[4], uint32_t key0, uint32_t key1, Mul mul) {
    for (int round = 0; round < kRounds; ++round) {
      T lo0, hi0, lo1, hi1;
      mul(c[0], kMul0, lo0, hi0);
      mul(c[2], kMul1, lo1, hi1);
      const T c1 = c[1], c3 = c[3];
      c[0] = hi1 ^ c1 ^ key0;
      c[1] = lo1;
      c[2] = hi0 ^ c3 ^ key1;
      c[3] = lo0;
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
  }
};

struct DropoutMask {
  static constexpr int kGroup = 64;  // neighbouring keys that share their calls
  static constexpr int kCalls = 16;  // of a group

  static TXL_HD uint32_t threshold(double p) {
    const double t = std::nearbyint(p * 4294967296.0);
    return t >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(t);
  }
};

}  // namespace txl

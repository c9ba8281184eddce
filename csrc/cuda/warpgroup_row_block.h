// A RowBlock whose products warpgroups compute (wgmma, sm_90a): 64 rows of r to four warps, two warpgroups
// that share queries. dS^T lies in registers as for mma.sync.
#pragma once

#include "backward_dr.h"

namespace txl::cuda {

template <typename E, int kChannels>
struct WarpgroupRowBlock {
  using Element = E;
  static constexpr int kHead = kChannels, BM = 64, kWarps = kWarpgroupRows / 16;
  static constexpr bool kPanels = true;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");

  template <bool kMasked, int kHeadTiles, typename Tile, typename F>
  static TXL_DEVICE void add(float (&dr)[kHeadTiles][4], float (&sum)[4], Tile q_v, F slopes) {
    // What may have to be changed of queries must come to registers.
    if constexpr (kMasked) return RowBlock<E, kHead, BM>::template add<true>(dr, sum, q_v, slopes);
    constexpr int kSquares = BM / 16, kAtOnce = 2;
    Square<E> a[kSquares];
    settle(dr);
    TXL_UNROLL_GPU
    for (int first = 0; first < kSquares; first += kAtOnce) {
      // Some of dS is loaded while some is multiplied.
      TXL_UNROLL_GPU
      for (int n = first; n < first + kAtOnce; ++n) {
        a[n] = slopes(n);
        settle(a[n].part);
      }
      warpgroup_begin();
      TXL_UNROLL_GPU
      for (int n = first; n < first + kAtOnce; ++n)
        warpgroup_mma<E, true, true>(dr, a[n].part[0].r, q_v.rows(16 * n));
      warpgroup_commit();
      TXL_UNROLL_GPU
      for (int n = first; n < first + kAtOnce; ++n) add_sum(sum, a[n]);
    }
    warpgroup_wait<0>();
    settle(dr), settle(a);
  }
};

// It would have a few registers too many for a second.
template <typename E>
constexpr int kLeastBlocks<DrKernel<WarpgroupRowBlock<E, 128>>> = 2;

}  // namespace txl::cuda

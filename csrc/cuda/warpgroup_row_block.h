// A RowBlock whose products warpgroups compute (wgmma, sm_90a): 64 rows of r to four warps, two warpgroups
// that share queries. dS^T lies in registers as for mma.sync.
#pragma once

#include "backward_dr.h"
#include "copy_engine.h"

namespace txl::cuda {

// With what the copy engine is told of q + v.
struct BoxedRowParams : BackwardParams {
  TensorMap q_v_map;
};

template <typename E, int kChannels>
struct WarpgroupRowBlock {
  using Params = BoxedRowParams;
  using Element = E;
  static constexpr int kHead = kChannels, BM = 64, kWarps = kWarpgroupRows / 16;
  static constexpr bool kPanels = true;
  static constexpr int kSlots = kHead <= 64 ? 4 : 3;  // shared memory has room for two such blocks
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");

  // Shared memory: eight rows of 128 bytes of ones, an mbarrier for each slot.
  static constexpr uint32_t kOnesBytes = 1024, kOwnBytes = kOnesBytes + (kSlots + 1) / 2 * 16;

  // at: of the shared memory that is its own.
  TXL_DEVICE void begin_copies(uint32_t at) {
    own = at;
    for (int n = thread_index(); n < static_cast<int>(kOnesBytes) / 4; n += 32 * kWarps)
      store_shared(own + static_cast<uint32_t>(n) * 4, ones<E>());
    make_mbarriers(mbarrier(0), kSlots, first_warp);  // and a fence; all meet before the first copy
  }
  template <typename Tile>
  TXL_DEVICE void copy(Tile to, const Params& params, int i0, int h, int b, uint32_t slot) const {
    tell_engine(first_warp, mbarrier(slot),
                [&] { copy_panels(to, params.q_v_map, i0, h, b, mbarrier(slot)); });
  }
  TXL_DEVICE void wait(uint32_t slot) {
    mbarrier_wait(mbarrier(slot), parities >> slot & 1);
    parities ^= 1u << slot;
  }

  template <bool kMasked, int kHeadTiles, typename Tile, typename F>
  TXL_DEVICE void add(float (&dr)[kHeadTiles][4], float (&sum)[1][4], Tile q_v, F slopes) const {
    // What may have to be changed of queries must come to registers.
    if constexpr (kMasked) {
      RowBlock<E, kHead, BM>::template add<true>(dr, sum, q_v, slopes);
      fence_async_proxy();  // the copy engine may write where they were
      return;
    }
    constexpr int kSquares = BM / 16, kAtOnce = 2;
    Square<E> a[kSquares];
    const uint64_t of_ones = Panels<E, 64, 8>{own}.columns(0);
    settle(dr), settle(sum);
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
      for (int n = first; n < first + kAtOnce; ++n) {
        warpgroup_mma<E, true, true>(dr, a[n].part[0].r, q_v.rows(16 * n));
        warpgroup_mma<E, false, true>(sum, a[n].part[0].r, of_ones);
      }
      warpgroup_commit();
    }
    warpgroup_wait<0>();
    settle(dr), settle(sum), settle(a);
  }

 private:
  uint32_t own;
  bool first_warp = is_first_warp();
  uint32_t parities = 0;  // of the mbarriers' phases that are under way, a bit for each slot

  TXL_DEVICE uint32_t mbarrier(uint32_t slot) const { return own + kOnesBytes + slot * 8; }
};

// It would have a few registers too many for a second.
template <typename E>
constexpr int kLeastBlocks<DrKernel<WarpgroupRowBlock<E, 128>>> = 2;

}  // namespace txl::cuda

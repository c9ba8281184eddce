// A KeyBlock whose products warpgroups compute (wgmma, sm_90a): 64 keys to four warps, two warpgroups that
// share queries and the band. Accumulators lie in registers as those of mma.sync, so what is done with them
// is the same.
//
// Both warpgroups have all 64 queries of the band, and half of its columns each. They have the queries in
// such an order that a warp's eight rows which registers hold side by side are queries eight apart: written
// eight apart and read as neighbours, moved, both begin in different banks (key_block.h: BandOfTile).
#pragma once

#include "key_block.h"

namespace txl::cuda {

template <typename E, int kHead>
struct WarpgroupKeyBlock : KeyBlock<E, kHead, kWarpgroupKeys, 64, 8, false, true> {
  using Base = typename WarpgroupKeyBlock::KeyBlock;
  using Base::BM, Base::BN, Base::kSteps, Base::kOwnTiles, Base::kTogether, Base::mask;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");
  static constexpr int kGroups = BN / 64;

  TXL_DEVICE explicit WarpgroupKeyBlock(const BackwardParams& x)
      : Base(x),
        group(uniform(warp() / 4)),
        own(query_tiles<BM, 64>(x.p, x.chunk, {mask.lo, mask.hi}, this->j0 + 64 * group)) {}

  // Those of the warpgroup's own keys, not the block's.
  TXL_DEVICE bool is_hidden(int i0) const { return (i0 < own.begin) | (i0 >= own.end); }
  TXL_DEVICE bool is_masked(int i0) const { return (i0 < own.far_last) | (i0 >= own.all_hi); }

  TXL_DEVICE void copy_position(int i0) const {
    this->copier.template copy<BM>(this->q_v(), 0, this->q_v_rows, false, 0,
                                   [&](int n) { return mask.query(i0 + query_of_row(n)); });
    this->copy_new_rows(i0);
  }
  // Of the tile's queries, row n of q + v.
  static TXL_DEVICE int query_of_row(int n) { return eight_apart(n); }

  // The first warpgroup has the first chunk of columns and half of the second, the other one the rest.
  TXL_DEVICE void take_band(int i0) const {
    static_assert(kGroups == 2 && Base::kChunks == 3, "three chunks of columns to two warpgroups");
    const auto rows = [&](int chunk) { return this->ring(Base::ring_chunk(i0, chunk)); };
    const int query = opaque(query_of_row(warp() % 4 * 16 + lane() / 4));
    float half[4][4], whole[8][4];
    warpgroup_begin();
    start(half, this->q_v(), 0, rows(1), 32 * group);
    warpgroup_commit();
    start(whole, this->q_v(), 0, rows(2 * group), 0);
    warpgroup_commit();
    warpgroup_wait<1>();
    settle(half);
    this->band().write(half, query, 1, [&](int n) { return BM + 32 * group + 8 * n; });
    warpgroup_wait<0>();
    settle(whole);
    this->band().write(whole, query, 1, [&](int n) { return 2 * BM * group + 8 * n; });
  }

  template <typename F>
  TXL_DEVICE void take_scores(float (&score)[kTogether][4], float (&dp)[kTogether][4], int first,
                              F begin) const {
    warpgroup_begin();
    start(dp, this->v_tile(), 64 * group, this->dout(), 8 * first);
    warpgroup_commit();
    begin();  // while it is computed
    settle(score);
    warpgroup_begin();
    start<true>(score, this->k_tile(), 64 * group, this->q_u(), 8 * first);
    warpgroup_commit();
    warpgroup_wait<0>();
    settle(score), settle(dp);
  }

  template <bool kMasked, typename F, typename G, typename H>
  TXL_DEVICE void add_gradients(float (&dk)[kOwnTiles][4], float (&dv)[kOwnTiles][4],
                                const float (&weight)[kTogether][4], const float (&ds)[kTogether][4],
                                int first, F sees, G make, H put) const {
    // Of long rows there are two squares only: all of them at once.
    constexpr int kSquares = kTogether / 2, kAtOnce = 2;
    Square<E> of_weight[kSquares], of_ds[kSquares];
    settle(dk), settle(dv);
    // Some are made while others are multiplied.
    TXL_UNROLL_GPU
    for (int first_square = 0; first_square < kSquares; first_square += kAtOnce) {
      TXL_UNROLL_GPU
      for (int n = first_square; n < first_square + kAtOnce; ++n) {
        make(2 * n), make(2 * n + 1);
        of_weight[n] = Square<E>::of(weight[2 * n], weight[2 * n + 1]);
        of_ds[n] = Square<E>::of(ds[2 * n], ds[2 * n + 1]);
        settle(of_weight[n].part), settle(of_ds[n].part);
      }
      if constexpr (kMasked) continue;
      warpgroup_begin();
      TXL_UNROLL_GPU
      for (int n = first_square; n < first_square + kAtOnce; ++n) {
        warpgroup_mma<E, true, true>(dv, of_weight[n].part[0].r, this->dout().rows(8 * first + 16 * n));
        warpgroup_mma<E, true, true>(dk, of_ds[n].part[0].r, this->q_u().rows(8 * first + 16 * n));
      }
      warpgroup_commit();
    }
    TXL_UNROLL_GPU
    for (int n = 0; n < kSquares; ++n) {
      if constexpr (kMasked) {  // what may have to be changed of queries must come to registers
        Base::template add_values<true>(dv, of_weight[n], first + 2 * n,
                                        [&](int m, int x) { return sees(2 * n + m, x); });
        add_rows<true>(dk, of_ds[n], this->q_u(), 8 * first + 16 * n, 0);
      }
      put(2 * n, of_ds[n]);
    }
    if constexpr (kMasked) return;
    warpgroup_wait<0>();
    settle(dk), settle(dv);
    settle(of_weight), settle(of_ds);
  }

 private:
  int group;       // the warp's
  QueryTiles own;  // of its keys

  // acc = rows of a from `row_a` on by rows of b from `row_b` on, kAdd: += of it.
  template <bool kAdd = false, int kTiles, typename A, typename B>
  static TXL_DEVICE void start(float (&acc)[kTiles][4], A a, int row_a, B b, int row_b) {
    warpgroup_mma<E, kAdd>(acc, a.columns(0, row_a), b.columns(0, row_b));
    TXL_UNROLL_GPU
    for (int d = 1; d < kSteps; ++d) warpgroup_mma<E, true>(acc, a.columns(d, row_a), b.columns(d, row_b));
  }
};

}  // namespace txl::cuda

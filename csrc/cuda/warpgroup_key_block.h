// A KeyBlock whose products warpgroups compute (wgmma, sm_90a): 64 keys to four warps, two warpgroups that
// share queries and the band. Accumulators lie in registers as those of mma.sync, so what is done with them
// is the same.
//
// Both warpgroups have all 64 queries of the band, and half of its columns each. They have the queries in
// such an order that a warp's eight rows which registers hold side by side are queries eight apart: written
// eight apart and read as neighbours, moved, both begin in different banks (key_block.h: BandOfTile).
#pragma once

#include "copy_engine.h"
#include "key_block.h"

namespace txl::cuda {

// With what the copy engine is told: q + v, of which a box has eight rows eight apart, then the next of each
// (eight_apart); and the chunk's dS, which it brings to memory.
struct BoxedKeyParams : BackwardParams {
  TensorMap q_u_map, q_v_map, dout_map, r_map, slopes_map;
};

template <typename E, int kHead>
struct WarpgroupKeyBlock : KeyBlock<E, kHead, kWarpgroupKeys, 64, 8, false, true> {
  using Base = typename WarpgroupKeyBlock::KeyBlock;
  using Base::BM, Base::BN, Base::kSteps, Base::kOwnTiles, Base::kTogether, Base::mask;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");
  using Params = BoxedKeyParams;
  using Tile = typename Base::template Tile<BM>;
  static constexpr int kGroups = BN / 64;

  // Behind the rest of shared memory: each warp's dS of the queries that are done together, and two
  // mbarriers.
  static constexpr int kSlopesRows = 8 * kTogether;
  static constexpr uint32_t kSlopesBytes = kSlopesRows * 32, kSlopesAt = Base::kEnd;
  static constexpr uint32_t kMbarriersAt = kSlopesAt + BN / 16 * kSlopesBytes;
  static constexpr uint32_t kSharedBytes = Base::kSharedBytes + (kMbarriersAt - Base::kEnd) + 16;
  static_assert(kSlopesAt % 256 == 0, "where boxes of 16 channels begin");

  TXL_DEVICE explicit WarpgroupKeyBlock(const BoxedKeyParams& x)
      : Base(x),
        boxed(x),
        group(uniform(warp() / 4)),
        own(query_tiles<BM, 64>(x.p, x.chunk, {mask.lo, mask.hi}, this->j0 + 64 * group)) {}

  // Those of the warpgroup's own keys, not the block's.
  TXL_DEVICE bool is_hidden(int i0) const { return own.is_hidden(i0); }
  TXL_DEVICE bool is_masked(int i0) const { return own.is_masked(i0); }

  // The block's far tiles end it too: of these there is no band.
  TXL_DEVICE int end_of_near(int i0) const { return smaller(this->bounds.next_far(i0), own.all_hi); }

  TXL_DEVICE void begin_copies() {
    make_mbarriers(of_position(), 2, first_warp);
    sync_threads();
    by_threads = true;  // keys and values will be copied
  }

  // Where there are two slots for queries, they come with what the band needs, a tile ahead. Rows of r that
  // are repeated are copied by all threads. Rows that r has not are zeros, where no pair is
  // clamped: then none that is seen uses them.
  TXL_DEVICE void copy_position(int i0) {
    const bool near = !this->is_far(i0);
    const auto by_engine = [&](int c) { return !this->params.clamps || has_rows(this->p, c, BM); };
    tell_engine(first_warp, of_position(), [&] {
      if (near) {
        copy_panels(this->q_v(), boxed.q_v_map, i0 / 8, 0, this->b * static_cast<int>(this->p.H) + this->h,
                    of_position());
        this->for_new_rows(i0, [&](Tile to, int c) {
          if (by_engine(c)) copy_panels(to, boxed.r_map, c, this->h, 0, of_position());
        });
      }
      if constexpr (kAhead) copy_boxes_of_queries(i0, of_position());
    });
    if constexpr (kAhead) this->copy_statistics(i0, slot_of(i0)), commit_copies();
    if (!near || !this->params.clamps) return;
    this->for_new_rows(i0, [&](Tile to, int c) {
      if (by_engine(c)) return;
      copy_rows_of_r<BM>(to, this->copier, this->r_rows, c);
      by_threads = true;
    });
  }
  TXL_DEVICE void wait_position() {
    mbarrier_wait(of_position(), parity);
    if constexpr (kAhead) parity ^= 1, wait_copies<0>();
    if (by_threads) commit_copies(), wait_copies<0>(), fence_async_proxy();
    by_threads = false;
    sync_threads();
  }

  TXL_DEVICE void copy_queries(int i0) const {
    if constexpr (kAhead) return;
    tell_engine(first_warp, of_queries(), [&] { copy_boxes_of_queries(i0, of_queries()); });
    this->copy_statistics(i0, 0);
    commit_copies();
  }
  TXL_DEVICE void wait_queries(int i0) {
    this->slot = slot_of(i0);
    if constexpr (!kAhead) {
      mbarrier_wait(of_queries(), parity), parity ^= 1;
      wait_copies<0>();
    }
    sync_threads();
  }

  // Of the tile's queries, row n of q + v.
  static TXL_DEVICE int query_of_row(int n) { return eight_apart(n); }

  // The first warpgroup has the first tile of columns and half of the second, the other one the rest.
  TXL_DEVICE void take_band(int i0) const {
    static_assert(kGroups == 2 && Base::kBandTiles == 3, "three tiles of columns to two warpgroups");
    const auto rows = [&](int tile) { return this->ring(Base::ring_tile(i0, tile)); };
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

  template <bool kMasked, bool kGoesOn, typename F, typename G, typename H>
  TXL_DEVICE void add_gradients(float (&dk)[kOwnTiles][4], float (&dv)[kOwnTiles][4],
                                const float (&weight)[kTogether][4], const float (&ds)[kTogether][4],
                                int first, F sees, G make, H put) const {
    // Of long rows there are two squares only: all of them at once.
    constexpr int kSquares = kTogether / 2, kAtOnce = 2;
    Square<E> of_weight[kSquares], of_ds[kSquares];
    // Else sums are the tensor cores' from tile to tile; but the next queries may not come to where they
    // read.
    constexpr bool kFinish = !kGoesOn || !kAhead;
    if constexpr (kFinish) settle(dk), settle(dv);
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
    if constexpr (kMasked) {
      fence_async_proxy();  // the copy engine may write where they were
      return;
    }
    if constexpr (kFinish) wait_gradients(dk, dv);
    settle(of_weight), settle(of_ds);
  }
  static TXL_DEVICE void wait_gradients(float (&dk)[kOwnTiles][4], float (&dv)[kOwnTiles][4]) {
    warpgroup_wait<0>();
    settle(dk), settle(dv);
  }

  // A warp's dS is turned on its way to a place of its own, from where the copy engine takes it on. The
  // lane's address for store_matrix_x4_trans:
  TXL_DEVICE uint32_t begin_slopes(int) const {
    const Corner corner = corner_b();
    return slopes_place() + static_cast<uint32_t>(32 * corner.row + 16 * (corner.piece ^ corner.row / 4 % 2));
  }
  static TXL_DEVICE void put_slopes(uint32_t to, int n, const Square<E>& a) {
    if (n == 0) wait_stored(), sync_warp();
    store_matrix_x4_trans(to + static_cast<uint32_t>(n) * 8 * 32, a.part[0].r);
  }
  TXL_DEVICE void send_slopes(int i) const {
    const Chunk& chunk = this->params.chunk;
    fence_async_proxy();
    sync_warp();
    store_box(boxed.slopes_map, this->j0 + this->own_key, i - chunk.lo, this->h - chunk.h, this->b - chunk.b,
              slopes_place());
  }
  static TXL_DEVICE void wait_slopes() { wait_stored(); }

 private:
  const BoxedKeyParams& boxed;
  int group;        // the warp's
  TileBounds own;   // of its keys
  bool by_threads;  // whether they have copied some of what wait_position waits for
  bool first_warp = is_first_warp();
  uint32_t parity = 0;  // of the phases of the mbarriers that are under way

  static constexpr bool kAhead = Base::kSlots == 2;
  static TXL_DEVICE uint32_t slot_of(int i0) { return kAhead ? static_cast<uint32_t>(i0) / BM % 2 : 0; }

  TXL_DEVICE void copy_boxes_of_queries(int i0, uint32_t mbarrier) const {
    copy_panels(this->q_u(slot_of(i0)), boxed.q_u_map, i0, this->h, this->b, mbarrier);
    copy_panels(this->dout(slot_of(i0)), boxed.dout_map, i0, this->h, this->b, mbarrier);
  }

  TXL_DEVICE uint32_t slopes_place() const {
    return this->base + kSlopesAt + static_cast<uint32_t>(this->own_key) * (kSlopesBytes / 16);
  }

  TXL_DEVICE uint32_t of_position() const { return this->base + kMbarriersAt; }
  TXL_DEVICE uint32_t of_queries() const { return of_position() + 8; }

  // acc = rows of a from `row_a` on by rows of b from `row_b` on, kAdd: += of it.
  template <bool kAdd = false, int kTiles, typename A, typename B>
  static TXL_DEVICE void start(float (&acc)[kTiles][4], A a, int row_a, B b, int row_b) {
    warpgroup_mma<E, kAdd>(acc, a.columns(0, row_a), b.columns(0, row_b));
    TXL_UNROLL_GPU
    for (int d = 1; d < kSteps; ++d) warpgroup_mma<E, true>(acc, a.columns(d, row_a), b.columns(d, row_b));
  }
};

}  // namespace txl::cuda

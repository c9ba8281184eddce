// A QueryBlock whose products warpgroups compute (wgmma, sm_90a): 64 queries to four warps, operands from
// panels in shared memory. Accumulators lie in registers as those of mma.sync, so what is done with them is
// the same.
//
// The band. The 64 queries of a warpgroup share their rows of r: of every tile they have the same 64 new
// columns of the band, and a warp, whose own window is 80 columns, needs some of those for its next tile
// only. So the columns stay in registers until the next tile has come; of both tiles a warp writes what lies
// in its window. While it writes the new ones, the tensor cores compute the scores' other part.
#pragma once

#include "copy_engine.h"
#include "query_block.h"

namespace txl::cuda {

// With what the copy engine is told of k, v and r; boxes: whether it can copy them.
struct BoxedForward : Forward {
  TensorMap k_map, v_map, r_map;
  bool boxes;
};

// Long rows leave room for one block on a multiprocessor, which then has two warpgroups, and registers for
// one operand of two.
template <typename E, int kHead>
struct WarpgroupBlock : QueryBlock<E, kHead, 64, (kHead <= 64 ? 4 : 8), 2, (kHead <= 64 ? 2 : 1), true> {
  using Base = typename WarpgroupBlock::QueryBlock;
  using Base::BM, Base::BN, Base::kSteps, Base::kKeyTiles, Base::kHeadTiles, Base::held;
  using Tile = typename Base::template Tile<BN>;
  using ForwardTensors = BoxedForward;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");
  static_assert(BN == kBoxRows, "a box is a panel of a tile");
  static constexpr int kGroups = BM / 64;

  static constexpr uint32_t kSharedBytes = Base::kSharedBytes + 8;  // with the mbarrier

  TXL_DEVICE WarpgroupBlock(const Problem& p, const BoxedForward& t, const typename Base::Place& place)
      : Base(p, t, place), boxed(t) {}

  TXL_DEVICE void begin_copies() const {
    if (elected()) mbarrier_init(mbarrier(), 1);
    fence_async_proxy();  // also of the far terms' rows of r, which lay where tiles will
    sync_threads();
  }

  // As QueryBlock's, but where the copy engine can, one thread tells it what to copy. It does not know which
  // keys a batch entry has: those it has not are in masked tiles, where what they hold does not matter. Rows
  // of r that are repeated are copied by all threads.
  TXL_DEVICE void copy_tile(int j0) {
    by_engine = boxed.boxes, by_threads = !by_engine;
    if (!by_engine) return Base::copy_tile(j0);
    if (elected()) {
      copy_panels(this->k_tile(j0), boxed.k_map, j0, this->b);
      this->for_new_rows(j0, [&](Tile to, int c) {
        if (has_rows(this->p, c, BN)) copy_panels(to, boxed.r_map, c, 0);
      });
      copy_panels(this->v_tile(j0), boxed.v_map, j0, this->b);
      mbarrier_arrive(mbarrier());  // the last: the phase may not end before all boxes are counted
    }
    if (has_rows(this->p, this->lowest_row(j0), Base::kChunks * BN)) return;
    this->for_new_rows(j0, [&](Tile to, int c) {
      if (!has_rows(this->p, c, BN)) this->copy_positions(to, c), by_threads = true;
    });
    if (by_threads) commit_copies();
  }

  TXL_DEVICE void wait_tile() {
    if (by_engine) mbarrier_wait(mbarrier(), parity), parity ^= 1;
    if (by_threads) wait_copies<0>(), fence_async_proxy();
    sync_threads();
  }

  TXL_DEVICE void take_scores(float (&score)[kKeyTiles][4], int j0) {
    const int group = kGroups == 1 ? 0 : uniform(warp() / 4), in_group = opaque(warp()) % 4;
    // The warp's window begins in this chunk of the block's band, at this column.
    const int first = kGroups - 1 - group, left = 48 - 16 * in_group;
    const auto r = [&](int chunk) -> Tile { return this->ring(this->ring_chunk(j0, first + chunk)); };
    if (!this->follows_band(j0)) {
      with_q_v([&](auto& q_v) {
        start<false>(columns, q_v, r(0));
        warpgroup_wait<0>();
        settle(columns), settle(q_v);
      });
    }
    const uint32_t own = this->band_of_lane(), moved = own - static_cast<uint32_t>(left) * 4;
    sync_warp();  // what the tile before has left here was read
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      if (8 * n >= left) this->write_band(moved + 32 * n, columns[n]);
    with_q_v([&](auto& q_v) {
      start<false>(columns, q_v, r(1));
      start<false>(score, held[0], this->k_tile(j0));
      warpgroup_wait<1>();  // the scores are computed while the columns are written
      settle(columns), settle(q_v);
    });
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      if (8 * n < 16 + left) this->write_band(moved + 256 + 32 * n, columns[n]);
    finish(score);
    this->read_band(own, [&](int n, int x, float band) { score[n][x] += band; });
  }

  TXL_DEVICE void add_keys(float (&score)[kKeyTiles][4], int j0) {
    start<true>(score, held[0], this->k_tile(j0));
    finish(score);
  }

  template <bool kMasked, typename F>
  TXL_DEVICE void add_values(float (&acc)[kHeadTiles][4], const float (&weight)[kKeyTiles][4], int j0,
                             F sees) {
    if constexpr (kMasked) {  // values that may have to be changed must come to registers
      Base::template add_values<true>(acc, weight, j0, sees);
      fence_async_proxy();  // the copy engine may write where they were
    } else {
      Fragment a[kKeyTiles / 2];
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles / 2; ++n) a[n] = Square<E>::of(weight[2 * n], weight[2 * n + 1]).part[0];
      settle(acc), settle(a);
      warpgroup_begin();
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles / 2; ++n)
        warpgroup_mma<E, true, true>(acc, a[n].r, this->v_tile(j0).rows(16 * n));
      warpgroup_commit();
      warpgroup_wait<0>();
      settle(acc), settle(a);
    }
  }

 private:
  const BoxedForward& boxed;
  float columns[kKeyTiles][4];  // of the band, of the tile before
  bool by_engine, by_threads;   // who copies the tile that is under way; some tiles both
  uint32_t parity = 0;          // of the mbarrier's phase that ends when the engine has

  TXL_DEVICE uint32_t mbarrier() const { return this->base + Base::kUsed; }

  TXL_DEVICE void copy_panels(Tile to, const TensorMap& map, int row, int batch) const {
    TXL_UNROLL_GPU
    for (int n = 0; n < kHead / Tile::kChannelsOfPanel; ++n)
      copy_box(to.at(0, n * Tile::kChannelsOfPanel), map, n * Tile::kChannelsOfPanel, row, this->h, batch,
               mbarrier());
  }

  // f(q + v), which registers hold or shared memory.
  template <typename F>
  TXL_DEVICE void with_q_v(F f) {
    if constexpr (Base::kHeldOperands > 1) {
      f(held[1]);
    } else {
      Fragment q_v[kSteps];
      TXL_UNROLL_GPU
      for (int d = 0; d < kSteps; ++d) q_v[d] = this->load_query(1, d);
      f(q_v);
    }
  }

  // acc = query rows^T, kAdd: += of it.
  template <bool kAdd>
  static TXL_DEVICE void start(float (&acc)[kKeyTiles][4], Fragment (&query)[kSteps], Tile rows) {
    if constexpr (kAdd) settle(acc);
    settle(query);
    warpgroup_begin();
    warpgroup_mma<E, false, kAdd>(acc, query[0].r, rows.columns(0));
    TXL_UNROLL_GPU
    for (int d = 1; d < kSteps; ++d) warpgroup_mma<E, false, true>(acc, query[d].r, rows.columns(d));
    warpgroup_commit();
  }

  // A product with q + u.
  TXL_DEVICE void finish(float (&acc)[kKeyTiles][4]) {
    warpgroup_wait<0>();
    settle(acc), settle(held[0]);
  }

  // Before tensor cores take registers over, and after they have given them back, of which the compiler knows
  // nothing.
  template <int kTiles>
  static TXL_DEVICE void settle(float (&acc)[kTiles][4]) {
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; ++n)
      for (float& x : acc[n]) x = opaque(x);
  }
  template <int kFragments>
  static TXL_DEVICE void settle(Fragment (&a)[kFragments]) {
    TXL_UNROLL_GPU
    for (int n = 0; n < kFragments; ++n)
      for (uint32_t& x : a[n].r) x = opaque(x);
  }
};

}  // namespace txl::cuda

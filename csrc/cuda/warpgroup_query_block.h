// A QueryBlock whose products warpgroups compute (wgmma, sm_90a): 64 queries to four warps, operands from
// panels in shared memory. Accumulators lie in registers as those of mma.sync, so what is done with them is
// the same.
//
// The band. The 64 queries of a warpgroup share their rows of r: of every tile they have the same 64 new
// columns of the band, which a warp writes to its 16 rows of shared memory, where those of the tile before
// still are: column c at c modulo 128. While it writes them, the tensor cores compute the scores' other part.
//
// Which queries a warp has is chosen so that reading them moved costs nothing: a lane reads two columns at
// once, and half a warp from all banks. Its eight rows that registers hold side by side are queries eight
// apart, so eight neighbouring columns stay neighbours; and its two rows are neighbouring queries, of which
// the first one's columns are written one place to the left: all move by an even number then.
#pragma once

#include "copy_engine.h"
#include "forward.h"

namespace txl::cuda {

// With what the copy engine is told of k, v and r; boxes: whether it can copy them.
struct BoxedForwardParams : ForwardParams {
  TensorMap k_map, v_map, r_map;
  bool boxes;
};

// Short rows leave room for two blocks of a warpgroup each on a multiprocessor; long ones for two warpgroups
// that share keys and r.
template <typename E, int kHead>
struct WarpgroupQueryBlock : QueryBlock<E, kHead, 64, (kHead <= 64 ? 4 : 8), 2, 2, true> {
  using Params = BoxedForwardParams;
  using Base = typename WarpgroupQueryBlock::QueryBlock;
  using Base::BM, Base::BN, Base::kSteps, Base::kKeyTiles, Base::kHeadTiles, Base::held;
  using Base::i0, Base::mask, Base::bounds;
  using Tile = typename Base::template Tile<BN>;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");
  static_assert(BN == kBoxRows, "a box is a panel of a tile");
  static constexpr bool kEngine = true;
  static constexpr int kGroups = BM / 64;

  static constexpr uint32_t kSharedBytes = Base::kSharedBytes + 8;  // with the mbarrier

  TXL_DEVICE WarpgroupQueryBlock(const BoxedForwardParams& x, const typename Base::Place& place)
      : Base(x.p, x.t, place),
        boxed(x),
        group(kGroups == 1 ? 0 : uniform(warp() / 4)),
        own(i0 + 64 * group < x.p.L ? key_tiles<64, BN>(x.p, {mask.lo, mask.hi}, i0 + 64 * group)
                                    : TileBounds{}),
        band(first_eight()),
        // Query 63's columns are the tile's first, query i's begin 63 - i behind. The lane's first query has
        // them one place to the left (write_columns), and its second, the next one, begins there too.
        first_column(62 - query_of_row(warp() % 4 * 16 + lane() / 4) + lane() % 4 * 2) {}

  // Those of the warpgroup's own queries, not the block's.
  TXL_DEVICE bool is_hidden(int j0) const { return kGroups > 1 && own.is_hidden(j0); }
  TXL_DEVICE bool is_masked(int j0) const { return own.is_masked(j0); }
  // The block's far tiles end it too: of these there is no band.
  TXL_DEVICE int end_of_near(int j0) const { return smaller(bounds.next_far(j0), own.all_hi); }

  // Plain tiles follow one that has left its columns of the band here, and the engine alone copies them and
  // the next one. They have a loop without the tests of others, whose code is far apart, too. One warpgroup
  // may be in it while the other is not: what is copied and the barriers that are met are the same
  // (next_plain).
  TXL_DEVICE int end_of_plain(int j0, int end) const {
    // more: how far the highest row that the next tile's band needs is from the end of r.
    const int lowest = this->lowest_row(j0),
              more = static_cast<int>(this->p.N) - lowest - (Base::kBandTiles + 1) * BN;
    if (!boxed.boxes || lowest < 0 || is_first(j0)) return j0;
    return smaller(smaller(end, bounds.end - BN), j0 + more + 1);
  }

  // Of rows 0 to 7 the order is that in which half a warp's four rows of the band, moved, begin in banks of
  // their own as they do where they are written (tests/test_cuda_banks.py).
  static TXL_DEVICE int query_of_row(int row) {
    const uint32_t n = static_cast<uint32_t>(row), eights = (2 * n % 8 + n % 8 / 4) * 8;
    return static_cast<int>(n / 64 * 64 + eights + n / 16 % 4 * 2 + n / 8 % 2);
  }

  TXL_DEVICE void begin_copies() const {
    // Its fence is also for the far terms' rows of r, which lay where tiles will.
    make_mbarriers(mbarrier(), 1, first_warp);
    sync_threads();
  }

  // As QueryBlock's, but where the copy engine can, one thread tells it what to copy. It does not know which
  // keys a batch entry has: those it has not are in masked tiles, where what they hold does not matter. Rows
  // of r that are repeated are copied by all threads.
  TXL_DEVICE void copy_tile(int j0) {
    by_engine = boxed.boxes, by_threads = !by_engine;
    if (!by_engine) return Base::copy_tile(j0);
    copy_boxes(j0, [&] {
      this->for_new_rows(j0, [&](Tile to, int c) {
        if (has_rows(this->p, c, BN)) copy_panels(to, boxed.r_map, c, this->h, 0, mbarrier());
      });
    });
    if (has_rows(this->p, this->lowest_row(j0), Base::kBandTiles * BN)) return;
    this->for_new_rows(j0, [&](Tile to, int c) {
      if (has_rows(this->p, c, BN)) return;
      copy_rows_of_r<BN>(to, this->copier, this->r_rows, c);
      by_threads = true;
    });
    if (by_threads) commit_copies();
  }

  TXL_DEVICE void wait_tile() {
    if (by_engine) mbarrier_wait(mbarrier(), parity), parity ^= 1;
    if (by_threads) wait_copies<0>(), fence_async_proxy();
    sync_threads();
  }

  // Of a plain tile: until it is there for all; starts to copy the next one.
  TXL_DEVICE void next_plain(int j0) {
    mbarrier_wait(mbarrier(), parity), parity ^= 1;
    sync_threads();
    constexpr int kLast = Base::kBandTiles - 1;
    const int next = j0 + BN;
    copy_boxes(next, [&] {
      copy_panels(this->ring(this->ring_tile(next, kLast)), boxed.r_map, this->lowest_row(next) + kLast * BN,
                  this->h, 0, mbarrier());
    });
  }

  template <bool kPlain>
  TXL_DEVICE void take_scores(float (&score)[kKeyTiles][4], int j0) {
    // The warpgroup's columns begin with this tile of the block's.
    const int first = kGroups - 1 - group;
    const auto r = [&](int n) -> Tile { return this->ring(this->ring_tile(j0, first + n)); };
    float columns[kKeyTiles][4];
    sync_warp();  // what the tile before has left here was read
    if (!kPlain && is_first(j0)) {
      start<false>(columns, held[1], r(0));
      finish(columns, held[1]);
      write_columns(columns, j0);
    }
    start<false>(columns, held[1], r(1));
    start<false>(score, held[0], this->k_tile(j0));
    warpgroup_wait<1>();  // the scores are computed while the columns are written
    settle(columns), settle(held[1]);
    write_columns(columns, j0 + BN);
    finish(score, held[0]);
    sync_warp();
    add_columns(score, j0);
  }

  TXL_DEVICE void add_keys(float (&score)[kKeyTiles][4], int j0) {
    start<true>(score, held[0], this->k_tile(j0));
    finish(score, held[0]);
  }

  template <bool kMasked, typename F, typename G>
  TXL_DEVICE void add_values(float (&acc)[kHeadTiles][4], const float (&weight)[kKeyTiles][4], int j0, F sees,
                             G make) {
    if constexpr (kMasked) {  // values that may have to be changed must come to registers
      Base::template add_values<true>(acc, weight, j0, sees, make);
      fence_async_proxy();  // the copy engine may write where they were
    } else {
      // Of long rows half of the weights are made while the others are multiplied.
      constexpr int kTogether = kKeyTiles / (kHead <= 64 ? 2 : 4);
      Fragment a[kKeyTiles / 2];
      settle(acc);
      TXL_UNROLL_GPU
      for (int first = 0; first < kKeyTiles / 2; first += kTogether) {
        TXL_UNROLL_GPU
        for (int n = first; n < first + kTogether; ++n) {
          make(2 * n), make(2 * n + 1);
          a[n] = Square<E>::of(weight[2 * n], weight[2 * n + 1]).part[0];
          settle(a[n]);
        }
        warpgroup_begin();
        TXL_UNROLL_GPU
        for (int n = first; n < first + kTogether; ++n)
          warpgroup_mma<E, true, true>(acc, a[n].r, this->v_tile(j0).rows(16 * n));
        warpgroup_commit();
      }
      finish(acc, a);
    }
  }

 private:
  const BoxedForwardParams& boxed;
  int group;         // the warp's
  TileBounds own;    // of its queries
  uint32_t band;     // where the lane's part of the first eight columns is
  int first_column;  // of those that its queries see, two at once, for key 0
  bool first_warp = is_first_warp();
  bool by_engine, by_threads;  // who copies the tile that is under way; some tiles both
  uint32_t parity = 0;         // of the mbarrier's phase that ends when the engine has

  TXL_DEVICE uint32_t mbarrier() const { return this->base + Base::kUsed; }

  TXL_DEVICE uint32_t first_eight() const {
    const int row = opaque(lane()) / 4, column = opaque(lane()) % 4 * 2;
    return this->own_band().address + static_cast<uint32_t>(row * Base::kBandPitch + column) * 4;
  }

  // Whether no tile before has left columns of the band.
  TXL_DEVICE bool is_first(int j0) const { return (j0 == own.begin) | this->is_far(j0 - BN); }

  // Keys, values, and the new rows of r by copy_new_rows.
  template <typename F>
  TXL_DEVICE void copy_boxes(int j0, F copy_new_rows) const {
    tell_engine(first_warp, mbarrier(), [&] {
      copy_panels(this->k_tile(j0), boxed.k_map, j0, this->h, this->b, mbarrier());
      copy_new_rows();
      copy_panels(this->v_tile(j0), boxed.v_map, j0, this->h, this->b, mbarrier());
    });
  }

  // BN columns of the band: as key j0's are the first of a tile's for the warpgroup's last query.
  TXL_DEVICE void write_columns(const float (&columns)[kKeyTiles][4], int j0) const {
    const uint32_t half = static_cast<uint32_t>(j0) / BN % 2, to = band + half * BN * 4;
    // The first row's, one place to the left, go one by one; the upper half of a warp begins with the other
    // one of two, or both halves would meet the same half of the banks.
    const int l = opaque(lane());
    const bool upper = l >= 16, wraps = half == 0 && l % 4 == 0;
    const uint32_t one = upper ? to : to - 4, other = upper ? to - 4 : to, end = to + (2 * BN - 1) * 4;
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n) {
      const float (&x)[4] = columns[n];
      store_shared(n == 0 && wraps && !upper ? end : one + 32 * n, upper ? x[1] : x[0]);
      store_shared(n == 0 && wraps && upper ? end : other + 32 * n, upper ? x[0] : x[1]);
      store_shared(to + 8 * Base::kBandPitch * 4 + 32 * n, float2{x[2], x[3]});
    }
  }

  // score += what the lane's queries see of the band.
  TXL_DEVICE void add_columns(float (&score)[kKeyTiles][4], int j0) const {
    const int column = (j0 + first_column) & (2 * BN - 1);
    const uint32_t from = band + static_cast<uint32_t>(column - opaque(lane()) % 4 * 2) * 4;
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n) {
      const uint32_t at = (column + 8 * n < 2 * BN ? from : from - 2 * BN * 4) + 32 * n;
      for (int y = 0; y < 2; ++y) {
        const auto x = load_shared<float2>(at + static_cast<uint32_t>(8 * y * Base::kBandPitch * 4));
        score[n][2 * y] += x.x, score[n][2 * y + 1] += x.y;
      }
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

  template <int kTiles, int kFragments>
  static TXL_DEVICE void finish(float (&acc)[kTiles][4], Fragment (&a)[kFragments]) {
    warpgroup_wait<0>();
    settle(acc), settle(a);
  }
};

}  // namespace txl::cuda

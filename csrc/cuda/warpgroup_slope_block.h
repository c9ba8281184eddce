// A SlopeBlock whose products warpgroups compute (wgmma, sm_90a): 64 queries to four warps, two warpgroups
// that share keys and rows of r. dS comes to shared memory by whole lines; from there to registers, as A
// operand.
//
// The gradient of the band is read from there once more, moved: what belongs to a tile's 64 rows of r are for
// query y the keys 63 - y before it to y in it. So dS of the tile before stays, and no column is written.
//
// A warp's eight rows that registers hold side by side are queries eight apart: moved, each is read one piece
// of 16 bytes further than the one before.
#pragma once

#include "backward_dq.h"
#include "copy_engine.h"

namespace txl::cuda {

// With what the copy engine is told of k and r.
struct BoxedSlopeParams : BackwardParams {
  TensorMap k_map, r_map;
};

template <typename E, int kHead>
struct WarpgroupSlopeBlock : QueryBlock<E, kHead, 64, kWarpgroupQueries / 16, 0, 0, true> {
  using Base = typename WarpgroupSlopeBlock::QueryBlock;
  using Base::BM, Base::BN, Base::kHeadTiles, Base::i0, Base::mask, Base::is_far;
  using Tile = typename Base::template Tile<BN>;
  static_assert(kHead == 64 || kHead == 128, "sums of 64 or 128 channels");
  static constexpr int kGroups = BM / 64, kSquares = BN / 16;
  static constexpr int kNextQuery = 1;  // from a lane's first query to its second

  using Params = BoxedSlopeParams;

  static constexpr uint32_t kSharedBytes = Base::kSharedBytes + 8;  // with the mbarrier

  const BoxedSlopeParams& params;

  TXL_DEVICE WarpgroupSlopeBlock(const BoxedSlopeParams& x, const typename Base::Place& place)
      : Base(x.p, x.t, place),
        params(x),
        group(uniform(warp() / 4)),
        own(i0 + 64 * group < x.chunk.hi ? key_tiles<64, BN>(x.p, {mask.lo, mask.hi}, i0 + 64 * group)
                                         : TileBounds{}) {}

  // Those of the warpgroup's own queries, not the block's.
  TXL_DEVICE bool is_hidden(int j0) const { return own.is_hidden(j0); }
  TXL_DEVICE bool is_masked(int j0) const { return own.is_masked(j0); }
  TXL_DEVICE bool is_clamped(int j0) const { return !has_rows(this->p, lowest_own_row(j0), 64 + BN - 1); }
  TXL_DEVICE bool ends_band(int j0) const { return j0 + BN >= own.end || is_far(j0 + BN); }

  static TXL_DEVICE int query_of_row(int row) {
    const uint32_t n = static_cast<uint32_t>(row);
    return static_cast<int>(n / 64 * 64) + eight_apart(static_cast<int>(n % 64));
  }

  TXL_DEVICE void begin_copies() const {
    make_mbarriers(mbarrier(), 1, first_warp);
    sync_threads();
  }

  // Keys that a batch entry has not may hold anything, and rows that r has not are zeros: both are in tiles
  // that are checked. Of dS a thread has a piece of every 32nd row.
  TXL_DEVICE void copy_tile(int j0) const {
    tell_engine(first_warp, mbarrier(), [&] {
      copy_panels(this->k_tile(j0), params.k_map, j0, this->h, this->b, mbarrier());
      this->for_new_rows(j0,
                         [&](Tile to, int c) { copy_panels(to, params.r_map, c, this->h, 0, mbarrier()); });
    });
    constexpr int kRows = Base::kThreads / kPieces;
    const E* const slopes = params.template slopes<E>(
        opaque(this->b), opaque(this->h), i0 + query_of_row(copied_row()), copied_piece() * kPiece<E>);
    const uint32_t to = at(copied_row(), slot_of(j0), copied_piece() * 16);
    TXL_UNROLL_GPU
    for (int n = 0; n < BM; n += kRows) {
      const int query = query_of_row(n);  // more than the thread's first row's
      copy_async_16(to + static_cast<uint32_t>(n) * kSlopePitch,
                    slopes + query * params.w.chunks.columns + j0, query < 64 || i0 + 64 < params.chunk.hi);
    }
    commit_copies();
  }
  TXL_DEVICE void wait_tile() {
    mbarrier_wait(mbarrier(), parity), parity ^= 1;
    wait_copies<0>();
    sync_threads();
  }

  TXL_DEVICE void take_slopes(Square<E> (&ds)[kSquares], int j0) const {
    const Corner corner = corner_a();
    const int row = 16 * warp() + corner.row;
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      load_matrix_x4(ds[m].part[0].r, at(row, slot_of(j0), 32 * m + 16 * corner.piece));
  }

  template <bool kEdge>
  TXL_DEVICE void add_keys(float (&acc)[kHeadTiles][4], Square<E> (&ds)[kSquares], int j0) const {
    if constexpr (kEdge)
      add_checked(acc, ds, this->k_tile(j0));
    else
      settle(acc), start(acc, ds, this->k_tile(j0));
  }
  TXL_DEVICE void finish(float (&acc)[kHeadTiles][4], Square<E> (&a)[kSquares]) const {
    warpgroup_wait<0>();
    settle(acc), settle(a);
  }

  template <bool kEdge>
  TXL_DEVICE void add_band(float (&acc)[kHeadTiles][4], Square<E> (&ds)[kSquares], int j0) const {
    // The warpgroup's columns begin with this tile of the block's.
    const int first = kGroups - 1 - group;
    const auto r = [&](int n) -> Tile { return this->ring(this->ring_tile(j0, first + n)); };
    if constexpr (kEdge) {
      add_seen(acc, j0, r(0));
      // Of the next tile none is seen, or has a row of r of its own.
      if (ends_band(j0)) add_seen(acc, j0 + BN, r(1));
    } else {
      Square<E> band[kSquares];
      take_whole(band, j0);  // while keys are multiplied
      start(acc, band, r(0));
      finish(acc, band), settle(ds);
    }
  }

 private:
  // Shared memory, where the band of scores would lie: of every row 128 bytes of three tiles, the one to
  // come, the one that is multiplied, and the one before. In it the pieces of 16 bytes are moved on, from row
  // to row by two: eight rows lie in four different places, and in eight if each is read one piece further
  // than the one before. Both are read as often.
  static constexpr int kSlopeSlots = 3, kPieces = 8;
  static constexpr uint32_t kSlopePitch = kSlopeSlots * 128;
  static_assert(kSlopePitch == Base::kBandPitch * sizeof(E) && BN * sizeof(E) == 128, "room for dS");

  int group;       // the warp's
  TileBounds own;  // of its queries
  bool first_warp = is_first_warp();
  uint32_t parity = 0;  // of the mbarrier's phase that is under way

  TXL_DEVICE uint32_t mbarrier() const { return this->base + Base::kUsed; }

  static TXL_DEVICE uint32_t thread() { return static_cast<uint32_t>(opaque(thread_index())); }
  static TXL_DEVICE int copied_row() { return thread() / kPieces; }
  static TXL_DEVICE int copied_piece() { return thread() % kPieces; }

  // A tile's slot, and where byte x of its row is.
  static TXL_DEVICE uint32_t slot_of(int j0) { return static_cast<uint32_t>(j0) / BN % kSlopeSlots * 128; }
  TXL_DEVICE uint32_t at(int row, uint32_t slot, int x) const {
    const auto n = static_cast<uint32_t>(row);
    return this->base + Base::kBandAt + n * kSlopePitch + slot + ((static_cast<uint32_t>(x) + 32 * n) & 127);
  }

  // Row of r of the warpgroup's last query and key j0, not yet clamped: its column 0 of the band.
  TXL_DEVICE int lowest_own_row(int j0) const { return this->lowest_row(j0) + (kGroups - 1 - group) * 64; }
  // Among the warpgroup's, the lane's first query. Its second is the next one.
  TXL_DEVICE int own_query() const { return query_of_row(this->row_of_lane(0)) - 64 * group; }

  // Of tile j0's columns of the band what the lane has as accumulators of scores have it. All pairs are seen.
  TXL_DEVICE void take_whole(Square<E> (&band)[kSquares], int j0) const {
    // The second query's keys begin at an even one. The first one's are those less one: half of a word, and
    // half of the next.
    const int row = this->row_of_lane(0), key = own_query() - 62 + opaque(lane()) % 4 * 2;
    const uint32_t before = slot_of(j0 + (kSlopeSlots - 1) * BN), here = slot_of(j0);
    const auto word = [&](uint32_t below, int x) {
      return load_shared<uint32_t>(at(row, x < 0 ? before : here, 2 * x) + below);
    };
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      for (int n = 0; n < 2; ++n) {
        const int x = key + 16 * m + 8 * n;
        uint32_t (&to)[4] = band[m].part[0].r;
        to[2 * n] = word(0, x - 2) >> 16 | word(0, x) << 16;
        to[2 * n + 1] = word(8 * kSlopePitch, x);
      }
  }

  // acc += the same columns by their rows of r, zeros for what is not seen or has no row of its own.
  TXL_DEVICE void add_seen(float (&acc)[kHeadTiles][4], int j0, Tile rows) const {
    const int row = this->row_of_lane(0), query = own_query(), column = lane() % 4 * 2;
    const int lowest = lowest_own_row(j0);
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m) {
      Square<E> band;
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          uint32_t pair = 0;
          for (int x = 0; x < 2; ++x) {
            const int c = column + 16 * m + 8 * n + x, key = c - 63 + query + y, j = j0 + key;
            if (has_rows(this->p, lowest + c, 1) && mask.sees(i0 + 64 * group + query + y, j))
              pair |= static_cast<uint32_t>(load_shared<uint16_t>(at(row + 8 * y, slot_of(j), 2 * key)))
                      << 16 * x;
          }
          band.part[0].r[2 * n + y] = pair;
        }
      add_rows<true>(acc, band, rows, 16 * m, 0);
    }
    fence_async_proxy();  // the copy engine may write where they were
  }

  // acc += a rows, by one warp.
  static TXL_DEVICE void add_checked(float (&acc)[kHeadTiles][4], const Square<E> (&a)[kSquares], Tile rows) {
    TXL_UNROLL_GPU
    for (int n = 0; n < kSquares; ++n) add_rows<true>(acc, a[n], rows, 16 * n, 0);
    fence_async_proxy();  // the copy engine may write where they were
  }
  // The same by four, where all is seen.
  static TXL_DEVICE void start(float (&acc)[kHeadTiles][4], Square<E> (&a)[kSquares], Tile rows) {
    settle(a);
    warpgroup_begin();
    TXL_UNROLL_GPU
    for (int n = 0; n < kSquares; ++n) warpgroup_mma<E, true, true>(acc, a[n].part[0].r, rows.rows(16 * n));
    warpgroup_commit();
  }
};

// Shared memory has room for two.
template <typename E>
constexpr int kLeastBlocks<DqKernel<WarpgroupSlopeBlock<E, 64>>> = 2;

}  // namespace txl::cuda

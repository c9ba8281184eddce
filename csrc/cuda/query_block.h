// What forward and dq share: a block owns BM queries of a head, each of its warps 16 of them, and goes over
// the keys that they see in tiles of BN. Here is which tiles are of which kind, what of queries, keys, values
// and r each needs, and the band.
//
// The band. The scores of a warp's tile need 16 + BN columns of it: 16 were left over from the tile before,
// BN are computed now, both are written to 16 rows of shared memory of the warp's own, and row y is read back
// from column 15 - y on. That is the relative shift, and the sum starts from what was read.
#pragma once

#include "tiles.h"

namespace txl::cuda {

// kChannels: of a tile, at least D. kKeys: of a tile. kOperands: of BM queries each, the first kHeld of which
// are kept in registers; the others are read again for every tile of keys. dq has none, and needs no values.
// kPanels: tiles lie as wgmma reads them (warpgroup_query_block.h).
template <typename E, int kChannels, int kKeys, int kWarps, int kOperands, int kHeld, bool kPanels = false>
struct QueryBlock {
  static constexpr bool kScores = kOperands > 0;  // else their gradient, in which there is a band, too
  using Element = E;
  static constexpr bool kPdl = false;     // ForwardBlock may have it
  static constexpr bool kEngine = false;  // whether the copy engine may serve it
  static constexpr int kHead = kChannels, BN = kKeys;
  template <int kRows>
  using Tile = std::conditional_t<kPanels, Panels<E, kHead, kRows>, Rows<E, kHead>>;

  static constexpr int kThreads = 32 * kWarps, BM = 16 * kWarps;
  static constexpr int kSteps = kHead / kStep<E>, kKeyTiles = BN / 8, kHeadTiles = kHead / 8;
  static constexpr int kBandTiles = (BM + BN - 1) / BN + 1,
                       kRing = kBandTiles + 1;  // of BN rows of r: in use, and one to come
  static constexpr int kBand = 16 + BN;         // columns of the band that a warp reads
  // In words, or elements of dS. Warpgroups keep the columns of two tiles, in rows that begin in banks of
  // their own, or dS of three.
  static constexpr int kBandPitch = !kPanels ? kBand : kScores ? 2 * BN + 8 : 3 * BN;
  static_assert(kHead % 16 == 0 && BN % 16 == 0, "whole fragments");

  // Shared memory: the queries that stay, the band, two slots each for keys and values, the ring. The
  // queries that are held lie beneath the rest until they are in registers.
  static constexpr int kSlots = kScores ? 4 : 2;
  static constexpr uint32_t kTileBytes = BN * Tile<BN>::kRowBytes;
  static constexpr uint32_t kQueryBytes = BM * Tile<BM>::kRowBytes;
  static constexpr uint32_t kBandBytes = kWarps * 16 * kBandPitch * (kScores ? 4 : sizeof(E));
  static constexpr uint32_t kBandAt = (kOperands - kHeld) * kQueryBytes, kTilesAt = kBandAt + kBandBytes;
  static constexpr uint32_t kEnd = kTilesAt + (kSlots + kRing) * kTileBytes;
  static constexpr uint32_t kAllQueries = kOperands * kQueryBytes;
  static constexpr uint32_t kAlignment = kPanels ? 1024 : 128;  // of all of these; shared_base() has 128
  static constexpr uint32_t kUsed = kEnd > kAllQueries ? kEnd : kAllQueries;  // from the first multiple on
  static constexpr uint32_t kSharedBytes = kUsed + kAlignment - 128;
  static_assert(!kPanels || (kTilesAt % kAlignment == 0 && kQueryBytes % kAlignment == 0), "whole panels");

  static TXL_HD int64_t blocks_of_head(const Problem& p) { return div_up(p.L, BM); }

  // What a block owns, and the keys that it goes over.
  struct Place {
    int b, h, i0;
    Range keys;
  };

  const Problem& p;
  int b, h, i0;  // i0: the block's first query
  Mask mask;     // of the keys that the block goes over
  TileBounds bounds;
  uint32_t base;  // of shared memory
  // Of long rows dq has no registers for what copies could know beforehand.
  using TileCopier = Copier<kThreads, Tile<BN>, kRow<E, kHead> <= (kScores ? 256 : 128)>;
  using Copied = typename TileCopier::From;
  TileCopier copier;
  Copied k_rows, v_rows, r_rows;
  Fragment held[kHeld ? kHeld : 1][kSteps];
  float carry[2][4];  // the band's columns that the tile before left over

  TXL_DEVICE QueryBlock(const Problem& problem, const Forward& t, const Place& place)
      : p(problem),
        b(place.b),
        h(place.h),
        i0(place.i0),
        mask(p, place.keys),
        bounds(key_tiles<BM, BN>(p, {mask.lo, mask.hi}, i0)),
        base(opaque(aligned_base<kAlignment>())),
        copier(p),
        k_rows(copier.rows(t.k, b, h)),
        v_rows(copier.rows(t.v, b, h)),
        r_rows(copier.rows(t.r, 0, h)) {}

  TXL_DEVICE bool is_masked(int j0) const { return bounds.is_masked(j0); }
  TXL_DEVICE bool is_far(int j0) const { return bounds.is_far(j0); }
  TXL_DEVICE bool follows_band(int j0) const { return (j0 > bounds.begin) & !is_far(j0 - BN); }

  // The lane's query y, of two, is the block's query row_of_lane(y), and so is its row among the operands'.
  static TXL_DEVICE int row_of_lane(int y) {
    const int thread = opaque(thread_index());
    return thread / 32 * 16 + thread % 32 / 4 + 8 * y;
  }
  static TXL_DEVICE int query_of_row(int row) { return row; }
  // Whether none of what the block goes over is for this thread; and up to where a tile that is neither
  // masked nor far is followed by others.
  static TXL_DEVICE bool is_hidden(int) { return false; }
  TXL_DEVICE int end_of_near(int) const { return bounds.near_end; }

  // ---- Queries ----

  TXL_DEVICE Tile<BM> query_rows(int n) const {
    const int place = n < kHeld ? kOperands - kHeld + n : n - kHeld;
    return {base + static_cast<uint32_t>(place) * kQueryBytes};
  }

  // From shared memory, where all of them are, into registers.
  TXL_DEVICE void hold_queries() {
    if constexpr (kHeld > 0) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kHeld; ++n) {
        TXL_UNROLL_GPU
        for (int d = 0; d < kSteps; ++d) held[n][d] = load_query(n, d);
      }
      sync_threads();  // all have read what other tiles will overwrite
    }
  }

  // Step d of the warp's rows of query n.
  TXL_DEVICE Fragment load_query(int n, int d) const { return load_fragment(query_rows(n), 16 * warp(), d); }

  // acc[n] += query n rows^T, as add_product.
  template <int n, int kTiles, typename F>
  TXL_DEVICE void add_query_product(float (&acc)[kTiles][4], Tile<BN> rows, F row_of) const {
    if constexpr (n < kHeld)
      add_product<true>(acc, [&](int d) { return held[n][d]; }, rows, row_of);
    else
      add_product<false>(acc, [&](int d) { return load_query(n, d); }, rows, row_of);
  }

  // ---- Keys, values, r ----

  // Keys and values have two slots each, in turns.
  static TXL_DEVICE uint32_t slot(int j0) { return static_cast<uint32_t>(j0) / BN % 2; }
  TXL_DEVICE Tile<BN> k_tile(int j0) const { return {base + kTilesAt + slot(j0) * kTileBytes}; }
  TXL_DEVICE Tile<BN> v_tile(int j0) const { return {base + kTilesAt + (2 + slot(j0)) * kTileBytes}; }
  TXL_DEVICE Tile<BN> ring(int tile = 0) const {
    return {base + kTilesAt + static_cast<uint32_t>(kSlots + tile) * kTileBytes};
  }

  // The row of r, not yet clamped, of the block's last query and key j0: column 0 of the block's band.
  TXL_DEVICE int lowest_row(int j0) const { return static_cast<int>(p.band(opaque(i0) + BM - 1, j0)); }
  // Where in the ring the rows of r are: of the n-th BN columns of the block's band, and of its column x.
  static TXL_DEVICE int ring_tile(int j0, int n) {
    return static_cast<int>((static_cast<uint32_t>(j0) / BN + static_cast<uint32_t>(n)) % kRing);
  }
  static TXL_DEVICE int ring_row(int j0, int x) {
    const uint32_t column = static_cast<uint32_t>(x);
    return ring_tile(j0, static_cast<int>(column / BN)) * BN + static_cast<int>(column % BN);
  }
  // The warp's first column among the block's.
  static TXL_DEVICE int own_column() { return BM - 16 - 16 * opaque(warp()); }

  // Before the first copy_tile.
  TXL_DEVICE void begin_copies() const {}

  // Starts to copy what the tile needs: its keys and values, and the rows of r that the one before has not
  // brought.
  TXL_DEVICE void copy_tile(int j0) {
    copy_keys(k_tile(j0), k_rows, j0);
    for_new_rows(j0, [&](Tile<BN> to, int c) { copy_rows_of_r<BN>(to, copier, r_rows, c); });
    if constexpr (kScores) copy_keys(v_tile(j0), v_rows, j0);
    commit_copies();
  }

  TXL_DEVICE void copy_keys(Tile<BN> to, const Copied& from, int j0) const {
    copier.template copy<BN>(to, from, mask.has_keys(j0, BN), j0, [&](int n) { return mask.key(j0 + n); });
  }

  // f(where in the ring, the first row of r, not yet clamped) for each BN rows that the tile needs anew:
  // none, if it is far.
  template <typename F>
  TXL_DEVICE void for_new_rows(int j0, F f) const {
    if (is_far(j0)) return;
    for (int n = follows_band(j0) ? kBandTiles - 1 : 0; n < kBandTiles; ++n)
      f(ring(ring_tile(j0, n)), lowest_row(j0) + n * BN);
  }

  // ---- A tile ----

  static TXL_DEVICE void wait_tile() { wait_copied(); }

  // score = (q + u) k^T + (q + v) r^T, moved. WarpgroupQueryBlock has a take_scores of its own, and also
  // begin_copies, copy_tile, wait_tile, add_keys and add_values.
  template <bool>
  TXL_DEVICE void take_scores(float (&score)[kKeyTiles][4], int j0) {
    take_band(score, j0);
    add_keys(score, j0);
  }

  // score += (q + u) k^T.
  TXL_DEVICE void add_keys(float (&score)[kKeyTiles][4], int j0) const {
    add_query_product<0>(score, k_tile(j0), [](int n) { return n; });
  }

  // acc += weight v; make(n8 tile) is called when its weights are to be there. kMasked: some queries do not
  // see some keys, by sees(n8 tile, element).
  template <bool kMasked, typename F, typename G>
  TXL_DEVICE void add_values(float (&acc)[kHeadTiles][4], const float (&weight)[kKeyTiles][4], int j0, F sees,
                             G make) const {
    const Tile<BN> values = v_tile(j0);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; n += 2) {
      make(n), make(n + 1);
      const auto a = Square<E>::of(weight[n], weight[n + 1]);
      const int l = opaque(lane());
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; d += 2) {
        auto x = SquareRows<E>::load(values, 8 * n, 8 * d, l);
        if constexpr (kMasked)
          put_nan(acc[d], acc[d + 1], x.take_infinite(), [&](int m, int e) { return sees(n + m, e); });
        add_square(acc[d], acc[d + 1], a, x);
      }
    }
  }

  // ---- The band ----

  // The warp's 16 rows of it, or of its gradient.
  using Band = MovedRows<std::conditional_t<kScores, float, E>, kBand>;
  TXL_DEVICE Band own_band() const {
    return {base + kBandAt + static_cast<uint32_t>(opaque(warp())) * (kBandBytes / kWarps)};
  }

  // score = (q + v) r^T, moved; query 1 is q + v.
  TXL_DEVICE void take_band(float (&score)[kKeyTiles][4], int j0) {
    const int left = own_column();
    if (!follows_band(j0)) {
      for (int n = 0; n < 2; ++n)
        for (int x = 0; x < 4; ++x) carry[n][x] = 0;
      add_query_product<1>(carry, ring(), [&](int n) { return ring_row(j0, left + n); });
    }
    float next[kKeyTiles][4] = {};
    add_query_product<1>(next, ring(), [&](int n) { return ring_row(j0, left + 16 + n); });
    const int row = opaque(lane()) / 4, column = opaque(lane()) % 4 * 2;
    const uint32_t own = own_band().at(row, column);
    sync_warp();  // what the tile before has left here was read
    for (int n = 0; n < 2; ++n) write_band(own + n * Band::kEight, carry[n]);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n) write_band(own + (2 + n) * Band::kEight, next[n]);
    for (int n = 0; n < 2; ++n)
      for (int x = 0; x < 4; ++x) carry[n][x] = next[kKeyTiles - 2 + n][x];
    sync_warp();
    // The lane's first query begins at its column 15 - row, the other one 8 before that.
    const uint32_t first[2] = {own_band().at(row, 15 - row + column), own_band().at(row, 16 - row + column)};
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) {
        const int place = x / 2 * (Band::kRowsBytes - Band::kEight) + n * Band::kEight;
        score[n][x] = load_shared<float>(first[x % 2] + static_cast<uint32_t>(place));
      }
  }

  // Two columns of the lane's queries.
  static TXL_DEVICE void write_band(uint32_t at, const float (&x)[4]) {
    store_shared(at, float2{x[0], x[1]});
    store_shared(at + Band::kRowsBytes, float2{x[2], x[3]});
  }
};

}  // namespace txl::cuda

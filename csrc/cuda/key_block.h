// What dk and dv's kernel computes with: a block owns BN keys of a head, each of its warps 16 of them, and
// goes over the queries that see them in tiles of BM. Here is which tiles are of which kind, what each needs,
// the band, and the products.
//
// Tiles are transposed: rows are keys, columns are queries. So P and dS are A operands as they are. The band
// is computed the other way round: the warps share it out by queries, and leave it in shared memory, where
// all read what they need of it, moved.
//
//   band      (q + v) r^T     16 queries, a part of their 16 + BN columns
//   score^T   k (q + u)^T     starts from what is read from the band: row j of query y from column 15 - y + j
//   dP^T      v dO^T
//   dv, dk    P^T dO, dS^T (q + u)
//
// The next query is one row of r lower, so the ring of rows goes down: BM rows are new to a tile.
#pragma once

#include "backward_block.h"

namespace txl::cuda {

// ---- Which tiles of queries a block of keys needs, and how ----

// The first of them are clamped to the last row of r, the last ones to the first.
template <int BM, int BN>
TXL_DEVICE TileBounds query_tiles(const Problem& p, const Chunk& chunk, Range batch, int64_t j0) {
  const int64_t low = larger(j0, batch.lo), high = smaller(j0 + BN, batch.hi) - 1, origin = p.position(0);
  const int64_t begin = floor_to<BM>(low - p.right - origin);
  const int64_t end = low <= high ? larger(begin, smaller(high + p.left - origin + 1, p.L)) : begin;
  const bool whole = batch.lo <= j0 && j0 + BN <= batch.hi;
  const int64_t all_lo = smaller(larger(ceil_to<BM>(j0 + BN - 1 - p.right - origin), begin), end);
  const int64_t all_hi =
      smaller(larger(whole ? floor_to<BM>(smaller(j0 + p.left - origin + 1, p.L)) : 0, all_lo), end);
  const int64_t c = p.band(0, j0);  // the row of query 0 and the first key
  const int64_t near = smaller(larger(floor_to<BM>(c - p.N + 1), all_lo), all_hi);
  const int64_t near_end = smaller(larger(ceil_to<BM>(c + BN), near), all_hi);
  return {chunk.within(begin),    chunk.within(all_lo), chunk.within(near),
          chunk.within(near_end), chunk.within(all_hi), chunk.within(end)};
}

// ---- The band ----

// BM queries and BN keys' columns of it, of kGroup queries each the same ones: key m of query y is column
// kGroup - 1 - y % kGroup + m.
template <int BM, int BN, int kGroup>
struct BandOfTile {
  static constexpr int kColumns = kGroup + BN;
  // A warpgroup writes rows that are eight queries apart. Their pitch, in words: four neighbours, moved,
  // begin 8 banks apart for reading, and every other row a word late, for two columns to be written at once.
  static constexpr bool kEightApart = kGroup > 16;
  static constexpr int kPitch = kColumns + 13;
  using Rows = MovedRows<float, kColumns>;
  // From eight columns to the next, and from eight queries.
  static constexpr int kEight = kEightApart ? 32 : Rows::kEight,
                       kRowsBytes = kEightApart ? 32 * kPitch : Rows::kRowsBytes;
  static constexpr uint32_t kKeptAt = BM * kColumns * 4;  // behind queries in order
  static constexpr uint32_t kBytes = kEightApart ? BM * kPitch * 4 : kKeptAt + (BM + 1) * 32;

  uint32_t address;

  // n8 tiles of the lane's queries `query` and query + next; column(n): where tile n begins.
  template <int kTiles, typename F>
  TXL_DEVICE void write(const float (&x)[kTiles][4], int query, int next, F column) const {
    // Opaque, or the compiler would not see that columns differ by constants.
    const uint32_t to[2] = {opaque(at(query, lane() % 4 * 2)), opaque(at(query + next, lane() % 4 * 2))};
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; ++n)
      for (int y = 0; y < 2; ++y)
        store_shared(to[y] + static_cast<uint32_t>(column(n) / 8 * kEight),
                     float2{x[n][2 * y], x[n][2 * y + 1]});
  }

  // What element x of n8 tile n starts from; own_key: the warp's first.
  TXL_DEVICE float read(int n, int x, int own_key) const {
    const int of_lane = lane() % 4 * 2, key = own_key + lane() / 4;
    const uint32_t from = at(of_lane + x % 2, kGroup - 1 - of_lane - x % 2 + key);
    const int place = n * kRowsBytes + (x / 2 - n % (kGroup / 8)) * kEight;
    return load_shared<float>(from + static_cast<uint32_t>(place));
  }

  // Which pairs dropout keeps: of a query 16 bits for each of 16 neighbouring keys.
  TXL_DEVICE void write_kept(int query, int key, uint32_t kept) const {
    store_shared(kept_at(query, key), static_cast<uint16_t>(kept));
  }
  TXL_DEVICE uint32_t kept(int query, int key) const { return load_shared<uint16_t>(kept_at(query, key)); }

 private:
  TXL_DEVICE uint32_t at(int query, int column) const {
    if constexpr (kEightApart)
      return address + static_cast<uint32_t>(query * kPitch + query % 2 + column) * 4;
    else
      return Rows{address}.at(query, column);
  }
  // Behind a query's columns; or behind all queries', even ones before odd ones, for lanes read every other
  // one, with 32 bytes in between, for they write neighbours.
  TXL_DEVICE uint32_t kept_at(int query, int key) const {
    if constexpr (kEightApart)
      return at(query, kColumns) + static_cast<uint32_t>(key) * 2;
    else
      return address + kKeptAt + static_cast<uint32_t>((query / 2 + query % 2 * (BM / 2 + 1)) * 32 + key * 2);
  }
};

// ---- The block ----

// kChannels: of a tile, at least D. kHeld: keys and values are kept in registers; else they are read again
// for every tile. kPanels: tiles lie as wgmma reads them (warpgroup_key_block.h).
template <typename E, int kChannels, int kKeys, int kQueries, int kWarps, bool kHeld, bool kPanels = false>
struct KeyBlock {
  using Params = BackwardParams;
  using Element = E;
  static constexpr int kHead = kChannels, BN = kKeys, BM = kQueries, kThreads = 32 * kWarps;
  static constexpr bool kByWarpgroups = kPanels;
  template <int kRows>
  using Tile = std::conditional_t<kPanels, Panels<E, kHead, kRows>, Rows<E, kHead>>;
  using Band = BandOfTile<BM, BN, (kPanels ? BM : 16)>;

  static constexpr int kSteps = kHead / kStep<E>, kQueryTiles = BM / 8;
  // Where there are fewer than 16 keys to a warp, warps with the same ones share out the channels of dk and
  // dv.
  static constexpr int kKeyGroups = BN / 16;
  static constexpr int kOwnChannels = kHead * kKeyGroups / kWarps, kOwnTiles = kOwnChannels / 8;
  // n8 tiles of queries at a time: fewer need fewer registers.
  static constexpr int kTogether = kPanels && kHead <= 64 ? kQueryTiles : kPanels || kHeld ? 4 : 2;
  static constexpr int kBandTiles = (BM + BN) / BM;  // of BM rows of r
  static_assert(kHead % 16 == 0 && BN % BM == 0 && kWarps % kKeyGroups == 0, "whole fragments");
  static_assert(Chunk::kRows % BM == 0, "a chunk begins with a tile");

  // Shared memory: keys, values, q + u and dO in kSlots slots, q + v, the ring of r, the band, statistics of
  // the queries in as many.
  static constexpr int kSlots = kPanels && kHead <= 64 ? 2 : 1;
  static constexpr uint32_t kRowBytes = Tile<BM>::kRowBytes;
  static constexpr uint32_t kKeyBytes = BN * kRowBytes, kQueryBytes = BM * kRowBytes;
  static constexpr uint32_t kQueriesAt = 2 * kKeyBytes, kRingAt = kQueriesAt + (2 * kSlots + 1) * kQueryBytes;
  static constexpr uint32_t kBandAt = kRingAt + kBandTiles * kQueryBytes;
  static constexpr uint32_t kStatisticsAt = kBandAt + Band::kBytes;
  static constexpr uint32_t kAlignment = kPanels ? 1024 : 128;  // of tiles; shared_base() has 128
  static constexpr uint32_t kStatisticsBytes = BM * sizeof(Statistics);
  static constexpr uint32_t kEnd = kStatisticsAt + kSlots * kStatisticsBytes;
  static constexpr uint32_t kSharedBytes = kEnd + kAlignment - 128;

  static TXL_HD int64_t blocks_of_head(const Problem& p) { return div_up(p.K, BN); }

  const BackwardParams& params;
  const Problem& p;
  const Backward& t;
  int b, h, j0;  // j0: the block's first key
  Mask mask;
  TileBounds bounds;
  int lowest_row;            // of r, not yet clamped, for query BM - 1 and the block's first key
  int own_key, own_channel;  // the warp's first among the block's
  Fragment k_held[kHeld ? kSteps : 1], v_held[kHeld ? kSteps : 1];
  uint32_t base;      // of shared memory
  uint32_t slot = 0;  // of the tile's queries
  using TileCopier = Copier<kThreads, Tile<BM>, kRow<E, kHead> <= (kPanels ? 128 : 256)>;
  using Copied = typename TileCopier::From;
  TileCopier copier;
  Copied q_u_rows, q_v_rows, dout_rows, r_rows;

  TXL_DEVICE explicit KeyBlock(const BackwardParams& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head; of a causal call the first keys are seen by most queries.
        b(x.chunk.b + block_index() / of_head() / x.chunk.heads),
        h(x.chunk.h + block_index() / of_head() % x.chunk.heads),
        j0(block_index() % of_head() * BN),
        mask(p, p.keys_of_batch(b)),
        bounds(query_tiles<BM, BN>(p, x.chunk, {mask.lo, mask.hi}, j0)),
        lowest_row(static_cast<int>(p.band(BM - 1, j0))),
        own_key(warp() % kKeyGroups * 16),
        own_channel(warp() / kKeyGroups * kOwnChannels),
        base(aligned_base<kAlignment>()),
        copier(p),
        q_u_rows(copier.rows(x.w.q_u, b, h)),
        q_v_rows(copier.rows(x.w.q_v, b, h)),
        dout_rows(copier.rows(t.dout, b, h)),
        r_rows(copier.rows(t.r, 0, h)) {}

  TXL_DEVICE int of_head() const { return static_cast<int>(blocks_of_head(p)); }

  TXL_DEVICE bool is_masked(int i0) const { return bounds.is_masked(i0); }
  // With jumps: without, dropout at D 256 spills three registers in its loop.
  TXL_DEVICE bool is_far(int i0) const {
    return !bounds.is_masked(i0) && (i0 < bounds.near || i0 >= bounds.near_end);
  }
  TXL_DEVICE bool follows_band(int i0) const { return i0 > bounds.begin && !is_far(i0 - BM); }
  // Whether none of the tile is for this warp's keys.
  TXL_DEVICE bool is_hidden(int) const { return false; }

  // ---- Shared memory ----

  TXL_DEVICE Tile<BN> k_tile() const { return {base}; }
  TXL_DEVICE Tile<BN> v_tile() const { return {base + kKeyBytes}; }
  TXL_DEVICE Tile<BM> q_u(uint32_t of_slot) const { return {base + kQueriesAt + 2 * of_slot * kQueryBytes}; }
  TXL_DEVICE Tile<BM> dout(uint32_t of_slot) const { return {q_u(of_slot).address + kQueryBytes}; }
  TXL_DEVICE Tile<BM> q_u() const { return q_u(slot); }
  TXL_DEVICE Tile<BM> dout() const { return dout(slot); }
  TXL_DEVICE Tile<BM> q_v() const { return {base + kQueriesAt + 2 * kSlots * kQueryBytes}; }
  TXL_DEVICE Tile<BM> ring(int tile = 0) const {
    return {base + kRingAt + static_cast<uint32_t>(tile) * kQueryBytes};
  }
  TXL_DEVICE Band band() const { return {base + kBandAt}; }

  TXL_DEVICE uint32_t statistics_at(uint32_t of_slot, int column) const {
    return base + kStatisticsAt + of_slot * kStatisticsBytes + static_cast<uint32_t>(column) * 16;
  }
  TXL_DEVICE Statistics statistics(int column) const {
    return load_shared<Statistics>(statistics_at(slot, column));
  }
  // The first half of them: lse and delta.
  TXL_DEVICE float2 lse_and_delta(int column) const {
    return load_shared<float2>(statistics_at(slot, column));
  }

  // ---- Loads ----

  TXL_DEVICE void load_keys() {
    const auto key = [&](int n) { return mask.key(j0 + n); };
    copy_rows<kThreads, BN>(k_tile(), t.k, b, h, p, key);
    copy_rows<kThreads, BN>(v_tile(), t.v, b, h, p, key);
    if constexpr (kHeld) {
      commit_copies();
      wait_copies<0>();
      sync_threads();
      TXL_UNROLL_GPU
      for (int d = 0; d < kSteps; ++d) {
        k_held[d] = load_fragment(k_tile(), own_key, d);
        v_held[d] = load_fragment(v_tile(), own_key, d);
      }
    }
  }

  // Before all others.
  static TXL_DEVICE void begin_copies() {}

  // Starts to copy what the band needs: q + v, and the rows of r that the tile before has not brought.
  TXL_DEVICE void copy_position(int i0) const {
    if (!is_far(i0)) {
      copy_queries(q_v(), q_v_rows, i0);
      for_new_rows(i0, [&](Tile<BM> to, int c) { copy_rows_of_r<BM>(to, copier, r_rows, c); });
    }
    commit_copies();
  }
  // f(where in the ring, the first row of r, not yet clamped) for each BM rows that the tile needs anew.
  template <typename F>
  TXL_DEVICE void for_new_rows(int i0, F f) const {
    const int new_tiles = follows_band(i0) ? 1 : kBandTiles;
    for (int n = 0; n < new_tiles; ++n) f(ring(ring_tile(i0, n)), lowest_row - i0 + n * BM);
  }

  // Where in the ring the rows of r are: of the n-th BM columns of the block's band, and of its column x. A
  // tile's highest rows give way to the lowest of the next.
  static TXL_DEVICE int ring_tile(int i0, int n) {
    const int tile = n + static_cast<int>(static_cast<uint32_t>(i0) / BM * (kBandTiles - 1) % kBandTiles);
    return tile < kBandTiles ? tile : tile - kBandTiles;
  }
  static TXL_DEVICE int ring_row(int i0, int x) { return ring_tile(i0, x / BM) * BM + x % BM; }

  // And the rest that a tile needs.
  TXL_DEVICE void copy_queries(int i0) const {
    copy_queries(q_u(), q_u_rows, i0);
    copy_queries(dout(), dout_rows, i0);
    copy_statistics(i0, 0);
    commit_copies();
  }
  TXL_DEVICE void copy_statistics(int i0, uint32_t to_slot) const {
    if (thread_index() >= BM) return;
    const int64_t i = i0 + thread_index();
    const Statistics* const of_queries = params.statistics(b, h);
    copy_async_16(statistics_at(to_slot, thread_index()), of_queries + (i < p.L ? i : 0), i < p.L);
  }

  TXL_DEVICE void copy_queries(Tile<BM> to, const Copied& from, int i0) const {
    copier.template copy<BM>(to, from, i0 + BM <= mask.L, i0, [&](int n) { return mask.query(i0 + n); });
  }

  // Until what copy_position and copy_queries have started is there for all, and all are done with what they
  // did before.
  static TXL_DEVICE void wait_position() { wait_copied(); }
  static TXL_DEVICE void wait_queries(int) { wait_copied(); }

  // ---- A tile ----
  //
  // WarpgroupKeyBlock has what follows of its own, and copies and waits.

  // Warps with the same queries share out the band's columns by twos of n8 tiles, and if one more is left for
  // each, by ones. No two cross a multiple of 16.
  TXL_DEVICE void take_band(int i0) const {
    constexpr int kGroups = BM / 16, kParts = kWarps / kGroups, kTiles = Band::kColumns / 8 / kParts;
    const int group = warp() % kGroups * 16, part = warp() / kGroups;
    const auto column = [&](int n) {
      const bool alone = n == kTiles - 1 && n % 2 == 0;
      return n / 2 * 16 * kParts + (alone ? 8 : 16) * part + n % 2 * 8;
    };
    float x[kTiles][4] = {};
    add_product<false>(
        x, [&](int d) { return load_fragment(q_v(), group, d); }, ring(),
        [&](int n) { return ring_row(i0, BM - 16 - group + column(n / 8)); });
    band().write(x, group + lane() / 4, 8, column);
  }

  TXL_DEVICE Fragment k_fragment(int d) const {
    if constexpr (kHeld)
      return k_held[d];
    else
      return load_fragment(k_tile(), own_key, d);
  }
  TXL_DEVICE Fragment v_fragment(int d) const {
    if constexpr (kHeld)
      return v_held[d];
    else
      return load_fragment(v_tile(), own_key, d);
  }

  // score = k (q + u)^T on top of what begin() makes of it, dp = v dO^T: of n8 tiles of queries from `first`
  // on.
  template <typename F>
  TXL_DEVICE void take_scores(float (&score)[kTogether][4], float (&dp)[kTogether][4], int first, F begin) {
    const auto row = [&](int n) { return 8 * first + n; };
    begin();
    add_product<kHeld>(score, [&](int d) { return k_fragment(d); }, q_u(), row);
    memset(dp, 0, sizeof(dp));
    add_product<kHeld>(dp, [&](int d) { return v_fragment(d); }, dout(), row);
  }

  // dv += weight dO, dk += ds (q + u), of the same tiles; make(n) is called when those of n8 tile n are to be
  // there, and put(n, dS of it and the next) when they are. kMasked: some queries do not see some keys, by
  // sees(n8 tile, element). kGoesOn: warpgroups may be at it still in the end (wait_gradients).
  template <bool kMasked, bool, typename F, typename G, typename H>
  TXL_DEVICE void add_gradients(float (&dk)[kOwnTiles][4], float (&dv)[kOwnTiles][4],
                                const float (&weight)[kTogether][4], const float (&ds)[kTogether][4],
                                int first, F sees, G make, H put) const {
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; ++n) make(n);
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; n += 2) {
      add_values<kMasked>(dv, Square<E>::of(weight[n], weight[n + 1]), first + n,
                          [&](int m, int x) { return sees(n + m, x); });
      const auto a = Square<E>::of(ds[n], ds[n + 1]);
      add_rows<kMasked>(dk, a, q_u(), 8 * (first + n), own_channel);
      put(n, a);
    }
  }

  // dv += a dO for queries 8 n to 8 n + 15.
  template <bool kMasked, typename F>
  TXL_DEVICE void add_values(float (&dv)[kOwnTiles][4], const Square<E>& a, int n, F sees) const {
    const int l = opaque(lane());
    TXL_UNROLL_GPU
    for (int d = 0; d < kOwnTiles; d += 2) {
      auto x = SquareRows<E>::load(dout(), 8 * n, own_channel + 8 * d, l);
      if constexpr (kMasked) put_nan(dv[d], dv[d + 1], x.take_infinite(), sees);
      add_square(dv[d], dv[d + 1], a, x);
    }
  }

  // dS goes to memory as it is made, turned back: of the queries from i on and the warp's keys. The lane's
  // first pair:
  TXL_DEVICE E* begin_slopes(int i) const {
    const int first = lane() / 4, second = lane() % 4 * 2;
    return params.template slopes<E>(opaque(b), opaque(h), i + (is_half<E> ? first : second),
                                     j0 + own_key + (is_half<E> ? second : first));
  }
  // Of 16 queries, n8 tile n and the next.
  TXL_DEVICE void put_slopes(E* to, int n, const Square<E>& a) const {
    if (kKeyGroups < kWarps && own_channel > 0) return;  // another warp has the same keys
    const int64_t columns = params.w.chunks.columns;
    to += 8 * n * columns;
    TXL_UNROLL_GPU
    for (int x = 0; x < 4; ++x)
      if constexpr (is_half<E>) {
        store_global(reinterpret_cast<uint32_t*>(to + x / 2 * 8 * columns + x % 2 * 8),
                     transpose_matrix(a.part[0].r[x]));
      } else {
        for (int m = 0; m < 2; ++m)
          store_global(to + (8 * m + x / 2) * columns + x % 2 * 8, bits<float>(a.part[m].r[x]));
      }
  }
  static TXL_DEVICE void send_slopes(int) {}
  static TXL_DEVICE void wait_slopes() {}
};

}  // namespace txl::cuda

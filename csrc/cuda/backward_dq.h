// dq: a block owns 64 queries of a head, each of its warps 16 of them, and goes over the keys that they see
// in tiles of BN, as forward does.
//
// The gradient of the band. Every element of a tile's dS belongs to one column of the band, one pair to each:
// row y of a warp's 16 goes to 16 rows of shared memory from column 15 - y on, the opposite of forward's
// shift. The tile before has left over 16 columns, they lie in front; so the first BN columns are whole, they
// are multiplied by their rows of r, and the last 16 are carried on. That is one product, and none is done
// twice.
#pragma once

#include "backward_tiles.h"

namespace txl::cuda {

// kHeld: how many of q + u, q + v and dO are kept in registers; the others are read again for every tile.
template <typename E, int kHead, int BN, int kHeld, bool kDropout>
struct DqKernel {
  using Params = BackwardParams;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, BM = 16 * kWarps;
  static constexpr int kSteps = kHead / kStep<E>, kKeyTiles = BN / 8, kHeadTiles = kHead / 8;
  static constexpr int kChunks = (BM + BN - 1) / BN + 1,
                       kRing = kChunks + 1;     // of BN rows of r: in use, and one to come
  static constexpr int kBand = 16 + BN;         // columns of the band that a warp reads
  static constexpr int kBandPitch = kBand + 8;  // words, as in forward
  // The gradient of the band lies where the band was. Bytes, an odd number of 16; or of 32, which are read by
  // pairs.
  static constexpr int kBytes = sizeof(E), kSlopePitch = kBytes * (kBand + 8);
  static_assert(kHead % 16 == 0 && BN % 16 == 0 && kSlopePitch <= 4 * kBandPitch, "whole fragments");

  // Shared memory: the queries that stay, the band, two places each for keys and values, the ring. The
  // queries that are held lie beneath the rest until they are in registers.
  static constexpr uint32_t kRowBytes = Rows<E, kHead>::kPitch, kTileBytes = BN * kRowBytes;
  static constexpr uint32_t kQueryBytes = BM * kRowBytes, kBandBytes = kWarps * 16 * kBandPitch * 4;
  static constexpr uint32_t kBandAt = (3 - kHeld) * kQueryBytes, kTilesAt = kBandAt + kBandBytes;
  static constexpr uint32_t kEnd = kTilesAt + (4 + kRing) * kTileBytes;
  static constexpr uint32_t kSharedBytes = kEnd > 3 * kQueryBytes ? kEnd : 3 * kQueryBytes;

  static int64_t parts(const Params& x) { return (x.p.L + BM - 1) / BM; }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.p.H * x.p.B; }
  static TXL_DEVICE void run(const Params& params) { DqKernel(params).collect(); }

 private:
  const Params& params;
  const Problem& p;
  const Backward& t;
  int b, h, i0;  // i0: the block's first query
  uint64_t seed;
  uint32_t kept;  // by dropout: a bit for each of the lane's pairs of a group of 64 keys
  Mask mask;
  KeyTiles tiles;
  // band
  float lse[2], delta[2];
  Fragment held[kHeld ? kHeld : 1][kSteps];
  float carry[2][4];         // the band's columns that the tile before left over
  Square<E> slope_carry;     // and those of its gradient
  float clamped[2][2];       // sums of dS over pairs that are clamped to the first row of r, and to the last
  float acc[kHeadTiles][4];  // dq, without the clamped pairs' position part
  uint32_t base;             // of shared memory
  float scale;

  TXL_DEVICE explicit DqKernel(const Params& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head, and so its keys in L2; the blocks that see most keys go first.
        b(block_index() / blocks_of_head() / static_cast<int>(p.H)),
        h(block_index() / blocks_of_head() % static_cast<int>(p.H)),
        i0((blocks_of_head() - 1 - block_index() % blocks_of_head()) * BM),
        seed(kDropout ? static_cast<uint64_t>(load_global(x.dropout_seed)) : 0),
        mask(p, p.keys_of_batch(b)),
        tiles(key_tiles<BM, BN>(p, {mask.lo, mask.hi}, i0)),
        clamped{},
        acc{},
        base(shared_base()),
        scale(x.score_scale()) {
    for (int y = 0; y < 2; ++y) {
      const int i = i0 + row_of_lane() + 8 * y;
      const bool exists = i < mask.L;
      // Of queries beyond the last, every probability is 0.
      const Statistics query = exists ? load_global(x.queries(b, h) + i) : Statistics{infinity(), 0, 0, 0};
      lse[y] = query.lse, delta[y] = query.delta;
    }
  }

  TXL_DEVICE int blocks_of_head() const { return static_cast<int>((p.L + BM - 1) / BM); }

  // Keys and values have two places each, in turns.
  TXL_DEVICE Rows<E, kHead> k_tile(int j0) const { return {base + kTilesAt + j0 / BN % 2 * kTileBytes}; }
  TXL_DEVICE Rows<E, kHead> v_tile(int j0) const {
    return {base + kTilesAt + (2 + j0 / BN % 2) * kTileBytes};
  }
  TXL_DEVICE Rows<E, kHead> ring() const { return {base + kTilesAt + 4 * kTileBytes}; }
  // The warp's 16 rows of the band's gradient.
  TXL_DEVICE uint32_t slope() const {
    return base + kBandAt + static_cast<uint32_t>(opaque(warp()) * 16 * kBandPitch * 4);
  }

  TXL_DEVICE bool is_masked(int j0) const { return j0 < tiles.all_lo || j0 >= tiles.all_hi; }
  TXL_DEVICE bool is_far(int j0) const { return !is_masked(j0) && (j0 < tiles.near || j0 >= tiles.far_last); }
  // Whether the band's gradient lacks pairs: some are not seen, here or in what was carried, or there was
  // nothing to carry.
  TXL_DEVICE bool is_edge(int j0) const { return is_masked(j0) || !follows_band(j0) || is_masked(j0 - BN); }
  TXL_DEVICE bool follows_band(int j0) const { return j0 > tiles.begin && !is_far(j0 - BN); }
  TXL_DEVICE bool ends_band(int j0) const { return j0 + BN >= tiles.end || is_far(j0 + BN); }

  TXL_DEVICE void collect() {
    if (tiles.begin < tiles.end) {
      load_queries();
      copy_tile(tiles.begin);
    }
    for (int j0 = tiles.begin; j0 < tiles.end; j0 += BN) {
      wait_copies<0>();
      sync_threads();  // this tile is there for all, and all are done with the one before
      base = opaque(base);
      if (j0 + BN < tiles.end) copy_tile(j0 + BN);
      if (is_far(j0))
        add_keys<true, false>(j0);
      else if (is_edge(j0))
        add_keys<false, true>(j0);
      else
        add_keys<false, false>(j0);
    }
    store();
  }

  // ---- Loads ----

  // 0: q + u, 1: q + v, 2: dO.
  TXL_DEVICE Rows<E, kHead> query_rows(int n) const {
    const int place = n < kHeld ? 3 - kHeld + n : n - kHeld;
    return {base + static_cast<uint32_t>(place) * kQueryBytes};
  }

  TXL_DEVICE void load_queries() {
    const auto row = [&](int y) { return i0 + y < mask.L ? i0 + y : -1; };
    copy_rows<kHead, kThreads>(query_rows(0), 0, params.template query_rows<E>(params.w.q_u, b, h), BM, row);
    copy_rows<kHead, kThreads>(query_rows(1), 0, params.template query_rows<E>(params.w.q_v, b, h), BM, row);
    copy_rows<kHead, kThreads>(query_rows(2), 0, Source<E>(t.dout, b, h, p), BM, row);
    commit_copies();
    wait_copies<0>();
    sync_threads();
    if constexpr (kHeld > 0) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kHeld; ++n) {
        TXL_UNROLL_GPU
        for (int d = 0; d < kSteps; ++d) held[n][d] = load_fragment(query_rows(n), 16 * warp(), d);
      }
      sync_threads();  // all have read what other tiles will overwrite
    }
  }

  template <int n>
  TXL_DEVICE Fragment query(int d) const {
    if constexpr (n < kHeld)
      return held[n][d];
    else
      return load_fragment(query_rows(n), 16 * warp(), d);
  }

  // Starts to copy what the tile needs: its keys and values, and unless it is far the rows of r that the one
  // before has not brought.
  TXL_DEVICE void copy_tile(int j0) {
    const auto key = [&](int n) { return mask.has_key(j0 + n) ? j0 + n : -1; };
    copy_rows<kHead, kThreads>(k_tile(j0), 0, Source<E>(t.k, opaque(b), h, p), BN, key);
    if (!is_far(j0)) {
      const Source<E> r_rows(t.r, 0, opaque(h), p);
      const int new_chunks = follows_band(j0) ? 1 : kChunks;
      for (int chunk = kChunks - new_chunks; chunk < kChunks; ++chunk) {
        const int c = lowest_row(j0) + chunk * BN;
        copy_rows<kHead, kThreads>(ring(), ring_row(j0, chunk * BN), r_rows, BN,
                                   [&](int n) { return p.r_row(c + n); });
      }
    }
    copy_rows<kHead, kThreads>(v_tile(j0), 0, Source<E>(t.v, opaque(b), h, p), BN, key);
    commit_copies();
  }

  // The first of the lane's two queries is i0 + row_of_lane(), the other is 8 behind it.
  static TXL_DEVICE int row_of_lane() {
    const int thread = opaque(thread_index());
    return thread / 32 * 16 + thread % 32 / 4;
  }
  // The row of r, not yet clamped, of the block's last query and key j0: column 0 of the block's band.
  TXL_DEVICE int lowest_row(int j0) const { return static_cast<int>(p.band(opaque(i0) + BM - 1, j0)); }
  // Where in the ring column x of the block's band has its row of r.
  TXL_DEVICE static int ring_row(int j0, int x) {
    const uint32_t column = static_cast<uint32_t>(x), tile = static_cast<uint32_t>(j0) / BN;
    return static_cast<int>((tile + column / BN) % kRing * BN + column % BN);
  }
  // The warp's first column among the block's.
  TXL_DEVICE static int own_column() { return BM - 16 - 16 * opaque(warp()); }

  // ---- A tile ----

  template <bool kFar, bool kEdge>
  TXL_DEVICE void add_keys(int j0) {
    float ds[kKeyTiles][4] = {};
    if constexpr (kFar)
      add_far_term(ds, j0);
    else
      add_band(ds, j0);
    add_product<(kHeld > 0)>(ds, [&](int d) { return query<0>(d); }, k_tile(j0), [](int n) { return n; });
    float dp[kKeyTiles][4] = {};
    add_product<(kHeld > 2)>(dp, [&](int d) { return query<2>(d); }, v_tile(j0), [](int n) { return n; });
    if constexpr (kDropout) drop(dp, j0);
    const int i = i0 + row_of_lane(), j = j0 + lane() % 4 * 2;
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) {
        const float gradient = exp2_fast(ds[n][x] * scale - lse[x / 2]) * (dp[n][x] - delta[x / 2]);
        // A pair that is not seen may hold NaN.
        ds[n][x] = !kEdge || mask.sees(i + x / 2 * 8, j + 8 * n + x % 2) ? gradient : 0.0f;
      }
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; n += 2)
      add_rows<kEdge>(acc, Square<E>::of(ds[n], ds[n + 1]), k_tile(j0), 8 * n, 0);
    if constexpr (kFar)
      add_clamped(ds, j0 < tiles.near ? 0 : 1);
    else
      add_slope<kEdge>(ds, j0);
  }

  TXL_DEVICE void add_far_term(float (&score)[kKeyTiles][4], int j0) {
    for (int y = 0; y < 2; ++y) {
      const int i = smaller(i0 + row_of_lane() + 8 * y, mask.L - 1);
      const Statistics query = load_global(params.queries(opaque(b), h) + i);
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        score[n][2 * y] = score[n][2 * y + 1] = j0 < tiles.near ? query.first : query.last;
    }
  }

  TXL_DEVICE void add_band(float (&score)[kKeyTiles][4], int j0) {
    const auto position = [&](int d) { return query<1>(d); };
    const int left = own_column();
    if (!follows_band(j0)) {
      for (int n = 0; n < 2; ++n)
        for (int x = 0; x < 4; ++x) carry[n][x] = 0;
      add_product<(kHeld > 1)>(carry, position, ring(), [&](int n) { return ring_row(j0, left + n); });
    }
    float next[kKeyTiles][4] = {};
    add_product<(kHeld > 1)>(next, position, ring(), [&](int n) { return ring_row(j0, left + 16 + n); });
    const int row = opaque(lane()) / 4, column = opaque(lane()) % 4 * 2;
    const uint32_t own = slope() + static_cast<uint32_t>(row * kBandPitch + column) * 4;
    sync_warp();  // what the tile before has left here was read
    for (int n = 0; n < 2; ++n) write_band(own + 32 * n, carry[n]);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n) write_band(own + 64 + 32 * n, next[n]);
    for (int n = 0; n < 2; ++n)
      for (int x = 0; x < 4; ++x) carry[n][x] = next[kKeyTiles - 2 + n][x];
    sync_warp();
    // The lane's first query begins at its column 15 - row, the other one 8 before that.
    const uint32_t first = own + static_cast<uint32_t>(15 - row) * 4;
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x)
        score[n][x] = load_shared<float>(
            first + static_cast<uint32_t>(x / 2 * 8 * (kBandPitch - 1) + 8 * n + x % 2) * 4);
  }

  // Two columns of the lane's queries.
  static TXL_DEVICE void write_band(uint32_t at, const float (&x)[4]) {
    store_shared(at, float2{x[0], x[1]});
    store_shared(at + 8 * kBandPitch * 4, float2{x[2], x[3]});
  }

  // dP is dO v^T of the keys that were kept.
  TXL_DEVICE void drop(float (&dp)[kKeyTiles][4], int j0) {
    if (j0 % DropoutMask::kGroup < BN || j0 == tiles.begin) draw_dropout(j0);
    const float kept_scale = params.kept_scale();
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) {
        const int bit = (x * 2 + n % 2) * 4 + (j0 / 16 + n / 2) % 4;
        dp[n][x] = (kept >> bit & 1) != 0 ? dp[n][x] * kept_scale : 0.0f;
      }
  }

  // A lane's keys of a group of 64 share four calls for each of its queries, and use all their words: 32
  // bits.
  TXL_DEVICE void draw_dropout(int j0) {
    const uint32_t threshold = DropoutMask::threshold(p.dropout_p);
    kept = 0;
    TXL_NO_UNROLL_GPU
    for (int n = 0; n < 8; ++n) {
      const int call =
          j0 / DropoutMask::kGroup * DropoutMask::kLanes + lane() % 4 * 2 + n / 2 % 2 + n % 2 * 8;
      kept |= kept_words(seed, threshold, static_cast<uint32_t>(call), b, h, i0 + row_of_lane() + n / 4 * 8)
              << (4 * n);
    }
  }

  // ---- Position ----

  // Every pair of the tile uses the first row of r (end 0), or the last (1).
  TXL_DEVICE void add_clamped(const float (&ds)[kKeyTiles][4], int end) {
    for (int y = 0; y < 2; ++y) {
      float sum = 0;
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n) sum += ds[n][2 * y] + ds[n][2 * y + 1];
      clamped[0][y] += end == 0 ? sum : 0.0f;
      clamped[1][y] += end == 1 ? sum : 0.0f;
    }
  }

  // The same for the clamped pairs alone, whose dS then counts no more.
  TXL_DEVICE void take_clamped(float (&ds)[kKeyTiles][4], int j0) {
    const int c0 = lowest_row(j0) + BM - 1 - row_of_lane() + lane() % 4 * 2, N = static_cast<int>(p.N);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) {
        const int c = c0 + 8 * n + x % 2 - x / 2 * 8;
        if (c < 0) clamped[0][x / 2] += ds[n][x];
        if (c >= N) clamped[1][x / 2] += ds[n][x];
        if (c < 0 || c >= N) ds[n][x] = 0;
      }
  }

  template <bool kEdge>
  TXL_DEVICE void add_slope(float (&ds)[kKeyTiles][4], int j0) {
    if (lowest_row(j0) < 0 || lowest_row(j0) + BM + BN - 1 > p.N) take_clamped(ds, j0);
    if (!follows_band(j0)) slope_carry = {};
    sync_warp();  // the band was read
    store_carried();
    sync_warp();  // where both write, in the carried columns, dS is to stay
    const uint32_t first = own_slope(15 - opaque(lane()) / 4);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int y = 0; y < 2; ++y) {
        const uint32_t at = first + static_cast<uint32_t>(y * 8 * (kSlopePitch - kBytes) + 8 * n * kBytes);
        store_apart(at, ds[n][2 * y], ds[n][2 * y + 1]);
      }
    sync_warp();
    const int left = own_column();
    TXL_UNROLL_GPU
    for (int n = 0; n < BN; n += 16) add_rows<kEdge>(acc, load_slope(n), ring(), ring_row(j0, left + n), 0);
    slope_carry = load_slope(BN);
    if (ends_band(j0)) {
      keep_carried();
      add_rows<true>(acc, slope_carry, ring(), ring_row(j0, left + BN), 0);
    }
  }

  // Where the band's gradient has what an accumulator holds of the lane's first query, of columns c to c + 7.
  TXL_DEVICE uint32_t own_slope(int c) const {
    const int row = opaque(lane()) / 4, column = opaque(lane()) % 4 * 2 + c;
    return slope() + static_cast<uint32_t>(row * kSlopePitch + column * kBytes);
  }

  // Two neighbours, to an address that need not be a multiple of both.
  static TXL_DEVICE void store_apart(uint32_t at, float x, float y) {
    if constexpr (is_half<E>) {
      const uint32_t pair = pack<E>(x, y);
      store_shared(at, static_cast<uint16_t>(pair));
      store_shared(at + 2, static_cast<uint16_t>(pair >> 16));
    } else {
      store_shared(at, x);
      store_shared(at + 4, y);
    }
  }

  TXL_DEVICE void store_carried() {
    const uint32_t own = own_slope(0);
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n)
      for (int y = 0; y < 2; ++y) {
        const uint32_t at = own + static_cast<uint32_t>(y * 8 * kSlopePitch + n * 8 * kBytes);
        if constexpr (is_half<E>)
          store_shared(at, slope_carry.part[0].r[2 * n + y]);
        else
          store_shared(at, uint2{slope_carry.part[n].r[y], slope_carry.part[n].r[y + 2]});
      }
  }

  // Columns c to c + 15 of the band's gradient.
  TXL_DEVICE Square<E> load_slope(int c) const {
    Square<E> a;
    if constexpr (is_half<E>) {
      const Corner corner = corner_a();
      load_matrix_x4(a.part[0].r,
                     slope() + static_cast<uint32_t>(corner.row * kSlopePitch + 2 * c + 16 * corner.piece));
    } else {
      const uint32_t own = own_slope(c);
      TXL_UNROLL_GPU
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const auto pair = load_shared<uint2>(own + static_cast<uint32_t>(y * 8 * kSlopePitch + n * 32));
          a.part[n].r[y] = pair.x, a.part[n].r[y + 2] = pair.y;
        }
    }
    return a;
  }

  // Of the carried columns row y has the first 15 - y; the others wait for the tile to come, and there is
  // none.
  TXL_DEVICE void keep_carried() {
    const int own = opaque(lane()) % 4 * 2 + opaque(lane()) / 4;
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n)
      for (int y = 0; y < 2; ++y) {
        const int missing = own + n * 8 + y * 8 - 14;  // of the pair: none, the second, both
        if constexpr (is_half<E>) {
          slope_carry.part[0].r[2 * n + y] &= missing > 0 ? 0u : missing == 0 ? 0xffffu : 0xffffffffu;
        } else {
          if (missing > 0) slope_carry.part[n].r[y] = 0;
          if (missing >= 0) slope_carry.part[n].r[y + 2] = 0;
        }
      }
  }

  // ---- Results ----

  TXL_DEVICE void store() {
    for (int end = 0; end < 2; ++end)
      for (int y = 0; y < 2; ++y)
        for (int mask = 1; mask < 4; mask *= 2) clamped[end][y] += shuffle_xor(clamped[end][y], mask);
    if (params.clamps) {
      const Source<E> r_rows(t.r, 0, h, p);
      const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
      const E *first_row = r_rows.data + column, *last_row = first_row + (p.N - 1) * r_rows.row;
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d)
        for (int x = 0; x < 2; ++x) {
          if (8 * d + x >= limit) continue;
          const float first = finite(to_float(load_global(first_row + 8 * d + x)));
          const float last = finite(to_float(load_global(last_row + 8 * d + x)));
          for (int y = 0; y < 2; ++y) acc[d][2 * y + x] += clamped[0][y] * first + clamped[1][y] * last;
        }
    }
    const Rows<E, kHead> results{base + kTilesAt};
    sync_threads();  // all are done with the tiles
    put_rows(results, 16 * warp(), 0, acc, static_cast<float>(p.scale));
    if (params.clamps && lane() % 4 == 0)
      for (int end = 0; end < 2; ++end)
        for (int y = 0; y < 2; ++y)
          store_shared(base + kBandAt + static_cast<uint32_t>(end * BM + row_of_lane() + 8 * y) * 4,
                       clamped[end][y]);
    sync_threads();
    write_rows<kHead, kThreads>(results, BM, Source<E>(t.dq, b, h, p), i0, p.L);
    if (params.clamps) store_clamped();
  }

  // What the block's clamped pairs add to the first and the last row of dr, and behind it to their sum of dS.
  TXL_DEVICE void store_clamped() {
    const Source<E> q_v = params.template query_rows<E>(params.w.q_v, b, h);
    const int width = 2 * (static_cast<int>(p.D) + 1), exist = smaller(BM, mask.L - i0);
    const int64_t part = (static_cast<int64_t>(b) * p.H + h) * blocks_of_head() + i0 / BM;
    for (int w = thread_index(); w < width; w += kThreads) {
      const int end = w / (width / 2), d = w % (width / 2);
      float sum = 0;
      for (int y = 0; y < exist; ++y) {
        const float ds = load_shared<float>(base + kBandAt + static_cast<uint32_t>(end * BM + y) * 4);
        // A query that has no such pair has no part in it, whatever it holds.
        sum += d == p.D ? ds : ds * finite(to_float(load_global(q_v.data + (i0 + y) * q_v.row + d)));
      }
      store_global(params.w.clamped_parts + part * width + w, sum);
    }
  }
};

}  // namespace txl::cuda

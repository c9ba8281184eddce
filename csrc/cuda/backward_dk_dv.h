// dk, dv and dS: a block owns BN keys of a head and goes over the queries that see them in tiles of BM. Its
// warps first share out the band, by queries, and leave it in shared memory; then each warp owns 16 of the
// keys, and its scores are transposed: rows are keys, columns are queries. So P and dS are A operands as they
// are. dS goes to memory besides, turned back.
//
//   band      (q + v) r^T     16 queries, a part of their 16 + BN columns
//   score^T   k (q + u)^T     starts from what is read from the band: row j of query y from column 15 - y + j
//   dP^T      v dO^T
//   dv, dk    P^T dO, dS^T (q + u)
//
// The next query is one row of r lower, so the ring of rows goes down: BM rows are new to a tile. While the
// scores are computed the band's operands of the next tile are on their way, and while the band is, the rest.
#pragma once

#include "backward_tiles.h"

namespace txl::cuda {

// ---- Which tiles of queries a block of keys needs, and how ----

struct QueryTiles {
  int begin, far_last, near, far_first, all_hi, end;  // masked, far (last row), near, far (first row), masked
};

template <int BM, int BN>
TXL_DEVICE QueryTiles query_tiles(const Problem& p, const Chunk& chunk, Range batch, int64_t j0) {
  const int64_t low = larger(j0, batch.lo), high = smaller(j0 + BN, batch.hi) - 1, origin = p.position(0);
  const int64_t begin = floor_to<BM>(low - p.right - origin);
  const int64_t end = low <= high ? larger(begin, smaller(high + p.left - origin + 1, p.L)) : begin;
  const bool whole = batch.lo <= j0 && j0 + BN <= batch.hi;
  const int64_t all_lo = smaller(larger(ceil_to<BM>(j0 + BN - 1 - p.right - origin), begin), end);
  const int64_t all_hi =
      smaller(larger(whole ? floor_to<BM>(smaller(j0 + p.left - origin + 1, p.L)) : 0, all_lo), end);
  const int64_t c = p.band(0, j0);  // the row of query 0 and the first key
  const int64_t near = smaller(larger(floor_to<BM>(c - p.N + 1), all_lo), all_hi);
  const int64_t far_first = smaller(larger(ceil_to<BM>(c + BN), near), all_hi);
  return {chunk.within(begin),     chunk.within(all_lo), chunk.within(near),
          chunk.within(far_first), chunk.within(all_hi), chunk.within(end)};
}

// kHeld: keys and values are kept in registers; else they are read again for every tile.
template <typename E, int kHead, int BN, bool kHeld, bool kDropout>
struct DkDvKernel {
  using Params = BackwardParams;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, BM = kHeld && is_half<E> ? 64 : 32;
  static constexpr int kSteps = kHead / kStep<E>, kQueryTiles = BM / 8;
  // Where there are fewer than 64 keys, warps with the same ones share out the channels of dk and dv.
  static constexpr int kKeyGroups = BN / 16;
  static constexpr int kChannels = kHead * kKeyGroups / kWarps, kOwnTiles = kChannels / 8;
  // n8 tiles of queries at a time: fewer need fewer registers.
  static constexpr int kTogether = kHeld ? 4 : 2;
  static constexpr int kChunks = (BM + BN) / BM;  // of BM rows of r
  static_assert(kHead % 16 == 0 && BN % BM == 0 && kWarps % kKeyGroups == 0, "whole fragments");

  // Shared memory: keys, values, q + u, dO, q + v, the ring of r, the band, statistics of the queries.
  static constexpr uint32_t kRowBytes = Rows<E, kHead>::kRowBytes;
  static constexpr uint32_t kKeyBytes = BN * kRowBytes, kQueryBytes = BM * kRowBytes;
  static constexpr uint32_t kQueriesAt = 2 * kKeyBytes, kRingAt = kQueriesAt + 3 * kQueryBytes;
  static constexpr uint32_t kBandAt = kRingAt + kChunks * kQueryBytes;
  static constexpr uint32_t kStatisticsAt = kBandAt + BandOfTile<BM, BN>::kBytes;
  static constexpr uint32_t kSharedBytes = kStatisticsAt + BM * sizeof(Statistics);

  static int64_t parts(const Params& x) { return (x.p.K + BN - 1) / BN; }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.chunk.heads * x.chunk.batches; }
  static TXL_DEVICE void run(const Params& params) { DkDvKernel(params).collect(); }

 private:
  const Params& params;
  const Problem& p;
  const Backward& t;
  int b, h, j0;  // j0: the block's first key
  Mask mask;
  QueryTiles tiles;
  int lowest_row;            // of r, not yet clamped, for query BM - 1 and the block's first key
  int own_key, own_channel;  // the warp's first among the block's
  Fragment k_held[kHeld ? kSteps : 1], v_held[kHeld ? kSteps : 1];
  float dk[kOwnTiles][4], dv[kOwnTiles][4];
  float ds_sum[4];  // of the lane's keys, over the queries; every column of the n8 tile is the same
  uint32_t base;    // of shared memory
  using TileCopier = Copier<kThreads, Rows<E, kHead>>;
  using Copied = typename TileCopier::Rows;
  TileCopier copier;
  Copied q_u_rows, q_v_rows, dout_rows, r_rows;

  TXL_DEVICE explicit DkDvKernel(const Params& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head; of a causal call the first keys are seen by most queries.
        b(x.chunk.b + block_index() / blocks_of_head() / x.chunk.heads),
        h(x.chunk.h + block_index() / blocks_of_head() % x.chunk.heads),
        j0(block_index() % blocks_of_head() * BN),
        mask(p, p.keys_of_batch(b)),
        tiles(query_tiles<BM, BN>(p, x.chunk, {mask.lo, mask.hi}, j0)),
        lowest_row(static_cast<int>(p.band(BM - 1, j0))),
        own_key(warp() % kKeyGroups * 16),
        own_channel(warp() / kKeyGroups * kChannels),
        dk{},
        dv{},
        ds_sum{},
        base(shared_base()),
        copier(p),
        q_u_rows(copier.rows(x.w.q_u, b, h)),
        q_v_rows(copier.rows(x.w.q_v, b, h)),
        dout_rows(copier.rows(t.dout, b, h)),
        r_rows(copier.rows(t.r, 0, h)) {}

  TXL_DEVICE int blocks_of_head() const { return static_cast<int>((p.K + BN - 1) / BN); }

  TXL_DEVICE Rows<E, kHead> k_tile() const { return {base}; }
  TXL_DEVICE Rows<E, kHead> v_tile() const { return {base + kKeyBytes}; }
  TXL_DEVICE Rows<E, kHead> q_u() const { return {base + kQueriesAt}; }
  TXL_DEVICE Rows<E, kHead> dout() const { return {base + kQueriesAt + kQueryBytes}; }
  TXL_DEVICE Rows<E, kHead> q_v() const { return {base + kQueriesAt + 2 * kQueryBytes}; }
  TXL_DEVICE Rows<E, kHead> ring() const { return {base + kRingAt}; }
  TXL_DEVICE BandOfTile<BM, BN> band() const { return {base + kBandAt}; }

  TXL_DEVICE bool is_masked(int i0) const { return i0 < tiles.far_last || i0 >= tiles.all_hi; }
  TXL_DEVICE bool is_far(int i0) const {
    return !is_masked(i0) && (i0 < tiles.near || i0 >= tiles.far_first);
  }
  TXL_DEVICE bool follows_band(int i0) const { return i0 > tiles.begin && !is_far(i0 - BM); }

  TXL_DEVICE void collect() {
    if (params.chunk.lo > 0)
      each_sum([](float& x, float& y, const float* from) {
        const auto pair = load_own(reinterpret_cast<const float2*>(from));
        x = pair.x, y = pair.y;
      });
    if (tiles.begin < tiles.end) {
      load_keys();
      if (!is_far(tiles.begin)) copy_position(tiles.begin);
      commit_copies();
    }
    for (int i0 = tiles.begin; i0 < tiles.end; i0 += BM) {
      wait_copies<0>();
      sync_threads();  // the band's operands are there for all, and all are done with the tile before
      base = opaque(base);
      copy_queries(i0);
      commit_copies();
      if (!is_far(i0)) compute_band(i0);
      if constexpr (kDropout) draw_dropout(i0);
      wait_copies<0>();
      sync_threads();  // so are the rest and the band, and all are done with the band's operands
      if (i0 + BM < tiles.end && !is_far(i0 + BM)) copy_position(i0 + BM);
      commit_copies();
      if (is_far(i0))
        add_queries<true, false>(i0);
      else if (is_masked(i0))
        add_queries<false, true>(i0);
      else
        add_queries<false, false>(i0);
    }
    store();
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

  // Starts to copy q + v, and the rows of r that the tile before has not brought.
  TXL_DEVICE void copy_position(int i0) {
    copy_queries(q_v(), q_v_rows, i0);
    const int new_chunks = follows_band(i0) ? 1 : kChunks;
    for (int chunk = 0; chunk < new_chunks; ++chunk) {
      const int c = lowest_row - i0 + chunk * BM;
      copier.template copy<BM>(ring(), ring_row(i0, chunk * BM), r_rows, has_rows(p, c, BM), c,
                               [&](int n) { return RowOf{p.r_row(c + n), true}; });
    }
  }

  // Where in the ring column x of the block's band has its row of r. A tile's highest rows give way to the
  // lowest of the next.
  TXL_DEVICE int ring_row(int i0, int x) const {
    const int chunk = x / BM + static_cast<int>(static_cast<uint32_t>(i0) / BM * (kChunks - 1) % kChunks);
    return (chunk < kChunks ? chunk : chunk - kChunks) * BM + x % BM;
  }

  TXL_DEVICE void copy_queries(int i0) {
    copy_queries(q_u(), q_u_rows, i0);
    copy_queries(dout(), dout_rows, i0);
    copy_statistics<BM>(base + kStatisticsAt, params.queries(b, h), i0, p.L);
  }

  TXL_DEVICE void copy_queries(Rows<E, kHead> to, const Copied& from, int i0) const {
    copier.template copy<BM>(to, 0, from, i0 + BM <= mask.L, i0, [&](int y) { return mask.query(i0 + y); });
  }

  TXL_DEVICE Statistics statistics(int y) const {
    return load_shared<Statistics>(base + kStatisticsAt + static_cast<uint32_t>(y) * 16);
  }

  // ---- The band ----

  TXL_DEVICE void compute_band(int i0) {
    using Band = BandOfTile<BM, BN>;
    constexpr int kGroups = BM / 16, kParts = kWarps / kGroups;
    const int group = warp() % kGroups * 16, part = warp() / kGroups;
    float x[Band::template kTiles<kParts>][4] = {};
    add_product<false>(
        x, [&](int d) { return load_fragment(q_v(), group, d); }, ring(),
        [&](int n) { return ring_row(i0, BM - 16 - group + Band::template column<kParts>(part, n / 8)); });
    band().template write<kParts>(x, group, part);
  }

  // A word's bits of a query's 16 calls, by group of 16 keys.
  TXL_DEVICE void draw_dropout(int i0) {
    const auto seed =
        static_cast<uint64_t>(load_global(params.dropout_seed));  // no registers for it elsewhere
    for (int x = thread_index(); x < BM * 16; x += kThreads) {
      const uint32_t call = static_cast<uint32_t>((j0 >> 6) * 16 + x % 16);
      band().write_kept(x / 16, x % 16, kept_words(seed, p.dropout_threshold, call, b, h, i0 + x / 16));
    }
  }

  // ---- A tile ----

  template <bool kFar, bool kMasked>
  TXL_DEVICE void add_queries(int i0) {
    TXL_NO_UNROLL_GPU
    for (int first = 0; first < kQueryTiles; first += kTogether) add_some<kFar, kMasked>(i0, first);
  }

  // The queries of n8 tiles `first` to first + kTogether - 1.
  template <bool kFar, bool kMasked>
  TXL_DEVICE void add_some(int i0, int first) {
    float ds[kTogether][4] = {};
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; ++n)
      for (int x = 0; x < 4; ++x)
        if constexpr (!kFar) ds[n][x] = band().template read<-1>(first + n, x, own_key);
    if constexpr (kFar) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kTogether; ++n)
        for (int x = 0; x < 2; ++x) {
          const Statistics of_query = statistics(query(first + n, x));
          ds[n][x] = ds[n][x + 2] = i0 < tiles.near ? of_query.last : of_query.first;
        }
    }
    const auto row = [&](int n) { return 8 * first + n; };
    add_product<kHeld>(ds, [&](int d) { return k_fragment(d); }, q_u(), row);
    float dp[kTogether][4] = {};
    add_product<kHeld>(dp, [&](int d) { return v_fragment(d); }, dout(), row);
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; ++n)
      for (int y = 0; y < 2; ++y) {
        const Statistics of_query = statistics(query(first + n, y));
        for (int x = y; x < 4; x += 2) {
          const bool seen = !kMasked || sees(i0, first + n, x), kept = !kDropout || is_kept(first + n, x);
          const float weight =
              seen ? probability(multiply_add(ds[n][x], params.scale.scores, -of_query.lse)) : 0.0f;
          const float of_weight = kept ? kDropout ? dp[n][x] * params.scale.kept : dp[n][x] : 0.0f;
          dp[n][x] = kept ? weight : 0.0f;
          ds[n][x] = seen ? weight * (of_weight - of_query.delta) : 0.0f;  // unseen, it may hold NaN
        }
      }
    E* const to = slopes(i0 + 8 * first);
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; n += 2) {
      add_values<kMasked>(Square<E>::of(dp[n], dp[n + 1]), i0, first + n);
      const auto a = Square<E>::of(ds[n], ds[n + 1]);
      add_rows<kMasked>(dk, a, q_u(), 8 * (first + n), own_channel);
      add_sum(ds_sum, a);
      if (kKeyGroups == kWarps || own_channel == 0) store_slopes(to + 8 * n * params.w.chunks.columns, a);
    }
  }

  // The tile's query of element x of n8 tile n, and the element's key.
  static TXL_DEVICE int query(int n, int x) { return 8 * n + lane() % 4 * 2 + x % 2; }
  TXL_DEVICE int key(int x) const { return j0 + own_key + lane() / 4 + x / 2 * 8; }

  TXL_DEVICE bool sees(int i0, int n, int x) const { return mask.sees(i0 + query(n, x), key(x)); }

  TXL_DEVICE bool is_kept(int n, int x) const {
    const int j = key(x);
    return (band().kept(query(n, x), j & 15) >> (j >> 4 & 3) & 1) != 0;
  }

  // dv += a dO for queries 8 n to 8 n + 15.
  template <bool kMasked>
  TXL_DEVICE void add_values(const Square<E>& a, int i0, int n) {
    const int l = opaque(lane());
    TXL_UNROLL_GPU
    for (int d = 0; d < kOwnTiles; d += 2) {
      auto x = SquareRows<E>::load(dout(), 8 * n, own_channel + 8 * d, l);
      if constexpr (kMasked)
        put_nan(dv[d], dv[d + 1], x.take_infinite(), [&](int m, int e) { return sees(i0, n + m, e); });
      add_square(dv[d], dv[d + 1], a, x);
    }
  }

  // Where dS lies of the query from i on, and of the warp's key, whose first pair the lane stores.
  TXL_DEVICE E* slopes(int i) const {
    const int first = lane() / 4, second = lane() % 4 * 2;
    return params.slopes<E>(opaque(b), opaque(h), i + (is_half<E> ? first : second),
                            j0 + own_key + (is_half<E> ? second : first));
  }

  // dS of 16 queries and the warp's keys.
  TXL_DEVICE void store_slopes(E* to, const Square<E>& a) const {
    const int64_t columns = params.w.chunks.columns;
    TXL_UNROLL_GPU
    for (int n = 0; n < 4; ++n)
      if constexpr (is_half<E>) {
        store_global(reinterpret_cast<uint32_t*>(to + n / 2 * 8 * columns + n % 2 * 8),
                     transpose_matrix(a.part[0].r[n]));
      } else {
        for (int m = 0; m < 2; ++m)
          store_global(to + (8 * m + n / 2) * columns + n % 2 * 8, bits<float>(a.part[m].r[n]));
      }
  }

  // ---- Results ----

  // f(two neighbours of dk or dv, where they are among the sums that chunks of a head's queries share).
  template <typename F>
  TXL_DEVICE void each_sum(F f) {
    float* const sums = params.w.sums + static_cast<int64_t>(key(0)) * kHead + own_channel + lane() % 4 * 2;
    TXL_UNROLL_GPU
    for (int d = 0; d < kOwnTiles; ++d)
      for (int y = 0; y < 2; ++y) {
        float* const of_dk = sums + 8 * y * kHead + 8 * d;
        f(dk[d][2 * y], dk[d][2 * y + 1], of_dk);
        f(dv[d][2 * y], dv[d][2 * y + 1], of_dk + params.w.chunks.columns * kHead);
      }
  }

  TXL_DEVICE void store() {
    sync_threads();  // all are done with the keys and values
    put_rows(k_tile(), own_key, own_channel, dk, params.scale.queries);
    put_rows(v_tile(), own_key, own_channel, dv, params.scale.kept);
    if (own_channel == 0 && lane() % 4 == 0)
      for (int y = 0; y < 2; ++y)
        store_shared(base + kBandAt + static_cast<uint32_t>(key(2 * y) - j0) * 4, ds_sum[2 * y]);
    sync_threads();
    if (params.chunk.last) {
      write_rows<kHead, kThreads>(k_tile(), BN, Source<E>(t.dk, b, h, p), j0, p.K);
      write_rows<kHead, kThreads>(v_tile(), BN, Source<E>(t.dv, b, h, p), j0, p.K);
    } else {
      each_sum(
          [](float x, float y, float* to) { store_global(reinterpret_cast<float2*>(to), float2{x, y}); });
    }
    if (t.du.data) store_du();
  }

  // The block's part of du: its keys by their sums of dS, over the queries of all chunks.
  TXL_DEVICE void store_du() {
    const Source<E> k_rows(t.k, b, h, p);
    const int64_t part = (static_cast<int64_t>(b) * p.H + h) * blocks_of_head() + j0 / BN;
    for (int d = thread_index(); d < p.D; d += kThreads) {
      float* const to = params.w.du_parts + part * p.D + d;
      float sum = params.chunk.lo > 0 ? load_own(to) : 0;
      for (int j = larger(mask.lo, j0); j < smaller(mask.hi, j0 + BN); ++j) {
        const float ds = load_shared<float>(base + kBandAt + static_cast<uint32_t>(j - j0) * 4);
        sum += ds * finite(to_float(load_global(k_rows.data + j * k_rows.row + d)));
      }
      store_global(to, sum);
    }
  }
};

// Shared memory has room for no more; the compiler would spill for another.
template <int BN, bool kHeld, bool kDropout>
constexpr int kLeastBlocks<DkDvKernel<f32, 128, BN, kHeld, kDropout>> = 1;

}  // namespace txl::cuda

// dr: a block owns 64 rows of r of a head and goes over the queries that use them, of every batch entry of
// its split. Keys and r change places here: row m of the block is for the next query a key further, so
// (q + v) r^T is the plain product, and those with keys and values are the banded ones, turned the other way.
// The rest is as in dk: each warp owns 16 rows, rows of its tiles are rows of r, columns are queries.
//
//   bands     (q + u) k^T, dO v^T    16 queries, a part of their 16 + 64 columns
//   score^T   r (q + v)^T            starts from what is read from the band: row m of query y from column
//                                    y + m
//   dr        dS^T (q + v)
//
// A clamped pair's row lies outside of r, here it has none: the dq kernel has summed those up.
#pragma once

#include "backward_tiles.h"

namespace txl::cuda {

// ---- Which tiles of queries a block of rows needs ----

struct RowTiles {
  int begin, all_lo, all_hi, end;  // masked, all pairs seen, masked
};

template <int BM, int BN>
TXL_DEVICE RowTiles queries_of_rows(const Problem& p, Range batch, int64_t c0) {
  const int64_t furthest = p.r_zero - c0, nearest = p.r_zero - (smaller(c0 + BN, p.N) - 1);
  const int64_t origin = p.position(0);
  const bool any_seen = nearest <= p.left && furthest >= -p.right && !batch.empty();
  const bool all_seen = furthest <= p.left && nearest >= -p.right;
  const int64_t begin = floor_to<BM>(batch.lo + nearest - origin);
  const int64_t end = any_seen ? larger(begin, smaller(batch.hi + furthest - origin, p.L)) : begin;
  const int64_t all_lo = smaller(larger(ceil_to<BM>(batch.lo + furthest - origin), begin), end);
  const int64_t all_hi =
      smaller(larger(all_seen ? floor_to<BM>(smaller(batch.hi + nearest - origin, p.L)) : 0, all_lo), end);
  RowTiles t;
  t.begin = static_cast<int>(begin), t.all_lo = static_cast<int>(all_lo);
  t.all_hi = static_cast<int>(all_hi), t.end = static_cast<int>(end);
  return t;
}

// kHeld: the rows of r are kept in registers; else they are read again for every tile.
template <typename E, int kHead, int BM, bool kHeld, bool kDropout>
struct DrKernel {
  using Params = BackwardParams;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, BN = 16 * kWarps;
  static constexpr int kSteps = kHead / kStep<E>, kHeadTiles = kHead / 8, kQueryTiles = BM / 8;
  static constexpr int kTogether = kRow<E, kHead> <= 128 ? kQueryTiles : 2;  // n8 tiles of queries: registers
  static constexpr int kChunks = (BM + BN) / BM;                             // of BM keys and values

  // Shared memory: the rows of r if they stay, q + u, dO, q + v, the rings of keys and values, the two bands,
  // statistics of the queries. The rows of r that are held come by way of the ring of keys.
  using Band = BandOfTile<BM, BN>;
  static constexpr uint32_t kRowBytes = Rows<E, kHead>::kRowBytes, kQueryBytes = BM * kRowBytes;
  static constexpr uint32_t kQueriesAt = kHeld ? 0 : BN * kRowBytes, kRingsAt = kQueriesAt + 3 * kQueryBytes;
  static constexpr uint32_t kBandsAt = kRingsAt + 2 * kChunks * kQueryBytes;
  static constexpr uint32_t kStatisticsAt = kBandsAt + 2 * Band::kBytes;
  static constexpr uint32_t kSharedBytes = kStatisticsAt + BM * sizeof(Statistics);

  static int64_t parts(const Params& x) { return (x.p.N + BN - 1) / BN; }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.p.H * x.w.splits; }
  static TXL_DEVICE void run(const Params& params) { DrKernel(params).collect(); }

 private:
  const Params& params;
  const Problem& p;
  const Backward& t;
  int split, h, c0;  // c0: the block's first row
  uint64_t seed;
  Fragment held[kHeld ? kSteps : 1];
  float dr[kHeadTiles][4];
  float ds_sum[4];  // of the lane's rows, over the queries; every column of the n8 tile is the same
  uint32_t base;    // of shared memory
  using TileCopier = Copier<kThreads, Rows<E, kHead>>;
  using Copied = typename TileCopier::Rows;
  TileCopier copier;

  // Of a batch entry:
  struct Entry {
    int b;
    Mask mask;
    RowTiles tiles;
    int first_key;  // of query 0 and the block's first row
    Copied q_u, q_v, dout, k, v;

    TXL_DEVICE Entry(const DrKernel& block, int b_)
        : b(b_),
          mask(block.p, block.p.keys_of_batch(b)),
          tiles(queries_of_rows<BM, BN>(block.p, {mask.lo, mask.hi}, block.c0)),
          first_key(static_cast<int>(block.p.key(0, block.c0))),
          q_u(block.copier.rows(block.params.w.q_u, b, block.h)),
          q_v(block.copier.rows(block.params.w.q_v, b, block.h)),
          dout(block.copier.rows(block.t.dout, b, block.h)),
          k(block.copier.rows(block.t.k, b, block.h)),
          v(block.copier.rows(block.t.v, b, block.h)) {}

    TXL_DEVICE bool is_masked(int i0) const { return i0 < tiles.all_lo || i0 >= tiles.all_hi; }
  };

  TXL_DEVICE explicit DrKernel(const Params& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head; of a causal call the last rows are used by most queries.
        split(block_index() / blocks_of_head() / static_cast<int>(p.H)),
        h(block_index() / blocks_of_head() % static_cast<int>(p.H)),
        c0((blocks_of_head() - 1 - block_index() % blocks_of_head()) * BN),
        seed(kDropout ? static_cast<uint64_t>(load_global(x.dropout_seed)) : 0),
        dr{},
        ds_sum{},
        base(shared_base()),
        copier(p) {}

  TXL_DEVICE int blocks_of_head() const { return static_cast<int>((p.N + BN - 1) / BN); }
  TXL_DEVICE static int own_row() { return 16 * warp(); }

  TXL_DEVICE Rows<E, kHead> q_u() const { return {base + kQueriesAt}; }
  TXL_DEVICE Rows<E, kHead> dout() const { return {base + kQueriesAt + kQueryBytes}; }
  TXL_DEVICE Rows<E, kHead> q_v() const { return {base + kQueriesAt + 2 * kQueryBytes}; }
  TXL_DEVICE Rows<E, kHead> k_ring() const { return {base + kRingsAt}; }
  TXL_DEVICE Rows<E, kHead> v_ring() const { return {base + kRingsAt + kChunks * kQueryBytes}; }
  TXL_DEVICE Rows<E, kHead> r_tile() const { return {kHeld ? k_ring().address : base}; }
  TXL_DEVICE Band content() const { return {base + kBandsAt}; }
  TXL_DEVICE Band dout_v() const { return {base + kBandsAt + Band::kBytes}; }

  TXL_DEVICE void collect() {
    load_rows();
    if (params.clamps && split == 0) add_clamped();
    const int entries = static_cast<int>(params.w.entries),
              end = smaller((split + 1) * entries, static_cast<int>(p.B));
    for (int b = split * entries; b < end; ++b) add_entry(Entry(*this, b));
    store();
  }

  TXL_DEVICE void add_entry(const Entry& entry) {
    const RowTiles& tiles = entry.tiles;
    if (tiles.begin >= tiles.end) return;
    copy_banded(entry, tiles.begin);
    commit_copies();
    for (int i0 = tiles.begin; i0 < tiles.end; i0 += BM) {
      wait_copies<0>();
      sync_threads();  // the bands' operands are there for all, and all are done with the tile before
      base = opaque(base);
      copy_plain(entry, i0);
      commit_copies();
      compute_bands(i0);
      if constexpr (kDropout) draw_dropout(entry, i0);
      wait_copies<0>();
      sync_threads();  // so are the rest and the bands, and all are done with the bands' operands
      if (i0 + BM < tiles.end) copy_banded(entry, i0 + BM);
      commit_copies();
      if (entry.is_masked(i0))
        add_queries<true>(entry, i0);
      else
        add_queries<false>(entry, i0);
    }
  }

  // ---- Loads ----

  TXL_DEVICE void load_rows() {
    copy_rows<kThreads, BN>(r_tile(), t.r, 0, h, p, [&](int n) { return RowOf{c0 + n, c0 + n < p.N}; });
    commit_copies();
    wait_copies<0>();
    sync_threads();
    if constexpr (kHeld) {
      TXL_UNROLL_GPU
      for (int d = 0; d < kSteps; ++d) held[d] = load_fragment(r_tile(), own_row(), d);
      sync_threads();  // all have read what keys will overwrite
    }
  }

  // What clamped pairs add to the first (end 0) and to the last row, and behind it their sum of dS.
  TXL_DEVICE void add_clamped() {
    const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
    for (int end = 0; end < 2; ++end) {
      const float* from = params.w.clamped + (2 * static_cast<int64_t>(h) + end) * (p.D + 1);
      TXL_UNROLL_GPU
      for (int y = 0; y < 2; ++y) {
        if (c0 + own_row() + lane() / 4 + 8 * y != (end == 0 ? 0 : p.N - 1)) continue;
        TXL_UNROLL_GPU
        for (int d = 0; d < kHeadTiles; ++d)
          for (int x = 0; x < 2; ++x)
            if (8 * d + x < limit) dr[d][2 * y + x] += load_global(from + column + 8 * d + x);
        ds_sum[2 * y] += load_global(from + p.D);
      }
    }
  }

  TXL_DEVICE Fragment row(int d) const {
    if constexpr (kHeld)
      return held[d];
    else
      return load_fragment(r_tile(), own_row(), d);
  }

  // Where in the rings column x of the block's bands has its key and value.
  static TXL_DEVICE int ring_row(int i0, int x) {
    const int chunk = x / BM + static_cast<int>(static_cast<uint32_t>(i0) / BM % kChunks);
    return (chunk < kChunks ? chunk : chunk - kChunks) * BM + x % BM;
  }

  TXL_DEVICE void copy_queries(Rows<E, kHead> to, const Copied& from, const Entry& entry, int i0) const {
    copier.template copy<BM>(to, 0, from, i0 + BM <= entry.mask.L, i0,
                             [&](int y) { return entry.mask.query(i0 + y); });
  }

  // Starts to copy q + u and dO, and the keys and values that the tile before has not brought.
  TXL_DEVICE void copy_banded(const Entry& entry, int i0) {
    copy_queries(q_u(), entry.q_u, entry, i0);
    copy_queries(dout(), entry.dout, entry, i0);
    for (int chunk = i0 > entry.tiles.begin ? kChunks - 1 : 0; chunk < kChunks; ++chunk) {
      const int j0 = entry.first_key + i0 + chunk * BM;
      const auto key = [&](int n) { return entry.mask.key(j0 + n); };
      const bool whole = entry.mask.has_keys(j0, BM);
      const int to = ring_row(i0, chunk * BM);
      copier.template copy<BM>(k_ring(), to, entry.k, whole, j0, key);
      copier.template copy<BM>(v_ring(), to, entry.v, whole, j0, key);
    }
  }

  TXL_DEVICE void copy_plain(const Entry& entry, int i0) {
    copy_queries(q_v(), entry.q_v, entry, i0);
    copy_statistics<BM>(base + kStatisticsAt, params.queries(entry.b, h), i0, p.L);
  }

  // ---- The bands: half of the warps compute that of the keys, the others that of the values ----

  TXL_DEVICE void compute_bands(int i0) {
    constexpr int kGroups = BM / 16, kParts = kWarps / 2 / kGroups;
    const bool of_values = warp() >= kWarps / 2;
    const int group = warp() % kGroups * 16, part = warp() % (kWarps / 2) / kGroups;
    const Rows<E, kHead> queries = of_values ? dout() : q_u();
    float x[Band::template kTiles<kParts>][4] = {};
    add_product<false>(
        x, [&](int d) { return load_fragment(queries, group, d); }, of_values ? v_ring() : k_ring(),
        [&](int n) { return ring_row(i0, group + Band::template column<kParts>(part, n / 8)); });
    (of_values ? dout_v() : content()).template write<kParts>(x, group, part);
  }

  // A query's keys begin anywhere in a group of 64 and end in the next: bits 0 to 3 are the words of the
  // first group's call, 4 to 7 those of the second's.
  TXL_DEVICE void draw_dropout(const Entry& entry, int i0) {
    for (int x = thread_index(); x < BM * 16; x += kThreads) {
      const int i = i0 + x / 16;
      const uint32_t call = static_cast<uint32_t>(((entry.first_key + i) >> 6) * 16 + x % 16);
      content().write_kept(x / 16, x % 16,
                           kept_words(seed, p.dropout_threshold, call, entry.b, h, i) |
                               kept_words(seed, p.dropout_threshold, call + 16, entry.b, h, i) << 4);
    }
  }

  // ---- A tile ----

  template <bool kMasked>
  TXL_DEVICE void add_queries(const Entry& entry, int i0) {
    TXL_NO_UNROLL_GPU
    for (int first = 0; first < kQueryTiles; first += kTogether) add_some<kMasked>(entry, i0, first);
  }

  // The queries of n8 tiles `first` to first + kTogether - 1.
  template <bool kMasked>
  TXL_DEVICE void add_some(const Entry& entry, int i0, int first) {
    float ds[kTogether][4];
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; ++n)
      for (int x = 0; x < 4; ++x) ds[n][x] = content().template read<1>(first + n, x, own_row());
    add_product<kHeld>(ds, [&](int d) { return row(d); }, q_v(), [&](int n) { return 8 * first + n; });
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; ++n)
      for (int y = 0; y < 2; ++y) {
        const Statistics of_query =
            load_shared<Statistics>(base + kStatisticsAt + static_cast<uint32_t>(query(first + n, y)) * 16);
        for (int x = y; x < 4; x += 2) {
          const float weight = probability(multiply_add(ds[n][x], params.scale.scores, -of_query.lse));
          float dp = dout_v().template read<1>(first + n, x, own_row());
          if constexpr (kDropout) dp = is_kept(entry, i0, first + n, x) ? dp * params.scale.kept : 0.0f;
          // A pair that is not seen may hold NaN.
          ds[n][x] = !kMasked || sees(entry, i0, first + n, x) ? weight * (dp - of_query.delta) : 0.0f;
        }
      }
    TXL_UNROLL_GPU
    for (int n = 0; n < kTogether; n += 2) {
      const auto a = Square<E>::of(ds[n], ds[n + 1]);
      add_rows<kMasked>(dr, a, q_v(), 8 * (first + n), 0);
      add_sum(ds_sum, a);
    }
  }

  // The tile's query of element x of n8 tile n, and its key.
  static TXL_DEVICE int query(int n, int x) { return 8 * n + lane() % 4 * 2 + x % 2; }
  static TXL_DEVICE int key(const Entry& entry, int i0, int n, int x) {
    return entry.first_key + i0 + query(n, x) + own_row() + lane() / 4 + x / 2 * 8;
  }

  TXL_DEVICE bool sees(const Entry& entry, int i0, int n, int x) const {
    return entry.mask.sees(i0 + query(n, x), key(entry, i0, n, x));
  }

  TXL_DEVICE bool is_kept(const Entry& entry, int i0, int n, int x) const {
    const int j = key(entry, i0, n, x), group = (entry.first_key + i0 + query(n, x)) >> 6;
    const int bit = ((j >> 6) - group) * 4 + (j >> 4 & 3);
    return (content().kept(query(n, x), j & 15) >> bit & 1) != 0;
  }

  // ---- Results ----

  TXL_DEVICE void store() {
    sync_threads();  // all are done with the tiles
    if (lane() % 4 == 0)
      for (int y = 0; y < 2; ++y)
        store_shared(base + kBandsAt + static_cast<uint32_t>(own_row() + lane() / 4 + 8 * y) * 4,
                     ds_sum[2 * y]);
    const Rows<E, kHead> results = k_ring();
    if (params.w.splits > 1)
      store_part();
    else
      put_rows(results, own_row(), 0, dr, params.scale.queries);
    sync_threads();
    if (params.w.splits == 1) write_rows<kHead, kThreads>(results, BN, Source<E>(t.dr, 0, h, p), c0, p.N);
    if (t.dv_bias.data) store_dv_bias();
  }

  TXL_DEVICE void store_part() {
    const float factor = params.scale.queries;
    const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      const int c = c0 + own_row() + lane() / 4 + 8 * y;
      if (c >= p.N) continue;
      float* to = params.w.dr_parts + ((static_cast<int64_t>(split) * p.H + h) * p.N + c) * p.D + column;
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d)
        for (int x = 0; x < 2; ++x)
          if (8 * d + x < limit) store_global(to + 8 * d + x, dr[d][2 * y + x] * factor);
    }
  }

  // The block's part of the gradient of v: its rows by their sums of dS.
  TXL_DEVICE void store_dv_bias() {
    const Source<E> r_rows(t.r, 0, h, p);
    const int64_t part = (static_cast<int64_t>(split) * p.H + h) * blocks_of_head() + c0 / BN;
    for (int d = thread_index(); d < p.D; d += kThreads) {
      float sum = 0;
      for (int n = 0; n < smaller<int64_t>(BN, p.N - c0); ++n) {
        const float ds = load_shared<float>(base + kBandsAt + static_cast<uint32_t>(n) * 4);
        sum += ds * finite(to_float(load_global(r_rows.data + (c0 + n) * r_rows.row + d)));
      }
      store_global(params.w.dv_bias_parts + part * p.D + d, sum);
    }
  }
};

// Shared memory leaves room for two blocks of float32 at most; the compiler would spill for a third.
template <int kHead, int BM, bool kHeld, bool kDropout>
constexpr int kLeastBlocks<DrKernel<f32, kHead, BM, kHeld, kDropout>> = 1;

}  // namespace txl::cuda

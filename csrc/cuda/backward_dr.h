// dr: a block owns 64 rows of r of a head (128 by warpgroups) and goes over the queries that use them, of
// every batch entry of its split. Each warp owns 16 of the rows: a tile's columns are queries, and dS^T (q +
// v) is dr.
//
// dS it takes from memory, of BM queries a row each. For the next query, the key of a row of r is one
// further: from row to row of dS, what belongs to the block begins one column later. So the shift is a matter
// of where to read. Copies begin at whole pieces of 16 bytes, and what lies before the first column wanted is
// skipped.
//
// A clamped pair's row lies outside of r, here it has none: the dq kernel has summed those up.
#pragma once

#include "backward_block.h"

namespace txl::cuda {

// ---- Which tiles of queries a block of rows needs ----

// None is far: a block's rows are those that pairs have of their own.
template <int BM, int BN>
TXL_DEVICE TileBounds queries_of_rows(const Problem& p, const Chunk& chunk, Range batch, int64_t c0) {
  const int64_t furthest = p.r_zero - c0, nearest = p.r_zero - (smaller(c0 + BN, p.N) - 1);
  const int64_t origin = p.position(0);
  const bool any_seen = nearest <= p.left && furthest >= -p.right && !batch.empty();
  const bool all_seen = furthest <= p.left && nearest >= -p.right;
  const int64_t begin = floor_to<BM>(batch.lo + nearest - origin);
  const int64_t end = any_seen ? larger(begin, smaller(batch.hi + furthest - origin, p.L)) : begin;
  const int64_t all_lo = smaller(larger(ceil_to<BM>(batch.lo + furthest - origin), begin), end);
  const int64_t all_hi =
      smaller(larger(all_seen ? floor_to<BM>(smaller(batch.hi + nearest - origin, p.L)) : 0, all_lo), end);
  const int first_whole = chunk.within(all_lo), end_whole = chunk.within(all_hi);
  return {chunk.within(begin), first_whole, first_whole, end_whole, end_whole, chunk.within(end)};
}

// ---- The product ----

template <typename E, int kChannels, int kQueries>
struct RowBlock {
  using Params = BackwardParams;
  using Element = E;
  static constexpr int kHead = kChannels, BM = kQueries, kWarps = 4;
  static constexpr bool kPanels = false;  // whether q + v lies as wgmma reads it
  static constexpr int kSlots = 2;        // of tiles, in shared memory
  static constexpr uint32_t kOwnBytes = 0;

  // dr += dS^T q_v, sum += dS of each row; slopes(n): dS^T of the tile's n-th 16 queries. kMasked: some are
  // not seen.
  template <bool kMasked, int kHeadTiles, typename Tile, typename F>
  static TXL_DEVICE void add(float (&dr)[kHeadTiles][4], float (&sum)[1][4], Tile q_v, F slopes) {
    TXL_UNROLL_GPU
    for (int n = 0; n < BM / 16; ++n) {
      const auto a = slopes(n);
      add_rows<kMasked>(dr, a, q_v, 16 * n, 0);
      add_sum(sum[0], a);
    }
  }
};

// ---- The kernel ----

// Block: RowBlock or WarpgroupRowBlock.
template <typename Block>
struct DrKernel : private Block {
  using Params = typename Block::Params;
  using E = typename Block::Element;
  static constexpr int kHead = Block::kHead, BM = Block::BM, kWarps = Block::kWarps;
  static constexpr int kSlots = Block::kSlots;  // of tiles: one that is multiplied, others on their way
  using Tile = std::conditional_t<Block::kPanels, Panels<E, kHead, BM>, Rows<E, kHead>>;
  static constexpr int kThreads = 32 * kWarps, BN = 16 * kWarps;
  static constexpr int kHeadTiles = kHead / 8;
  static constexpr int kPieces = BN / kPiece<E> + 1;  // of a row of dS, which may begin within the first

  // Shared memory: kSlots slots each for dS and q + v; the block's own; the sums of dS at the end. From a
  // row of dS to the second next are 8 banks modulo 32.
  static constexpr uint32_t kSlopeBytes = kPieces * 16, kQueryBytes = BM * Tile::kRowBytes;
  static constexpr uint32_t kQueriesAt = kSlots * BM * kSlopeBytes,
                            kOwnAt = kQueriesAt + kSlots * kQueryBytes, kSumsAt = kOwnAt + Block::kOwnBytes;
  static constexpr uint32_t kAlignment = Block::kPanels ? 1024 : 128;  // of tiles; shared_base() has 128
  static constexpr uint32_t kSharedBytes = kSumsAt + BN * 4 + kAlignment - 128;
  static_assert(kQueriesAt % kAlignment == 0, "tiles begin at multiples of it");
  static_assert(Chunk::kRows % BM == 0, "a chunk begins with a tile");
  static_assert(kSlots * kQueryBytes >= BN * Rows<E, kHead>::kRowBytes, "room for the results");

  static TXL_HD int64_t parts(const BackwardParams& x) { return div_up(x.p.N, BN); }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.chunk.heads * splits(x).size(); }
  static TXL_DEVICE void run(const Params& params) { DrKernel(params).collect(); }

 private:
  const Params& params;
  const Problem& p;
  const Backward& t;
  int split, h, c0;  // c0: the block's first row
  int first_entry, end_entry;
  float dr[kHeadTiles][4];
  float ds_sum[1][4];  // of the lane's rows, over the queries; every column of the n8 tile is the same
  uint32_t base;       // of shared memory
  using TileCopier = Copier<kThreads, Tile>;
  using Copied = typename TileCopier::From;
  TileCopier copier;

  // Of a batch entry:
  struct Entry {
    int b;
    Mask mask;
    TileBounds bounds, own;  // the block's, and those of the warpgroup's 64 rows
    int first_key;           // of query 0 and the block's first row
    Copied q_v;

    TXL_DEVICE Entry(const DrKernel& block, int b_)
        : b(b_),
          mask(block.p, block.p.keys_of_batch(b)),
          bounds(queries_of_rows<BM, BN>(block.p, block.params.chunk, {mask.lo, mask.hi}, block.c0)),
          own(BN == 64 ? bounds
                       : queries_of_rows<BM, 64>(block.p, block.params.chunk, {mask.lo, mask.hi},
                                                 block.c0 + uniform(warp() / 4) * 64)),
          first_key(static_cast<int>(block.p.key(0, block.c0))),
          q_v(block.copier.rows(block.params.w.q_v, b, block.h)) {}

    // How many elements before the block's first the tile's row y of dS is copied from; BM is whole pieces.
    TXL_DEVICE int skipped(int y) const { return (first_key + y) & (kPiece<E> - 1); }
  };

  // Those with entries in the chunk.
  static TXL_HD Range splits(const Params& x) {
    return {x.chunk.b / x.w.entries, (x.chunk.b + x.chunk.batches - 1) / x.w.entries + 1};
  }

  TXL_DEVICE explicit DrKernel(const Params& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head; of a causal call the last rows are used by most queries.
        split(static_cast<int>(splits(x).lo) + block_index() / blocks_of_head() / x.chunk.heads),
        h(x.chunk.h + block_index() / blocks_of_head() % x.chunk.heads),
        c0((blocks_of_head() - 1 - block_index() % blocks_of_head()) * BN),
        first_entry(larger(split * static_cast<int>(x.w.entries), x.chunk.b)),
        end_entry(smaller((split + 1) * static_cast<int>(x.w.entries), x.chunk.b + x.chunk.batches)),
        dr{},
        ds_sum{},
        base(aligned_base<kAlignment>()),
        copier(p) {}

  TXL_DEVICE int blocks_of_head() const { return static_cast<int>(parts(params)); }
  TXL_DEVICE static int own_row() { return 16 * warp(); }
  // Whether there are sums of chunks before: the batch's entries come in order, and each one's queries.
  TXL_DEVICE bool goes_on() const {
    return params.chunk.lo > 0 || first_entry > split * static_cast<int>(params.w.entries);
  }

  // The slots, in turns.
  static TXL_DEVICE uint32_t slot(int i0) { return static_cast<uint32_t>(i0) / BM % kSlots; }
  TXL_DEVICE uint32_t slopes(int i0) const { return base + slot(i0) * BM * kSlopeBytes; }
  TXL_DEVICE Tile q_v(int i0) const { return {base + kQueriesAt + slot(i0) * kQueryBytes}; }

  TXL_DEVICE void collect() {
    if constexpr (Block::kPanels) this->begin_copies(base + kOwnAt);
    if (params.clamps && split == static_cast<int>(splits(params).lo)) add_clamped();
    for (int b = first_entry; b < end_entry; ++b) add_entry(Entry(*this, b));
    store();
  }

  TXL_DEVICE void add_entry(const Entry& entry) {
    const TileBounds& bounds = entry.bounds;
    if (bounds.begin >= bounds.end) return;
    sync_threads();  // all are done with the entry before
    constexpr int kAhead = (kSlots - 1) * BM;
    for (int i0 = bounds.begin; i0 < bounds.begin + kAhead; i0 += BM) copy_tile(entry, i0);
    for (int i0 = bounds.begin; i0 < bounds.end; i0 += BM) {
      wait_tile(i0);
      base = opaque(base);
      copy_tile(entry, i0 + kAhead);
      if (BN > 64 && entry.own.is_hidden(i0)) continue;
      if (entry.own.is_masked(i0))
        add_queries<true>(entry, i0);
      else
        add_queries<false>(entry, i0);
    }
  }

  // ---- Loads ----

  // Starts to copy dS and q + v of the tile, if there is one.
  TXL_DEVICE void copy_tile(const Entry& entry, int i0) const {
    if (i0 < entry.bounds.end) start_copies(entry, i0);
    commit_copies();
  }
  TXL_DEVICE void start_copies(const Entry& entry, int i0) const {
    // A thread has pieces of the same column of pieces, of rows that are whole pieces apart: what they skip
    // is the same. The last piece of every row is copied apart.
    constexpr int kOfRow = kPieces - 1, kEvery = kThreads / kOfRow;
    static_assert(kEvery % kPiece<E> == 0 && BM % kEvery == 0 && BM <= kThreads, "one piece of a row each");
    const int thread = opaque(thread_index());
    copy_pieces<BM / kEvery, kEvery>(entry, i0, thread / kOfRow, thread % kOfRow);
    if (thread < BM) copy_pieces<1, 0>(entry, i0, thread, kOfRow);
    if constexpr (Block::kPanels) {
      this->copy(q_v(i0), params, i0, h, entry.b, slot(i0));
    } else {
      copier.template copy<BM>(q_v(i0), entry.q_v, i0 + BM <= entry.mask.L, i0,
                               [&](int y) { return entry.mask.query(i0 + y); });
    }
  }
  // Until the tile is there for all, and all are done with the one before.
  TXL_DEVICE void wait_tile(int i0) {
    if constexpr (Block::kPanels) this->wait(slot(i0));
    wait_copies<kSlots - 2>();
    sync_threads();
  }

  // A piece each of the tile's rows y, y + kEvery, ... Beyond the first key and the last one dS is 0.
  template <int kCount, int kEvery>
  TXL_DEVICE void copy_pieces(const Entry& entry, int i0, int y, int piece) const {
    const int columns = static_cast<int>(params.w.chunks.columns);
    const int j = entry.first_key + i0 + y - entry.skipped(y) + piece * kPiece<E>;
    const E* const from = params.template slopes<E>(entry.b, h, i0 + y, j);
    const uint32_t to =
        slopes(i0) + static_cast<uint32_t>(y) * kSlopeBytes + static_cast<uint32_t>(piece) * 16;
    TXL_UNROLL_GPU
    for (int n = 0; n < kCount; ++n)
      copy_async_16(to + static_cast<uint32_t>(n * kEvery) * kSlopeBytes,
                    from + int64_t{n * kEvery} * (columns + 1),
                    static_cast<uint32_t>(j + n * kEvery) < static_cast<uint32_t>(columns));
  }

  // What clamped pairs add to the first (end 0) and to the last row, and behind it their sum of dS.
  TXL_DEVICE void add_clamped() {
    const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
    for (int end = 0; end < 2; ++end) {
      const float* from = params.w.clamped + (2 * static_cast<int64_t>(h - params.chunk.h) + end) * (p.D + 1);
      TXL_UNROLL_GPU
      for (int y = 0; y < 2; ++y) {
        if (c0 + own_row() + lane() / 4 + 8 * y != (end == 0 ? 0 : p.N - 1)) continue;
        TXL_UNROLL_GPU
        for (int d = 0; d < kHeadTiles; ++d)
          for (int x = 0; x < 2; ++x)
            if (8 * d + x < limit) dr[d][2 * y + x] += load_global(from + column + 8 * d + x);
        ds_sum[0][2 * y] += load_global(from + p.D);
      }
    }
  }

  // ---- A tile ----

  template <bool kMasked>
  TXL_DEVICE void add_queries(const Entry& entry, int i0) {
    this->template add<kMasked>(dr, ds_sum, q_v(i0), [&](int n) {
      auto a = load_slopes(entry, i0, 16 * n);
      if constexpr (kMasked)
        a.keep([&](int m, int x) {
          const int i = i0 + 16 * n + 8 * m + lane() % 4 * 2 + x % 2;
          return entry.mask.sees(i, entry.first_key + i + own_row() + lane() / 4 + x / 2 * 8);
        });
      return a;
    });
  }

  // dS^T of the warp's rows and the tile's 16 queries from `first` on.
  TXL_DEVICE Square<E> load_slopes(const Entry& entry, int i0, int first) const {
    Square<E> a;
    TXL_UNROLL_GPU
    for (int x = 0; x < 2; ++x) {  // of two queries, which go together
      const int y = opaque(lane()) % 4 * 2 + x, column = own_row() + opaque(lane()) / 4 + entry.skipped(y);
      const uint32_t from = slopes(i0) + static_cast<uint32_t>(first + y) * kSlopeBytes +
                            static_cast<uint32_t>(column) * sizeof(E);
      TXL_UNROLL_GPU
      for (int n = 0; n < 2; ++n)
        for (int m = 0; m < 2; ++m) {
          const auto ds =
              load_shared<Bits>(from + static_cast<uint32_t>(8 * n) * kSlopeBytes + 8 * m * sizeof(E));
          if constexpr (is_half<E>) {
            uint32_t& pair = a.part[0].r[2 * n + m];
            pair = x == 0 ? ds : pair | static_cast<uint32_t>(ds) << 16;
          } else {
            a.part[n].r[m + 2 * x] = ds;
          }
        }
    }
    return a;
  }
  using Bits = std::conditional_t<is_half<E>, uint16_t, uint32_t>;

  // ---- Results ----

  TXL_DEVICE void store() {
    sync_threads();  // all are done with the tiles
    if (lane() % 4 == 0)
      for (int y = 0; y < 2; ++y)
        store_shared(base + kSumsAt + static_cast<uint32_t>(own_row() + lane() / 4 + 8 * y) * 4,
                     ds_sum[0][2 * y]);
    const Rows<E, kHead> results{base + kQueriesAt};
    if (params.w.whole_dr)
      put_rows(results, own_row() + lane() / 4, 0, dr, params.scale.magnitude);
    else if (params.w.dr_parts)
      store_part();
    sync_threads();
    if (params.w.whole_dr) write_rows<kHead, kThreads>(results, BN, Source<E>(t.dr, 0, h, p), c0, p.N);
    if (t.dv_bias.data) store_dv_bias();
  }

  TXL_DEVICE void store_part() {
    const float factor = params.scale.magnitude;
    const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      const int c = c0 + own_row() + lane() / 4 + 8 * y;
      if (c >= p.N) continue;
      float* to = params.w.dr_parts + ((static_cast<int64_t>(split) * p.H + h) * p.N + c) * p.D + column;
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d)
        for (int x = 0; x < 2; ++x)
          if (8 * d + x < limit)
            store_global(to + 8 * d + x,
                         dr[d][2 * y + x] * factor + (goes_on() ? load_written(to + 8 * d + x) : 0));
    }
  }

  // The block's part of the gradient of v: its rows by their sums of dS.
  TXL_DEVICE void store_dv_bias() {
    using Sums = WeightedRows<E, kHead, kThreads>;
    static_assert(Sums::kBytes <= kQueriesAt, "room where dS was");
    const int64_t part = (static_cast<int64_t>(split) * p.H + h) * blocks_of_head() + c0 / BN;
    Sums::add(t.r, 0, h, p, c0, static_cast<int>(smaller<int64_t>(BN, p.N - c0)), base + kSumsAt, base,
              [&](int d, float sum) {
                float* const to = params.w.dv_bias_parts + part * p.D + d;
                store_global(to, goes_on() ? load_written(to) + sum : sum);
              });
  }
};

// The compiler would spill for a fourth, and for an eighth.
template <typename E, int BM>
constexpr int kLeastBlocks<DrKernel<RowBlock<E, 96, BM>>> = 3;
template <typename E, int BM>
constexpr int kLeastBlocks<DrKernel<RowBlock<E, 32, BM>>> = 7;

}  // namespace txl::cuda

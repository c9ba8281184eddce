// dq: what becomes of dS of a block of queries (slope_block.h), tile by tile: its products with keys, and by
// the band with rows of r. Clamped pairs use one row of r: of their dS a sum is enough.
#pragma once

#include "slope_block.h"

namespace txl::cuda {

// Block: what computes the products of a tile: SlopeBlock or WarpgroupSlopeBlock.
template <typename Block>
struct DqKernel : private Block {
  using Params = typename Block::Params;
  using E = typename Block::Element;
  using Block::kHeadTiles, Block::kSquares, Block::kNextQuery;
  using Block::kThreads, Block::kSharedBytes, Block::BM, Block::BN, Block::kHead;

  // Of a head.
  static TXL_HD int64_t parts(const BackwardParams& x) { return div_up(x.chunk.hi - x.chunk.lo, BM); }
  static int64_t blocks(const Params& x) { return parts(x) * x.chunk.heads * x.chunk.batches; }
  static TXL_DEVICE void run(const Params& params) { DqKernel(params).collect(); }

 private:
  using Block::is_masked, Block::is_far, Block::is_clamped, Block::follows_band, Block::ends_band;
  using Block::params, Block::p, Block::b, Block::h, Block::i0, Block::mask, Block::bounds, Block::base;

  // Of the lane's two queries sums of dS over pairs that are clamped to the first row of r, and to the last.
  float clamped[2][2] = {};
  float acc[kHeadTiles][4] = {};  // dq, without the clamped pairs' position part

  TXL_DEVICE explicit DqKernel(const Params& x) : Block(x, place(x)) {}

  static TXL_DEVICE typename Block::Place place(const Params& x) {
    const Chunk& chunk = x.chunk;
    const int blocks = static_cast<int>(parts(x));
    const Turn turn(blocks, chunk.batches * chunk.heads, x.heads_together);
    const int b = chunk.b + turn.head / chunk.heads;
    return {b, chunk.h + turn.head % chunk.heads, chunk.lo + (blocks - 1 - turn.block) * BM,
            x.p.keys_of_batch(b)};
  }

  // Whether the band's gradient lacks pairs: some are not seen, here or in what was carried, some are
  // clamped, or there was nothing to carry; or it ends here.
  TXL_DEVICE bool is_edge(int j0) const {
    return is_masked(j0) || !follows_band(j0) || is_masked(j0 - BN) || ends_band(j0) || is_clamped(j0);
  }

  // The lane's two, of the block's.
  static TXL_DEVICE int query_of_lane(int y) { return Block::query_of_row(Block::row_of_lane(y)); }

  TXL_DEVICE void collect() {
    if (bounds.begin < bounds.end) this->begin_copies(), this->copy_tile(bounds.begin);
    for (int j0 = bounds.begin; j0 < bounds.end; j0 += BN) {
      this->wait_tile();
      base = opaque(base);
      Square<E> ds[kSquares];
      this->take_slopes(ds, j0);
      if (j0 + BN < bounds.end) this->copy_tile(j0 + BN);
      if (this->is_hidden(j0)) continue;
      if (is_far(j0))
        add_tile<true, false>(ds, j0);
      else if (is_edge(j0))
        add_tile<false, true>(ds, j0);
      else
        add_tile<false, false>(ds, j0);
    }
    store();
  }

  // ---- A tile ----

  template <bool kFar, bool kEdge>
  TXL_DEVICE void add_tile(Square<E> (&ds)[kSquares], int j0) {
    if constexpr (kEdge) {
      const int i = i0 + query_of_lane(0), j = j0 + lane() % 4 * 2;
      TXL_UNROLL_GPU
      for (int m = 0; m < kSquares; ++m)
        ds[m].keep(
            [&](int n, int x) { return mask.sees(i + x / 2 * kNextQuery, j + 16 * m + 8 * n + x % 2); });
    }
    this->template add_keys<kEdge>(acc, ds, j0);
    if constexpr (kFar) {  // every pair of the tile uses the first row of r, or the last
      const bool of_last = j0 >= bounds.near;
      float sum[4] = {};
      TXL_UNROLL_GPU
      for (int m = 0; m < kSquares; ++m) add_sum(sum, ds[m]);
      for (int y = 0; y < 2; ++y)
        clamped[0][y] += of_last ? 0.0f : sum[2 * y], clamped[1][y] += of_last ? sum[2 * y] : 0.0f;
      this->finish(acc, ds);
    } else {
      if constexpr (kEdge) {
        if (is_clamped(j0)) take_clamped(ds, j0);
      }
      this->template add_band<kEdge>(acc, ds, j0);
    }
  }

  // Pairs that are clamped count no more in what follows.
  TXL_DEVICE void take_clamped(Square<E> (&ds)[kSquares], int j0) {
    const int c0 = this->lowest_row(j0) + BM - 1 - query_of_lane(0) + lane() % 4 * 2,
              N = static_cast<int>(p.N);
    const auto row = [&](int m, int n, int x) { return c0 + 16 * m + 8 * n + x % 2 - x / 2 * kNextQuery; };
    for (int end = 0; end < 2; ++end) {
      float sum[4] = {};
      TXL_UNROLL_GPU
      for (int m = 0; m < kSquares; ++m) {
        Square<E> taken = ds[m];
        taken.keep([&](int n, int x) { return end == 0 ? row(m, n, x) < 0 : row(m, n, x) >= N; });
        add_sum(sum, taken);
      }
      for (int y = 0; y < 2; ++y) clamped[end][y] += sum[2 * y];
    }
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      ds[m].keep([&](int n, int x) { return row(m, n, x) >= 0 && row(m, n, x) < N; });
  }

  // ---- Results ----

  TXL_DEVICE void store() {
    if (params.clamps) {
      const Source<E> r_rows(params.t.r, 0, h, p);
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
    const Rows<E, kHead> results{base + Block::kTilesAt};
    sync_threads();  // all are done with the tiles
    put_rows(results, Block::row_of_lane(0), 0, acc, static_cast<float>(p.scale));
    if (params.clamps && lane() % 4 == 0)
      for (int end = 0; end < 2; ++end)
        for (int y = 0; y < 2; ++y)
          store_shared(base + Block::kBandAt + static_cast<uint32_t>(end * BM + query_of_lane(y)) * 4,
                       clamped[end][y]);
    sync_threads();
    write_rows<kHead, kThreads>(results, BM, Source<E>(params.t.dq, b, h, p), i0, params.chunk.hi,
                                [](int n) { return Block::query_of_row(n); });
    if (params.clamps) store_clamped();
  }

  // What the block's clamped pairs add to the first and the last row of dr, and behind it to their sum of dS.
  TXL_DEVICE void store_clamped() {
    using Sums = WeightedRows<E, kHead, kThreads>;
    constexpr uint32_t kScratchAt = Block::kBandAt + 2 * BM * 4;
    static_assert(kScratchAt + Sums::kBytes <= Block::kTilesAt, "room in the band");
    const int width = static_cast<int>(p.D) + 1, exist = smaller(BM, params.chunk.hi - i0);
    const int64_t part = params.chunk.head(b, h) * parts(params) + (i0 - params.chunk.lo) / BM;
    TXL_NO_UNROLL_GPU
    for (int end = 0; end < 2; ++end) {
      const uint32_t weights = base + Block::kBandAt + static_cast<uint32_t>(end * BM) * 4;
      float* const to = params.w.clamped_parts + (2 * part + end) * width;
      // A query that has no such pair has no part in it, whatever it holds.
      Sums::add(params.w.q_v, b, h, p, i0, exist, weights, base + kScratchAt,
                [&](int d, float sum) { store_global(to + d, sum); });
      if (thread_index() == 0) {
        float sum = 0;
        for (int y = 0; y < exist; ++y) sum += load_shared<float>(weights + static_cast<uint32_t>(y) * 4);
        store_global(to + p.D, sum);
      }
      sync_threads();  // all are done with the scratch
    }
  }
};

// As many as shared memory has room for: the compiler would spill for one more.
template <typename E, int kHead, int BN>
constexpr int kLeastBlocks<DqKernel<SlopeBlock<E, kHead, BN>>> =
    (is_half<E> ? kHead <= 128 : kHead <= 64) ? 3 : 1;

}  // namespace txl::cuda

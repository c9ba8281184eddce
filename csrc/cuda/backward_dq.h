// dq: a block owns 64 queries of a head, each of its warps 16 of them, and goes over the keys that they see
// in tiles of BN, as forward does (query_block.h).
//
// The gradient of the band. Every element of a tile's dS belongs to one column of the band, one pair to each:
// row y of a warp's 16 goes to 16 rows of shared memory from column 15 - y on, the opposite of forward's
// shift. The tile before has left over 16 columns, they lie in front; so the first BN columns are whole, they
// are multiplied by their rows of r, and the last 16 are carried on. That is one product, and none is done
// twice.
#pragma once

#include "backward_tiles.h"
#include "query_block.h"

namespace txl::cuda {

// kHeld: how many of q + u, q + v and dO, queries 0, 1 and 2, are kept in registers.
template <typename E, int kHead, int BN, int kHeld, bool kDropout>
struct DqKernel : private QueryBlock<E, kHead, BN, 4, 3, kHeld> {
  using Params = BackwardParams;
  using Block = QueryBlock<E, kHead, BN, 4, 3, kHeld>;
  using Block::kThreads, Block::kSharedBytes, Block::BM, Block::kKeyTiles, Block::kHeadTiles;
  // The gradient of the band lies where the band was. Bytes, an odd number of 16; or of 32, which are read by
  // pairs.
  static constexpr int kBytes = sizeof(E), kSlopePitch = kBytes * Block::kBandPitch;
  static_assert(kSlopePitch <= 4 * Block::kBandPitch, "whole fragments");

  static int64_t parts(const Params& x) { return Block::blocks_of_head(x.p); }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.p.H * x.p.B; }
  static TXL_DEVICE void run(const Params& params) { DqKernel(params).collect(); }

 private:
  using Block::copy_tile;
  using Block::is_masked, Block::is_far, Block::follows_band, Block::row_of_lane, Block::query_rows;
  using Block::k_tile, Block::v_tile, Block::ring, Block::ring_row, Block::lowest_row, Block::own_column;
  using Block::p, Block::b, Block::h, Block::i0, Block::mask, Block::tiles, Block::base;

  const Params& params;
  const Backward& t;
  uint64_t seed;
  float lse[2], delta[2];
  Square<E> slope_carry;     // the columns of the band's gradient that the tile before left over
  float clamped[2][2];       // sums of dS over pairs that are clamped to the first row of r, and to the last
  float acc[kHeadTiles][4];  // dq, without the clamped pairs' position part

  TXL_DEVICE explicit DqKernel(const Params& x)
      : Block(x.p, x.t, 1, x.p.K),
        params(x),
        t(x.t),
        seed(kDropout ? static_cast<uint64_t>(load_global(x.dropout_seed)) : 0),
        clamped{},
        acc{} {
    for (int y = 0; y < 2; ++y) {
      const int i = i0 + row_of_lane(y);
      const bool exists = i < mask.L;
      // Of queries beyond the last, every probability is 0.
      const Statistics query = exists ? load_global(x.queries(b, h) + i) : Statistics{infinity(), 0, 0, 0};
      lse[y] = query.lse, delta[y] = query.delta;
    }
  }

  // Whether the band's gradient lacks pairs: some are not seen, here or in what was carried, or there was
  // nothing to carry.
  TXL_DEVICE bool is_edge(int j0) const { return is_masked(j0) || !follows_band(j0) || is_masked(j0 - BN); }
  TXL_DEVICE bool ends_band(int j0) const { return j0 + BN >= tiles.end || is_far(j0 + BN); }

  TXL_DEVICE void collect() {
    if (tiles.begin < tiles.end) {
      load_queries();
      copy_tile(tiles.begin);
    }
    for (int j0 = tiles.begin; j0 < tiles.end; j0 += BN) {
      this->wait_tile();
      base = opaque(base);
      if (j0 + BN < tiles.end) copy_tile(j0 + BN);
      if (is_far(j0))
        add_tile<true, false>(j0);
      else if (is_edge(j0))
        add_tile<false, true>(j0);
      else
        add_tile<false, false>(j0);
    }
    store();
  }

  // ---- Loads ----

  TXL_DEVICE void load_queries() {
    const auto row = [&](int y) { return mask.query(i0 + y); };
    copy_rows<kThreads, BM>(query_rows(0), params.w.q_u, b, h, p, row);
    copy_rows<kThreads, BM>(query_rows(1), params.w.q_v, b, h, p, row);
    copy_rows<kThreads, BM>(query_rows(2), t.dout, b, h, p, row);
    commit_copies();
    wait_copies<0>();
    sync_threads();
    this->hold_queries();
  }

  // ---- A tile ----

  template <bool kFar, bool kEdge>
  TXL_DEVICE void add_tile(int j0) {
    float ds[kKeyTiles][4] = {};
    if constexpr (kFar) {
      add_far_term(ds, j0);
      this->add_keys(ds, j0);
    } else {
      this->take_scores(ds, j0);
    }
    float dp[kKeyTiles][4] = {};
    this->template add_query_product<2>(dp, v_tile(j0), [](int n) { return n; });
    if constexpr (kDropout) drop(dp, j0);
    const int i = i0 + row_of_lane(0), j = j0 + lane() % 4 * 2;
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) {
        const float gradient =
            probability(multiply_add(ds[n][x], params.scale.scores, -lse[x / 2])) * (dp[n][x] - delta[x / 2]);
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
      const int i = smaller(i0 + row_of_lane(y), mask.L - 1);
      const Statistics query = load_global(params.queries(opaque(b), h) + i);
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        score[n][2 * y] = score[n][2 * y + 1] = j0 < tiles.near ? query.first : query.last;
    }
  }

  // dP is dO v^T of the keys that were kept.
  TXL_DEVICE void drop(float (&dp)[kKeyTiles][4], int j0) {
    this->draw_dropout(seed, j0);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x) dp[n][x] = this->keeps(j0, n, x) ? dp[n][x] * params.scale.kept : 0.0f;
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
    const int c0 = lowest_row(j0) + BM - 1 - row_of_lane(0) + lane() % 4 * 2, N = static_cast<int>(p.N);
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
    return this->own_band() + static_cast<uint32_t>(row * kSlopePitch + column * kBytes);
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
      load_matrix_x4(a.part[0].r, this->own_band() + static_cast<uint32_t>(corner.row * kSlopePitch + 2 * c +
                                                                           16 * corner.piece));
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
        for (int step = 1; step < 4; step *= 2) clamped[end][y] += shuffle_xor(clamped[end][y], step);
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
    const Rows<E, kHead> results{base + Block::kTilesAt};
    sync_threads();  // all are done with the tiles
    put_rows(results, 16 * warp(), 0, acc, static_cast<float>(p.scale));
    if (params.clamps && lane() % 4 == 0)
      for (int end = 0; end < 2; ++end)
        for (int y = 0; y < 2; ++y)
          store_shared(base + Block::kBandAt + static_cast<uint32_t>(end * BM + row_of_lane(y)) * 4,
                       clamped[end][y]);
    sync_threads();
    write_rows<kHead, kThreads>(results, BM, Source<E>(t.dq, b, h, p), i0, p.L);
    if (params.clamps) store_clamped();
  }

  // What the block's clamped pairs add to the first and the last row of dr, and behind it to their sum of dS.
  TXL_DEVICE void store_clamped() {
    const Source<E> q_v(params.w.q_v, b, h, p);
    const int width = 2 * (static_cast<int>(p.D) + 1), exist = smaller(BM, mask.L - i0);
    const int64_t part = (static_cast<int64_t>(b) * p.H + h) * Block::blocks_of_head(p) + i0 / BM;
    for (int w = thread_index(); w < width; w += kThreads) {
      const int end = w / (width / 2), d = w % (width / 2);
      float sum = 0;
      for (int y = 0; y < exist; ++y) {
        const float ds = load_shared<float>(base + Block::kBandAt + static_cast<uint32_t>(end * BM + y) * 4);
        // A query that has no such pair has no part in it, whatever it holds.
        sum += d == p.D ? ds : ds * finite(to_float(load_global(q_v.data + (i0 + y) * q_v.row + d)));
      }
      store_global(params.w.clamped_parts + part * width + w, sum);
    }
  }
};

}  // namespace txl::cuda

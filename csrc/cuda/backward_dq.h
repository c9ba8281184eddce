// dq: a block owns 64 queries of a head, each of its warps 16 of them, and goes over the keys that they see
// in tiles of BN, as forward does (query_block.h). dS it takes from memory.
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

template <typename E, int kHead, int BN>
struct DqKernel : private QueryBlock<E, kHead, BN, 4, 0, 0> {
  using Params = BackwardParams;
  using Block = QueryBlock<E, kHead, BN, 4, 0, 0>;
  using Block::kThreads, Block::kSharedBytes, Block::BM, Block::kHeadTiles;
  // The gradient of the band lies where the band of scores would. Bytes, an odd number of 16; or of 32, which
  // are read by pairs.
  static constexpr int kBytes = sizeof(E), kSlopePitch = kBytes * Block::kBandPitch;
  static constexpr int kSquares = BN / 16;

  static TXL_HD int64_t parts(const Params& x) { return div_up(x.chunk.hi - x.chunk.lo, BM); }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.chunk.heads * x.chunk.batches; }
  static TXL_DEVICE void run(const Params& params) { DqKernel(params).collect(); }

 private:
  using Block::copy_tile;
  using Block::is_masked, Block::is_far, Block::follows_band, Block::row_of_lane;
  using Block::k_tile, Block::ring, Block::ring_row, Block::lowest_row, Block::own_column;
  using Block::p, Block::b, Block::h, Block::i0, Block::mask, Block::tiles, Block::base;

  const Params& params;
  const Backward& t;
  const E* slopes;           // dS of the lane's first query, from its first key of 16 on
  Square<E> next[kSquares];  // dS of the tile to come
  Square<E> slope_carry;     // the columns of the band's gradient that the tile before left over
  float clamped[2][4] = {};  // sums of dS over pairs that are clamped to the first row of r, and to the last
  float acc[kHeadTiles][4] = {};  // dq, without the clamped pairs' position part

  TXL_DEVICE explicit DqKernel(const Params& x)
      : Block(x.p, x.t, place(x)),
        params(x),
        t(x.t),
        slopes(x.slopes<E>(b, h, i0 + row_of_lane(0), lane() % 4 * 2)) {}

  static TXL_DEVICE typename Block::Place place(const Params& x) {
    const Chunk& chunk = x.chunk;
    const int blocks = static_cast<int>(div_up(chunk.hi - chunk.lo, BM));
    const Turn turn(blocks, chunk.batches * chunk.heads, x.heads_together);
    const int b = chunk.b + turn.head / chunk.heads;
    return {b, chunk.h + turn.head % chunk.heads, chunk.lo + (blocks - 1 - turn.block) * BM,
            x.p.keys_of_batch(b)};
  }

  // Whether the band's gradient lacks pairs: some are not seen, here or in what was carried, or there was
  // nothing to carry.
  TXL_DEVICE bool is_edge(int j0) const { return is_masked(j0) || !follows_band(j0) || is_masked(j0 - BN); }
  TXL_DEVICE bool ends_band(int j0) const { return j0 + BN >= tiles.end || is_far(j0 + BN); }

  TXL_DEVICE void collect() {
    if (tiles.begin < tiles.end) {
      copy_tile(tiles.begin);
      load_slopes(tiles.begin);
    }
    for (int j0 = tiles.begin; j0 < tiles.end; j0 += BN) {
      this->wait_tile();
      base = opaque(base);
      Square<E> ds[kSquares];
      TXL_UNROLL_GPU
      for (int n = 0; n < kSquares; ++n) ds[n] = next[n];
      if (j0 + BN < tiles.end) {
        copy_tile(j0 + BN);
        load_slopes(j0 + BN);
      }
      if (is_far(j0))
        add_tile<true, false>(ds, j0);
      else if (is_edge(j0))
        add_tile<false, true>(ds, j0);
      else
        add_tile<false, false>(ds, j0);
    }
    store();
  }

  // As accumulators of scores have it. Of pairs that are not seen there may be anything.
  TXL_DEVICE void load_slopes(int j0) {
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const E* const from = slopes + 8 * y * params.w.chunks.columns + j0 + 16 * m + 8 * n;
          if constexpr (is_half<E>) {
            next[m].part[0].r[2 * n + y] = load_global(reinterpret_cast<const uint32_t*>(from));
          } else {
            const auto pair = load_global(reinterpret_cast<const uint2*>(from));
            next[m].part[n].r[y] = pair.x, next[m].part[n].r[y + 2] = pair.y;
          }
        }
  }

  // ---- A tile ----

  template <bool kFar, bool kEdge>
  TXL_DEVICE void add_tile(Square<E> (&ds)[kSquares], int j0) {
    if constexpr (kEdge) {
      const int i = i0 + row_of_lane(0), j = j0 + lane() % 4 * 2;
      TXL_UNROLL_GPU
      for (int m = 0; m < kSquares; ++m)
        ds[m].keep([&](int n, int x) { return mask.sees(i + x / 2 * 8, j + 16 * m + 8 * n + x % 2); });
    }
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m) add_rows<kEdge>(acc, ds[m], k_tile(j0), 16 * m, 0);
    if constexpr (kFar) {  // every pair of the tile uses the first row of r, or the last
      const bool of_last = j0 >= tiles.near;
      float sum[4] = {};
      TXL_UNROLL_GPU
      for (int m = 0; m < kSquares; ++m) add_sum(sum, ds[m]);
      for (int x = 0; x < 4; ++x)
        clamped[0][x] += of_last ? 0.0f : sum[x], clamped[1][x] += of_last ? sum[x] : 0.0f;
    } else {
      add_slope<kEdge>(ds, j0);
    }
  }

  // ---- Position ----

  // Pairs that are clamped count no more in what follows.
  TXL_DEVICE void take_clamped(Square<E> (&ds)[kSquares], int j0) {
    const int c0 = lowest_row(j0) + BM - 1 - row_of_lane(0) + lane() % 4 * 2, N = static_cast<int>(p.N);
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m) {
      const auto row = [&](int n, int x) { return c0 + 16 * m + 8 * n + x % 2 - x / 2 * 8; };
      Square<E> first = ds[m], last = ds[m];
      first.keep([&](int n, int x) { return row(n, x) < 0; });
      last.keep([&](int n, int x) { return row(n, x) >= N; });
      add_sum(clamped[0], first), add_sum(clamped[1], last);
      ds[m].keep([&](int n, int x) { return row(n, x) >= 0 && row(n, x) < N; });
    }
  }

  template <bool kEdge>
  TXL_DEVICE void add_slope(Square<E> (&ds)[kSquares], int j0) {
    if (lowest_row(j0) < 0 || lowest_row(j0) + BM + BN - 1 > p.N) take_clamped(ds, j0);
    if (!follows_band(j0)) slope_carry = {};
    sync_warp();  // the band was read
    store_carried();
    sync_warp();  // where both write, in the carried columns, dS is to stay
    const uint32_t first = own_slope(15 - opaque(lane()) / 4);
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const int place = y * 8 * (kSlopePitch - kBytes) + (16 * m + 8 * n) * kBytes;
          store_apart(first + static_cast<uint32_t>(place), ds[m], n, y);
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

  // Two neighbours of n8 tile n, to an address that need not be a multiple of both.
  static TXL_DEVICE void store_apart(uint32_t at, const Square<E>& a, int n, int y) {
    if constexpr (is_half<E>) {
      const uint32_t pair = a.part[0].r[2 * n + y];
      store_shared(at, static_cast<uint16_t>(pair));
      store_shared(at + 2, static_cast<uint16_t>(pair >> 16));
    } else {
      store_shared(at, a.part[n].r[y]);
      store_shared(at + 4, a.part[n].r[y + 2]);
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
    slope_carry.keep([&](int n, int x) { return own + 8 * n + x % 2 + x / 2 * 8 < 15; });
  }

  // ---- Results ----

  TXL_DEVICE void store() {
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
          for (int y = 0; y < 2; ++y)
            acc[d][2 * y + x] += clamped[0][2 * y] * first + clamped[1][2 * y] * last;
        }
    }
    const Rows<E, kHead> results{base + Block::kTilesAt};
    sync_threads();  // all are done with the tiles
    put_rows(results, 16 * warp(), 0, acc, static_cast<float>(p.scale));
    if (params.clamps && lane() % 4 == 0)
      for (int end = 0; end < 2; ++end)
        for (int y = 0; y < 2; ++y)
          store_shared(base + Block::kBandAt + static_cast<uint32_t>(end * BM + row_of_lane(y)) * 4,
                       clamped[end][2 * y]);
    sync_threads();
    write_rows<kHead, kThreads>(results, BM, Source<E>(t.dq, b, h, p), i0, p.L);
    if (params.clamps) store_clamped();
  }

  // What the block's clamped pairs add to the first and the last row of dr, and behind it to their sum of dS.
  TXL_DEVICE void store_clamped() {
    const Source<E> q_v(params.w.q_v, b, h, p);
    const int width = 2 * (static_cast<int>(p.D) + 1), exist = smaller(BM, mask.L - i0);
    const int64_t part = params.chunk.head(b, h) * parts(params) + (i0 - params.chunk.lo) / BM;
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

// As many as shared memory has room for: the compiler would spill for one more.
template <typename E, int kHead, int BN>
constexpr int kLeastBlocks<DqKernel<E, kHead, BN>> = is_half<E> && kHead <= 128 ? 3 : 1;

}  // namespace txl::cuda

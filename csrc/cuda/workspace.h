// Backward's memory: what its kernels pass on, what part of the problem is done at a time, the kernel that
// runs first and the one that adds up parts. With P the probabilities and keep the dropout mask over 1 - p:
//
//   dP = dO v^T * keep              delta = sum_d dO * out          dS = P * (dP - delta)
//   dv = (P * keep)^T dO            dk = scale dS^T (q + u)
//   dq = scale (dS k + band(dS) r)  dr = scale band(dS)^T (q + v)
//
// The sums of dq over the queries, du and v's gradient, are taken where they are short: with s_j the sum of
// dS over a key's queries, du = scale sum_j s_j k_j; and likewise over the rows of r. The names and the order
// of steps are those of txl_kernels/triton/_backward.py, whose dq kernel takes these sums.
#pragma once

#include "tiles.h"

namespace txl::cuda {

// ---- Workspace ----

// Of a query: lse to base 2, delta, and (q + v) . r at both ends of r, the position term of far tiles.
struct alignas(16) Statistics {
  float lse, delta, first, last;
};

// dS of a part of the problem lies in memory, between the kernel that makes it and those that sum it up: of
// some heads, or if one head's is too much, of some of its queries. A part of the problem:
struct Chunk {
  int b, batches, h, heads;
  int lo, hi;  // queries; lo is a multiple of kRows
  bool last;   // of its heads

  static constexpr int kRows = 64;  // of dS, and columns: they are filled up to multiples

  TXL_HD int64_t head(int of_b, int of_h) const { return int64_t{of_b - b} * heads + of_h - h; }
  // The rows of a head.
  TXL_HD int64_t rows() const { return div_up(hi - lo, kRows) * kRows; }
  // Where tiles of queries begin or end, as far as the chunk has them.
  TXL_HD int within(int64_t i) const {
    return static_cast<int>(smaller<int64_t>(larger<int64_t>(i, lo), hi));
  }
};

// How the problem is cut, so that dS of a chunk takes at most `budget` bytes, or 64 queries of a head if that
// is more: into chunks of one size, but for the last ones. A head's entries of the batch come together,
// because they share dr.
struct Chunks {
  int64_t columns;  // of dS
  int64_t batches, heads, queries;

  Chunks(const Problem& p, int element_bytes, int64_t budget) {
    columns = div_up(p.K, Chunk::kRows) * Chunk::kRows;
    const int64_t groups = budget / (columns * element_bytes) / Chunk::kRows;     // of kRows queries
    const int64_t of_head = div_up(p.L, Chunk::kRows), whole = groups / of_head;  // whole: heads
    queries = whole ? p.L : even(of_head, groups) * Chunk::kRows;
    batches = even(p.B, whole);
    heads = even(p.H, batches < p.B ? 1 : whole / p.B);
  }

  // f(Chunk) for each, in order.
  template <typename F>
  void each(const Problem& p, F f) const {
    for (int64_t h = 0; h < p.H; h += heads)
      for (int64_t b = 0; b < p.B; b += batches)
        for (int64_t lo = 0; lo < p.L; lo += queries) {
          const auto number = [](int64_t x) { return static_cast<int>(x); };
          const int64_t hi = smaller(lo + queries, p.L);
          f(Chunk{number(b), number(smaller(batches, p.B - b)), number(h), number(smaller(heads, p.H - h)),
                  number(lo), number(hi), hi == p.L});
        }
  }
  bool cuts_queries(const Problem& p) const { return queries < p.L; }
  // Whether dr of a head comes from several chunks.
  bool cuts_heads(const Problem& p) const { return batches < p.B || cuts_queries(p); }

 private:
  // The size of as few equal parts of n as have at most `most`, or 1.
  static int64_t even(int64_t n, int64_t most) { return div_up(n, div_up(n, larger<int64_t>(most, 1))); }
};

// What the kernels pass on, in this order. q + u and q + v are rounded as the operands of a product must be,
// their sign is turned if scale is negative.
struct Workspace {
  static constexpr int kKeys = 32, kRows = 64, kQueries = 64;  // no block has fewer of each

  Chunks chunks;
  void* slopes;            // dS of a chunk, [batches, heads, rows, columns]: rows of the problem's element
  Statistics* statistics;  // [B, H, L]
  View q_u, q_v;           // [B, H, L, D]
  // Clamped pairs' sums of dS (q + v), and of dS behind them, for the first and the last row of r. A chunk's
  // parts [batches, heads, blocks of queries, 2, D + 1] and their sums [heads, 2, D + 1]; none if no pair is
  // clamped.
  float *clamped_parts, *clamped;
  float* du_parts;       // [B, H, blocks of keys, D]
  float* dv_bias_parts;  // [splits, H, blocks of rows, D]
  float* dr_parts;       // [splits, H, N, D]; none if a block has all of it, or dr is not wanted
  float* sums;           // [2, K, class of D], K filled up: dk and dv of a head of several chunks
  int splits;            // shares of the batch that have a dr of their own, for there are few rows of r
  int64_t entries;       // of the batch in a split
  bool by_rows;          // whether anything is wanted of dr's kernel: dr, or v's gradient
  bool whole_dr;         // a block has all of its rows of it
  int64_t floats = 0;

  // head: the class of D. base: null asks for the size alone.
  Workspace(const Problem& p, const Backward& t, int element_bytes, int head, int64_t budget, float* base)
      : chunks(p, element_bytes, budget) {
    const auto take = [&](const char* name, int64_t count) {
      float* at = base && count > 0 ? base + floats : nullptr;
      if (at) passed_on(name, at, count * 4);
      floats += div_up(count, 4) * 4 + kGapBytes / 4;
      return at;
    };
    const int64_t heads = p.B * p.H;
    const int64_t wanted = div_up(512, div_up(p.N, kRows) * chunks.heads);
    entries = div_up(p.B, smaller(wanted, p.B));
    splits = static_cast<int>(div_up(p.B, entries));
    by_rows = t.dr.data || t.dv_bias.data;
    whole_dr = t.dr.data && splits == 1 && !chunks.cuts_heads(p);
    const int64_t rows = div_up(smaller(chunks.queries, p.L), Chunk::kRows) * Chunk::kRows;
    slopes = take("slopes", chunks.batches * chunks.heads * rows * chunks.columns * element_bytes / 4);
    const auto take_queries = [&](const char* name) {
      const int64_t count = heads * p.L + 7;  // a box of eight may end behind the last
      return View{take(name, count * p.D * element_bytes / 4), p.H * p.L * p.D, p.L * p.D, p.D};
    };
    statistics = reinterpret_cast<Statistics*>(take("statistics", heads * p.L * 4));
    q_u = take_queries("q_u"), q_v = take_queries("q_v");
    const int64_t ends = clamps(p) ? 2 * (p.D + 1) : 0;
    clamped_parts = take("clamped_parts", heads * div_up(p.L, kQueries) * ends);
    clamped = take("clamped", p.H * ends);
    du_parts = take("du_parts", t.du.data ? heads * div_up(p.K, kKeys) * p.D : 0);
    dv_bias_parts = take("dv_bias_parts", t.dv_bias.data ? splits * p.H * div_up(p.N, kRows) * p.D : 0);
    dr_parts = take("dr_parts", t.dr.data && !whole_dr ? splits * p.H * p.N * p.D : 0);
    sums = take("sums", chunks.cuts_queries(p) ? 2 * chunks.columns * head : 0);
  }

  // Whether any pair of the call may use a row of r because its own lies outside.
  static bool clamps(const Problem& p) { return p.r_zero < p.left || p.r_zero + p.right > p.N - 1; }
};

struct BackwardParams {
  Problem p;
  Backward t;
  Workspace w;
  bool clamps;
  Scales scale;
  int heads_together;
  Chunk chunk;

  TXL_DEVICE const Statistics* statistics(int64_t b, int64_t h) const {
    return w.statistics + (b * p.H + h) * p.L;
  }

  // dS of the chunk's query i and key j; the next query's is w.chunks.columns further.
  template <typename E>
  TXL_DEVICE E* slopes(int b, int h, int i, int j) const {
    const int64_t row = chunk.head(b, h) * chunk.rows() + i - chunk.lo;
    return static_cast<E*>(w.slopes) + row * w.chunks.columns + j;
  }
  // The same as a tensor [chunk.batches, chunk.heads, chunk.rows(), w.chunks.columns].
  View slopes_view() const {
    const int64_t of_head = chunk.rows() * w.chunks.columns;
    return {w.slopes, chunk.heads * of_head, of_head, w.chunks.columns};
  }
};

// ---- The kernel that runs first: the workspace's rows of queries ----

template <typename E, int kHead>
struct PrepareKernel {
  using Params = BackwardParams;
  static constexpr int kThreads = 128;
  static constexpr uint32_t kSharedBytes = 0;
  // A thread has 16 bytes of a query, the threads of a query are neighbours.
  static constexpr int kChannels = kPiece<E>, kUsed = kHead / kChannels;
  static constexpr int kPieces = kUsed <= 4 ? 4 : kUsed <= 8 ? 8 : kUsed <= 16 ? 16 : 32;
  static constexpr int kQueries = kThreads / kPieces;

  static int64_t blocks(const Params& x) { return div_up(x.p.B * x.p.H * x.p.L, kQueries); }

  static TXL_DEVICE void run(const Params& x) {
    const Problem& p = x.p;
    const Backward& t = x.t;
    const int channel = thread_index() % kPieces * kChannels;
    const int64_t row = static_cast<int64_t>(block_index()) * kQueries + thread_index() / kPieces;
    const bool exists = row < p.B * p.H * p.L;
    const int64_t i = exists ? row % p.L : 0;
    const int h = exists ? static_cast<int>(row / p.L % p.H) : 0;
    const int b = exists ? static_cast<int>(row / p.L / p.H) : 0;
    using Numbers = Piece<E>;
    const auto q = Numbers::load(t.q, b, h, i, channel, p);
    const auto u = Numbers::load(t.bias_u, 0, h, 0, channel, p),
               v = Numbers::load(t.bias_v, 0, h, 0, channel, p);
    const auto q_u = q.plus(u, x.scale.sign), q_v = q.plus(v, x.scale.sign);
    const float delta =
        product(Numbers::load(t.out, b, h, i, channel, p), Numbers::load(t.dout, b, h, i, channel, p));
    float first = 0, last = 0;
    if (x.clamps) {
      const auto rounded = Numbers::of(q_v);
      first = product(rounded, Numbers::load(t.r, 0, h, 0, channel, p));
      last = product(rounded, Numbers::load(t.r, 0, h, p.N - 1, channel, p));
    }
    if (!exists) return;
    if (channel < p.D) {
      store_global(reinterpret_cast<uint4*>(x.w.q_u.at<E>(0, 0, row) + channel), q_u);
      store_global(reinterpret_cast<uint4*>(x.w.q_v.at<E>(0, 0, row) + channel), q_v);
    }
    const float lse = load_global(static_cast<const float*>(t.lse) + row) * kLog2e;
    if (channel == 0) store_global(x.w.statistics + row, Statistics{lse, delta, first, last});
  }

 private:
  // Of two rows, of which a thread has a piece.
  static TXL_DEVICE float product(const Piece<E>& x, const Piece<E>& y) {
    float sum = 0;
    TXL_UNROLL_GPU
    for (int d = 0; d < kChannels; ++d) sum += x.x[d] * y.x[d];
    for (int mask = 1; mask < kPieces; mask *= 2) sum += shuffle_xor(sum, mask);
    return sum;
  }
};

// ---- The kernel that runs after others: sums of their parts, in order ----

// out[h, w / D, w % D] = factor * sum of parts[outer, h, inner, w] for w < width.
struct SumParams {
  const float* parts;
  int64_t outer, H, inner, width, D;
  View out;
  float factor;
};

// kElements neighbours at a time, whose parts are dealt out among the block's threads.
template <typename Out, int kElements>
struct SumKernel {
  using Params = SumParams;
  static constexpr int kThreads = 128, kShares = kThreads / kElements;
  static constexpr uint32_t kSharedBytes = kThreads * 4;

  static int64_t blocks(const Params& x) { return div_up(x.width, kElements) * x.H; }

  static TXL_DEVICE void run(const Params& x) {
    const int64_t groups = div_up(x.width, kElements), h = block_index() / groups;
    const int64_t w = block_index() % groups * kElements + thread_index() % kElements;
    float sum = 0;
    if (w < x.width)
      for (int64_t n = thread_index() / kElements; n < x.outer * x.inner; n += kShares)
        sum += load_global(x.parts + ((n / x.inner * x.H + h) * x.inner + n % x.inner) * x.width + w);
    store_shared(shared_base() + static_cast<uint32_t>(thread_index()) * 4, sum);
    sync_threads();
    if (thread_index() >= kElements || w >= x.width) return;
    for (int share = 1; share < kShares; ++share)
      sum +=
          load_shared<float>(shared_base() + static_cast<uint32_t>(share * kElements + thread_index()) * 4);
    Out* to = x.out.at<Out>(0, h, w / x.D) + w % x.D;
    store_global(to, from_float<Out>(sum * x.factor));
  }
};

}  // namespace txl::cuda

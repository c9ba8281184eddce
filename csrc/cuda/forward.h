// Forward: a block owns BM queries of a head, each of its warps 16 of them, and goes over the keys that they
// see in tiles of BN. Where queries are few (decode), blocks share out the keys too, and MergeKernel joins
// what they found. The names and the order of steps are those of txl_kernels/triton/_forward.py.
//
// The band. The scores of a warp's tile need 16 + BN columns of it: 16 were left over from the tile before,
// BN are computed now, both are written to 16 rows of shared memory of the warp's own, and row y is read back
// from column 15 - y on. That is the relative shift, and the sum starts from what was read.
#pragma once

#include "tiles.h"

namespace txl::cuda {

struct ForwardParams {
  Problem p;
  Forward t;
  const int64_t* dropout_seed;
  // Each split has `split_keys` keys, a multiple of every BN. More than one leave out in float32,
  // [splits, B, H, L, D] without gaps, and lse [splits, B, H, L] behind it.
  int splits;
  int64_t split_keys;
  float* parts;

  TXL_HD int64_t rows() const { return p.B * p.H * p.L; }
};

// kHead: channels of a tile, at least D. kQueriesInRegisters: else q + u and q + v are read again for every
// tile. kDropout: whether any probability may be dropped.
template <typename E, int kHead, int BN, int kWarps, bool kQueriesInRegisters, bool kDropout>
struct ForwardKernel {
  using Params = ForwardParams;
  static constexpr int kThreads = 32 * kWarps, BM = 16 * kWarps;
  static constexpr int kSteps = kHead / kStep<E>, kKeyTiles = BN / 8, kHeadTiles = kHead / 8;
  static constexpr int kChunks = (BM + BN - 1) / BN + 1,
                       kRing = kChunks + 1;  // of BN rows of r: in use, and one to come
  static constexpr int kBand = 16 + BN;      // columns of the band that a warp reads
  // In words. A multiple of 8, but not of 16: eight rows begin in four different groups of 8 banks, twice.
  static constexpr int kBandPitch = kBand + (kBand % 16 ? 0 : 8);
  static_assert(kHead % 16 == 0 && BN % 16 == 0, "whole fragments");

  // Shared memory: the band, two places each for keys and values, the ring; and the queries, which lie
  // beneath the rest until they are in registers, or in front of it if they stay.
  static constexpr uint32_t kRowBytes = Rows<E, kHead>::kPitch, kTileBytes = BN * kRowBytes;
  static constexpr uint32_t kQueryBytes = BM * kRowBytes, kBandBytes = kWarps * 16 * kBandPitch * 4;
  static constexpr uint32_t kBandAt = kQueriesInRegisters ? 0 : 2 * kQueryBytes;
  static constexpr uint32_t kTilesAt = kBandAt + kBandBytes, kEnd = kTilesAt + (4 + kRing) * kTileBytes;
  static constexpr uint32_t kSharedBytes = kEnd > 2 * kQueryBytes ? kEnd : 2 * kQueryBytes;

  static int64_t blocks(const Params& x) { return (x.p.L + BM - 1) / BM * x.splits * x.p.H * x.p.B; }
  static TXL_DEVICE void run(const Params& params) { ForwardKernel(params).attend(); }

 private:
  const Params& params;
  const Problem& p;
  const Forward& t;
  int64_t b, h, i0, split;  // i0: the block's first query
  uint64_t seed;
  Range batch;
  KeyTiles tiles;
  Source<E> k_rows, v_rows, r_rows;
  Rows<E, kHead> q_u, q_v, ring;
  uint32_t band_of_lane;  // where in the warp's band the lane's first row begins
  int row_of_lane;        // the first of the lane's two queries is i0 + row_of_lane, the other 8 behind it
  int lo[2], hi[2];       // keys that they see
  Fragment u[kQueriesInRegisters ? kSteps : 1], v[kQueriesInRegisters ? kSteps : 1];
  float carry[2][4];  // the band's columns that the tile before left over
  float largest[2], total[2], far_first[2], far_last[2];
  float acc[kHeadTiles][4];
  float scale;

  TXL_DEVICE explicit ForwardKernel(const Params& x)
      : params(x),
        p(x.p),
        t(x.t),
        // Neighbours in the grid share a head, and so its keys in L2; the blocks that see most keys go first.
        b(block_index() / blocks_of_head() / x.splits / p.H),
        h(block_index() / blocks_of_head() / x.splits % p.H),
        i0((blocks_of_head() - 1 - block_index() % blocks_of_head()) * BM),
        split(block_index() / blocks_of_head() % x.splits),
        seed(kDropout ? static_cast<uint64_t>(load_global(x.dropout_seed)) : 0),
        batch(keys_of_split()),
        tiles(key_tiles<BM, BN>(p, batch, i0)),
        k_rows(t.k, b, h, p),
        v_rows(t.v, b, h, p),
        r_rows(t.r, 0, h, p),
        row_of_lane(16 * warp() + lane() / 4),
        largest{-infinity(), -infinity()},
        total{},
        far_first{},
        far_last{},
        acc{},
        // exp2(score * scale): a negative scale turns the sign of the queries instead. Never 0: a hidden
        // key's score is -inf.
        scale(larger(static_cast<float>(p.scale < 0 ? -p.scale : p.scale), 1e-30f) * kLog2e) {
    const uint32_t base = shared_base();
    q_u.address = base, q_v.address = base + kQueryBytes;
    ring.address = base + kTilesAt + 4 * kTileBytes;
    band_of_lane = base + kBandAt + static_cast<uint32_t>(row_of_lane * kBandPitch + lane() % 4 * 2) * 4;
    for (int y = 0; y < 2; ++y) {
      const int64_t i = i0 + row_of_lane + 8 * y;
      const Range keys = i < p.L ? p.keys_of_query(batch, i) : Range{0, 0};
      lo[y] = static_cast<int>(keys.lo), hi[y] = static_cast<int>(keys.hi);
    }
  }

  TXL_DEVICE int64_t blocks_of_head() const { return (p.L + BM - 1) / BM; }

  TXL_DEVICE Range keys_of_split() const {
    const Range keys = p.keys_of_batch(b);
    return {larger(keys.lo, split * params.split_keys), smaller(keys.hi, (split + 1) * params.split_keys)};
  }

  // Keys and values have two places each, in turns.
  TXL_DEVICE Rows<E, kHead> k_tile(int j0) const {
    return {shared_base() + kTilesAt + j0 / BN % 2 * kTileBytes};
  }
  TXL_DEVICE Rows<E, kHead> v_tile(int j0) const {
    return {shared_base() + kTilesAt + (2 + j0 / BN % 2) * kTileBytes};
  }

  TXL_DEVICE bool is_masked(int j0) const { return j0 < tiles.all_lo || j0 >= tiles.all_hi; }
  TXL_DEVICE bool is_far(int j0) const { return !is_masked(j0) && (j0 < tiles.near || j0 >= tiles.far_last); }

  TXL_DEVICE void attend() {
    if (tiles.begin < tiles.end) {
      load_queries();
      load_far_terms();
      copy_tile(tiles.begin);
    }
    for (int j0 = tiles.begin; j0 < tiles.end; j0 += BN) {
      wait_copies<0>();
      sync_threads();  // this tile is there for all, and all are done with the one before
      if (j0 + BN < tiles.end) copy_tile(j0 + BN);
      if (is_far(j0))
        add_keys<true, false>(j0);
      else if (is_masked(j0))
        add_keys<false, true>(j0);
      else
        add_keys<false, false>(j0);
    }
    store();
  }

  // ---- Loads ----

  TXL_DEVICE float bias(const View& x, int d) const {
    return x.data ? to_float(load_global(x.at<const E>(0, h, 0) + d)) : 0.0f;
  }

  // q + u and q + v, rounded as the operands of a product must be.
  TXL_DEVICE void load_queries() {
    const float sign = p.scale < 0 ? -1.0f : 1.0f;
    for (int x = thread_index(); x < BM * kHead; x += kThreads) {
      const int y = x / kHead, d = x % kHead;
      const bool valid = i0 + y < p.L && d < p.D;
      const float q = valid ? to_float(load_global(t.q.at<const E>(b, h, i0 + y) + d)) : 0.0f;
      store_shared(q_u.at(y, d), from_float<E>(valid ? sign * (q + bias(t.bias_u, d)) : 0.0f));
      store_shared(q_v.at(y, d), from_float<E>(valid ? sign * (q + bias(t.bias_v, d)) : 0.0f));
    }
    sync_threads();
    if constexpr (kQueriesInRegisters) {
      TXL_UNROLL_GPU
      for (int d = 0; d < kSteps; ++d)
        u[d] = load_fragment(q_u, 16 * warp(), d), v[d] = load_fragment(q_v, 16 * warp(), d);
      sync_threads();  // all have read what other tiles will overwrite
    }
  }

  TXL_DEVICE Fragment query_u(int d) const {
    if constexpr (kQueriesInRegisters)
      return u[d];
    else
      return load_fragment(q_u, 16 * warp(), d);
  }
  TXL_DEVICE Fragment query_v(int d) const {
    if constexpr (kQueriesInRegisters)
      return v[d];
    else
      return load_fragment(q_v, 16 * warp(), d);
  }

  // (q + v) . r at the two ends of r, by a product with 16 rows that repeat the first or the last.
  TXL_DEVICE void load_far_terms() {
    if (tiles.all_lo == tiles.near && tiles.far_last == tiles.all_hi) return;
    copy_rows<kHead, kThreads>(ring, 0, r_rows, 32, [&](int n) { return n < 16 ? 0 : p.N - 1; });
    commit_copies();
    wait_copies<0>();
    sync_threads();
    float ends[4][4] = {};
    add_product<kQueriesInRegisters>(ends, [&](int d) { return query_v(d); }, ring, [](int n) { return n; });
    for (int y = 0; y < 2; ++y) far_first[y] = ends[0][2 * y], far_last[y] = ends[2][2 * y];
    sync_threads();  // all have read the rows that r will overwrite
  }

  // Starts to copy what the tile needs: its keys and values, and unless it is far the rows of r that the one
  // before has not brought.
  TXL_DEVICE void copy_tile(int j0) {
    const int begin = static_cast<int>(batch.lo), end = static_cast<int>(batch.hi);
    const auto key = [&](int n) { return j0 + n >= begin && j0 + n < end ? j0 + n : -1; };
    copy_rows<kHead, kThreads>(k_tile(j0), 0, k_rows, BN, key);
    if (!is_far(j0)) {
      const int new_chunks = follows_band(j0) ? 1 : kChunks;
      for (int chunk = kChunks - new_chunks; chunk < kChunks; ++chunk) {
        const int c = static_cast<int>(p.band(i0 + BM - 1, j0)) + chunk * BN;
        const int last = static_cast<int>(p.N) - 1;
        copy_rows<kHead, kThreads>(ring, ring_row(j0, chunk * BN), r_rows, BN,
                                   [&](int n) { return smaller(larger(c + n, 0), last); });
      }
    }
    copy_rows<kHead, kThreads>(v_tile(j0), 0, v_rows, BN, key);
    commit_copies();
  }

  TXL_DEVICE bool follows_band(int j0) const { return j0 > tiles.begin && !is_far(j0 - BN); }

  // Where in the ring the block's column x of the band has its row of r; x counts from the row that the last
  // query uses for key j0 on.
  TXL_DEVICE int ring_row(int j0, int x) const { return (j0 + x) / BN % kRing * BN + x % BN; }

  // ---- A tile ----

  template <bool kFar, bool kMasked>
  TXL_DEVICE void add_keys(int j0) {
    float score[kKeyTiles][4] = {};
    if constexpr (kFar) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x) score[n][x] = j0 < tiles.near ? far_first[x / 2] : far_last[x / 2];
    } else {
      add_band(score, j0);
    }
    add_product<kQueriesInRegisters>(
        score, [&](int d) { return query_u(d); }, k_tile(j0), [](int n) { return n; });
    if constexpr (kMasked) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x)
          if (!sees(j0, n, x)) score[n][x] = -infinity();
    }
    softmax<kMasked>(score);
    if constexpr (kDropout) drop(score, j0);
    add_values<kMasked>(score, j0);
  }

  // Whether the lane's query x / 2 sees key x % 2 of the lane's in n8 tile n.
  TXL_DEVICE bool sees(int j0, int n, int x) const {
    const int j = j0 + 8 * n + lane() % 4 * 2 + x % 2;
    return j >= lo[x / 2] && j < hi[x / 2];
  }

  TXL_DEVICE void add_band(float (&score)[kKeyTiles][4], int j0) {
    const int own = BM - 16 - 16 * warp();  // the warp's first column among the block's
    const auto position = [&](int d) { return query_v(d); };
    if (!follows_band(j0)) {
      for (int n = 0; n < 2; ++n)
        for (int x = 0; x < 4; ++x) carry[n][x] = 0;
      add_product<kQueriesInRegisters>(carry, position, ring, [&](int n) { return ring_row(j0, own + n); });
    }
    float next[kKeyTiles][4] = {};
    add_product<kQueriesInRegisters>(next, position, ring, [&](int n) { return ring_row(j0, own + 16 + n); });
    sync_warp();  // the tile before has been read
    for (int n = 0; n < 2; ++n) write_band(8 * n, carry[n]);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n) write_band(16 + 8 * n, next[n]);
    for (int n = 0; n < 2; ++n)
      for (int x = 0; x < 4; ++x) carry[n][x] = next[kKeyTiles - 2 + n][x];
    sync_warp();
    const int first = 15 - lane() / 4;  // of the lane's first query; the other's is 8 before it
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x)
        score[n][x] = load_shared<float>(in_band(x / 2, first - x / 2 * 8 + 8 * n + x % 2));
  }

  // Column c, counted from the lane's own, of its query y.
  TXL_DEVICE uint32_t in_band(int y, int c) const {
    return band_of_lane + static_cast<uint32_t>(y * 8 * kBandPitch + c) * 4;
  }
  TXL_DEVICE void write_band(int c, const float (&x)[4]) {
    store_shared(in_band(0, c), float2{x[0], x[1]});
    store_shared(in_band(1, c), float2{x[2], x[3]});
  }

  // A step of online softmax: scores become probabilities that lack the division by their sum.
  template <bool kMasked>
  TXL_DEVICE void softmax(float (&score)[kKeyTiles][4]) {
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      float top = -infinity();
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n) top = larger(top, larger(score[n][2 * y], score[n][2 * y + 1]));
      for (int mask = 1; mask < 4; mask *= 2) top = larger(top, shuffle_xor(top, mask));
      top = larger(largest[y], top * scale);
      // So far a query may have seen nothing: -inf - -inf would be NaN.
      const float base = kMasked && top == -infinity() ? 0.0f : top;
      const float decay = exp2_fast(largest[y] - base);
      largest[y] = top;
      float sum = 0;
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 2 * y; x < 2 * y + 2; ++x) sum += score[n][x] = exp2_fast(score[n][x] * scale - base);
      total[y] = total[y] * decay + sum;  // of the lane's own keys; summed up over lanes at the end
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d) acc[d][2 * y] *= decay, acc[d][2 * y + 1] *= decay;
    }
  }

  // A lane's keys of a group of 64 share four calls for each of its queries, and use all their words.
  TXL_DEVICE void drop(float (&weight)[kKeyTiles][4], int j0) const {
    const uint32_t threshold = DropoutMask::threshold(p.dropout_p);
    for (int x = 0; x < 4; ++x)
      for (int half = 0; half < 2; ++half) {
        const int j = j0 + 8 * half + lane() % 4 * 2 + x % 2;
        uint32_t word[4];
        philox(word, seed, static_cast<uint32_t>((j >> 6) * 16 + (j & 15)), b, h,
               i0 + row_of_lane + x / 2 * 8);
        TXL_UNROLL_GPU
        for (int n = half; n < kKeyTiles; n += 2)
          if (word[((j0 >> 4) + n / 2) & 3] < threshold) weight[n][x] = 0;
      }
  }

  template <bool kMasked>
  TXL_DEVICE void add_values(const float (&weight)[kKeyTiles][4], int j0) {
    const Rows<E, kHead> values = v_tile(j0);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; n += 2) {
      const auto a = Square<E>::of(weight[n], weight[n + 1]);
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; d += 2) {
        auto x = SquareRows<E>::load(values, 8 * n, 8 * d);
        if constexpr (kMasked)
          put_nan(acc[d], acc[d + 1], x.take_infinite(), [&](int m, int e) { return sees(j0, n + m, e); });
        add_square(acc[d], acc[d + 1], a, x);
      }
    }
  }

  TXL_DEVICE void store() {
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      for (int mask = 1; mask < 4; mask *= 2) total[y] += shuffle_xor(total[y], mask);
      const int64_t i = i0 + row_of_lane + 8 * y;
      if (i >= p.L) continue;
      const bool any_seen = lo[y] < hi[y];
      const float factor = any_seen ? static_cast<float>(1 / (1 - p.dropout_p)) / total[y] : 0.0f;
      const int64_t row = (b * p.H + h) * p.L + i + split * params.rows();
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d)
        for (int x = 0; x < 2; ++x) {
          const int channel = 8 * d + lane() % 4 * 2 + x;
          const float value = any_seen ? acc[d][2 * y + x] * factor : 0.0f;
          if (channel >= p.D) continue;
          if (params.splits > 1)
            store_global(params.parts + row * p.D + channel, value);
          else
            store_global(t.out.at<E>(b, h, i) + channel, from_float<E>(value));
        }
      if (lane() % 4 == 0) {
        float* lse = params.splits > 1 ? params.parts + params.splits * params.rows() * p.D
                                       : static_cast<float*>(t.lse);
        store_global(lse + row, any_seen ? (largest[y] + log2_fast(total[y])) * kLn2 : -infinity());
      }
    }
  }
};

// out and lse of a query from its splits. A split that saw nothing has lse -inf and zeros.
template <typename E>
struct MergeKernel {
  using Params = ForwardParams;
  static constexpr int kThreads = 128;

  static int64_t blocks(const Params& x) { return x.rows(); }

  static TXL_DEVICE void run(const Params& x) {
    const Problem& p = x.p;
    const int64_t row = block_index(), rows = x.rows();
    const float* lse = x.parts + x.splits * rows * p.D + row;
    float largest = -infinity(), total = 0;
    for (int split = 0; split < x.splits; ++split) largest = larger(largest, load_global(lse + split * rows));
    const float base = largest == -infinity() ? 0.0f : largest;
    const auto weight = [&](int split) {
      return exp2_fast((load_global(lse + split * rows) - base) * kLog2e);
    };
    for (int split = 0; split < x.splits; ++split) total += weight(split);
    for (int d = thread_index(); d < p.D; d += kThreads) {
      float sum = 0;
      for (int split = 0; split < x.splits; ++split)
        sum += weight(split) * load_global(x.parts + (split * rows + row) * p.D + d);
      store_global(x.t.out.at<E>(row / p.L / p.H, row / p.L % p.H, row % p.L) + d,
                   from_float<E>(total == 0 ? 0.0f : sum / total));
    }
    if (thread_index() == 0)
      store_global(static_cast<float*>(x.t.lse) + row,
                   total == 0 ? -infinity() : base + log2_fast(total) * kLn2);
  }
};

// ---- Launch ----

constexpr int kDecodeQueries = 16;  // up to so many, a block is one warp

// The kernel for a class of head dimensions. float32, split into two, leaves no registers for queries.
template <typename E, int kHead, int kWarps, bool kDropout>
using ForwardOf = ForwardKernel<E, kHead,
                                (!is_half<E> || kHead > 128 ? 16
                                 : kHead > 64               ? 32
                                                            : 64),
                                kWarps, (is_half<E> && kHead <= 128), kDropout>;

template <typename Kernel, typename Params>
auto launch_kernel(const Params& params, uint32_t shared_bytes, void* stream) {
  return launch<Kernel>(Kernel::blocks(params), shared_bytes, params, stream);
}

// parts: [splits, B * H * L * (D + 1)], or null for one split.
template <typename E, int kHead>
int launch_forward(const Problem& p, const Forward& t, const int64_t* dropout_seed, int splits, float* parts,
                   void* stream) {
  const int64_t split_keys = ((p.K + splits - 1) / splits + 63) / 64 * 64;
  const ForwardParams params{p, t, dropout_seed, splits, split_keys, parts};
  const auto start = [&](auto warps, auto dropout) -> int {
    using Kernel = ForwardOf<E, kHead, decltype(warps)::value, decltype(dropout)::value>;
    return launch_kernel<Kernel>(params, Kernel::kSharedBytes, stream);
  };
  const auto start_warps = [&](auto warps) {
    return p.dropout_p > 0 ? start(warps, std::true_type{}) : start(warps, std::false_type{});
  };
  const int error = p.L <= kDecodeQueries ? start_warps(std::integral_constant<int, 1>{})
                                          : start_warps(std::integral_constant<int, 4>{});
  if (error || splits == 1) return error;
  return launch_kernel<MergeKernel<E>>(params, 0, stream);
}

}  // namespace txl::cuda

// Forward: a block owns BM queries of a head, each of its warps 16 of them, and goes over the keys that they
// see in tiles of BN (query_block.h, where the band is). Where queries are few (decode), blocks share out the
// keys too, and MergeKernel joins what they found. The names and the order of steps are those of
// txl_kernels/triton/_forward.py.
#pragma once

#include "query_block.h"
#include "row_class_block.h"

namespace txl::cuda {

template <typename Tensors>
struct ForwardParams {
  Problem p;
  Tensors t;
  const int64_t* dropout_seed;
  Scales scale;
  // Each split has `split_keys` keys, a multiple of every BN. More than one leave out in float32,
  // [splits, B, H, L, D] without gaps, and behind it the largest score and the total [splits, B, H, L] each.
  int splits;
  int64_t split_keys;
  float* parts;

  TXL_HD int64_t rows() const { return p.B * p.H * p.L; }
  TXL_HD float* largest() const { return parts + splits * rows() * p.D; }
  TXL_HD float* total() const { return largest() + splits * rows(); }
};

// Block: what computes the products of a tile: ForwardBlock, RowClassBlock or WarpgroupBlock. Its queries 0
// and 1 are q + u and q + v. kDropout: whether any probability may be dropped.
template <typename Block, bool kDropout>
struct ForwardKernel : private Block {
  using Params = ForwardParams<typename Block::ForwardTensors>;
  using E = typename Block::Element;
  using Block::kThreads, Block::BM, Block::BN, Block::kHead, Block::kKeyTiles, Block::kHeadTiles;

  static int64_t blocks(const Params& x) { return Block::blocks_of_head(x.p) * x.splits * x.p.H * x.p.B; }
  static TXL_DEVICE void run(const Params& params) { ForwardKernel(params).attend(); }

 private:
  using Block::is_masked, Block::is_far, Block::row_of_lane, Block::query_rows;
  using Block::p, Block::b, Block::h, Block::i0, Block::mask, Block::tiles;
  using Block::ring, Block::copy_tile;

  const Params& params;
  const Forward& t;
  uint64_t seed;
  int lo[2], hi[2];  // keys that the lane's queries see
  float largest[2], total[2], far_first[2], far_last[2];
  float acc[kHeadTiles][4];

  TXL_DEVICE explicit ForwardKernel(const Params& x)
      : Block(x.p, x.splits, x.split_keys),
        params(x),
        t(x.t),
        seed(kDropout ? static_cast<uint64_t>(load_global(x.dropout_seed)) : 0),
        largest{-infinity(), -infinity()},
        total{},
        far_first{},
        far_last{},
        acc{} {
    for (int y = 0; y < 2; ++y) {
      const int i = i0 + row_of_lane(y);
      const Range keys = i < p.L ? p.keys_of_query({mask.lo, mask.hi}, i) : Range{0, 0};
      lo[y] = static_cast<int>(keys.lo), hi[y] = static_cast<int>(keys.hi);
    }
  }

  TXL_DEVICE void attend() {
    if (tiles.begin < tiles.end) {
      load_queries();
      load_far_terms();
      this->begin_copies();
      copy_tile(params.t, tiles.begin);
    }
    for (int j0 = tiles.begin; j0 < tiles.end; j0 += BN) {
      this->wait_tile();
      if (j0 + BN < tiles.end) copy_tile(params.t, j0 + BN);
      if (is_far(j0))
        add_tile<true, false>(j0);
      else if (is_masked(j0))
        add_tile<false, true>(j0);
      else
        add_tile<false, false>(j0);
    }
    store();
  }

  // ---- Loads ----

  TXL_DEVICE float bias(const View& x, int d) const {
    return x.data ? to_float(load_global(x.at<const E>(0, h, 0) + d)) : 0.0f;
  }

  // q + u and q + v, rounded as the operands of a product must be.
  TXL_DEVICE void load_queries() {
    for (int x = thread_index(); x < BM * kHead; x += kThreads) {
      const int y = x / kHead, d = x % kHead, place = Block::place_of_query(y);
      const bool valid = i0 + y < p.L && d < p.D;
      const float q = valid ? to_float(load_global(t.q.at<const E>(b, h, i0 + y) + d)) : 0.0f;
      store_shared(query_rows(0).at(place, d),
                   from_float<E>(valid ? params.scale.sign * (q + bias(t.bias_u, d)) : 0.0f));
      store_shared(query_rows(1).at(place, d),
                   from_float<E>(valid ? params.scale.sign * (q + bias(t.bias_v, d)) : 0.0f));
    }
    sync_threads();
    this->hold_queries();
  }

  // (q + v) . r at the two ends of r, by a product with 16 rows that repeat the first or the last.
  TXL_DEVICE void load_far_terms() {
    if (tiles.all_lo == tiles.near && tiles.far_last == tiles.all_hi) return;
    copy_rows<kThreads>(ring(), 0, Source<E>(t.r, 0, h, p), 32,
                        [&](int n) { return RowOf{n < 16 ? 0 : static_cast<int>(p.N) - 1, true}; });
    commit_copies();
    wait_copies<0>();
    sync_threads();
    float ends[4][4] = {};
    this->template add_query_product<1>(ends, ring(), [](int n) { return n; });
    for (int y = 0; y < 2; ++y) far_first[y] = ends[0][2 * y], far_last[y] = ends[2][2 * y];
    sync_threads();  // all have read the rows that r will overwrite
  }

  // ---- A tile ----

  template <bool kFar, bool kMasked>
  TXL_DEVICE void add_tile(int j0) {
    float score[kKeyTiles][4];
    if constexpr (kFar) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x) score[n][x] = j0 < tiles.near ? far_first[x / 2] : far_last[x / 2];
      Block::add_keys(score, j0);
    } else {
      Block::take_scores(score, j0);
    }
    if constexpr (kMasked) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x)
          if (!sees(j0, n, x)) score[n][x] = -infinity();
    }
    softmax<kMasked>(score);
    if constexpr (kDropout) drop(score, j0);
    Block::template add_values<kMasked>(acc, score, j0, [&](int n, int x) { return sees(j0, n, x); });
  }

  // Whether the lane's query x / 2 sees key x % 2 of the lane's in n8 tile n.
  TXL_DEVICE bool sees(int j0, int n, int x) const {
    const int j = j0 + 8 * n + lane() % 4 * 2 + x % 2;
    return j >= lo[x / 2] && j < hi[x / 2];
  }

  // A step of online softmax: scores become probabilities that lack the division by their sum.
  template <bool kMasked>
  TXL_DEVICE void softmax(float (&score)[kKeyTiles][4]) {
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      float top = -infinity();
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n) top = larger(top, larger(score[n][2 * y], score[n][2 * y + 1]));
      for (int step = 1; step < 4; step *= 2) top = larger(top, shuffle_xor(top, step));
      top = larger(largest[y], top * params.scale.scores);
      // So far a query may have seen nothing: -inf - -inf would be NaN.
      const float base = kMasked && top == -infinity() ? 0.0f : top;
      const float decay = exp2_fast(largest[y] - base);
      largest[y] = top;
      float sum = 0;
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 2 * y; x < 2 * y + 2; ++x)
          sum += score[n][x] = exp2_fast(score[n][x] * params.scale.scores - base);
      total[y] = total[y] * decay + sum;  // of the lane's own keys; summed up over lanes at the end
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d) acc[d][2 * y] *= decay, acc[d][2 * y + 1] *= decay;
    }
  }

  TXL_DEVICE void drop(float (&weight)[kKeyTiles][4], int j0) {
    this->draw_dropout(seed, j0);
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 4; ++x)
        if (!this->keeps(j0, n, x)) weight[n][x] = 0;
  }

  TXL_DEVICE void store() {
    const int64_t split = block_index() / Block::blocks_of_head(p) % params.splits;
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      for (int step = 1; step < 4; step *= 2) total[y] += shuffle_xor(total[y], step);
      const int64_t i = i0 + row_of_lane(y);
      if (i >= p.L) continue;
      const bool any_seen = lo[y] < hi[y];
      if (any_seen && total[y] == 0) total[y] = nan();  // every score is -inf: no softmax exists
      const float factor = any_seen ? params.scale.kept / total[y] : 0.0f;
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
      if (lane() % 4 != 0) continue;
      if (params.splits > 1) {
        store_global(params.largest() + row, largest[y]);
        store_global(params.total() + row, total[y]);
      } else {
        store_global(static_cast<float*>(t.lse) + row,
                     any_seen ? (largest[y] + log2_fast(total[y])) * kLn2 : -infinity());
      }
    }
  }
};

// The compiler would spill for one more block, for which there is hardly ever shared memory; by row classes,
// that would be half the registers.
template <typename Block, bool kDropout>
constexpr int kLeastBlocks<ForwardKernel<Block, kDropout>> = 1;

// out and lse of a query from its splits. A split that saw nothing has -inf and zeros. Far from zero the
// difference of two lse would be far less precise than largest and total are.
template <typename E>
struct MergeKernel {
  using Params = ForwardParams<Forward>;
  static constexpr int kThreads = 128;

  static TXL_DEVICE void run(const Params& x) {
    const Problem& p = x.p;
    const int64_t row = block_index(), rows = x.rows();
    const auto largest_of = [&](int split) { return load_global(x.largest() + split * rows + row); };
    float largest = -infinity(), total = 0;
    for (int split = 0; split < x.splits; ++split) largest = larger(largest, largest_of(split));
    const float base = largest == -infinity() ? 0.0f : largest;
    const auto weight = [&](int split) {
      return exp2_fast(largest_of(split) - base) * load_global(x.total() + split * rows + row);
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
                   total == 0 ? -infinity() : (base + log2_fast(total)) * kLn2);
  }
};

// ---- Launch ----

constexpr int kDecodeQueries = 16;  // up to so many, a block is one warp

// For a class of head dimensions. float32, split into two, leaves no registers for queries.
template <typename E, int kHead>
constexpr int kForwardKeys = !is_half<E> || kHead > 128 ? 16
                             : kHead > 64               ? 32
                                                        : 64;
template <typename E, int kHead>
constexpr int kForwardHeld = is_half<E> && kHead <= 128 ? 2 : 0;

template <typename E, int kHead, int kWarps>
struct ForwardBlock : QueryBlock<E, kHead, kForwardKeys<E, kHead>, kWarps, 2, kForwardHeld<E, kHead>> {
  using Base = typename ForwardBlock::QueryBlock;
  using Base::Base;
};

// Of warpgroup_kernels.cu, where the library has it: TXL_WARPGROUPS.
template <typename E, int kHead>
struct WarpgroupKernels {
  static int forward(const ForwardParams<Forward>& params, void* stream);
};

template <typename Block>
int launch_block(const ForwardParams<typename Block::ForwardTensors>& params, void* stream) {
  using Plain = ForwardKernel<Block, false>;
  using Dropping = ForwardKernel<Block, true>;
  const int64_t blocks = Plain::blocks(params);
  return params.p.dropout_p > 0 ? launch<Dropping>(blocks, Block::kSharedBytes, params, stream)
                                : launch<Plain>(blocks, Block::kSharedBytes, params, stream);
}

// The block for a class of head dimensions. warpgroups: as of txl::cuda::forward.
template <typename E, int kHead>
int choose_block(const ForwardParams<Forward>& params, [[maybe_unused]] bool warpgroups, void* stream) {
  const int64_t L = params.p.L;
  if (L <= kDecodeQueries) return launch_block<ForwardBlock<E, kHead, 1>>(params, stream);
#if defined(TXL_WARPGROUPS)
  if constexpr (is_half<E> && kHead <= 128) {
    if (warpgroups) return WarpgroupKernels<E, (kHead <= 64 ? 64 : 128)>::forward(params, stream);
  }
#endif
  using Pitch = ForwardBlock<E, kHead, 4>;
  // Of longer rows the band does not fit into registers; with shorter ones fewer warps would fit.
  if constexpr (is_half<E> && kHead == 64) {
    if (L > Pitch::BM) return launch_block<RowClassBlock<E, kHead>>(params, stream);
  }
  return launch_block<Pitch>(params, stream);
}

// parts: [splits, B * H * L * (D + 2)], or null for one split.
template <typename E, int kHead>
int launch_forward(const Problem& p, const Forward& t, const int64_t* dropout_seed, int splits, float* parts,
                   bool warpgroups, void* stream) {
  const int64_t split_keys = ((p.K + splits - 1) / splits + 63) / 64 * 64;
  const ForwardParams<Forward> params{p, t, dropout_seed, Scales(p), splits, split_keys, parts};
  const int error = choose_block<E, kHead>(params, warpgroups, stream);
  if (error || splits == 1) return error;
  return launch<MergeKernel<E>>(params.rows(), 0, params, stream);
}

}  // namespace txl::cuda

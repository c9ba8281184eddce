// Forward: a block owns BM queries of a head, each of its warps 16 of them, and goes over the keys that they
// see in tiles of BN (query_block.h, where the band is). Where queries are few (decode), blocks share out the
// keys too, and MergeKernel joins what they found. The names and the order of steps are those of
// txl_kernels/triton/_forward.py.
#pragma once

#include "cuda.h"
#include "query_block.h"

namespace txl::cuda {

struct ForwardParams {
  Problem p;
  Forward t;
  Scales scale;
  // Each split has `split_keys` keys, a multiple of every BN. More than one leave out in float32,
  // [splits, B, H, L, D] without gaps, and behind it, [splits, B, H, L] each, the score that probabilities
  // are relative to, and their total.
  int splits;
  int64_t split_keys;
  float* parts;
  int heads_together;

  TXL_HD int64_t rows() const { return p.B * p.H * p.L; }
  TXL_HD float* origin() const { return parts + splits * rows() * p.D; }
  TXL_HD float* total() const { return origin() + splits * rows(); }
};

// Block: what computes the products of a tile: ForwardBlock or WarpgroupQueryBlock. Its queries 0 and 1 are
// q + u and q + v. kDropout: whether any probability may be dropped.
template <typename Block, bool kDropout>
struct ForwardKernel : private Block {
  using Params = typename Block::Params;
  using E = typename Block::Element;
  using Block::kThreads, Block::BM, Block::BN, Block::kHead, Block::kKeyTiles, Block::kHeadTiles;
  // Dropout leaves no registers for it.
  static constexpr bool kPlain = Block::kEngine && !kDropout;  // some tiles have a loop of their own

  static int64_t blocks(const Params& x) { return Block::blocks_of_head(x.p) * x.splits * x.p.H * x.p.B; }
  static TXL_DEVICE void run(const Params& params) {
    if constexpr (Block::kPdl) release_next();
    ForwardKernel(params).attend();
  }

 private:
  using Block::is_masked, Block::is_far, Block::row_of_lane, Block::query_rows;
  using Block::p, Block::b, Block::h, Block::i0, Block::mask, Block::bounds;
  using Block::ring, Block::copy_tile;

  const Params& params;
  const Forward& t;
  uint64_t seed;
  uint32_t kept;              // by dropout: a bit for each of the lane's pairs of a group of 64 keys
  int lo[2], hi[2];           // keys that the lane's queries see
  float origin[2], total[2];  // origin: the score that probabilities are relative to
  float far_first[2], far_last[2];
  float acc[kHeadTiles][4];

  TXL_DEVICE explicit ForwardKernel(const Params& x)
      : Block(x, place(x)),
        params(x),
        t(x.t),
        seed(kDropout ? static_cast<uint64_t>(load_global(p.dropout_seed)) : 0),
        origin{lowest(), lowest()},
        total{},
        far_first{},
        far_last{},
        acc{} {
    for (int y = 0; y < 2; ++y) {
      const int i = i0 + query_of_lane(y);
      const Range keys = i < p.L ? p.keys_of_query({mask.lo, mask.hi}, i) : Range{0, 0};
      lo[y] = static_cast<int>(keys.lo), hi[y] = static_cast<int>(keys.hi);
    }
  }

  static TXL_DEVICE int query_of_lane(int y) { return Block::query_of_row(row_of_lane(y)); }

  // The splits of a head as if they were heads.
  static TXL_DEVICE Turn turn_of(const Params& x) {
    return {static_cast<int>(Block::blocks_of_head(x.p)), static_cast<int>(x.p.B * x.p.H) * x.splits,
            x.heads_together * x.splits};
  }

  // Each of x.splits blocks of the same queries goes over split_keys keys.
  static TXL_DEVICE typename Block::Place place(const Params& x) {
    const int blocks = static_cast<int>(Block::blocks_of_head(x.p)), H = static_cast<int>(x.p.H);
    const Turn turn = turn_of(x);
    const int head = turn.head / x.splits, b = head / H;
    const int64_t split = turn.head % x.splits;
    const Range keys = x.p.keys_of_batch(b);
    return {b,
            head % H,
            (blocks - 1 - turn.block) * BM,
            {larger(keys.lo, split * x.split_keys), smaller(keys.hi, (split + 1) * x.split_keys)}};
  }

  TXL_DEVICE void attend() {
    if (bounds.begin < bounds.end) {
      // The first tile comes together with the queries, unless they or the far terms lie where it will.
      const bool together = Block::kAllQueries <= Block::kTilesAt && !has_far_tiles();
      if (together) start();
      load_queries();
      if (!together) load_far_terms(), start();
    }
    for (int j0 = bounds.begin; j0 < bounds.end;) {
      if (Block::is_hidden(j0)) {
        next_tile(j0), j0 += BN;
      } else if (is_far(j0)) {
        add_tile<true, false>(j0), j0 += BN;
      } else if (is_masked(j0)) {
        add_tile<false, true>(j0), j0 += BN;
      } else {  // nearly all tiles, in a loop of their own
        const int end = this->end_of_near(j0);
        if constexpr (kPlain)
          for (const int plain = this->end_of_plain(j0, end); j0 < plain; j0 += BN)
            add_tile<false, false, true>(j0);
        for (const int some = kPlain ? smaller(end, j0 + BN) : end; j0 < some; j0 += BN)
          add_tile<false, false>(j0);
      }
    }
    store();
  }

  TXL_DEVICE void start() {
    this->begin_copies();
    copy_tile(bounds.begin);
  }

  // ---- Loads ----

  // q + u and q + v, rounded as the operands of a product must be. q comes where q + v will be.
  TXL_DEVICE void load_queries() {
    copy_rows<kThreads, BM>(query_rows(1), t.q, b, h, p,
                            [&](int n) { return mask.query(i0 + Block::query_of_row(n)); });
    commit_copies();
    using Numbers = Piece<E>;
    using Pieces = Copier<kThreads, decltype(query_rows(0))>;
    const Pieces own(p);
    const int d = own.channel;
    const auto u = Numbers::load(t.bias_u, 0, h, 0, d, p), v = Numbers::load(t.bias_v, 0, h, 0, d, p);
    wait_copies<0>();
    sync_threads();
    TXL_UNROLL_GPU
    for (int n = 0; n < BM; n += Pieces::kEvery) {
      if (!own.has_pieces()) break;
      const uint32_t at_u = query_rows(0).at(own.row + n, d), at_v = query_rows(1).at(own.row + n, d);
      const auto q = Numbers::of(load_shared<uint4>(at_v));
      store_shared(at_u, q.plus(u, params.scale.sign));
      store_shared(at_v, q.plus(v, params.scale.sign));
    }
    sync_threads();
    this->hold_queries();
  }

  TXL_DEVICE bool has_far_tiles() const {
    return bounds.all_lo < bounds.near || bounds.near_end < bounds.all_hi;
  }

  // (q + v) . r at the two ends of r, by a product with 16 rows that repeat the first or the last.
  TXL_DEVICE void load_far_terms() {
    if (!has_far_tiles()) return;
    copy_rows<kThreads, 32>(ring(), t.r, 0, h, p,
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

  TXL_DEVICE void next_tile(int j0) {
    this->wait_tile();
    if (j0 + BN < bounds.end) copy_tile(j0 + BN);
  }

  // kIsPlain: as end_of_plain says.
  template <bool kFar, bool kMasked, bool kIsPlain = false>
  TXL_DEVICE void add_tile(int j0) {
    if constexpr (kIsPlain)
      this->next_plain(j0);
    else
      next_tile(j0);
    float score[kKeyTiles][4];
    if constexpr (kFar) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x) score[n][x] = j0 < bounds.near ? far_first[x / 2] : far_last[x / 2];
      Block::add_keys(score, j0);
    } else {
      Block::template take_scores<kIsPlain>(score, j0);
    }
    if constexpr (kMasked) {
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        for (int x = 0; x < 4; ++x)
          if (!sees(j0, n, x)) score[n][x] = -infinity();
    }
    scale_sums(score);
    if constexpr (kDropout) draw_dropout(j0);
    Block::template add_values<kMasked>(
        acc, score, j0, [&](int n, int x) { return sees(j0, n, x); },
        [&](int n) {
          make_weights(score[n]);
          if constexpr (kDropout) drop(score[n], j0, n);
        });
  }

  // Whether the lane's query x / 2 sees key x % 2 of the lane's in n8 tile n.
  TXL_DEVICE bool sees(int j0, int n, int x) const {
    const int j = j0 + 8 * n + lane() % 4 * 2 + x % 2;
    return j >= lo[x / 2] && j < hi[x / 2];
  }

  // A step of online softmax: what probabilities are relative to need not be the largest score so far, as
  // long as none is more than 2^8 times as probable: so the sums are hardly ever scaled after the first
  // tiles. (Dao and others, FlashAttention-4.)
  TXL_DEVICE void scale_sums(const float (&score)[kKeyTiles][4]) {
    float top[2];
    bool rises[2];
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      top[y] = -infinity();
      TXL_UNROLL_GPU
      for (int n = 0; n < kKeyTiles; ++n)
        top[y] = larger(top[y], larger(score[n][2 * y], score[n][2 * y + 1]));
      rises[y] = this->rises(top[y], y);
    }
    if (any(rises[0] | rises[1])) {
      TXL_UNROLL_GPU
      for (int y = 0; y < 2; ++y) {
        for (int step = 1; step < 4; step *= 2) top[y] = larger(top[y], shuffle_xor(top[y], step));
        rises[y] = this->rises(top[y], y);
        const float decay = rises[y] ? exp2_fast((origin[y] - top[y]) * params.scale.log2) : 1.0f;
        if (rises[y]) origin[y] = top[y];
        total[y] *= decay;
        TXL_UNROLL_GPU
        for (int d = 0; d < kHeadTiles; ++d) acc[d][2 * y] *= decay, acc[d][2 * y + 1] *= decay;
      }
    }
  }

  // Scores become probabilities that lack the division by their sum. That of -inf is 0: no origin is -inf.
  TXL_DEVICE void make_weights(float (&score)[4]) {
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      for (int x = 2 * y; x < 2 * y + 2; ++x) {
        // The difference first: of huge scores the products' rounding errors would be huge, too.
        score[x] = exp2_fast((score[x] - origin[y]) * params.scale.log2);
        total[y] += score[x];  // of the lane's own keys; summed up over lanes at the end
      }
    }
  }

  TXL_DEVICE bool rises(float score, int y) const { return (score - origin[y]) * params.scale.log2 > 8; }

  TXL_DEVICE void drop(float (&weight)[4], int j0, int n) const {
    for (int x = 0; x < 4; ++x)
      if ((kept >> ((x * 2 + n % 2) * 4 + (j0 / 16 + n / 2) % 4) & 1) == 0) weight[x] = 0;
  }

  // For the tile; the tiles of a group of 64 keys share what the first that the block meets draws. A lane's
  // keys of a group share four calls for each of its queries, and use all their words: 32 bits.
  TXL_DEVICE void draw_dropout(int j0) {
    if (j0 % DropoutMask::kGroup >= BN && j0 != bounds.begin) return;
    kept = 0;
    TXL_NO_UNROLL_GPU
    for (int n = 0; n < 8; ++n) {
      const int call =
          j0 / DropoutMask::kGroup * DropoutMask::kCalls + opaque(lane()) % 4 * 2 + n / 2 % 2 + n % 2 * 8;
      kept |= kept_words(seed, p.dropout_threshold, static_cast<uint32_t>(call), opaque(b), opaque(h),
                         i0 + query_of_lane(n / 4))
              << (4 * n);
    }
  }

  TXL_DEVICE void store() {
    const bool whole = params.splits == 1;
    const int64_t split = whole ? 0 : turn_of(params).head % params.splits;
    const int column = lane() % 4 * 2, limit = static_cast<int>(p.D) - column;
    const Rows<E, kHead> results{Block::base + Block::kTilesAt};
    static_assert(BM * Rows<E, kHead>::kRowBytes <= Block::kUsed - Block::kTilesAt, "room for them");
    if (whole) sync_threads();  // all are done with the tiles
    TXL_UNROLL_GPU
    for (int y = 0; y < 2; ++y) {
      for (int step = 1; step < 4; step *= 2) total[y] += shuffle_xor(total[y], step);
      const int i = i0 + query_of_lane(y);
      const bool any_seen = lo[y] < hi[y];
      if (any_seen && total[y] == 0) {  // every score is -inf: no softmax exists
        if (whole)
          total[y] = nan();
        else
          origin[y] = -infinity();  // unless other splits have more; MergeKernel will see
      }
      if (i >= p.L) continue;
      const float factor = any_seen && total[y] != 0 ? params.scale.dropout / total[y] : 0.0f;
      const int64_t row = (b * p.H + h) * p.L + i + split * params.rows();
      float* const part = params.parts + row * p.D + column;
      TXL_UNROLL_GPU
      for (int d = 0; d < kHeadTiles; ++d) {
        float value[2];
        for (int x = 0; x < 2; ++x) value[x] = any_seen ? acc[d][2 * y + x] * factor : 0.0f;
        if (whole) {
          store_pair<E>(results.at(row_of_lane(y), 8 * d + column), value[0], value[1]);
        } else {
          for (int x = 0; x < 2; ++x)
            if (8 * d + x < limit) store_global(part + 8 * d + x, value[x]);
        }
      }
      if (lane() % 4 != 0) continue;
      if (whole) {
        const float lse = multiply_add(origin[y], params.scale.log2, log2_fast(total[y])) * kLn2;
        store_global(static_cast<float*>(t.lse) + row, any_seen ? lse : -infinity());
      } else {
        store_global(params.origin() + row, origin[y]);
        store_global(params.total() + row, total[y]);
      }
    }
    if (!whole) return;
    sync_threads();
    write_rows<kHead, kThreads>(results, BM, Source<E>(t.out, b, h, p), i0, p.L,
                                [](int n) { return Block::query_of_row(n); });
  }
};

// The compiler would spill for one more block, for which there is hardly ever shared memory.
template <typename Block, bool kDropout>
constexpr int kLeastBlocks<ForwardKernel<Block, kDropout>> = 1;

// out and lse of a query from its splits. One that saw nothing has a total of 0 and weighs nothing; so has
// one whose scores are all -inf, as its origin then is. Far from zero the difference of two lse would be far
// less precise than these two are. kPdl: it may begin while they are made (programmatic dependent launch).
template <typename E, bool kPdl>
struct MergeKernel {
  using Params = ForwardParams;
  static constexpr int kThreads = 256, kWarps = kThreads / 32, kTogether = 4;

  // A number twice for each warp, for each split, for each thread.
  static uint32_t shared_bytes(const Params& x) {
    return static_cast<uint32_t>(2 * kWarps + x.splits + kThreads) * 4;
  }

  // Queries are few: a block has one of them, and its threads first the splits, then channels of some splits.
  static TXL_DEVICE void run(const Params& x) {
    const Problem& p = x.p;
    const int64_t rows = x.rows();
    const int row = block_index(), L = static_cast<int>(p.L), H = static_cast<int>(p.H);
    const int thread = thread_index(), splits = x.splits, D = static_cast<int>(p.D);
    const uint32_t of_warps = shared_base(), weights = of_warps + 2 * kWarps * 4,
                   sums = weights + static_cast<uint32_t>(splits) * 4;
    const auto at = [](uint32_t base, int n) { return base + static_cast<uint32_t>(n) * 4; };

    if constexpr (kPdl) await_previous();
    float origin = lowest();
    for (int n = thread; n < splits; n += kThreads)
      origin = larger(origin, load_written(x.origin() + n * rows + row));
    origin = of_block(of_warps, origin, [](float a, float b) { return larger(a, b); });
    float total = 0;
    for (int n = thread; n < splits; n += kThreads) {
      const float own = load_written(x.origin() + n * rows + row);
      const float weight =
          exp2_fast((own - origin) * x.scale.log2) * load_written(x.total() + n * rows + row);
      store_shared(at(weights, n), own == -infinity() ? -0.0f : weight);
      total += weight;
    }
    total = of_block(of_warps + kWarps * 4, total, [](float a, float b) { return a + b; });

    const int width = (D + 31) / 32 * 32, groups = kThreads / width, group = thread / width;
    const int d = thread % width;
    const bool has = d < D && group < groups;
    float sum = 0;
    if (has) {
      const float* next = x.parts + (group * rows + row) * p.D + d;
      const int64_t step = groups * rows * p.D;
      for (int first = group; first < splits; first += kTogether * groups) {
        float part[kTogether];  // loads that are under way together
        TXL_UNROLL_GPU
        for (int m = 0; m < kTogether; ++m, next += step)
          part[m] = first + m * groups < splits ? load_written(next) : 0.0f;
        TXL_UNROLL_GPU
        for (int m = 0; m < kTogether; ++m)
          if (const int n = first + m * groups; n < splits)
            sum += load_shared<float>(at(weights, n)) * part[m];
      }
    }
    store_shared(at(sums, thread), sum);
    sync_threads();
    if (total == 0)  // a query that sees no key, or scores of -inf alone: no softmax exists
      for (int n = 0; n < splits; ++n)
        if (bits<uint32_t>(load_shared<float>(at(weights, n))) != 0) total = nan();
    if (has && group == 0) {
      for (int n = 1; n < groups; ++n) sum += load_shared<float>(at(sums, n * width + d));
      store_global(x.t.out.at<E>(row / L / H, row / L % H, row % L) + d,
                   from_float<E>(total == 0 ? 0.0f : sum / total));
    }
    if (thread == 0)
      store_global(static_cast<float*>(x.t.lse) + row,
                   total == 0 ? -infinity() : multiply_add(origin, x.scale.log2, log2_fast(total)) * kLn2);
  }

 private:
  // f of all threads' x, in all of them; also a barrier. at: kWarps floats of shared memory.
  template <typename F>
  static TXL_DEVICE float of_block(uint32_t at, float x, F f) {
    for (int mask = 16; mask > 0; mask /= 2) x = f(x, shuffle_xor(x, mask));
    if (lane() == 0) store_shared(at + static_cast<uint32_t>(warp()) * 4, x);
    sync_threads();
    x = load_shared<float>(at);
    for (int n = 1; n < kWarps; ++n) x = f(x, load_shared<float>(at + static_cast<uint32_t>(n) * 4));
    return x;
  }
};

// ---- Launch ----

// Few queries: a block is one warp. With dropout they are trained on, which is not worth a kernel of its own.
inline bool is_decode(const Problem& p) { return p.L <= 16 && p.dropout_p == 0; }

// For a class of head dimensions. One warp alone waits for most of its time, so the tiles of decode are
// small: shared memory has then room for twice as many blocks. float32, split into two, leaves no registers
// for queries. kPdl: the kernel behind may begin (programmatic dependent launch).
template <typename E, int kHead, int kWarps>
constexpr int kForwardKeys = !is_half<E> || kHead > 128 ? 16 : (kHead > 64 ? 32 : 64) / (kWarps == 1 ? 2 : 1);
template <typename E, int kHead>
constexpr int kForwardHeld = is_half<E> && kHead <= 128 ? 2 : 0;

template <typename E, int kHead, int kWarps, bool kMayRelease = false>
struct ForwardBlock
    : QueryBlock<E, kHead, kForwardKeys<E, kHead, kWarps>, kWarps, 2, kForwardHeld<E, kHead>> {
  using Params = ForwardParams;
  using Base = typename ForwardBlock::QueryBlock;
  static constexpr bool kPdl = kMayRelease;

  TXL_DEVICE ForwardBlock(const ForwardParams& x, const typename Base::Place& place)
      : Base(x.p, x.t, place) {}
};

// Of warpgroup_kernels.cu, where the library has it: TXL_WARPGROUPS.
template <int kHead>
constexpr int kWarpgroupHead = kHead <= 64 ? 64 : 128;  // there are two classes
template <typename E, int kHead>
struct WarpgroupKernels {
  static int forward(const ForwardParams& params, void* stream);
  static int decode(const ForwardParams& params, void* stream);  // pdl, and more than one split
};

template <typename Block, bool kDropout = false>
int launch_block(const typename Block::Params& params, void* stream) {
  using Kernel = ForwardKernel<Block, kDropout>;
  return launch<Kernel>(Kernel::blocks(params), Block::kSharedBytes, params, stream);
}

template <typename Block>
int launch_with_dropout(const typename Block::Params& params, void* stream) {
  return params.p.dropout_p > 0 ? launch_block<Block, true>(params, stream)
                                : launch_block<Block>(params, stream);
}

template <typename E, bool kPdl>
int launch_merge(const ForwardParams& params, void* stream) {
  using Merge = MergeKernel<E, kPdl>;
  return launch<Merge>(params.rows(), Merge::shared_bytes(params), params, stream, kPdl);
}

// The block for a class of head dimensions. warpgroups: as of txl::cuda::forward.
template <typename E, int kHead>
int choose_block(const ForwardParams& params, [[maybe_unused]] bool warpgroups, void* stream) {
  if (is_decode(params.p)) return launch_block<ForwardBlock<E, kHead, 1>>(params, stream);
#if defined(TXL_WARPGROUPS)
  if constexpr (is_half<E> && kHead <= 128) {
    if (warpgroups) return WarpgroupKernels<E, kWarpgroupHead<kHead>>::forward(params, stream);
  }
#endif
  return launch_with_dropout<ForwardBlock<E, kHead, 4>>(params, stream);
}

template <typename E, int kHead>
int Kernels<E, kHead>::forward(const Problem& p, const Forward& t, const ForwardCall& call) {
  constexpr int kStep = 64;  // that every BN divides
  static_assert(kStep % kForwardKeys<E, kHead, 4> == 0, "a split has whole tiles");
  const int64_t step = is_decode(p) ? kForwardKeys<E, kHead, 1> : kStep,
                split_keys = div_up(div_up(p.K, call.splits), step) * step;
  const ForwardParams params{
      p, t, Scales(p), call.splits, split_keys, call.parts, heads_together(p, sizeof(E))};
#if defined(TXL_WARPGROUPS)
  if constexpr (is_half<E> && kHead <= 128) {
    static_assert(kForwardKeys<E, kHead, 1> == kForwardKeys<E, kWarpgroupHead<kHead>, 1>, "as above");
    if (call.pdl && is_decode(p) && call.splits > 1)
      return WarpgroupKernels<E, kWarpgroupHead<kHead>>::decode(params, call.stream);
  }
#endif
  const int error = choose_block<E, kHead>(params, call.warpgroups, call.stream);
  return error || call.splits == 1 ? error : launch_merge<E, false>(params, call.stream);
}

}  // namespace txl::cuda

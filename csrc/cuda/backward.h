// Backward: the scores are rebuilt once, and what they lead to, dS, is kept for as long as it takes to sum it
// up along queries, keys and rows of r. All of it would be an L x K matrix; so the problem is cut, and a
// bounded part of dS exists at a time (Chunks). Every sum has one block and a fixed order: no atomics, and
// the same bits every time.
//
//   PrepareKernel                                       q + u, q + v, delta
//   for each chunk:
//     DkDvKernel   a block of keys, over queries        dS, dk, dv, parts of du
//     DqKernel     a block of queries, over keys        dq, and what clamped pairs add to the ends of dr
//     SumKernel    where pairs are clamped              the sum of that
//     DrKernel     a block of rows of r, over queries   dr, parts of v's gradient
//   SumKernel                                           sums of the parts
#pragma once

#include "backward_dk_dv.h"
#include "backward_dq.h"
#include "backward_dr.h"
#include "cuda.h"

namespace txl::cuda {

template <class Kernel>
int launch_part(const typename Kernel::Params& params, void* stream) {
  return launch<Kernel>(Kernel::blocks(params), Kernel::kSharedBytes, params, stream);
}

// Bytes of shared memory that a block may have: on every GPU from sm_80 on, and on sm_80 itself. As in
// txl_kernels/cuda.py, which refuses long rows on GPUs that have less.
constexpr uint32_t kSharedOfAll = 99 * 1024, kSharedOfSm80 = 163 * 1024;

// The kernels of a class of head dimensions, and how many keys, queries and rows of r a block has.
template <typename E, int kHead>
struct BackwardOf {
  static constexpr int kBytes = kRow<E, kHead>;
  static constexpr bool kWide = kBytes > 256, kNarrow = kBytes <= 128;
  using Keys = KeyBlock<E, kHead, (kWide ? 32 : 64), (kNarrow && is_half<E> ? 64 : 32), 4, kNarrow>;
  // float32, split into two, leaves fewer registers.
  using Dq = DqKernel<SlopeBlock<E, kHead, (kNarrow ? 64 : is_half<E> ? 32 : 16)>>;
  using Dr = DrKernel<RowBlock<E, kHead, (kWide ? 32 : 64)>>;
  static constexpr int kKeys = Keys::BN, kQueries = Dq::BM, kRows = Dr::BN;
  static constexpr uint32_t kShared = kWide ? kSharedOfSm80 : kSharedOfAll;
  static_assert(Keys::kSharedBytes <= kShared && Dq::kSharedBytes <= kShared && Dr::kSharedBytes <= kShared,
                "a block's shared memory");

  template <bool kDropout>
  static int dk_dv(const BackwardParams& params, void* stream) {
    return launch_part<DkDvKernel<Keys, kDropout>>(params, stream);
  }
  static int dq(const BackwardParams& params, void* stream) { return launch_part<Dq>(params, stream); }
  static int dr(const BackwardParams& params, void* stream) { return launch_part<Dr>(params, stream); }
};

// Of warpgroup_kernels.cu, where the library has it: TXL_WARPGROUPS.
template <typename E, int kHead>
struct WarpgroupBackward {
  static constexpr int kKeys = kWarpgroupKeys, kQueries = kWarpgroupQueries, kRows = kWarpgroupRows;

  static bool serves(const BackwardParams& params);  // what they need the copy engine to copy
  template <bool kDropout>
  static int dk_dv(const BackwardParams& params, void* stream);
  static int dq(const BackwardParams& params, void* stream);
  static int dr(const BackwardParams& params, void* stream);
};
// Of rows of other classes, which forward fills up for its own, a quarter or half of all sums would be of
// zeros.
#if defined(TXL_WARPGROUPS)
template <typename E, int kHead>
constexpr bool kWarpgroupBackward = is_half<E> && (kHead == 64 || kHead == 128);
#else
template <typename, int>
constexpr bool kWarpgroupBackward = false;
#endif

template <typename T>
struct Type {
  using type = T;
};

template <typename E, int kHead>
int64_t Kernels<E, kHead>::backward_workspace(const Problem& p, const Backward& t, int64_t budget) {
  return Workspace(p, t, sizeof(E), kHead, budget, nullptr).floats;
}

template <typename E, int kHead>
int Kernels<E, kHead>::backward(const Problem& p, const Backward& t, const BackwardCall& call) {
  void* const stream = call.stream;
  BackwardParams params{p,
                        t,
                        Workspace(p, t, sizeof(E), kHead, call.budget, call.workspace),
                        Workspace::clamps(p),
                        Scales(p),
                        heads_together(p, sizeof(E)),
                        {}};
  const Workspace& w = params.w;
  int error = 0;
  const auto sum = [&](auto kernel, const float* parts, int64_t outer, int64_t heads, int64_t inner,
                       int64_t width, int64_t D, const View& to, double factor) {
    const SumParams x{parts, outer, heads, inner, width, D, to, static_cast<float>(factor)};
    if (!error) error = launch_part<typename decltype(kernel)::type>(x, stream);
  };
  // Of many parts, and of the few that dr may have.
  using SumMany = Type<SumKernel<E, 8>>;
  using SumFew = Type<SumKernel<E, 128>>;
  const auto run = [&](auto kernels) {
    using Of = typename decltype(kernels)::type;
    static_assert(
        Of::kKeys >= Workspace::kKeys && Of::kQueries >= Workspace::kQueries && Of::kRows >= Workspace::kRows,
        "the workspace has room for the parts of so many blocks");
    error = launch_part<PrepareKernel<E, kHead>>(params, stream);
    w.chunks.each(p, [&](const Chunk& chunk) {
      params.chunk = chunk;
      if (!error)
        error = p.dropout_p > 0 ? Of::template dk_dv<true>(params, stream)
                                : Of::template dk_dv<false>(params, stream);
      if (!error) error = Of::dq(params, stream);
      const int64_t of_queries = div_up(chunk.hi - chunk.lo, Of::kQueries), width = 2 * (p.D + 1);
      if (params.clamps && w.by_rows)
        sum(Type<SumKernel<float, 8>>{}, w.clamped_parts, chunk.batches, chunk.heads, of_queries, width,
            width, View{w.clamped, 0, width, 0}, 1);
      if (!error && w.by_rows) error = Of::dr(params, stream);
    });
    if (t.du.data) sum(SumMany{}, w.du_parts, p.B, p.H, div_up(p.K, Of::kKeys), p.D, p.D, t.du, p.scale);
    if (t.dv_bias.data)
      sum(SumMany{}, w.dv_bias_parts, w.splits, p.H, div_up(p.N, Of::kRows), p.D, p.D, t.dv_bias, p.scale);
    if (w.dr_parts) sum(SumFew{}, w.dr_parts, w.splits, p.H, 1, p.N * p.D, p.D, t.dr, 1);
  };
  if constexpr (kWarpgroupBackward<E, kHead>) {
    using Of = WarpgroupBackward<E, kHead>;
    if (call.warpgroups && Of::serves(params)) return run(Type<Of>{}), error;
  }
  run(Type<BackwardOf<E, kHead>>{});
  return error;
}

}  // namespace txl::cuda

// Backward: the scores are rebuilt three times, each time in the order in which one kind of gradient is a sum
// that a block can keep to itself. So no atomics, and the same bits every time.
//
//   PrepareKernel                                     q + u, q + v, delta
//   DqKernel     a block of queries, over keys        dq, and what clamped pairs add to the ends of dr
//   DkDvKernel   a block of keys, over queries        dk, dv, parts of du
//   DrKernel     a block of rows of r, over queries   dr, parts of v's gradient
//   SumKernel                                         sums of the parts
#pragma once

#include "backward_dk_dv.h"
#include "backward_dq.h"
#include "backward_dr.h"

namespace txl::cuda {

// Floats. Follows no pointer.
template <typename E, int kHead>
int64_t backward_workspace(const Problem& p) {
  return Workspace(p, sizeof(E), nullptr).floats;
}

// The tiles of a class of head dimensions. With rows of up to 256 bytes a block has less than 100 KiB of
// shared memory, which every GPU has from sm_80 on.
template <typename E, int kHead, bool kDropout>
struct BackwardOf {
  static constexpr int kBytes = kRow<E, kHead>;
  static constexpr bool kWide = kBytes > 256, kNarrow = kBytes <= 128;
  // dq of float32 has sums of its own beside every accumulator, and operands that are split: it takes fewer.
  static constexpr int kDqKeys = kWide || !is_half<E> ? 16 : kNarrow ? 64 : 32;
  static constexpr int kDqHeld = kNarrow ? 3 : kDqKeys == 32 ? 2 : 1;
  using Dq = DqKernel<E, kHead, kDqKeys, kDqHeld, kDropout>;
  using DkDv = DkDvKernel<E, kHead, (kWide ? 32 : 64), kNarrow, kDropout>;
  using Dr = DrKernel<E, kHead, (kWide ? 16 : 32), !kWide, kDropout>;
  static_assert(kWide || (Dq::kSharedBytes <= 99 * 1024 && DkDv::kSharedBytes <= 99 * 1024 &&
                          Dr::kSharedBytes <= 99 * 1024),
                "every GPU has it");
  static_assert(Dq::kSharedBytes <= 163 * 1024 && DkDv::kSharedBytes <= 163 * 1024 &&
                    Dr::kSharedBytes <= 163 * 1024,
                "sm_80 has it; txl_kernels/cuda.py refuses GPUs that have less");
};

template <typename T>
struct Type {
  using type = T;
};

// workspace: aligned to 16 bytes. Every size but the batch is at least 1.
template <typename E, int kHead>
int launch_backward(const Problem& p, const Backward& t, const int64_t* dropout_seed, float* workspace,
                    void* stream) {
  const BackwardParams params{
      p, t, dropout_seed, Workspace(p, sizeof(E), workspace), Workspace::clamps(p), Scales(p)};
  const Workspace& w = params.w;
  int error = 0;
  const auto start = [&](auto kernel, const auto& x, uint32_t shared_bytes) {
    using Kernel = typename decltype(kernel)::type;
    if (!error) error = launch<Kernel>(Kernel::blocks(x), shared_bytes, x, stream);
  };
  const auto sum = [&](auto out, const float* parts, int64_t outer, int64_t inner, int64_t width,
                       const View& to, double factor) {
    const SumParams x{parts, outer, p.H, inner, width, p.D, to, static_cast<float>(factor)};
    start(Type<SumKernel<typename decltype(out)::type>>{}, x, SumKernel<float>::kSharedBytes);
  };
  const auto each = [&](auto dropout) {
    using Of = BackwardOf<E, kHead, decltype(dropout)::value>;
    start(Type<PrepareKernel<E, kHead>>{}, params, 0);
    start(Type<typename Of::Dq>{}, params, Of::Dq::kSharedBytes);
    if (params.clamps) {
      const int64_t width = 2 * (p.D + 1);
      const SumParams x{w.clamped_parts,          p.B, p.H, Of::Dq::parts(params), width, width,
                        {w.clamped, 0, width, 0}, 1.0f};
      start(Type<SumKernel<float>>{}, x, SumKernel<float>::kSharedBytes);
    }
    start(Type<typename Of::DkDv>{}, params, Of::DkDv::kSharedBytes);
    start(Type<typename Of::Dr>{}, params, Of::Dr::kSharedBytes);
    if (t.du.data) sum(Type<E>{}, w.du_parts, p.B, Of::DkDv::parts(params), p.D, t.du, p.scale);
    if (t.dv_bias.data)
      sum(Type<E>{}, w.dv_bias_parts, w.splits, Of::Dr::parts(params), p.D, t.dv_bias, p.scale);
    if (w.splits > 1) sum(Type<E>{}, w.dr_parts, w.splits, 1, p.N * p.D, t.dr, 1);
  };
  if (p.dropout_p > 0)
    each(std::true_type{});
  else
    each(std::false_type{});
  return error;
}

}  // namespace txl::cuda

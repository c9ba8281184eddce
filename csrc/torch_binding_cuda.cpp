// The CUDA kernels as torch ops, through LibTorch's stable ABI: one build serves every later torch, one
// without CUDA too, where the library loads and has no device to run on.
#include "cuda/cuda.h"
#include "torch_binding.h"

#if defined(TXL_CUDA_EMULATION)  // tests run the kernels on the CPU, where they may touch these tensors only
#include "emulation_memory.h"
#define TXL_DISPATCH_KEY CPU
#else
#define TXL_DISPATCH_KEY CUDA
#endif

namespace {

using txl::OptionalTensor;
using txl::ScalarType;
using txl::Tensor;
#if defined(TXL_CUDA_EMULATION)
using Tensors = txl::Tensors<txl::emulation::Memory>;
#else
using Tensors = txl::Tensors<txl::AnyMemory>;
#endif

constexpr int64_t kPiece = 16;  // bytes, that kernels load and store at once

txl::DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return txl::DType::bf16;
    case ScalarType::Half:
      return txl::DType::f16;
    case ScalarType::Float:
      STD_TORCH_CHECK(x.size(-1) <= 128, "the CUDA kernels serve float32 up to D = 128");
      return txl::DType::f32;
    default:
      STD_TORCH_CHECK(false, "the CUDA kernels serve bfloat16, float16 and float32");
  }
}

void check(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, "rel_attention, CUDA kernels, ", op, ": ", txl::cuda::error_name(error), ": ",
                  txl::cuda::error_text(error));
}

void cuda_forward(Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u, OptionalTensor bias_v,
                  OptionalTensor key_range, OptionalTensor dropout_seed, bool causal, int64_t window_left,
                  int64_t window_right, int64_t r_zero, double scale, double dropout_p, Tensor out,
                  Tensor lse, int64_t splits, bool warpgroups, bool pdl, int64_t stream) {
  Tensors of(q, k, r, kPiece);
  const txl::Problem p =
      of.problem(key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p);
  const txl::Forward t = of.forward(q, k, v, r, bias_u, bias_v, out, lse);
  STD_TORCH_CHECK(1 <= splits && splits <= p.K, "splits have keys");
  OptionalTensor parts;
  const int64_t floats = splits * p.B * p.H * p.L * (p.D + 2);
  if (splits > 1) parts = torch::stable::new_empty(q, {floats}, ScalarType::Float);
  check(
      txl::cuda::forward(dtype_of(q), p, t,
                         {static_cast<int>(splits), of.array<float>(parts, floats, "parts", txl::Use::result),
                          warpgroups, pdl, reinterpret_cast<void*>(stream)}),
      "forward");
  of.finish();
}

void cuda_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u,
                   OptionalTensor bias_v, OptionalTensor key_range, OptionalTensor dropout_seed, Tensor out,
                   Tensor lse, bool causal, int64_t window_left, int64_t window_right, int64_t r_zero,
                   double scale, double dropout_p, Tensor dq, Tensor dk, Tensor dv, OptionalTensor dr,
                   OptionalTensor du, OptionalTensor dv_bias, int64_t budget, bool warpgroups,
                   int64_t stream) {
  Tensors of(q, k, r, kPiece);
  const txl::Problem p =
      of.problem(key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p);
  const txl::Backward t =
      of.backward(dout, q, k, v, r, bias_u, bias_v, out, lse, dq, dk, dv, dr, du, dv_bias);
  const int64_t floats = txl::cuda::backward_workspace(dtype_of(q), p, t, budget);
  Tensor workspace = torch::stable::new_empty(q, {floats}, ScalarType::Float);
  check(txl::cuda::backward(
            dtype_of(q), p, t,
            {budget, static_cast<float*>(workspace.data_ptr()), warpgroups, reinterpret_cast<void*>(stream)}),
        "backward");
  of.finish();
}

std::string cuda_targets() { return txl::cuda::targets(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(txl_kernels, m) {
  m.def("cuda_forward(" TXL_INPUTS ", " TXL_OPTIONS
        ", Tensor(a!) out, Tensor(b!) lse, int splits, bool warpgroups, bool pdl, int stream) -> ()");
  m.def("cuda_backward(Tensor dout, " TXL_INPUTS ", Tensor out, Tensor lse, " TXL_OPTIONS ", " TXL_GRADIENTS
        ", int budget, bool warpgroups, int stream) -> ()");
  m.def("cuda_targets() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, TXL_DISPATCH_KEY, m) {
  m.impl("cuda_forward", TORCH_BOX(&cuda_forward));
  m.impl("cuda_backward", TORCH_BOX(&cuda_backward));
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_targets", TORCH_BOX(&cuda_targets));
}

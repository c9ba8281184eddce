// Chooses the kernels for a dtype and a head dimension.

#include "cuda.h"

#if !defined(TXL_CUDA_EMULATION)
#include <cuda_runtime_api.h>
#endif

namespace txl::cuda {

// f(Kernels<E, kHead>) for the smallest class that holds D: csrc/cuda_build.py's CLASSES.
template <typename E, typename F>
static auto with_head(int64_t D, F f) {
  if (D <= 32) return f(Kernels<E, 32>{});
  if (D <= 64) return f(Kernels<E, 64>{});
  if (D <= 96) return f(Kernels<E, 96>{});
  if (D <= 128) return f(Kernels<E, 128>{});
  return f(Kernels<E, 256>{});
}

template <typename F>
static auto with_kernels(DType dtype, int64_t D, F f) {
  if (dtype == DType::f32) return D <= 64 ? f(Kernels<f32, 64>{}) : f(Kernels<f32, 128>{});
  return dtype == DType::bf16 ? with_head<bf16>(D, f) : with_head<f16>(D, f);
}

int forward(DType dtype, const Problem& p, const Forward& t, const ForwardCall& call) {
  return with_kernels(dtype, p.D, [&](auto kernels) { return decltype(kernels)::forward(p, t, call); });
}

int backward(DType dtype, const Problem& p, const Backward& t, const BackwardCall& call) {
  return with_kernels(dtype, p.D, [&](auto kernels) { return decltype(kernels)::backward(p, t, call); });
}

int64_t backward_workspace(DType dtype, const Problem& p, const Backward& t, int64_t budget) {
  return with_kernels(dtype, p.D,
                      [&](auto kernels) { return decltype(kernels)::backward_workspace(p, t, budget); });
}

const char* targets() { return TXL_CUDA_TARGETS; }

#if defined(TXL_CUDA_EMULATION)
const char* error_name(int) { return "an error"; }
const char* error_text(int) { return "the emulation throws"; }
#else
const char* error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
#endif

}  // namespace txl::cuda

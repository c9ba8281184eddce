// The CUDA kernels without torch: the seam between the torch binding, the choice of a kernel and the kernels,
// which are compiled one class of head dimensions and one element type at a time.
//
// Pointers are the device's; no size is 0; work is queued on `stream`. What returns an int returns a
// cudaError_t: 0 if all went well.
#pragma once

#include "../rel_attn.h"

namespace txl::cuda {

struct bf16;
struct f16;
using f32 = float;

struct ForwardCall {
  int splits;       // programs that share out a query's keys
  float* parts;     // of more than one: splits * B * H * L * (D + 2), as ForwardParams says
  bool warpgroups;  // wgmma where there is a kernel with it; the GPU is sm_90
  bool pdl;         // the same, for few queries: what joins the splits is launched while they are computed
  void* stream;
};
int forward(DType dtype, const Problem& p, const Forward& t, const ForwardCall& call);

struct BackwardCall {
  int64_t budget;    // bytes that the gradient of scores may take at a time (workspace.h: Chunks)
  float* workspace;  // of as many floats as backward_workspace says, aligned to 16 bytes
  bool warpgroups;   // as above
  void* stream;
};
int backward(DType dtype, const Problem& p, const Backward& t, const BackwardCall& call);
// Follows no pointer.
int64_t backward_workspace(DType dtype, const Problem& p, const Backward& t, int64_t budget);

const char* error_name(int error);
const char* error_text(int error);
const char* targets();  // what was compiled for: "sm_80 sm_90 compute_80 sm_90a"

// One class and type: what a translation unit of kernels.cu makes of forward.h and backward.h.
template <typename E, int kHead>
struct Kernels {
  static int forward(const Problem& p, const Forward& t, const ForwardCall& call);
  static int backward(const Problem& p, const Backward& t, const BackwardCall& call);
  static int64_t backward_workspace(const Problem& p, const Backward& t, int64_t budget);
};

}  // namespace txl::cuda

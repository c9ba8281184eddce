// The CUDA kernels without torch: the seam between the torch binding, the choice of a kernel and the kernels,
// which are compiled one class of head dimensions and one element type at a time.
//
// Pointers are the device's; work is queued on `stream`. What returns an int returns a cudaError_t: 0 if all
// went well.
#pragma once

#include <string>

#include "../rel_attn.h"

namespace txl::cuda {

struct bf16;
struct f16;
using f32 = float;

// dropout_seed: null without dropout. splits: programs that share out a query's keys; more than one need
// parts, float32 [splits, B * H * L * (D + 2)]. warpgroups: wgmma where there is a kernel with it; the GPU is
// sm_90. pdl: the same, for few queries: what joins the splits is launched while they are computed.
int forward(DType dtype, const Problem& p, const Forward& t, const int64_t* dropout_seed, int splits,
            float* parts, bool warpgroups, bool pdl, void* stream);

// budget: bytes that the gradient of scores may take at a time (backward_tiles.h: Chunks). workspace: as many
// float32 as backward_workspace says. warpgroups: as above.
int backward(DType dtype, const Problem& p, const Backward& t, const int64_t* dropout_seed, float* workspace,
             int64_t budget, bool warpgroups, void* stream);
int64_t backward_workspace(DType dtype, const Problem& p, int64_t budget);

std::string error_text(int error);
std::string targets();  // what was compiled for: "sm_80 sm_90 compute_80 sm_90a"

// One class and type: what a translation unit of kernels.cu defines.
template <typename E, int kHead>
struct Kernels {
  static int forward(const Problem& p, const Forward& t, const int64_t* dropout_seed, int splits,
                     float* parts, bool warpgroups, bool pdl, void* stream);
  static int backward(const Problem& p, const Backward& t, const int64_t* dropout_seed, float* workspace,
                      int64_t budget, bool warpgroups, void* stream);
  static int64_t backward_workspace(const Problem& p, int64_t budget);
};

}  // namespace txl::cuda

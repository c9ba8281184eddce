// The kernels of one element type and class of head dimensions: TXL_ELEMENT (bf16, f16, f32), TXL_HEAD.
#include "backward.h"
#include "cuda.h"
#include "forward.h"

namespace txl::cuda {

template <typename E, int kHead>
int Kernels<E, kHead>::forward(const Problem& p, const Forward& t, const int64_t* dropout_seed, int splits,
                               float* parts, bool warpgroups, bool pdl, void* stream) {
  return launch_forward<E, kHead>(p, t, dropout_seed, splits, parts, warpgroups, pdl, stream);
}

template <typename E, int kHead>
int Kernels<E, kHead>::backward(const Problem& p, const Backward& t, const int64_t* dropout_seed,
                                float* workspace, int64_t budget, bool warpgroups, void* stream) {
  return launch_backward<E, kHead>(p, t, dropout_seed, workspace, budget, warpgroups, stream);
}

template <typename E, int kHead>
int64_t Kernels<E, kHead>::backward_workspace(const Problem& p, int64_t budget) {
  return txl::cuda::backward_workspace<E, kHead>(p, budget);
}

template struct Kernels<TXL_ELEMENT, TXL_HEAD>;

}  // namespace txl::cuda

// The kernels by warpgroups, for sm_90a alone, of one element type and class of head dimensions: TXL_ELEMENT
// (bf16, f16), TXL_HEAD (64, 128).
#include "cuda.h"
#include "forward.h"
#include "warpgroup_block.h"

namespace txl::cuda {

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::forward(const Problem& p, const Forward& t, const int64_t* dropout_seed,
                                        void* stream) {
  return launch_forward<WarpgroupBlock<E, kHead>>({p, t, dropout_seed, 1, p.K, nullptr}, stream);
}

template struct WarpgroupKernels<TXL_ELEMENT, TXL_HEAD>;

}  // namespace txl::cuda

// The kernels by warpgroups, for sm_90a alone, of one element type and class of head dimensions: TXL_ELEMENT
// (bf16, f16), TXL_HEAD (64, 128).
#include "forward.h"
#include "warpgroup_block.h"

namespace txl::cuda {

template <typename E, int kHead>
int WarpgroupKernels<E, kHead>::forward(const ForwardParams& params, void* stream) {
  return launch_block<WarpgroupBlock<E, kHead>>(params, stream);
}

template struct WarpgroupKernels<TXL_ELEMENT, TXL_HEAD>;

}  // namespace txl::cuda

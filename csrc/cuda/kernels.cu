// The kernels of one element type and class of head dimensions: TXL_ELEMENT (bf16, f16, f32), TXL_HEAD.
#include "backward.h"
#include "forward.h"

namespace txl::cuda {
template struct Kernels<TXL_ELEMENT, TXL_HEAD>;
}

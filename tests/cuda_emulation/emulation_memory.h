// Lets the emulated kernels touch a call's tensors, as they are meant to, and nothing else.
#pragma once

#include "emulation.h"

namespace txl::emulation {

struct Memory {
  Memory() {
    global_memory.clear();
    options.track_global_writes = true;
  }

  // From the first to the last element that the strides reach. Use: whether it is read or written; of a
  // result only what kernels have written can be read.
  template <typename Tensor, typename Use>
  void add(const Tensor& x, const char* name, Use use) {
    size_t bytes = 0;
    if (x.numel() > 0) {
      int64_t last = 0;
      for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
      bytes = static_cast<size_t>(last + 1) * x.element_size();
    }
    if (use == Use::operand)
      global_memory.add_readable(name, x.data_ptr(), bytes);
    else if (x.is_contiguous())
      global_memory.add_uninitialised(name, x.data_ptr(), bytes);
    else
      global_memory.add_writable(name, x.data_ptr(), bytes);
  }
};

}  // namespace txl::emulation

// Lets the emulated kernels touch a call's tensors, and nothing else.
#pragma once

#include "emulation.h"

namespace txl::emulation {

struct Memory {
  Memory() { global_memory.clear(); }

  // From the first to the last element that the strides reach.
  template <typename Tensor>
  void add(const Tensor& x, const char* name) {
    size_t bytes = 0;
    if (x.numel() > 0) {
      int64_t last = 0;
      for (int64_t d = 0; d < x.dim(); ++d) last += (x.size(d) - 1) * x.stride(d);
      bytes = static_cast<size_t>(last + 1) * x.element_size();
    }
    global_memory.add_writable(name, x.data_ptr(), bytes);
  }
};

}  // namespace txl::emulation

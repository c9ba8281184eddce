// What was built and with what, for `python -m txl_kernels` and bug reports. Sees no torch headers, so that
// it loads, and can still report, where the kernels do not.
#include <pybind11/pybind11.h>

#include "build_facts.h"  // written by ninja_build.py

namespace py = pybind11;

PYBIND11_MODULE(_build_info, m) {
  m.doc() = "What this build of txl_kernels contains, as strings.";
  m.attr("compiler") = TXL_BUILD_COMPILER;
  m.attr("flags") = TXL_BUILD_FLAGS;
  m.attr("sanitize") = TXL_BUILD_SANITIZE;          // empty in an ordinary build
  m.attr("cpu_levels") = TXL_BUILD_CPU_LEVELS;      // comma separated, lowest first
  m.attr("cuda_kernels") = TXL_BUILD_CUDA_KERNELS;  // compiled targets, or why there are none
  m.attr("torch_headers") = TXL_BUILD_TORCH_HEADERS;
  m.attr("torch_at_least") = TXL_BUILD_TORCH_AT_LEAST;  // any torch from this one on runs the build
  m.attr("python_headers") = TXL_BUILD_PYTHON_HEADERS;
}

// What a vector level offers and what it is given: the seam between the torch binding, the choice of the
// level and the kernels. No torch, no vectors.
#pragma once

#include <cstdint>
#include <string>

#include "../rel_attn.h"

namespace txl {

// The caller's thread pool: run(body, context) calls body(context, index) for every index in [0, threads).
struct Pool {
  int threads;
  void (*run)(int threads, void (*body)(void* context, int index), void* context);
};

// out = x w^T + bias, all of one dtype: x [rows, depth] and out [rows, outputs] contiguous, w [outputs,
// depth] with rows w_row elements apart, bias [outputs] or null.
struct Linear {
  const void *x, *w, *bias;
  void* out;
  int64_t rows, outputs, depth, w_row;
};

// out = x / (1 - p) where dropout keeps it and gate, if there is one, is not zero or less; elsewhere 0. All
// of one dtype and contiguous.
struct Elements {
  const void *x, *gate;
  void* out;
  int64_t count;
  uint64_t seed;
  double p;
};

// The entry points of one (level, dtype). They return false, their results void, where their arithmetic will
// not do: it cannot keep a NaN to the rows that see it, or differs from that of the forward pass. The
// dispatcher then asks a level of plain arithmetic.
struct Kernels {
  bool (*forward)(const Problem&, const Forward&, const Pool&);
  bool (*backward)(const Problem&, const Backward&, const Pool&);
  void (*linear)(const Linear&, const Pool&);  // these two never decline
  void (*dropout)(const Elements&, const Pool&);
};

// The kernels of the level chosen for this process: the best that runs here, or the one TXL_CPU_LEVEL names.
// Throw std::runtime_error where TXL_CPU_LEVEL names a level that is not built or that this CPU cannot run.
void cpu_forward(DType dtype, const Problem& problem, const Forward& tensors, const Pool& pool);
void cpu_backward(DType dtype, const Problem& problem, const Backward& tensors, const Pool& pool);
void cpu_linear(DType dtype, const Linear& tensors, const Pool& pool);
void cpu_dropout(DType dtype, const Elements& tensors, const Pool& pool);

std::string cpu_level();   // the chosen one
std::string cpu_levels();  // all that are built and run here, comma separated, best last

}  // namespace txl

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

// LayerNorm over the last dimension: weight and bias of that many elements.
struct Norm {
  const void *weight, *bias;
  double eps;
};

constexpr int kDecodeRows = 8;  // the most queries that decode has room for: a layer's tokens

// A layer of Transformer-XL that reads B x L tokens h [B, L, width] of `problem`: attention to k and v, whose
// last L rows it fills with those of h, then feed-forward. q and out of `attention`, x, out and rows of the
// matrices are the kernel's own. All of one dtype and, but for views and matrices, contiguous.
struct Layer {
  Problem problem;
  Forward attention;
  Linear qkv, o;  // qkv: the rows of q, those of k, those of v; no bias
  Norm attention_norm;
  Linear inner, outer;
  Norm feed_norm;
  bool norm_first;  // pre-LN: the norm of what a branch reads; else that of the sum it ends in
  const void* h;
  void* out;  // may be h
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

// The entry points of one (level, dtype).
struct Kernels {
  // Whether the level's own arithmetic is faster for such a call than that of the next lower level.
  bool (*suits)(const Problem&);
  void (*forward)(const Problem&, const Forward&, const Pool&);
  // False, its results void, where the arithmetic will not do: it cannot keep a NaN to the rows that see it,
  // or differs from that of the forward pass. The next lower level is asked then; plain arithmetic always
  // will.
  bool (*backward)(const Problem&, const Backward&, const Pool&);
  void (*linear)(const Linear&, const Pool&);
  void (*layer)(const Layer&, const Pool&);
  void (*dropout)(const Elements&, const Pool&);
};

// The kernels of the level chosen for this process: the best that runs here, or a lower one where that suits
// the call better; or the one TXL_CPU_LEVEL names, whatever the call. Throw std::runtime_error where
// TXL_CPU_LEVEL names a level that is not built or that this CPU cannot run.
void cpu_forward(DType dtype, const Problem& problem, const Forward& tensors, const Pool& pool);
void cpu_backward(DType dtype, const Problem& problem, const Backward& tensors, const Pool& pool);
void cpu_linear(DType dtype, const Linear& tensors, const Pool& pool);
void cpu_layer(DType dtype, const Layer& tensors, const Pool& pool);  // L <= kDecodeRows
void cpu_dropout(DType dtype, const Elements& tensors, const Pool& pool);

std::string cpu_level();   // the chosen one
std::string cpu_levels();  // all that are built and run here, comma separated, best last

}  // namespace txl

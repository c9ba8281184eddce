// The kernels of one vector level and one dtype: compiled once per (TXL_LEVEL, TXL_DTYPE), with the level's
// flags.
#ifndef TXL_LEVEL
#error "TXL_LEVEL and TXL_DTYPE come from csrc/ninja_build.py"
#endif

#include "backward.h"
#include "decode.h"
#include "dropout.h"
#include "forward.h"
#include "layer.h"
#include "linear.h"

namespace txl::TXL_LEVEL {
namespace {

// TXL_TILES and TXL_PAIRS are the level's own, not the compiler's macros, which CXXFLAGS=-march=native sets
// for all levels: a lower one must serve what a higher one leaves to it.
struct f32 {
  using Stored = float;
#if defined(TXL_TILES)
  using Compute = SplitTiles;
#else
  using Compute = Single;
#endif
};
struct f64 {
  using Stored = double;
  using Compute = Double;
};
struct bf16_ {
  using Stored = bf16;
#if defined(TXL_TILES)
  using Compute = Bf16Tiles;
#elif defined(TXL_PAIRS)
  using Compute = Bf16Pair;
#else
  using Compute = Single;
#endif
};
// The macro names a dtype; bf16 is taken by the stored type.
#define TXL_CASE_f32 f32
#define TXL_CASE_f64 f64
#define TXL_CASE_bf16 bf16_
#define TXL_CASE_(dtype) TXL_CASE_##dtype
#define TXL_CASE(dtype) TXL_CASE_(dtype)
using Case = TXL_CASE(TXL_DTYPE);

// Whether arithmetic of three parts is faster here than plain one: to make the parts must be worth it, and
// the padding. Measured. Forward and backward agree, or backward would not find the probabilities of forward
// again.
bool suits(const Problem& p) {
  return Case::Compute::parts == 1 || (p.L >= 64 && 5 * p.D >= 4 * round_up(p.D, 32));
}

void forward(const Problem& p, const Forward& t, const Pool& pool) {
  if (decodes<Case::Compute>(p))
    DecodeKernel<Case::Stored>(p, t, pool).run();
  else
    ForwardKernel<Case::Compute, Case::Stored>(p, t, pool).run();
}

bool backward(const Problem& p, const Backward& t, const Pool& pool) {
  // Decode scores in float; pairs, which round q, would not find its probabilities again.
  if (decodes<Case::Compute>(p) && Case::Compute::per_elem > 1) return false;
  return BackwardKernel<Case::Compute, Case::Stored>(p, t, pool).run();
}

void linear(const Linear& t, const Pool& pool) { LinearKernel<Case::Stored>(t, pool).run(); }

void layer(const Layer& t, const Pool& pool) { LayerKernel<Case::Stored>(t, pool).run(); }

void dropout(const Elements& t, const Pool& pool) { ElementDropout<Case::Stored>(t, pool).run(); }

}  // namespace

// kernels_f32, kernels_f64 or kernels_bf16 of this level.
#define TXL_NAME_(dtype) kernels_##dtype
#define TXL_NAME(dtype) TXL_NAME_(dtype)
extern const Kernels TXL_NAME(TXL_DTYPE);
const Kernels TXL_NAME(TXL_DTYPE) = {suits, forward, backward, linear, layer, dropout};

}  // namespace txl::TXL_LEVEL

// What the bindings share: torch's tensors as the problem's structs. LibTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>

#include "philox.h"
#include "rel_attn.h"

// Parts of the ops' schemas, the same for every backend.
#define TXL_INPUTS                                                           \
  "Tensor q, Tensor k, Tensor v, Tensor r, Tensor? bias_u, Tensor? bias_v, " \
  "Tensor? key_range, Tensor? dropout_seed"
#define TXL_OPTIONS "bool causal, int window_left, int window_right, int r_zero, float scale, float dropout_p"
#define TXL_GRADIENTS \
  "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dr, Tensor(e!)? du, Tensor(f!)? dv_bias"

namespace txl {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

// [B, H, rows, D], or [H, rows, D] and [H, D] with the missing dimensions' strides 0.
inline View view(const Tensor& x, const char* name) {
  const int64_t dims = x.dim();
  STD_TORCH_CHECK(x.size(dims - 1) <= 1 || x.stride(dims - 1) == 1, name,
                  " must have a contiguous last dimension");
  View v;
  v.data = x.data_ptr();
  if (dims == 4) v.batch = x.stride(0);
  v.head = x.stride(dims == 4 ? 1 : 0);
  if (dims >= 3) v.row = x.stride(dims - 2);
  return v;
}

// q: a tensor whose first dimension is B.
inline const int32_t* key_range_data(const OptionalTensor& x, const Tensor& q) {
  if (!x) return nullptr;
  STD_TORCH_CHECK(x->is_contiguous() && x->numel() == 2 * q.size(0) && x->scalar_type() == ScalarType::Int &&
                      x->is_cpu() == q.is_cpu(),
                  "key_range must be int32 [B, 2], where the other tensors are");
  return static_cast<const int32_t*>(x->data_ptr());
}

// All but the dropout seed, whose value only the CPU's kernels are given.
inline Problem problem(const Tensor& q, const Tensor& k, const Tensor& r, const OptionalTensor& key_range,
                       bool causal, int64_t window_left, int64_t window_right, int64_t r_zero, double scale,
                       double dropout_p) {
  Problem p;
  p.B = q.size(0), p.H = q.size(1), p.L = q.size(2), p.D = q.size(3);
  p.K = k.size(2), p.N = r.size(1);
  // Where distance 0 is so far outside that every pair is clamped, it may as well be nearer: the kernels add
  // to it, on GPUs in 32 bits.
  p.r_zero = std::clamp(r_zero, -p.L, p.K + p.N);
  p.set_reach(causal, window_left, window_right);
  p.scale = scale;
  p.dropout_p = dropout_p;
  p.dropout_threshold = DropoutMask::threshold(dropout_p);
  p.dropout_seed = 0;
  p.key_range = key_range_data(key_range, q);
  return p;
}

}  // namespace txl

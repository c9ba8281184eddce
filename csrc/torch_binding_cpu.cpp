// The CPU kernels as torch ops, through LibTorch's stable ABI: one build serves every later torch.
#include <array>
#include <tuple>
#include <vector>

#include "cpu/cpu.h"
#include "torch_binding.h"

namespace {

using txl::OptionalTensor;
using txl::ScalarType;
using txl::Tensor;
using Tensors = txl::Tensors<txl::AnyMemory>;

txl::DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return txl::DType::f32;
    case ScalarType::Double:
      return txl::DType::f64;
    case ScalarType::BFloat16:
      return txl::DType::bf16;
    default:
      STD_TORCH_CHECK(false, "the CPU kernels serve float32, float64 and bfloat16");
  }
}

// torch's own threads: a second OpenMP runtime beside it would fight for the cores.
txl::Pool torch_pool() {
  return {static_cast<int>(torch::stable::get_num_threads()),
          [](int threads, void (*body)(void*, int), void* context) {
            torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
              for (int64_t i = begin; i < end; ++i) body(context, static_cast<int>(i));
            });
          }};
}

// The same as registry.new_results. In Python it is 2 % of a decode call: what decode reads has driven Python
// out of the caches.
std::tuple<Tensor, Tensor> new_results(const Tensor& q) {
  const std::array<int64_t, 4> shape{q.size(0), q.size(1), q.size(2), q.size(3)};
  Tensor out = torch::stable::empty_like(q);
  if (q.size(3) == 1 || out.stride(3) != 1) out = torch::stable::new_empty(q, shape);
  const ScalarType precision = q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  return {out, torch::stable::new_empty(q, {shape.data(), 3}, precision)};
}

std::tuple<Tensor, Tensor> cpu_forward(Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u,
                                       OptionalTensor bias_v, OptionalTensor key_range,
                                       OptionalTensor dropout_seed, bool causal, int64_t window_left,
                                       int64_t window_right, int64_t r_zero, double scale, double dropout_p) {
  auto [out, lse] = new_results(q);
  Tensors of(q, k, r);
  const txl::Problem p =
      of.problem(key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p);
  const txl::Forward tensors = of.forward(q, k, v, r, bias_u, bias_v, out, lse);
  txl::cpu_forward(dtype_of(q), p, tensors, torch_pool());
  return {out, lse};
}

void cpu_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u,
                  OptionalTensor bias_v, OptionalTensor key_range, OptionalTensor dropout_seed, Tensor out,
                  Tensor lse, bool causal, int64_t window_left, int64_t window_right, int64_t r_zero,
                  double scale, double dropout_p, Tensor dq, Tensor dk, Tensor dv, OptionalTensor dr,
                  OptionalTensor du, OptionalTensor dv_bias) {
  Tensors of(q, k, r);
  const txl::Problem p =
      of.problem(key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p);
  const txl::Backward tensors =
      of.backward(dout, q, k, v, r, bias_u, bias_v, out, lse, dq, dk, dv, dr, du, dv_bias);
  txl::cpu_backward(dtype_of(q), p, tensors, torch_pool());
}

// Of a tensor without gaps, of x's dtype.
void* cpu_data(const Tensor& t, const Tensor& x, int64_t count, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU");
  return txl::contiguous_data(t, x.scalar_type(), count, name);
}

void cpu_linear(Tensor x, Tensor weight, OptionalTensor bias, Tensor out) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_cpu() && weight.scalar_type() == x.scalar_type(),
                  "weight must be a matrix of x's dtype, on the CPU");
  const int64_t outputs = weight.size(0), depth = weight.size(1), rows = depth ? x.numel() / depth : 0;
  STD_TORCH_CHECK(weight.stride(1) == 1 || depth == 1, "weight must have contiguous rows");
  txl::cpu_linear(dtype_of(x),
                  {cpu_data(x, x, rows * depth, "x"), weight.data_ptr(),
                   bias ? cpu_data(*bias, x, outputs, "bias") : nullptr,
                   cpu_data(out, x, rows * outputs, "out"), rows, outputs, depth, weight.stride(0)},
                  torch_pool());
}

// One layer of `cpu_layers`: the tensors are checked as they are taken.
txl::Layer layer(const Tensor& h, const Tensor& kv, int64_t begin, int64_t end, const Tensor& r,
                 const Tensor* weight) {
  const auto take = [&](const Tensor& x, std::initializer_list<int64_t> shape, const char* name) {
    const bool fits =
        x.scalar_type() == h.scalar_type() && x.is_cpu() && x.is_contiguous() && txl::has_shape(x, shape);
    STD_TORCH_CHECK(fits, name, " does not go with h and the other tensors of its layer");
    return static_cast<char*>(x.data_ptr());
  };
  const auto vector = [&](int64_t size, const char* name) { return take(*weight++, {size}, name); };
  const auto matrix = [&](int64_t outputs, int64_t depth, const char* name) {
    txl::Linear m{};
    m.w = take(*weight++, {outputs, depth}, name);
    m.outputs = outputs, m.depth = m.w_row = depth;
    return m;
  };
  const int64_t B = h.size(0), width = h.size(2), H = kv.size(2), capacity = kv.size(3), D = kv.size(4);
  txl::Layer t{};
  t.problem.B = B, t.problem.H = H, t.problem.L = h.size(1), t.problem.K = end - begin, t.problem.D = D;
  t.problem.N = r.size(1), t.problem.r_zero = t.problem.N - 1;
  STD_TORCH_CHECK(0 <= begin && t.problem.L <= t.problem.K && end <= capacity,
                  "keys_values have no room for h");
  STD_TORCH_CHECK(t.problem.N > 0, "r has no rows");

  char* keys = take(kv, {2, B, H, capacity, D}, "keys_values") + begin * D * kv.element_size();
  t.attention.k = {keys, H * capacity * D, capacity * D, D};
  t.attention.v = t.attention.k;
  t.attention.v.data = keys + B * H * capacity * D * kv.element_size();
  t.attention.r = {take(r, {H, t.problem.N, D}, "r"), 0, t.problem.N * D, D};
  t.attention.bias_u = {take(*weight++, {H, D}, "bias_u"), 0, D, 0};
  t.attention.bias_v = {take(*weight++, {H, D}, "bias_v"), 0, D, 0};
  t.qkv = matrix(3 * H * D, width, "qkv");
  t.o = matrix(width, H * D, "o");
  t.attention_norm.weight = vector(width, "the norm's weight");
  t.attention_norm.bias = vector(width, "the norm's bias");
  const int64_t d_inner = weight->size(0);
  t.inner = matrix(d_inner, width, "inner");
  t.inner.bias = vector(d_inner, "inner's bias");
  t.outer = matrix(width, d_inner, "outer");
  t.outer.bias = vector(width, "outer's bias");
  t.feed_norm.weight = vector(width, "the norm's weight");
  t.feed_norm.bias = vector(width, "the norm's bias");
  return t;
}

// Layers for a few tokens h [B, L, width], each of what the one before made. Per layer: keys_values [2, B, H,
// capacity, D], of which the rows [begin, end) are attended and the last L filled with h's own; r [H, N, D];
// and twelve weights.
void cpu_layers(Tensor h, std::vector<Tensor> keys_values, int64_t begin, int64_t end, std::vector<Tensor> r,
                std::vector<Tensor> weights, OptionalTensor key_range, int64_t window_left, double scale,
                double eps, bool norm_first, Tensor out) {
  constexpr size_t kWeights = 12;
  STD_TORCH_CHECK(r.size() == keys_values.size() && weights.size() == kWeights * keys_values.size(),
                  "a layer has one r and 12 weights");
  STD_TORCH_CHECK(!keys_values.empty(), "there must be a layer");
  STD_TORCH_CHECK(h.dim() == 3 && h.size(1) <= txl::kDecodeRows, "h must be of few tokens");
  void *const first = cpu_data(h, h, h.numel(), "h"), *const last = cpu_data(out, h, h.numel(), "out");
  const int32_t* range = nullptr;
  if (key_range) {
    STD_TORCH_CHECK(txl::has_shape(*key_range, {h.size(0), 2}) && key_range->is_contiguous() &&
                        key_range->is_cpu() && key_range->scalar_type() == ScalarType::Int,
                    "key_range must be int32 [B, 2]");
    range = static_cast<const int32_t*>(key_range->data_ptr());
  }
  for (size_t i = 0; i < keys_values.size(); ++i) {
    txl::Layer t = layer(h, keys_values[i], begin, end, r[i], &weights[kWeights * i]);
    t.problem.set_reach(true, window_left, -1);
    t.problem.scale = scale;
    t.problem.key_range = range;
    t.attention_norm.eps = t.feed_norm.eps = eps;
    t.norm_first = norm_first;
    t.out = last;
    t.h = i == 0 ? first : last;
    txl::cpu_layer(dtype_of(h), t, torch_pool());
  }
}

void cpu_dropout(Tensor x, OptionalTensor gate, int64_t seed, double p, Tensor out) {
  txl::cpu_dropout(dtype_of(x),
                   {cpu_data(x, x, x.numel(), "x"), gate ? cpu_data(*gate, x, x.numel(), "gate") : nullptr,
                    cpu_data(out, x, x.numel(), "out"), x.numel(), static_cast<uint64_t>(seed), p},
                   torch_pool());
}

std::string cpu_level() { return txl::cpu_level(); }
std::string cpu_levels() { return txl::cpu_levels(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(txl_kernels, m) {
  m.def("cpu_forward(" TXL_INPUTS ", " TXL_OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def("cpu_backward(Tensor dout, " TXL_INPUTS ", Tensor out, Tensor lse, " TXL_OPTIONS ", " TXL_GRADIENTS
        ") -> ()");
  m.def("cpu_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
  m.def(
      "cpu_layers(Tensor h, Tensor(a!)[] keys_values, int begin, int end, Tensor[] r, Tensor[] weights, "
      "Tensor? key_range,"
      " int window_left, float scale, float eps, bool norm_first, Tensor(b!) out) -> ()");
  m.def("cpu_dropout(Tensor x, Tensor? gate, int seed, float p, Tensor(a!) out) -> ()");
  m.def("cpu_level() -> str");
  m.def("cpu_levels() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CPU, m) {
  m.impl("cpu_forward", TORCH_BOX(&cpu_forward));
  m.impl("cpu_backward", TORCH_BOX(&cpu_backward));
  m.impl("cpu_linear", TORCH_BOX(&cpu_linear));
  m.impl("cpu_layers", TORCH_BOX(&cpu_layers));
  m.impl("cpu_dropout", TORCH_BOX(&cpu_dropout));
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&cpu_level));
  m.impl("cpu_levels", TORCH_BOX(&cpu_levels));
}

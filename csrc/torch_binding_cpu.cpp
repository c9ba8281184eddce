// The CPU kernels as torch ops, through LibTorch's stable ABI: one build serves every later torch.
// Shapes and dtypes are checked in txl_kernels/api.py; here only what memory safety needs.
#include "cpu/cpu.h"
#include "torch_binding.h"

namespace {

using txl::OptionalTensor;
using txl::ScalarType;
using txl::Tensor;

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

txl::View view(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  return txl::view(x, name);
}

txl::View view(const OptionalTensor& x, const char* name) { return x ? view(*x, name) : txl::View{}; }

txl::Problem problem(const Tensor& q, const Tensor& k, const Tensor& r, const OptionalTensor& key_range,
                     const OptionalTensor& dropout_seed, bool causal, int64_t window_left,
                     int64_t window_right, int64_t r_zero, double scale, double dropout_p) {
  txl::Problem p =
      txl::problem(q, k, r, key_range, causal, window_left, window_right, r_zero, scale, dropout_p);
  if (dropout_p > 0)
    p.dropout_seed = static_cast<uint64_t>(*static_cast<const int64_t*>(dropout_seed->data_ptr()));
  return p;
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

void cpu_forward(Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u, OptionalTensor bias_v,
                 OptionalTensor key_range, OptionalTensor dropout_seed, bool causal, int64_t window_left,
                 int64_t window_right, int64_t r_zero, double scale, double dropout_p, Tensor out,
                 Tensor lse) {
  const txl::Forward tensors{view(q, "q"),     view(k, "k"),           view(v, "v"),
                             view(r, "r"),     view(bias_u, "bias_u"), view(bias_v, "bias_v"),
                             view(out, "out"), lse.data_ptr()};
  txl::cpu_forward(
      dtype_of(q),
      problem(q, k, r, key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p),
      tensors, torch_pool());
}

void cpu_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u,
                  OptionalTensor bias_v, OptionalTensor key_range, OptionalTensor dropout_seed, Tensor out,
                  Tensor lse, bool causal, int64_t window_left, int64_t window_right, int64_t r_zero,
                  double scale, double dropout_p, Tensor dq, Tensor dk, Tensor dv, Tensor dr,
                  OptionalTensor du, OptionalTensor dv_bias) {
  const txl::Backward tensors{
      view(q, "q"),           view(k, "k"),     view(v, "v"),       view(r, "r"),   view(bias_u, "bias_u"),
      view(bias_v, "bias_v"), view(out, "out"), view(dout, "dout"), lse.data_ptr(), view(dq, "dq"),
      view(dk, "dk"),         view(dv, "dv"),   view(dr, "dr"),     view(du, "du"), view(dv_bias, "dv_bias")};
  txl::cpu_backward(
      dtype_of(q),
      problem(q, k, r, key_range, dropout_seed, causal, window_left, window_right, r_zero, scale, dropout_p),
      tensors, torch_pool());
}

void* data(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_cpu(), name, " must be on the CPU");
  return t.data_ptr();
}

void cpu_linear(Tensor x, Tensor weight, OptionalTensor bias, Tensor out) {
  const int64_t outputs = weight.size(0), depth = weight.size(1);
  txl::cpu_linear(dtype_of(x),
                  {data(x, "x"), data(weight, "weight"), bias ? data(*bias, "bias") : nullptr,
                   data(out, "out"), x.numel() / depth, outputs, depth, weight.stride(0)},
                  torch_pool());
}

void cpu_dropout(Tensor x, OptionalTensor gate, int64_t seed, double p, Tensor out) {
  txl::cpu_dropout(dtype_of(x),
                   {data(x, "x"), gate ? data(*gate, "gate") : nullptr, data(out, "out"), x.numel(),
                    static_cast<uint64_t>(seed), p},
                   torch_pool());
}

std::string cpu_level() { return txl::cpu_level(); }
std::string cpu_levels() { return txl::cpu_levels(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(txl_kernels, m) {
  m.def(
      "cpu_forward(Tensor q, Tensor k, Tensor v, Tensor r, Tensor? bias_u, Tensor? bias_v, Tensor? "
      "key_range, Tensor? dropout_seed,"
      " bool causal, int window_left, int window_right, int r_zero, float scale, float dropout_p,"
      " Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "cpu_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor r, Tensor? bias_u, Tensor? bias_v, "
      "Tensor? key_range,"
      " Tensor? dropout_seed, Tensor out, Tensor lse, bool causal, int window_left, int window_right, int "
      "r_zero, float scale,"
      " float dropout_p, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dr, Tensor(e!)? du, "
      "Tensor(f!)? dv_bias) -> ()");
  m.def("cpu_linear(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("cpu_dropout(Tensor x, Tensor? gate, int seed, float p, Tensor(a!) out) -> ()");
  m.def("cpu_level() -> str");
  m.def("cpu_levels() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CPU, m) {
  m.impl("cpu_forward", TORCH_BOX(&cpu_forward));
  m.impl("cpu_backward", TORCH_BOX(&cpu_backward));
  m.impl("cpu_linear", TORCH_BOX(&cpu_linear));
  m.impl("cpu_dropout", TORCH_BOX(&cpu_dropout));
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&cpu_level));
  m.impl("cpu_levels", TORCH_BOX(&cpu_levels));
}

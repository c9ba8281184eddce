// The CUDA kernels as torch ops, through LibTorch's stable ABI: one build serves every later torch, one
// without CUDA too, where the library loads and has no device to run on.
// Shapes and dtypes are checked in txl_kernels/api.py; here only what memory safety needs.
#include "cuda/cuda.h"
#include "torch_binding.h"

#if defined(TXL_CUDA_EMULATION)  // tests run the kernels on the CPU, where they may touch these tensors only
#include "emulation_memory.h"
#define TXL_DISPATCH_KEY CPU
#else
#define TXL_DISPATCH_KEY CUDA
namespace txl::emulation {
struct Memory {
  void add(const Tensor&, const char*) {}
};
}  // namespace txl::emulation
#endif

namespace {

using txl::OptionalTensor;
using txl::ScalarType;
using txl::Tensor;

txl::DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return txl::DType::bf16;
    case ScalarType::Half:
      return txl::DType::f16;
    case ScalarType::Float:
      STD_TORCH_CHECK(x.size(-1) <= 128, "the CUDA kernels serve float32 up to D = 128");
      return txl::DType::f32;
    default:
      STD_TORCH_CHECK(false, "the CUDA kernels serve bfloat16, float16 and float32");
  }
}

// The tensors of a call, all on q's device.
class Tensors {
 public:
  explicit Tensors(const Tensor& q) : device_(q.get_device_index()), on_cpu_(q.is_cpu()) {}

  const Tensor& checked(const Tensor& x, const char* name) {
    STD_TORCH_CHECK(x.is_cpu() == on_cpu_ && x.get_device_index() == device_, name, " must be on q's device");
    memory_.add(x, name);
    return x;
  }
  txl::View view(const Tensor& x, const char* name) {
    txl::View v = txl::view(checked(x, name), name);
    // The stride of a single row (head, entry) may be anything: an address that is made of it is not read,
    // but must be aligned.
    const int64_t last = x.dim() - 1, bytes = x.scalar_type() == ScalarType::Float ? 4 : 2;
    if (last == 3 && x.size(0) == 1) v.batch = 0;
    if (last >= 1 && x.size(last == 3 ? 1 : 0) == 1) v.head = 0;
    if (last >= 2 && x.size(last - 1) == 1) v.row = 0;
    const auto whole = [&](int64_t n) { return n * bytes % 16 == 0; };
    v.wide = whole(x.size(last)) && whole(v.batch) && whole(v.head) && whole(v.row) &&
             reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && v.row * bytes <= 0x7fffffff;
    return v;
  }
  txl::View view(const OptionalTensor& x, const char* name) { return x ? view(*x, name) : txl::View{}; }

  template <typename T>
  T* pointer(const Tensor& x, const char* name) {
    STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
    return static_cast<T*>(checked(x, name).data_ptr());
  }
  template <typename T>
  T* pointer(const OptionalTensor& x, const char* name) {
    return x ? pointer<T>(*x, name) : nullptr;
  }

 private:
  decltype(std::declval<Tensor>().get_device_index()) device_;
  bool on_cpu_;
  txl::emulation::Memory memory_;
};

void check(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, "rel_attention, CUDA kernels, ", op, ": ", txl::cuda::error_text(error));
}

void cuda_forward(Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u, OptionalTensor bias_v,
                  OptionalTensor key_range, OptionalTensor dropout_seed, bool causal, int64_t window_left,
                  int64_t window_right, int64_t r_zero, double scale, double dropout_p, Tensor out,
                  Tensor lse, OptionalTensor parts, int64_t splits, bool warpgroups, bool pdl,
                  int64_t stream) {
  Tensors tensors(q);
  txl::Problem p =
      txl::problem(q, k, r, key_range, causal, window_left, window_right, r_zero, scale, dropout_p);
  p.key_range = tensors.pointer<const int32_t>(key_range, "key_range");
  const txl::Forward t{tensors.view(q, "q"),           tensors.view(k, "k"),
                       tensors.view(v, "v"),           tensors.view(r, "r"),
                       tensors.view(bias_u, "bias_u"), tensors.view(bias_v, "bias_v"),
                       tensors.view(out, "out"),       tensors.pointer<void>(lse, "lse")};
  STD_TORCH_CHECK(splits == 1 || (parts && parts->numel() == splits * p.B * p.H * p.L * (p.D + 2)),
                  "parts has another size than splits need");
  check(txl::cuda::forward(dtype_of(q), p, t, tensors.pointer<const int64_t>(dropout_seed, "dropout_seed"),
                           static_cast<int>(splits), tensors.pointer<float>(parts, "parts"), warpgroups, pdl,
                           reinterpret_cast<void*>(stream)),
        "forward");
}

void cuda_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor r, OptionalTensor bias_u,
                   OptionalTensor bias_v, OptionalTensor key_range, OptionalTensor dropout_seed, Tensor out,
                   Tensor lse, bool causal, int64_t window_left, int64_t window_right, int64_t r_zero,
                   double scale, double dropout_p, Tensor dq, Tensor dk, Tensor dv, Tensor dr,
                   OptionalTensor du, OptionalTensor dv_bias, int64_t budget, bool warpgroups,
                   int64_t stream) {
  Tensors tensors(q);
  txl::Problem p =
      txl::problem(q, k, r, key_range, causal, window_left, window_right, r_zero, scale, dropout_p);
  p.key_range = tensors.pointer<const int32_t>(key_range, "key_range");
  const txl::Backward t{
      tensors.view(q, "q"),     tensors.view(k, "k"),           tensors.view(v, "v"),
      tensors.view(r, "r"),     tensors.view(bias_u, "bias_u"), tensors.view(bias_v, "bias_v"),
      tensors.view(out, "out"), tensors.view(dout, "dout"),     tensors.pointer<const void>(lse, "lse"),
      tensors.view(dq, "dq"),   tensors.view(dk, "dk"),         tensors.view(dv, "dv"),
      tensors.view(dr, "dr"),   tensors.view(du, "du"),         tensors.view(dv_bias, "dv_bias")};
  Tensor workspace =
      torch::stable::new_empty(q, {txl::cuda::backward_workspace(dtype_of(q), p, budget)}, ScalarType::Float);
  check(txl::cuda::backward(dtype_of(q), p, t, tensors.pointer<const int64_t>(dropout_seed, "dropout_seed"),
                            tensors.pointer<float>(workspace, "workspace"), budget, warpgroups,
                            reinterpret_cast<void*>(stream)),
        "backward");
}

std::string cuda_targets() { return txl::cuda::targets(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(txl_kernels, m) {
  m.def("cuda_forward(" TXL_INPUTS ", " TXL_OPTIONS
        ", Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? parts, int splits, bool warpgroups, bool pdl"
        ", int stream) -> ()");
  m.def("cuda_backward(Tensor dout, " TXL_INPUTS ", Tensor out, Tensor lse, " TXL_OPTIONS ", " TXL_GRADIENTS
        ", int budget, bool warpgroups, int stream) -> ()");
  m.def("cuda_targets() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, TXL_DISPATCH_KEY, m) {
  m.impl("cuda_forward", TORCH_BOX(&cuda_forward));
  m.impl("cuda_backward", TORCH_BOX(&cuda_backward));
}

STABLE_TORCH_LIBRARY_IMPL(txl_kernels, CompositeExplicitAutograd, m) {
  m.impl("cuda_targets", TORCH_BOX(&cuda_targets));
}

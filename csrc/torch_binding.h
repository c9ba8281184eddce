// What the bindings share: torch's tensors as the problem's structs. LibTorch's stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "philox.h"
#include "rel_attn.h"

// Parts of the ops' schemas, the same for every backend.
#define TXL_INPUTS                                                           \
  "Tensor q, Tensor k, Tensor v, Tensor r, Tensor? bias_u, Tensor? bias_v, " \
  "Tensor? key_range, Tensor? dropout_seed"
#define TXL_OPTIONS "bool causal, int window_left, int window_right, int r_zero, float scale, float dropout_p"
#define TXL_GRADIENTS \
  "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dr, Tensor(e!)? du, Tensor(f!)? dv_bias"

namespace txl {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Float;
template <>
constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;

inline bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  bool has = x.dim() == static_cast<int64_t>(shape.size());
  for (int64_t d = 0; has && d < x.dim(); ++d) has = x.size(d) == shape.begin()[d];
  return has;
}

// Of a tensor without gaps.
inline void* contiguous_data(const Tensor& x, ScalarType type, int64_t count, const char* name) {
  STD_TORCH_CHECK(x.is_contiguous() && x.numel() == count && x.scalar_type() == type, name,
                  " must be contiguous and have ", count, " elements of the type that it is to have");
  return x.data_ptr();
}

enum class Use { operand, result };

// The tensors of a call of attention. What they must be, and why, txl_kernels/api.py says in better words;
// but an op can be called without it, and then reads and writes nothing beside its tensors.
//
// Memory: add(x, name, use) is told of all that the kernels may touch.
template <typename Memory>
class Tensors {
 public:
  // piece: of so many bytes rows are to have whole ones, and to begin at multiples of it. In place of a
  // tensor whose rows do not the kernels have a copy, with rows filled up by zeros; results come back by
  // finish().
  Tensors(const Tensor& q, const Tensor& k, const Tensor& r, int64_t piece = 1)
      : type_(q.scalar_type()), on_cpu_(q.is_cpu()), device_(q.get_device_index()), piece_(piece) {
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && r.dim() == 3,
                    "q and k must have four dimensions, r three");
    B_ = q.size(0), H_ = q.size(1), L_ = q.size(2), D_ = q.size(3), K_ = k.size(2), N_ = r.size(1);
    STD_TORCH_CHECK(1 <= D_ && D_ <= 256 && 1 <= B_ && 1 <= H_ && 1 <= L_ && L_ <= K_ && 1 <= N_,
                    "q, k and r must have 1 <= D <= 256, 1 <= B, 1 <= H, 1 <= L <= K, 1 <= N");
    const int64_t elements = std::max<int64_t>(piece / q.element_size(), 1);
    width_ = (D_ + elements - 1) / elements * elements;
  }

  Problem problem(const OptionalTensor& key_range, const OptionalTensor& dropout_seed, bool causal,
                  int64_t window_left, int64_t window_right, int64_t r_zero, double scale, double dropout_p) {
    STD_TORCH_CHECK(dropout_p == 0 || dropout_seed, "dropout needs a dropout_seed");
    Problem p;
    p.B = B_, p.H = H_, p.L = L_, p.D = width_, p.K = K_, p.N = N_;
    // Where distance 0 is so far outside that every pair is clamped, it may as well be nearer: the kernels
    // add to it, on GPUs in 32 bits.
    p.r_zero = std::clamp(r_zero, -L_, K_ + N_);
    p.set_reach(causal, window_left, window_right);
    p.scale = scale;
    p.dropout_p = dropout_p;
    p.dropout_threshold = DropoutMask::threshold(dropout_p);
    p.key_range = array<int32_t>(key_range, 2 * B_, "key_range");
    p.dropout_seed = array<int64_t>(dropout_seed, 1, "dropout_seed");
    return p;
  }

  Forward forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& r,
                  const OptionalTensor& bias_u, const OptionalTensor& bias_v, const Tensor& out,
                  const Tensor& lse, Use of_out = Use::result) {
    return {queries(q, "q"),
            keys(k, "k"),
            keys(v, "v"),
            rows(r, "r"),
            bias(bias_u, "bias_u"),
            bias(bias_v, "bias_v"),
            queries(out, "out", of_out),
            lse_data(lse, of_out)};
  }
  Backward backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& r,
                    const OptionalTensor& bias_u, const OptionalTensor& bias_v, const Tensor& out,
                    const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                    const OptionalTensor& dr, const OptionalTensor& du, const OptionalTensor& dv_bias) {
    return {forward(q, k, v, r, bias_u, bias_v, out, lse, Use::operand),
            queries(dout, "dout"),
            queries(dq, "dq", Use::result),
            keys(dk, "dk", Use::result),
            keys(dv, "dv", Use::result),
            rows(dr, "dr", Use::result),
            bias(du, "du", Use::result),
            bias(dv_bias, "dv_bias", Use::result)};
  }

  // After the kernels.
  void finish() {
    for (Copy& copy : copies_)
      if (copy.use == Use::result) {
        const Tensor filled = torch::stable::narrow(copy.whole, copy.whole.dim() - 1, 0, D_);
        torch::stable::copy_(copy.of, filled);
      }
  }

  // Without gaps; null if there is none.
  template <typename T>
  T* array(const OptionalTensor& x, int64_t count, const char* name, Use use = Use::operand) {
    if (!x) return nullptr;
    return static_cast<T*>(contiguous_data(placed(*x, name, use), kScalarType<T>, count, name));
  }

 private:
  struct Copy {
    Tensor of, whole;  // the tensor, and what the kernels have in its place
    Use use;
  };

  View queries(const Tensor& x, const char* name, Use use = Use::operand) {
    return view(x, {B_, H_, L_, D_}, name, use);
  }
  View keys(const Tensor& x, const char* name, Use use = Use::operand) {
    return view(x, {B_, H_, K_, D_}, name, use);
  }
  View rows(const OptionalTensor& x, const char* name, Use use = Use::operand) {
    return x ? view(*x, {H_, N_, D_}, name, use) : View{};
  }
  View bias(const OptionalTensor& x, const char* name, Use use = Use::operand) {
    return x ? view(*x, {H_, D_}, name, use) : View{};
  }

  void* lse_data(const Tensor& x, Use use) {
    const ScalarType type = type_ == ScalarType::Double ? type_ : ScalarType::Float;
    return contiguous_data(placed(x, "lse", use), type, B_ * H_ * L_, "lse");
  }

  View view(const Tensor& x, std::initializer_list<int64_t> shape, const char* name, Use use) {
    STD_TORCH_CHECK(has_shape(x, shape) && x.scalar_type() == type_, name,
                    " must have the shape and the dtype that go with q, k and r");
    STD_TORCH_CHECK(D_ == 1 || x.stride(x.dim() - 1) == 1, name, " must have a contiguous last dimension");
    check_device(x, name);
    const View v = view_of(x);
    if (is_whole(v, x)) {
      memory_.add(x, name, use);
      return v;
    }
    std::vector<int64_t> sizes(shape);
    sizes.back() = width_;
    copies_.push_back({x, torch::stable::new_zeros(x, sizes), use});
    Tensor& whole = copies_.back().whole;
    if (use == Use::operand) {
      Tensor filled = torch::stable::narrow(whole, whole.dim() - 1, 0, D_);
      torch::stable::copy_(filled, x);
    }
    memory_.add(whole, name, use);
    return view_of(whole);
  }

  // The stride of a single row (head, entry) may be anything: an address that is made of it is not read, but
  // must be aligned.
  static View view_of(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    const auto stride = [&](int64_t d) { return x.size(d) == 1 ? 0 : x.stride(d); };
    View v;
    v.data = x.data_ptr();
    if (last == 3) v.batch = stride(0);
    v.head = stride(last == 3 ? 1 : 0);
    if (last >= 2) v.row = stride(last - 1);
    return v;
  }

  bool is_whole(const View& v, const Tensor& x) const {
    if (piece_ == 1) return true;
    const int64_t bytes = x.element_size();
    const auto whole = [&](int64_t n) { return n * bytes % piece_ == 0; };
    return whole(D_) && whole(v.batch) && whole(v.head) && whole(v.row) &&
           reinterpret_cast<uintptr_t>(v.data) % static_cast<uintptr_t>(piece_) == 0 &&
           v.row * bytes <= 0x7fffffff;
  }

  const Tensor& placed(const Tensor& x, const char* name, Use use) {
    check_device(x, name);
    memory_.add(x, name, use);
    return x;
  }
  void check_device(const Tensor& x, const char* name) const {
    STD_TORCH_CHECK(x.is_cpu() == on_cpu_ && x.get_device_index() == device_, name, " must be on q's device");
  }

  int64_t B_, H_, L_, D_, K_, N_;
  int64_t width_;  // D, filled up
  ScalarType type_;
  bool on_cpu_;
  decltype(std::declval<Tensor>().get_device_index()) device_;
  int64_t piece_;
  Memory memory_;
  std::vector<Copy> copies_;
};

struct AnyMemory {
  void add(const Tensor&, const char*, Use) {}
};

}  // namespace txl

// The problem every backend solves: sizes, strides, the index formula, the masks. Framework-free.
//
//   p(i)      = i + (K - L)                                position of query i on the key axis
//   row(i, j) = clamp(r_zero - (p(i) - j), 0, N - 1)       row of r that query i and key j use
//   A(i, j)   = scale * [ (q_i + u) . k_j + (q_i + v) . r_row(i,j) ]
//   out_i     = sum_j dropout(softmax_j A(i, j)) v_j       over lo(i) <= j < hi(i)
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TXL_HD __host__ __device__ __forceinline__
#else
// Always inlined: an out-of-line copy compiled with one vector level must never serve another.
#define TXL_HD inline __attribute__((always_inline))
#endif

namespace txl {

enum class DType { f32, f64, bf16, f16 };

// A tensor [B, H, rows, D] whose last dimension is contiguous; strides in elements.
// `r` and the biases have no batch (stride 0). Of GPUs' tensors all rows begin at whole pieces of 16 bytes,
// and an int holds how many bytes are from one to the next (torch_binding.h).
struct View {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;

  template <typename T>
  TXL_HD T* at(int64_t b, int64_t h, int64_t i) const {
    return static_cast<T*>(data) + b * batch + h * head + i * row;
  }
};

// Keys lo <= j < hi.
struct Range {
  int64_t lo, hi;
  TXL_HD bool empty() const { return lo >= hi; }
  TXL_HD int64_t size() const { return lo < hi ? hi - lo : 0; }
};

struct Problem {
  int64_t B, H, L, K, N, D;
  int64_t r_zero;       // the row of r that holds distance 0
  int64_t left, right;  // how many keys before its position a query sees, and how many after it
  double scale;
  double dropout_p;
  uint32_t dropout_threshold;  // of dropout_p, DropoutMask's in philox.h
  // Where the tensors are: [B, 2], null if every key exists; one number, null without dropout.
  const int32_t* key_range;
  const int64_t* dropout_seed;

  // Of a call's masks, -1: unlimited. No key is further than K - 1 before a query, L - 1 after it.
  void set_reach(bool causal, int64_t window_left, int64_t window_right) {
    left = window_left < 0 || window_left >= K ? K - 1 : window_left;
    right = causal ? 0 : window_right < 0 || window_right >= L ? L - 1 : window_right;
  }

  // Index formula.
  TXL_HD int64_t position(int64_t i) const { return i + K - L; }

  // Row of r before clamping; rows left of 0 and right of N - 1 repeat the first and the last row.
  TXL_HD int64_t band(int64_t i, int64_t j) const { return r_zero + j - position(i); }
  // The key that uses this row.
  TXL_HD int64_t key(int64_t i, int64_t c) const { return c - r_zero + position(i); }
  template <typename Int>
  TXL_HD Int r_row(Int c) const {
    const Int last = static_cast<Int>(N) - 1, any = c < 0 ? 0 : c;
    return any > last ? last : any;
  }

  // Masks. Every mask of the contract is one interval of keys per query row, and both ends of it only grow
  // with i.
  TXL_HD Range keys_of_batch(int64_t b) const {
    if (!key_range) return {0, K};
    int64_t lo = key_range[2 * b], hi = key_range[2 * b + 1];
    lo = lo < 0 ? 0 : (lo > K ? K : lo);
    hi = hi < 0 ? 0 : (hi > K ? K : hi);
    return {lo, hi};
  }

  TXL_HD Range keys_of_query(Range batch, int64_t i) const {
    const int64_t first = position(i) - left, end = position(i) + right + 1;
    return {first > batch.lo ? first : batch.lo, end < batch.hi ? end : batch.hi};
  }
};

// Pointers of a forward call. bias_u, bias_v: [H, D] or null data. lse: [B, H, L] contiguous, float (double
// for f64).
struct Forward {
  View q, k, v, r, bias_u, bias_v, out;
  void* lse;
};

// Pointers of a backward call: forward's, and [H, D] du and dv_bias. dr, du, dv_bias: null data where they
// are not wanted.
struct Backward : Forward {
  View dout, dq, dk, dv, dr, du, dv_bias;
};

}  // namespace txl

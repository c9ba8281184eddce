// A whole layer for a few tokens, as in generation. Its kernels wait for memory and for nothing else, and are
// so short that the way from one to the next through Python would take a fourth of the time.
#pragma once

#include "decode.h"
#include "linear.h"

namespace txl::TXL_LEVEL {

// Between two kernels values are rounded to S, as they are where each is a call of its own.
template <class S>
class LayerKernel {
  using T = decltype(to_float(S{}));

 public:
  LayerKernel(const Layer& tensors, const Pool& pool)
      : t_(tensors), pool_(pool), rows_(t_.problem.B * t_.problem.L), width_(t_.qkv.depth) {}

  void run() {
    const S* h = static_cast<const S*>(t_.h);
    Array<S> branch(rows_ * width_), middle(rows_ * width_);
    attend(input(h, t_.attention_norm, branch.begin()), branch.begin());
    join(h, branch.begin(), t_.attention_norm, middle.begin());
    feed(input(middle.begin(), t_.feed_norm, branch.begin()), branch.begin());
    join(middle.begin(), branch.begin(), t_.feed_norm, static_cast<S*>(t_.out));
  }

 private:
  // What a branch reads: h, or its norm (made in `memory`) where norms come first.
  const S* input(const S* h, const Norm& norm, S* memory) const {
    if (!t_.norm_first) return h;
    for (int64_t i = 0; i < rows_; ++i) normalise(h + i * width_, norm, memory + i * width_);
    return memory;
  }

  // out = h + branch, and its norm where norms come last.
  void join(const S* h, const S* branch, const Norm& norm, S* out) const {
    for (int64_t n = 0; n < rows_ * width_; ++n) store_as(out + n, to_float(h[n]) + to_float(branch[n]));
    for (int64_t i = 0; i < rows_ && !t_.norm_first; ++i) normalise(out + i * width_, norm, out + i * width_);
  }

  // `x` may be `out`.
  void attend(const S* x, S* out) const {
    const Problem& p = t_.problem;
    const int64_t heads = p.H * p.D;
    Array<S> qkv(rows_ * 3 * heads), o(rows_ * heads);
    Array<T> lse(rows_ * p.H);
    multiply(t_.qkv, x, qkv.begin());
    Forward attention = t_.attention;
    attention.q = {qkv.begin(), p.L * 3 * heads, p.D, 3 * heads};
    attention.out = {o.begin(), p.L * heads, p.D, heads};
    attention.lse = lse.begin();
    for (int64_t b = 0; b < p.B; ++b)
      for (int64_t i = 0; i < p.L; ++i)
        for (int64_t n = 0; n < heads; ++n) {
          const int64_t h = n / p.D, d = n % p.D, key = p.position(i);
          const S* token = &qkv[(b * p.L + i) * 3 * heads + n];
          attention.k.at<S>(b, h, key)[d] = token[heads];
          attention.v.at<S>(b, h, key)[d] = token[2 * heads];
        }
    DecodeKernel<S>(p, attention, pool_).run();
    multiply(t_.o, o.begin(), out);
  }

  // `x` may be `out`.
  void feed(const S* x, S* out) const {
    Array<S> inner(rows_ * t_.inner.outputs);
    multiply(t_.inner, x, inner.begin());
    for (S& y : inner)
      if (to_float(y) < 0) y = S{};  // NaN passes
    multiply(t_.outer, inner.begin(), out);
  }

  void multiply(Linear matrix, const S* x, S* out) const {
    matrix.x = x, matrix.out = out, matrix.rows = rows_;
    LinearKernel<S>(matrix, pool_).run();
  }

  // LayerNorm of one row. `x` may be `out`.
  void normalise(const S* x, const Norm& norm, S* out) const {
    const S *weight = static_cast<const S*>(norm.weight), *bias = static_cast<const S*>(norm.bias);
    const T mean = sum_of_terms([&](int64_t d) { return to_float(x[d]); }) / width_;
    const T variance = sum_of_terms([&](int64_t d) {
                         const T away = to_float(x[d]) - mean;
                         return away * away;
                       }) /
                       width_;
    const T factor = 1 / std::sqrt(variance + static_cast<T>(norm.eps));
    for (int64_t d = 0; d < width_; ++d)
      store_as(out + d, (to_float(x[d]) - mean) * factor * to_float(weight[d]) + to_float(bias[d]));
  }

  // Over a row; in lanes, or each addition would wait for the one before.
  template <class F>
  T sum_of_terms(F term) const {
    constexpr int W = kLanes<T>;
    T lane[W] = {};
    const int64_t whole = width_ / W * W;
    for (int64_t d = 0; d < whole; d += W)
      for (int i = 0; i < W; ++i) lane[i] += term(d + i);
    for (int64_t d = whole; d < width_; ++d) lane[d - whole] += term(d);
    return horizontal_sum<T>(load(lane));
  }

  const Layer& t_;
  const Pool& pool_;
  const int64_t rows_, width_;
};

}  // namespace txl::TXL_LEVEL

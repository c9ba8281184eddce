// What backward adds up over queries: the gradients of k, v, r and the biases. Into how many sums, which is
// into how many tasks; where they are; and how they become results.
#pragma once

#include "arena.h"
#include "scores.h"

namespace txl::TXL_LEVEL {

// Into how many shares a call's work is split, each with sums of its own. All but `together` depends on the
// shapes alone, and so does every sum.
struct Shares {
  int64_t batch;    // of the batch entries of one head
  int64_t queries;  // of the queries of one batch entry
  // Whether one task takes all shares of the queries, one after another: it packs the keys once, and needs
  // the memory of two shares per thread. Else each is a task.
  bool together;

  // blocks: of queries. dkdv_bytes, head_bytes: of GradientSums, for all keys of one head and batch entry.
  Shares(const Problem& p, int threads, int64_t blocks, int64_t dkdv_bytes, int64_t head_bytes) {
    const int64_t tasks = min(kTasks, kHeadBytes / head_bytes);
    batch = max(1, min(min(p.B, ceil_div(tasks, p.H)), p.B * p.L * p.K / kTaskPairs));
    const int64_t units = p.H * batch, all_bytes = p.B * p.H * dkdv_bytes;
    queries = 1;
    if (batch == p.B) {  // else there are enough tasks, or too little work for more
      // To add up many small ones takes a good part of their time, so only few of these.
      const int64_t wanted =
          max(min(ceil_div(kTasks, units), blocks / kShareBlocks), ceil_div(kFewTasks, units));
      queries = max(1, min(min(wanted, blocks), max(kDkdvBytes / all_bytes, kFewShares)));
    }
    // Where they take more memory than that, each is a task only if threads would have none.
    const int64_t least_units = queries * all_bytes > kDkdvBytes ? 1 : kTasksPerThread;
    together = queries == 1 || units >= threads * least_units;
  }

 private:
  static constexpr int64_t kTasks = 64, kFewTasks = 8;  // at most; and where there are few blocks
  static constexpr int64_t kTasksPerThread = 4;
  static constexpr int64_t kShareBlocks = 4;       // of queries, in a share
  static constexpr int64_t kTaskPairs = 1 << 14;   // of a query and a key: fewer are not worth packing r
  static constexpr int64_t kHeadBytes = 64 << 20;  // of all tasks' sums that heads have
  // Of all shares' dk and dv; or, for machines of many cores, so many times dk and dv.
  static constexpr int64_t kDkdvBytes = 16 << 20, kFewShares = 2;
};

template <class C, class S>
class GradientSums {
  using T = typename C::Acc;

 public:
  // Rows of `channels` values. With tiles dk, dv and dr are panels of kPanel rows, turned, until turn_back.
  struct Sums {
    T *dk, *dv;                     // of some keys: one block of memory
    T *dr, *dr_far, *du, *dv_bias;  // of a head: another; [band columns], [2], [1], [1]
  };

  GradientSums(const Problem& p, const Backward& tensors, const BandColumns<C>& band, int64_t channels)
      : p_(p), t_(tensors), band_(band), channels_(channels) {}

  int64_t dkdv_elements(int64_t keys) const { return 2 * keys * channels_; }
  int64_t head_elements() const { return (band_.columns() + 4) * channels_; }

  Sums in(T* dkdv, int64_t keys, T* head) const {
    T* ends = head + band_.columns() * channels_;
    return {dkdv, dkdv + keys * channels_, head, ends, ends + 2 * channels_, ends + 3 * channels_};
  }

  void zero_dkdv(const Sums& sums, int64_t keys) const {
    zero(sums.dk, keys * channels_), zero(sums.dv, keys * channels_);
  }
  void zero_head(const Sums& sums) const { zero(sums.dr, head_elements()); }

  void add_dkdv(const Sums& from, const Sums& to, int64_t keys) const {
    add(from.dk, to.dk, keys * channels_), add(from.dv, to.dv, keys * channels_);
  }
  void add_head(const Sums& from, const Sums& to) const { add(from.dr, to.dr, head_elements()); }

  // Panels [channels][kPanel] become rows. panel: memory for one.
  void turn_back(T* sums, int64_t rows, T* panel) const {
    constexpr int W = kLanes<T>, kWidth = kPanel<C>;
    for (T* from = sums; from < sums + rows * channels_; from += kWidth * channels_) {
      for (int64_t d = 0; d < channels_; d += W)
        for (int64_t x = 0; x < kWidth; x += W) {
          Vec<T> v[W];
          TXL_UNROLL
          for (int i = 0; i < W; ++i) v[i] = load(from + (d + i) * kWidth + x);
          transpose<T>(v);
          TXL_UNROLL
          for (int i = 0; i < W; ++i) store(panel + (x + i) * channels_ + d, v[i]);
        }
      memcpy(from, panel, static_cast<size_t>(kWidth * channels_) * sizeof(T));
    }
  }

  // dk and dv of the keys of a span. q is scaled for powers of two.
  void write_dkdv(int64_t b, int64_t h, Range span, const Sums& sums) const {
    for (int64_t j = span.lo; j < min(span.hi, p_.K); ++j) {
      const int64_t at = (j - span.lo) * channels_;
      write_row(t_.dk.at<S>(b, h, j), sums.dk + at, static_cast<T>(kLn2));
      write_row(t_.dv.at<S>(b, h, j), sums.dv + at, T{1});
    }
  }

  // Some rows of dr of head h: the sums of the band columns that use them (all beyond its ends use the end
  // rows). of_head(visit) calls visit(sums) for the Sums of all its tasks.
  template <class F>
  void write_r(int64_t h, Range rows, F of_head) const {
    Array<T> sum(channels_);
    for (int64_t row = rows.lo; row < rows.hi; ++row) {
      zero(sum.begin(), channels_);
      const int64_t first = row == 0 ? 0 : max(row - band_.first, 0);
      const int64_t end = band_.columns() - 1, last = row == p_.N - 1 ? end : min(row - band_.first, end);
      of_head([&](const Sums& sums) {
        for (int64_t c = first; c <= last; ++c) add(sums.dr + c * channels_, sum.begin(), channels_);
        if (row == 0) add(sums.dr_far, sum.begin(), channels_);
        if (row == p_.N - 1) add(sums.dr_far + channels_, sum.begin(), channels_);
      });
      write_row(t_.dr.at<S>(0, h, row), sum.begin(), static_cast<T>(kLn2));
    }
  }

  template <class F>
  void write_biases(int64_t h, F of_head) const {
    write_bias(t_.du, h, of_head, &Sums::du);
    write_bias(t_.dv_bias, h, of_head, &Sums::dv_bias);
  }

 private:
  template <class F>
  void write_bias(const View& to, int64_t h, F of_head, T* Sums::* bias) const {
    if (!to.data) return;
    Array<T> sum(channels_);
    of_head([&](const Sums& sums) { add(sums.*bias, sum.begin(), channels_); });
    write_row(to.at<S>(0, h, 0), sum.begin(), T{1});
  }

  void write_row(S* row, const T* sums, T factor) const {
    for (int64_t d = 0; d < p_.D; ++d) store_as(row + d, sums[d] * factor);
  }

  static void add(const T* x, T* sum, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<T>) store(sum + i, load(sum + i) + load(x + i));
  }

  const Problem& p_;
  const Backward& t_;
  const BandColumns<C>& band_;
  const int64_t channels_;
};

}  // namespace txl::TXL_LEVEL

// Forward: for a block of queries, the keys it sees in chunks; per chunk the band, the scores, an online
// softmax, the values.
#pragma once

#include "scores.h"

namespace txl::TXL_LEVEL {

// The running softmax of some rows: m the maximum and l the sum, both of 2^score; o unnormalised,
// [rows][columns].
template <typename T>
struct State {
  T *o, *m, *l;

  void clear(int64_t rows, int64_t columns) const {
    for (int64_t i = 0; i < rows; ++i) m[i] = -static_cast<T>(INFINITY), l[i] = 0;
    memset(o, 0, static_cast<size_t>(rows * columns) * sizeof(T));
  }
};

// The running maximum of every row, lane by lane.
template <typename T, int kM, int kN>
TXL_INLINE void keep_maxima(const Vec<T> (&score)[kM][kN], T* lane_max) {
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) {
    Vec<T> top = load(lane_max + m * kLanes<T>);
    TXL_UNROLL
    for (int n = 0; n < kN; ++n) top = vmax(score[m][n], top);
    store(lane_max + m * kLanes<T>, top);
  }
}

template <class C, class S>
class ForwardKernel {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kBlockRows = kTiled<C> ? 64 : 6 * kRows, kChunkKeys = 512;
  static constexpr int kWidth = kPanel<C>;
  static constexpr int64_t kScorePitch = kChunkKeys + 16, kPairPitch = kScorePitch / C::depth;
  using Window = BandWindow<C, kBlockRows, kChunkKeys>;

  // Operands of one (batch, head), packed. v_poisoned: some value is not finite.
  struct Unit {
    Elem *k, *v, *r, *far_left, *far_right;
    bool v_poisoned;
  };

  // One thread's block of queries.
  struct Scratch {
    Elem *qu, *qv;
    T *score, *lane_max, *fade, *band;
    Elem* pairs;  // the probabilities, where elements are pairs
    State<T> state;
  };

 public:
  ForwardKernel(const Problem& problem, const Forward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        depth_(depth_of<C>(p_.D)),
        columns_(round_up(p_.D, kLanes<T>)),
        keys_(round_up(p_.K, kWidth)),
        blocks_((p_.L + kBlockRows - 1) / kBlockRows),
        band_(p_, kBlockRows),
        threshold_(DropoutMask::threshold(p_.dropout_p)) {}

  bool run() {
    const auto unit_arrays = [&](Unit& u, auto visit) {
      visit(u.k, keys_ * depth_), visit(u.v, keys_ / C::depth * columns_), visit(u.r, band_.elements(depth_));
      visit(u.far_left, kLanes<Elem> * depth_), visit(u.far_right, kLanes<Elem> * depth_);
    };
    const auto scratch_arrays = [&](Scratch& s, auto visit) {
      visit(s.qu, kBlockRows * depth_), visit(s.qv, kBlockRows * depth_);
      visit(s.score, kBlockRows * kScorePitch), visit(s.lane_max, kBlockRows * kLanes<T>),
          visit(s.fade, kBlockRows);
      visit(s.band, Window::kElements), visit(s.pairs, C::depth == 1 ? 0 : kBlockRows * kPairPitch);
      visit(s.state.o, kBlockRows * columns_), visit(s.state.m, kBlockRows), visit(s.state.l, kBlockRows);
    };
    const int64_t threads = pool_.threads, units = p_.B * p_.H;
    Array<Unit> unit(min(threads, units));
    Array<Scratch> scratch(threads);
    Arena arena(static_cast<size_t>(unit.size()) * Arena::record_bytes<Unit>(unit_arrays) +
                static_cast<size_t>(threads) * Arena::record_bytes<Scratch>(scratch_arrays));
    for (Unit& u : unit) arena.take_record(u, unit_arrays);
    for (Scratch& s : scratch) arena.take_record(s, scratch_arrays);

    // As long as there is a unit for every thread, each takes whole ones: what it packs stays in its own
    // cache, and nobody waits. What is left then is packed first and shared out by blocks.
    const int64_t left = units % threads, whole = units - left;
    std::atomic<bool> declined{false};
    parallel_items(pool_, whole, [&](int64_t item, int thread) {
      pack(item, unit[thread]);
      if (C::depth > 1 && unit[thread].v_poisoned) {
        declined = true;  // a pair cannot leave out one of its two keys
        return;
      }
      for (int64_t block = 0; block < blocks_; ++block) run_block(item, unit[thread], block, scratch[thread]);
    });
    parallel_items(pool_, left, [&](int64_t item, int) {
      pack(whole + item, unit[item]);
      if (C::depth > 1 && unit[item].v_poisoned) declined = true;
    });
    if (declined) return false;
    parallel_items(pool_, left * blocks_, [&](int64_t item, int thread) {
      // The later blocks of a segment see more keys: heaviest first.
      run_block(whole + item % left, unit[item % left], blocks_ - 1 - item / left, scratch[thread]);
    });
    return true;
  }

 private:
  int64_t head_of(int64_t unit) const { return unit / p_.B; }
  int64_t batch_of(int64_t unit) const { return unit % p_.B; }

  void pack(int64_t unit, Unit& out) const {
    const int64_t h = head_of(unit), b = batch_of(unit);
    const Range exist = p_.keys_of_batch(b);
    const auto key_row = [&](const View& x,
                             int64_t j) {  // keys that do not exist are zeros, whatever memory holds there
      return j >= exist.lo && j < exist.hi ? x.at<S>(b, h, j) : static_cast<const S*>(nullptr);
    };
    Vec<T> poison = {};
    for (int64_t tile = exist.lo / kWidth; tile * kWidth < exist.hi; ++tile) {
      const S* rows[kWidth];
      for (int x = 0; x < kWidth; ++x) rows[x] = key_row(t_.k, tile * kWidth + x);
      pack_panel<C>(rows, p_.D, out.k + tile * kWidth * depth_);
      for (int x = 0; x < kWidth; x += C::depth) {
        const S* pair[C::depth];
        for (int e = 0; e < C::depth; ++e) pair[e] = key_row(t_.v, tile * kWidth + x + e);
        pack_rows<C>(pair, p_.D, columns_, out.v + (tile * kWidth + x) / C::depth * columns_, poison);
      }
    }
    const T sum = horizontal_sum<T>(poison);
    out.v_poisoned = !(sum == sum);
    for (int64_t panel = 0; panel < band_.panels; ++panel)
      pack_band_panel<C, S>(p_, t_.r, h, band_, panel, out.r + panel * kWidth * depth_);
    pack_far<C>(t_.r.at<S>(0, h, 0), p_.D, out.far_left);
    pack_far<C>(t_.r.at<S>(0, h, p_.N - 1), p_.D, out.far_right);
  }

  void run_block(int64_t unit, const Unit& u, int64_t index, Scratch& s) const {
    const int64_t i0 = p_.L * index / blocks_;
    const int rows = static_cast<int>(p_.L * (index + 1) / blocks_ - i0);
    const int64_t h = head_of(unit), b = batch_of(unit);
    const Block block(p_, p_.keys_of_batch(b), i0, rows);
    s.state.clear(rows, columns_);
    if (!block.keys.empty()) {
      const T factor = static_cast<T>(p_.scale * kLog2e);
      pack_queries<C, S>(block, t_.q, t_.bias_u, b, h, factor, depth_, s.qu);
      pack_queries<C, S>(block, t_.q, t_.bias_v, b, h, factor, depth_, s.qv);
      Window window(s.band);
      window.begin(block, band_, {u.r, {u.far_left, u.far_right}}, s.qv, depth_, depth_);
      const int64_t end = round_up(block.keys.hi, kWidth);
      for (int64_t lo = floor_to(block.keys.lo, kWidth); lo < end; lo += kChunkKeys) {
        const int64_t hi = min(lo + kChunkKeys, end);
        scores(block, u, window, lo, hi, s);
        softmax(block, b, h, lo, hi, s);
        values(block, u, lo, hi, s);
      }
    }
    for (int m = 0; m < rows; ++m)
      write_row<T, S>(p_, t_, b, h, i0 + m, s.state.o + m * columns_, s.state.m[m], s.state.l[m]);
  }

  // s.score = scores of the chunk [lo, hi), whole tiles.
  void scores(const Block& block, const Unit& u, Window& window, int64_t lo, int64_t hi, Scratch& s) const {
    for (int m = 0; m < block.rows * kLanes<T>; ++m) s.lane_max[m] = -static_cast<T>(INFINITY);
    const Range in_band = band_tiles<C>(block, lo, hi);
    if (!in_band.empty()) window.advance(in_band.lo, in_band.hi);

    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool partial = !block.all_see(j, j + kWidth);
      panel_product<C>(block.rows, s.qu, depth_, depth_, u.k + j * depth_,
                       window.read(block.place(j, j + kWidth), j), s.score + (j - lo), kScorePitch,
                       [&](auto& acc, int64_t m) {
                         if (partial) mask_tile<T>(acc, block, m, j, -static_cast<T>(INFINITY));
                         keep_maxima<T>(acc, s.lane_max + m * kLanes<T>);
                       });
    }
  }

  // Scores to probabilities relative to the running maximum; s.fade is what the earlier sums must be
  // multiplied by.
  void softmax(const Block& block, int64_t b, int64_t h, int64_t lo, int64_t hi, Scratch& s) const {
    constexpr int W = kLanes<T>;
    for (int m = 0; m < block.rows; ++m) {
      T* row = s.score + m * kScorePitch;
      const T top = vmax(horizontal_max<T>(load(s.lane_max + m * W)), s.state.m[m]);
      const T base = top == -static_cast<T>(INFINITY) ? T{} : top;
      s.fade[m] = exp2(splat(s.state.m[m] - base))[0];
      s.state.m[m] = top;
      Vec<T> sum[kVectors] = {};
      for (int64_t j = 0; j < hi - lo; j += kWidth) {
        Vec<T> e[kVectors];
        TXL_UNROLL
        for (int n = 0; n < kVectors; ++n) {
          e[n] = exp2(load(row + j + n * W) - base);
          sum[n] += e[n];
        }
        if (C::depth > 1 && p_.dropout_p == 0)
          store_pairs(e, s.pairs + m * kPairPitch + j / 2);
        else
          TXL_UNROLL for (int n = 0; n < kVectors; ++n) store(row + j + n * W, e[n]);
      }
      for (int n = 1; n < kVectors; ++n) sum[0] += sum[n];
      s.state.l[m] = s.state.l[m] * s.fade[m] + horizontal_sum<T>(sum[0]);
      if (p_.dropout_p > 0) {
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        drop(p_, threshold_, b, h, block.i0 + m, lo, max(keys.lo, lo) - lo, min(keys.hi, hi) - lo, row);
        if constexpr (C::depth > 1)
          pack_pairs_along<C>(row, kScorePitch, 1, hi - lo, s.pairs + m * kPairPitch, kPairPitch);
      }
    }
  }

  template <int kN>
  static TXL_INLINE void store_pairs(const Vec<T> (&x)[kN], Elem* out) {
    if constexpr (C::depth > 1) TXL_UNROLL
    for (int n = 0; n < kN; n += 2) store(out + n / 2 * kLanes<Elem>, C::pair_along(x[n], x[n + 1]));
  }

  // o = o * fade + probabilities . v
  void values(const Block& block, const Unit& u, int64_t lo, int64_t hi, Scratch& s) const {
    const Elem* prob = s.pairs;
    if constexpr (C::depth == 1) prob = s.score;  // probabilities took the place of the scores
    for (int64_t m = 0; m < block.rows; ++m)
      for (int64_t d = m * columns_; d < (m + 1) * columns_; d += kLanes<T>)
        store(s.state.o + d, load(s.state.o + d) * s.fade[m]);
    const auto add = [&](int64_t m, int64_t rows, int64_t from, int64_t to) {
      add_product<C, A::rows>(rows, columns_, (to - from) / C::depth,
                              prob + m * kPairPitch + (from - lo) / C::depth, kPairPitch,
                              u.v + from / C::depth * columns_, columns_, s.state.o + m * columns_, columns_);
    };
    if (u.v_poisoned && !block.all_see(max(lo, block.batch.lo), min(hi, block.batch.hi))) {
      // 0 * NaN is NaN: here every row must keep to the keys it sees.
      for (int m = 0; m < block.rows; ++m) {
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        const int64_t from = max(keys.lo, lo);
        add(m, 1, from, max(min(keys.hi, hi), from));
      }
      return;
    }
    add(0, block.rows, lo, hi);
  }

  const Problem p_;
  const Forward& t_;
  const Pool& pool_;
  const int64_t depth_, columns_, keys_, blocks_;
  const BandColumns<C> band_;
  const uint32_t threshold_;
};

}  // namespace txl::TXL_LEVEL

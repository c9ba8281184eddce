// Forward: for a block of queries, the keys it sees in chunks; per chunk the band, the scores, an online
// softmax, the values.
#pragma once

#include "scores.h"

namespace txl::TXL_LEVEL {

// Scores of a tile into s, and the running maximum of every row, lane by lane.
template <class C, int kM>
__attribute__((noinline)) static void store_scores(const Block& block, bool partial, int64_t m0,
                                                   int64_t tile_key, const typename C::Elem* qu,
                                                   int64_t depth, const typename C::Elem* k_panel,
                                                   const typename C::Acc* band, int64_t row_step,
                                                   int64_t vector_step, typename C::Acc* s, int64_t pitch,
                                                   typename C::Acc* lane_max) {
  using T = typename C::Acc;
  Vec<T> acc[kM][kVectors];
  score_tile<C, kM>(acc, qu, depth, depth, k_panel, band, row_step, vector_step);
  if (partial) mask_tile<T>(acc, block, m0, tile_key, -static_cast<T>(INFINITY));
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) {
    Vec<T> top = load(lane_max + m * kLanes<T>);
    TXL_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      store(s + m * pitch + n * kLanes<T>, acc[m][n]);
      top = vmax(acc[m][n], top);
    }
    store(lane_max + m * kLanes<T>, top);
  }
}

// O = O * fade + P V for a tile of rows and columns.
template <class C, int kM, int kN>
__attribute__((noinline)) static void value_tile(const typename C::Elem* p, int64_t ldp,
                                                 const typename C::Elem* v, int64_t ldv, int64_t depth,
                                                 const typename C::Acc* fade, typename C::Acc* o,
                                                 int64_t ldo) {
  using T = typename C::Acc;
  Vec<T> acc[kM][kN];
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) acc[m][n] = load(o + m * ldo + n * kLanes<T>) * fade[m];
  multiply<C, A::rows>(acc, p, ldp, v, ldv, depth);
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) store(o + m * ldo + n * kLanes<T>, acc[m][n]);
}

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

template <class C, class S>
class ForwardKernel {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kBlockRows = 6 * kRows, kChunkKeys = 512;
  static constexpr int kWidth = kPanel<C>;
  static constexpr int64_t kScorePitch = kChunkKeys + 16;
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
        depth_((p_.D + C::depth - 1) / C::depth),
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
      visit(s.band, Window::kElements),
          visit(s.pairs, C::depth == 1 ? 0 : kBlockRows * kScorePitch / C::depth);
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
      const typename Window::Reader band = window.read(block.place(j, j + kWidth), j);
      const bool partial = !block.all_see(j, j + kWidth);
      in_groups<kRows>(block.rows, [&](int64_t m, auto km) {
        store_scores<C, decltype(km)::value>(block, partial, m, j, s.qu + m * depth_, depth_,
                                             u.k + j * depth_, band.start + m * band.row_step, band.row_step,
                                             band.vector_step, s.score + m * kScorePitch + (j - lo),
                                             kScorePitch, s.lane_max + m * kLanes<T>);
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
      Vec<T> sum[4] = {};
      for (int64_t j = 0; j < hi - lo; j += kWidth) TXL_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        const Vec<T> e = exp2(load(row + j + n * W) - base);
        sum[n % 4] += e;
        store(row + j + n * W, e);
      }
      s.state.l[m] = s.state.l[m] * s.fade[m] + horizontal_sum<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
      if (p_.dropout_p > 0) {
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        drop(p_, threshold_, b, h, block.i0 + m, lo, max(keys.lo, lo) - lo, min(keys.hi, hi) - lo, row);
      }
      if constexpr (C::depth > 1)
        for (int64_t j = 0; j < hi - lo; j += 2 * W)
          store(s.pairs + m * (kScorePitch / 2) + j / 2, C::pair_along(load(row + j), load(row + j + W)));
    }
  }

  // o = o * fade + probabilities . v
  void values(const Block& block, const Unit& u, int64_t lo, int64_t hi, Scratch& s) const {
    constexpr int64_t pitch = kScorePitch / C::depth;
    const Elem* prob = s.pairs;
    if constexpr (C::depth == 1) prob = s.score;  // probabilities took the place of the scores
    const auto product = [&](int64_t m, auto km, int64_t from, int64_t to) {
      in_groups<kVectors>(columns_ / kLanes<T>, [&](int64_t n, auto kn) {
        const int64_t column = n * kLanes<T>;
        value_tile<C, decltype(km)::value, decltype(kn)::value>(
            prob + m * pitch + (from - lo) / C::depth, pitch, u.v + from / C::depth * columns_ + column,
            columns_, (to - from) / C::depth, s.fade + m, s.state.o + m * columns_ + column, columns_);
      });
    };
    if (u.v_poisoned && !block.all_see(max(lo, block.batch.lo), min(hi, block.batch.hi))) {
      // 0 * NaN is NaN: here every row must keep to the keys it sees.
      for (int m = 0; m < block.rows; ++m) {
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        const int64_t from = max(keys.lo, lo), to = max(min(keys.hi, hi), from);
        product(m, Size<1>{}, from, to);
      }
      return;
    }
    in_groups<kRows>(block.rows, [&](int64_t m, auto km) { product(m, km, lo, hi); });
  }

  const Problem p_;
  const Forward& t_;
  const Pool& pool_;
  const int64_t depth_, columns_, keys_, blocks_;
  const BandColumns<C> band_;
  const uint32_t threshold_;
};

}  // namespace txl::TXL_LEVEL

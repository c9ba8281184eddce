// Forward: for a block of queries, the keys it sees in chunks; per chunk the band, the scores, which become
// probabilities tile by tile, and the values.
#pragma once

#include "scores.h"

namespace txl::TXL_LEVEL {

// The running softmax of some rows. Probabilities are 2^(score - base), the base a row's largest score when
// it saw its first keys: it moves only where a score is so much larger that sums could overflow.
template <typename T>
struct Softmax {
  static constexpr T kRoom = 16;  // what a score may be above the base

  T *o, *sum;  // [rows][columns], [rows][kLanes]: neither divided by the sum of all
  T *base, *limit;

  void clear(int64_t rows, int64_t columns) const {
    memset(o, 0, static_cast<size_t>(rows * columns) * sizeof(T));
    memset(sum, 0, static_cast<size_t>(rows * kLanes<T>) * sizeof(T));
    for (int64_t m = 0; m < rows; ++m) base[m] = 0, limit[m] = -static_cast<T>(INFINITY);
  }

  // Makes `largest` the base of row m; what earlier sums must be multiplied by.
  T rebase(int64_t m, T largest, int64_t columns) const {
    const bool first = limit[m] == -static_cast<T>(INFINITY);
    const T factor = first ? T{1} : exp2(splat(base[m] - largest))[0];
    base[m] = largest, limit[m] = largest + kRoom;
    for (int64_t d = 0; d < columns; ++d) o[m * columns + d] *= factor;
    for (int64_t x = 0; x < kLanes<T>; ++x) sum[m * kLanes<T> + x] *= factor;
    return factor;
  }
};

template <class C, class S>
class ForwardKernel {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kBlockRows = kTiled<C> ? 64 : 6 * kRows, kChunkKeys = 512;
  static constexpr int kWidth = kPanel<C>;
  static constexpr int64_t kValueKeys = kTiled<C> ? kChunkKeys : kWidth;  // whose values are added at a time
  static constexpr int64_t kPitch = kChunkKeys + 16 * C::depth, kPairPitch = kPitch / C::depth;
  using Window = BandWindow<C, kBlockRows, kChunkKeys>;

  // Operands of one (batch, head), packed. v_poisoned: some value is not finite.
  struct Unit {
    Elem *k, *v, *r, *far_left, *far_right;
    bool v_poisoned;
  };

  // One thread's block of queries.
  struct Scratch {
    Elem *qu, *qv;
    T *band, *tile;  // tile: scores, where products are made of whole tiles
    T* prob;         // the probabilities, but where they are pairs and nothing is dropped
    Elem* pairs;     // and where elements are pairs
    Softmax<T> softmax;
  };

 public:
  ForwardKernel(const Problem& problem, const Forward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        depth_(depth_of<C>(p_.D)),
        columns_(round_up(p_.D, kLanes<T>)),
        keys_(round_up(p_.K, kWidth)),
        block_rows_(rows_of_block(p_.L)),
        blocks_((p_.L + block_rows_ - 1) / block_rows_),
        band_(p_, kBlockRows),
        threshold_(DropoutMask::threshold(p_.dropout_p)) {}

  bool run() {
    const auto unit_arrays = [&](Unit& u, auto visit) {
      visit(u.k, keys_ * depth_), visit(u.v, keys_ / C::depth * columns_), visit(u.r, band_.elements(depth_));
      visit(u.far_left, kLanes<Elem> * depth_), visit(u.far_right, kLanes<Elem> * depth_);
    };
    const auto scratch_arrays = [&](Scratch& s, auto visit) {
      visit(s.qu, kBlockRows * depth_), visit(s.qv, kBlockRows * depth_);
      visit(s.band, Window::kElements), visit(s.tile, kTiled<C> ? kBlockRows * kWidth : 0);
      visit(s.prob, pairs_at_once() ? 0 : kBlockRows * kPitch);
      visit(s.pairs, C::depth == 1 ? 0 : kBlockRows * kPairPitch);
      visit(s.softmax.o, kBlockRows * columns_), visit(s.softmax.sum, kBlockRows * kLanes<T>);
      visit(s.softmax.base, kBlockRows), visit(s.softmax.limit, kBlockRows);
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
  // Blocks of about the same size, of whole register tiles.
  static int64_t rows_of_block(int64_t L) {
    const int64_t blocks = max((L + kBlockRows - 1) / kBlockRows, 1);
    return max(round_up((L + blocks - 1) / blocks, kTiled<C> ? C::whole : kRows), 1);
  }

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
    const TileScope tiles;
    const int64_t i0 = index * block_rows_;
    const int rows = static_cast<int>(min(block_rows_, p_.L - i0));
    const int64_t h = head_of(unit), b = batch_of(unit);
    const Block block(p_, p_.keys_of_batch(b), i0, rows);
    s.softmax.clear(rows, columns_);
    if (!block.keys.empty()) {
      const T factor = static_cast<T>(p_.scale * kLog2e);
      pack_queries<C, S>(block, t_.q, t_.bias_u, b, h, factor, depth_, s.qu);
      pack_queries<C, S>(block, t_.q, t_.bias_v, b, h, factor, depth_, s.qv);
      Window window(s.band);
      window.begin(block, band_, {u.r, {u.far_left, u.far_right}}, s.qv, depth_, depth_);
      const int64_t end = round_up(block.keys.hi, kWidth);
      for (int64_t lo = floor_to(block.keys.lo, kWidth); lo < end; lo += kChunkKeys) {
        const int64_t hi = min(lo + kChunkKeys, end);
        probabilities(block, u, window, lo, hi, s);
        if (p_.dropout_p > 0) drop_some(block, b, h, lo, hi, s);
        add_values(block, u, lo, hi, s);
      }
    }
    for (int m = 0; m < rows; ++m)
      write_row<T, S>(p_, t_, b, h, i0 + m, s.softmax.o + m * columns_, s.softmax.base[m],
                      horizontal_sum<T>(load(s.softmax.sum + m * kLanes<T>)));
  }

  // Whether probabilities become pairs as soon as they are known.
  bool pairs_at_once() const { return C::depth > 1 && p_.dropout_p == 0; }

  // Probabilities of the chunk [lo, hi), whole tiles: of all its keys, dropout comes later.
  void probabilities(const Block& block, const Unit& u, Window& window, int64_t lo, int64_t hi,
                     Scratch& s) const {
    const Range in_band = band_tiles<C>(block, lo, hi);
    if (!in_band.empty()) window.advance(in_band.lo, in_band.hi);

    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool partial = !block.all_see(j, j + kWidth);
      panel_product<C>(block.rows, s.qu, depth_, depth_, u.k + j * depth_,
                       window.read(block.place(j, j + kWidth), j), s.tile, [&](auto& acc, int64_t m) {
                         if (partial) mask_tile<T>(acc, block, m, j, -static_cast<T>(INFINITY));
                         add_tile_to_sums(acc, m, lo, j, s);
                       });
    }
  }

  // Scores of rows m to m + kM - 1 and the tile of keys from j on become probabilities.
  template <int kM>
  TXL_INLINE void add_tile_to_sums(Vec<T> (&score)[kM][kVectors], int64_t m0, int64_t lo, int64_t j,
                                   Scratch& s) const {
    constexpr int W = kLanes<T>;
    const Softmax<T>& softmax = s.softmax;
    TXL_UNROLL
    for (int m = 0; m < kM; ++m) {
      Vec<T> top = score[m][0];
      TXL_UNROLL
      for (int n = 1; n < kVectors; ++n) top = vmax(score[m][n], top);
      if (__builtin_expect(any_greater(top, splat(softmax.limit[m0 + m])), 0))
        rebase(m0 + m, horizontal_max<T>(top), lo, j, s);
      Vec<T> sum = load(softmax.sum + (m0 + m) * W);
      TXL_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        score[m][n] = exp2(score[m][n] - softmax.base[m0 + m]);
        sum += score[m][n];
      }
      store(softmax.sum + (m0 + m) * W, sum);
      if constexpr (C::depth > 1) {
        if (pairs_at_once()) {
          TXL_UNROLL
          for (int n = 0; n < kVectors; n += 2)
            store(s.pairs + (m0 + m) * kPairPitch + (j - lo + n * W) / 2,
                  C::pair_along(score[m][n], score[m][n + 1]));
          continue;
        }
      }
      TXL_UNROLL
      for (int n = 0; n < kVectors; ++n) store(s.prob + (m0 + m) * kPitch + (j - lo) + n * W, score[m][n]);
    }
  }

  // A row's base moves: so do its probabilities of the chunk's keys before j.
  __attribute__((noinline)) void rebase(int64_t m, T largest, int64_t lo, int64_t j, Scratch& s) const {
    const T factor = s.softmax.rebase(m, largest, columns_);
    if (factor == T{1}) return;
    if constexpr (C::depth > 1) {
      if (pairs_at_once()) {
        for (int64_t x = 0; x < (j - lo) / 2; ++x) {
          Elem* pair = s.pairs + m * kPairPitch + x;
          const float scaled[2] = {bits<float>(*pair << 16) * factor,
                                   bits<float>(*pair & 0xffff0000u) * factor};
          pack_elem(pair, scaled);
        }
        return;
      }
    }
    for (int64_t x = 0; x < j - lo; ++x) s.prob[m * kPitch + x] *= factor;
  }

  void drop_some(const Block& block, int64_t b, int64_t h, int64_t lo, int64_t hi, Scratch& s) const {
    for (int m = 0; m < block.rows; ++m) {
      T* row = s.prob + m * kPitch;
      const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
      drop(p_, threshold_, b, h, block.i0 + m, lo, max(keys.lo, lo) - lo, min(keys.hi, hi) - lo, row);
      if constexpr (C::depth > 1)
        pack_pairs_along<C>(row, kPitch, 1, hi - lo, s.pairs + m * kPairPitch, kPairPitch);
    }
  }

  // o += probabilities . v
  void add_values(const Block& block, const Unit& u, int64_t lo, int64_t hi, Scratch& s) const {
    const Elem* prob = s.pairs;
    if constexpr (C::depth == 1) prob = s.prob;
    const auto add = [&](int64_t m, int64_t rows, int64_t from, int64_t to) {
      add_product<C, A::rows>(
          rows, columns_, (to - from) / C::depth, prob + m * kPairPitch + (from - lo) / C::depth, kPairPitch,
          u.v + from / C::depth * columns_, columns_, s.softmax.o + m * columns_, columns_);
    };
    // Tile by tile: all rows use its values before the next ones come.
    for (int64_t j = lo; j < hi; j += kValueKeys) {
      const int64_t end = min(j + kValueKeys, hi);
      if (!u.v_poisoned || block.all_see(max(j, block.batch.lo), min(end, block.batch.hi))) {
        add(0, block.rows, j, end);
        continue;
      }
      // 0 * NaN is NaN: here every row must keep to the keys it sees.
      for (int m = 0; m < block.rows; ++m) {
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        const int64_t from = max(keys.lo, j);
        add(m, 1, from, max(min(keys.hi, end), from));
      }
    }
  }

  const Problem p_;
  const Forward& t_;
  const Pool& pool_;
  const int64_t depth_, columns_, keys_, block_rows_, blocks_;
  const BandColumns<C> band_;
  const uint32_t threshold_;
};

}  // namespace txl::TXL_LEVEL

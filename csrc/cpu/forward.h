// Forward: for a block of queries, the keys it sees in chunks; per chunk the band, the scores, which become
// probabilities tile by tile, and the values.
#pragma once

#include <sched.h>

#include "scores.h"

namespace txl::TXL_LEVEL {

// The running softmax of some rows. Probabilities are 2^(score - base), the base a row's largest score when
// it saw its first keys: it moves only where a score is so much larger that sums could overflow.
template <typename T>
struct Softmax {
  static constexpr T kRoom = 16;  // what a score may be above the base

  T *o, *sum;  // [rows][channels], [rows][kLanes]: neither divided by the sum of all
  T *base, *limit;

  void clear(int64_t rows, int64_t channels) const {
    memset(o, 0, static_cast<size_t>(rows * channels) * sizeof(T));
    memset(sum, 0, static_cast<size_t>(rows * kLanes<T>) * sizeof(T));
    for (int64_t m = 0; m < rows; ++m) base[m] = 0, limit[m] = -static_cast<T>(INFINITY);
  }

  // Makes `largest` the base of row m; what earlier sums must be multiplied by.
  T rebase(int64_t m, T largest, int64_t channels) const {
    const bool first = limit[m] == -static_cast<T>(INFINITY);
    const T factor = first ? T{1} : exp2(splat(base[m] - largest))[0];
    base[m] = largest, limit[m] = largest + kRoom;
    for (int64_t d = 0; d < channels; ++d) o[m * channels + d] *= factor;
    for (int64_t x = 0; x < kLanes<T>; ++x) sum[m * kLanes<T> + x] *= factor;
    return factor;
  }
};

template <class C, class S>
class ForwardKernel {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kBlockRows = C::parts > 1 ? 128 : kTiled<C> ? 64 : (kLong ? 6 : 8) * kRows;
  static constexpr int kChunkKeys = kLong ? 512 : 128;
  static constexpr int kWidth = kPanel<C>;
  static constexpr int64_t kValueKeys = kTiled<C> ? kChunkKeys : 64;  // whose values are added at a time
  static constexpr int64_t kPitch = kChunkKeys + 16 * C::per_elem, kPartPitch = kPitch / C::per_elem,
                           kElemPitch = C::parts * kPartPitch;
  static constexpr int64_t kAllRBytes = 2 << 20;
  using Window = BandWindow<C, kBlockRows, kChunkKeys>;

  // Operands of one (batch, head), packed: all of them, or those in use (piecemeal_).
  struct Operands {
    Elem *k, *v, *r, *far[2];
    int64_t b, h;
    int64_t packed_head = -1;  // whose ends of r are packed, and all of r if packs_all_r_
    Range seen;                // keys
    int64_t first_value;       // the key that v starts with
    bool v_not_finite;         // some value is not finite; v has zeros there
  };

  // How far a (batch, head) is, for all threads.
  struct Progress {
    Operands* operands = nullptr;     // its own
    std::atomic<int64_t> begun = -1;  // how many of its blocks; -1: they are not packed yet
  };

  // One thread's block of queries.
  struct Scratch {
    Elem *qu, *qv;
    T *band, *tile;  // tile: scores, where they are stored first (kStoreFirst)
    T* prob;         // the probabilities, but where they become elements at once
    Elem* elems;     // and where elements are not values
    Softmax<T> softmax;
  };

 public:
  ForwardKernel(const Problem& problem, const Forward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        depth_(depth_of<C>(p_.D)),
        key_elems_(C::parts * depth_),
        q_pitch_(a_pitch<C>(depth_)),
        channels_(round_up(p_.D, kLanes<T>)),
        v_pitch_(C::parts * channels_),
        keys_(round_up(p_.K, kWidth)),
        block_rows_(rows_of_block(p_, pool.threads)),
        blocks_(ceil_div(p_.L, block_rows_)),
        piecemeal_(blocks_ == 1),
        band_(p_, block_rows_),
        packs_all_r_(packs_all_r()) {}

  void run() {
    const auto operand_arrays = [&](Operands& ops, auto visit) {
      const int64_t panel = kWidth * key_elems_;
      visit(ops.k, piecemeal_ ? panel : keys_ / kWidth * panel);
      visit(ops.v, (piecemeal_ ? kChunkKeys : keys_) / C::per_elem * v_pitch_);
      visit(ops.r, packs_all_r_ ? band_.panels * panel : panel);
      visit(ops.far[0], kLanes<Elem> * key_elems_), visit(ops.far[1], kLanes<Elem> * key_elems_);
    };
    const auto scratch_arrays = [&](Scratch& s, auto visit) {
      visit(s.qu, kBlockRows * q_pitch_), visit(s.qv, kBlockRows * q_pitch_);
      visit(s.band, Window::kElements), visit(s.tile, kStoreFirst<C> ? kBlockRows * kWidth : 0);
      visit(s.prob, elems_at_once() ? 0 : kBlockRows * kPitch);
      visit(s.elems, C::per_elem == 1 ? 0 : kBlockRows * kElemPitch);
      visit(s.softmax.o, kBlockRows * channels_), visit(s.softmax.sum, kBlockRows * kLanes<T>);
      visit(s.softmax.base, kBlockRows), visit(s.softmax.limit, kBlockRows);
    };
    const int64_t units = p_.B * p_.H, threads = min(pool_.threads, units * blocks_);
    Array<Operands> operands(min(threads, units));
    Array<Scratch> scratch(threads);
    Arena arena(static_cast<size_t>(operands.size()) * Arena::record_bytes<Operands>(operand_arrays) +
                static_cast<size_t>(threads) * Arena::record_bytes<Scratch>(scratch_arrays));
    for (Operands& ops : operands) arena.take_record(ops, operand_arrays);
    for (Scratch& s : scratch) arena.take_record(s, scratch_arrays);

    if (piecemeal_) {  // what is packed as it is used never leaves the nearest caches
      parallel_items(pool_, units, [&](int64_t item, int thread) {
        begin(item, operands[thread]);
        run_block(operands[thread], 0, scratch[thread]);
      });
      return;
    }
    // Each thread packs whole units: what it packs stays in its own cache. One that finds no unit left takes
    // blocks of the others', which may have begun late or run on a slower core.
    Array<Progress> progress(units);
    std::atomic<int64_t> next_unit{0}, next_place{0};
    const auto run_blocks = [&](Progress& of, Scratch& s) {
      // The later blocks of a segment see more keys: heaviest first.
      for (int64_t x; (x = of.begun.fetch_add(1)) < blocks_;) run_block(*of.operands, blocks_ - 1 - x, s);
    };
    parallel_items(pool_, threads, [&](int64_t, int thread) {
      Operands* own = nullptr;
      for (int64_t item; (item = next_unit.fetch_add(1)) < units;) {
        if (!own) own = &operands[next_place.fetch_add(1)];
        pack(item, *own);
        progress[item].operands = own;
        progress[item].begun = 0;
        run_blocks(progress[item], scratch[thread]);
      }
      for (int64_t item = units; item-- > 0;) {
        while (progress[item].begun < 0) sched_yield();  // some thread has it, and packs
        run_blocks(progress[item], scratch[thread]);
      }
    });
  }

 private:
  // Blocks of about the same size, of whole register tiles. Large ones read the operands of a unit less
  // often, small ones compute less of the band that nobody uses: better while operands (below 1.2 MB) stay
  // near, or where threads would have none. No bit of a result depends on them.
  static int64_t rows_of_block(const Problem& p, int threads) {
    int64_t most = C::parts > 1 && p.K * p.D <= 1 << 16 ? kBlockRows / 2 : kBlockRows;
    while (C::parts > 1 && most > 32 && p.B * p.H * ceil_div(p.L, most) < threads) most /= 2;
    return round_up(ceil_div(p.L, ceil_div(p.L, most)), kTiled<C> ? C::whole : kRows);
  }

  void begin(int64_t unit, Operands& ops) const {
    ops.h = unit / p_.B, ops.b = unit % p_.B;
    ops.seen = keys_of_queries(p_, p_.keys_of_batch(ops.b), 0, p_.L - 1);
    ops.first_value = 0, ops.v_not_finite = false;
    if (ops.packed_head == ops.h) return;
    ops.packed_head = ops.h;
    pack_far<C>(t_.r.at<S>(0, ops.h, 0), p_.D, ops.far[0]);
    pack_far<C>(t_.r.at<S>(0, ops.h, p_.N - 1), p_.D, ops.far[1]);
    if (!packs_all_r_) return;
    for (int64_t panel = 0; panel < band_.panels; ++panel)
      pack_band_panel<C, S>(p_, t_.r, ops.h, band_, panel, ops.r + panel * kWidth * key_elems_);
  }

  // Whether all of r is packed and kept for the batch entries of a head that a thread takes one after
  // another. Where the other operands are packed as they are used: if there are such, and r stays near.
  bool packs_all_r() const {
    const int64_t bytes = band_.panels * kWidth * key_elems_ * static_cast<int64_t>(sizeof(Elem));
    return !piecemeal_ || (p_.B > pool_.threads && bytes <= kAllRBytes);
  }

  void pack(int64_t unit, Operands& ops) const {
    begin(unit, ops);
    const Range keys = {floor_to(ops.seen.lo, kWidth), round_up(ops.seen.hi, kWidth)};
    for (int64_t j = keys.lo; j < keys.hi; j += kWidth) pack_keys(ops, j, ops.k + j * key_elems_);
    pack_values(ops, keys.lo, keys.hi);
  }

  void pack_keys(const Operands& ops, int64_t j, Elem* panel) const {
    const S* rows[kWidth];
    for (int x = 0; x < kWidth; ++x) rows[x] = row_of_key<S>(t_.k, ops.b, ops.h, ops.seen, j + x);
    pack_panel<C>(rows, p_.D, panel);
  }

  void pack_values(Operands& ops, int64_t lo, int64_t hi) const {
    NotFinite<T> not_finite;
    const auto row = [&](int64_t x) { return row_of_key<S>(t_.v, ops.b, ops.h, ops.seen, lo + x); };
    pack_rows<C, true>(hi - lo, row, p_.D, channels_, values(ops, lo), not_finite);
    ops.v_not_finite |= not_finite.any();
  }

  // Where the panel of keys from j on is, and that of band columns: packed now, or long ago.
  const Elem* key_panel(const Operands& ops, int64_t j) const {
    if (!piecemeal_) return ops.k + j * key_elems_;
    pack_keys(ops, j, ops.k);
    return ops.k;
  }
  const Elem* band_panel(const Operands& ops, int64_t column) const {
    if (packs_all_r_) return ops.r + column * key_elems_;
    pack_band_panel<C, S>(p_, t_.r, ops.h, band_, column / kWidth, ops.r);
    return ops.r;
  }
  Elem* values(const Operands& ops, int64_t j) const {
    return ops.v + (j - ops.first_value) / C::per_elem * v_pitch_;
  }

  void run_block(Operands& ops, int64_t index, Scratch& s) const {
    const TileScope tiles;
    const int64_t i0 = index * block_rows_;
    const int rows = static_cast<int>(min(block_rows_, p_.L - i0));
    const Block block(p_, ops.b, ops.h, i0, rows);
    s.softmax.clear(rows, channels_);
    if (!block.keys.empty()) {
      const T factor = static_cast<T>(p_.scale * kLog2e);
      pack_queries<C, S>(block, t_.q, t_.bias_u, factor, depth_, s.qu);
      pack_queries<C, S>(block, t_.q, t_.bias_v, factor, depth_, s.qv);
      Window window(s.band, block, band_, ops.far, s.qv, q_pitch_, depth_);
      const int64_t end = round_up(block.keys.hi, kWidth);
      // Chunks end at multiples of kChunkKeys: where they end must not depend on the block, whose size
      // depends on the number of threads, or a row's roundings would.
      for (int64_t lo = floor_to(block.keys.lo, kWidth), hi; lo < end; lo = hi) {
        hi = min(floor_to(lo, kChunkKeys) + kChunkKeys, end);
        probabilities(block, ops, window, lo, hi, s);
        if (p_.dropout_p > 0) drop_some(block, lo, hi, s);
        if (piecemeal_) ops.first_value = lo, pack_values(ops, lo, hi);
        add_values(block, ops, lo, hi, s);
      }
      if (ops.v_not_finite) add_not_finite(block, s);
    }
    for (int m = 0; m < rows; ++m)
      write_row<T, S>(p_, t_, ops.b, ops.h, i0 + m, s.softmax.o + m * channels_, s.softmax.base[m],
                      horizontal_sum<T>(load(s.softmax.sum + m * kLanes<T>)));
  }

  // Whether probabilities become elements as soon as they are known.
  bool elems_at_once() const { return C::per_elem > 1 && p_.dropout_p == 0; }

  // Probabilities of the chunk [lo, hi), whole tiles: of all its keys, dropout comes later.
  void probabilities(const Block& block, const Operands& ops, Window& window, int64_t lo, int64_t hi,
                     Scratch& s) const {
    const Range in_band = band_tiles<C>(block, lo, hi);
    if (!in_band.empty()) window.advance(in_band, [&](int64_t column) { return band_panel(ops, column); });

    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool edge = !block.all_see(j, j + kWidth);
      panel_product<C>(block.rows, s.qu, q_pitch_, depth_, key_panel(ops, j),
                       window.read(block.place(j, j + kWidth), j), s.tile, keys_needed(block, j),
                       [&](auto& acc, int64_t m) {
                         if (edge) mask_tile<T>(acc, block, m, j, -static_cast<T>(INFINITY));
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
      if constexpr (C::per_elem > 1) {
        if (elems_at_once()) {
          TXL_UNROLL
          for (int n = 0; n < kVectors; n += 2)
            store_parts(s.elems + (m0 + m) * kElemPitch + (j - lo + n * W) / 2, kPartPitch,
                        C::along({score[m][n], score[m][n + 1]}));
          continue;
        }
      }
      TXL_UNROLL
      for (int n = 0; n < kVectors; ++n) store(s.prob + (m0 + m) * kPitch + (j - lo) + n * W, score[m][n]);
    }
  }

  // A row's base moves: so do its probabilities of the chunk's keys before j.
  __attribute__((noinline)) void rebase(int64_t m, T largest, int64_t lo, int64_t j, Scratch& s) const {
    const T factor = s.softmax.rebase(m, largest, channels_);
    if (factor == T{1}) return;
    if constexpr (C::per_elem > 1) {
      if (elems_at_once()) {
        for (int64_t x = 0; x < (j - lo) / 2; x += kLanes<Elem>) {
          Elem* pairs = s.elems + m * kElemPitch + x;
          Vec<T> value[2] = {};
          for (int part = C::parts - 1; part >= 0; --part) {
            value[0] += first_of(load(pairs + part * kPartPitch));
            value[1] += second_of(load(pairs + part * kPartPitch));
          }
          store_parts(pairs, kPartPitch, C::across({value[0] * factor, value[1] * factor}));
        }
        return;
      }
    }
    for (int64_t x = 0; x < j - lo; ++x) s.prob[m * kPitch + x] *= factor;
  }

  void drop_some(const Block& block, int64_t lo, int64_t hi, Scratch& s) const {
    for (int m = 0; m < block.rows; ++m) {
      T* row = s.prob + m * kPitch;
      drop(p_, block.b, block.h, block.i0 + m, intersect(block.keys_of_row(m), {lo, hi}), lo, row);
      if constexpr (C::per_elem > 1)
        pack_along<C>(row, kPitch, 1, hi - lo, s.elems + m * kElemPitch, kElemPitch);
    }
  }

  // o += probabilities . v, tile by tile: all rows use its values before the next ones come.
  void add_values(const Block& block, const Operands& ops, int64_t lo, int64_t hi, Scratch& s) const {
    const Elem* prob = s.elems;
    if constexpr (C::per_elem == 1) prob = s.prob;
    for (int64_t j = lo; j < hi; j += kValueKeys)
      add_product<C, A::rows>(block.rows, channels_, (min(j + kValueKeys, hi) - j) / C::per_elem,
                              prob + (j - lo) / C::per_elem, known_pitch<kElemPitch>(), values(ops, j),
                              v_pitch_, s.softmax.o, channels_, keys_needed(block, j));
  }

  // 0 * NaN is NaN: what is not finite among the values is not in the product, and added here to the rows
  // that see it.
  void add_not_finite(const Block& block, Scratch& s) const {
    for (int64_t j = block.keys.lo; j < block.keys.hi; ++j) {
      const S* row = t_.v.at<S>(block.b, block.h, j);
      for (int64_t d = 0; d < p_.D; ++d) {
        const T x = to_float(row[d]);
        if (x - x == 0) continue;
        for (int m = 0; m < block.rows; ++m) {
          const Range keys = block.keys_of_row(m);
          if (keys.lo <= j && j < keys.hi) s.softmax.o[m * channels_ + d] += x;
        }
      }
    }
  }

  const Problem p_;
  const Forward& t_;
  const Pool& pool_;
  const int64_t depth_, key_elems_, q_pitch_, channels_, v_pitch_, keys_, block_rows_, blocks_;
  const bool piecemeal_;  // operands are packed as they are used: a panel of k and of r, a chunk of v
  const BandColumns<C> band_;
  const bool packs_all_r_;
};

}  // namespace txl::TXL_LEVEL

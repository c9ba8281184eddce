// Backward: the scores again, tile by tile, and from them the gradients of everything. Nothing of order L x K
// is kept.
//
// Per block of queries and chunk of keys, with P the probabilities (P' after dropout):
//
//   dP' = dO v^T         dS = P' * dP' - P * delta,   delta = dO . O
//   dv += P'^T dO        dk += dS^T (q + u)           dq += dS k
//   dT  = dS skewed into band columns                 dr += dT^T (q + v)       dq += dT r
//
// A band column is multiplied once, when no later key adds to it. Sums run in an order that depends on the
// shapes alone: the same call gives the same bits on any number of threads.
#pragma once

#include "gradient_sums.h"
#include "scores.h"

namespace txl::TXL_LEVEL {

// A tile of probabilities, 2^(score - lse), from one of scores. NaN stays NaN. None is above 1: of a score
// that is huge the last bit is worth 32 or more, and lse, which ought to be equal, may differ by it.
template <typename T, int kM, int kN>
TXL_INLINE void probabilities(Vec<T> (&acc)[kM][kN], const T* lse2) {
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) acc[m][n] = exp2(vmin(Vec<T>{}, acc[m][n] - lse2[m]));
}

// A tile of dS from one of dP' = dO v^T: dropped * dP' - p * delta.
template <typename T, int kM, int kN>
TXL_INLINE void score_gradient(Vec<T> (&acc)[kM][kN], const T* p, const T* dropped, int64_t pitch,
                               const T* delta) {
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) {
    const int64_t at = m * pitch + n * kLanes<T>;
    acc[m][n] = load(dropped + at) * acc[m][n] - load(p + at) * delta[m];
  }
}

// A block of rows in both layouts that products read: [rows][lda], broadcast along a row, and the elements
// made of per_elem rows, over which a product sums: as B [rows / per_elem][ldb], or for tiles as A, turned,
// [channels][ldb]. The same memory where an element is one value.
template <class C, int kBlockRows>
struct BlockOperand {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  Elem *along, *across;
  int64_t lda, ldb;

  BlockOperand(Elem* memory, int64_t channels)
      : along(memory),
        across(C::per_elem == 1 ? memory : memory + kBlockRows * lda_of(channels)),
        lda(lda_of(channels)),
        ldb(kTiled<C> ? a_pitch<C>(kBlockRows / C::per_elem) : channels) {}

  static int64_t elements(int64_t channels) {
    const int64_t across =
        kTiled<C> ? channels * a_pitch<C>(kBlockRows / C::per_elem) : kBlockRows / C::per_elem * channels;
    return kBlockRows * lda_of(channels) + (C::per_elem == 1 ? 0 : across);
  }

  // From values [rows][channels], rows of whole elements and channels of whole vectors.
  void pack(const T* x, int64_t rows, int64_t channels) const {
    if constexpr (C::per_elem == 1) {
      memcpy(along, x, static_cast<size_t>(rows * channels) * sizeof(T));
    } else {
      pack_along<C>(x, channels, rows, channels, along, lda);
      if constexpr (kTiled<C>)
        pack_turned<C>(x, channels, rows, channels, across, ldb);
      else
        pack_across<C>(x, channels, rows, channels, across, ldb);
    }
  }

 private:
  static int64_t lda_of(int64_t channels) { return a_pitch<C>(channels / C::per_elem); }
};

template <class C, class S>
class BackwardKernel {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kBlockRows = kTiled<C> ? 64 : (kLong ? 12 : 8) * kRows, kChunkKeys = 256;
  // All blocks of queries pass over so many keys before the next ones, or (0) a block over all keys before
  // the next block. Tiles multiply so fast that they wait for what comes from beyond the second level of
  // cache: a span's operands and sums stay there.
  static constexpr int64_t kSpanKeys = kTiled<C> ? 512 : 0;
  static constexpr int kWidth = kPanel<C>;
  // Keys whose probabilities and dS are made and used at a time.
  static constexpr int64_t kScoreKeys = kTiled<C> ? kWidth : kChunkKeys;
  static constexpr int64_t kPitch = kScoreKeys + 16;
  static constexpr int kStep = C::per_elem * C::whole;  // rows that a product sums over come in these
  using Window = BandWindow<C, kBlockRows, kChunkKeys>;
  using BandGrad = BandGradient<C, kBlockRows, kChunkKeys>;
  static constexpr int64_t kAlongPitch = a_pitch<C>((kTiled<C> ? kWidth : BandGrad::kColumns) / C::per_elem);
  using Operand = BlockOperand<C, kBlockRows>;
  using Sums = typename GradientSums<C, S>::Sums;

  // One task: some batch entries of one head, and one share of their queries or all of them in turn.
  struct Task {
    int64_t head, batch_from, batch_to, share_from, share_to;
    Sums sums;  // no dk and dv if it takes all shares: they are written span by span
  };

  // What a block of queries keeps from one span of keys to the next.
  struct Queries {
    Elem *qu, *qv, *dout;
    T *qv_values, *lse2, *delta, *far_sum, *dq_content, *dq_position;
  };

  // Operands and sums of one thread.
  struct Scratch {
    // Packed operands of the current head, batch entry and span of keys.
    Elem *r_panels, *r_rows, *far[2];
    T* r_far;                  // [2][channels]: the end rows of r as values
    int64_t packed_head = -1;  // whose r is packed
    NotFinite<T> r_not_finite;
    Elem *k_panels, *v_panels, *k_rows;
    T* dkdv;                     // of the span, where the task takes all shares
    T *share_dkdv, *share_head;  // the sums of later shares
    Sums sums;                   // those of the current share and span
    int64_t first_key;           // of the span
    Queries first, q;            // the first block of the task, and the current one
    // The current block and chunk of keys.
    T* rows;  // values on their way into packed rows
    T *band, *tile, *prob, *dropped, *ds, *dt;
    Elem *along, *across;  // pairs of a chunk, where elements are pairs
  };

 public:
  BackwardKernel(const Problem& problem, const Backward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        depth_(depth_of<C>(p_.D)),
        key_elems_(C::parts * depth_),
        channels_(round_up(p_.D, kLanes<T> * C::per_elem)),
        row_pitch_(C::parts * channels_),
        keys_(round_up(p_.K, kWidth)),
        span_keys_(kSpanKeys ? min(kSpanKeys, keys_) : keys_),
        blocks_(ceil_div(p_.L, kBlockRows)),
        band_(p_, min(p_.L, kBlockRows)),
        sums_(p_, t_, band_, channels_),
        shares_(p_, pool_.threads, blocks_, sums_.dkdv_elements(keys_) * static_cast<int64_t>(sizeof(T)),
                sums_.head_elements() * static_cast<int64_t>(sizeof(T))) {}

  bool run() {
    const int64_t tasks_of_unit = shares_.together ? 1 : shares_.queries,
                  tasks = p_.H * shares_.batch * tasks_of_unit;
    const auto arrays = [&](Scratch& s, auto visit) { scratch_arrays(s, visit); };
    Array<Task> task(tasks);
    Array<Scratch> scratch(min(pool_.threads, tasks));
    const int64_t own_keys = shares_.together ? 0 : sums_.dkdv_elements(keys_);
    Arena arena(static_cast<size_t>(tasks) *
                    (Arena::bytes<T>(sums_.head_elements()) + Arena::bytes<T>(own_keys)) +
                static_cast<size_t>(scratch.size()) * Arena::record_bytes<Scratch>(arrays));
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t unit = i / tasks_of_unit, batch_share = unit % shares_.batch;
      T* head = arena.take<T>(sums_.head_elements());
      T* dkdv = arena.take<T>(own_keys);
      task[i] = {unit / shares_.batch,
                 p_.B * batch_share / shares_.batch,
                 p_.B * (batch_share + 1) / shares_.batch,
                 shares_.together ? 0 : i % shares_.queries,
                 shares_.together ? shares_.queries : i % shares_.queries + 1,
                 sums_.in(dkdv, keys_, head)};
    }
    for (Scratch& s : scratch) {
      arena.take_record(s, arrays);
      if (p_.dropout_p == 0) s.dropped = s.prob;
    }

    std::atomic<bool> declined{false};
    parallel_items(pool_, tasks, [&](int64_t i, int thread) {
      if (!run_task(task[tasks - 1 - i], scratch[thread])) declined = true;
    });
    if (declined) return false;
    if (!shares_.together)
      parallel_items(pool_, tasks / shares_.queries,
                     [&](int64_t unit, int) { add_shares(&task[unit * shares_.queries]); });
    // The sums of one head, in the order of its tasks.
    const auto of_head = [&](int64_t h) {
      return [&task, h](auto visit) {
        for (const Task& one : task)
          if (one.head == h && one.share_from == 0) visit(one.sums);
      };
    };
    const int64_t chunks = t_.dr.data ? ceil_div(p_.N, kReduceRows) : 0;
    parallel_items(pool_, p_.H * chunks, [&](int64_t i, int) {
      const int64_t h = i / chunks, from = i % chunks * kReduceRows;
      sums_.write_r(h, {from, min(from + kReduceRows, p_.N)}, of_head(h));
    });
    for (int64_t h = 0; h < p_.H; ++h) sums_.write_biases(h, of_head(h));
    return true;
  }

 private:
  static constexpr int64_t kReduceRows = 256;

  // The arrays of a Scratch, in one list: `visit(pointer, elements)`.
  template <class F>
  void scratch_arrays(Scratch& s, F visit) const {
    const int64_t rows = kBlockRows, later = shares_.together ? shares_.queries - 1 : 0;
    visit(s.k_panels, span_keys_ * key_elems_), visit(s.v_panels, span_keys_ * key_elems_);
    visit(s.k_rows, span_keys_ / C::per_elem * row_pitch_);
    visit(s.r_panels, band_.columns() * key_elems_);
    visit(s.r_rows, band_.columns() / C::per_elem * row_pitch_);
    visit(s.far[0], kLanes<Elem> * key_elems_), visit(s.far[1], kLanes<Elem> * key_elems_);
    visit(s.r_far, 2 * channels_);
    visit(s.dkdv, shares_.together ? sums_.dkdv_elements(span_keys_) : 0);
    visit(s.share_dkdv, later ? sums_.dkdv_elements(span_keys_) : 0);
    visit(s.share_head, slots(later) * sums_.head_elements());
    const int64_t most_blocks = shares_.together ? blocks_ : ceil_div(blocks_, shares_.queries);
    query_arrays(s.first, [&](auto*& p, int64_t count) { visit(p, slots(most_blocks) * count); });
    visit(s.rows, rows * channels_);
    visit(s.band, Window::kElements), visit(s.tile, kStoreFirst<C> ? rows * kWidth : 0);
    visit(s.prob, rows * kPitch), visit(s.dropped, p_.dropout_p > 0 ? rows * kPitch : 0),
        visit(s.ds, rows * kPitch);
    visit(s.dt, BandGrad::kElements);
    visit(s.along, C::per_elem == 1 ? 0 : rows * kAlongPitch);
    visit(s.across,
          C::per_elem == 1 ? 0 : rows * (kTiled<C> ? kPanelPitch<C> : BandGrad::kPitch) / C::per_elem);
  }

  // The same of one block of Queries.
  template <class F>
  void query_arrays(Queries& q, F visit) const {
    const int64_t packed = Operand::elements(channels_), rows = kBlockRows;
    visit(q.qu, packed), visit(q.qv, packed), visit(q.dout, packed);
    visit(q.qv_values, rows * channels_);
    visit(q.lse2, rows), visit(q.delta, rows), visit(q.far_sum, 2 * rows);
    visit(q.dq_content, rows * channels_), visit(q.dq_position, rows * channels_);
  }

  // Of n things that are used one after another in each span: how many have memory of their own, and which
  // has the i-th. Where the first span is the last, all have the same.
  int64_t slots(int64_t n) const { return span_keys_ == keys_ ? min(n, 1) : n; }
  int64_t slot(int64_t i) const { return span_keys_ == keys_ ? 0 : i; }

  // False where a value that is not finite meets arithmetic that cannot keep it apart.
  bool run_task(const Task& task, Scratch& s) const {
    const TileScope tiles;
    if (s.packed_head != task.head) pack_r(task.head, s);
    NotFinite<T> not_finite = s.r_not_finite;
    sums_.zero_head(task.sums);
    for (int64_t b = task.batch_from; b < task.batch_to; ++b)
      for (int64_t lo = 0; lo < keys_; lo += span_keys_)
        if (!run_span(task, b, {lo, min(lo + span_keys_, keys_)}, s, not_finite)) return false;
    if constexpr (kTiled<C>) sums_.turn_back(task.sums.dr, band_.columns(), s.rows);
    return true;
  }

  // All of the task's queries of one batch entry with one span of keys.
  bool run_span(const Task& task, int64_t b, Range span, Scratch& s, NotFinite<T>& not_finite) const {
    const int64_t keys = span.hi - span.lo;
    s.first_key = span.lo;
    pack_keys(task.head, b, span, s, not_finite);
    Sums total = task.sums;
    if (shares_.together)
      total = sums_.in(s.dkdv, span_keys_, task.sums.dr);
    else
      total.dk += span.lo * channels_, total.dv += span.lo * channels_;
    sums_.zero_dkdv(total, keys);
    const int64_t first_block = blocks_ * task.share_from / shares_.queries;
    for (int64_t share = task.share_from; share < task.share_to; ++share) {
      const int64_t later = share - task.share_from;
      s.sums = total;
      if (later) {
        s.sums = sums_.in(s.share_dkdv, span_keys_, s.share_head + slot(later - 1) * sums_.head_elements());
        sums_.zero_dkdv(s.sums, keys);
        if (span.lo == 0) sums_.zero_head(s.sums);
      }
      NotFinite<T> in_share = not_finite;
      for (int64_t index = blocks_ * share / shares_.queries; index < blocks_ * (share + 1) / shares_.queries;
           ++index) {
        const int64_t i0 = start_of_block(index), rows = start_of_block(index + 1) - i0;
        s.q = s.first;
        query_arrays(s.q, [&](auto*& p, int64_t count) { p += slot(index - first_block) * count; });
        const Block block(p_, b, task.head, i0, static_cast<int>(rows));
        if (!run_block(block, span, s, in_share)) return false;
      }
      if (later) sums_.add_dkdv(s.sums, total, keys);
      if (later && span.hi == keys_) sums_.add_head(s.sums, total);
    }
    if constexpr (kTiled<C>) sums_.turn_back(total.dk, keys, s.rows), sums_.turn_back(total.dv, keys, s.rows);
    if (shares_.together) sums_.write_dkdv(b, task.head, span, total);
    return true;
  }

  // Of about the same size, in whole steps.
  int64_t start_of_block(int64_t block) const {
    const int64_t steps = ceil_div(p_.L, kStep);
    return min(steps * block / blocks_ * kStep, p_.L);
  }

  void pack_r(int64_t h, Scratch& s) const {
    s.packed_head = h, s.r_not_finite = {};
    for (int64_t panel = 0; panel < band_.panels; ++panel)
      pack_band_panel<C, S>(p_, t_.r, h, band_, panel, s.r_panels + panel * kWidth * key_elems_);
    const auto row = [&](int64_t column) { return band_.template row<S>(p_, t_.r, h, column); };
    pack_rows<C, false>(band_.columns(), row, p_.D, channels_, s.r_rows, s.r_not_finite);
    for (int side = 0; side < 2; ++side) {
      const S* row = t_.r.at<S>(0, h, side ? p_.N - 1 : 0);
      pack_far<C>(row, p_.D, s.far[side]);
      for (int64_t d = 0; d < channels_; ++d)
        s.r_far[side * channels_ + d] = d < p_.D ? to_float(row[d]) : T{};
      if (!band_.uses_far(p_, side)) continue;
      for (int64_t d = 0; d < channels_; d += kLanes<T>)
        s.r_not_finite.see(load(s.r_far + side * channels_ + d));
    }
  }

  void pack_keys(int64_t h, int64_t b, Range span, Scratch& s, NotFinite<T>& not_finite) const {
    const Range seen = keys_of_queries(p_, p_.keys_of_batch(b), 0, p_.L - 1);
    for (int64_t tile = max(floor_to(seen.lo, kWidth), span.lo); tile < min(seen.hi, span.hi);
         tile += kWidth) {
      const int64_t at = tile - span.lo;
      const S *k[kWidth], *v[kWidth];
      for (int x = 0; x < kWidth; ++x) {
        k[x] = row_of_key<S>(t_.k, b, h, seen, tile + x);
        v[x] = row_of_key<S>(t_.v, b, h, seen, tile + x);
      }
      pack_panel<C>(k, p_.D, s.k_panels + at * key_elems_);
      pack_panel<C>(v, p_.D, s.v_panels + at * key_elems_);
      pack_rows<C, false>(
          kWidth, [&](int64_t x) { return k[x]; }, p_.D, channels_, packed_row(s.k_rows, at), not_finite);
    }
  }

  // The block's rows, packed; rows that see nothing are zeros.
  void pack_block(const Block& block, Scratch& s, NotFinite<T>& not_finite) const {
    const int64_t rows = round_up(block.rows, kStep);
    const auto fill = [&](const View& x, const View& bias, T factor, T* values) {
      const S* add = bias.data ? bias.at<S>(0, block.h, 0) : nullptr;
      for (int64_t m = 0; m < rows; ++m) {
        const bool sees = m < block.rows && !block.keys_of_row(m).empty();
        const S* row = sees ? x.at<S>(block.b, block.h, block.i0 + m) : nullptr;
        for (int64_t d = 0; d < channels_; d += kLanes<T>) {
          Vec<T> y = {};
          if (row) y = load_left(row + d, p_.D - d);
          if (row && add) y += load_left(add + d, p_.D - d);
          y *= factor;
          store(values + m * channels_ + d, y);
          not_finite.see(y);
        }
      }
    };
    const T factor = static_cast<T>(p_.scale * kLog2e);
    fill(t_.q, t_.bias_u, factor, s.rows);
    operand(s.q.qu).pack(s.rows, rows, channels_);
    fill(t_.q, t_.bias_v, factor, s.q.qv_values);
    operand(s.q.qv).pack(s.q.qv_values, rows, channels_);
    fill(t_.dout, View{}, T{1}, s.rows);
    operand(s.q.dout).pack(s.rows, rows, channels_);
    for (int m = 0; m < block.rows; ++m) {
      const S* out = t_.out.at<S>(block.b, block.h, block.i0 + m);
      Vec<T> dot = {};
      for (int64_t d = 0; d < channels_; d += kLanes<T>)
        dot += load(s.rows + m * channels_ + d) * load_left(out + d, p_.D - d);
      s.q.delta[m] = horizontal_sum<T>(dot);
      const T lse = static_cast<const T*>(t_.lse)[(block.b * p_.H + block.h) * p_.L + block.i0 + m];
      s.q.lse2[m] = lse == -static_cast<T>(INFINITY) ? T{} : lse * static_cast<T>(kLog2e);
    }
  }
  Operand operand(Elem* memory) const { return {memory, channels_}; }
  // Row x, the first of an element, of rows that are packed as B.
  Elem* packed_row(Elem* rows, int64_t x) const { return rows + x / C::per_elem * row_pitch_; }

  // One block of queries and one span of keys.
  bool run_block(const Block& block, Range span, Scratch& s, NotFinite<T>& not_finite) const {
    const bool sees = !block.keys.empty();
    if (span.lo == 0) {
      zero(s.q.dq_content, block.rows * channels_);
      zero(s.q.dq_position, block.rows * channels_);
      zero(s.q.far_sum, 2 * kBlockRows);
      if (sees) pack_block(block, s, not_finite);
    }
    const bool careful = sees && not_finite.any();
    if (careful && C::per_elem > 1) return false;
    const Range keys = intersect(block.keys, span);
    if (!keys.empty()) {
      Window window(s.band, block, band_, s.far, operand(s.q.qv).along, operand(s.q.qv).lda, depth_);
      BandGrad dt(s.dt, block, band_);
      const int64_t end = round_up(keys.hi, kWidth);
      for (int64_t lo = floor_to(keys.lo, kWidth); lo < end; lo += kChunkKeys) {
        const int64_t hi = min(lo + kChunkKeys, end);
        const Range in_band = band_tiles<C>(block, lo, hi);
        if (!in_band.empty()) {
          window.advance(in_band, [&](int64_t column) { return s.r_panels + column * key_elems_; });
          dt.advance(in_band);
        }
        for (int64_t j = lo; j < hi; j += kScoreKeys) {
          const int64_t scores_end = min(j + kScoreKeys, hi);
          make_probabilities(block, window, j, scores_end, s);
          if (p_.dropout_p > 0) drop_some(block, j, scores_end, s);
          make_ds(block, in_band, j, scores_end, dt, s);
          if (careful)
            add_carefully(block, j, scores_end, s);
          else
            add_content(block, j, scores_end, s);
        }
        if (careful)
          dt.clear();  // all of it is added: the next chunk's begins with itself
        else
          add_position(block, hi == end ? dt.rest() : dt.complete(hi), dt, s);
      }
    }
    if (span.hi < keys_) return true;
    if (sees && !careful) add_far(block, s);
    write_block(block, s);
    return true;
  }

  // s.prob of the keys [lo, hi).
  void make_probabilities(const Block& block, const Window& window, int64_t lo, int64_t hi,
                          Scratch& s) const {
    const Operand qu = operand(s.q.qu);
    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool edge = !block.all_see(j, j + kWidth);
      panel_product<C>(block.rows, qu.along, qu.lda, depth_, s.k_panels + (j - s.first_key) * key_elems_,
                       window.read(block.place(j, j + kWidth), j), s.tile, keys_needed(block, j),
                       [&](auto& acc, int64_t m) {
                         probabilities<T>(acc, s.q.lse2 + m);
                         // After it: where lse is NaN, keys that the query does not see get 0 all the same.
                         if (edge) mask_tile<T>(acc, block, m, j, T{});
                         store_tile<T>(s.prob + m * kPitch + (j - lo), kPitch, acc);
                       });
    }
  }

  // s.dropped: what dropout leaves of s.prob.
  void drop_some(const Block& block, int64_t lo, int64_t hi, Scratch& s) const {
    const T factor = static_cast<T>(1 / (1 - p_.dropout_p));
    for (int64_t m = 0; m < block.rows; ++m) {
      T* row = s.dropped + m * kPitch;
      for (int64_t x = 0; x < hi - lo; ++x) row[x] = s.prob[m * kPitch + x] * factor;
      drop(p_, block.b, block.h, block.i0 + m, intersect(block.keys_of_row(m), {lo, hi}), lo, row);
    }
  }

  // s.ds of the keys [lo, hi), and dt of the tiles that lie in the band; of others s.q.far_sum.
  void make_ds(const Block& block, Range in_band, int64_t lo, int64_t hi, const BandGrad& dt,
               Scratch& s) const {
    const Operand dout = operand(s.q.dout);
    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool edge = !block.all_see(j, j + kWidth), banded = j >= in_band.lo && j < in_band.hi;
      T* moved = banded ? dt.tile(j) : nullptr;
      constexpr int64_t kMovedPitch = BandGrad::kPitch - 1;
      panel_product<C>(block.rows, dout.along, dout.lda, depth_, s.v_panels + (j - s.first_key) * key_elems_,
                       {}, s.tile, keys_needed(block, j), [&](auto& acc, int64_t m) {
                         const int64_t at = m * kPitch + (j - lo);
                         score_gradient<T>(acc, s.prob + at, s.dropped + at, kPitch, s.q.delta + m);
                         if (edge) mask_tile<T>(acc, block, m, j, T{});
                         store_tile<T>(s.ds + at, kPitch, acc);
                         if (banded) store_tile<T>(moved + m * kMovedPitch, kMovedPitch, acc);
                       });
      if (!banded) {
        T* sum = s.q.far_sum + (block.place(j, j + kWidth) == Block::Place::far_right) * kBlockRows;
        for (int m = 0; m < block.rows; ++m) {
          Vec<T> row = {};
          TXL_UNROLL
          for (int n = 0; n < kVectors; ++n) row += load(s.ds + m * kPitch + (j - lo) + n * kLanes<T>);
          sum[m] += horizontal_sum<T>(row);
        }
      }
    }
  }

  // dv, dk and the content part of dq from the keys [lo, hi).
  void add_content(const Block& block, int64_t lo, int64_t hi, Scratch& s) const {
    const int64_t keys = hi - lo, at = lo - s.first_key;
    const auto rows = [&](int64_t x, int64_t count) { return block.rows_of_keys({lo + x, lo + x + count}); };
    add_across(s.dropped, kPitch, block.rows, keys, operand(s.q.dout), s.sums.dv + at * channels_, rows, s);
    add_across(s.ds, kPitch, block.rows, keys, operand(s.q.qu), s.sums.dk + at * channels_, rows, s);
    add_along(s.ds, kPitch, block.rows, keys, packed_row(s.k_rows, at), s.q.dq_content,
              keys_needed(block, lo), s);
  }

  // dr and the position part of dq from the band columns `done`, the first ones of dt.
  void add_position(const Block& block, Range done, BandGrad& dt, Scratch& s) const {
    if (done.empty()) return;
    const int64_t count = round_up(done.size(), BandGrad::kStep), first = band_.first + done.lo;
    add_along(dt.data(), BandGrad::kPitch, block.rows, count, packed_row(s.r_rows, done.lo), s.q.dq_position,
              band_needed(block, first), s);
    const auto rows = [&](int64_t x, int64_t columns) {
      return block.rows_of_band({first + x, first + x + columns});
    };
    if (t_.dr.data)
      add_across(dt.data(), BandGrad::kPitch, block.rows, count, operand(s.q.qv),
                 s.sums.dr + done.lo * channels_, rows, s);
    dt.drop(done.size());
  }

  // Far tiles use one row of r for all their keys: their gradient is a row sum.
  void add_far(const Block& block, Scratch& s) const {
    for (int side = 0; side < 2; ++side) {
      if (!band_.uses_far(p_, side)) continue;
      for (int m = 0; m < block.rows; ++m) {
        const Vec<T> sum = splat(s.q.far_sum[side * kBlockRows + m]);
        for (int64_t d = 0; d < channels_; d += kLanes<T>) {
          T *dr = s.sums.dr_far + side * channels_ + d, *dq = s.q.dq_position + m * channels_ + d;
          store(dr, load(dr) + sum * load(s.q.qv_values + m * channels_ + d));
          store(dq, load(dq) + sum * load(s.r_far + side * channels_ + d));
        }
      }
    }
  }

  // All sums of a chunk pair by pair, over the visible pairs only: 0 * NaN is NaN, so where an input is not
  // finite the products above would spread it to rows that do not see it.
  void add_carefully(const Block& block, int64_t lo, int64_t hi, Scratch& s) const {
    const auto add = [&](T* sum, T factor, const T* row) {
      for (int64_t d = 0; d < p_.D; ++d) sum[d] += factor * row[d];
    };
    const T* qu = reinterpret_cast<const T*>(s.q.qu);
    const T* dout = reinterpret_cast<const T*>(s.q.dout);
    const T* k_rows = reinterpret_cast<const T*>(s.k_rows);
    for (int64_t m = 0; m < block.rows; ++m) {
      const Range keys = intersect(block.keys_of_row(m), {lo, hi});
      for (int64_t j = keys.lo; j < keys.hi; ++j) {
        const T ds = s.ds[m * kPitch + (j - lo)];
        const int64_t at = (j - s.first_key) * channels_;
        add(s.sums.dv + at, s.dropped[m * kPitch + (j - lo)], dout + m * channels_);
        add(s.sums.dk + at, ds, qu + m * channels_);
        add(s.q.dq_content + m * channels_, ds, k_rows + at);
        const int64_t c = p_.band(block.i0 + m, j);
        const bool left = c <= 0, far = left || c >= p_.N - 1;
        const int64_t column = c - band_.first;
        const T* r = far ? s.r_far + (left ? 0 : channels_)
                         : reinterpret_cast<const T*>(s.r_rows) + column * channels_;
        add(s.q.dq_position + m * channels_, ds, r);
        add(far ? s.sums.dr_far + (left ? 0 : channels_) : s.sums.dr + column * channels_, ds,
            s.q.qv_values + m * channels_);
      }
    }
  }

  // sums += x y for x [rows][columns] and packed rows y, `most` columns at a time where what is multiplied
  // would not stay in the first cache. needed: the columns of x that are not zero, for some of its rows.
  template <class Needed>
  void add_along(const T* x, int64_t pitch, int64_t rows, int64_t columns, const Elem* y, T* sums,
                 Needed needed, Scratch& s) const {
    const int64_t most = kTiled<C> ? kWidth : kLong ? columns : 64;
    for (int64_t c = 0; c < columns; c += most) {
      const int64_t step = min(most, columns - c);
      const Elem *packed = s.along, *next = y + (c + step) / C::per_elem * row_pitch_;
      if constexpr (C::per_elem == 1)
        packed = x + c;
      else
        pack_along<C>(x + c, pitch, rows, step, s.along, kAlongPitch);
      add_product<C, A::rows>(
          rows, channels_, step / C::per_elem, packed, C::per_elem == 1 ? pitch : kAlongPitch,
          y + c / C::per_elem * row_pitch_, row_pitch_, sums, channels_,
          [&](int64_t m, int64_t count) { return shifted(needed(m, count), c); }, next);
    }
  }

  // sums += x^T y for x [rows][columns] and rows y of the block; with tiles sums^T += y^T x, panel by panel:
  // then x, the larger one, need not be turned. needed: the rows of x that are not zero, for some of its
  // columns.
  template <class Needed>
  void add_across(T* x, int64_t pitch, int64_t rows, int64_t columns, const Operand& y, T* sums,
                  Needed needed, Scratch& s) const {
    const int64_t whole = round_up(rows, kStep), steps = whole / C::per_elem;
    for (int64_t m = rows; m < whole; ++m) zero(x + m * pitch, columns);
    if constexpr (kTiled<C>) {
      for (int64_t c = 0; c < columns; c += kWidth) {
        T *panel = sums + c * channels_, *next = panel + kWidth * channels_;
        pack_across<C>(x + c, pitch, whole, kWidth, s.across, kPanelPitch<C>);
        add_product<C, A::rows>(channels_, kWidth, steps, y.across, y.ldb, s.across, kPanelPitch<C>, panel,
                                kWidth, All{}, reinterpret_cast<const Elem*>(next));
      }
    } else {
      const Elem* packed = s.across;
      if constexpr (C::per_elem == 1)
        packed = x;
      else
        pack_across<C>(x, pitch, whole, columns, s.across, BandGrad::kPitch);
      add_product<C, A::columns>(columns, channels_, steps, packed,
                                 C::per_elem == 1 ? pitch : BandGrad::kPitch, y.across, y.ldb, sums,
                                 channels_, needed);
    }
  }

  void write_block(const Block& block, Scratch& s) const {
    const T scale = static_cast<T>(p_.scale);
    for (int64_t m = 0; m < block.rows; ++m) {
      T *content = s.q.dq_content + m * channels_, *du = s.sums.du, *dv_bias = s.sums.dv_bias;
      for (int64_t d = 0; d < channels_; d += kLanes<T>) {
        const Vec<T> x = load(content + d) * scale, y = load(s.q.dq_position + m * channels_ + d) * scale;
        store(du + d, load(du + d) + x);
        store(dv_bias + d, load(dv_bias + d) + y);
        store(content + d, x + y);
      }
      S* dq = t_.dq.at<S>(block.b, block.h, block.i0 + m);
      for (int64_t d = 0; d < p_.D; ++d) store_as(dq + d, content[d]);
    }
  }

  // The shares of one head and batch entry, in order.
  void add_shares(const Task* task) const {
    const Sums& total = task->sums;
    for (int64_t share = 1; share < shares_.queries; ++share) {
      sums_.add_dkdv(task[share].sums, total, keys_);
      sums_.add_head(task[share].sums, total);
    }
    sums_.write_dkdv(task->batch_from, task->head, {0, keys_}, total);
  }

  const Problem p_;
  const Backward& t_;
  const Pool& pool_;
  const int64_t depth_, key_elems_, channels_, row_pitch_, keys_, span_keys_, blocks_;
  const BandColumns<C> band_;
  const GradientSums<C, S> sums_;
  const Shares shares_;
};

}  // namespace txl::TXL_LEVEL

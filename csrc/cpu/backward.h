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

#include "scores.h"

namespace txl::TXL_LEVEL {

// A tile of probabilities, 2^(score - lse), from one of scores. NaN stays NaN. None is above 1: where scores
// are huge, the difference of two that ought to be 0 is what the last bit is worth, 32 or more.
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
// across rows, whose depth are the rows: as B [rows / depth][ldb], or for tiles as A, turned, [columns][ldb].
// The same memory where an element is one value.
template <class C, int kRowCount>
struct Rows {
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  Elem *along, *across;
  int64_t lda, ldb;

  Rows(Elem* memory, int64_t columns)
      : along(memory),
        across(C::per_elem == 1 ? memory : memory + kRowCount * lda_of(columns)),
        lda(lda_of(columns)),
        ldb(kTiled<C> ? a_pitch<C>(kRowCount / C::per_elem) : columns) {}

  static int64_t elements(int64_t columns) {
    const int64_t across =
        kTiled<C> ? columns * a_pitch<C>(kRowCount / C::per_elem) : kRowCount / C::per_elem * columns;
    return kRowCount * lda_of(columns) + (C::per_elem == 1 ? 0 : across);
  }

  // From values [rows][columns], `rows` whole elements and columns whole vectors.
  void pack(const T* x, int64_t rows, int64_t columns) const {
    if constexpr (C::per_elem == 1) {
      memcpy(along, x, static_cast<size_t>(rows * columns) * sizeof(T));
    } else {
      pack_along<C>(x, columns, rows, columns, along, lda);
      if constexpr (kTiled<C>)
        pack_turned<C>(x, columns, rows, columns, across, ldb);
      else
        pack_across<C>(x, columns, rows, columns, across, ldb);
    }
  }

 private:
  static int64_t lda_of(int64_t columns) { return a_pitch<C>(columns / C::per_elem); }
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
  static constexpr int64_t kSlopeColumns = (kChunkKeys + kBlockRows + 2 * kWidth + 31) / 32 * 32;
  // Whole cache lines, an odd number of them.
  static constexpr int64_t kSlopePitch = kSlopeColumns | 16;
  static constexpr int64_t kAlongPitch = a_pitch<C>((kTiled<C> ? kWidth : kSlopeColumns) / C::per_elem);
  // Rows or columns that a product sums over come in these.
  static constexpr int kStep = C::per_elem * C::whole;
  // Columns of the band are multiplied in multiples of this.
  static constexpr int kColumnStep = kTiled<C> ? kWidth : kStep;
  using Window = BandWindow<C, kBlockRows, kChunkKeys>;

  // What the gradients of a share of the queries are added to: two blocks of memory. With tiles dk, dv and dr
  // are panels of kWidth rows, turned, while a task runs (turn_back).
  struct Sums {
    T *dk, *dv;                     // [keys_][columns_]
    T *dr, *dr_far, *du, *dv_bias;  // [band columns][columns_], [2][columns_], [columns_], [columns_]
  };

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
    T* r_far;             // [2][columns]: the end rows of r as values
    int64_t r_head = -1;  // whose r is packed
    Vec<T> r_poison;      // 0, or NaN if that r is not finite
    Elem *k_panels, *v_panels, *k_rows;
    T* keys;                     // dk and dv of the span, where the task takes all shares
    T *share_keys, *share_rest;  // the sums of later shares
    Sums sums;                   // those of the current share and span
    int64_t first_key;           // of the span
    Queries first, q;            // the first block of the task, and the current one
    // The current block and chunk of keys.
    T* rows;  // values on their way into packed rows
    T *band, *tile, *prob, *dropped, *ds, *slope;
    Elem *along, *across;  // pairs of a chunk, where elements are pairs
  };

 public:
  BackwardKernel(const Problem& problem, const Backward& tensors, const Pool& pool)
      : p_(problem),
        t_(tensors),
        pool_(pool),
        depth_(depth_of<C>(p_.D)),
        pitch_(C::parts * depth_),
        columns_(round_up(p_.D, kLanes<T> * C::per_elem)),
        row_pitch_(C::parts * columns_),
        keys_(round_up(p_.K, kWidth)),
        span_keys_(kSpanKeys ? min(kSpanKeys, keys_) : keys_),
        blocks_((p_.L + kBlockRows - 1) / kBlockRows),
        band_(p_, min(p_.L, kBlockRows)),
        band_columns_(band_.panels * kWidth),
        batch_shares_(batch_shares()),
        shares_(query_shares()),
        together_(shares_ == 1 || p_.H * batch_shares_ >= pool_.threads * least_units()) {}

  bool run() {
    const int64_t tasks_of_unit = together_ ? 1 : shares_, tasks = p_.H * batch_shares_ * tasks_of_unit;
    const auto arrays = [&](Scratch& s, auto visit) { scratch_arrays(s, visit); };
    Array<Task> task(tasks);
    Array<Scratch> scratch(min(pool_.threads, tasks));
    const int64_t own_keys = together_ ? 0 : keys_elements(keys_);
    Arena arena(static_cast<size_t>(tasks) * (Arena::bytes<T>(rest_elements()) + Arena::bytes<T>(own_keys)) +
                static_cast<size_t>(scratch.size()) * Arena::record_bytes<Scratch>(arrays));
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t unit = i / tasks_of_unit, batch_share = unit % batch_shares_;
      T* rest = arena.take<T>(rest_elements());
      T* keys = arena.take<T>(own_keys);
      task[i] = {unit / batch_shares_,
                 p_.B * batch_share / batch_shares_,
                 p_.B * (batch_share + 1) / batch_shares_,
                 together_ ? 0 : i % shares_,
                 together_ ? shares_ : i % shares_ + 1,
                 sums_in(keys, keys_, rest)};
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
    if (!together_)
      parallel_items(pool_, tasks / shares_, [&](int64_t unit, int) { sum_shares(&task[unit * shares_]); });
    const int64_t chunks = t_.dr.data ? (p_.N + kReduceRows - 1) / kReduceRows : 0;
    parallel_items(pool_, p_.H * chunks, [&](int64_t i, int) {
      const int64_t from = i % chunks * kReduceRows;
      sum_r(task, i / chunks, from, min(from + kReduceRows, p_.N));
    });
    for (int64_t h = 0; h < p_.H; ++h) {
      sum_bias(task, h, t_.du, &Sums::du);
      sum_bias(task, h, t_.dv_bias, &Sums::dv_bias);
    }
    return true;
  }

 private:
  static constexpr int64_t kTasks = 64, kFewTasks = 8, kTasksPerThread = 4, kReduceRows = 256;
  // Sums of dk and dv may take so much, or, for machines of many cores, twice as much as dk and dv.
  static constexpr int64_t kShareBlocks = 4, kShareBytes = 16 << 20, kShares = 2;
  static constexpr int64_t kTaskBytes = 64 << 20;  // and those of dr
  static constexpr int64_t kTaskPairs = 1 << 14;   // of a query and a key: few would not be worth packing r

  // Into how many tasks the batch entries of one head are split.
  int64_t batch_shares() const {
    const int64_t tasks = min(kTasks, kTaskBytes / (static_cast<int64_t>(sizeof(T)) * rest_elements()));
    return max(1, min(min(p_.B, (tasks + p_.H - 1) / p_.H), p_.B * p_.L * p_.K / kTaskPairs));
  }

  // Into how many shares the queries of one batch entry are split, each with sums of its own. It depends on
  // the shapes alone, and so does every sum: how many threads there are decides only whether one task takes
  // all shares (which packs the keys once, and needs the memory of two shares per thread) or each its own.
  int64_t query_shares() const {
    if (batch_shares_ < p_.B) return 1;  // enough tasks, or too little work for more
    const int64_t units = p_.H * batch_shares_;
    const auto shares_for = [&](int64_t tasks) { return (tasks + units - 1) / units; };
    // To sum up many small ones takes a good part of their time, so only few of these.
    const int64_t wanted = max(min(shares_for(kTasks), blocks_ / kShareBlocks), shares_for(kFewTasks));
    return max(1, min(min(wanted, blocks_), max(kShareBytes / pair_bytes(), kShares)));
  }
  // From how many heads (and shares of the batch) to a thread on one task takes all shares. Where they take
  // more memory than kShareBytes, each is a task of its own only if threads would have none.
  int64_t least_units() const { return shares_ * pair_bytes() > kShareBytes ? 1 : kTasksPerThread; }
  // All of dk and dv.
  int64_t pair_bytes() const { return static_cast<int64_t>(sizeof(T)) * p_.B * p_.H * keys_elements(keys_); }

  int64_t keys_elements(int64_t keys) const { return 2 * keys * columns_; }
  int64_t rest_elements() const { return (band_columns_ + 4) * columns_; }
  Sums sums_in(T* dk, int64_t keys, T* rest) const {
    T* ends = rest + band_columns_ * columns_;
    return {dk, dk + keys * columns_, rest, ends, ends + 2 * columns_, ends + 3 * columns_};
  }

  // The arrays of a Scratch, in one list: `visit(pointer, elements)`.
  template <class F>
  void scratch_arrays(Scratch& s, F visit) const {
    const int64_t rows = kBlockRows, later = together_ ? shares_ - 1 : 0;
    visit(s.k_panels, span_keys_ * pitch_), visit(s.v_panels, span_keys_ * pitch_);
    visit(s.k_rows, span_keys_ / C::per_elem * row_pitch_);
    visit(s.r_panels, band_columns_ * pitch_);
    visit(s.r_rows, band_columns_ / C::per_elem * row_pitch_);
    visit(s.far[0], kLanes<Elem> * pitch_), visit(s.far[1], kLanes<Elem> * pitch_);
    visit(s.r_far, 2 * columns_);
    visit(s.keys, together_ ? keys_elements(span_keys_) : 0);
    visit(s.share_keys, later ? keys_elements(span_keys_) : 0);
    visit(s.share_rest, kept(later) * rest_elements());
    const int64_t most_blocks = together_ ? blocks_ : (blocks_ + shares_ - 1) / shares_;
    query_arrays(s.first, [&](auto*& p, int64_t count) { visit(p, kept(most_blocks) * count); });
    visit(s.rows, rows * columns_);
    visit(s.band, Window::kElements), visit(s.tile, kApart<C> ? rows * kWidth : 0);
    visit(s.prob, rows * kPitch), visit(s.dropped, p_.dropout_p > 0 ? rows * kPitch : 0),
        visit(s.ds, rows * kPitch);
    visit(s.slope, rows * kSlopePitch);
    visit(s.along, C::per_elem == 1 ? 0 : rows * kAlongPitch);
    visit(s.across, C::per_elem == 1 ? 0 : rows * (kTiled<C> ? kPanelPitch<C> : kSlopePitch) / C::per_elem);
  }

  // The same of one block of Queries.
  template <class F>
  void query_arrays(Queries& q, F visit) const {
    const int64_t packed = Rows<C, kBlockRows>::elements(columns_), rows = kBlockRows;
    visit(q.qu, packed), visit(q.qv, packed), visit(q.dout, packed);
    visit(q.qv_values, rows * columns_);
    visit(q.lse2, rows), visit(q.delta, rows), visit(q.far_sum, 2 * rows);
    visit(q.dq_content, rows * columns_), visit(q.dq_position, rows * columns_);
  }

  // How many of n one by one are kept until the last span, and where the i-th is: one takes the place of the
  // other where the first span is the last.
  int64_t kept(int64_t n) const { return span_keys_ == keys_ ? min(n, 1) : n; }
  int64_t place(int64_t i) const { return span_keys_ == keys_ ? 0 : i; }

  // False where a value that is not finite meets arithmetic that cannot keep it apart.
  bool run_task(const Task& task, Scratch& s) const {
    const TileScope tiles;
    if (s.r_head != task.head) pack_r(task.head, s);
    Vec<T> poison = s.r_poison;
    zero(task.sums.dr, rest_elements());
    for (int64_t b = task.batch_from; b < task.batch_to; ++b) {
      int64_t lo = 0;
      do {  // once if there are no keys
        if (!run_span(task, b, {lo, min(lo + span_keys_, keys_)}, s, poison)) return false;
      } while ((lo += span_keys_) < keys_);
    }
    if (kTiled<C>) turn_back(task.sums.dr, band_columns_, s);
    return true;
  }

  // All of the task's queries of one batch entry with one span of keys.
  bool run_span(const Task& task, int64_t b, Range span, Scratch& s, Vec<T>& poison) const {
    const int64_t keys = span.hi - span.lo;
    const Range exist = p_.keys_of_batch(b);
    s.first_key = span.lo;
    pack_keys(task.head, b, keys_of_queries(p_, exist, 0, p_.L - 1), span, s, poison);
    Sums total = task.sums;
    if (together_)
      total = sums_in(s.keys, span_keys_, task.sums.dr);
    else
      total.dk += span.lo * columns_, total.dv += span.lo * columns_;
    zero_keys(total, keys);
    const int64_t first_block = blocks_ * task.share_from / shares_;
    for (int64_t share = task.share_from; share < task.share_to; ++share) {
      const int64_t later = share - task.share_from;
      s.sums = total;
      if (later) {
        s.sums = sums_in(s.share_keys, span_keys_, s.share_rest + place(later - 1) * rest_elements());
        zero_keys(s.sums, keys);
        if (span.lo == 0) zero(s.sums.dr, rest_elements());
      }
      Vec<T> share_poison = poison;
      for (int64_t block = blocks_ * share / shares_; block < blocks_ * (share + 1) / shares_; ++block) {
        const int64_t i0 = start_of_block(block), i1 = start_of_block(block + 1);
        s.q = s.first;
        query_arrays(s.q, [&](auto*& p, int64_t count) { p += place(block - first_block) * count; });
        if (!run_block(task.head, Block(p_, exist, i0, static_cast<int>(i1 - i0)), b, span, s, share_poison))
          return false;
      }
      if (later) add_keys(s.sums, total, keys);
      if (later && span.hi == keys_) add(s.sums.dr, total.dr, rest_elements());
    }
    if (kTiled<C>) turn_back(total.dk, keys, s), turn_back(total.dv, keys, s);
    if (together_) write_keys(b, task.head, span, total);
    return true;
  }

  // Of about the same size, in whole steps.
  int64_t start_of_block(int64_t block) const {
    const int64_t steps = (p_.L + kStep - 1) / kStep;
    return min(steps * block / blocks_ * kStep, p_.L);
  }

  // Panels [columns][kWidth] become rows.
  void turn_back(T* sums, int64_t rows, Scratch& s) const {
    static_assert(!kTiled<C> || kWidth <= kBlockRows, "a panel fits into s.rows");
    constexpr int W = kLanes<T>;
    for (int64_t row = 0; row < rows; row += kWidth) {
      T* panel = sums + row * columns_;
      for (int64_t d = 0; d < columns_; d += W)
        for (int64_t x = 0; x < kWidth; x += W) {
          Vec<T> v[W];
          TXL_UNROLL
          for (int i = 0; i < W; ++i) v[i] = load(panel + (d + i) * kWidth + x);
          transpose<T>(v);
          TXL_UNROLL
          for (int i = 0; i < W; ++i) store(s.rows + (x + i) * columns_ + d, v[i]);
        }
      memcpy(panel, s.rows, static_cast<size_t>(kWidth * columns_) * sizeof(T));
    }
  }

  static void zero(T* x, int64_t count) { memset(x, 0, static_cast<size_t>(count) * sizeof(T)); }

  static void add(const T* x, T* sum, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes<T>) store(sum + i, load(sum + i) + load(x + i));
  }
  void zero_keys(const Sums& sums, int64_t keys) const {
    zero(sums.dk, keys * columns_), zero(sums.dv, keys * columns_);
  }
  void add_keys(const Sums& from, const Sums& to, int64_t keys) const {
    add(from.dk, to.dk, keys * columns_), add(from.dv, to.dv, keys * columns_);
  }

  void pack_r(int64_t h, Scratch& s) const {
    Vec<T>& poison = s.r_poison;
    s.r_head = h, poison = Vec<T>{};
    for (int64_t panel = 0; panel < band_.panels; ++panel)
      pack_band_panel<C, S>(p_, t_.r, h, band_, panel, s.r_panels + panel * kWidth * pitch_);
    const auto row = [&](int64_t column) { return band_.template row<S>(p_, t_.r, h, column); };
    pack_rows<C, false>(band_columns_, row, p_.D, columns_, s.r_rows, poison);
    for (int side = 0; side < 2; ++side) {
      const S* row = t_.r.at<S>(0, h, side ? p_.N - 1 : 0);
      pack_far<C>(row, p_.D, s.far[side]);
      for (int64_t d = 0; d < columns_; ++d) s.r_far[side * columns_ + d] = d < p_.D ? to_float(row[d]) : T{};
      if (!band_.uses_far(p_, side)) continue;
      for (int64_t d = 0; d < columns_; d += kLanes<T>) {
        const Vec<T> x = load(s.r_far + side * columns_ + d);
        poison += x - x;
      }
    }
  }

  void pack_keys(int64_t h, int64_t b, Range seen, Range span, Scratch& s, Vec<T>& poison) const {
    for (int64_t tile = max(floor_to(seen.lo, kWidth), span.lo); tile < min(seen.hi, span.hi);
         tile += kWidth) {
      const int64_t at = tile - span.lo;
      const S *k[kWidth], *v[kWidth];
      for (int x = 0; x < kWidth; ++x) {
        k[x] = row_of_key<S>(t_.k, b, h, seen, tile + x);
        v[x] = row_of_key<S>(t_.v, b, h, seen, tile + x);
      }
      pack_panel<C>(k, p_.D, s.k_panels + at * pitch_);
      pack_panel<C>(v, p_.D, s.v_panels + at * pitch_);
      pack_rows<C, false>(
          kWidth, [&](int64_t x) { return k[x]; }, p_.D, columns_, s.k_rows + at / C::per_elem * row_pitch_,
          poison);
    }
  }

  // The block's rows, packed; rows that see nothing are zeros.
  void pack_block(const Block& block, int64_t b, int64_t h, Scratch& s, Vec<T>& poison) const {
    const int64_t rows = round_up(block.rows, kStep);
    const auto fill = [&](const View& x, const View& bias, T factor, T* values) {
      const S* add = bias.data ? bias.at<S>(0, h, 0) : nullptr;
      for (int64_t m = 0; m < rows; ++m) {
        const bool sees = m < block.rows && !p_.keys_of_query(block.batch, block.i0 + m).empty();
        const S* row = sees ? x.at<S>(b, h, block.i0 + m) : nullptr;
        for (int64_t d = 0; d < columns_; d += kLanes<T>) {
          Vec<T> y = {};
          if (row) y = load_left(row + d, p_.D - d);
          if (row && add) y += load_left(add + d, p_.D - d);
          y *= factor;
          store(values + m * columns_ + d, y);
          poison += y - y;
        }
      }
    };
    const T factor = static_cast<T>(p_.scale * kLog2e);
    fill(t_.q, t_.bias_u, factor, s.rows);
    operand(s.q.qu).pack(s.rows, rows, columns_);
    fill(t_.q, t_.bias_v, factor, s.q.qv_values);
    operand(s.q.qv).pack(s.q.qv_values, rows, columns_);
    fill(t_.dout, View{}, T{1}, s.rows);
    operand(s.q.dout).pack(s.rows, rows, columns_);
    for (int m = 0; m < block.rows; ++m) {
      const S* out = t_.out.at<S>(b, h, block.i0 + m);
      Vec<T> dot = {};
      for (int64_t d = 0; d < columns_; d += kLanes<T>)
        dot += load(s.rows + m * columns_ + d) * load_left(out + d, p_.D - d);
      s.q.delta[m] = horizontal_sum<T>(dot);
      const T lse = static_cast<const T*>(t_.lse)[(b * p_.H + h) * p_.L + block.i0 + m];
      s.q.lse2[m] = lse == -static_cast<T>(INFINITY) ? T{} : lse * static_cast<T>(kLog2e);
    }
  }
  Rows<C, kBlockRows> operand(Elem* memory) const { return {memory, columns_}; }

  // One block of queries and one span of keys.
  bool run_block(int64_t head, const Block& block, int64_t b, Range span, Scratch& s, Vec<T>& poison) const {
    const bool sees = !block.keys.empty();
    if (span.lo == 0) {
      zero(s.q.dq_content, block.rows * columns_);
      zero(s.q.dq_position, block.rows * columns_);
      zero(s.q.far_sum, 2 * kBlockRows);
      if (sees) pack_block(block, b, head, s, poison);
    }
    const Range keys = {max(block.keys.lo, span.lo), min(block.keys.hi, span.hi)};
    const T sum = horizontal_sum<T>(poison);
    const bool poisoned = sees && !(sum == sum);
    if (poisoned && C::per_elem > 1) return false;
    if (!keys.empty()) {
      Window window(s.band);
      window.begin(block, band_, s.far[0], s.far[1], operand(s.q.qv).along, operand(s.q.qv).lda, depth_);
      Slope slope;
      const int64_t end = round_up(keys.hi, kWidth);
      for (int64_t lo = floor_to(keys.lo, kWidth); lo < end; lo += kChunkKeys) {
        const int64_t hi = min(lo + kChunkKeys, end);
        const Range in_band = band_tiles<C>(block, lo, hi);
        if (!in_band.empty()) begin_band(block, in_band, window, slope, s);
        for (int64_t j = lo; j < hi; j += kScoreKeys) {
          const int64_t scores_end = min(j + kScoreKeys, hi);
          score_gradients(block, b, head, window, slope, in_band, j, scores_end, s);
          if (poisoned)
            add_carefully(block, j, scores_end, s);
          else
            add_content(block, j, scores_end, s);
        }
        if (poisoned)
          slope = {};  // nothing is left to carry: the next chunk's band begins with itself
        else
          add_position(block, slope, hi == end, hi, s);
      }
    }
    if (span.hi < keys_) return true;
    if (sees && !poisoned) add_far(block, s);
    write_block(head, block, b, s);
    return true;
  }

  // The band columns that hold gradient not yet multiplied, kept at the front of s.slope.
  struct Slope {
    int64_t start = -1;   // band column of s.slope's column 0; -1 before the first band tile
    int64_t written = 0;  // columns present
  };

  // The band of the tiles of a chunk, and room for its gradient.
  void begin_band(const Block& block, Range in_band, Window& window, Slope& slope, Scratch& s) const {
    window.advance(in_band.lo, in_band.hi, [&](int64_t column) { return s.r_panels + column * pitch_; });
    const bool begins = slope.start < 0;
    if (begins) slope.start = floor_to(p_.band(block.last_row(), in_band.lo) - band_.first, kColumnStep);
    slope.written = block.band_end(in_band.hi) - band_.first - slope.start;
    // Zeros beside what the rows will get.
    for (int m = 0; m < block.rows; ++m) {
      T* row = s.slope + m * kSlopePitch;
      const int64_t from = p_.band(block.i0 + m, in_band.lo) - band_.first - slope.start;
      const int64_t to = from + in_band.hi - in_band.lo;
      if (begins) zero(row, from);
      zero(row + to, max(round_up(slope.written, kColumnStep) - to, 0));
    }
  }

  // s.prob, s.dropped, s.ds of the keys [lo, hi), and s.slope for the tiles that lie in the band.
  void score_gradients(const Block& block, int64_t b, int64_t h, const Window& window, const Slope& slope,
                       Range in_band, int64_t lo, int64_t hi, Scratch& s) const {
    const auto qu = operand(s.q.qu), dout = operand(s.q.dout);
    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool partial = !block.all_see(j, j + kWidth);
      panel_product<C>(block.rows, qu.along, qu.lda, depth_, s.k_panels + (j - s.first_key) * pitch_,
                       window.read(block.place(j, j + kWidth), j), s.tile, keys_needed(block, j),
                       [&](auto& acc, int64_t m) {
                         probabilities<T>(acc, s.q.lse2 + m);
                         // After it: where lse is NaN, keys that the query does not see get 0 all the same.
                         if (partial) mask_tile<T>(acc, block, m, j, T{});
                         store_tile<T>(s.prob + m * kPitch + (j - lo), kPitch, acc);
                       });
    }
    if (p_.dropout_p > 0) {
      const T kept = static_cast<T>(1 / (1 - p_.dropout_p));
      for (int64_t m = 0; m < block.rows; ++m) {
        T* row = s.dropped + m * kPitch;
        for (int64_t x = 0; x < hi - lo; ++x) row[x] = s.prob[m * kPitch + x] * kept;
        const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
        drop(p_, b, h, block.i0 + m, lo, max(keys.lo, lo) - lo, min(keys.hi, hi) - lo, row);
      }
    }
    for (int64_t j = lo; j < hi; j += kWidth) {
      const bool partial = !block.all_see(j, j + kWidth), banded = j >= in_band.lo && j < in_band.hi;
      T* skewed = banded ? s.slope + (p_.band(block.i0, j) - band_.first - slope.start) : nullptr;
      panel_product<C>(block.rows, dout.along, dout.lda, depth_, s.v_panels + (j - s.first_key) * pitch_, {},
                       s.tile, keys_needed(block, j), [&](auto& acc, int64_t m) {
                         const int64_t at = m * kPitch + (j - lo);
                         score_gradient<T>(acc, s.prob + at, s.dropped + at, kPitch, s.q.delta + m);
                         if (partial) mask_tile<T>(acc, block, m, j, T{});
                         store_tile<T>(s.ds + at, kPitch, acc);
                         if (banded) store_tile<T>(skewed + m * (kSlopePitch - 1), kSlopePitch - 1, acc);
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
    add_across(s.dropped, kPitch, block.rows, keys, operand(s.q.dout), s.sums.dv + at * columns_, rows, s);
    add_across(s.ds, kPitch, block.rows, keys, operand(s.q.qu), s.sums.dk + at * columns_, rows, s);
    add_along(s.ds, kPitch, block.rows, keys, s.k_rows + at / C::per_elem * row_pitch_, s.q.dq_content,
              keys_needed(block, lo), s);
  }

  // dr and the position part of dq from the band columns that are complete: those no key from `next` on adds
  // to.
  void add_position(const Block& block, Slope& slope, bool last, int64_t next, Scratch& s) const {
    if (slope.start < 0) return;
    int64_t done = slope.written;
    if (!last)
      done = max(
          0, min(done, floor_to(p_.band(block.last_row(), next) - band_.first - slope.start, kColumnStep)));
    const int64_t count = round_up(done, kColumnStep);
    if (count > 0) {
      const int64_t first = band_.first + slope.start;
      add_along(s.slope, kSlopePitch, block.rows, count, s.r_rows + slope.start / C::per_elem * row_pitch_,
                s.q.dq_position, band_needed(block, first), s);
      const auto rows = [&](int64_t x, int64_t columns) {
        return block.rows_of_band({first + x, first + x + columns});
      };
      if (t_.dr.data)
        add_across(s.slope, kSlopePitch, block.rows, count, operand(s.q.qv),
                   s.sums.dr + slope.start * columns_, rows, s);
    }
    if (last) return;
    const int64_t kept = slope.written - done;
    for (int m = 0; m < block.rows; ++m) {
      T* row = s.slope + m * kSlopePitch;
      memmove(row, row + done, static_cast<size_t>(kept) * sizeof(T));
      zero(row + kept, round_up(kept, kColumnStep) - kept);  // the next chunk may lie outside of the band
    }
    slope.start += done;
    slope.written = kept;
  }

  // Far tiles use one row of r for all their keys: their gradient is a row sum.
  void add_far(const Block& block, Scratch& s) const {
    for (int side = 0; side < 2; ++side) {
      if (!band_.uses_far(p_, side)) continue;
      for (int m = 0; m < block.rows; ++m) {
        const Vec<T> sum = splat(s.q.far_sum[side * kBlockRows + m]);
        for (int64_t d = 0; d < columns_; d += kLanes<T>) {
          T *dr = s.sums.dr_far + side * columns_ + d, *dq = s.q.dq_position + m * columns_ + d;
          store(dr, load(dr) + sum * load(s.q.qv_values + m * columns_ + d));
          store(dq, load(dq) + sum * load(s.r_far + side * columns_ + d));
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
      const Range keys = p_.keys_of_query(block.batch, block.i0 + m);
      for (int64_t j = max(keys.lo, lo); j < min(keys.hi, hi); ++j) {
        const T ds = s.ds[m * kPitch + (j - lo)];
        const int64_t at = (j - s.first_key) * columns_;
        add(s.sums.dv + at, s.dropped[m * kPitch + (j - lo)], dout + m * columns_);
        add(s.sums.dk + at, ds, qu + m * columns_);
        add(s.q.dq_content + m * columns_, ds, k_rows + at);
        const int64_t c = p_.band(block.i0 + m, j);
        const bool left = c <= 0, far = left || c >= p_.N - 1;
        const int64_t column = c - band_.first;
        const T* r =
            far ? s.r_far + (left ? 0 : columns_) : reinterpret_cast<const T*>(s.r_rows) + column * columns_;
        add(s.q.dq_position + m * columns_, ds, r);
        add(far ? s.sums.dr_far + (left ? 0 : columns_) : s.sums.dr + column * columns_, ds,
            s.q.qv_values + m * columns_);
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
          rows, columns_, step / C::per_elem, packed, C::per_elem == 1 ? pitch : kAlongPitch,
          y + c / C::per_elem * row_pitch_, row_pitch_, sums, columns_,
          [&](int64_t m, int64_t count) { return shifted(needed(m, count), c); }, next);
    }
  }

  // sums += x^T y for x [rows][columns] and rows y of the block; with tiles sums^T += y^T x, panel by panel:
  // then x, the larger one, need not be turned. needed: the rows of x that are not zero, for some of its
  // columns.
  template <class Needed>
  void add_across(T* x, int64_t pitch, int64_t rows, int64_t columns, const Rows<C, kBlockRows>& y, T* sums,
                  Needed needed, Scratch& s) const {
    const int64_t whole = round_up(rows, kStep), steps = whole / C::per_elem;
    for (int64_t m = rows; m < whole; ++m) zero(x + m * pitch, columns);
    if constexpr (kTiled<C>) {
      for (int64_t c = 0; c < columns; c += kWidth) {
        T *panel = sums + c * columns_, *next = panel + kWidth * columns_;
        pack_across<C>(x + c, pitch, whole, kWidth, s.across, kPanelPitch<C>);
        add_product<C, A::rows>(columns_, kWidth, steps, y.across, y.ldb, s.across, kPanelPitch<C>, panel,
                                kWidth, All{}, reinterpret_cast<const Elem*>(next));
      }
    } else {
      const Elem* packed = s.across;
      if constexpr (C::per_elem == 1)
        packed = x;
      else
        pack_across<C>(x, pitch, whole, columns, s.across, kSlopePitch);
      add_product<C, A::columns>(columns, columns_, steps, packed, C::per_elem == 1 ? pitch : kSlopePitch,
                                 y.across, y.ldb, sums, columns_, needed);
    }
  }

  void write_block(int64_t head, const Block& block, int64_t b, Scratch& s) const {
    const T scale = static_cast<T>(p_.scale);
    for (int64_t m = 0; m < block.rows; ++m) {
      T *content = s.q.dq_content + m * columns_, *du = s.sums.du, *dv_bias = s.sums.dv_bias;
      for (int64_t d = 0; d < columns_; d += kLanes<T>) {
        const Vec<T> x = load(content + d) * scale, y = load(s.q.dq_position + m * columns_ + d) * scale;
        store(du + d, load(du + d) + x);
        store(dv_bias + d, load(dv_bias + d) + y);
        store(content + d, x + y);
      }
      S* dq = t_.dq.at<S>(b, head, block.i0 + m);
      for (int64_t d = 0; d < p_.D; ++d) store_as(dq + d, content[d]);
    }
  }

  void write_keys(int64_t b, int64_t h, Range span, const Sums& sums) const {
    write_rows(t_.dk, b, h, span, sums.dk, static_cast<T>(kLn2));
    write_rows(t_.dv, b, h, span, sums.dv, T{1});
  }
  void write_rows(const View& to, int64_t b, int64_t h, Range span, const T* sums, T factor) const {
    for (int64_t j = span.lo; j < min(span.hi, p_.K); ++j) {
      S* row = to.at<S>(b, h, j);
      for (int64_t d = 0; d < p_.D; ++d) store_as(row + d, sums[(j - span.lo) * columns_ + d] * factor);
    }
  }

  // The shares of one head and batch entry, in order.
  void sum_shares(const Task* task) const {
    const Sums& total = task->sums;
    for (int64_t share = 1; share < shares_; ++share) {
      const Sums& sums = task[share].sums;
      add_keys(sums, total, keys_);
      add(sums.dr, total.dr, rest_elements());
    }
    write_keys(task->batch_from, task->head, {0, keys_}, total);
  }

  // Rows [from, to) of dr of one head: the band columns that use them (the end rows are used by all columns
  // beyond), over the tasks of that head in order.
  void sum_r(const Array<Task>& tasks, int64_t h, int64_t from, int64_t to) const {
    Array<T> sum(columns_);
    for (int64_t row = from; row < to; ++row) {
      zero(sum.begin(), columns_);
      const int64_t first = row == 0 ? 0 : max(row - band_.first, 0);
      const int64_t last = row == p_.N - 1 ? band_columns_ - 1 : min(row - band_.first, band_columns_ - 1);
      for (const Task& task : tasks) {
        if (task.head != h || task.share_from > 0) continue;
        const auto add = [&](const T* x) {
          for (int64_t d = 0; d < p_.D; ++d) sum[d] += x[d];
        };
        for (int64_t c = first; c <= last; ++c) add(task.sums.dr + c * columns_);
        if (row == 0) add(task.sums.dr_far);
        if (row == p_.N - 1) add(task.sums.dr_far + columns_);
      }
      S* out = t_.dr.at<S>(0, h, row);
      for (int64_t d = 0; d < p_.D; ++d) store_as(out + d, sum[d] * static_cast<T>(kLn2));
    }
  }

  void sum_bias(const Array<Task>& tasks, int64_t h, const View& to, T* Sums::* of_bias) const {
    if (!to.data) return;
    for (int64_t d = 0; d < p_.D; ++d) {
      T sum = 0;
      for (const Task& task : tasks)
        if (task.head == h && task.share_from == 0) sum += (task.sums.*of_bias)[d];
      store_as(to.at<S>(0, h, 0) + d, sum);
    }
  }

  const Problem p_;
  const Backward& t_;
  const Pool& pool_;
  const int64_t depth_, pitch_, columns_, row_pitch_, keys_, span_keys_, blocks_;
  const BandColumns<C> band_;
  const int64_t band_columns_;
  const int64_t batch_shares_, shares_;
  const bool together_;  // one task takes all shares
};

}  // namespace txl::TXL_LEVEL

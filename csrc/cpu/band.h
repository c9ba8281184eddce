// The band: the position term of a block of queries, as an ordinary matrix product read with every row moved
// one place.
//
// For the queries i0 .. i0 + n - 1 the band T holds (q_i + v) . r_c for consecutive c = Problem::band(i, j).
// Neighbouring keys use neighbouring columns, and query i0 + a uses the column a places left of query i0's:
//
//   S[a, j] = (q_a + u) . k_j + T[a, c(i0, j) - a]
//
// so a tile of S adds T to its accumulators, read at row pitch (pitch - 1). Backward goes the other way: a
// tile of dS is stored as one of dT, at that pitch. docs/algorithm.md draws it.
#pragma once

#include "pack.h"

namespace txl::TXL_LEVEL {

// r of one head, packed as panels of columns c = first, first + 1, ... Columns outside [0, N) repeat the
// first and the last row, so that clamp needs no care in tiles that straddle an end; a tile that lies outside
// altogether is "far" and takes one column for all its keys.
template <class C>
struct BandColumns {
  static constexpr int kWidth = kPanel<C>;
  int64_t first, panels;
  Range used;  // the columns of distances that some query sees

  int64_t columns() const { return panels * kWidth; }

  // For blocks of at most so many rows.
  BandColumns(const Problem& p, int64_t block_rows) {
    Range exist = {p.K, 0};  // in some batch entry
    for (int64_t b = 0; b < p.B; ++b) {
      const Range keys = p.keys_of_batch(b);
      if (!keys.empty()) exist = {min(exist.lo, keys.lo), max(exist.hi, keys.hi)};
    }
    const Range reached = {p.band(p.L - 1, exist.lo), p.band(0, exist.hi - 1) + 1};
    used = {max(p.r_zero - p.left, reached.lo), min(p.r_zero + p.right + 1, reached.hi)};
    // Invisible corners of tiles that hold something visible, but not behind the last distance that is seen.
    const int64_t slack = kWidth + block_rows;
    first = max(max(used.lo, 0) - slack, p.band(p.L - 1, floor_to(exist.lo, kWidth)));
    // Blocks of so many rows, one behind another, then need no more columns than they have to.
    const int64_t needed = p.band(block_rows - 1, 0);
    first = needed + floor_to(first - needed, kWidth);
    const int64_t last = min(used.hi - 1, p.N - 1 + slack);
    panels = exist.empty() || last < first ? 0 : (last - first) / kWidth + 1;
  }

  // Whether some distance that a query sees is clamped to the first row of r, or (side 1) to the last.
  bool uses_far(const Problem& p, int side) const { return side ? used.hi > p.N : used.lo < 0; }

  // The row of r of a packed column; null where nobody looks.
  template <class S>
  const S* row(const Problem& p, const View& r, int64_t h, int64_t packed) const {
    const int64_t c = first + packed;
    return used.lo <= c && c < used.hi ? r.at<S>(0, h, p.r_row(c)) : nullptr;
  }
};

// The keys that any of the queries first .. last sees, and what lies between them. A window of nothing (left
// and right of opposite sign cannot occur) or an empty batch range leaves lo >= hi.
TXL_INLINE Range keys_of_queries(const Problem& p, Range batch, int64_t first, int64_t last) {
  return {p.keys_of_query(batch, first).lo, p.keys_of_query(batch, last).hi};
}

// Key j's row of k or v, null where no query sees it: that is packed as zeros, whatever memory holds there.
template <class S>
TXL_INLINE const S* row_of_key(const View& x, int64_t b, int64_t h, Range seen, int64_t j) {
  return seen.lo <= j && j < seen.hi ? x.at<S>(b, h, j) : nullptr;
}

// The queries i0 .. i0 + rows - 1 of one head and batch entry, the keys any of them sees, and where its tiles
// lie in the band.
struct Block {
  const Problem& p;
  int64_t b, h, i0;
  int rows;
  Range exist;  // keys, in this batch entry
  Range keys;

  Block(const Problem& problem, int64_t batch, int64_t head, int64_t first_row, int row_count)
      : p(problem),
        b(batch),
        h(head),
        i0(first_row),
        rows(row_count),
        exist(p.keys_of_batch(b)),
        keys(keys_of_rows(0, rows)) {}

  int64_t last_row() const { return i0 + rows - 1; }

  Range keys_of_row(int64_t m) const { return p.keys_of_query(exist, i0 + m); }

  // Of `count` rows from `first` on: the keys that any of them sees, and where these lie in the band.
  Range keys_of_rows(int64_t first, int64_t count) const {
    return keys_of_queries(p, exist, i0 + first, i0 + first + count - 1);
  }
  Range band_of_rows(int64_t first, int64_t count) const {
    const int64_t last = first + count - 1;
    return {p.band(i0 + last, keys_of_row(last).lo), p.band(i0 + first, keys_of_row(first).hi - 1) + 1};
  }
  // The other way round: the rows that may see one of the keys, and those for which a band column is a key
  // that exists.
  Range rows_of_keys(Range of) const {
    const int64_t position = p.position(i0);
    return {of.lo - p.right - position, of.hi + p.left - position};
  }
  Range rows_of_band(Range columns) const {
    return {exist.lo - p.key(i0, columns.hi - 1), exist.hi - p.key(i0, columns.lo)};
  }
  // Behind the last column of keys before `hi` that some row sees: the first row's, as both ends of masks
  // grow with the row.
  int64_t band_end(int64_t hi) const { return p.band(i0, min(hi, keys_of_row(0).hi) - 1) + 1; }

  // Whether every row sees every key of [lo, hi).
  bool all_see(int64_t lo, int64_t hi) const {
    return keys_of_row(rows - 1).lo <= lo && hi <= keys_of_row(0).hi;
  }

  enum class Place { band, far_left, far_right };

  // Where the visible keys of [lo, hi) lie for every row of the block.
  Place place(int64_t lo, int64_t hi) const {
    lo = max(lo, keys.lo);
    hi = min(hi, keys.hi);
    if (p.band(i0, hi - 1) < 0) return Place::far_left;
    if (p.band(last_row(), lo) >= p.N) return Place::far_right;
    return Place::band;
  }
};

// The column, counted from the first packed one, of a block's row m and key j.
template <class C>
TXL_INLINE int64_t packed_column(const Block& block, const BandColumns<C>& columns, int64_t m, int64_t j) {
  return block.p.band(block.i0 + m, j) - columns.first;
}

// For products: the keys that a group of a block's rows sees, counted from key `start`, and where they lie in
// the band, from its column `start`.
TXL_INLINE auto keys_needed(const Block& block, int64_t start) {
  return [&block, start](int64_t m, int64_t count) { return shifted(block.keys_of_rows(m, count), start); };
}
TXL_INLINE auto band_needed(const Block& block, int64_t start) {
  return [&block, start](int64_t m, int64_t count) { return shifted(block.band_of_rows(m, count), start); };
}

template <class C, class S>
static void pack_band_panel(const Problem& p, const View& r, int64_t h, const BandColumns<C>& columns,
                            int64_t panel, typename C::Elem* out) {
  const S* rows[kPanel<C>];
  for (int x = 0; x < kPanel<C>; ++x) rows[x] = columns.template row<S>(p, r, h, panel * kPanel<C> + x);
  pack_panel<C>(rows, p.D, out);
}

// A vector-wide panel for the tiles of a far side, [depth][parts][kLanes], all columns equal.
template <class C, class S>
static void pack_far(const S* row, int64_t D, typename C::Elem* out) {
  using E = typename C::Elem;
  using T = typename C::Acc;
  constexpr int W = kLanes<E>;
  for (int64_t k = 0; k < depth_of<C>(D); ++k, out += C::parts * W) {
    Vec<T> x[C::per_elem];
    for (int e = 0; e < C::per_elem; ++e) {
      const int64_t d = C::value(k, e);
      x[e] = splat(d < D ? to_float(row[d]) : T{});
    }
    store_parts(out, W, C::across(x));
  }
}

// The stretch of the band that the current chunk of keys needs. It slides with the keys: a column is computed
// once.
template <class C, int kBlockRows, int kChunkKeys>
class BandWindow {
 public:
  using T = typename C::Acc;
  using Elem = typename C::Elem;
  static constexpr int kWidth = kPanel<C>;
  // Of float32 whole cache lines, an odd number of them.
  static constexpr int64_t kPitch = (kChunkKeys + kBlockRows + 3 * kWidth + 15) / 16 * 16 | 16;
  static constexpr int64_t kFarPitch = kLanes<T>, kFarElems = C::parts * kLanes<Elem>;
  static constexpr int64_t kElements = kBlockRows * (kPitch + 2 * kFarPitch);

  // Nothing of the band is known but its far columns, from row 0 of r and from row N - 1, by pack_far. qv:
  // (q + v) of the block, [rows][parts][depth] at row stride ldq.
  BandWindow(T* memory, const Block& block, const BandColumns<C>& columns, Elem* const (&far)[2],
             const Elem* qv, int64_t ldq, int64_t depth)
      : t_(memory),
        far_(memory + kBlockRows * kPitch),
        block_(block),
        columns_(columns),
        qv_(qv),
        ldq_(ldq),
        depth_(depth) {
    const int64_t piece = kTiled<C> ? depth : piece_of(depth);
    for (int side = 0; side < 2; ++side) {
      if (!columns.uses_far(block.p, side)) continue;
      T* sums = far_ + side * kBlockRows * kFarPitch;
      zero(sums, kBlockRows * kFarPitch);
      for (int64_t k = 0; k < depth; k += piece)
        add_product<C, A::rows>(block.rows, kFarPitch, min(depth - k, piece), qv + k, ldq,
                                far[side] + k * kFarElems, kFarElems, sums, kFarPitch);
    }
  }

  // Makes the columns of these keys' tiles present; keys come in growing order. panel(c): the packed panel of
  // column c and the next ones.
  template <class F>
  void advance(Range keys, F panel) {
    const int64_t need_start = floor_to(column(block_.rows - 1, keys.lo), kWidth);
    const int64_t need_end = round_up(block_.band_end(keys.hi) - columns_.first, kWidth);
    if (need_start >= end_) {
      start_ = end_ = need_start;
    } else if (need_start > start_) {
      for (int m = 0; m < block_.rows; ++m)
        memmove(t_ + m * kPitch, t_ + m * kPitch + (need_start - start_),
                static_cast<size_t>(end_ - need_start) * sizeof(T));
      start_ = need_start;
    }
    for (; end_ < need_end; end_ += kWidth) {
      panel_product<C>(block_.rows, qv_, ldq_, depth_, panel(end_), {}, nullptr,
                       band_needed(block_, columns_.first + end_), Store<T>{t_ + (end_ - start_), kPitch});
    }
  }

  // Where the sums of the tile that starts at key lo do.
  Start<T> read(Block::Place place, int64_t lo) const {
    if (place == Block::Place::band) return {t_ + (column(0, lo) - start_), kPitch - 1, kLanes<T>};
    return {far_ + (place == Block::Place::far_right) * kBlockRows * kFarPitch, kFarPitch, 0};
  }

 private:
  int64_t column(int64_t m, int64_t j) const { return packed_column(block_, columns_, m, j); }

  T *t_, *far_;
  const Block& block_;
  const BandColumns<C>& columns_;
  const Elem* qv_;
  int64_t ldq_, depth_, start_ = 0, end_ = 0;  // [start_, end_): columns present
};

// dT, the gradient of a block's band, while keys still add to it: a stretch of columns that slides with the
// keys. A column is multiplied once, when no later key adds to it.
template <class C, int kBlockRows, int kChunkKeys>
class BandGradient {
 public:
  using T = typename C::Acc;
  static constexpr int kWidth = kPanel<C>;
  // Columns are multiplied in multiples of this.
  static constexpr int kStep = kTiled<C> ? kWidth : C::per_elem * C::whole;
  static constexpr int64_t kColumns = (kChunkKeys + kBlockRows + 2 * kWidth + 31) / 32 * 32;
  // Of float32 whole cache lines, an odd number of them.
  static constexpr int64_t kPitch = kColumns | 16;
  static constexpr int64_t kElements = kBlockRows * kPitch;

  BandGradient(T* memory, const Block& block, const BandColumns<C>& columns)
      : t_(memory), block_(block), columns_(columns) {}

  void clear() { begun_ = false, start_ = end_ = 0; }

  // Makes room for the tiles of these keys, with zeros beside what their rows will get; keys come in growing
  // order.
  void advance(Range keys) {
    const bool begins = !begun_;
    if (begins) begun_ = true, start_ = floor_to(column(block_.rows - 1, keys.lo), kStep);
    end_ = block_.band_end(keys.hi) - columns_.first;
    for (int m = 0; m < block_.rows; ++m) {
      T* row = t_ + m * kPitch;
      const int64_t from = column(m, keys.lo) - start_, to = from + keys.size();
      if (begins) zero(row, from);
      zero(row + to, max(round_up(end_ - start_, kStep) - to, 0));
    }
  }

  // Where the tile that starts at key lo is stored, at row pitch kPitch - 1.
  T* tile(int64_t lo) const { return t_ + column(0, lo) - start_; }

  // The packed columns to which no key from `next` on adds, the first ones of data().
  Range complete(int64_t next) const {
    if (!begun_) return {0, 0};
    const int64_t first_open = floor_to(column(block_.rows - 1, next) - start_, kStep);
    return {start_, start_ + max(0, min(end_ - start_, first_open))};
  }
  // All of them, where no key follows.
  Range rest() const { return {start_, end_}; }

  // [rows][kColumns] at row pitch kPitch, zeros up to the next multiple of kStep.
  T* data() const { return t_; }

  // Moves what is behind the first `count` columns to the front.
  void drop(int64_t count) {
    const int64_t left = end_ - start_ - count;
    for (int m = 0; m < block_.rows; ++m) {
      T* row = t_ + m * kPitch;
      memmove(row, row + count, static_cast<size_t>(left) * sizeof(T));
      zero(row + left, round_up(left, kStep) - left);  // the next chunk may lie outside of the band
    }
    start_ += count;
  }

 private:
  int64_t column(int64_t m, int64_t j) const { return packed_column(block_, columns_, m, j); }

  T* t_;
  const Block& block_;
  const BandColumns<C>& columns_;
  bool begun_ = false;
  int64_t start_ = 0, end_ = 0;  // [start_, end_): columns present
};

}  // namespace txl::TXL_LEVEL

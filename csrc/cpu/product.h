// Matrix products on register tiles, and the packing of their operands.
//
//   acc[m][n] += sum_k A(m, k) * B(k, n)
//
// A is read by broadcasts, from rows (element (m, k) at a[m * lda + k]) or from columns (a[k * lda + m]); B
// is read as rows of whole vectors. k counts depth elements, each of Compute::per_elem values.
#pragma once

#include <type_traits>
#include <utility>

#include "memory.h"
#include "tiles.h"
#include "util.h"

namespace txl::TXL_LEVEL {

enum class A { rows, columns };

constexpr int kLineBytes = 64;  // of the cache

// Steps of the depth that are written out one behind another: where a step is short, the loop itself and
// fetching would take a good part of it.
constexpr int kSteps = kRows * kVectors >= 24 ? 1 : 4;

// A pitch that is known when this is compiled, as a type where vectors are short: then one register addresses
// all of A.
template <int N>
constexpr auto known_pitch() {
  if constexpr (kLong)
    return int64_t{N};
  else
    return Size<N>{};
}

// The vectors [kFrom, kTo) of acc; the others stay as they are. ahead: depth / kSteps cache lines to bring
// near meanwhile, or null. Pitch: int64_t or known_pitch's.
template <class C, A layout, int kFrom, int kTo, int kM, int kN, class Pitch>
TXL_INLINE void multiply(Vec<typename C::Acc> (&acc)[kM][kN], const typename C::Elem* a, Pitch lda,
                         const typename C::Elem* b, int64_t ldb, int64_t depth, const char* ahead = nullptr) {
  using Elem = typename C::Elem;
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    Vec<Elem> row[kTo - kFrom];
    TXL_UNROLL
    for (int n = kFrom; n < kTo; ++n) row[n - kFrom] = load(b + k * ldb + n * kLanes<Elem>);
    TXL_UNROLL
    for (int m = 0; m < kM; ++m) {
      const Vec<Elem> x = splat(layout == A::rows ? a[m * lda + k] : a[k * lda + m]);
      TXL_UNROLL
      for (int n = kFrom; n < kTo; ++n) acc[m][n] = C::step(acc[m][n], x, row[n - kFrom]);
    }
  };
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    if (ahead) __builtin_prefetch(ahead + k / kSteps * kLineBytes, 0, 2);
    TXL_UNROLL
    for (int e = 0; e < kSteps; ++e) step(k + e);
  }
  if constexpr (kSteps > 1)
    for (; k < depth; ++k) step(k);
}

// A product asks needed(row, count) what a group of rows of its result needs, and may leave out the rest.
// Here: all of it.
struct All {
  TXL_INLINE Range operator()(int64_t, int64_t) const { return {0, INT64_MAX}; }
};

// Whether products are made of whole tiles: then rows of A and of the result exist up to the next multiple of
// kTile, whatever they hold.
template <class C>
constexpr bool kTiled = C::whole > 1;

template <class C>
TXL_INLINE int64_t depth_of(int64_t values) {
  return round_up((values + C::per_elem - 1) / C::per_elem, C::whole);
}

// Between rows of A of that depth: an odd number of cache lines for tiles of parts, or the rows of a tile
// share few sets of the first cache.
template <class C>
constexpr int64_t a_pitch(int64_t depth) {
  return C::parts == 1 ? depth : (C::parts * depth / C::whole | 1) * C::whole;
}

// C[rows, columns] += A B, the columns padded to whole vectors; c must have that padding.
template <class C, A layout, int kM, int kN, class Pitch>
__attribute__((noinline)) static void add_tile(const typename C::Elem* a, Pitch lda,
                                               const typename C::Elem* b, int64_t ldb, int64_t depth,
                                               typename C::Acc* c, int64_t ldc) {
  using T = typename C::Acc;
  Vec<T> acc[kM][kN] = {};
  multiply<C, layout, 0, kN>(acc, a, lda, b, ldb, depth);
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) {
    T* p = c + m * ldc + n * kLanes<T>;
    store(p, load(p) + acc[m][n]);
  }
}

// needed: the stretch of the depth, in values, outside of which A is zero in all of these rows; products made
// of tiles do not ask. ahead: what tiles of parts bring near meanwhile, as much of it as b is long; or null.
template <class C, A layout, class Pitch, class Needed = All>
TXL_INLINE void add_product(int64_t rows, int64_t columns, int64_t depth, const typename C::Elem* a,
                            Pitch lda, const typename C::Elem* b, int64_t ldb, typename C::Acc* c,
                            int64_t ldc, [[maybe_unused]] Needed needed = {},
                            [[maybe_unused]] const typename C::Elem* ahead = nullptr) {
  using T = typename C::Acc;
  if constexpr (kTiled<C>) {
    static_assert(layout == A::rows, "tiles are read from rows");
    tile_product<C::parts, true>(rows, columns, depth, a, lda, b, ldb, c, ldc, ahead);
  } else {
    in_groups<kVectors>(columns / kLanes<T>, [&](int64_t n0, auto kn) {
      const int64_t column = n0 * kLanes<T>;
      in_groups<kRows>(rows, [&](int64_t m0, auto km) {
        const Range used = needed(m0, km);
        const Range k = {max(used.lo, 0) / C::per_elem,
                         (min(used.hi, depth * C::per_elem) + C::per_elem - 1) / C::per_elem};
        if (k.empty()) return;
        add_tile<C, layout, decltype(km)::value, decltype(kn)::value>(
            a + (layout == A::rows ? m0 * lda + k.lo : m0 + k.lo * lda), lda, b + k.lo * ldb + column, ldb,
            k.size(), c + m0 * ldc + column, ldc);
      });
    });
  }
}

// Panels: kPanel rows of a matrix, transposed, so that the depth runs down and the rows are the lanes:
// [depth][kPanelPitch].
template <class C>
constexpr int kPanel = kVectors * kLanes<typename C::Acc>;
template <class C>
constexpr int kPanelPitch = C::parts * kPanel<C>;

template <typename T, int kM, int kN>
TXL_INLINE void store_tile(T* out, int64_t pitch, const Vec<T> (&acc)[kM][kN]) {
  TXL_UNROLL
  for (int m = 0; m < kM; ++m) TXL_UNROLL
  for (int n = 0; n < kN; ++n) store(out + m * pitch + n * kLanes<T>, acc[m][n]);
}

// Where the sums of a product start: row m, vector n at data + m * row_step + n * vector_step; null: at zero.
template <typename T>
struct Start {
  const T* data = nullptr;
  int64_t row_step = 0, vector_step = 0;
};

// Stores a panel's product.
template <typename T>
struct Store {
  T* out;
  int64_t pitch;

  template <int kM, int kN>
  TXL_INLINE void operator()(Vec<T> (&acc)[kM][kN], int64_t m) const {
    store_tile<T>(out + m * pitch, pitch, acc);
  }
};

// ahead: what is brought near meanwhile, a line every kSteps; or null.
template <class C, int kM, int kFrom, int kTo, class Pitch, class F>
__attribute__((noinline)) static void panel_tile(const typename C::Elem* a, Pitch lda, int64_t depth,
                                                 const typename C::Elem* panel, const char* ahead,
                                                 const Start<typename C::Acc>& start, int64_t m0, F finish) {
  using T = typename C::Acc;
  Vec<T> acc[kM][kVectors] = {};
  multiply<C, A::rows, kFrom, kTo>(acc, a, lda, panel, kPanel<C>, depth, ahead);
  // Added last: products need not wait for it.
  if (start.data) {
    TXL_UNROLL
    for (int m = 0; m < kM; ++m) TXL_UNROLL
    for (int n = 0; n < kVectors; ++n)
      acc[m][n] += load(start.data + m * start.row_step + n * start.vector_step);
  }
  finish(acc, m0);
}

// The steps of the depth after which a sum starts anew, to be added to what it was: about 64. The longer a
// chain of additions, the larger what is added to, and the more is lost at every step: at D 256 twice as
// much.
TXL_INLINE int64_t piece_of(int64_t depth) {
  const int64_t pieces = max((depth + 32) / 64, 1);
  return round_up((depth + pieces - 1) / pieces, kSteps);
}

// Whether a panel's product is stored before anything is made of it: then the next rows' products need not
// wait for that.
template <class C>
constexpr bool kApart = kTiled<C> || !kLong;

// finish(acc, m) with start + A panel, some rows at a time: acc[kM][kVectors] are those from m on.
// tile: [rows][kPanel], used where kApart. What tiles store starts at zero. needed: the columns that are
// used; others may lack A panel. Products made of tiles do not ask.
template <class C, class Pitch, class Needed, class F>
TXL_INLINE void panel_product(int64_t rows, const typename C::Elem* a, Pitch lda, int64_t depth,
                              const typename C::Elem* panel, const Start<typename C::Acc>& start,
                              typename C::Acc* tile, [[maybe_unused]] Needed needed, F finish) {
  using T = typename C::Acc;
  if constexpr (kApart<C> && !std::is_same_v<F, Store<T>>) {
    panel_product<C>(rows, a, lda, depth, panel, start, nullptr, needed, Store<T>{tile, kPanel<C>});
    for (int64_t m = 0; m < rows; ++m) {
      Vec<T> acc[1][kVectors];
      TXL_UNROLL
      for (int n = 0; n < kVectors; ++n) {
        acc[0][n] = load(tile + m * kPanel<C> + n * kLanes<T>);
        if (kTiled<C> && start.data)
          acc[0][n] += load(start.data + m * start.row_step + n * start.vector_step);
      }
      finish(acc, m);
    }
  } else if constexpr (kTiled<C>) {
    tile_product<C::parts, false>(rows, kPanel<C>, depth, a, lda, panel, kPanelPitch<C>, finish.out,
                                  finish.pitch, panel + depth * kPanelPitch<C>);
  } else {
    const int64_t piece = piece_of(depth);
    // The first groups of rows bring the panel behind this one, each some of it: the next to be used, mostly.
    const auto *next = reinterpret_cast<const char*>(panel + kPanel<C> * depth),
               *end = next + kPanel<C> * depth * static_cast<int64_t>(sizeof(*panel));
    in_groups<kRows>(rows, [&](int64_t m, auto km) {
      constexpr int kM = decltype(km)::value;
      const char* const ahead = next + m / kM * (depth / kSteps) * kLineBytes;
      const typename C::Elem* row = a + m * lda;
      Start<T> from = start;
      if (start.data) from.data += m * start.row_step;
      T sums[kM * kPanel<C>];
      const auto multiplied = [&](auto first, auto last, int64_t steps) {
        constexpr int kFrom = decltype(first)::value, kTo = decltype(last)::value;
        const auto add_piece = [&](int64_t k, int64_t count, int64_t m0, auto then) {
          const char* const lines = ahead + k / kSteps * kLineBytes;
          panel_tile<C, kM, kFrom, kTo>(row + k, lda, count, panel + k * kPanel<C>,
                                        lines < end ? lines : nullptr, from, m0, then);
        };
        int64_t k = 0;
        for (; steps - k > piece; k += piece) {
          add_piece(k, piece, 0, Store<T>{sums, kPanel<C>});
          from = {sums, kPanel<C>, kLanes<T>};
        }
        add_piece(k, steps - k, m, finish);
      };
      // A group needs both halves of the panel, one, or none.
      constexpr int kHalf = kVectors / 2, kHalfColumns = kHalf * kLanes<T>;
      const Range columns = needed(m, kM);
      const bool left = columns.lo < kHalfColumns && columns.hi > 0;
      const bool right = columns.lo < kPanel<C> && columns.hi > kHalfColumns;
      if (left == right)
        multiplied(Size<0>{}, Size<kVectors>{}, left ? depth : 0);
      else if (left)
        multiplied(Size<0>{}, Size<kHalf>{}, depth);
      else
        multiplied(Size<kHalf>{}, Size<kVectors>{}, depth);
    });
  }
}

template <int kStep, class V, size_t... I>
TXL_INLINE void exchange(V& a, V& b, std::index_sequence<I...>) {
  constexpr int kW = sizeof...(I);
  const V lo = shuffled<((I & kStep) ? kW + I - kStep : I)...>(a, b);
  const V hi = shuffled<((I & kStep) ? kW + I : I + kStep)...>(a, b);
  a = lo;
  b = hi;
}

// Transposes a square of kLanes x kLanes in registers, by halves.
template <class E, int kStep = kLanes<E> / 2>
TXL_INLINE void transpose(Vec<E> (&v)[kLanes<E>]) {
  TXL_UNROLL
  for (int i = 0; i < kLanes<E>; ++i)
    if (!(i & kStep)) exchange<kStep>(v[i], v[i + kStep], std::make_index_sequence<kLanes<E>>{});
  if constexpr (kStep > 1) transpose<E, kStep / 2>(v);
}

// Lane i: the sum of v[i]'s lanes. A transposition of which only the sums are kept.
template <class T, int kStep = kLanes<T> / 2>
TXL_INLINE Vec<T> lane_sums(Vec<T> (&v)[kLanes<T>]) {
  TXL_UNROLL
  for (int i = 0; i < kStep; ++i) {
    exchange<kStep>(v[i], v[i + kStep], std::make_index_sequence<kLanes<T>>{});
    v[i] += v[i + kStep];
  }
  if constexpr (kStep > 1) {
    return lane_sums<T, kStep / 2>(v);
  } else {
    return v[0];
  }
}

// A vector of a stored row of which n values are left, zeros behind them.
template <class S>
TXL_INLINE auto load_left(const S* p, int64_t n) {
  using V = decltype(load_as_float(p));
  constexpr int W = kLanes<decltype(to_float(S{}))>;
  return n >= W ? load_as_float(p) : n > 0 ? load_some(p, static_cast<int>(n)) : V{};
}

// One panel from kPanel row pointers (null: a row of zeros).
template <class C, class S>
static void pack_panel(const S* const (&rows)[kPanel<C>], int64_t D, typename C::Elem* panel) {
  using E = typename C::Elem;
  using T = typename C::Acc;
  constexpr int W = kLanes<E>;
  const int64_t depth = depth_of<C>(D);
  for (int x = 0; x < kPanel<C>; x += W)
    for (int64_t k = 0; k < depth; k += W) {
      const int64_t n = min(W, depth - k), d = k * C::per_elem;
      // The next W rows, while these are turned. They are longer than a line: a stream each for the machine's
      // own prefetching, which are too many.
      if (kLong && x + W < kPanel<C>)
        for (int i = 0; i < W; ++i)
          if (rows[x + W + i]) __builtin_prefetch(rows[x + W + i] + d, 0, 3);
      E* out = panel + k * kPanelPitch<C> + x;
      if constexpr (C::per_elem > 1 && std::is_same_v<S, bf16>) {  // memory holds elements already
        const int64_t left = min(W * C::per_elem, D - d);
        Vec<E> v[W] = {};
        for (int i = 0; i < W; ++i) {
          E lane[W] = {};
          if (rows[x + i])
            memcpy(lane, rows[x + i] + d,
                   left == W * C::per_elem ? sizeof(lane) : static_cast<size_t>(left) * sizeof(S));
          v[i] = load(lane);
        }
        transpose<E>(v);
        for (int i = 0; i < n; ++i) store(out + i * kPanelPitch<C>, v[i]);
      } else {
        Vec<T> v[C::per_elem][W];
        for (int e = 0; e < C::per_elem; ++e) {
          TXL_UNROLL
          for (int i = 0; i < W; ++i)
            v[e][i] = rows[x + i] ? load_left(rows[x + i] + d + e * W, D - d - e * W) : Vec<T>{};
          transpose<T>(v[e]);
        }
        for (int i = 0; i < n; ++i) {
          Vec<T> column[C::per_elem];
          for (int e = 0; e < C::per_elem; ++e) column[e] = v[e][i];
          store_parts(out + i * kPanelPitch<C>, kPanel<C>, C::across(column));
        }
      }
    }
}

// Rows of depth elements, each from `depth` stored rows, [parts][columns] with zeros past D: the B operand of
// a product whose depth runs over rows. row(i): row i, null for zeros; `count` of them, whole elements. If
// values are not finite, `poison` becomes NaN; kFinite: and they zeros.
template <class C, bool kFinite, class F>
static void pack_rows(int64_t count, F row, int64_t D, int64_t columns, typename C::Elem* out,
                      Vec<typename C::Acc>& poison) {
  using T = typename C::Acc;
  using S = std::remove_const_t<std::remove_pointer_t<decltype(row(0))>>;
  constexpr int W = kLanes<T>;
  for (int64_t n = 0; n < count / C::per_elem; ++n, out += C::parts * columns) {
    const S* rows[C::per_elem];
    for (int e = 0; e < C::per_elem; ++e) rows[e] = row(C::value(n, e));
    for (int64_t d = 0; d < columns; d += W) {
      Vec<T> x[C::per_elem];
      for (int e = 0; e < C::per_elem; ++e) {
        x[e] = rows[e] ? load_left(rows[e] + d, D - d) : Vec<T>{};
        const Vec<T> none = x[e] - x[e];
        poison += none;
        if constexpr (kFinite) x[e] = none == Vec<T>{} ? x[e] : Vec<T>{};
      }
      if constexpr (C::per_elem > 1 && std::is_same_v<S, bf16>)
        store(out + d, leading_pairs(x[0], x[1]));  // nothing is rounded
      else
        store_parts(out + d, columns, C::across(x));
    }
  }
}

// Elements of a matrix of values, where they are not values: those of its rows (columns: a multiple of
// `depth` vectors is written), or of `depth` rows ([rows / depth][columns], rows of whole elements, columns
// rounded up to a vector).
template <class C>
static void pack_along(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                       int64_t out_pitch) {
  constexpr int W = kLanes<float>;
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t n = 0; n < columns; n += 2 * W)
      store_parts(out + m * out_pitch + n / 2, part_step<C::parts>(out_pitch),
                  C::along({load(x + m * pitch + n), load(x + m * pitch + n + W)}));
}
template <class C>
static void pack_across(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                        int64_t out_pitch) {
  for (int64_t m = 0; m < rows; m += 2)
    for (int64_t n = 0; n < columns; n += kLanes<float>)
      store_parts(out + m / 2 * out_pitch + n, part_step<C::parts>(out_pitch),
                  C::across({load(x + m * pitch + n), load(x + (m + 1) * pitch + n)}));
}

// The same elements as pack_across, turned: [columns][rows / 2]; rows and columns of whole tiles.
template <class C>
static void pack_turned(const float* x, int64_t pitch, int64_t rows, int64_t columns, uint32_t* out,
                        int64_t out_pitch) {
  constexpr int W = kLanes<float>;
  for (int64_t m = 0; m < rows; m += 2 * W)
    for (int64_t n = 0; n < columns; n += W) {
      Vec<uint32_t> v[C::parts][W];
      TXL_UNROLL
      for (int i = 0; i < W; ++i) {
        const auto pairs =
            C::across({load(x + (m + 2 * i) * pitch + n), load(x + (m + 2 * i + 1) * pitch + n)});
        for (int part = 0; part < C::parts; ++part) v[part][i] = pairs.part[part];
      }
      for (int part = 0; part < C::parts; ++part) {
        transpose<uint32_t>(v[part]);
        uint32_t* turned = out + n * out_pitch + part * part_step<C::parts>(out_pitch) + m / 2;
        TXL_UNROLL
        for (int i = 0; i < W; ++i) store(turned + i * out_pitch, v[part][i]);
      }
    }
}

// A fixed number of small records. (std::vector would do, but its functions are shared between the objects of
// all levels.)
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : data_(new T[static_cast<size_t>(size)]()), size_(size) {}
  ~Array() { delete[] data_; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  int64_t size() const { return size_; }

 private:
  T* data_;
  int64_t size_;
};

// A block of memory for one call, carved into arrays that start on cache lines.
class Arena {
 public:
  explicit Arena(size_t bytes) : memory_(bytes), next_(memory_.data) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return p;
  }
  template <typename T>
  static size_t bytes(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  }

  // A thread's record of arrays, listed once: `list(record, visit)` calls visit(pointer, count) for each of
  // its arrays. Far from other records: what a core stores row by row, at a stride of kilobytes, makes it
  // fetch that many rows more, for itself alone, and a neighbour's arrays would be taken from their thread.
  template <class Record, class List>
  static size_t record_bytes(List list) {
    Record record{};
    size_t total = kApartBytes;
    list(record,
         [&](auto*& p, int64_t count) { total += bytes<std::remove_reference_t<decltype(*p)>>(count); });
    return total;
  }
  template <class Record, class List>
  void take_record(Record& record, List list) {
    next_ += kApartBytes;
    list(record, [&](auto*& p, int64_t count) { p = take<std::remove_reference_t<decltype(*p)>>(count); });
  }

 private:
  static constexpr size_t kApartBytes = 128 << 10;

  Memory memory_;
  char* next_;
};

}  // namespace txl::TXL_LEVEL

// Matrix products on register tiles.
//
//   acc[m][n] += sum_k A(m, k) * B(k, n)
//
// A is read by broadcasts, from rows (element (m, k) at a[m * lda + k]) or from columns (a[k * lda + m]); B
// is read as rows of whole vectors. k counts depth elements, each of Compute::per_elem values.
#pragma once

#include <type_traits>

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
  return round_up(ceil_div(values, C::per_elem), C::whole);
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
                         ceil_div(min(used.hi, depth * C::per_elem), C::per_elem)};
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
template <class C, int kM, int kFrom, int kTo, class F>
__attribute__((noinline)) static void panel_tile(const typename C::Elem* a, int64_t lda, int64_t depth,
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
  return round_up(ceil_div(depth, pieces), kSteps);
}

// Whether a panel's product is stored before anything is made of it: then the next rows' products need not
// wait for that.
template <class C>
constexpr bool kStoreFirst = kTiled<C> || !kLong;

// finish(acc, m) with start + A panel, some rows at a time: acc[kM][kVectors] are those from m on.
// tile: [rows][kPanel], used where kStoreFirst. What tiles store starts at zero. needed: the columns that are
// used; others may lack A panel. Products made of tiles do not ask.
template <class C, class Needed, class F>
TXL_INLINE void panel_product(int64_t rows, const typename C::Elem* a, int64_t lda, int64_t depth,
                              const typename C::Elem* panel, const Start<typename C::Acc>& start,
                              typename C::Acc* tile, [[maybe_unused]] Needed needed, F finish) {
  using T = typename C::Acc;
  if constexpr (kStoreFirst<C> && !std::is_same_v<F, Store<T>>) {
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

}  // namespace txl::TXL_LEVEL

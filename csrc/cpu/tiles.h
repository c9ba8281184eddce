// AMX: eight registers of 16 rows of 64 bytes, and products of pairs of bfloat16 on them.
//
//   C[16][16] += A[16][16 pairs] B[16 pairs][16]      float32 += pairs . pairs
//
// A register is read from rows that lie a pitch apart, any pitch: so A and B come from operands packed as for
// the vector kernels. C could come from the band with its rows moved, but rows across two cache lines take
// five times as long; the vectors that read the product do it while they wait.
#pragma once

#include <type_traits>

#include "vec.h"

namespace txl::TXL_LEVEL {

constexpr int kTile = 16;  // rows; columns; pairs of the depth

// From one part of a row to the next: whole tiles; a row may have some more behind its last part.
template <int kParts>
constexpr int64_t part_step(int64_t pitch) {
  return pitch / kParts / kTile * kTile;
}

// c = A B, or c += A B: any number of rows, columns of whole vectors, the depth of whole tiles. Rows are read
// and written up to the next multiple of kTile: a and c must have them, whatever they hold. A row of a and of
// b holds kParts parts of its elements one behind another. `ahead`: the operand that is used next, as long as
// b, or null; it is brought near meanwhile.
template <int kParts, bool kAdd>
static void tile_product(int64_t rows, int64_t columns, int64_t depth, const uint32_t* a, int64_t lda,
                         const uint32_t* b, int64_t ldb, float* c, int64_t ldc, const uint32_t* ahead);

// TXL_TILES is the level's own, unlike the compiler's macro (kernels.cpp).
#if !defined(TXL_TILES) || defined(TXL_SANITIZED)
struct TileScope {
  TileScope() {}  // not trivial: an object that is not used otherwise
};
#endif

#if defined(TXL_TILES)

#if defined(TXL_SANITIZED)

// The registers in memory, where the sanitizers see what is read and written, and for CPUs that have none.
inline thread_local uint32_t tile_register[8][kTile][kTile];

template <int t>
void tile_zero() {
  memset(tile_register[t], 0, sizeof(tile_register[t]));
}
template <int t>
void tile_load(const void* p, int64_t pitch) {
  for (int m = 0; m < kTile; ++m) memcpy(tile_register[t][m], static_cast<const char*>(p) + m * pitch, 64);
}
template <int t>
void tile_store(void* p, int64_t pitch) {
  for (int m = 0; m < kTile; ++m) memcpy(static_cast<char*>(p) + m * pitch, tile_register[t][m], 64);
}
// Rounds as TDPBF16PS does ("operation" in Intel's manual): first and second halves of pairs are summed
// apart, from zero.
template <int c, int a, int b>
void tile_multiply() {
  for (int m = 0; m < kTile; ++m) {
    Vec<float> first = {}, second = {};
    for (int k = 0; k < kTile; ++k) {
      const Vec<uint32_t> x = splat(tile_register[a][m][k]), y = load(tile_register[b][k]);
      first += first_of(x) * first_of(y), second += second_of(x) * second_of(y);
    }
    uint32_t* const sums = tile_register[c][m];
    store(sums, bits<Vec<uint32_t>>(bits<Vec<float>>(load(sums)) + (first + second)));
  }
}

#else

// A thread's registers are whole tiles while one lives.
struct TileScope {
  TileScope() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile};
    } config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~TileScope() { asm volatile("tilerelease"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

// The compiler does not use these registers and knows nothing of them.
template <int t>
TXL_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int t>
TXL_INLINE void tile_load(const void* p, int64_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(pitch), "i"(t) : "memory");
}
template <int t>
TXL_INLINE void tile_store(void* p, int64_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(pitch), "i"(t) : "memory");
}
template <int c, int a, int b>
TXL_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

#endif

// Products of parts in tile_block, for each kTile of the depth.
template <int kParts>
constexpr int kTileSteps = kParts == 3 ? 6 : 1;

// kM by kN registers of c. Brings `lines` cache lines near at each step.
template <int kParts, bool kAdd, int kM, int kN>
TXL_INLINE void tile_block(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t depth,
                           float* c, int64_t ldc, const uint32_t* ahead, int64_t lines) {
  // Registers 0 to 3 are c, 4 and 5 a, 6 and 7 b.
  const auto each = [](auto f) {
    f(std::integral_constant<int, 0>{}, std::integral_constant<int, 0>{});
    if constexpr (kN > 1) f(std::integral_constant<int, 0>{}, std::integral_constant<int, 1>{});
    if constexpr (kM > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
    if constexpr (kM > 1 && kN > 1) f(std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
  };
  each([&](auto m, auto n) {
    if constexpr (kAdd)
      tile_load<2 * m + n>(c + m * kTile * ldc + n * kTile, ldc * 4);
    else
      tile_zero<2 * m + n>();
  });
  for (int64_t k = 0; k < depth; k += kTile) {
    const auto load_a = [&](int part) {
      const uint32_t* p = a + part * part_step<kParts>(lda) + k;
      tile_load<4>(p, lda * 4);
      if constexpr (kM > 1) tile_load<5>(p + kTile * lda, lda * 4);
    };
    const auto load_b = [&](int part) {
      const uint32_t* p = b + k * ldb + part * part_step<kParts>(ldb);
      tile_load<6>(p, ldb * 4);
      if constexpr (kN > 1) tile_load<7>(p + kTile, ldb * 4);
    };
    const auto add = [&] {
      each([](auto m, auto n) { tile_multiply<2 * m + n, 4 + m, 6 + n>(); });
      for (int64_t i = 0; i < lines; ++i, ahead += kTile) __builtin_prefetch(ahead, 0, 2);
    };
    if constexpr (kParts == 3) {  // small ones first, and one side loaded each time but for the last
      load_a(2), load_b(0), add();
      load_a(1), add();
      load_b(1), add();
      load_a(0), add();
      load_b(2), add();
      load_b(0), add();
    } else {
      load_a(0), load_b(0), add();
    }
  }
  each([&](auto m, auto n) { tile_store<2 * m + n>(c + m * kTile * ldc + n * kTile, ldc * 4); });
}

template <int kParts, bool kAdd>
static void tile_product(int64_t rows, int64_t columns, int64_t depth, const uint32_t* a, int64_t lda,
                         const uint32_t* b, int64_t ldb, float* c, int64_t ldc, const uint32_t* ahead) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  constexpr int kSide = 2 * kTile;
  // Fetched a little at every step: more at once, and loads would wait. What has one part comes in time by
  // itself.
  const int64_t blocks = (columns + kSide - 1) / kSide * ((rows + kSide - 1) / kSide);
  const int64_t steps = blocks * (depth / kTile) * kTileSteps<kParts>;
  const int64_t lines = kParts > 1 && ahead ? (depth * ldb / kTile + steps - 1) / steps : 0;
  for (int64_t m = 0; m < rows; m += kSide)
    for (int64_t n = 0; n < columns; n += kSide) {
      const auto block = [&](auto km, auto kn) __attribute__((always_inline)) {
        tile_block<kParts, kAdd, decltype(km)::value, decltype(kn)::value>(
            a + m * lda, lda, b + n, ldb, depth, c + m * ldc + n, ldc, ahead, lines);
        ahead += lines * kTile * (depth / kTile) * kTileSteps<kParts>;
      };
      const bool two_rows = rows - m > kTile, two_columns = columns - n > kTile;
      if (two_rows && two_columns)
        block(Two{}, Two{});
      else if (two_rows)
        block(Two{}, One{});
      else if (two_columns)
        block(One{}, Two{});
      else
        block(One{}, One{});
    }
}

#endif

}  // namespace txl::TXL_LEVEL

// What the kernels share: which tiles of keys a block needs, copies of rows into shared memory, fragments of
// a tile, dropout. docs/algorithm.md draws it; the names are those of txl_kernels/triton/tiles.py.
//
// A tile is BM queries from i0 on by BN keys from j0 on, or rows of r from c0 on.
#pragma once

#include "../philox.h"
#include "../rel_attn.h"
#include "device.h"

#if defined(__CUDACC__)
#define TXL_NO_UNROLL_GPU _Pragma("unroll 1")
#else
#define TXL_NO_UNROLL_GPU
#endif

namespace txl::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

TXL_DEVICE float infinity() { return bits<float>(0x7f800000u); }
TXL_DEVICE float nan() { return bits<float>(0x7fffffffu); }

template <typename T>
TXL_HD T smaller(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
TXL_HD T larger(T a, T b) {
  return a < b ? b : a;
}

// x, as if it could be another one every time. What is made of it in a loop stays in the loop: else the
// compiler works out every address before, and has no registers for them all.
template <typename T>
TXL_DEVICE T opaque(T x) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// ---- Which tiles of keys a block of queries needs, and how ----
//
// far   every pair is seen, and every one of them uses the first row of r (or every one the last): one
// product
//       per query stands for the band.
// band  the rest; those from all_lo up to all_hi are seen by all queries, the others are masked.

struct KeyTiles {
  int begin, far_first, near, far_last, end_near, end;  // band, far (first row), band, far (last row), band
  int all_lo, all_hi;
};

template <int BM, int BN>
TXL_DEVICE KeyTiles key_tiles(const Problem& p, Range batch, int64_t i0) {
  const auto down = [](int64_t x) { return (x > 0 ? x : 0) / BN * BN; };
  const auto up = [](int64_t x) { return ((x > 0 ? x : 0) + BN - 1) / BN * BN; };
  const Range first = p.keys_of_query(batch, i0);
  const Range last = p.keys_of_query(batch, smaller(i0 + BM, p.L) - 1);
  const int64_t begin = down(first.lo), end = larger(begin, last.hi);
  const int64_t all_lo = smaller(larger(up(last.lo), begin), end);
  const int64_t all_hi = larger(smaller(down(first.hi), end), all_lo);
  // Key 0's rows of r: the highest is that of the block's first query, the lowest that of its last.
  const int64_t high = p.band(i0, 0), low = p.band(i0 + BM - 1, 0);
  const int64_t far_0 = larger(all_lo, smaller(down(-high), all_hi));  // keys below: rows below the first
  const int64_t far_1 = smaller(larger(far_0, smaller(up(p.N - low), end)), all_hi);
  KeyTiles t;
  t.begin = static_cast<int>(begin), t.end = static_cast<int>(end);
  t.all_lo = static_cast<int>(all_lo), t.all_hi = static_cast<int>(all_hi);
  t.far_first = t.all_lo, t.near = static_cast<int>(far_0);
  t.far_last = static_cast<int>(far_1), t.end_near = t.all_hi;
  return t;
}

// ---- Tiles in shared memory ----

// Rows of kHead 16-bit channels, 16 bytes of padding behind each: eight rows, read at the same place, lie in
// different banks.
template <int kHead>
struct Rows {
  static constexpr uint32_t kPitch = 2 * kHead + 16;
  static_assert(kPitch / 16 % 2 == 1, "an odd number of 16 bytes");

  uint32_t address;

  TXL_DEVICE uint32_t at(int row, int channel) const {
    return address + static_cast<uint32_t>(row) * kPitch + static_cast<uint32_t>(channel) * 2;
  }
};

// Rows of a tensor of one batch entry and head. wide: they begin at multiples of 16 bytes, D is one of 8.
template <typename E>
struct Source {
  const E* data;
  int64_t row;
  int D;
  bool wide;

  TXL_DEVICE Source(const View& view, int64_t b, int64_t h, const Problem& p)
      : data(view.at<const E>(b, h, 0)), row(view.row), D(static_cast<int>(p.D)) {
    wide = D % 8 == 0 && row % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

// Starts to copy `count` rows: row n is source's row(n), zeros where that is negative. The channels from D on
// are zeros too. All threads of the block take part.
template <int kHead, int kThreads, typename E, typename F>
TXL_DEVICE void copy_rows(Rows<kHead> to, int to_row, const Source<E>& source, int count, F row) {
  const int thread = opaque(thread_index());
  if (source.wide) {
    // A loop that can be unrolled, because every thread has as many pieces; if possible all of a column, so
    // that its addresses differ by constants.
    constexpr int kPieces = kHead / 8, kStep = kThreads % kPieces == 0 ? kThreads / kPieces : 0;
    const int first = thread / kPieces, column = thread % kPieces;
    TXL_UNROLL_GPU
    for (int start = 0; start < count * kPieces; start += kThreads) {
      const int place = start + thread;
      const int n = kStep ? first + start / kPieces : place / kPieces;
      const int channel = (kStep ? column : place % kPieces) * 8;
      if (count * kPieces % kThreads != 0 && n >= count) break;
      const int64_t from = row(n);
      const bool valid = from >= 0 && channel < source.D;
      copy_async_16(to.at(to_row + n, channel), source.data + (valid ? from * source.row + channel : 0),
                    valid);
    }
  } else {
    TXL_NO_UNROLL_GPU
    for (int place = thread; place < count * kHead; place += kThreads) {
      const int n = place / kHead, channel = place % kHead;
      const int64_t from = row(n);
      const bool valid = from >= 0 && channel < source.D;
      store_shared(to.at(to_row + n, channel),
                   valid ? load_global(source.data + from * source.row + channel) : E{});
    }
  }
}

// ---- Fragments ----

// The place in a group of 16 rows by 16 channels whose address this lane gives to load_matrix_x4.
struct Corner {
  int row, channel;
};
// A operand: rows 0-7, 8-15, then the same of channels 8-15.
TXL_DEVICE Corner corner_a() {
  const int l = opaque(lane());
  return {l % 16, l / 16 * 8};
}
// B operand from rows that are its columns: two n8 tiles, each with both halves of 16 channels.
TXL_DEVICE Corner corner_b() {
  const int l = opaque(lane());
  return {l % 8 + l / 16 * 8, l / 8 % 2 * 8};
}
// B operand from rows that are its rows, transposed on the way: two n8 tiles of 16 rows.
TXL_DEVICE Corner corner_b_trans() { return corner_a(); }

// An A operand, 16 by 16.
struct Fragment {
  uint32_t r[4];
};

// acc[n] += a rows^T for n8 tiles of rows, each pair from row_of(8 n) on, an odd one alone; a(d) has channels
// 16 d to 16 d + 15.
template <typename E, int kHead, int kTiles, typename A, typename F>
TXL_DEVICE void add_product(float (&acc)[kTiles][4], A a, Rows<kHead> rows, F row_of) {
  const Corner corner = corner_b();
  TXL_UNROLL_GPU
  for (int d = 0; d < kHead / 16; ++d) {
    const Fragment a_d = a(d);
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; n += 2) {
      const uint32_t address = rows.at(row_of(n * 8) + corner.row, 16 * d + corner.channel);
      if (n + 1 < kTiles) {
        uint32_t b[4];
        load_matrix_x4(b, address);
        mma<E>(acc[n], a_d.r, {b[0], b[1]});
        mma<E>(acc[n + 1], a_d.r, {b[2], b[3]});
      } else {
        uint32_t b[2];
        load_matrix_x2(b, address);
        mma<E>(acc[n], a_d.r, b);
      }
    }
  }
}

// ---- Dropout ----

// The four words that decide for query i and the keys with this call (csrc/philox.h).
TXL_DEVICE void philox(uint32_t (&word)[4], uint64_t seed, uint32_t call, int64_t b, int64_t h, int64_t i) {
  word[0] = call, word[1] = static_cast<uint32_t>(i);
  word[2] = static_cast<uint32_t>(h), word[3] = static_cast<uint32_t>(b);
  Philox::rounds(word, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                 [](uint32_t x, uint32_t y, uint32_t& low, uint32_t& high) {
                   const uint64_t product = static_cast<uint64_t>(x) * y;
                   low = static_cast<uint32_t>(product), high = static_cast<uint32_t>(product >> 32);
                 });
}

}  // namespace txl::cuda

// What the kernels share: masks, which tiles of keys a block needs, copies of rows into shared memory,
// fragments of a tile, dropout. docs/algorithm.md draws it; names as in txl_kernels/triton/tiles.py.
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
TXL_DEVICE float lowest() { return bits<float>(0xff7fffffu); }  // that is finite

template <typename T>
TXL_HD T smaller(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
TXL_HD T larger(T a, T b) {
  if constexpr (std::is_same_v<T, float>)
    return fmaxf(a, b);  // one instruction; of a number and NaN, the number
  else
    return a < b ? b : a;
}

TXL_HD int64_t div_up(int64_t x, int64_t n) { return (x + n - 1) / n; }

// x, as if it could be another one every time. What is made of it in a loop stays in the loop: else the
// compiler works out every address before, and has no registers for them all.
template <typename T>
TXL_DEVICE T opaque(T x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, float>)
    asm volatile("" : "+f"(x));
  else
    asm volatile("" : "+r"(x));
#endif
  return x;
}

// ---- Numbers of a problem ----

// What a problem's scale and dropout_p come to. By the host: GPUs are slow with numbers of 64 bits.
struct Scales {
  float sign;       // of q + u and q + v, which have a negative scale's
  float magnitude;  // what makes a gradient of a sum of dS with them
  float log2;       // exp2(score * log2). A normal number, never 0: a hidden key's score is -inf
  float dropout;    // of what it keeps: 1 / (1 - p)

  explicit Scales(const Problem& p)
      : sign(p.scale < 0 ? -1.0f : 1.0f),
        magnitude(static_cast<float>(p.scale < 0 ? -p.scale : p.scale)),
        log2(smaller(larger(magnitude * kLog2e, 1.17549435e-38f), 3.40282347e38f)),
        dropout(static_cast<float>(1 / (1 - p.dropout_p))) {}
};

// Multiples of BN, at least 0.
template <int BN>
TXL_DEVICE int64_t floor_to(int64_t x) {
  return larger<int64_t>(x, 0) / BN * BN;
}
template <int BN>
TXL_DEVICE int64_t ceil_to(int64_t x) {
  return div_up(larger<int64_t>(x, 0), BN) * BN;
}

// ---- Masks in 32 bits ----

// What a row of a tile is a copy of: a row of the tensor, or zeros.
struct RowOf {
  int n;
  bool exists;
};

// Problem's, of a batch entry's keys or a share of them.
struct Mask {
  int lo, hi, below, above, L;  // keys, their least distance to the query, and the one that is too much

  TXL_DEVICE Mask(const Problem& p, Range batch)
      : lo(static_cast<int>(batch.lo)), hi(static_cast<int>(batch.hi)), L(static_cast<int>(p.L)) {
    below = static_cast<int>(p.position(0) - p.left);
    above = static_cast<int>(p.position(0) + p.right + 1);
  }

  TXL_DEVICE bool has_key(int j) const { return j >= lo && j < hi; }
  TXL_DEVICE RowOf key(int j) const { return {j, has_key(j)}; }
  TXL_DEVICE RowOf query(int i) const { return {i, i < L}; }
  TXL_DEVICE bool has_keys(int j, int count) const { return j >= lo && j + count <= hi; }
  TXL_DEVICE bool sees(int i, int j) const { return i < L && has_key(j) && j - i >= below && j - i < above; }
};

// ---- Which tiles a block goes over, and how ----
//
// Of keys for a block of queries, of queries for one of keys, by where they begin, in this order:
//
// masked  before all_lo: some queries do not see some keys.
// far     before near: every pair uses the same row of r, the first or the last: one product per query is
//         the band.
// near    before near_end: the band is computed.
// far     before all_hi: the other end of r.
// masked  before end.
struct TileBounds {
  int begin, all_lo, near, near_end, all_hi, end;

  TXL_DEVICE bool is_hidden(int x) const { return (x < begin) | (x >= end); }
  TXL_DEVICE bool is_masked(int x) const { return (x < all_lo) | (x >= all_hi); }
  TXL_DEVICE bool is_far(int x) const {
    return ((x >= all_lo) & (x < near)) | ((x >= near_end) & (x < all_hi));  // without jumps
  }
  // Where, behind tile x that is not far, far ones begin, or nothing does.
  TXL_DEVICE int next_far(int x) const { return x < near ? all_lo : x < near_end ? near_end : end; }
};

template <int BM, int BN>
TXL_DEVICE TileBounds key_tiles(const Problem& p, Range batch, int64_t i0) {
  const Range first = p.keys_of_query(batch, i0);
  const Range last = p.keys_of_query(batch, smaller(i0 + BM, p.L) - 1);
  const int64_t begin = floor_to<BN>(first.lo), end = larger(begin, last.hi);
  const int64_t all_lo = smaller(larger(ceil_to<BN>(last.lo), begin), end);
  const int64_t all_hi = larger(smaller(floor_to<BN>(first.hi), end), all_lo);
  // Key 0's rows of r: the highest is that of the block's first query, the lowest that of its last.
  const int64_t high = p.band(i0, 0), low = p.band(i0 + BM - 1, 0);
  // Rows before the first below near, behind the last from near_end on.
  const int64_t near = larger(all_lo, smaller(floor_to<BN>(-high), all_hi));
  const int64_t near_end = smaller(larger(near, smaller(ceil_to<BN>(p.N - low), end)), all_hi);
  return {static_cast<int>(begin),    static_cast<int>(all_lo), static_cast<int>(near),
          static_cast<int>(near_end), static_cast<int>(all_hi), static_cast<int>(end)};
}

// ---- The grid ----

// `blocks` to a head, the longest first. Of as many heads as L2 has room for, all first blocks come before
// all second ones: neighbours share keys with what runs beside them, and short blocks end a launch.
struct Turn {
  int head, block;

  TXL_DEVICE Turn(int blocks, int heads, int together) {
    const int group = block_index() / (together * blocks), in_group = block_index() % (together * blocks);
    const int size = smaller(together, heads - group * together);
    block = in_group / size, head = group * together + in_group % size;
  }
};

// Heads whose keys and values take 24 MiB, about half of a large GPU's L2.
inline int heads_together(const Problem& p, int element_bytes) {
  return static_cast<int>(larger<int64_t>((24 << 20) / (2 * element_bytes * p.K * p.D), 1));
}

// ---- Elements ----

// Of 16 bytes.
template <typename E>
constexpr int kPiece = 16 / static_cast<int>(sizeof(E));
// Channels of one product of tensor cores.
template <typename E>
constexpr int kStep = 2 * kPiece<E>;

// What the bytes of a block follow from, its tiles and its registers: a row of kHead channels, in bytes.
template <typename E, int kHead>
constexpr int kRow = static_cast<int>(sizeof(E)) * kHead;

// Two neighbours, to an address that is a multiple of both.
template <typename E>
TXL_DEVICE void store_pair(uint32_t address, float x, float y) {
  if constexpr (is_half<E>)
    store_shared(address, pack<E>(x, y));
  else
    store_shared(address, float2{x, y});
}

// ---- Tiles in shared memory ----

// Where a block's begin: shared_base() is a multiple of 128, and a block has bytes for what that may lack.
template <uint32_t kAlignment>
TXL_DEVICE uint32_t aligned_base() {
  return (shared_base() + kAlignment - 1) / kAlignment * kAlignment;
}

// The place in a group of 16 rows by 32 bytes whose address this lane gives to load_matrix_x4: 8 by 8
// elements of 16 bits each are to it what 8 by 4 of float32 are to tensor cores.
struct Corner {
  int row, piece;  // the first or the second 16 bytes
};

// Rows of kHead channels, one behind the other, of which eight neighbours, read at the same place, lie in
// different banks: the pieces of 16 bytes have changed places. Of row n they are moved by n % 8 in each 128
// bytes, which are all banks. Where rows are an odd multiple of 64 bytes, neighbours begin in different
// halves of the banks, and pieces are moved by n % 8 / 2 in each 64 bytes. Padding would do, too, but 128
// bytes that are copied together would go to two lines of shared memory, one after the other.
template <typename E, int kChannels>
struct Rows {
  using Element = E;
  static constexpr int kHead = kChannels, kPeriod = 8;  // of rows, then pieces lie as before
  static constexpr uint32_t kRowBytes = kRow<E, kHead>, kSpan = kRowBytes % 128 == 0 ? 128 : 64;
  static_assert(kRowBytes % kSpan == 0, "rows of whole 64 bytes");

  uint32_t address;  // a multiple of 128

  TXL_DEVICE uint32_t at(int row, int channel) const {
    const uint32_t n = static_cast<uint32_t>(row), byte = static_cast<uint32_t>(channel) * sizeof(E);
    return address + n * kRowBytes + (byte ^ moved(n));
  }
  // The lane's of 16 rows from `row` on, a multiple of kPeriod, by 32 bytes from `channel` on, a multiple of
  // 32 bytes: what depends on the lane is the same for all rows, and for all channels kSpan bytes apart.
  TXL_DEVICE uint32_t corner(int row, int channel, Corner of_lane) const {
    const uint32_t n = static_cast<uint32_t>(of_lane.row), byte = static_cast<uint32_t>(channel) * sizeof(E);
    const uint32_t piece = static_cast<uint32_t>(of_lane.piece) * 16 ^ moved(n);
    return address + static_cast<uint32_t>(row) * kRowBytes + byte / kSpan * kSpan +
           (n * kRowBytes + (piece ^ byte % kSpan));
  }
  // The piece `rows` below the one at `place` from the tile's start on.
  TXL_DEVICE uint32_t below(uint32_t place, int rows) const {
    const uint32_t n = static_cast<uint32_t>(rows);
    return address + n * kRowBytes + (place ^ moved(n));
  }

 private:
  static TXL_DEVICE uint32_t moved(uint32_t n) { return (kSpan == 128 ? n % kPeriod : n % kPeriod / 2) * 16; }
};

// Rows of kColumns columns that are written as accumulators have them, or read so, and the other time moved,
// each row by one column more: a band, or its gradient. Of eight rows and eight columns each row's lie side
// by side, in banks that they share with no row, or, of float32, with one whose columns are at odd words when
// these are at even ones. So a warp meets no bank twice, moved or not.
template <typename E, int kColumns>
struct MovedRows {
  static_assert(kColumns % 8 == 0, "whole groups of columns");
  // From eight columns to the next, and from eight rows.
  static constexpr int kEight = 64 * static_cast<int>(sizeof(E)), kRowsBytes = kColumns / 8 * kEight;

  uint32_t address;  // a multiple of 128

  TXL_DEVICE uint32_t at(int row, int column) const {
    const uint32_t n = static_cast<uint32_t>(row), c = static_cast<uint32_t>(column);
    const uint32_t place = is_half<E> ? n % 8 : n % 8 ^ n % 8 / 4;
    return address + n / 8 * kRowsBytes + c / 8 * kEight + (8 * place + c % 8) * sizeof(E);
  }
};

// Rows as wgmma reads them: panels of kRows rows of 128 bytes, one behind the other; in row n the pieces of
// 16 bytes have changed places, by n % 8, so that eight rows lie in different banks here too.
template <typename E, int kChannels, int kRows>
struct Panels {
  using Element = E;
  static constexpr int kHead = kChannels, kPeriod = 8;
  static constexpr int kChannelsOfPanel = 128 / static_cast<int>(sizeof(E));
  static constexpr uint32_t kRowBytes = kRow<E, kHead>, kPanelBytes = kRows * 128;
  static_assert(kHead % kChannelsOfPanel == 0 && kRows % 8 == 0,
                "whole panels, of whole groups of eight rows");

  uint32_t address;  // a multiple of 1,024

  TXL_DEVICE uint32_t at(int row, int channel) const {
    const uint32_t n = static_cast<uint32_t>(row), c = static_cast<uint32_t>(channel);
    const uint32_t byte = c % kChannelsOfPanel * sizeof(E);
    return address + c / kChannelsOfPanel * kPanelBytes + n * 128 + (byte ^ n % 8 * 16);
  }
  // As of Rows.
  TXL_DEVICE uint32_t corner(int row, int channel, Corner of_lane) const {
    const uint32_t n = static_cast<uint32_t>(of_lane.row), c = static_cast<uint32_t>(channel);
    const uint32_t piece = (static_cast<uint32_t>(of_lane.piece) ^ n % 8) * 16;
    return address + static_cast<uint32_t>(row) * 128 + c / kChannelsOfPanel * kPanelBytes +
           (n * 128 + (piece ^ c % kChannelsOfPanel * sizeof(E)));
  }

  TXL_DEVICE uint32_t below(uint32_t place, int rows) const {
    const uint32_t n = static_cast<uint32_t>(rows);
    return address + n * 128 + (place ^ n % kPeriod * 16);
  }

  // For warpgroup_mma: channels kStep d to kStep (d + 1) - 1 of the rows from `row` on, a multiple of 8, each
  // a column of b or a row of a.
  TXL_DEVICE uint64_t columns(int d, int row = 0) const {
    constexpr int kSteps = kChannelsOfPanel / kStep<E>;
    return descriptor(static_cast<uint32_t>(d / kSteps) * kPanelBytes +
                      static_cast<uint32_t>(d % kSteps) * 32 + static_cast<uint32_t>(row) * 128);
  }
  // Of 16 rows from `row` on all channels, the rows of a transposed b.
  TXL_DEVICE uint64_t rows(int row) const { return descriptor(static_cast<uint32_t>(row) * 128); }

 private:
  // PTX ISA, "Matrix Descriptor Format": where it starts, from a panel to the next, from eight rows to the
  // next, all in 16 bytes; and the 128-byte swizzle. What differs among the descriptors of a tile is added
  // last: one addition each.
  TXL_DEVICE uint64_t descriptor(uint32_t offset) const {
    const uint32_t low = (kPanelBytes / 16) << 16 | (address & 0x3ffff) / 16;
    return uint64_t{1 << 30 | 1024 / 16} << 32 | (low + offset / 16);
  }
};

// Rows of a tensor of one batch entry and head.
template <typename E>
struct Source {
  const E* data;
  int64_t row;
  int D;

  // b and h as numbers without a sign: their products with strides of 64 bits are shorter.
  TXL_DEVICE Source(const View& view, int b, int h, const Problem& p)
      : data(view.at<const E>(static_cast<uint32_t>(b), static_cast<uint32_t>(h), 0)),
        row(view.row),
        D(static_cast<int>(p.D)) {}
};

// Whether none of `count` rows of r from c on is clamped.
TXL_DEVICE bool has_rows(const Problem& p, int c, int count) {
  return c >= 0 && c + count <= static_cast<int>(p.N);
}

// The largest power of 2 that is not above x, which is at least 1.
TXL_HD constexpr int power_of_2(int x) { return x < 2 ? 1 : 2 * power_of_2(x / 2); }

// Copies rows of tensors into tiles. A thread has pieces of 16 bytes, all of a column, of every tile those at
// the same places, so that their addresses differ by constants; where a row is 12 pieces, some threads have
// none. What does not depend on the tile is worked out once, unless long rows leave no registers for it
// (kHeld false): then anew for every tile.
template <int kThreads, typename Tile, bool kHeld = kRow<typename Tile::Element, Tile::kHead> <= 256>
struct Copier {
  using E = typename Tile::Element;
  static constexpr int kPieces = Tile::kHead / kPiece<E>;        // of a row
  static constexpr int kEvery = power_of_2(kThreads / kPieces);  // row that a thread has
  static_assert(kEvery % Tile::kPeriod == 0 || Tile::kPeriod % kEvery == 0, "no carry in Tile::below");
  static_assert(kThreads >= kPieces, "a thread for each piece of a row");

  // A tensor's batch entry and head, and where the thread's column begins.
  struct From {
    const View& view;
    int b, h;
    const char* column;
  };

  const Problem& p;
  int row, channel;  // of the thread's first piece
  uint32_t place;    // in bytes, from a tile's first row on

  TXL_DEVICE explicit Copier(const Problem& problem) : p(problem) {
    const auto thread = static_cast<uint32_t>(opaque(thread_index()));
    row = static_cast<int>(thread / kPieces), channel = static_cast<int>(thread % kPieces) * kPiece<E>;
    place = Tile{0}.at(row, channel);
  }

  TXL_DEVICE bool has_pieces() const { return kEvery * kPieces == kThreads || row < kEvery; }

  TXL_DEVICE From rows(const View& view, int b, int h) const {
    return {view, b, h, reinterpret_cast<const char*>(Source<E>(view, b, h, p).data + channel)};
  }

  // Starts to copy kRows rows to a tile. whole: they are the tensor's from `first` on; else row n is what
  // row_of(n), a RowOf, says. The channels from D on are zeros too. All threads of the block take part.
  template <int kRows, typename F>
  TXL_DEVICE void copy(Tile to, const From& from, bool whole, int first, F row_of) const {
    if constexpr (!kHeld) {
      const Copier<kThreads, Tile, true> now(p);
      const auto rows_now = now.rows(from.view, opaque(from.b), opaque(from.h));
      return now.template copy<kRows>(to, rows_now, whole, first, row_of);
    }
    if (whole)
      copy_pieces<kRows>(to, from, [&](int n) { return RowOf{first + n, true}; });
    else
      copy_pieces<kRows>(to, from, row_of);
  }

 private:
  template <int kRows, typename F>
  TXL_DEVICE void copy_pieces(Tile to, const From& from, F row_of) const {
    if (!has_pieces()) return;
    const int row_bytes = static_cast<int>(from.view.row) * static_cast<int>(sizeof(E));
    TXL_UNROLL_GPU
    for (int start = 0; start < kRows; start += kEvery) {
      if (kRows % kEvery != 0 && row + start >= kRows) break;
      // An address is one product of 32-bit numbers, and a sum.
      const RowOf y = row_of(row + start);
      copy_async_16(to.below(place, start), from.column + int64_t{y.n} * row_bytes,
                    y.exists && channel < p.D);
    }
  }
};

// The same for rows that are copied once.
template <int kThreads, int kRows, typename Tile, typename F>
TXL_DEVICE void copy_rows(Tile to, const View& from, int b, int h, const Problem& p, F row_of) {
  const Copier<kThreads, Tile> copier(p);
  copier.template copy<kRows>(to, copier.rows(from, b, h), false, 0, row_of);
}

// kRows rows of r from c on, of which those that are clamped are repeated.
template <int kRows, typename Copier, typename Tile>
TXL_DEVICE void copy_rows_of_r(Tile to, const Copier& copier, const typename Copier::From& r, int c) {
  const Problem& p = copier.p;
  copier.template copy<kRows>(to, r, has_rows(p, c, kRows), c,
                              [&](int n) { return RowOf{p.r_row(c + n), true}; });
}

// What was copied has arrived, and all threads are done with what they did before.
TXL_DEVICE void wait_copied() {
  wait_copies<0>();
  sync_threads();
}

// A piece of a row as numbers.
template <typename E>
struct Piece {
  static constexpr int kChannels = kPiece<E>;
  float x[kChannels];

  // Zeros beyond D, and if there is no such tensor.
  static TXL_DEVICE Piece load(const View& view, int b, int h, int64_t i, int channel, const Problem& p) {
    if (!view.data || channel >= p.D) return {};
    const Source<E> source(view, b, h, p);
    return of(load_global(reinterpret_cast<const uint4*>(source.data + i * source.row + channel)));
  }

  static TXL_DEVICE Piece of(uint4 stored) {
    const auto from = bits<Stored>(stored);
    Piece y;
    TXL_UNROLL_GPU
    for (int n = 0; n < kChannels; ++n) y.x[n] = to_float(from.x[n]);
    return y;
  }

  // sign * (x + y), rounded as the operands of a product must be.
  TXL_DEVICE uint4 plus(const Piece& y, float sign) const {
    Stored sum;
    TXL_UNROLL_GPU
    for (int n = 0; n < kChannels; ++n) sum.x[n] = from_float<E>(sign * (x[n] + y.x[n]));
    return bits<uint4>(sum);
  }

 private:
  struct alignas(16) Stored {
    E x[kChannels];
  };
};

// `count` rows in shared memory become the tensor's from `first` on, row n the one row_of(n) behind, where
// that is before `end`. All threads of the block take part.
template <int kHead, int kThreads, typename E, typename F>
TXL_DEVICE void write_rows(Rows<E, kHead> from, int count, const Source<E>& to, int64_t first, int64_t end,
                           F row_of) {
  const int exist = static_cast<int>(smaller<int64_t>(count, end - first));
  E* const data = const_cast<E*>(to.data) + first * to.row;
  constexpr int kPieces = kHead / kPiece<E>;
  TXL_NO_UNROLL_GPU
  for (int place = thread_index(); place < count * kPieces; place += kThreads) {
    const int n = place / kPieces, channel = place % kPieces * kPiece<E>, y = row_of(n);
    if (y < exist && channel < to.D)
      store_global(reinterpret_cast<uint4*>(data + y * to.row + channel),
                   load_shared<uint4>(from.at(n, channel)));
  }
}
template <int kHead, int kThreads, typename E>
TXL_DEVICE void write_rows(Rows<E, kHead> from, int count, const Source<E>& to, int64_t first, int64_t end) {
  write_rows<kHead, kThreads>(from, count, to, first, end, [](int n) { return n; });
}

// ---- Fragments ----

// A operand: rows 0-7, 8-15, then the same of the second 16 bytes.
TXL_DEVICE Corner corner_a(int l = opaque(lane())) { return {l % 16, l / 16}; }
// B operand from rows that are its columns: two n8 tiles, each with both pieces of a row.
TXL_DEVICE Corner corner_b() {
  const int l = opaque(lane());
  return {l % 8 + l / 16 * 8, l / 8 % 2};
}

// An A operand, 16 rows of 32 bytes.
struct Fragment {
  uint32_t r[4];
};

// Before tensor cores take registers over (warpgroup_mma), and after they have given them back, of which the
// compiler knows nothing.
TXL_DEVICE void settle(Fragment& a) {
  for (uint32_t& x : a.r) x = opaque(x);
}
template <int kFragments>
TXL_DEVICE void settle(Fragment (&a)[kFragments]) {
  TXL_UNROLL_GPU
  for (int n = 0; n < kFragments; ++n) settle(a[n]);
}
template <int kTiles>
TXL_DEVICE void settle(float (&acc)[kTiles][4]) {
  TXL_UNROLL_GPU
  for (int n = 0; n < kTiles; ++n)
    for (float& x : acc[n]) x = opaque(x);
}

// 16 rows from `row` on, channels kStep d to kStep (d + 1) - 1.
template <typename Tile>
TXL_DEVICE Fragment load_fragment(Tile rows, int row, int d) {
  using E = typename Tile::Element;
  Fragment a;
  const Corner corner = corner_a();
  load_matrix_x4(a.r, rows.corner(row, kStep<E> * d, corner));
  return a;
}

// A sum of products of 32 bytes of a row: 16 elements of 16 bits, or 8 of float32.
//
// Tensor cores do not round their sums, they cut them off, towards 0. In float32 that is more than all other
// errors once there are many: so theirs begin with 0, are short, and are added to what there is by additions
// that round; and the two small products of a split one are summed apart from the large one, which would have
// them cut off where it ends. (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance".)
template <typename E>
struct Sum {
  float sum[4];

  TXL_DEVICE void begin(const float (&acc)[4]) { memcpy(sum, acc, sizeof(sum)); }
  TXL_DEVICE void add(const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_half<E>(sum, a, b); }
  TXL_DEVICE void end(float (&acc)[4]) const { memcpy(acc, sum, sizeof(sum)); }
};
template <>
struct Sum<f32> {
  float large[4], small[4];

  TXL_DEVICE void begin(const float (&)[4]) {
    for (int x = 0; x < 4; ++x) large[x] = small[x] = 0;
  }
  TXL_DEVICE void add(const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const Split<4> left(a);
    const Split<2> right(b);
    mma_tf32(small, left.low, right.high);
    mma_tf32(small, left.high, right.low);
    mma_tf32(large, left.high, right.high);
  }
  TXL_DEVICE void end(float (&acc)[4]) const {
    for (int x = 0; x < 4; ++x) acc[x] += large[x] + small[x];
  }
};

// acc[n] += a rows^T for n8 tiles of rows, each pair from row_of(8 n) on, an odd one alone; a(d) is the
// fragment of step d. kHeld: it lies in registers.
template <bool kHeld, int kTiles, typename A, typename Tile, typename F>
TXL_DEVICE void add_product(float (&acc)[kTiles][4], A a, Tile rows, F row_of) {
  using E = typename Tile::Element;
  constexpr int kHead = Tile::kHead;
  const Corner corner = corner_b();
  Sum<E> sum[kTiles];
  const auto add_step = [&](int d) {
    Fragment a_d = a(d);
    if constexpr (kHeld && !is_half<E>) {
      // Else it is split into two once and for all tiles, and needs twice the registers.
      for (uint32_t& x : a_d.r) x = opaque(x);
    }
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; n += 2) {
      const uint32_t address = rows.corner(row_of(n * 8), kStep<E> * d, corner);
      if (n + 1 < kTiles) {
        uint32_t b[4];
        load_matrix_x4(b, address);
        sum[n].add(a_d.r, {b[0], b[1]});
        sum[n + 1].add(a_d.r, {b[2], b[3]});
      } else {
        uint32_t b[2];
        load_matrix_x2(b, address);
        sum[n].add(a_d.r, b);
      }
    }
  };
  constexpr int kSteps = kHead / kStep<E>, kTogether = is_half<E> ? kSteps : kSteps / 2;
  const auto add_steps = [&](int first) {
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; ++n) sum[n].begin(acc[n]);
    if constexpr (kHeld || is_half<E>) {
      TXL_UNROLL_GPU
      for (int d = 0; d < kTogether; ++d) add_step(first + d);
    } else {  // steps of float32 are long as they are
      TXL_NO_UNROLL_GPU
      for (int d = 0; d < kTogether; ++d) add_step(first + d);
    }
    TXL_UNROLL_GPU
    for (int n = 0; n < kTiles; ++n) sum[n].end(acc[n]);
  };
  if constexpr (kHeld || is_half<E>) {
    TXL_UNROLL_GPU
    for (int first = 0; first < kSteps; first += kTogether) add_steps(first);
  } else {
    TXL_NO_UNROLL_GPU
    for (int first = 0; first < kSteps; first += kTogether) add_steps(first);
  }
}

// ---- Products over rows: keys, queries, columns of the band ----

// A square of 16 by 16 as A operand, from two n8 tiles of accumulators. Of float32 it takes two products, and
// which column comes when is free as long as both operands agree: the order is that of accumulators, where
// a lane has neighbours.
template <typename E>
struct Square {
  static constexpr int kParts = is_half<E> ? 1 : 2;

  Fragment part[kParts];

  static TXL_DEVICE Square of(const float (&x)[4], const float (&y)[4]) {
    if constexpr (is_half<E>)
      return {{{pack<E>(x[0], x[1]), pack<E>(x[2], x[3]), pack<E>(y[0], y[1]), pack<E>(y[2], y[3])}}};
    else
      return {{of(x), of(y)}};
  }

  // Zeros in place of what keeps(n8 tile, element) says no to.
  template <typename F>
  TXL_DEVICE void keep(F keeps) {
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n)
      for (int y = 0; y < 2; ++y) {
        const bool first = keeps(n, 2 * y), second = keeps(n, 2 * y + 1);
        if constexpr (is_half<E>) {
          part[0].r[2 * n + y] &= (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
        } else {
          if (!first) part[n].r[y] = 0;
          if (!second) part[n].r[y + 2] = 0;
        }
      }
  }

 private:
  static TXL_DEVICE Fragment of(const float (&x)[4]) {
    return {{bits<uint32_t>(x[0]), bits<uint32_t>(x[2]), bits<uint32_t>(x[1]), bits<uint32_t>(x[3])}};
  }
};

template <typename E, int kSquares>
TXL_DEVICE void settle(Square<E> (&a)[kSquares]) {
  TXL_UNROLL_GPU
  for (int n = 0; n < kSquares; ++n) settle(a[n].part);
}

// The B operand that goes with it: 16 rows by two n8 tiles of channels.
template <typename E>
struct SquareRows {
  uint32_t part[Square<E>::kParts][4];

  // l: the lane, the same opaque one for all loads whose addresses are to differ by constants.
  template <typename Tile>
  static TXL_DEVICE SquareRows load(Tile rows, int row, int channel, int l) {
    SquareRows b;
    if constexpr (is_half<E>) {
      const Corner corner = corner_a(l);
      load_matrix_x4_trans(b.part[0], rows.corner(row, channel, corner));
    } else {
      TXL_UNROLL_GPU
      for (int part = 0; part < 2; ++part)
        for (int x = 0; x < 4; ++x)
          b.part[part][x] =
              load_shared<uint32_t>(rows.at(row + l % 4 * 2 + 8 * part + x % 2, channel + l / 4 + x / 2 * 8));
    }
    return b;
  }

  // Takes away what is NaN or infinite; the bits of what it took.
  TXL_DEVICE SquareRows take_infinite() {
    constexpr uint32_t kExponent = is_bf16<E> ? 0x7f80u : is_half<E> ? 0x7c00u : 0x7f800000u;
    SquareRows taken;
    TXL_UNROLL_GPU
    for (int n = 0; n < Square<E>::kParts; ++n)
      for (int m = 0; m < 4; ++m) {
        uint32_t& x = part[n][m];
        uint32_t& bad = taken.part[n][m];
        if constexpr (is_half<E>)
          bad = ((x & kExponent) == kExponent ? 0xffffu : 0) |
                ((x >> 16 & kExponent) == kExponent ? 0xffff0000u : 0);
        else
          bad = (x & kExponent) == kExponent ? 0xffffffffu : 0;
        x &= ~bad;
      }
    return taken;
  }
};

// The number 1 in every place of an operand's register.
template <typename E>
TXL_DEVICE uint32_t ones() {
  if constexpr (is_half<E>)
    return pack<E>(1, 1);
  else
    return bits<uint32_t>(1.0f);
}

// x += a b, where b has two registers of each part.
template <typename E>
TXL_DEVICE void add_parts(float (&x)[4], const Square<E>& a, const uint32_t (&b)[Square<E>::kParts][2]) {
  if constexpr (is_half<E>) {
    mma_half<E>(x, a.part[0].r, b[0]);
  } else {  // as Sum<f32>, in fewer registers: what is small comes first
    const Split<4> left[2] = {Split<4>(a.part[0].r), Split<4>(a.part[1].r)};
    const Split<2> right[2] = {Split<2>(b[0]), Split<2>(b[1])};
    float sum[4] = {};
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n) {
      mma_tf32(sum, left[n].low, right[n].high);
      mma_tf32(sum, left[n].high, right[n].low);
    }
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n) mma_tf32(sum, left[n].high, right[n].high);
    for (int m = 0; m < 4; ++m) x[m] += sum[m];
  }
}

// x, y += a rows: one n8 tile of channels each.
template <typename E>
TXL_DEVICE void add_square(float (&x)[4], float (&y)[4], const Square<E>& a, const SquareRows<E>& rows) {
  uint32_t left[Square<E>::kParts][2], right[Square<E>::kParts][2];
  TXL_UNROLL_GPU
  for (int n = 0; n < Square<E>::kParts; ++n)
    for (int m = 0; m < 2; ++m) left[n][m] = rows.part[n][m], right[n][m] = rows.part[n][2 + m];
  add_parts(x, a, left);
  add_parts(y, a, right);
}

// x += the sum of each row of a.
template <typename E>
TXL_DEVICE void add_sum(float (&x)[4], const Square<E>& a) {
  uint32_t b[Square<E>::kParts][2];
  for (auto& part : b) part[0] = part[1] = ones<E>();
  add_parts(x, a, b);
}

// x, y are NaN for a row that sees, by sees(n8 tile, element), one of `taken`'s. A hidden pair's probability,
// 0, times its NaN would be NaN: a row is affected by what it sees and by nothing else.
template <typename E, typename F>
TXL_DEVICE void put_nan(float (&x)[4], float (&y)[4], SquareRows<E> taken, F sees) {
  uint32_t found = 0;
  for (auto& part : taken.part)
    for (uint32_t& m : part) found |= m, m &= ones<E>();
  if (!any(found != 0)) return;
  float seen[2][4], count[2][4] = {};
  for (int n = 0; n < 2; ++n)
    for (int m = 0; m < 4; ++m) seen[n][m] = sees(n, m);
  add_square(count[0], count[1], Square<E>::of(seen[0], seen[1]), taken);
  for (int m = 0; m < 4; ++m) {
    if (count[0][m] > 0) x[m] = nan();
    if (count[1][m] > 0) y[m] = nan();
  }
}

// ---- Dropout ----

// Which keys of query i the four words of a call keep (csrc/philox.h): bit w, if word w does.
TXL_DEVICE uint32_t kept_words(uint64_t seed, uint32_t threshold, uint32_t call, int b, int h, int i) {
  uint32_t word[4] = {call, static_cast<uint32_t>(i), static_cast<uint32_t>(h), static_cast<uint32_t>(b)};
  Philox::rounds(word, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                 [](uint32_t x, uint32_t y, uint32_t& low, uint32_t& high) {
                   const uint64_t product = static_cast<uint64_t>(x) * y;
                   low = static_cast<uint32_t>(product), high = static_cast<uint32_t>(product >> 32);
                 });
  uint32_t kept = 0;
  for (int w = 0; w < 4; ++w) kept |= word[w] >= threshold ? 1u << w : 0;
  return kept;
}

}  // namespace txl::cuda

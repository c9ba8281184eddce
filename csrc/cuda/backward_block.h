// What the blocks of backward's kernels share, of queries, of keys and of rows of r: products with rows in
// shared memory, results, sums of rows by their weights.
#pragma once

#include "workspace.h"

namespace txl::cuda {

// Of a block by warpgroups: of dk and dv's kernel, of dq's, and of dr's.
constexpr int kWarpgroupKeys = 128, kWarpgroupQueries = 128, kWarpgroupRows = 128;

// Which of 64 queries is row n of a warpgroup's: a warp's eight rows that registers hold side by side are
// queries eight apart, and the other eight the next query of each.
TXL_DEVICE int eight_apart(int n) { return n % 8 * 8 + n / 8; }

// ---- Products ----

// exp2 of a score less its query's lse, which is at least as large: of huge ones the rounding errors are
// huge, too, of either sign.
TXL_DEVICE float probability(float log) { return exp2_fast(at_most_0(log)); }

TXL_DEVICE float finite(float x) { return x - x == 0 ? x : 0.0f; }

// acc += a rows for 16 rows from `row` on, and the channels from `channel` on. kFinite: zeros stand for what
// is not finite, as a pair that is not seen has dS 0, but 0 * NaN is NaN. What a pair that is seen multiplies
// its dS with is not missed: its lse, and so dS itself, is NaN.
template <bool kFinite, typename E, int kTiles, typename Tile>
TXL_DEVICE void add_rows(float (&acc)[kTiles][4], const Square<E>& a, Tile rows, int row, int channel) {
  const int l = opaque(lane());
  TXL_UNROLL_GPU
  for (int d = 0; d < kTiles; d += 2) {
    auto x = SquareRows<E>::load(rows, row, channel + 8 * d, l);
    if constexpr (kFinite) x.take_infinite();
    add_square(acc[d], acc[d + 1], a, x);
  }
}

// ---- Results ----

// acc * factor to the lane's rows, `row` and the eighth behind it, the channels from `channel` on.
template <typename E, int kHead, int kTiles>
TXL_DEVICE void put_rows(Rows<E, kHead> to, int row, int channel, const float (&acc)[kTiles][4],
                         float factor) {
  TXL_UNROLL_GPU
  for (int d = 0; d < kTiles; ++d)
    for (int y = 0; y < 2; ++y)
      store_pair<E>(to.at(row + 8 * y, channel + 8 * d + lane() % 4 * 2), acc[d][2 * y] * factor,
                    acc[d][2 * y + 1] * factor);
}

// put(d, the sum of `count` rows, each by its weight, at channel d). Weights:
// floats in shared memory; scratch: WeightedRows::kBytes there. What is not finite counts as 0. All threads
// of the block take part: each has 16 bytes of every kShares-th row.
template <typename E, int kHead, int kThreads>
struct WeightedRows {
  using Numbers = Piece<E>;
  static constexpr int kChannels = kPiece<E>, kPieces = kHead / kChannels, kShares = kThreads / kPieces;
  static constexpr int kAtOnce = 4;
  static constexpr uint32_t kBytes = kShares * kHead * 4;

  // Of a tensor. Several are loaded at once, or a block would wait for one row after the other, longer than
  // for all that it multiplies.
  template <typename F>
  static TXL_DEVICE void add(const View& x, int b, int h, const Problem& p, int64_t first, int count,
                             uint32_t weights, uint32_t scratch, F put) {
    WeightedRows sums(p, weights);
    const int share = sums.share;
    const Source<E> source(x, b, h, p);
    const E* const from = source.data + first * source.row + sums.channel;
    if (!sums.has) count = 0;
    for (int n = share; n < count; n += kAtOnce * kShares) {
      uint4 row[kAtOnce];
      TXL_UNROLL_GPU
      for (int m = 0; m < kAtOnce; ++m) {
        // The last one again, beyond it.
        const int at = smaller(n + m * kShares, count - 1);
        row[m] = load_global(reinterpret_cast<const uint4*>(from + int64_t{at} * source.row));
      }
      TXL_UNROLL_GPU
      for (int m = 0; m < kAtOnce; ++m)
        if (n + m * kShares < count) sums.add_row(n + m * kShares, Numbers::of(row[m]));
    }
    sums.put_all(p, scratch, put);
  }

  // Of a tile in shared memory. When put is called, all have read it.
  template <typename Tile, typename F>
  static TXL_DEVICE void add(Tile rows, const Problem& p, int count, uint32_t weights, uint32_t scratch,
                             F put) {
    WeightedRows sums(p, weights);
    if (!sums.has) count = 0;
    for (int n = sums.share; n < count; n += kShares)
      sums.add_row(n, Numbers::of(load_shared<uint4>(rows.at(n, sums.channel))));
    sums.put_all(p, scratch, put);
  }

 private:
  int thread, share, channel;  // the thread's
  bool has;                    // whether it has any
  uint32_t weights;
  float sum[kChannels];

  TXL_DEVICE WeightedRows(const Problem& p, uint32_t of_rows)
      : thread(opaque(thread_index())),
        share(thread / kPieces),
        channel(thread % kPieces * kChannels),
        has(share < kShares && channel < p.D),
        weights(of_rows),
        sum{} {}

  TXL_DEVICE void add_row(int n, const Numbers& row) {
    const float weight = load_shared<float>(weights + static_cast<uint32_t>(n) * 4);
    for (int d = 0; d < kChannels; ++d) sum[d] += weight * finite(row.x[d]);
  }

  // Shares' sums lie one behind the other. Of one the first four channels of all threads lie side by side,
  // then the next four: where rows are a multiple of 128 bytes no two threads meet in a bank.
  template <typename F>
  TXL_DEVICE void put_all(const Problem& p, uint32_t scratch, F put) const {
    constexpr int kFours = kChannels / 4;
    const auto at = [&](int of_share, int n) {
      return scratch + static_cast<uint32_t>(of_share * kHead + n) * 4;
    };
    if (share < kShares)
      for (int m = 0; m < kFours; ++m)
        store_shared(at(share, m * kPieces * 4 + channel / kFours),
                     float4{sum[4 * m], sum[4 * m + 1], sum[4 * m + 2], sum[4 * m + 3]});
    sync_threads();
    for (int n = thread; n < kHead; n += kThreads) {
      const int d = n / 4 % kPieces * kChannels + n / 4 / kPieces * 4 + n % 4;
      if (d >= p.D) continue;
      float total = 0;
      for (int m = 0; m < kShares; ++m) total += load_shared<float>(at(m, n));
      put(d, total);
    }
  }
};

}  // namespace txl::cuda

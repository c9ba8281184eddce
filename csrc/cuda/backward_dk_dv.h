// dk, dv and dS: what becomes of the products of a block of keys (key_block.h), tile by tile. P and dS lie in
// registers; dS goes to memory besides, turned back.
//
// While the scores are computed the band's operands of the next tile are on their way, and while the band is,
// the rest.
#pragma once

#include "key_block.h"

namespace txl::cuda {

// Block: what computes the products of a tile: KeyBlock or WarpgroupKeyBlock.
template <typename Block, bool kDropout>
struct DkDvKernel : private Block {
  using Params = typename Block::Params;
  using E = typename Block::Element;
  using Block::kOwnTiles, Block::kQueryTiles, Block::kTogether;
  using Block::kThreads, Block::kSharedBytes, Block::BM, Block::BN, Block::kHead, Block::kByWarpgroups;

  static TXL_HD int64_t parts(const BackwardParams& x) { return Block::blocks_of_head(x.p); }  // of a head
  static int64_t blocks(const Params& x) { return parts(x) * x.chunk.heads * x.chunk.batches; }
  static TXL_DEVICE void run(const Params& params) { DkDvKernel(params).collect(); }

 private:
  using Block::is_far, Block::is_masked, Block::is_hidden, Block::band, Block::statistics,
      Block::lse_and_delta;
  using Block::own_key, Block::own_channel, Block::base;
  using Block::params, Block::p, Block::t, Block::b, Block::h, Block::j0, Block::mask, Block::bounds;

  float dk[kOwnTiles][4], dv[kOwnTiles][4];
  float ds_sum[4];  // of the lane's keys, over the queries; by warpgroups over the lane's

  TXL_DEVICE explicit DkDvKernel(const Params& x) : Block(x), dk{}, dv{}, ds_sum{} {}

  TXL_DEVICE void collect() {
    if (params.chunk.lo > 0)
      each_sum([](float& x, float& y, const float* from) {
        const auto pair = load_written(reinterpret_cast<const float2*>(from));
        x = pair.x, y = pair.y;
      });
    if (bounds.begin < bounds.end) {
      this->begin_copies();
      this->load_keys();
      this->copy_position(bounds.begin);
    }
    for (int i0 = bounds.begin; i0 < bounds.end; i0 += BM) {
      start_tile<false>(i0);
      if (is_hidden(i0)) {
        continue;
      } else if (is_far(i0)) {
        add_queries<true, false>(i0);
      } else if (is_masked(i0)) {
        add_queries<false, true>(i0);
      } else if constexpr (!kByWarpgroups) {
        add_queries<false, false>(i0);
      } else {
        // Nearly all tiles, in a loop of their own, but for the first: else sums would change registers.
        const int end = this->end_of_near(i0);
        add_queries<false, false>(i0);
        while (i0 + BM < end) {
          i0 += BM;
          start_tile<true>(i0);
          add_queries<false, false, !kDropout>(i0);  // which has no registers for it
        }
        this->wait_gradients(dk, dv);
      }
    }
    this->wait_slopes();
    store();
  }

  // Until what it needs is there; starts to copy the next one's.
  template <bool kNear>
  TXL_DEVICE void start_tile(int i0) {
    this->wait_position();
    base = opaque(base);
    this->copy_queries(i0);
    if (kNear || !is_far(i0)) this->take_band(i0);
    if constexpr (kDropout) draw_dropout(i0);
    this->wait_queries(i0);
    if (i0 + BM < bounds.end) this->copy_position(i0 + BM);
  }

  // A word's bits of a query's 16 calls for 64 keys, by group of 16 keys.
  TXL_DEVICE void draw_dropout(int i0) {
    constexpr int kGroup = DropoutMask::kGroup, kCalls = DropoutMask::kCalls;
    const auto seed = static_cast<uint64_t>(load_global(p.dropout_seed));  // no registers for it elsewhere
    for (int x = thread_index(); x < BM * kCalls; x += kThreads) {
      uint32_t kept = 0;
      for (int n = 0; n < BN; n += kGroup) {
        const int call = (j0 + n) / kGroup * kCalls + x % kCalls;
        kept |= kept_words(seed, p.dropout_threshold, static_cast<uint32_t>(call), b, h, i0 + x / kCalls)
                << n / 16;
      }
      band().write_kept(x / kCalls, x % kCalls, kept);
    }
  }

  // ---- A tile ----

  template <bool kFar, bool kMasked, bool kGoesOn = false>
  TXL_DEVICE void add_queries(int i0) {
    TXL_NO_UNROLL_GPU
    for (int first = 0; first < kQueryTiles; first += kTogether) add_some<kFar, kMasked, kGoesOn>(i0, first);
  }

  // The queries of n8 tiles `first` to first + kTogether - 1.
  template <bool kFar, bool kMasked, bool kGoesOn>
  TXL_DEVICE void add_some(int i0, int first) {
    float ds[kTogether][4] = {}, dp[kTogether][4];
    this->take_scores(ds, dp, first, [&] {
      TXL_UNROLL_GPU
      for (int n = 0; n < kTogether; ++n)
        for (int x = 0; x < 4; ++x)
          if constexpr (!kFar) ds[n][x] = band().read(first + n, x, own_key);
      if constexpr (kFar) {
        TXL_UNROLL_GPU
        for (int n = 0; n < kTogether; ++n)
          for (int x = 0; x < 2; ++x) {
            const Statistics of_query = statistics(query(first + n, x));
            ds[n][x] = ds[n][x + 2] = i0 < bounds.near ? of_query.last : of_query.first;
          }
      }
    });
    const auto to = this->begin_slopes(i0 + 8 * first);
    this->template add_gradients<kMasked, kGoesOn>(
        dk, dv, dp, ds, first, [&](int n, int x) { return sees(i0, first + n, x); },
        [&](int n) {
          for (int y = 0; y < 2; ++y) {
            const float2 of_query = lse_and_delta(query(first + n, y));
            for (int x = y; x < 4; x += 2) {
              const bool seen = !kMasked || sees(i0, first + n, x), kept = !kDropout || is_kept(first + n, x);
              const float weight =
                  seen ? probability(multiply_add(ds[n][x], params.scale.log2, -of_query.x)) : 0.0f;
              const float of_weight = kept ? kDropout ? dp[n][x] * params.scale.dropout : dp[n][x] : 0.0f;
              dp[n][x] = kept ? weight : 0.0f;
              ds[n][x] = seen ? weight * (of_weight - of_query.y) : 0.0f;  // unseen, it may hold NaN
            }
          }
          if constexpr (kByWarpgroups)  // mma.sync would wait for them
            for (int y = 0; y < 4; y += 2) ds_sum[y] += ds[n][y] + ds[n][y + 1];
        },
        [&](int n, const Square<E>& a) {
          if constexpr (!kByWarpgroups) add_sum(ds_sum, a);
          this->put_slopes(to, n, a);
        });
    this->send_slopes(i0 + 8 * first);
  }

  // The tile's query of element x of n8 tile n, and the element's key.
  static TXL_DEVICE int query(int n, int x) { return 8 * n + lane() % 4 * 2 + x % 2; }
  TXL_DEVICE int key(int x) const { return j0 + own_key + lane() / 4 + x / 2 * 8; }

  TXL_DEVICE bool sees(int i0, int n, int x) const { return mask.sees(i0 + query(n, x), key(x)); }

  TXL_DEVICE bool is_kept(int n, int x) const {
    const int j = key(x);
    return (band().kept(query(n, x), j & 15) >> (j >> 4 & (BN > 64 ? 7 : 3)) & 1) != 0;
  }

  // ---- Results ----

  // f(two neighbours of dk or dv, where they are among the sums that chunks of a head's queries share).
  template <typename F>
  TXL_DEVICE void each_sum(F f) {
    if (BN > Chunk::kRows && key(0) >= params.w.chunks.columns) return;  // the warp has no keys
    float* const sums = params.w.sums + static_cast<int64_t>(key(0)) * kHead + own_channel + lane() % 4 * 2;
    TXL_UNROLL_GPU
    for (int d = 0; d < kOwnTiles; ++d)
      for (int y = 0; y < 2; ++y) {
        float* const of_dk = sums + 8 * y * kHead + 8 * d;
        f(dk[d][2 * y], dk[d][2 * y + 1], of_dk);
        f(dv[d][2 * y], dv[d][2 * y + 1], of_dk + params.w.chunks.columns * kHead);
      }
  }

  TXL_DEVICE void store() {
    const Rows<E, kHead> of_dk{base}, of_dv{base + Block::kKeyBytes};
    sync_threads();  // all are done with the values and the band
    put_rows(of_dv, own_key + lane() / 4, own_channel, dv, params.scale.dropout);
    if (t.du.data) store_du();  // while the keys are there
    put_rows(of_dk, own_key + lane() / 4, own_channel, dk, params.scale.magnitude);
    sync_threads();
    if (params.chunk.last) {
      write_rows<kHead, kThreads>(of_dk, BN, Source<E>(t.dk, b, h, p), j0, p.K);
      write_rows<kHead, kThreads>(of_dv, BN, Source<E>(t.dv, b, h, p), j0, p.K);
    } else {
      each_sum(
          [](float x, float y, float* to) { store_global(reinterpret_cast<float2*>(to), float2{x, y}); });
    }
  }

  // The block's part of du: its keys by their sums of dS, over the queries of all chunks. All have read the
  // keys then.
  TXL_DEVICE void store_du() {
    using Sums = WeightedRows<E, kHead, kThreads>;
    constexpr uint32_t kWeightsAt = Block::kBandAt, kScratchAt = kWeightsAt + BN * 4;
    static_assert(kScratchAt + Sums::kBytes <= Block::kStatisticsAt, "room in the band");
    for (int y = 0; y < 2; ++y) {
      float& sum = ds_sum[2 * y];
      if constexpr (kByWarpgroups)
        for (int step = 1; step < 4; step *= 2) sum += shuffle_xor(sum, step);
      if (own_channel == 0 && lane() % 4 == 0)
        store_shared(base + kWeightsAt + static_cast<uint32_t>(key(2 * y) - j0) * 4, sum);
    }
    sync_threads();
    const int64_t part = (static_cast<int64_t>(b) * p.H + h) * parts(params) + j0 / BN;
    // Where no query of the chunk sees any, none are there. Keys that do not exist are zeros.
    Sums::add(this->k_tile(), p, bounds.begin < bounds.end ? BN : 0, base + kWeightsAt, base + kScratchAt,
              [&](int d, float sum) {
                float* const to = params.w.du_parts + part * p.D + d;
                store_global(to, params.chunk.lo > 0 ? load_written(to) + sum : sum);
              });
  }
};

// Shared memory has room for no more; the compiler would spill for another.
template <int BN, int BM, int kWarps, bool kHeld, bool kDropout>
constexpr int kLeastBlocks<DkDvKernel<KeyBlock<f32, 128, BN, BM, kWarps, kHeld>, kDropout>> = 1;

}  // namespace txl::cuda

// A QueryBlock of 128 queries whose shift needs no memory: the band stays in registers.
//
// A warp owns the queries of one class modulo 8: w, w + 8, w + 16, ... Rows of a fragment that follow each
// other are then 8 columns of the band apart, a whole n8 tile, so that what a lane must read is in its own
// registers, 7 - lane / 4 tiles further on: a choice by each bit of that number. The lower eight rows of a
// fragment are 64 queries behind the upper ones, and use the same columns one tile of keys later.
#pragma once

#include "query_block.h"

namespace txl::cuda {

template <typename E, int kHead>
struct RowClassBlock : QueryBlock<E, kHead, 64, 8, 2, 2, Shift::row_classes> {
  using Base = typename RowClassBlock::QueryBlock;
  using Base::Base, Base::BN, Base::kKeyTiles;

  TXL_DEVICE void take_scores(float (&score)[kKeyTiles][4], int j0) {
    if (!this->follows_band(j0)) {
      float before[kWindow][4] = {};
      add_band(before, j0, 0);
      TXL_UNROLL_GPU
      for (int n = 0; n < kWindow; ++n)
        for (int x = 0; x < 2; ++x) {
          if (n < kOverlap) upper[n][x] = before[kKeyTiles + n][x];
          lower[n][x] = before[n][2 + x];
        }
    }
    float next[kKeyTiles][4] = {};
    add_band(next, j0, 8 * kWindow);
    float window[kWindow][2];
    TXL_UNROLL_GPU
    for (int n = 0; n < kWindow; ++n)
      for (int x = 0; x < 2; ++x) window[n][x] = n < kOverlap ? upper[n][x] : next[n - kOverlap][x];
    take_window<0>(score, window);
    take_window<2>(score, lower);
    TXL_UNROLL_GPU
    for (int n = 0; n < kWindow; ++n)
      for (int x = 0; x < 2; ++x) {
        if (n < kOverlap) upper[n][x] = window[kKeyTiles + n][x];
        lower[n][x] = n < kOverlap ? lower[kKeyTiles + n][x] : next[n - kOverlap][2 + x];
      }
    this->add_keys(score, j0);
  }

 private:
  // n8 tiles: that the rows of half a fragment use together, and of these those that the next tile uses too.
  static constexpr int kOverlap = 7, kWindow = kKeyTiles + kOverlap;

  float upper[kOverlap][2], lower[kWindow][2];  // the band, of the lane's first query and of its second

  // acc += (q + v) r^T for columns of the warp's band, from `column` on.
  template <int kTiles>
  TXL_DEVICE void add_band(float (&acc)[kTiles][4], int j0, int column) const {
    // Within 16 rows of r the ring may begin anew: every lane has a row of its own.
    const int row = corner_b().row, first = 7 - opaque(warp()) + column + row;
    this->template add_query_product<1>(acc, this->ring(),
                                        [&](int n) { return this->ring_row(j0, first + n) - row; });
  }

  // score[n][half], score[n][half + 1] = window[n + 7 - lane / 4].
  template <int half>
  static TXL_DEVICE void take_window(float (&score)[kKeyTiles][4], const float (&window)[kWindow][2]) {
    const int moved = 7 - opaque(lane()) / 4;
    float by_4[kKeyTiles + 3][2], by_2[kKeyTiles + 1][2];
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles + 3; ++n)
      for (int x = 0; x < 2; ++x) by_4[n][x] = moved & 4 ? window[n + 4][x] : window[n][x];
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles + 1; ++n)
      for (int x = 0; x < 2; ++x) by_2[n][x] = moved & 2 ? by_4[n + 2][x] : by_4[n][x];
    TXL_UNROLL_GPU
    for (int n = 0; n < kKeyTiles; ++n)
      for (int x = 0; x < 2; ++x) score[n][half + x] = moved & 1 ? by_2[n + 1][x] : by_2[n][x];
  }
};

}  // namespace txl::cuda

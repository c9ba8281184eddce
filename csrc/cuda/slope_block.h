// What dq's kernel computes with: a block owns 64 queries of a head, each of its warps 16 of them, and goes
// over the keys that they see in tiles of BN, as forward does (query_block.h). dS it takes from memory, here
// to registers.
//
// The gradient of the band. Every element of a tile's dS belongs to one column of the band, one pair to each:
// row y of a warp's 16 goes to 16 rows of shared memory from column 15 - y on, the opposite of forward's
// shift. The tile before has left over 16 columns, they lie in front; so the first BN columns are whole, they
// are multiplied by their rows of r, and the last 16 are carried on. That is one product, and none is done
// twice.
#pragma once

#include "backward_block.h"
#include "query_block.h"

namespace txl::cuda {

template <typename E, int kHead, int BN>
struct SlopeBlock : QueryBlock<E, kHead, BN, 4, 0, 0> {
  using Params = BackwardParams;
  using Base = typename SlopeBlock::QueryBlock;
  using Base::BM, Base::kHeadTiles, Base::is_far, Base::ring, Base::ring_row;
  static constexpr int kSquares = BN / 16;
  static constexpr int kNextQuery = 8;  // from a lane's first query to its second

  const BackwardParams& params;

  TXL_DEVICE SlopeBlock(const BackwardParams& x, const typename Base::Place& place)
      : Base(x.p, x.t, place), params(x), slopes(first_slope()) {}

  // Whether some of the tile's pairs, or of those carried to it, have no row of r of their own.
  TXL_DEVICE bool is_clamped(int j0) const { return !has_rows(this->p, this->lowest_row(j0), BM + BN - 1); }
  TXL_DEVICE bool ends_band(int j0) const { return j0 + BN >= this->bounds.end || is_far(j0 + BN); }

  TXL_DEVICE void copy_tile(int j0) {
    Base::copy_tile(j0);
    load_slopes(j0);
  }

  // dS of the tile that was copied last, before the next one is. Of pairs that are not seen there may be
  // anything.
  TXL_DEVICE void take_slopes(Square<E> (&ds)[kSquares], int) const {
    TXL_UNROLL_GPU
    for (int n = 0; n < kSquares; ++n) ds[n] = next[n];
  }

  // acc += ds k. kEdge: some of what it is multiplied with may not be seen.
  template <bool kEdge>
  TXL_DEVICE void add_keys(float (&acc)[kHeadTiles][4], const Square<E> (&ds)[kSquares], int j0) const {
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m) add_rows<kEdge>(acc, ds[m], this->k_tile(j0), 16 * m, 0);
  }
  // After add_keys of a far tile.
  TXL_DEVICE void finish(float (&)[kHeadTiles][4], const Square<E> (&)[kSquares]) const {}

  // acc += the band's gradient r, as far as it is whole. ds: without clamped pairs.
  template <bool kEdge>
  TXL_DEVICE void add_band(float (&acc)[kHeadTiles][4], const Square<E> (&ds)[kSquares], int j0) {
    if constexpr (kEdge) {
      if (!this->follows_band(j0)) slope_carry = {};
    }
    sync_warp();  // the band was read
    store_carried();
    sync_warp();  // where both write, in the carried columns, dS is to stay
    const int moved = 15 - opaque(lane()) / 4;
    const uint32_t first[2] = {own_slope(moved), own_slope(moved + 1)};
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const auto place =
              static_cast<uint32_t>(y * (Band::kRowsBytes - Band::kEight) + (2 * m + n) * Band::kEight);
          store_apart(first[0] + place, first[1] + place, ds[m], n, y);
        }
    sync_warp();
    const int left = this->own_column();
    TXL_UNROLL_GPU
    for (int n = 0; n < BN; n += 16) add_rows<kEdge>(acc, load_slope(n), ring(), ring_row(j0, left + n), 0);
    slope_carry = load_slope(BN);
    if constexpr (kEdge) {
      if (!ends_band(j0)) return;
      keep_carried();
      add_rows<true>(acc, slope_carry, ring(), ring_row(j0, left + BN), 0);
    }
  }

 private:
  // The gradient of the band lies where the band of scores would.
  using Band = typename Base::Band;

  const E* slopes;           // dS of the lane's first query, from its first key of 16 on
  Square<E> next[kSquares];  // of the tile to come
  Square<E> slope_carry;     // the columns of the band's gradient that the tile before left over

  TXL_DEVICE const E* first_slope() const {
    return params.slopes<E>(opaque(this->b), opaque(this->h), opaque(this->i0) + this->row_of_lane(0),
                            opaque(lane()) % 4 * 2);
  }

  // As accumulators of scores have it.
  TXL_DEVICE void load_slopes(int j0) {
    // Of long rows there are no registers for what could be known beforehand.
    const E* const first = (kRow<E, kHead> <= 256 ? slopes : first_slope()) + j0;
    TXL_UNROLL_GPU
    for (int m = 0; m < kSquares; ++m)
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const E* const from = first + 8 * y * params.w.chunks.columns + 16 * m + 8 * n;
          if constexpr (is_half<E>) {
            next[m].part[0].r[2 * n + y] = load_global(reinterpret_cast<const uint32_t*>(from));
          } else {
            const auto pair = load_global(reinterpret_cast<const uint2*>(from));
            next[m].part[n].r[y] = pair.x, next[m].part[n].r[y + 2] = pair.y;
          }
        }
  }

  // Where the band's gradient has what an accumulator holds first of the lane's first query, of columns c to
  // c + 7.
  TXL_DEVICE uint32_t own_slope(int c) const {
    return this->own_band().at(opaque(lane()) / 4, opaque(lane()) % 4 * 2 + c);
  }

  // Two neighbours of n8 tile n.
  static TXL_DEVICE void store_apart(uint32_t one, uint32_t other, const Square<E>& a, int n, int y) {
    if constexpr (is_half<E>) {
      const uint32_t pair = a.part[0].r[2 * n + y];
      store_shared(one, static_cast<uint16_t>(pair));
      store_shared(other, static_cast<uint16_t>(pair >> 16));
    } else {
      store_shared(one, a.part[n].r[y]);
      store_shared(other, a.part[n].r[y + 2]);
    }
  }

  TXL_DEVICE void store_carried() {
    const uint32_t own = own_slope(0);
    TXL_UNROLL_GPU
    for (int n = 0; n < 2; ++n)
      for (int y = 0; y < 2; ++y) {
        const uint32_t at = own + static_cast<uint32_t>(y * Band::kRowsBytes + n * Band::kEight);
        if constexpr (is_half<E>)
          store_shared(at, slope_carry.part[0].r[2 * n + y]);
        else
          store_shared(at, uint2{slope_carry.part[n].r[y], slope_carry.part[n].r[y + 2]});
      }
  }

  // Columns c to c + 15 of the band's gradient.
  TXL_DEVICE Square<E> load_slope(int c) const {
    Square<E> a;
    if constexpr (is_half<E>) {
      const Corner corner = corner_a();
      load_matrix_x4(a.part[0].r, this->own_band().at(corner.row, c + 8 * corner.piece));
    } else {
      const uint32_t own = own_slope(c);
      TXL_UNROLL_GPU
      for (int n = 0; n < 2; ++n)
        for (int y = 0; y < 2; ++y) {
          const auto pair =
              load_shared<uint2>(own + static_cast<uint32_t>(y * Band::kRowsBytes + n * Band::kEight));
          a.part[n].r[y] = pair.x, a.part[n].r[y + 2] = pair.y;
        }
    }
    return a;
  }

  // Of the carried columns row y has the first 15 - y; the others wait for the tile to come, and there is
  // none.
  TXL_DEVICE void keep_carried() {
    const int own = opaque(lane()) % 4 * 2 + opaque(lane()) / 4;
    slope_carry.keep([&](int n, int x) { return own + 8 * n + x % 2 + x / 2 * 8 < 15; });
  }
};

}  // namespace txl::cuda

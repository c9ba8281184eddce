"""What the kernels share: the index formula, the masks, the skew, dropout, and loads of rows.

A tile is BM queries from i0 on by BN keys from j0 on (or rows of r from c0 on). Within a tile y counts
queries, x columns, d channels; i, j and c are the query, the key and the row of r themselves.
docs/algorithm.md draws it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32's finite numbers

# ---- The problem -------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A tensor [B, H, rows, D] whose last dimension is contiguous; strides in elements. r has no batch: 0."""

    data: Any
    batch: Any
    head: Any
    row: Any


class Problem(NamedTuple):
    """As in csrc/rel_attn.h, with every number within 32 bits.

    Kernels take the numbers as arguments of their own: of one within a tuple, Triton would compile a kernel
    anew whenever it is 1 for the first time, or a multiple of 16.
    """

    B: Any
    H: Any
    L: Any
    K: Any
    N: Any
    r_zero: Any
    window_left: Any  # K - 1: unlimited
    window_right: Any  # L - 1: unlimited; 0 if causal
    scale: Any
    dropout_threshold: Any  # a word of Philox below this drops; unsigned, in a signed number's bits
    dropout_scale: Any  # 1 / (1 - p)


# dS of a chunk lies in memory in rows of queries, filled up to multiples of this, and so are their columns.
ROWS = tl.constexpr(64)


class Chunk(NamedTuple):
    """The part of the problem whose dS exists at a time (_chunks.py). Kernels take it as they do Problem."""

    first_b: Any
    batches: Any
    first_h: Any
    heads: Any
    first_i: Any  # of the queries, a multiple of ROWS
    end_i: Any


@triton.jit
def at(view, b, h):
    """Where the rows of batch entry b and head h begin. 64 bits."""
    return view.data + b.to(tl.int64) * view.batch + h.to(tl.int64) * view.head


# ---- Index formula -----------------------------------------------------------------------------------------


@triton.jit
def position(p, i):
    """Position of query i on the key axis."""
    return i + (p.K - p.L)


@triton.jit
def band(p, i, j):
    """The row of r for query i and key j, before it is clamped: r_zero - d(i, j)."""
    return p.r_zero + j - position(p, i)


@triton.jit
def key_at(p, i, c):
    """The key for which query i uses row c: the inverse of `band`."""
    return c - p.r_zero + position(p, i)


@triton.jit
def r_row(p, c):
    """Rows before the first and after the last repeat them."""
    return tl.minimum(tl.maximum(c, 0), p.N - 1)


# ---- Masks: one interval of keys per query, both ends of which only grow with i ----------------------------


@triton.jit
def keys_of_batch(p, key_range, b, HAS_RANGE: tl.constexpr):
    """lo <= j < hi: the keys that exist."""
    lo = 0
    hi = p.K
    if HAS_RANGE:
        lo = tl.minimum(tl.maximum(tl.load(key_range + 2 * b.to(tl.int64)), 0), p.K)
        hi = tl.minimum(tl.maximum(tl.load(key_range + 2 * b.to(tl.int64) + 1), 0), p.K)
    return lo, hi


@triton.jit
def keys_of_query(p, lo, hi, i):
    """lo <= j < hi: the keys of them that query i sees."""
    at_key = position(p, i)
    return tl.maximum(lo, at_key - p.window_left), tl.minimum(hi, at_key + p.window_right + 1)


@triton.jit
def sees(lo_i, hi_i, j):
    """Whether query i[y] sees key j of [BM, BN] or [1, BN]."""
    return (j >= lo_i[:, None]) & (j < hi_i[:, None])


# ---- Which tiles of keys a block of queries needs, and how -------------------------------------------------
#
# far   every pair is seen, and every one of them uses the first row of r (or every one the last): one product
#       per query stands for the band.
# near  every pair is seen, none is clamped: neighbouring tiles share a tile of the band.
# edge  the rest, by the general formula: masks, clamped rows.


@triton.jit
def floor_to(x, BN: tl.constexpr):
    return tl.maximum(x, 0) // BN * BN


@triton.jit
def ceil_to(x, BN: tl.constexpr):
    return (tl.maximum(x, 0) + BN - 1) // BN * BN


@triton.jit
def key_tiles(p, lo, hi, i0, BM: tl.constexpr, BN: tl.constexpr, CLAMP: tl.constexpr):
    """Eight bounds that cut the keys into edge, far (far_0 to far_1: first row of r), edge, near, edge, far
    (far_2 to far_3: last row), edge tiles, for the queries from i0 on. All but the last bound are multiples
    of BN or equal to it.

    CLAMP: whether any pair of the call is clamped; else nothing is far.
    """
    last = tl.minimum(i0 + BM, p.L) - 1
    begin, all_hi = keys_of_query(p, lo, hi, i0)
    all_lo, end = keys_of_query(p, lo, hi, last)
    begin = floor_to(begin, BN)
    end = tl.maximum(begin, end)
    all_lo = tl.minimum(tl.maximum(ceil_to(all_lo, BN), begin), end)
    all_hi = tl.minimum(floor_to(all_hi, BN), end)
    far_0 = all_lo
    if CLAMP:
        # Key 0's rows of r: the highest is that of the block's first query, the lowest that of its last.
        high = band(p, i0, 0)
        low = band(p, i0 + BM - 1, 0)
        far_1 = tl.maximum(far_0, tl.minimum(floor_to(-high, BN), all_hi))
        near_0 = tl.minimum(tl.maximum(far_1, ceil_to(-low, BN)), end)
        near_1 = tl.maximum(near_0, tl.minimum(floor_to(p.N - high, BN), all_hi))
        far_2 = tl.minimum(tl.maximum(near_1, ceil_to(p.N - low, BN)), end)
        far_3 = tl.maximum(far_2, all_hi)
    else:
        far_1 = far_0
        near_0 = far_0
        near_1 = tl.maximum(near_0, all_hi)
        far_2 = near_1
        far_3 = near_1
    return begin, far_0, far_1, near_0, near_1, far_2, far_3, end


@triton.jit
def query_tiles(p, lo, hi, j0, BM: tl.constexpr, BN: tl.constexpr, CLAMP: tl.constexpr):
    """Six bounds that cut the queries into edge, far (last row of r), near, far (first row), edge tiles, for
    the keys from j0 on. All but the last are multiples of BM or equal to it. Near pairs may be clamped here.
    """
    low = tl.maximum(j0, lo)
    high = tl.minimum(j0 + BN, hi) - 1
    origin = position(p, 0)
    begin = floor_to(low - p.window_right - origin, BM)
    end = tl.maximum(begin, tl.minimum(high + p.window_left - origin + 1, p.L))
    end = tl.where(low <= high, end, begin)
    all_lo = tl.minimum(tl.maximum(ceil_to(j0 + BN - 1 - p.window_right - origin, BM), begin), end)
    all_hi = floor_to(tl.minimum(j0 + p.window_left - origin + 1, p.L), BM)
    all_hi = tl.where((lo <= j0) & (j0 + BN <= hi), all_hi, 0)
    all_hi = tl.minimum(tl.maximum(all_hi, all_lo), end)
    if CLAMP:
        c = band(p, 0, j0)
        near_0 = tl.minimum(tl.maximum(floor_to(c - p.N + 1, BM), all_lo), all_hi)
        near_1 = tl.minimum(tl.maximum(ceil_to(c + BN, BM), near_0), all_hi)
    else:
        near_0 = all_lo
        near_1 = all_hi
    return begin, all_lo, near_0, near_1, all_hi, end


@triton.jit
def queries_of_rows(p, lo, hi, c0, BM: tl.constexpr, BN: tl.constexpr):
    """Four bounds that cut the queries into edge, near, edge tiles, for the rows of r from c0 on. Between
    all_lo and all_hi every pair is seen."""
    d_max = p.r_zero - c0
    d_min = p.r_zero - (tl.minimum(c0 + BN, p.N) - 1)
    origin = position(p, 0)
    begin = floor_to(lo + d_min - origin, BM)
    end = tl.maximum(begin, tl.minimum(hi + d_max - origin, p.L))
    any_seen = (d_min <= p.window_left) & (d_max >= -p.window_right) & (lo < hi)
    end = tl.where(any_seen, end, begin)
    all_seen = (d_max <= p.window_left) & (d_min >= -p.window_right)
    all_lo = tl.minimum(tl.maximum(ceil_to(lo + d_max - origin, BM), begin), end)
    all_hi = floor_to(tl.minimum(hi + d_min - origin, p.L), BM)
    all_hi = tl.minimum(tl.maximum(tl.where(all_seen, all_hi, 0), all_lo), end)
    return begin, all_lo, all_hi, end


@triton.jit
def within(i, chunk):
    """Where tiles of queries begin or end, as far as the chunk has them."""
    return tl.minimum(tl.maximum(i, chunk.first_i), chunk.end_i)


@triton.jit
def tile_of(t, lo_0, hi_0, lo_1, hi_1, lo_2, hi_2, lo_3, BN: tl.constexpr):
    """Where the t-th of the tiles from lo_0 to hi_0, then lo_1 to hi_1, ... begins."""
    n_0 = tl.cdiv(hi_0 - lo_0, BN)
    n_1 = n_0 + tl.cdiv(hi_1 - lo_1, BN)
    n_2 = n_1 + tl.cdiv(hi_2 - lo_2, BN)
    j = lo_3 + (t - n_2) * BN
    j = tl.where(t < n_2, lo_2 + (t - n_1) * BN, j)
    j = tl.where(t < n_1, lo_1 + (t - n_0) * BN, j)
    return tl.where(t < n_0, lo_0 + t * BN, j)


# ---- The band: reading it with row a moved a places left is the relative shift -----------------------------


@triton.jit
def skew(tile_0, tile_1, first, BN: tl.constexpr):
    """out[y, x] = [tile_0 tile_1][y, first[y] + x], for 0 <= first <= BN: [BM, BN] from two neighbours.

    Both tiles go through shared memory, by one gather along a flattened axis. A row of the result is a run of
    neighbouring columns, so that the addresses of a thread's elements differ by constants; and the order of
    the flattened axis keeps the lanes of a warp in banks of their own, both ways: tensor cores leave lane
    4 a + b with columns 2 b and 2 b + 1 (+ 8 n) of row a (+ 8 m). In 16 bits those two share a bank; in 32
    bits even columns come first.
    """
    BM: tl.constexpr = tile_0.shape[0]
    y = tl.arange(0, BM)[:, None]
    x = tl.arange(0, BN)[None, :]
    column = (x & 7) + first[:, None]
    # The flattened axis has blocks of 8 rows by 8 columns of both tiles, 2 BN / 8 of them to 8 rows.
    block = (x & -8) + (column & -8) + (y >> 3) * (2 * BN)  # times 8
    both = tl.reshape(tl.join(tile_0, tile_1), [BM // 8, 8, BN // 8, 4, 2, 2])
    if tile_0.dtype.primitive_bitwidth < 32:
        place = block * 8 + ((column & 7) | ((y & 7) * 8))
        place = tl.permute(tl.reshape(place, [BM // 8, 8, BN // 8, 4, 2]), 0, 2, 1, 3, 4)
        both = tl.permute(both, 0, 5, 2, 1, 3, 4)
        out = tl.gather(tl.reshape(both, [2 * BM * BN]), tl.reshape(place, [BM * BN]), 0)
        out = tl.permute(tl.reshape(out, [BM // 8, BN // 8, 8, 4, 2]), 0, 2, 1, 3, 4)
    else:
        place = block * 8 + ((column & 1) * 32 | ((column >> 1) & 3) | ((y & 7) * 4))
        place = tl.permute(tl.reshape(place, [BM // 8, 8, BN // 8, 4, 2]), 0, 2, 4, 1, 3)
        both = tl.permute(both, 0, 5, 2, 4, 1, 3)
        out = tl.gather(tl.reshape(both, [2 * BM * BN]), tl.reshape(place, [BM * BN]), 0)
        out = tl.permute(tl.reshape(out, [BM // 8, BN // 8, 2, 8, 4]), 0, 3, 1, 4, 2)
    return tl.reshape(out, [BM, BN])


# ---- dS in memory ------------------------------------------------------------------------------------------


@triton.jit
def slopes_of(slopes, p, chunk, b, h):
    """Where dS of a head's query 0 would begin, and how far its queries lie apart. 64 bits."""
    columns = (ceil_to(p.K, ROWS)).to(tl.int64)
    rows = ceil_to(chunk.end_i - chunk.first_i, ROWS)
    head = (b - chunk.first_b) * chunk.heads + (h - chunk.first_h)
    return slopes + (head.to(tl.int64) * rows - chunk.first_i) * columns, columns


@triton.jit
def tile_of_slopes(rows, columns, i0, y, j0, x, STEP: tl.constexpr):
    """Pointers to dS of queries i0 + y and keys j0 + x or, of STEP 1, j0 + y + x: a tile of the band's."""
    return (
        rows
        + (tl.cast(i0, tl.int64) * columns + j0)
        + (y.to(tl.int64) * (columns + STEP))[:, None]
        + x[None, :]
    )


# ---- Dropout -----------------------------------------------------------------------------------------------


@triton.jit
def kept(p, seed, b, h, i, j, BN: tl.constexpr):
    """Whether dropout keeps query i[y] and key j + x: [BM, BN]. csrc/philox.h defines the mask.

    64 neighbouring keys share 16 calls of Philox; each call's four words serve four of them. j: a multiple of
    64 or, if BN divides 64, of BN.
    """
    # The calls that a query needs: groups of 64 keys from that of its first key on.
    GROUPS: tl.constexpr = (BN + 63) // 64
    group = j >> 6
    queries = tl.zeros_like(i)[:, None]
    call = queries + (group * 16 + tl.arange(0, 16 * GROUPS))[None, :]
    blank = tl.zeros_like(call)
    word_0, word_1, word_2, word_3 = tl.philox(seed, call, blank + i[:, None], blank + h, blank + b)
    threshold = p.dropout_threshold.to(tl.uint32)
    bits = (word_0 >= threshold).to(tl.int32)
    bits |= (word_1 >= threshold).to(tl.int32) << 1
    bits |= (word_2 >= threshold).to(tl.int32) << 2
    bits |= (word_3 >= threshold).to(tl.int32) << 3
    key = queries + (j + tl.arange(0, BN))[None, :]
    of_key = tl.gather(bits, ((key >> 6) - group) * 16 + (key & 15), 1)
    return ((of_key >> ((key >> 4) & 3)) & 1) != 0


# ---- Rows in memory ----------------------------------------------------------------------------------------


@triton.jit
def load_rows(base, stride, start, rows, exist, D: tl.constexpr, BD: tl.constexpr, ALL: tl.constexpr):
    """Rows start + rows: [rows, BD]; zeros where one does not exist, and beyond column D. ALL: all exist.

    Only the start is an address of 64 bits: the launcher sees to it that offsets within a tile fit into 32.
    Where 8 and not 16 divides D, it sees to it that rows begin at multiples of 16 bytes: for loads as wide as
    that. (Triton notes of a stride whether 16 divides it, and no less.)
    """
    d = tl.arange(0, BD)[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + d)
    if D % 16 == 8:
        pointers = tl.multiple_of(pointers, (16, 16))
    mask = None if ALL else exist[:, None]
    if D != BD:
        mask = d < D if ALL else mask & (d < D)
    return tl.load(pointers, mask=mask, other=None if ALL and D == BD else 0.0)


@triton.jit
def store_rows(base, stride, start, rows, exist, tile, D: tl.constexpr, BD: tl.constexpr):
    d = tl.arange(0, BD)[None, :]
    pointers = base + (start + rows).to(tl.int64)[:, None] * stride + d
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=exist[:, None] & (d < D))


@triton.jit
def load_r(p, base, stride, c, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """The rows of r for columns c ... c + BN - 1 of the band, clamped: [BN, BD]."""
    start = r_row(p, c)
    rows = r_row(p, c + tl.arange(0, BN)) - start
    return load_rows(base, stride, start, rows, None, D, BD, True)


@triton.jit
def load_row(base, stride, row, D: tl.constexpr, BD: tl.constexpr):
    """[BD], in float32."""
    d = tl.arange(0, BD)
    pointers = base + tl.cast(row, tl.int64) * stride + d
    return tl.load(pointers, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def add_bias(q, bias, h, D: tl.constexpr, BD: tl.constexpr, HAS_BIAS: tl.constexpr):
    """q + u or q + v for bias [H, D], rounded to q's dtype as the operand of a product must be."""
    if HAS_BIAS:
        q = (q.to(tl.float32) + load_row(bias, D, h, D, BD)[None, :]).to(q.dtype)
    return q


# ---- Products ----------------------------------------------------------------------------------------------


@triton.jit
def product(x, y):
    """x y^T, accumulated in float32. IEEE: without it float32 inputs are rounded to tf32."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def times_row(x, row):
    """x row for row [BD], in float32: a number per row of x."""
    return tl.sum(x.to(tl.float32) * row[None, :], 1)


@triton.jit
def accumulate(x, y, acc):
    """acc + x y."""
    return tl.dot(x, y, acc, input_precision="ieee")


# ---- Scores ------------------------------------------------------------------------------------------------


@triton.jit
def to_base_2(score, p, NEGATIVE: tl.constexpr):
    """score and a scale, never negative, such that 2^(score * scale) = exp(p.scale * score). Forward's lse is
    made with this very scale: p.scale differs from it by a rounding, which huge scores would multiply."""
    if NEGATIVE:
        score = -score
    return score, tl.abs(p.scale) * LOG2_E


# ---- NaN and infinity --------------------------------------------------------------------------------------
#
# A query is affected by what it sees and by nothing else; but a hidden key's probability, 0, times its NaN is
# NaN. On tiles with hidden pairs products take the finite numbers, and NaN is added where it is seen.


@triton.jit
def finite(x):
    """x, with NaN and infinity replaced by 0."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0).to(x.dtype)

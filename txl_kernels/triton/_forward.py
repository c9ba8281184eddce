"""The forward kernels. Where blocks of queries are few (decode), programs share out the keys too, and
`merge_kernel` joins what they found."""

from __future__ import annotations

import triton
import triton.language as tl

from txl_kernels.triton.tiles import (
    LN_2,
    LOG2_E,
    LOWEST,
    Problem,
    accumulate,
    add_bias,
    at,
    band,
    finite,
    kept,
    key_tiles,
    keys_of_batch,
    keys_of_query,
    load_r,
    load_row,
    load_rows,
    product,
    sees,
    skew,
    store_rows,
    tile_of,
    times_row,
    to_base_2,
)


@triton.jit
def _attend(
    largest, total, acc, score, v_tile, seen, p, seed, b, h, i, j0,
    BN: tl.constexpr, EDGE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """A step of online softmax: score [BM, BN], not yet scaled, times v_tile [BN, BD]."""
    # Scaled after the subtraction, so that the largest has weight 1 whatever its size. score * scale - base
    # is a fused multiply-add: it keeps what rounding took from a huge base, and that may be any exponent.
    score, scale = to_base_2(score, p, NEGATIVE)
    if EDGE:
        score = tl.where(seen, score, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(score, 1))  # finite from the start: -inf - -inf would be NaN
    weight = tl.exp2((score - new_largest[:, None]) * scale)
    decay = tl.exp2((largest - new_largest) * scale)
    total = total * decay + tl.sum(weight, 1)
    acc = acc * decay[:, None]
    if DROPOUT:
        weight = tl.where(kept(p, seed, b, h, i, j0, BN), weight, 0.0)
    if EDGE:
        clean = finite(v_tile)
        taint = v_tile - clean
        if tl.max((taint != 0).to(tl.int32)) > 0:
            marks = (taint != 0).to(v_tile.dtype)
            acc = tl.where(
                tl.dot(seen.to(v_tile.dtype), marks, input_precision="ieee") > 0, float("nan"), acc
            )
        v_tile = clean
    acc = accumulate(weight.to(v_tile.dtype), v_tile, acc)
    return new_largest, total, acc


@triton.jit(do_not_specialize=[*Problem._fields, "splits", "split_keys"])
def forward_kernel(
    q_u, q_v, k, v, r, bias_u, bias_v, key_range, seed, out, lse,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale, splits,
    split_keys, D: tl.constexpr, BD: tl.constexpr, HAS_U: tl.constexpr, HAS_V: tl.constexpr,
    HAS_RANGE: tl.constexpr, CLAMP: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out and lse of BM queries, over the `split_keys` keys of one split.

    q_u, q_v: q + u and q + v as they are, or both q, and the biases [H, D] are added here. Of more than one
    split, out has a batch entry for every split of every one, and lse [2, splits * B, H, L] are the largest
    score, not yet scaled, and the total of each.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    # Neighbours in the grid share a head, and so its keys in L2; the blocks that see most keys go first.
    program = tl.program_id(0)
    blocks = tl.cdiv(p.L, BM)
    i0 = (blocks - 1 - program % blocks) * BM
    split = program // blocks % splits
    h = program // (blocks * splits) % p.H
    b = program // (blocks * splits) // p.H

    y = tl.arange(0, BM)
    x = tl.arange(0, BN)
    i = i0 + y
    first = BM - 1 - y  # where in the band a query's own columns begin

    k_rows = at(k, b, h)
    v_rows = at(v, b, h)
    r_rows = at(r, b, h)
    q_u = add_bias(load_rows(at(q_u, b, h), q_u.row, i0, y, i < p.L, D, BD, False), bias_u, h, D, BD, HAS_U)
    q_v = add_bias(load_rows(at(q_v, b, h), q_v.row, i0, y, i < p.L, D, BD, False), bias_v, h, D, BD, HAS_V)
    if DROPOUT:
        seed = tl.load(seed)

    lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
    lo = tl.maximum(lo, split * split_keys)
    hi = tl.minimum(hi, (split + 1) * split_keys)
    lo_i, hi_i = keys_of_query(p, lo, hi, i)
    begin, far_0, far_1, near_0, near_1, far_2, far_3, end = key_tiles(p, lo, hi, i0, BM, BN, CLAMP)

    largest = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)

    if CLAMP:  # far: the position term is one number per query
        tiles = (far_1 - far_0) // BN
        q_first = times_row(q_v, load_row(r_rows, r.row, 0, D, BD))
        q_last = times_row(q_v, load_row(r_rows, r.row, p.N - 1, D, BD))
        for t in range(0, tiles + (far_3 - far_2) // BN):
            j0 = tile_of(t, far_0, far_1, far_2, far_3, far_3, far_3, far_3, BN)
            k_tile = load_rows(k_rows, k.row, j0, x, None, D, BD, True)
            score = product(q_u, k_tile) + tl.where(t < tiles, q_first, q_last)[:, None]
            v_tile = load_rows(v_rows, v.row, j0, x, None, D, BD, True)
            largest, total, acc = _attend(
                largest, total, acc, score, v_tile, None, p, seed, b, h, i, j0, BN, False, NEGATIVE, DROPOUT
            )

    # near: the second tile of the band is the next one's first
    c = band(p, i0 + BM - 1, near_0)
    tile_0 = product(q_v, load_r(p, r_rows, r.row, c, D, BD, BN))
    for j0 in range(near_0, near_1, BN):
        k_tile = load_rows(k_rows, k.row, j0, x, None, D, BD, True)
        c = band(p, i0 + BM - 1, j0 + BN)
        r_tile = load_r(p, r_rows, r.row, c, D, BD, BN)
        tile_1 = product(q_v, r_tile)
        score = product(q_u, k_tile) + skew(tile_0, tile_1, first, BN)
        tile_0 = tile_1
        v_tile = load_rows(v_rows, v.row, j0, x, None, D, BD, True)
        largest, total, acc = _attend(
            largest, total, acc, score, v_tile, None, p, seed, b, h, i, j0, BN, False, NEGATIVE, DROPOUT
        )

    # edge: the general case
    edges = tl.cdiv(far_0 - begin, BN) + tl.cdiv(near_0 - far_1, BN)
    edges += tl.cdiv(far_2 - near_1, BN) + tl.cdiv(end - far_3, BN)
    for t in tl.range(0, edges, num_stages=1):
        j0 = tile_of(t, begin, far_0, far_1, near_0, near_1, far_2, far_3, BN)
        j = j0 + x
        seen = sees(lo_i, hi_i, j[None, :])
        k_tile = load_rows(k_rows, k.row, j0, x, (j >= lo) & (j < hi), D, BD, False)
        c = band(p, i0 + BM - 1, j0)
        tile_0 = product(q_v, load_r(p, r_rows, r.row, c, D, BD, BN))
        tile_1 = product(q_v, load_r(p, r_rows, r.row, c + BN, D, BD, BN))
        score = product(q_u, k_tile) + skew(tile_0, tile_1, first, BN)
        v_tile = load_rows(v_rows, v.row, j0, x, (j >= lo) & (j < hi), D, BD, False)
        largest, total, acc = _attend(
            largest, total, acc, score, v_tile, seen, p, seed, b, h, i, j0, BN, True, NEGATIVE, DROPOUT
        )

    any_seen = lo_i < hi_i
    # Every score is -inf: no softmax exists, unless other splits have more; `merge_kernel` will see.
    nothing = any_seen & (total == 0)
    total = tl.where(nothing & (splits == 1), float("nan"), total)
    largest = tl.where(nothing & (splits > 1), float("-inf"), largest)
    weight = p.dropout_scale / tl.where(total == 0, 1.0, total)
    entry = split * p.B + b
    store_rows(at(out, entry, h), out.row, i0, y, i < p.L, acc * weight[:, None], D, BD)
    row = (entry.to(tl.int64) * p.H + h) * p.L + i
    _, scale = to_base_2(largest, p, False)
    lse_i = largest * scale * LN_2 + tl.log(tl.where(total == 0, 1.0, total))
    lse_i = tl.where(any_seen, lse_i, float("-inf"))
    tl.store(lse + row, tl.where(splits > 1, largest, lse_i), mask=i < p.L)
    tl.store(lse + splits.to(tl.int64) * p.B * p.H * p.L + row, total, mask=i < tl.where(splits > 1, p.L, 0))


@triton.jit
def _splits_of_query(largest_and_total, split, b, h, i, B, H, L, splits):
    """Of some splits of a query: largest score and total, the entry of part, and whether they exist."""
    exist = split < splits
    entry = (split * B + b).to(tl.int64)
    pointers = largest_and_total + (entry * H + h) * L + i
    largest = tl.load(pointers, mask=exist, other=LOWEST)
    totals = tl.load(pointers + splits.to(tl.int64) * B * H * L, mask=exist, other=0.0)
    return largest, totals, entry, exist


@triton.jit(do_not_specialize=["B", "H", "L", "splits", "scale"])
def merge_kernel(
    part, largest_and_total, out, lse, B, H, L, splits, scale,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """out and lse of one query from its splits. Far from zero the difference of two lse would be far less
    precise than largest and total are.

    part: View of [splits * B, H, L, D]. largest_and_total: [2, splits * B, H, L]; the largest score is -inf
    where all are that were seen. scale: of the largest, not negative. BS >= splits; BT of them are added at a
    time.
    """
    program = tl.program_id(0)
    i = program % L
    h = program // L % H
    b = program // L // H

    scale *= LOG2_E

    largest, totals, _, _ = _splits_of_query(largest_and_total, tl.arange(0, BS), b, h, i, B, H, L, splits)
    base = tl.maximum(tl.max(largest, 0), LOWEST)
    total = tl.sum(tl.exp2((largest - base) * scale) * totals, 0)
    total = tl.where((total == 0) & (tl.min(largest, 0) == float("-inf")), float("nan"), total)

    d = tl.arange(0, BD)
    row = part.data + h.to(tl.int64) * part.head + i * part.row
    acc = tl.zeros([BD], tl.float32)
    for first in range(0, splits, BT):
        split = first + tl.arange(0, BT)
        score, weight, entry, exist = _splits_of_query(largest_and_total, split, b, h, i, B, H, L, splits)
        weight *= tl.exp2((score - base) * scale)
        pointers = row + entry[:, None] * part.batch + d[None, :]
        tile = tl.load(pointers, mask=exist[:, None] & (d < D)[None, :], other=0.0)  # [BT, BD]
        # A split that saw nothing, or scores of -inf alone, has weight 0 and zeros.
        acc += tl.sum(tile * weight[:, None], 0)
    acc /= tl.where(total == 0, 1.0, total)  # 0 if none saw any
    tl.store(at(out, b, h) + i.to(tl.int64) * out.row + d, acc.to(out.data.dtype.element_ty), mask=d < D)
    tl.store(lse + (b.to(tl.int64) * H + h) * L + i, base * scale * LN_2 + tl.log(total))

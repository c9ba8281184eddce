"""The backward kernels: scores are rebuilt three times, each time in the order in which one kind of gradient
is a sum that a program can keep to itself. So no atomics, and the same bits every time.

dq_kernel      a block of queries, over keys      dq, and parts of du, dv_bias and of dr's clamped rows; delta
dk_dv_kernel   a block of keys, over queries      dk, dv
dr_kernel      a block of rows of r, over queries dr: there k and v are the banded ones

With P the probabilities and keep the dropout mask over 1 - p:

    dP = dO v^T * keep              delta = sum_d dO * out          dS = P * (dP - delta)
    dv = (P * keep)^T dO            dk = scale dS^T (q + u)
    dq = scale (dS k + band(dS) r)  dr = scale band(dS)^T (q + v)
"""

from __future__ import annotations

import triton
import triton.language as tl

from txl_kernels.triton.tiles import (
    LOG2_E,
    Problem,
    accumulate,
    at,
    band,
    finite,
    kept,
    key_at,
    key_tiles,
    keys_of_batch,
    keys_of_query,
    load_r,
    load_row,
    load_rows,
    product,
    queries_of_rows,
    query_tiles,
    sees,
    skew,
    store_rows,
    tile_of,
    times_row,
    to_base_2,
)


@triton.jit
def _load_lse(lse, p, b, h, i):
    """To base 2; +inf, which makes every probability 0, for queries beyond the last."""
    row = (b.to(tl.int64) * p.H + h) * p.L + i
    return tl.load(lse + row, mask=i < p.L, other=float("inf")) * LOG2_E


@triton.jit
def _load_delta(delta, p, b, h, i):
    row = (b.to(tl.int64) * p.H + h) * p.L + i
    return tl.load(delta + row, mask=i < p.L, other=0.0)


@triton.jit
def _gradient(
    score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j,
    BN: tl.constexpr, ALIGNED: tl.constexpr,
    EDGE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """P * keep and dS of a tile from its score, not yet scaled, and dO v^T. j: the key of column 0."""
    score, scale = to_base_2(score, p, NEGATIVE)
    # At most 1, also where lse is as coarse as the scores' differences. NaN stays.
    exponent = tl.fma(score, scale, -lse_i[:, None])
    weight = tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    if EDGE:
        weight = tl.where(seen, weight, 0.0)
    kept_weight = weight
    if DROPOUT:
        keep = kept(p, seed, b, h, i, j, BN, ALIGNED)
        kept_weight = tl.where(keep, weight * p.dropout_scale, 0.0)
        dout_v = tl.where(keep, dout_v * p.dropout_scale, 0.0)
    gradient = weight * (dout_v - delta_i[:, None])
    if EDGE:  # a hidden pair may hold NaN
        gradient = tl.where(seen, gradient, 0.0)
    return kept_weight, gradient


@triton.jit(do_not_specialize=Problem._fields)
def dq_kernel(
    q_u, q_v, k, v, r, key_range, seed, out, lse, dout, dq, delta, parts,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr,
    CLAMP: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq and delta of BM queries.

    parts [B, H, blocks of queries, 4, D], float32: sums over the block of the content part of dq, of its
    position part, and of what its clamped pairs add to the first and to the last row of dr.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    program = tl.program_id(0)
    blocks = tl.cdiv(p.L, BM)
    block = blocks - 1 - program % blocks
    i0 = block * BM
    h = program // blocks % p.H
    b = program // blocks // p.H

    y = tl.arange(0, BM)
    x = tl.arange(0, BN)
    i = i0 + y
    exist = i < p.L
    first = BM - 1 - y

    k_rows = at(k, b, h)
    v_rows = at(v, b, h)
    r_rows = at(r, b, h)
    q_u_tile = load_rows(at(q_u, b, h), q_u.row, i0, y, exist, D, BD, False)
    q_v_tile = load_rows(at(q_v, b, h), q_v.row, i0, y, exist, D, BD, False)
    dout_tile = load_rows(at(dout, b, h), dout.row, i0, y, exist, D, BD, False)
    out_tile = load_rows(at(out, b, h), out.row, i0, y, exist, D, BD, False)
    delta_i = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + (b.to(tl.int64) * p.H + h) * p.L + i, delta_i, mask=exist)
    lse_i = _load_lse(lse, p, b, h, i)
    if DROPOUT:
        seed = tl.load(seed)

    lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
    lo_i, hi_i = keys_of_query(p, lo, hi, i)
    begin, far_0, far_1, near_0, near_1, far_2, far_3, end = key_tiles(p, lo, hi, i0, BM, BN, CLAMP)

    content = tl.zeros([BM, BD], tl.float32)
    place = tl.zeros([BM, BD], tl.float32)

    if CLAMP:
        # Sums of dS over the pairs that use the first row of r because they are clamped, and the last.
        clamped_first = tl.zeros([BM], tl.float32)
        clamped_last = tl.zeros([BM], tl.float32)
        r_first = load_row(r_rows, r.row, 0, D, BD)
        r_last = load_row(r_rows, r.row, p.N - 1, D, BD)
        q_first = times_row(q_v_tile, r_first)
        q_last = times_row(q_v_tile, r_last)
        tiles = (far_1 - far_0) // BN
        for t in range(0, tiles + (far_3 - far_2) // BN):
            j0 = tile_of(t, far_0, far_1, far_2, far_3, far_3, far_3, far_3, BN)
            k_tile = load_rows(k_rows, k.row, j0, x, None, D, BD, True)
            v_tile = load_rows(v_rows, v.row, j0, x, None, D, BD, True)
            score = product(q_u_tile, k_tile) + tl.where(t < tiles, q_first, q_last)[:, None]
            dout_v = product(dout_tile, v_tile)
            _, ds = _gradient(
                score, dout_v, None, lse_i, delta_i, p, seed, b, h, i, j0,
                BN, True, False, NEGATIVE, DROPOUT,
            )  # fmt: skip
            content = accumulate(ds.to(q_u_tile.dtype), k_tile, content)
            clamped = tl.sum(ds, 1)
            clamped_first += tl.where(t < tiles, clamped, 0.0)
            clamped_last += tl.where(t < tiles, 0.0, clamped)

    c = band(p, i0 + BM - 1, near_0)
    tile_0 = product(q_v_tile, load_r(p, r_rows, r.row, c, D, BD, BN))
    # What the key tile before adds to the band tile that this one begins with.
    carry = tl.zeros([BM, BN], q_v_tile.dtype)
    for j0 in range(near_0, near_1, BN):
        # Each tile is loaded just before it is needed: fewer are there at a time.
        c = band(p, i0 + BM - 1, j0)
        tile_1 = product(q_v_tile, load_r(p, r_rows, r.row, c + BN, D, BD, BN))
        k_tile = load_rows(k_rows, k.row, j0, x, None, D, BD, True)
        score = product(q_u_tile, k_tile) + skew(tile_0, tile_1, first, BN)
        tile_0 = tile_1
        v_tile = load_rows(v_rows, v.row, j0, x, None, D, BD, True)
        dout_v = product(dout_tile, v_tile)
        _, ds = _gradient(
            score, dout_v, None, lse_i, delta_i, p, seed, b, h, i, j0,
            BN, True, False, NEGATIVE, DROPOUT,
        )  # fmt: skip
        ds = ds.to(q_u_tile.dtype)
        content = accumulate(ds, k_tile, content)
        banded = skew(carry, ds, BN - first, BN)
        carry = ds
        # The first tile of the band may have rows of r that are not seen; later ones go to the tensor cores
        # as they are, not by way of registers. Within a branch no load runs ahead: at D = 64 two stages then
        # leave room for two blocks.
        if j0 == near_0:
            place = accumulate(banded, finite(load_r(p, r_rows, r.row, c, D, BD, BN)), place)
        else:
            place = accumulate(banded, load_r(p, r_rows, r.row, c, D, BD, BN), place)
    c = band(p, i0 + BM - 1, near_1)
    r_tile = load_r(p, r_rows, r.row, c, D, BD, BN)
    place = accumulate(skew(carry, tl.zeros_like(carry), BN - first, BN), finite(r_tile), place)

    edges = tl.cdiv(far_0 - begin, BN) + tl.cdiv(near_0 - far_1, BN)
    edges += tl.cdiv(far_2 - near_1, BN) + tl.cdiv(end - far_3, BN)
    for t in tl.range(0, edges, num_stages=1):
        j0 = tile_of(t, begin, far_0, far_1, near_0, near_1, far_2, far_3, BN)
        j = j0 + x
        seen = sees(lo_i, hi_i, j[None, :])
        c = band(p, i0 + BM - 1, j0)
        tile_0 = product(q_v_tile, load_r(p, r_rows, r.row, c, D, BD, BN))
        tile_1 = product(q_v_tile, load_r(p, r_rows, r.row, c + BN, D, BD, BN))
        k_tile = load_rows(k_rows, k.row, j0, x, (j >= lo) & (j < hi), D, BD, False)
        score = product(q_u_tile, k_tile) + skew(tile_0, tile_1, first, BN)
        v_tile = load_rows(v_rows, v.row, j0, x, (j >= lo) & (j < hi), D, BD, False)
        dout_v = product(dout_tile, v_tile)
        _, ds = _gradient(
            score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j0,
            BN, True, True, NEGATIVE, DROPOUT,
        )  # fmt: skip
        content = accumulate(ds.to(q_u_tile.dtype), finite(k_tile), content)
        if CLAMP:
            c_pair = band(p, i[:, None], j[None, :])
            clamped_first += tl.sum(tl.where(c_pair < 0, ds, 0.0), 1)
            clamped_last += tl.sum(tl.where(c_pair > p.N - 1, ds, 0.0), 1)
            ds = tl.where((c_pair >= 0) & (c_pair < p.N), ds, 0.0)
        ds = ds.to(q_v_tile.dtype)
        none = tl.zeros_like(ds)
        r_tile = load_r(p, r_rows, r.row, c, D, BD, BN)
        place = accumulate(skew(none, ds, BN - first, BN), finite(r_tile), place)
        r_tile = load_r(p, r_rows, r.row, c + BN, D, BD, BN)
        place = accumulate(skew(ds, none, BN - first, BN), finite(r_tile), place)

    # Queries beyond the last saw what there was: not even a NaN of theirs may reach the sums.
    content = tl.where(exist[:, None], content, 0.0)
    d = tl.arange(0, BD)
    part = parts + ((b.to(tl.int64) * p.H + h) * blocks + block) * 4 * D + d
    if CLAMP:
        place += clamped_first[:, None] * finite(r_first)[None, :]
        place += clamped_last[:, None] * finite(r_last)[None, :]
        first_part = tl.where(exist, clamped_first, 0.0)[:, None] * finite(q_v_tile).to(tl.float32)
        last_part = tl.where(exist, clamped_last, 0.0)[:, None] * finite(q_v_tile).to(tl.float32)
        tl.store(part + 2 * D, tl.sum(first_part, 0) * p.scale, mask=d < D)
        tl.store(part + 3 * D, tl.sum(last_part, 0) * p.scale, mask=d < D)
    place = tl.where(exist[:, None], place, 0.0)
    tl.store(part, tl.sum(content, 0) * p.scale, mask=d < D)
    tl.store(part + D, tl.sum(place, 0) * p.scale, mask=d < D)
    store_rows(at(dq, b, h), dq.row, i0, y, exist, (content + place) * p.scale, D, BD)


@triton.jit
def _add_queries(
    dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, r_end,
    q_u, q_v, r, seed, lse, dout, delta, b, h, p,
    MODE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the queries from i0 on add to dk and dv of the keys from j0 on. r_end [BD]: r for far pairs."""
    EDGE: tl.constexpr = MODE == "edge"
    y = tl.arange(0, BM)
    i = i0 + y
    exist = i < p.L
    q_v_tile = load_rows(at(q_v, b, h), q_v.row, i0, y, exist, D, BD, not EDGE)
    if MODE == "far":
        position_term = times_row(q_v_tile, r_end)[:, None]
    else:
        c = band(p, i0 + BM - 1, j0)
        tile_0 = product(q_v_tile, load_r(p, at(r, b, h), r.row, c, D, BD, BN))
        tile_1 = product(q_v_tile, load_r(p, at(r, b, h), r.row, c + BN, D, BD, BN))
        position_term = skew(tile_0, tile_1, BM - 1 - y, BN)
    q_u_tile = load_rows(at(q_u, b, h), q_u.row, i0, y, exist, D, BD, not EDGE)
    score = product(q_u_tile, k_tile) + position_term

    seen = None
    if EDGE:
        lo_i, hi_i = keys_of_query(p, lo, hi, i)
        j = j0 + tl.arange(0, BN)
        seen = sees(lo_i, hi_i, j[None, :]) & exist[:, None]
    lse_i = _load_lse(lse, p, b, h, i)
    delta_i = _load_delta(delta, p, b, h, i)
    dout_tile = load_rows(at(dout, b, h), dout.row, i0, y, exist, D, BD, not EDGE)
    dout_v = product(dout_tile, v_tile)
    weight, ds = _gradient(
        score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j0, BN, True, EDGE, NEGATIVE, DROPOUT
    )
    if EDGE:
        # A NaN of dO reaches dv by the probabilities of the query that it belongs to, where they are seen.
        clean = finite(dout_tile)
        taint = tl.sum((dout_tile - clean).to(tl.float32), 1)
        weight = tl.where(seen, weight + taint[:, None], 0.0)
        dout_tile = clean
        q_u_tile = finite(q_u_tile)
    dv_tile = accumulate(tl.trans(weight.to(dout_tile.dtype)), dout_tile, dv_tile)
    dk_tile = accumulate(tl.trans(ds.to(q_u_tile.dtype)), q_u_tile, dk_tile)
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=Problem._fields)
def dk_dv_kernel(
    q_u, q_v, k, v, r, key_range, seed, lse, dout, delta, dk, dv,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr, CLAMP: tl.constexpr, NEGATIVE: tl.constexpr,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of BN keys."""
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    program = tl.program_id(0)
    blocks = tl.cdiv(p.K, BN)
    j0 = program % blocks * BN
    h = program // blocks % p.H
    b = program // blocks // p.H

    x = tl.arange(0, BN)
    j = j0 + x
    lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
    exist = (j >= lo) & (j < hi)
    k_tile = load_rows(at(k, b, h), k.row, j0, x, exist, D, BD, False)
    v_tile = load_rows(at(v, b, h), v.row, j0, x, exist, D, BD, False)
    dk_tile = tl.zeros([BN, BD], tl.float32)
    dv_tile = tl.zeros([BN, BD], tl.float32)
    if DROPOUT:
        seed = tl.load(seed)

    begin, all_lo, near_0, near_1, all_hi, end = query_tiles(p, lo, hi, j0, BM, BN, CLAMP)
    if CLAMP:
        r_rows = at(r, b, h)
        r_first = load_row(r_rows, r.row, 0, D, BD)
        r_last = load_row(r_rows, r.row, p.N - 1, D, BD)
        tiles = (near_0 - all_lo) // BM
        for t in range(0, tiles + (all_hi - near_1) // BM):
            i0 = tile_of(t, all_lo, near_0, near_1, all_hi, all_hi, all_hi, all_hi, BM)
            r_end = tl.where(t < tiles, r_last, r_first)
            dk_tile, dv_tile = _add_queries(
                dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, r_end,
                q_u, q_v, r, seed, lse, dout, delta, b, h, p,
                "far", NEGATIVE, DROPOUT, D, BD, BM, BN,
            )  # fmt: skip
    for i0 in range(near_0, near_1, BM):
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, None,
            q_u, q_v, r, seed, lse, dout, delta, b, h, p,
            "near", NEGATIVE, DROPOUT, D, BD, BM, BN,
        )  # fmt: skip
    for t in tl.range(0, tl.cdiv(all_lo - begin, BM) + tl.cdiv(end - all_hi, BM), num_stages=1):
        i0 = tile_of(t, begin, all_lo, all_hi, end, end, end, end, BM)
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, None,
            q_u, q_v, r, seed, lse, dout, delta, b, h, p,
            "edge", NEGATIVE, DROPOUT, D, BD, BM, BN,
        )  # fmt: skip

    store_rows(at(dk, b, h), dk.row, j0, x, j < p.K, dk_tile * p.scale, D, BD)
    store_rows(at(dv, b, h), dv.row, j0, x, j < p.K, dv_tile, D, BD)


@triton.jit
def _add_queries_by_row(
    dr_tile, i0, c0, lo, hi, r_tile, q_u, q_v, k, v, seed, lse, dout, delta, b, h, p,
    EDGE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the queries from i0 on add to dr of the rows from c0 on.

    Column x of a tile is row c0 + x of r. Its key is one further for every next query: here the products with
    k and v are the bands.
    """
    y = tl.arange(0, BM)
    x = tl.arange(0, BN)
    i = i0 + y
    exist = i < p.L
    q_u_tile = load_rows(at(q_u, b, h), q_u.row, i0, y, exist, D, BD, not EDGE)
    q_v_tile = load_rows(at(q_v, b, h), q_v.row, i0, y, exist, D, BD, not EDGE)
    dout_tile = load_rows(at(dout, b, h), dout.row, i0, y, exist, D, BD, not EDGE)
    j0 = key_at(p, i0, c0)
    exist_0 = (j0 + x >= lo) & (j0 + x < hi)
    exist_1 = (j0 + BN + x >= lo) & (j0 + BN + x < hi)
    k_0 = load_rows(at(k, b, h), k.row, j0, x, exist_0, D, BD, False)
    k_1 = load_rows(at(k, b, h), k.row, j0 + BN, x, exist_1, D, BD, False)
    content_term = skew(product(q_u_tile, k_0), product(q_u_tile, k_1), y, BN)
    score = product(q_v_tile, r_tile) + content_term
    v_0 = load_rows(at(v, b, h), v.row, j0, x, exist_0, D, BD, False)
    v_1 = load_rows(at(v, b, h), v.row, j0 + BN, x, exist_1, D, BD, False)
    dout_v = skew(product(dout_tile, v_0), product(dout_tile, v_1), y, BN)

    seen = None
    if EDGE:
        lo_i, hi_i = keys_of_query(p, lo, hi, i)
        j = j0 + y[:, None] + x[None, :]
        seen = sees(lo_i, hi_i, j) & exist[:, None]
    lse_i = _load_lse(lse, p, b, h, i)
    delta_i = _load_delta(delta, p, b, h, i)
    _, ds = _gradient(
        score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j0 + y, BN, False, EDGE, NEGATIVE, DROPOUT
    )
    if EDGE:
        q_v_tile = finite(q_v_tile)
    return accumulate(tl.trans(ds.to(q_v_tile.dtype)), q_v_tile, dr_tile)


@triton.jit(do_not_specialize=[*Problem._fields, "entries"])
def dr_kernel(
    q_u, q_v, k, v, r, key_range, seed, lse, dout, delta, sums, dr,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale, entries,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr, CLAMP: tl.constexpr, NEGATIVE: tl.constexpr,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dr of BN rows of r, over `entries` batch entries: those of a split, which is also dr's own batch entry.

    sums [H, 4, D]: of each head the last two are what clamped pairs add to the first and to the last row.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    program = tl.program_id(0)
    blocks = tl.cdiv(p.N, BN)
    c0 = program % blocks * BN
    h = program // blocks % p.H
    split = program // blocks // p.H

    c = c0 + tl.arange(0, BN)
    r_tile = load_rows(at(r, split, h), r.row, c0, c - c0, c < p.N, D, BD, False)
    dr_tile = tl.zeros([BN, BD], tl.float32)
    if DROPOUT:
        seed = tl.load(seed)

    for entry in range(0, tl.minimum(entries, p.B - split * entries)):
        b = split * entries + entry
        lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
        begin, all_lo, all_hi, end = queries_of_rows(p, lo, hi, c0, BM, BN)
        for i0 in range(all_lo, all_hi, BM):
            dr_tile = _add_queries_by_row(
                dr_tile, i0, c0, lo, hi, r_tile, q_u, q_v, k, v, seed, lse, dout, delta, b, h, p,
                False, NEGATIVE, DROPOUT, D, BD, BM, BN,
            )  # fmt: skip
        for t in tl.range(0, tl.cdiv(all_lo - begin, BM) + tl.cdiv(end - all_hi, BM), num_stages=1):
            i0 = tile_of(t, begin, all_lo, all_hi, end, end, end, end, BM)
            dr_tile = _add_queries_by_row(
                dr_tile, i0, c0, lo, hi, r_tile, q_u, q_v, k, v, seed, lse, dout, delta, b, h, p,
                True, NEGATIVE, DROPOUT, D, BD, BM, BN,
            )  # fmt: skip

    dr_tile *= p.scale
    if CLAMP:
        d = tl.arange(0, BD)
        of_head = sums + h.to(tl.int64) * 4 * D + d
        of_first = tl.where(split == 0, tl.load(of_head + 2 * D, mask=d < D, other=0.0), 0.0)
        of_last = tl.where(split == 0, tl.load(of_head + 3 * D, mask=d < D, other=0.0), 0.0)
        dr_tile += tl.where((c == 0)[:, None], of_first[None, :], 0.0)
        dr_tile += tl.where((c == p.N - 1)[:, None], of_last[None, :], 0.0)
    store_rows(at(dr, split, h), dr.row, c0, c - c0, c < p.N, dr_tile, D, BD)

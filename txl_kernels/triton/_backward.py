"""The backward kernels. Scores are rebuilt once, and what they lead to, dS, is kept for as long as it takes
to sum it up along queries, keys and rows of r: of a bounded part of the problem at a time, a chunk. Each kind
of gradient is a sum that a program can keep to itself. So no atomics, and the same bits every time.

for each chunk:
  dk_dv_kernel   a block of keys, over queries        dS, dk, dv
  dq_kernel      a block of queries, over keys        dq, and parts of du, dv_bias and of dr's clamped rows
  dr_kernel      a block of rows of r, over queries   dr: there the keys are the banded ones

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
    Chunk,
    Problem,
    accumulate,
    at,
    band,
    finite,
    floor_to,
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
    slopes_of,
    store_rows,
    tile_of,
    tile_of_slopes,
    times_row,
    to_base_2,
    within,
)

_NUMBERS = [*Problem._fields, *Chunk._fields]


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
    score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j, BN: tl.constexpr,
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
        keep = kept(p, seed, b, h, i, j, BN)
        kept_weight = tl.where(keep, weight * p.dropout_scale, 0.0)
        dout_v = tl.where(keep, dout_v * p.dropout_scale, 0.0)
    gradient = weight * (dout_v - delta_i[:, None])
    if EDGE:  # a hidden pair may hold NaN
        gradient = tl.where(seen, gradient, 0.0)
    return kept_weight, gradient


@triton.jit
def _add_tile(
    dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, r_end,
    q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p,
    MODE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the queries from i0 on add to dk and dv of the keys from j0 on; writes dS of them. r_end [BD]: r
    for far pairs. rows, columns: of dS."""
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
        score, dout_v, seen, lse_i, delta_i, p, seed, b, h, i, j0, BN, EDGE, NEGATIVE, DROPOUT
    )
    if EDGE:
        # A NaN of dO reaches dv by the probabilities of the query that it belongs to, where they are seen.
        clean = finite(dout_tile)
        taint = tl.sum((dout_tile - clean).to(tl.float32), 1)
        weight = tl.where(seen, weight + taint[:, None], 0.0)
        dout_tile = clean
        q_u_tile = finite(q_u_tile)
    dv_tile = accumulate(tl.trans(weight.to(dout_tile.dtype)), dout_tile, dv_tile)
    ds = ds.to(q_u_tile.dtype)
    tl.store(tile_of_slopes(rows, columns, i0, y, j0, tl.arange(0, BN), 0), ds)
    dk_tile = accumulate(tl.trans(ds), q_u_tile, dk_tile)
    return dk_tile, dv_tile


@triton.jit
def _add_queries(
    dk_tile, dv_tile, start, stop, j0, lo, hi, k_tile, v_tile, r_end,
    q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
    MODE: tl.constexpr, NEGATIVE: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The tiles from start to stop, as far as the chunk has them."""
    start, stop = within(start, chunk), within(stop, chunk)
    if MODE == "edge":
        for i0 in tl.range(start, stop, BM, num_stages=1):
            dk_tile, dv_tile = _add_tile(
                dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, r_end,
                q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p,
                MODE, NEGATIVE, DROPOUT, D, BD, BM, BN,
            )  # fmt: skip
    else:
        # Whole tiles: the compiler needs less for addresses where it sees that a number is not negative.
        for i0 in range(floor_to(start, BM), floor_to(stop, BM), BM):
            dk_tile, dv_tile = _add_tile(
                dk_tile, dv_tile, i0, j0, lo, hi, k_tile, v_tile, r_end,
                q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p,
                MODE, NEGATIVE, DROPOUT, D, BD, BM, BN,
            )  # fmt: skip
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=_NUMBERS)
def dk_dv_kernel(
    q_u, q_v, k, v, r, key_range, seed, lse, dout, delta, slopes, sums, dk, dv,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale,
    first_b, batches, first_h, heads, first_i, end_i,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr, CLAMP: tl.constexpr, NEGATIVE: tl.constexpr,
    DROPOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk and dv of BN keys, and dS: of every tile with a pair that is seen, 0 for its other pairs.

    sums [2, K, D], float32: dk and dv of the head up to the chunk's end, if its queries go on.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    chunk = Chunk(first_b, batches, first_h, heads, first_i, end_i)
    program = tl.program_id(0)
    blocks = tl.cdiv(p.K, BN)
    j0 = program % blocks * BN
    h = chunk.first_h + program // blocks % chunk.heads
    b = chunk.first_b + program // blocks // chunk.heads

    x = tl.arange(0, BN)
    j = j0 + x
    lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
    exist = (j >= lo) & (j < hi)
    k_tile = load_rows(at(k, b, h), k.row, j0, x, exist, D, BD, False)
    v_tile = load_rows(at(v, b, h), v.row, j0, x, exist, D, BD, False)
    rows, columns = slopes_of(slopes, p, chunk, b, h)
    dk_sums = sums
    dv_sums = sums + tl.cast(p.K, tl.int64) * D
    dk_tile = tl.zeros([BN, BD], tl.float32)
    dv_tile = tl.zeros([BN, BD], tl.float32)
    if chunk.first_i > 0:
        dk_tile = load_rows(dk_sums, D, j0, x, j < p.K, D, BD, False)
        dv_tile = load_rows(dv_sums, D, j0, x, j < p.K, D, BD, False)
    if DROPOUT:
        seed = tl.load(seed)

    begin, all_lo, near_0, near_1, all_hi, end = query_tiles(p, lo, hi, j0, BM, BN, CLAMP)
    # In the order of queries: sums do not depend on where chunks cut them.
    dk_tile, dv_tile = _add_queries(
        dk_tile, dv_tile, begin, all_lo, j0, lo, hi, k_tile, v_tile, None,
        q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
        "edge", NEGATIVE, DROPOUT, D, BD, BM, BN,
    )  # fmt: skip
    if CLAMP:
        r_end = load_row(at(r, b, h), r.row, p.N - 1, D, BD)
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, all_lo, near_0, j0, lo, hi, k_tile, v_tile, r_end,
            q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
            "far", NEGATIVE, DROPOUT, D, BD, BM, BN,
        )  # fmt: skip
    dk_tile, dv_tile = _add_queries(
        dk_tile, dv_tile, near_0, near_1, j0, lo, hi, k_tile, v_tile, None,
        q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
        "near", NEGATIVE, DROPOUT, D, BD, BM, BN,
    )  # fmt: skip
    if CLAMP:
        r_end = load_row(at(r, b, h), r.row, 0, D, BD)
        dk_tile, dv_tile = _add_queries(
            dk_tile, dv_tile, near_1, all_hi, j0, lo, hi, k_tile, v_tile, r_end,
            q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
            "far", NEGATIVE, DROPOUT, D, BD, BM, BN,
        )  # fmt: skip
    dk_tile, dv_tile = _add_queries(
        dk_tile, dv_tile, all_hi, end, j0, lo, hi, k_tile, v_tile, None,
        q_u, q_v, r, seed, lse, dout, delta, rows, columns, b, h, p, chunk,
        "edge", NEGATIVE, DROPOUT, D, BD, BM, BN,
    )  # fmt: skip

    if chunk.end_i < p.L:
        store_rows(dk_sums, D, j0, x, j < p.K, dk_tile, D, BD)
        store_rows(dv_sums, D, j0, x, j < p.K, dv_tile, D, BD)
    else:
        store_rows(at(dk, b, h), dk.row, j0, x, j < p.K, dk_tile * p.scale, D, BD)
        store_rows(at(dv, b, h), dv.row, j0, x, j < p.K, dv_tile, D, BD)


@triton.jit(do_not_specialize=_NUMBERS)
def dq_kernel(
    slopes, q_v, k, r, key_range, dq, parts,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale,
    first_b, batches, first_h, heads, first_i, end_i,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr, CLAMP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """dq of BM queries.

    AGAIN: dS of near tiles is read once more for the band, each row one key further, and not moved.

    parts [B, H, blocks of queries, 4, D], float32: sums over the block of the content part of dq, of its
    position part, and of what its clamped pairs add to the first and to the last row of dr.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    chunk = Chunk(first_b, batches, first_h, heads, first_i, end_i)
    # Neighbours in the grid share a head, and so its keys in L2; the blocks that see most keys go first.
    program = tl.program_id(0)
    blocks = tl.cdiv(chunk.end_i - chunk.first_i, BM)
    i0 = chunk.first_i + (blocks - 1 - program % blocks) * BM
    h = chunk.first_h + program // blocks % chunk.heads
    b = chunk.first_b + program // blocks // chunk.heads

    y = tl.arange(0, BM)
    x = tl.arange(0, BN)
    i = i0 + y
    exist = i < chunk.end_i
    first = BM - 1 - y

    k_rows = at(k, b, h)
    r_rows = at(r, b, h)
    rows, columns = slopes_of(slopes, p, chunk, b, h)
    tile = tile_of_slopes(rows, columns, i0, y, 0, x, 0)
    tile_again = tile_of_slopes(rows, columns, i0, y, 1 - BM, x, 1)
    lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
    lo_i, hi_i = keys_of_query(p, lo, hi, i)
    begin, far_0, far_1, near_0, near_1, far_2, far_3, end = key_tiles(p, lo, hi, i0, BM, BN, CLAMP)

    dq_content = tl.zeros([BM, BD], tl.float32)
    dq_position = tl.zeros([BM, BD], tl.float32)

    if CLAMP:
        # Sums of dS over the pairs that use the first row of r because they are clamped, and the last.
        clamped_first = tl.zeros([BM], tl.float32)
        clamped_last = tl.zeros([BM], tl.float32)
        tiles = (far_1 - far_0) // BN
        for t in range(0, tiles + (far_3 - far_2) // BN):
            j0 = tl.multiple_of(tile_of(t, far_0, far_1, far_2, far_3, far_3, far_3, far_3, BN), BN)
            ds = tl.load(tile + j0)
            dq_content = accumulate(ds, load_rows(k_rows, k.row, j0, x, None, D, BD, True), dq_content)
            clamped = tl.sum(ds.to(tl.float32), 1)
            clamped_first += tl.where(t < tiles, clamped, 0.0)
            clamped_last += tl.where(t < tiles, 0.0, clamped)

    # Near: every pair belongs to one column of the band, and a tile of that collects from two of keys. The
    # first and the last may have rows of r that are not seen.
    near_0 = tl.multiple_of(near_0, BN)  # if there are any
    some = near_0 + x < near_1  # all or none
    ds = tl.load(tile + near_0, mask=some[None, :], other=0.0)
    k_tile = load_rows(k_rows, k.row, near_0, x, some, D, BD, False)
    dq_content = accumulate(ds, k_tile, dq_content)
    r_tile = load_r(p, r_rows, r.row, band(p, i0 + BM - 1, near_0), D, BD, BN)
    dq_position = accumulate(skew(tl.zeros_like(ds), ds, BN - first, BN), finite(r_tile), dq_position)
    carry = ds
    # Not over j0 itself: Triton before 3.9 forgets that it is a multiple of BN, and loads dS by elements.
    for t in range(near_0 // BN + 1, near_1 // BN):
        j0 = t * BN
        ds = tl.load(tile + j0)
        dq_content = accumulate(ds, load_rows(k_rows, k.row, j0, x, None, D, BD, True), dq_content)
        r_tile = load_r(p, r_rows, r.row, band(p, i0 + BM - 1, j0), D, BD, BN)
        if AGAIN:
            moved = tl.load(tile_again + j0)
        else:
            moved = skew(carry, ds, BN - first, BN)
            carry = ds
        dq_position = accumulate(moved, r_tile, dq_position)
    if AGAIN:
        carry = tl.load(tile + (near_1 - BN), mask=some[None, :], other=0.0)
    r_tile = load_r(p, r_rows, r.row, band(p, i0 + BM - 1, near_1), D, BD, BN)
    dq_position = accumulate(skew(carry, tl.zeros_like(carry), BN - first, BN), finite(r_tile), dq_position)

    edges = tl.cdiv(far_0 - begin, BN) + tl.cdiv(near_0 - far_1, BN)
    edges += tl.cdiv(far_2 - near_1, BN) + tl.cdiv(end - far_3, BN)
    for t in tl.range(0, edges, num_stages=1):
        j0 = tile_of(t, begin, far_0, far_1, near_0, near_1, far_2, far_3, BN)
        j0 = tl.multiple_of(j0, BN)
        j = j0 + x
        seen = sees(lo_i, hi_i, j[None, :]) & exist[:, None]
        ds = tl.load(tile + j0, mask=seen, other=0.0)
        k_tile = load_rows(k_rows, k.row, j0, x, (j >= lo) & (j < hi), D, BD, False)
        dq_content = accumulate(ds, finite(k_tile), dq_content)
        if CLAMP:
            c_pair = band(p, i[:, None], j[None, :])
            clamped_first += tl.sum(tl.where(c_pair < 0, ds, 0.0).to(tl.float32), 1)
            clamped_last += tl.sum(tl.where(c_pair > p.N - 1, ds, 0.0).to(tl.float32), 1)
            ds = tl.where((c_pair >= 0) & (c_pair < p.N), ds, 0.0)
        none = tl.zeros_like(ds)
        c = band(p, i0 + BM - 1, j0)
        r_tile = load_r(p, r_rows, r.row, c, D, BD, BN)
        dq_position = accumulate(skew(none, ds, BN - first, BN), finite(r_tile), dq_position)
        r_tile = load_r(p, r_rows, r.row, c + BN, D, BD, BN)
        dq_position = accumulate(skew(ds, none, BN - first, BN), finite(r_tile), dq_position)

    # Queries beyond the last saw what there was: not even a NaN of theirs may reach the sums.
    dq_content = tl.where(exist[:, None], dq_content, 0.0)
    d = tl.arange(0, BD)
    part = parts + ((b.to(tl.int64) * p.H + h) * tl.cdiv(p.L, BM) + i0 // BM) * 4 * D + d
    if CLAMP:
        q_v_tile = finite(load_rows(at(q_v, b, h), q_v.row, i0, y, exist, D, BD, False)).to(tl.float32)
        dq_position += clamped_first[:, None] * finite(load_row(r_rows, r.row, 0, D, BD))[None, :]
        dq_position += clamped_last[:, None] * finite(load_row(r_rows, r.row, p.N - 1, D, BD))[None, :]
        first_part = tl.where(exist, clamped_first, 0.0)[:, None] * q_v_tile
        last_part = tl.where(exist, clamped_last, 0.0)[:, None] * q_v_tile
        tl.store(part + 2 * D, tl.sum(first_part, 0) * p.scale, mask=d < D)
        tl.store(part + 3 * D, tl.sum(last_part, 0) * p.scale, mask=d < D)
    dq_position = tl.where(exist[:, None], dq_position, 0.0)
    tl.store(part, tl.sum(dq_content, 0) * p.scale, mask=d < D)
    tl.store(part + D, tl.sum(dq_position, 0) * p.scale, mask=d < D)
    store_rows(at(dq, b, h), dq.row, i0, y, exist, (dq_content + dq_position) * p.scale, D, BD)


@triton.jit
def _add_queries_by_row(
    dr_tile, i0, c0, lo, hi, q_v, rows, columns, b, h, p, EDGE: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What the queries from i0 on add to dr of the rows from c0 on.

    Column x of a tile is row c0 + x of r. Its key is one further for every next query. rows, columns: of dS.
    """
    y = tl.arange(0, BM)
    x = tl.arange(0, BN)
    i = i0 + y
    exist = i < p.L
    j0 = key_at(p, i0, c0)
    pointers = tile_of_slopes(rows, columns, i0, y, j0, x, 1)
    q_v_tile = load_rows(at(q_v, b, h), q_v.row, i0, y, exist, D, BD, not EDGE)
    if EDGE:
        lo_i, hi_i = keys_of_query(p, lo, hi, i)
        seen = sees(lo_i, hi_i, j0 + y[:, None] + x[None, :]) & exist[:, None]
        ds = tl.load(pointers, mask=seen, other=0.0)
        q_v_tile = finite(q_v_tile)
    else:
        ds = tl.load(pointers)
    return accumulate(tl.trans(ds), q_v_tile, dr_tile)


@triton.jit(do_not_specialize=[*_NUMBERS, "entries"])
def dr_kernel(
    slopes, q_v, key_range, part,
    B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale,
    first_b, batches, first_h, heads, first_i, end_i, entries,
    D: tl.constexpr, BD: tl.constexpr, HAS_RANGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dr of BN rows of r, over those of the chunk's batch entries that are among the `entries` of a split.

    part: dr, or of each split a sum of its own; of what chunks before have left there, too.
    """
    p = Problem(B, H, L, K, N, r_zero, window_left, window_right, scale, dropout_threshold, dropout_scale)
    chunk = Chunk(first_b, batches, first_h, heads, first_i, end_i)
    # Neighbours in the grid share a head; of a causal call the last rows are used by most queries.
    program = tl.program_id(0)
    blocks = tl.cdiv(p.N, BN)
    c0 = (blocks - 1 - program % blocks) * BN
    h = chunk.first_h + program // blocks % chunk.heads
    split = chunk.first_b // entries + program // blocks // chunk.heads

    c = c0 + tl.arange(0, BN)
    dr_tile = tl.zeros([BN, BD], tl.float32)
    first_entry = tl.maximum(split * entries, chunk.first_b)
    end_entry = tl.minimum((split + 1) * entries, chunk.first_b + chunk.batches)
    for entry in range(0, end_entry - first_entry):
        b = first_entry + entry
        rows, columns = slopes_of(slopes, p, chunk, b, h)
        lo, hi = keys_of_batch(p, key_range, b, HAS_RANGE)
        begin, all_lo, all_hi, end = queries_of_rows(p, lo, hi, c0, BM, BN)
        begin, all_lo = within(begin, chunk), within(all_lo, chunk)
        all_hi, end = within(all_hi, chunk), within(end, chunk)
        for i0 in range(all_lo, all_hi, BM):
            dr_tile = _add_queries_by_row(
                dr_tile, i0, c0, lo, hi, q_v, rows, columns, b, h, p, False, D, BD, BM, BN
            )
        for t in tl.range(0, tl.cdiv(all_lo - begin, BM) + tl.cdiv(end - all_hi, BM), num_stages=1):
            i0 = tile_of(t, begin, all_lo, all_hi, end, end, end, end, BM)
            dr_tile = _add_queries_by_row(
                dr_tile, i0, c0, lo, hi, q_v, rows, columns, b, h, p, True, D, BD, BM, BN
            )

    dr_tile *= p.scale
    to = at(part, split, h)
    if (first_entry > split * entries) | (chunk.first_i > 0):
        dr_tile += load_rows(to, part.row, c0, c - c0, c < p.N, D, BD, False)
    store_rows(to, part.row, c0, c - c0, c < p.N, dr_tile, D, BD)

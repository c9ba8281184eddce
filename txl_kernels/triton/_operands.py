"""What is worked out once for all kernels: q + u and q + v, which all but decode's multiply, because tiles
that come from memory unchanged need no registers; and backward's delta."""

from __future__ import annotations

import triton
import triton.language as tl

from txl_kernels.triton.tiles import add_bias, at, load_rows, store_rows


@triton.jit
def _queries_of_program(H, L, BM: tl.constexpr):
    """Batch entry, head, first query; which of its BM queries, and whether they exist."""
    program = tl.program_id(0)
    blocks = tl.cdiv(L, BM)
    i0 = program % blocks * BM
    y = tl.arange(0, BM)
    return program // blocks // H, program // blocks % H, i0, y, i0 + y < L


@triton.jit(do_not_specialize=["H", "L"])
def add_biases_kernel(
    q, bias_u, bias_v, q_u, q_v, H, L,
    D: tl.constexpr, BD: tl.constexpr, HAS_U: tl.constexpr, HAS_V: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM queries. Without a bias its sum is not written."""
    b, h, i0, y, exist = _queries_of_program(H, L, BM)
    tile = load_rows(at(q, b, h), q.row, i0, y, exist, D, BD, False)
    if HAS_U:
        sum_u = add_bias(tile, bias_u, h, D, BD, True)
        store_rows(at(q_u, b, h), q_u.row, i0, y, exist, sum_u, D, BD)
    if HAS_V:
        sum_v = add_bias(tile, bias_v, h, D, BD, True)
        store_rows(at(q_v, b, h), q_v.row, i0, y, exist, sum_v, D, BD)


@triton.jit(do_not_specialize=["H", "L"])
def delta_kernel(out, dout, delta, H, L, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr):
    """Of BM queries: delta = sum_d dO * out."""
    b, h, i0, y, exist = _queries_of_program(H, L, BM)
    out_tile = load_rows(at(out, b, h), out.row, i0, y, exist, D, BD, False)
    dout_tile = load_rows(at(dout, b, h), dout.row, i0, y, exist, D, BD, False)
    sums = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + (b.to(tl.int64) * H + h) * L + i0 + y, sums, mask=exist)

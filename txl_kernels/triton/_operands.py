"""q + u and q + v, which all kernels but decode's multiply: written once rather than added in each of them,
because tiles that come from memory unchanged need no registers."""

from __future__ import annotations

import triton
import triton.language as tl

from txl_kernels.triton.tiles import add_bias, at, load_rows, store_rows


@triton.jit(do_not_specialize=["H", "L"])
def add_biases_kernel(
    q, bias_u, bias_v, q_u, q_v, H, L,
    D: tl.constexpr, BD: tl.constexpr, HAS_U: tl.constexpr, HAS_V: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """BM queries. Without a bias its sum is not written."""
    program = tl.program_id(0)
    blocks = tl.cdiv(L, BM)
    i0 = program % blocks * BM
    h = program // blocks % H
    b = program // blocks // H

    y = tl.arange(0, BM)
    exist = i0 + y < L
    tile = load_rows(at(q, b, h), q.row, i0, y, exist, D, BD, False)
    if HAS_U:
        sum_u = add_bias(tile, bias_u, h, D, BD, True)
        store_rows(at(q_u, b, h), q_u.row, i0, y, exist, sum_u, D, BD)
    if HAS_V:
        sum_v = add_bias(tile, bias_v, h, D, BD, True)
        store_rows(at(q_v, b, h), q_v.row, i0, y, exist, sum_v, D, BD)

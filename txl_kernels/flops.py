"""Floating-point operations of `txl_kernels.rel_attention`.

torch.utils.flop_counter counts attention too once this module is imported, before a FlopCounterMode is made:

    import txl_kernels.flops
    with torch.utils.flop_counter.FlopCounterMode() as counter:
        model(tokens).loss.backward()

Counted is useful work, whatever a kernel does beside it: products over visible pairs of query and key, those
of the position term over pairs whose distance has a row of r. Pairs that a key_range hides are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from txl_kernels import ops

# Products over pairs: (content, position). Forward: Q K^T and P V; (Q + v) R^T. Backward: the scores again,
# dP, dV, dK, dQ; of the position term the scores again, dQ, dR.
FORWARD, BACKWARD = (2, 1), (5, 3)


def pairs(L: int, K: int, left: int, right: int) -> int:
    """Pairs of a query, at the last L of K positions, and a key at most `left` before or `right` after it."""
    if left + right < 0:
        return 0

    def ramp(n: int) -> int:
        """The sum of min(x, K) for x = 0 ... n - 1."""
        n, flat = min(max(n, 0), K), max(n - K, 0)
        return n * (n - 1) // 2 + flat * K

    def before(offset: int) -> int:
        """Keys before the query's position + offset, all queries together."""
        return ramp(K + offset) - ramp(K - L + offset)

    return before(right + 1) - before(-left)


def rel_attention_flops(
    products: tuple[int, int],
    q_shape: Sequence[int],
    K: int,
    N: int,
    causal: bool,
    window_size: tuple[int, int],
    r_zero: int,
) -> int:
    """Floating-point operations of these `products` (FORWARD, BACKWARD) of one call, two for a multiply-add.

    q_shape: [B, H, L, D]. K keys, N rows of r; the rest as `txl_kernels.rel_attention` has it, r_zero given.
    """
    B, H, L, D = q_shape
    left, right = window_size
    left = K if left < 0 else left
    right = 0 if causal else L if right < 0 else right
    content, position = products
    near = pairs(L, K, min(left, r_zero), min(right, N - 1 - r_zero))
    return 2 * B * H * D * (content * pairs(L, K, left, right) + position * near)


# ---- For torch's counter, which gives an op's arguments with shapes in place of tensors ----


def _count(products: tuple[int, int], inputs: Any, options: Any) -> int:
    window_size = options.window_left, options.window_right
    K, N = inputs.k[2], inputs.r[1]
    return rel_attention_flops(products, inputs.q, K, N, options.causal, window_size, options.r_zero)


@flop_counter.register_flop_formula(torch.ops.txl_kernels.rel_attention)
def _(*args: Any, out_shape: Any = None) -> int:
    return _count(FORWARD, *ops.forward_arguments(args)[:2])


@flop_counter.register_flop_formula(torch.ops.txl_kernels.rel_attention_backward)
def _(dout: Any, *args: Any, out_shape: Any = None) -> int:
    inputs, _, _, _, options, _ = ops.backward_arguments(args)
    return _count(BACKWARD, inputs, options)

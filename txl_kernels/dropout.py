"""Dropout of a tensor's elements on the CPU, by C++ of our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from txl_kernels import cpu, philox


def dropout(x: Tensor, p: float, relu: bool = False) -> Tensor:
    """`torch.nn.functional.dropout` in training, several times faster on a CPU and without a mask in memory.

    There element n in order of rows is dropped as `philox.keep_mask` says of key n, for a seed from torch's
    default generator: torch.manual_seed governs it. Under `torch.compile` and on other devices this is
    torch's own function; with relu one of ours over it, which keeps the result alone.

    Args:
        x: any shape, float32, float64 or bfloat16.
        p: probability of dropping an element, 0 <= p <= 1; the others grow by 1 / (1 - p).
        relu: of max(x, 0). Backward needs no more than the result, on any device.

    Returns:
        of x's shape and dtype.

    Raises:
        ValueError: p is not a probability.
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p: got {p}, needs 0 <= p <= 1")
    if _served(x, p):
        seed = philox.seed_tensor(None, x.device).item()
        dropped: Tensor = _Dropout.apply(x, None, relu, seed, p)
        return dropped
    if not relu:
        return F.dropout(x, p)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return F.dropout(x.relu(), p)  # they take no Function of ours
    return _ReluDropout.apply(x, p)


def _served(x: Tensor, p: float) -> bool:
    """A tensor for the CPU's kernels, and something to decide."""
    return 0 < p < 1 and cpu.takes(x) and cpu.unavailable() is None


class _Dropout(torch.autograd.Function):
    """gate: where it is not above 0, the result is 0; None: nowhere. With relu, x is its own, and the result
    is backward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, relu: bool, seed: int, p: float) -> Tensor:
        ctx.seed, ctx.p = seed, p
        x = x.contiguous()
        y = _drop(x, x if relu else gate, seed, p)
        ctx.save_for_backward(y if relu else gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gate,) = ctx.saved_tensors
        if cpu.takes(dy):  # it may be differentiated again: linear in dy
            return _Dropout.apply(dy, gate, False, ctx.seed, ctx.p), None, None, None, None
        factors = torch.ones(dy.shape, dtype=dy.dtype, device=dy.device)
        return dy * _drop(factors, gate, ctx.seed, ctx.p), None, None, None, None


def _drop(x: Tensor, gate: Tensor | None, seed: int, p: float) -> Tensor:
    """x / (1 - p) where it is kept and gate is above 0; elsewhere 0."""
    out = torch.empty_like(x)
    torch.ops.txl_kernels.cpu_dropout.default(x, gate, seed, p, out)
    return out


class _ReluDropout(torch.autograd.Function):
    """By torch. Its own would keep what ReLU gave, and a mask, beside the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y = F.dropout(x.relu(), p)
        ctx.factor = 1 / (1 - p) if p < 1 else 0.0
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(dy, y, 0.0) * ctx.factor, None

"""Layers that attention and feed-forward share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import linear


class Linear(nn.Linear):
    """torch's, and as fast as memory where a few tokens are read at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Dropout(nn.Module):
    """Dropout of [B, T, d]; `variational`: the same units at every time step (Gal and Ghahramani, 2016)."""

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__()
        self.p, self.variational = p, variational

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if self.variational:
            return x * self._mask(x)
        return _Dropout.apply(x, self.p) if _by_pieces(x, self.p) else F.dropout(x, self.p)

    def _mask(self, x: Tensor) -> Tensor:
        return F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", variational" if self.variational else "")


class ReluDropout(Dropout):
    """ReLU, then dropout. Its result alone says what backward needs: no mask and no input is kept."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x.relu()
        return _ReluDropout.apply(x, self.p, self._mask(x) if self.variational else None)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        lost, ctx.scale = _lost(x, p)
        ctx.save_for_backward(lost)
        return torch.where(lost, 0.0, x).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (lost,) = ctx.saved_tensors
        return torch.where(lost, 0.0, dy).mul_(ctx.scale), None


class _ReluDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, mask: Tensor | None) -> Tensor:
        ctx.scale = 1 / (1 - p) if p < 1 else 0.0
        if mask is not None:
            y = x.relu() * mask
        elif _by_pieces(x, p):
            lost, ctx.scale = _lost(x, p)
            y = torch.where(lost, 0.0, x).relu_().mul_(ctx.scale)
        else:
            y = F.dropout(x.relu(), p)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(dy, y, 0.0).mul_(ctx.scale), None, None


_PIECES = 2**16


def _by_pieces(x: Tensor, p: float) -> bool:
    """Whether `_lost` says what dropout takes: faster than torch on a CPU, and for a compiler opaque."""
    return x.is_cpu and not torch.compiler.is_compiling() and 2**8 <= round(p * _PIECES) < _PIECES


def _lost(x: Tensor, p: float) -> tuple[Tensor, float]:
    """What dropout takes of x, bool, and the factor of what is left; p is rounded to a multiple of 2^-16.

    Torch draws a Bernoulli variable in 6 ns and 64 random bits in 3: here those make four pieces.
    """
    threshold = round(p * _PIECES)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    lost = bits.view(torch.int16)[: x.numel()].view(x.shape) < threshold - _PIECES // 2
    return lost, 1 / (1 - threshold / _PIECES)

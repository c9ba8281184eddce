"""A linear layer for a few rows, as in generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import cpu

FEW_ROWS = 4  # beyond these torch's product of matrices is as fast, in bfloat16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, faster for up to four rows on a CPU.

    There the weights' way from memory is all that counts, and torch takes them through one core. Where
    gradients are wanted, under autocast, `torch.compile` or on other devices it is torch's own function.

    Args:
        x: [..., depth], float32, float64 or bfloat16.
        weight: [outputs, depth], of the same dtype.
        bias: [outputs] or None.

    Returns:
        [..., outputs], of the same dtype.
    """
    if (
        0 < x.numel() <= FEW_ROWS * x.shape[-1]
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(_served(t) and t.dtype == x.dtype for t in (x, weight, bias) if t is not None)
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and weight.stride(1) == 1
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and cpu.unavailable() is None
    ):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = x.new_empty(len(rows), len(weight))
        torch.ops.txl_kernels.cpu_linear.default(rows, weight, bias, out)
        return out.view(*x.shape[:-1], len(weight))
    return F.linear(x, weight, bias)


def _served(x: Tensor) -> bool:
    """Not a tensor of another kind (sharded, fake), which torch must handle."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.dtype in cpu.DTYPES

"""A linear layer on the CPU, by the fastest of three: C++ of our own, oneDNN, torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import cpu

FEW_ROWS = 4  # beyond these torch's product of matrices is as fast, in bfloat16
_LARGE = 2**19  # bytes of weights below which torch's is as fast


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, faster on a CPU: in float32, and for up to four rows without gradients.

    Up to four rows, as in generation, the way of large weights from memory is all that counts, and torch
    takes them through one core: a C++ kernel takes them through all. In float32 torch asks MKL for products,
    and on an AMD Zen 4 oneDNN, which torch ships as well, is 1.1 to 1.7 times as fast: it has the numbers of
    rows that are multiples of 16, beyond 256 of 64. Under autocast, `torch.compile` or on other devices this
    is torch's own function.

    Args:
        x: [..., depth], float32, float64 or bfloat16.
        weight: [outputs, depth], of the same dtype.
        bias: [outputs] or None.

    Returns:
        [..., outputs], of the same dtype.

    Raises:
        RuntimeError: shapes or dtypes that do not go together, in torch's words.
    """
    if not _served(x, weight, bias):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    # Of other dtypes torch knows best, and its graph is shorter.
    return _Linear.apply(x, weight, bias) if x.dtype is torch.float32 else _by_torch(x, weight, bias)


class _Linear(torch.autograd.Function):
    # In one with its context: a `setup_context` of its own would cost as much as the rest of the call.
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, _ = ctx.needs_input_grad
        # The rest may be changed in place, and need not be kept: beside frozen weights, the activations.
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])
        return (
            linear(dy, weight.t()) if for_x else None,
            _of_weight(rows, x.reshape(len(rows), x.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _of_weight(dy: Tensor, x: Tensor) -> Tensor:
    """dy^T x. Both transposed, which MKL minds least; oneDNN copies dy, and wins where dy is the smaller."""
    if x.shape[1] > dy.shape[1] and _is_usual(len(x)):
        return linear(dy.t(), x.t())
    return dy.t() @ x


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        bias = bias.contiguous()  # oneDNN takes it for that
    rows = x.shape[:-1].numel()
    large = weight.numel() * weight.itemsize >= _LARGE
    if rows <= FEW_ROWS and large and weight.stride(1) == 1 and cpu.unavailable() is None:
        out = x.new_empty(*x.shape[:-1], len(weight))
        torch.ops.txl_kernels.cpu_linear.default(x.contiguous(), weight, bias, out)
        return out
    if _ONEDNN and x.dtype is torch.float32 and _is_usual(rows):
        return torch.ops.mkldnn._linear_pointwise.default(x, _apart(weight), bias, "none", [], "")
    return _by_torch(x, weight, bias)


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # In bfloat16 with AMX oneDNN reads rows to the next multiple of 32 and multiplies what it finds there by
    # 0: memory of others, which may hold NaN, if rows are apart.
    return F.linear(x.contiguous() if x.dtype is torch.bfloat16 else x, weight, bias)


def _is_usual(rows: int) -> bool:
    """Whether oneDNN may have them. It keeps what it makes for a number of rows, 1 or 2 MB each of up to
    1,024, and texts of all lengths would fill that."""
    return rows % (16 if rows <= 256 else 64) == 0


def _apart(weight: Tensor) -> Tensor:
    """weight, or a copy if its rows (of a transposed one its columns) overlap: oneDNN refuses that."""
    (rows, columns), (of_row, of_column) = weight.shape, weight.stride()
    plain = (of_column == 1 and of_row >= columns) or (of_row == 1 and of_column >= rows)
    return weight if plain else weight.contiguous()


def _served(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Tensors for the CPU's kernels that go together: with others torch knows what to do, or complains."""
    return (
        cpu.takes(x, weight, *(() if bias is None else (bias,)))
        and x.dtype is weight.dtype
        and weight.dim() == 2
        and x.dim() > 0
        and weight.shape[1] == x.shape[-1]
        and x.numel() > 0
        and (bias is None or (bias.dtype is x.dtype and bias.shape == weight.shape[:1]))
        and not torch.is_autocast_enabled("cpu")
    )


# Torch's own use of it is in its compiler; on x86 only is it known to be the faster.
_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)

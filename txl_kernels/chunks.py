"""Attention in chunks, as streaming Conformers have it, by one call of `rel_attention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_kernels.api import check_key_range, check_layouts, described, rel_attention


def attention_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    chunk: int,
    left: int,
    r_zero: int | None = None,
    key_range: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """`rel_attention` of frames that see all of their own chunk and `left` frames before it.

    Each chunk is a short sequence with a memory of its own, and all of them are the batch of one call.
    Backward then takes room for 1 + left / chunk times the gradients of k and v; from left = 64 chunk on,
    each chunk is a call, and `torch.export` fixes T. Else it takes B and T of `Dim.AUTO`.

    Args:
        q, k, v: [B, H, T, D].
        r: [H, N, D], row r_zero for distance 0, rows before it for keys that are further back.
        bias_u, bias_v, scale, dropout_p, backend: as in `rel_attention`.
        chunk: frames of a chunk, 1 or more; the last one may be shorter.
        left: frames seen before the chunk, 0 or more.
        r_zero: None: left + chunk - 1; N is then left + 2 chunk - 1, a row for each distance.
        key_range: [B, 2] int32, the frames that exist, clamped to [0, T]. None: all.

    Returns:
        [B, H, T, D]. 0 where nothing that a frame would see exists.

    Raises:
        TypeError, ValueError: an argument is not what is asked for above, or q, k and v are not of one shape.
        What `rel_attention` raises.
    """
    check_layouts(q, k, v, r, bias_u, bias_v, key_range)
    for name, number, least in (("chunk", chunk, 1), ("left", left, 0)):
        if not isinstance(number, Integral):
            raise TypeError(f"{name}: got {described(number)}, needs an int")
        if number < least:
            raise ValueError(f"{name}: got {number}, needs at least {least}")
    chunk, left = int(chunk), int(left)
    if q.dim() != 4 or not q.shape == k.shape == v.shape:
        given = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v: got shapes {given}, needs [B, H, T, D], the same of all")
    rows, T = left + 2 * chunk - 1, q.shape[2]
    if r_zero is None:
        if r.dim() == 3 and r.shape[1] != rows:
            raise ValueError(
                f"r: got {r.shape[1]} rows, needs left + 2 chunk - 1 = {rows}, or r_zero, distance 0's row"
            )
        r_zero = left + chunk - 1
    if key_range is None:  # [0, T], made where q is
        key_range = T * torch.arange(2, device=q.device).expand(q.shape[0], 2)
    else:
        check_key_range(key_range, q)
        key_range = key_range.clamp(0, T)
    attend = partial(
        rel_attention,
        r=r,
        bias_u=bias_u,
        bias_v=bias_v,
        causal=False,
        r_zero=r_zero,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )
    if not torch.compiler.is_compiling():  # to which T may be a symbol
        left = min(left, T)
    by_chunks = _together if q.shape[0] and left < _MOST_COPIES * chunk else _one_by_one
    return by_chunks(attend, q, k, v, key_range, chunk, left)


_MOST_COPIES = 64  # of the gradients of k and v


def _together(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    chunk: int,
    left: int,
) -> Tensor:
    T = q.shape[2]
    n = T // chunk + 1  # the last one is never whole: one graph serves every T from `chunk` on
    behind = n * chunk - T

    def in_a_row(x: Tensor, before: int) -> Tensor:
        """The entries of the batch one behind the other, whole chunks of each: [H, before + B n chunk, D]."""
        if x.shape[0] == 1:
            return F.pad(x[0], (0, 0, before, behind))
        y = F.pad(x.transpose(0, 1), (0, 0, 0, behind)).flatten(1, 2)
        return F.pad(y, (0, 0, before, 0)) if before else y

    def with_frames_before(x: Tensor) -> Tensor:
        """Of every chunk: [B n, H, left + chunk, D], a view. What it has of the entry before its own, or of
        nothing, `keys` hides."""
        y = in_a_row(x, left)
        y = _Unfold.apply(y, left + chunk, chunk) if _is_narrow(x) else y.unfold(1, left + chunk, chunk)
        return y.permute(1, 0, 3, 2)

    start = left - chunk * torch.arange(n, device=q.device)  # where frame 0 is among the keys of a chunk
    exist = (start[:, None] + key_range[:, None]).clamp(0, left + chunk)  # [B, n, 2]
    keys = exist.flatten(0, 1).int()
    queries = in_a_row(q, 0).unflatten(1, (-1, chunk)).transpose(0, 1)
    out = attend(queries, with_frames_before(k), with_frames_before(v), key_range=keys)
    return out.unflatten(0, (-1, n)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class _Unfold(torch.autograd.Function):
    """x.unfold(1, size, step) where `_is_narrow`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, size: int, step: int) -> Tensor:
        return x.unfold(1, size, step)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        x, ctx.size, ctx.step = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *of_windows: Tensor) -> tuple[Tensor, None, None]:
        (windows,) = of_windows
        total = torch.ops.aten.unfold_backward(windows.float(), ctx.shape, 1, ctx.size, ctx.step)
        return total.to(windows.dtype), None, None


def _one_by_one(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_range: Tensor,
    chunk: int,
    left: int,
) -> Tensor:
    T, dtype = q.shape[2], k.dtype
    k, v = (x.float() if _is_narrow(x) else x for x in (k, v))
    outs = []
    for start in range(0, max(T, 1), chunk):
        end, first = min(start + chunk, T), max(start - left, 0)
        keys = (key_range - first).clamp(0, end - first).int()
        seen = (x[:, :, first:end].to(dtype) for x in (k, v))
        outs.append(attend(q[:, :, start:end], *seen, key_range=keys))
    return torch.cat(outs, 2)


def _is_narrow(x: Tensor) -> bool:
    """Whether the gradient of x, to which several chunks add, is added up in float32, not in its own."""
    return x.requires_grad and x.dtype.itemsize < 4

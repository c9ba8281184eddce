"""What the layers of several libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from txl_kernels.api import rel_attention
from txl_kernels.chunks import attention_in_chunks
from txl_kernels.integrations.masks import Seen


class Served(NamedTuple):
    """How a class of layers computes by `rel_attention`."""

    method: str  # the one that is replaced
    function: Callable[..., Any]  # by this
    packages: tuple[str, ...] = ()  # whose class it is, where others have one of the same name


def espnet_attention(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    seen: Seen | None,
    dropout_p: float,
) -> Tensor:
    """ESPnet's layer from its projections on, which many libraries keep with its names.

    q: [B, H, L, D]; k, v: [B, H, K, D]; positions: [1, 2 K - 1, C], furthest first. Returns [B, L, C].
    """
    rows = rows_of_positions(positions, k.shape[2])
    biases = layer.pos_bias_u, layer.pos_bias_v
    return layer.linear_out(attention(q, k, v, rows, layer.linear_pos, *biases, seen, dropout_p=dropout_p))


def dropped_by(dropout: Any) -> float:
    """p of a module: a dropout, whose mode may be another than the layer's, or what it was replaced by."""
    return getattr(dropout, "p", 0.0) if dropout.training else 0.0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    project: Callable[[Tensor], Tensor],
    bias_u: Tensor,
    bias_v: Tensor,
    seen: Seen | None,
    **options: Any,
) -> Tensor:
    """Attention in both directions to what is seen, [B, L, H D]. `project` makes r of rows, [2 K - 1, C], the
    positions' embeddings.
    """
    r_zero, seen = number(k.shape[2]) - 1, seen or Seen()
    if seen.chunk:  # only the rows of distances that chunks have
        first = max(r_zero + 1 - seen.left - seen.chunk, 0)
        rows, r_zero = rows[first : r_zero + seen.chunk], r_zero - first
    tensors = q, k, v, heads(project(rows), q.shape[1]), bias_u, bias_v
    options |= {"r_zero": r_zero, "key_range": seen.key_range}
    if seen.chunk:
        out = attention_in_chunks(*tensors, chunk=seen.chunk, left=seen.left, **options)
    else:
        out = rel_attention(*tensors, causal=False, window_size=seen.window, **options)
    return joined(out)


def rows_of_positions(positions: Tensor | None, keys: int) -> Tensor:
    """[1, 2 K - 1, C] without its first dimension."""
    if positions is None or positions.dim() != 3 or positions.shape[:2] != (1, 2 * keys - 1):
        given = "None" if positions is None else list(positions.shape)
        raise ValueError(f"positions' embeddings: got {given}, needs [1, {2 * keys - 1}, channels]")
    return positions[0]


def number(size: int) -> int:
    """A size of a tensor, which torch.jit.trace has as a tensor."""
    return int(size) if torch.jit.is_tracing() else size


def heads(x: Tensor, n_head: int) -> Tensor:
    """[..., T, H D] -> [..., H, T, D]"""
    return x.unflatten(-1, (n_head, -1)).transpose(-3, -2)


def joined(out: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H D]"""
    return out.transpose(1, 2).flatten(2)

"""What the layers of several libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from txl_kernels.api import rel_attention
from txl_kernels.chunks import attention_in_chunks
from txl_kernels.integrations.masks import Seen


class Served(NamedTuple):
    """How a class of layers computes by `rel_attention`."""

    method: str  # the one that is replaced
    function: Callable[..., Any]  # by this
    library: str | None = None  # whose class it is, where others have one of the same name


def espnet_attention(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, seen: Seen | None
) -> Tensor:
    """ESPnet's layer from its projections on, which many libraries keep with its names.

    q: [B, H, L, D]; k, v: [B, H, K, D]; positions: [1, 2 K - 1, C], furthest first. Returns [B, L, C].
    """
    keys, seen = k.shape[2], seen or Seen()
    rows, r_zero = rows_of_positions(positions, keys), keys - 1
    if seen.chunk:  # of 2 K - 1 rows only those of distances that chunks have
        first = max(keys - seen.left - seen.chunk, 0)
        rows, r_zero = rows[first : r_zero + seen.chunk], r_zero - first
    tensors = q, k, v, heads(layer.linear_pos(rows), q.shape[1]), layer.pos_bias_u, layer.pos_bias_v
    options: dict[str, Any] = {
        "r_zero": r_zero,
        "key_range": seen.key_range,
        "dropout_p": layer.dropout.p if layer.training else 0.0,
    }
    if seen.chunk:
        out = attention_in_chunks(*tensors, chunk=seen.chunk, left=seen.left, **options)
    else:
        out = rel_attention(*tensors, causal=False, window_size=seen.window, **options)
    return layer.linear_out(joined(out))


def rows_of_positions(positions: Tensor | None, keys: int) -> Tensor:
    """[1, 2 K - 1, C] without its first dimension."""
    if positions is None or positions.dim() != 3 or positions.shape[:2] != (1, 2 * keys - 1):
        given = "None" if positions is None else list(positions.shape)
        raise ValueError(f"positions' embeddings: got {given}, needs [1, {2 * keys - 1}, channels]")
    return positions[0]


def heads(x: Tensor, n_head: int) -> Tensor:
    """[..., T, H D] -> [..., H, T, D]"""
    return x.unflatten(-1, (n_head, -1)).transpose(-3, -2)


def joined(out: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H D]"""
    return out.transpose(1, 2).flatten(2)

"""What the layers of several libraries have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from txl_kernels.api import rel_attention


class Served(NamedTuple):
    """How a class of layers computes by `rel_attention`."""

    method: str  # the one that is replaced
    function: Callable[..., Any]  # by this
    library: str | None = None  # whose class it is, where others have one of the same name


def espnet_attention(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, key_range: Tensor | None
) -> Tensor:
    """ESPnet's layer from its projections on, which many libraries keep with its names.

    q: [B, H, L, D]; k, v: [B, H, K, D]; positions: [1, 2 K - 1, C], furthest first. Returns [B, L, C].
    """
    out = rel_attention(
        q,
        k,
        v,
        heads(layer.linear_pos(rows_of_positions(positions, k.shape[2])), q.shape[1]),
        layer.pos_bias_u,
        layer.pos_bias_v,
        causal=False,
        r_zero=k.shape[2] - 1,
        key_range=key_range,
        dropout_p=layer.dropout.p if layer.training else 0.0,
    )
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

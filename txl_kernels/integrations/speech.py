"""Layers of ESPnet, NeMo and SpeechBrain: their Conformers', and of what is built like those."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_kernels.api import rel_attention
from txl_kernels.integrations.layer import (
    Served,
    dropped_by,
    espnet_attention,
    heads,
    joined,
    number,
    rows_of_positions,
)
from txl_kernels.integrations.masks import Seen, padding, seen


def _read_espnet_mask(mask: Tensor, batch: int, keys: int) -> Seen:
    """mask: not 0 where a query may see a key, [B, L or 1, K]."""
    return seen(mask != 0, batch, keys)


def _read_nemo_mask(mask: Tensor, batch: int, keys: int) -> Seen:
    """mask: true where a query may not see a key, [B, L, K]."""
    return seen(mask == 0, batch, keys)


@padding
def _read_speechbrain_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: true where a key is padding, [B, K]."""
    return mask == 0, mask.new_ones((), dtype=torch.bool)


def _dropout_p(layer: Any, by_sdpa: bool) -> float:
    """by_sdpa: whether its own attention would be PyTorch's, which drops by the layer's mode."""
    if by_sdpa:
        return layer.dropout_rate if layer.training else 0.0
    return dropped_by(layer.dropout)


def _espnet(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor | None
) -> Tensor:
    if layer.zero_triu:
        raise ValueError("zero_triu: got True; the fused attention hides no positions")
    shown = layer._txl_masks.of(layer, mask, *key.shape[:2], _read_espnet_mask)
    q, k, v = layer.forward_qkv(query, key, value)
    dropout_p = _dropout_p(layer, getattr(layer, "use_sdpa", False))
    return espnet_attention(layer, q, k, v, pos_emb, shown, dropout_p)


def _nemo(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    pos_emb: Tensor,
    cache: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    key, value, query, cache = layer.update_cache(key=key, value=value, query=query, cache=cache)
    shown = layer._txl_masks.of(layer, mask, *key.shape[:2], _read_nemo_mask)
    # As its own: float16, which may overflow, becomes bfloat16 under autocast.
    with sys.modules[layer._txl_base.__module__].avoid_float16_autocast_context():
        q, k, v = layer.forward_qkv(query, key, value)
        dropout_p = _dropout_p(layer, getattr(layer, "use_pytorch_sdpa", False))
        out = espnet_attention(layer, q, k, v, pos_emb, shown, dropout_p)
    return out if cache is None else (out, cache)


def _speechbrain(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_embs: Tensor,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    return_attn_weights: bool = True,
) -> Tensor | tuple[Tensor, None]:
    if layer.mask_pos_future:
        raise ValueError("mask_pos_future: got True; the fused attention hides no positions")
    if attn_mask is not None:
        raise ValueError("attn_mask: the fused attention knows key_padding_mask only, no chunks or causality")
    if not all(x is query or torch.equal(x, query) for x in (key, value)):
        raise ValueError("key, value: the fused attention is for self-attention, where they are the query")
    q, k, v = heads(F.linear(query, layer.in_proj_weight), layer.num_heads).chunk(3, dim=-1)
    if layer.vbias is not None:
        v = v + layer.value_bias_weight.view(layer.num_heads, 1, -1)
    out = rel_attention(
        q,
        k,
        v,
        heads(layer.linear_pos(rows_of_positions(pos_embs, key.shape[1])), layer.num_heads),
        layer.pos_bias_u.view(layer.num_heads, -1),
        layer.pos_bias_v.view(layer.num_heads, -1),
        causal=False,
        r_zero=number(key.shape[1]) - 1,
        key_range=layer._txl_masks.of(layer, key_padding_mask, *key.shape[:2], _read_speechbrain_mask),
        scale=layer.scale,  # of d_model
        dropout_p=dropped_by(layer.dropout_att),
    )
    out = layer.out_proj(joined(out))
    return (out, None) if return_attn_weights else out


LAYERS = {
    # Of espnet2 from 202609 on. WeNet's, of the same name, does not shift.
    "RelPositionMultiHeadedAttention": Served("forward", _espnet, ("espnet", "espnet2")),
    "RelPositionMultiHeadAttention": Served("forward", _nemo, ("nemo",)),
    "RelPosMHAXL": Served("forward", _speechbrain, ("speechbrain",)),
}

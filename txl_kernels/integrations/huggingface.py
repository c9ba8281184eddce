"""Layers of transformers 5: Conformer speech encoders and XLNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from txl_kernels.api import rel_attention
from txl_kernels.integrations.layer import (
    Served,
    attention,
    dropped_by,
    espnet_attention,
    heads,
    number,
    rows_of_positions,
)
from txl_kernels.integrations.masks import Seen, check, padding, read_conformer_mask, seen

# ---- Masks -------------------------------------------------------------------------------------------------


@padding
def _read_parakeet_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a query may see a key, [B, 1, L or 1, K]."""
    return read_conformer_mask(mask != 0)


_read_wav2vec2_mask = padding(read_conformer_mask)


def _read_nemotron_mask(mask: Tensor, batch: int, keys: int) -> Seen:
    """mask: true where a query may see a key, [B, 1, L, K]; or, for eager attention, 0 there, which its own
    layer takes the wrong way round (5.24).
    """
    return seen(mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0, batch, keys)


@padding
def _read_fastspeech2_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a key exists, [B, 1, K]."""
    return mask[:, 0] != 0, mask.new_ones((), dtype=torch.bool)


def refuse_perm_mask(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Of XLNet: what it hides from others a token may itself see, which to a layer looks like padding's."""
    given = dict(
        zip(("input_ids", "attention_mask", "mems", "perm_mask", "target_mapping"), args, strict=False)
    )
    given.update(kwargs)
    perm_mask = given.get("perm_mask")
    if perm_mask is None:
        return
    if given.get("target_mapping") is None:
        raise ValueError(
            "perm_mask: the fused attention has it only beside a target_mapping, for which hidden tokens' "
            "own results do not matter"
        )
    hidden = perm_mask != 0
    itself = hidden.diagonal(dim1=1, dim2=2)
    by_others = (hidden & ~torch.eye(hidden.shape[1], dtype=torch.bool, device=hidden.device)).any(1)
    check(
        (itself | ~by_others).all(), "perm_mask: a token that it hides from others must be hidden from itself"
    )


@padding
def _read_xlnet_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a query may not see a key, [L, K, B, 1]. A query sees its own, at padding too; those
    that `target_mapping` asks do not.
    """
    visible = mask[..., 0].permute(2, 0, 1) == 0
    own = torch.zeros(mask.shape[:2], dtype=torch.bool, device=mask.device)
    if len(mask) > 1:  # one row is for all queries
        own.diagonal(mask.shape[1] - mask.shape[0]).fill_(True)
    keys = (visible | own).all(1)
    at_padding = own & ~keys[:, None]
    return keys, ((visible == (keys[:, None] | own)) | at_padding).all()


# ---- Layers: the forward of each (of XLNet the part that is attention), with the arguments it has there ----


def _parakeet(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    key_range = layer._txl_masks.of(layer, attention_mask, *hidden_states.shape[:2], _read_parakeet_mask)
    q, k, v = _parakeet_heads(layer, hidden_states)
    return _like_parakeet(layer, q, k, v, position_embeddings, Seen(key_range))


def _nemotron(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    q, k, v = _parakeet_heads(layer, hidden_states)
    if cache is not None:
        k, v = cache.update(k, v, layer.layer_idx, kwargs=kwargs)
    shown = layer._txl_masks.of(layer, attention_mask, len(k), k.shape[2], _read_nemotron_mask)
    return _like_parakeet(layer, q, k, v, position_embeddings, shown)


def _parakeet_heads(layer: Any, hidden_states: Tensor) -> list[Tensor]:
    """q, k, v."""
    projected = (project(hidden_states) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    return [heads(x, x.shape[-1] // layer.head_dim) for x in projected]


def _like_parakeet(
    layer: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, shown: Seen | None
) -> tuple[Tensor, None]:
    out = attention(
        q,
        k.repeat_interleave(layer.num_key_value_groups, 1),
        v.repeat_interleave(layer.num_key_value_groups, 1),
        rows_of_positions(positions[:1], k.shape[2]),  # the same for the whole batch
        layer.relative_k_proj,
        layer.bias_u,
        layer.bias_v,
        shown,
        scale=layer.scaling,
        dropout_p=layer.attention_dropout if layer.training else 0.0,
    )
    return layer.o_proj(out), None


def _wav2vec2_conformer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    relative_position_embeddings: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    key_range = layer._txl_masks.of(layer, attention_mask, *hidden_states.shape[:2], _read_wav2vec2_mask)
    dropout_p = layer.dropout.p if layer.training else 0.0  # as its own: not by the mode of the dropout
    return _like_espnet(layer, hidden_states, relative_position_embeddings, key_range, dropout_p)


def _fastspeech2(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    pos_emb: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, None]:
    key_range = layer._txl_masks.of(layer, attention_mask, *hidden_states.shape[:2], _read_fastspeech2_mask)
    return _like_espnet(layer, hidden_states, pos_emb, key_range, dropped_by(layer.dropout))


def _like_espnet(
    layer: Any, hidden_states: Tensor, positions: Tensor | None, key_range: Tensor | None, dropout_p: float
) -> tuple[Tensor, None]:
    q, k, v = (
        heads(linear(hidden_states), layer.num_heads)
        for linear in (layer.linear_q, layer.linear_k, layer.linear_v)
    )
    return espnet_attention(layer, q, k, v, positions, Seen(key_range), dropout_p), None


def _xlnet(
    layer: Any,
    q_head: Tensor,
    k_head_h: Tensor,
    v_head_h: Tensor,
    k_head_r: Tensor,
    seg_mat: Tensor | None = None,
    attn_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> Tensor:
    """q_head: [L, B, H, D]; k_head_h, v_head_h: [K, B, H, D]; k_head_r: [K + L, B, H, D], from distance K."""
    if seg_mat is not None:
        raise ValueError("token_type_ids: the fused attention has no term for segments; leave them out")
    if output_attentions:
        raise ValueError("output_attentions: the fused attention never has them in memory")
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_head, k_head_h, v_head_h))
    out = rel_attention(
        q,
        k,
        v,
        k_head_r[:, 0].transpose(0, 1),
        layer.r_w_bias,
        layer.r_r_bias,
        causal=False,
        r_zero=number(k_head_h.shape[0]),
        key_range=layer._txl_masks.of(layer, attn_mask, *k_head_h.shape[1::-1], _read_xlnet_mask),
        scale=layer.scale,
        dropout_p=dropped_by(layer.dropout),
    )
    return out.permute(2, 0, 1, 3)


LAYERS = {
    "ParakeetEncoderAttention": Served("forward", _parakeet),
    "NemotronAsrStreamingEncoderAttention": Served("forward", _nemotron),
    "FastSpeech2ConformerAttention": Served("forward", _fastspeech2),
    "Wav2Vec2ConformerSelfAttention": Served("forward", _wav2vec2_conformer),
    "Wav2Vec2BertSelfAttention": Served("forward", _wav2vec2_conformer),
    "SeamlessM4TConformerSelfAttention": Served("forward", _wav2vec2_conformer),
    "XLNetRelativeAttention": Served("rel_attn_core", _xlnet),
}

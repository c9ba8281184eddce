"""Hugging Face's Conformer speech encoders and XLNet, computed by `rel_attention`.

    model = ParakeetForCTC.from_pretrained("nvidia/parakeet-ctc-1.1b")
    use_rel_attention(model)

The weights stay what and where they are; only what an attention layer computes from its projections is
replaced. Their own code forms the position term for every pair of frames, pads it, shifts it, and adds it to
the scores. transformers itself is not imported here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from txl_kernels.api import rel_attention


def use_rel_attention(model: nn.Module) -> int:
    """Makes the layers of a Hugging Face model with Transformer-XL's attention compute by `rel_attention`.

    Changes the model in place, for inference and for training; its weights load and save as before. Layers
    that are served (their classes in transformers 5): those of Parakeet, FastSpeech2-Conformer, XLNet
    (attn_type="bi" without bi_data) and, with position_embeddings_type="relative", of Wav2Vec2-Conformer,
    Wav2Vec2-BERT and SeamlessM4T's speech encoder.

    Outputs and gradients are the same but for rounding. Differences: outputs at padding, which mean nothing,
    are others (and so is what XLNet, which masks no memory, makes of them with use_mems=True); dropout draws
    other numbers; dropout of the positions' embeddings (Parakeet's dropout_positions, XLNet's dropout) drops
    the same for the whole batch; attention weights are None.

    What the fused operation cannot do is refused with a ValueError when the model is called (with a
    RuntimeError if it is compiled): masks other than padding before or behind the keys of a sequence
    (attention in chunks, XLNet's perm_mask but for generate()'s, or padding between its memory and its
    segment); of XLNet, token_type_ids and output_attentions=True; masks of FlexAttention.

    Args:
        model: a model, or a part of one, on any device.

    Returns:
        The number of layers that were changed.

    Raises:
        TypeError: model is no module (but, say, the name of one).
        ValueError: no layer is served, XLNet has other options, or a layer was changed before by something
            that this would undo or miss (accelerate's hooks, a parametrization, fully_shard of that layer).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r} of type {type(model).__name__}, needs a torch.nn.Module")
    layers = [layer for layer in model.modules() if _is_served(layer)]
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no layer that is served; these are: {', '.join(_OF_CLASS)}"
        )
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "attn_type", "bi") != "bi" or getattr(config, "bi_data", False):
            given = f"attn_type={config.attn_type!r}, bi_data={config.bi_data}"
            raise ValueError(f"model: XLNet with {given}; needs 'bi', False")
    for layer in layers:
        name = type(layer).__name__
        if name not in _OF_CLASS:
            raise ValueError(
                f"model: the class of a layer is {name}, made of one that is served (by "
                "torch.nn.utils.parametrize or fully_shard, say): use_rel_attention comes first"
            )
        method = _OF_CLASS[name][0]
        if method in vars(layer):
            raise ValueError(
                f"model: the {method} of a {name} has been replaced already (by accelerate's "
                "hooks, say), and would go on calling the one before: use_rel_attention comes first"
            )
    for module in model.modules():
        is_xlnet = any(base.__name__ == "XLNetModel" for base in type(module).__mro__)
        if is_xlnet and _refuse_perm_mask not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_refuse_perm_mask, with_kwargs=True)
    key_ranges = _KeyRanges()  # one for all layers: they are given the same mask
    for layer in layers:
        layer._txl_key_ranges = key_ranges  # type: ignore[assignment]
        of_layer: Any = type(layer)
        layer.__class__ = _by_rel_attention(getattr(of_layer, "_txl_base", of_layer))
    return len(layers)


@functools.cache
def _by_rel_attention(base: Any) -> Any:
    """A layer's class but for one method. One of the instance would stay the original's in copies, such as
    those of DataParallel.
    """
    method, function = _OF_CLASS[base.__name__]
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        base.__name__, (base,), {**names, "_txl_base": base, method: function, "__reduce_ex__": _reduce}
    )


def _reduce(layer: Any, protocol: int) -> tuple[Any, ...]:
    """For pickle, which would find the original class by that name."""
    return _new, (layer._txl_base,), layer.__dict__


def _new(base: Any) -> Any:
    return nn.Module.__new__(_by_rel_attention(base))


def _is_served(layer: nn.Module) -> bool:
    """Of a class that is served, or of one made of it."""
    kind = getattr(layer, "position_embeddings_type", "relative")  # Shaw's, rotary or none, in some
    return kind == "relative" and any(base.__name__ in _OF_CLASS for base in type(layer).__mro__)


# ---- Masks -------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    mask: Callable[[], Tensor | None]
    state: tuple[int | None, bool]
    by: int  # the layer that asked
    key_range: Tensor


class _KeyRanges:
    """`key_range` of the mask that all layers are given one after the other, found once, for the first."""

    def __init__(self) -> None:
        self._found: _Found | None = None  # read and replaced as a whole: threads may share the model

    def of(
        self,
        layer: nn.Module,
        mask: Tensor | None,
        batch: int,
        read: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """read(mask): which keys exist, [B or 1, K], and whether that is all the mask says."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"attention_mask: got a {type(mask).__name__}, needs a tensor: load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        if torch.compiler.is_compiling():  # layers that compute the same: the compiler sees that itself
            key_range, is_padding = _key_range(mask, read)
            torch._assert_async(is_padding, _OTHER_MASK)
            return key_range.expand(batch, 2)
        # A mask may be filled anew; in inference mode nothing counts that, but the same layer asks again. And
        # what is made there cannot be used where gradients are wanted.
        version = None if mask.is_inference() else mask._version
        state, found = (version, torch.is_inference_mode_enabled()), self._found
        known = found is not None and found.mask() is mask and found.state == state
        if found is None or not known or (version is None and found.by == id(layer)):
            key_range, is_padding = _key_range(mask, read)
            if not is_padding:
                raise ValueError(_OTHER_MASK)
            found = self._found = _Found(weakref.ref(mask), state, id(layer), key_range)
        return found.key_range if len(found.key_range) == batch else found.key_range.expand(batch, 2)

    def __reduce__(self) -> tuple[type[_KeyRanges], tuple[()]]:
        return _KeyRanges, ()  # a copy of the model begins anew


_OTHER_MASK = (
    "attention_mask: the fused attention knows padding before and behind a sequence's keys (memory "
    "included), the same for all queries; this mask hides other keys (so do most perm_masks of XLNet)"
)


def _key_range(mask: Tensor, read: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The keys that exist, [B or 1, 2], and whether that is all the mask says, []."""
    keys, is_all = read(mask)
    start, count = keys.int().argmax(1), keys.sum(1)
    j = torch.arange(keys.shape[1], device=keys.device) - start[:, None]
    is_run = (keys == ((j >= 0) & (j < count[:, None]))).all()
    return torch.stack([start, start + count], 1).int(), is_all & is_run


def _read_parakeet_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a query may see a key, [B, 1, L or 1, K]."""
    return _read_conformer_mask(mask != 0)


def _read_conformer_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: true or, if it is to be added to scores, 0 where a query may see a key, [B, 1, L or 1, K].

    Queries of padding may see no key.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"attention_mask: got {list(mask.shape)}, needs [batch, 1, queries or 1, keys]")
    visible = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    keys = visible.any(1)
    return keys, (visible == (visible.any(2, keepdim=True) & keys[:, None])).all()


def _read_fastspeech2_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a key exists, [B, 1, K]."""
    return mask[:, 0] != 0, mask.new_ones((), dtype=torch.bool)


def _refuse_perm_mask(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Of XLNet: what it hides from others a token may itself see, which to a layer looks like padding's."""
    given = dict(
        zip(("input_ids", "attention_mask", "mems", "perm_mask", "target_mapping"), args, strict=False)
    )
    given.update(kwargs)
    if given.get("perm_mask") is not None and given.get("target_mapping") is None:
        raise ValueError(
            "perm_mask: the fused attention has it only beside a target_mapping, for which hidden tokens' "
            "own results do not matter"
        )


def _read_xlnet_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: not 0 where a query may not see a key, [L, K, B, 1]. A query sees its own, at padding too; those
    that `target_mapping` asks do not.
    """
    visible = mask[..., 0].permute(2, 0, 1) == 0
    own = torch.zeros(mask.shape[:2], dtype=torch.bool, device=mask.device)
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
    n_head, groups = layer.config.num_attention_heads, layer.num_key_value_groups
    out = rel_attention(
        _heads(layer.q_proj(hidden_states), n_head),
        _heads(layer.k_proj(hidden_states), n_head // groups).repeat_interleave(groups, 1),
        _heads(layer.v_proj(hidden_states), n_head // groups).repeat_interleave(groups, 1),
        _heads(layer.relative_k_proj(position_embeddings[0]), n_head),
        layer.bias_u,
        layer.bias_v,
        causal=False,
        key_range=layer._txl_key_ranges.of(layer, attention_mask, len(hidden_states), _read_parakeet_mask),
        scale=layer.scaling,
        dropout_p=layer.attention_dropout if layer.training else 0.0,
    )
    return layer.o_proj(_joined(out)), None


def _wav2vec2_conformer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    relative_position_embeddings: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    key_range = layer._txl_key_ranges.of(layer, attention_mask, len(hidden_states), _read_conformer_mask)
    return _espnet(layer, hidden_states, relative_position_embeddings, key_range)


def _fastspeech2(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    pos_emb: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, None]:
    key_range = layer._txl_key_ranges.of(layer, attention_mask, len(hidden_states), _read_fastspeech2_mask)
    return _espnet(layer, hidden_states, pos_emb, key_range)


def _espnet(
    layer: Any, hidden_states: Tensor, positions: Tensor | None, key_range: Tensor | None
) -> tuple[Tensor, None]:
    """ESPnet's layer, which many models keep with its names. positions: [1, 2 T - 1, C], furthest first."""
    if positions is None:
        raise ValueError("relative_position_embeddings: got None, needs those of the model")
    out = rel_attention(
        _heads(layer.linear_q(hidden_states), layer.num_heads),
        _heads(layer.linear_k(hidden_states), layer.num_heads),
        _heads(layer.linear_v(hidden_states), layer.num_heads),
        _heads(layer.linear_pos(positions[0]), layer.num_heads),
        layer.pos_bias_u,
        layer.pos_bias_v,
        causal=False,
        key_range=key_range,
        dropout_p=layer.dropout.p if layer.training else 0.0,
    )
    return layer.linear_out(_joined(out)), None


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
        r_zero=len(k_head_h),
        key_range=layer._txl_key_ranges.of(layer, attn_mask, q_head.shape[1], _read_xlnet_mask),
        scale=layer.scale,
        dropout_p=layer.dropout.p if layer.training else 0.0,
    )
    return out.permute(2, 0, 1, 3)


def _heads(x: Tensor, n_head: int) -> Tensor:
    """[..., T, H D] -> [..., H, T, D]"""
    return x.unflatten(-1, (n_head, -1)).transpose(-3, -2)


def _joined(out: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H D]"""
    return out.transpose(1, 2).flatten(2)


_OF_CLASS: dict[str, tuple[str, Callable[..., Any]]] = {
    "ParakeetEncoderAttention": ("forward", _parakeet),
    "FastSpeech2ConformerAttention": ("forward", _fastspeech2),
    "Wav2Vec2ConformerSelfAttention": ("forward", _wav2vec2_conformer),
    "Wav2Vec2BertSelfAttention": ("forward", _wav2vec2_conformer),
    "SeamlessM4TConformerSelfAttention": ("forward", _wav2vec2_conformer),
    "XLNetRelativeAttention": ("rel_attn_core", _xlnet),
}

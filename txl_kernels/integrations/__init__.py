"""Other libraries' Conformer speech encoders, and XLNet, computed by `rel_attention`.

    model = ParakeetForCTC.from_pretrained("nvidia/parakeet-ctc-1.1b")
    use_rel_attention(model)

The weights stay what and where they are; only what an attention layer computes from its projections is
replaced. Their own code forms the position term for every pair of frames, pads it, shifts it, and adds it to
the scores. None of the libraries is imported here.
"""

from __future__ import annotations

import collections
import functools
from typing import Any

from torch import Tensor, nn

from txl_kernels.integrations import huggingface, speech
from txl_kernels.integrations.layer import Served
from txl_kernels.integrations.masks import Masks

_LAYERS: dict[str, Served] = {**huggingface.LAYERS, **speech.LAYERS}


def use_rel_attention(model: nn.Module) -> int:
    """Makes the layers of a model that have Transformer-XL's attention compute by `rel_attention`.

    Changes the model in place, for inference and for training; its weights load and save as before. Layers
    that are served:

    - transformers 5: those of Parakeet, Nemotron streaming speech recognition (also with a cache, a chunk at
      a time), FastSpeech2-Conformer, XLNet (attn_type="bi" without bi_data) and, with
      position_embeddings_type="relative", of Wav2Vec2-Conformer, Wav2Vec2-BERT and SeamlessM4T's speech
      encoder;
    - ESPnet: RelPositionMultiHeadedAttention (Conformer, Branchformer, E-Branchformer; not the legacy one);
    - NeMo: RelPositionMultiHeadAttention (Conformer, FastConformer; not the local one), also with a cache,
      limited context ("regular") or in chunks ("chunked_limited");
    - SpeechBrain: RelPosMHAXL (Conformer, Branchformer).

    Outputs and gradients are the same but for rounding. Differences: outputs at padding, which mean nothing,
    may be others, and so those of tokens that XLNet's perm_mask hides (as is what XLNet, which masks no
    memory, makes of them with use_mems=True, and its loss of question answering, a softmax over padding too);
    dropout draws other numbers; dropout of the positions' embeddings (Parakeet's dropout_positions, XLNet's
    dropout) drops the same for the whole batch; attention weights are None, those that ESPnet keeps in its
    layers, too (train with --num_att_plot 0).

    What the fused operation cannot do is refused with a ValueError when the model is called (with a
    RuntimeError if it is compiled): masks other than padding before or behind the keys of a sequence
    (XLNet's perm_mask but for generate()'s, or padding between its memory and its segment; if it is compiled
    also limited context and chunks); of XLNet, token_type_ids and output_attentions=True; masks of
    FlexAttention; ESPnet's zero_triu; SpeechBrain's attn_mask, mask_pos_future and attention to something
    else.

    Args:
        model: a model, or a part of one (but of XLNet only the whole tells what has to be refused), on any
            device.

    Returns:
        The number of layers that were changed.

    Raises:
        TypeError: model is no module (but, say, the name of one).
        ValueError: no layer is served, XLNet has other options, or a layer was changed before by something
            that this would undo or miss (accelerate's hooks, a parametrization, fully_shard of that layer).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {model!r} of type {type(model).__name__}, needs a torch.nn.Module")
    named = {name: layer for name, layer in model.named_modules() if _is_served(layer)}
    layers = list(named.values())
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no layer that is served; these are: "
            + ", ".join(f"{of.packages[0]}'s {name}" if of.packages else name for name, of in _LAYERS.items())
        )
    xlnets: list[Any] = [
        module
        for module in model.modules()
        if any(base.__name__ == "XLNetModel" for base in type(module).__mro__)
    ]
    for xlnet in xlnets:
        if xlnet.config.attn_type != "bi" or xlnet.config.bi_data:
            given = f"attn_type={xlnet.config.attn_type!r}, bi_data={xlnet.config.bi_data}"
            raise ValueError(f"model: XLNet with {given}; needs 'bi', False")
    for layer in layers:
        name = type(layer).__name__
        if name not in _LAYERS:
            raise ValueError(
                f"model: the class of a layer is {name}, made of one that is served; subclasses are "
                "not, and torch.nn.utils.parametrize and fully_shard come after use_rel_attention"
            )
        method = _LAYERS[name].method
        if method in vars(layer):
            raise ValueError(
                f"model: the {method} of a {name} has been replaced already (by accelerate's "
                "hooks, say), and would go on calling the one before: use_rel_attention comes first"
            )
    for xlnet in xlnets:
        if huggingface.refuse_perm_mask not in xlnet._forward_pre_hooks.values():
            xlnet.register_forward_pre_hook(huggingface.refuse_perm_mask, with_kwargs=True)
    # One for each stack, whose layers are given the same mask.
    masks: dict[str, Masks] = collections.defaultdict(Masks)
    for name, layer in named.items():
        layer._txl_masks = masks[_stack(name)]
        if isinstance(getattr(layer, "attn", None), Tensor):
            layer.attn = None  # ESPnet's, of its last call
        of_layer: Any = type(layer)
        layer.__class__ = _by_rel_attention(getattr(of_layer, "_txl_base", of_layer))
    return len(layers)


@functools.cache
def _by_rel_attention(base: Any) -> Any:
    """A layer's class but for one method. One of the instance would stay the original's in copies, such as
    those of DataParallel.
    """
    method, function, _ = _LAYERS[base.__name__]
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        base.__name__, (base,), {**names, "_txl_base": base, method: function, "__reduce_ex__": _reduce}
    )


def _reduce(layer: Any, protocol: Any) -> Any:
    """For pickle, which would find the original class by that name."""
    if type(layer) is not _by_rel_attention(layer._txl_base):  # parametrized since: torch's own says no
        return object.__reduce_ex__(layer, protocol)
    return _new, (layer._txl_base,), layer.__dict__


def _new(base: Any) -> Any:
    return nn.Module.__new__(_by_rel_attention(base))


def _stack(name: str) -> str:
    """Of a layer's name what comes before its number: "encoder.layers" of "encoder.layers.0.self_attn"."""
    parts = name.split(".")
    while parts and not parts.pop().isdecimal():
        pass
    return ".".join(parts)


def _is_served(layer: nn.Module) -> bool:
    """Of a class that is served, or of one made of it that computes the same."""
    kind = getattr(layer, "position_embeddings_type", "relative")  # Shaw's, rotary or none, in some
    for base in type(layer).__mro__ if kind == "relative" else ():
        served = _LAYERS.get(base.__name__)
        package = base.__module__.partition(".")[0]
        if served and (not served.packages or package in served.packages):
            return getattr(type(layer), served.method) is getattr(base, served.method)
    return False

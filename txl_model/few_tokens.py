"""All layers in one call of C++, where a few tokens are read on a CPU, as in generation.

A token waits for memory and for little else. While weights, keys and values stream through the caches, Python
loses its own data from there: its way from one kernel to the next would take a fourth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn as nn
from torch import Tensor

from txl_kernels import cpu
from txl_kernels.linear import FEW_ROWS
from txl_model.attention import RelativeAttention, Sight
from txl_model.block import Block, FeedForward
from txl_model.layers import Dropout, Linear, ReluDropout
from txl_model.memory import KeyValues

if TYPE_CHECKING:
    from txl_model.model import TransformerXL

# What the C++ computes: every part of a layer, in order. Others (adapters, say) do something else.
_PARTS = [
    *(Block, RelativeAttention, Linear, Linear, Dropout, nn.LayerNorm, Linear),
    *(FeedForward, nn.Sequential, Linear, ReluDropout, Linear, Dropout, nn.LayerNorm),
]


def read(model: TransformerXL, h: Tensor, pasts: Sequence[Tensor | KeyValues], sight: Sight) -> Tensor | None:
    """What the layers of `model` make of h [B, T, d_model]; None where they must be called one by one."""
    past = pasts[0]
    if (
        not isinstance(past, KeyValues)
        or not 0 < h.numel() <= FEW_ROWS * h.shape[-1]
        or past.n_project  # the layers have not made their positions yet
        or sight.backend not in (None, cpu.NAME)
        or torch.is_autocast_enabled("cpu")
        or not cpu.takes(h)
        or cpu.unavailable() is not None
    ):
        return None
    store = past.store
    # As with positions, what is said of the weights is said for as long as the store lasts. Hooks may come.
    if store.weights is None or store.weights[0] is not model.blocks:
        weights = _weights(model, h.dtype)
        called = (*model.blocks.modules(), model.drop) if weights else ()
        store.weights = (model.blocks, weights, _Watched(called))
    _, weights, watched = store.weights
    if not weights or watched():
        return None
    first = cast(Block, model.blocks[0])
    return cpu.layers(
        h.contiguous(),
        cast("list[Tensor]", store.keys_values),
        past.begin,
        past.end + h.shape[1],
        cast("list[Tensor]", store.rows),
        weights,
        sight.key_range,
        sight.window_size[0],
        first.attn.d_head**-0.5,
        first.attn.layer_norm.eps,
        first.attn.pre_lnorm,
    )


class _Watched:
    """Whether modules that are not called would be missed: they have a hook or a `forward` of their own (see
    `is_plain`), or drop something. Asked at every token, so of what the modules keep that in."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.parts = [vars(part) for part in parts]
        names = ("_forward_hooks", "_forward_pre_hooks")
        self.hooks = [part[name] for part in self.parts for name in names]

    def __call__(self) -> bool:
        return (
            any(self.hooks)
            or nn.modules.module._has_any_global_hook()
            or any("forward" in part or part["training"] for part in self.parts)
        )


def _weights(model: TransformerXL, dtype: torch.dtype) -> list[Tensor]:
    """Of all layers, as `cpu.layers` takes them; none where it would not do what the layers do."""
    layers = [[*block.modules()] for block in cast("list[Block]", model.blocks)]
    parts = [part for layer in layers for part in layer]
    norms_first = [part.pre_lnorm for part in parts if isinstance(part, (RelativeAttention, FeedForward))]
    if (
        any([type(part) for part in layer] != _PARTS for layer in layers)
        or type(model.drop) is not Dropout
        or len({part.eps for part in parts if isinstance(part, nn.LayerNorm)}) > 1
        or len(set(norms_first)) > 1
    ):
        return []
    biases = (x.expand(len(model.blocks), -1, -1) for x in (model.bias_u, model.bias_v))
    weights: list[Tensor | None] = []
    extra: list[Tensor | None] = []  # biases that these parts do not have
    for block, bias_u, bias_v in zip(cast("list[Block]", model.blocks), *biases, strict=True):
        attn, ff = block.attn, block.ff
        norms = [(norm.weight, norm.bias) for norm in (attn.layer_norm, ff.layer_norm)]
        inner, _, outer, _ = cast("list[Linear]", ff.net)
        weights += [bias_u, bias_v, attn.qkv_net.weight, attn.o_net.weight, *norms[0]]
        weights += [inner.weight, inner.bias, outer.weight, outer.bias, *norms[1]]
        extra += [attn.qkv_net.bias, attn.o_net.bias, attn.r_net.bias]
    taken = [w for w in weights if w is not None and w.dtype is dtype and w.is_contiguous()]
    fits = cpu.takes(*taken) and len(taken) == len(weights) and extra == [None] * len(extra)
    return taken if fits else []

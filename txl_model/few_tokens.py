"""All layers in one call of C++, where a few tokens are read on a CPU, as in generation.

A token waits for memory and for little else. While weights, keys and values stream through the caches, Python
loses its own data from there: its way from one kernel to the next would take a fourth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# What the C++ computes. Other parts (adapters, say) do something else.
_PARTS = {Block, RelativeAttention, FeedForward, nn.Sequential, nn.LayerNorm, Linear, Dropout, ReluDropout}


def read(model: TransformerXL, h: Tensor, pasts: Sequence[Tensor | KeyValues], sight: Sight) -> Tensor | None:
    """What the layers of `model` make of h [B, T, d_model]; None where they must be called one by one."""
    past = pasts[0]
    if (
        not isinstance(past, KeyValues)
        or h.numel() > FEW_ROWS * h.shape[-1]
        or past.n_project  # the layers have not made their positions yet
        or sight.backend not in (None, cpu.NAME)
        or torch.is_autocast_enabled("cpu")
        or not cpu.takes(h)
        or cpu.unavailable() is not None
    ):
        return None
    store = past.store
    # As with positions, what is said of the weights is said for as long as the store lasts.
    if store.weights is None or store.weights[0] is not model.blocks:
        store.weights = (model.blocks, _weights(model, h.dtype))
    weights = store.weights[1]
    if not weights:
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


def _weights(model: TransformerXL, dtype: torch.dtype) -> list[Tensor]:
    """Of all layers, as `cpu.layers` takes them; none where it would not do what the layers do."""
    parts = list(model.blocks.modules())[1:]
    if (
        any(type(part) not in _PARTS for part in parts)
        or any(part.training or part._forward_hooks or part._forward_pre_hooks for part in parts)
        or nn.modules.module._has_any_global_hook()
        or len({part.eps for part in parts if isinstance(part, nn.LayerNorm)}) > 1
    ):
        return []
    biases = (x.expand(len(model.blocks), -1, -1) for x in (model.bias_u, model.bias_v))
    weights = []
    for block, bias_u, bias_v in zip(cast("list[Block]", model.blocks), *biases, strict=True):
        attn, ff = block.attn, block.ff
        norms = [(norm.weight, norm.bias) for norm in (attn.layer_norm, ff.layer_norm)]
        inner, _, outer, _ = cast("list[Linear]", ff.net)
        weights += [bias_u, bias_v, attn.qkv_net.weight, attn.o_net.weight, *norms[0]]
        weights += [inner.weight, inner.bias, outer.weight, outer.bias, *norms[1]]
    fit = all(cpu.takes(w) and w.dtype is dtype and w.is_contiguous() for w in weights)
    return weights if fit else []

"""One layer of the model: attention, then feed-forward."""

from __future__ import annotations

from collections import OrderedDict

import torch.nn as nn
from torch import Tensor

from txl_model.attention import ATTENTION, Sight
from txl_model.config import TransformerXLConfig
from txl_model.layers import Dropout, Linear, ReluDropout
from txl_model.memory import KeyValues


class FeedForward(nn.Module):
    """Two linear layers on each token by itself."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        layers: dict[str, nn.Module] = {
            "0": Linear(config.d_model, config.d_inner),
            "1": ReluDropout(config.dropout, config.variational),  # in one, for two in the published code
            "3": Linear(config.d_inner, config.d_model),
            "4": Dropout(config.dropout, config.variational),
        }
        self.net = nn.Sequential(OrderedDict(layers))
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]."""
        return h + self.net(self.layer_norm(h)) if self.pre_lnorm else self.layer_norm(h + self.net(h))


class Block(nn.Module):
    """One layer: attention, then feed-forward."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.attn = ATTENTION[config.attn_type](config)
        self.ff = FeedForward(config)

    def forward(
        self,
        h: Tensor,
        past: Tensor | KeyValues,
        positions: tuple[Tensor, ...],
        biases: tuple[Tensor, ...],
        sight: Sight,
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; the arguments are `Attention.forward`'s."""
        return self.ff(self.attn(h, past, positions, biases, sight))

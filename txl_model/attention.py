"""The four attention kinds of the published code, all on `txl_kernels.rel_attention`.

They differ in what distance contributes: a sinusoid projected by each layer (Dai et al., equation in
section 3.3), a learned vector and bias per distance (Shaw et al., 2018), or nothing, positions having
been added to the hidden states (Vaswani et al., 2017; Al-Rfou et al., 2019).

B batch, T tokens of this segment, M tokens remembered, K = M + T keys, H heads, D = d_head,
N rows of positions, furthest distance first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import linear, rel_attention
from txl_model.config import TransformerXLConfig
from txl_model.layers import Dropout, Linear, is_plain
from txl_model.memory import KeyValues


class Sight(NamedTuple):
    """What the queries of a segment may see, and the kernel that looks."""

    window_size: tuple[int, int]
    key_range: Tensor | None  # int32 [B, 2]
    backend: str | None


class Attention(nn.Module):
    """Multi-head attention to memory and segment, with residual and LayerNorm.

    As it is, for hidden states to which positions were added (attn_type 2 and 3); subclasses add distance.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        self.dropatt = config.dropatt
        self.pre_lnorm = config.pre_lnorm
        d_attn = config.n_head * config.d_head
        self.qkv_net = Linear(config.d_model, 3 * d_attn, bias=False)
        self.o_net = Linear(d_attn, config.d_model, bias=False)
        self.drop = Dropout(config.dropout, config.variational)
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        h: Tensor,
        past: Tensor | KeyValues,
        positions: tuple[Tensor, ...],
        biases: tuple[Tensor, ...],
        sight: Sight,
    ) -> Tensor:
        """h [B, T, d_model], past [B, M, d_model] or keys and values -> [B, T, d_model].

        `positions` and `biases` are what this kind of attention has of them: see `rows` and `query_biases`.
        """
        if isinstance(past, Tensor):
            remembered, h_in = (self.layer_norm(past), self.layer_norm(h)) if self.pre_lnorm else (past, h)
            q, k, v = map(self._heads, self._project_both(remembered, h_in))
            out = self._attend(q, k, v, self.rows(positions), biases, sight)
        else:
            out = self._attend_remembered(*self.project(h), past, positions, biases, sight)
        out = out[..., : self.d_head].transpose(1, 2).flatten(2)
        out = h + self.drop(self.o_net(out))
        return out if self.pre_lnorm else self.layer_norm(out)

    def _project_both(self, remembered: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of h [B, T, d_model], keys and values of memory and h: [B, T or K, H * D]."""
        net, d_attn = self.qkv_net, self.n_head * self.d_head
        if type(net) is not Linear or net.bias is not None or not is_plain(net):
            # An adapter, say: to be called, whatever it is, and for memory as for the segment.
            q, kv = net(torch.cat([remembered, h], dim=1)).split([d_attn, 2 * d_attn], dim=-1)
            return q[:, remembered.shape[1] :], *kv.chunk(2, dim=-1)
        # One weight for q, k and v as published, but memory asks no questions: no queries for its rows.
        # And it wants no gradient: projected by itself, backward computes none.
        w_q, w_kv = net.weight.split([d_attn, 2 * d_attn])
        kv = torch.cat([linear(remembered, w_kv), linear(h, w_kv)], dim=1)
        return linear(h, w_q), *kv.chunk(2, dim=-1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, r: Tensor, biases: tuple[Tensor, ...], sight: Sight
    ) -> Tensor:
        """q [B, H, T, D], k and v [B, H, K, D], r [H, N, D] -> [B, H, T, D]."""
        bias_u, bias_v = self.query_biases(biases)
        return rel_attention(
            q,
            k,
            v,
            r,
            bias_u,
            bias_v,
            window_size=sight.window_size,
            key_range=sight.key_range,
            scale=self.d_head**-0.5,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=sight.backend,
        )

    # Where in the store a layer is and how far it is filled changes from step to step: a compiler that saw
    # it would compile for each.
    @torch.compiler.disable
    def _attend_remembered(
        self,
        q: Tensor,
        kv: Tensor,
        past: KeyValues,
        positions: tuple[Tensor, ...],
        biases: tuple[Tensor, ...],
        sight: Sight,
    ) -> Tensor:
        """`_attend` to what is remembered and to kv [2, B, H, T, D] of this segment, which join it."""
        k, v = past.append(kv)
        return self._attend(q, k, v, past.rows(lambda: self.rows(positions)), biases, sight)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, d_model] -> q [B, H, T, D], k and v [2, B, H, T, D]."""
        if self.pre_lnorm:
            h = self.layer_norm(h)
        qkv = self._heads(self.qkv_net(h).unflatten(-1, (3, -1)).movedim(-2, 0))
        return qkv[0], qkv[1:]

    def rows(self, positions: tuple[Tensor, ...]) -> Tensor:
        """r [H, N, D]. Here distance says nothing: one row of zeros, which the kernel takes for all."""
        return self.qkv_net.weight.new_zeros(self.n_head, 1, self.d_head)

    def query_biases(self, biases: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        """u and v, [H, D] each, or None for zero."""
        return None, None

    def _heads(self, x: Tensor) -> Tensor:
        """[..., rows, H * D] -> [..., H, rows, D], a view."""
        return x.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3)


class RelativeAttention(Attention):
    """Distance as a sinusoid that the layer projects (attn_type 0).

    Its positions are (sinusoids [N, d_model],), its biases (u, v).
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.r_net = Linear(config.d_model, config.n_head * config.d_head, bias=False)

    def rows(self, positions: tuple[Tensor, ...]) -> Tensor:
        return self._heads(self.r_net(positions[0]))

    def query_biases(self, biases: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        return biases[0], biases[1]


class LearnedRelativeAttention(Attention):
    """Distance as a learned vector and a learned bias (attn_type 1).

    Its positions are (vectors [N, H, D], biases [N, H]), its biases (u,).

    The score (q + u) . k + q . r_d + b_d is relative attention over heads one wider: with r = (r_d,
    b_d), q and k end in 0 and v = (0, ..., 0, 1), so (q + v) . r = q . r_d + b_d.
    """

    def rows(self, positions: tuple[Tensor, ...]) -> Tensor:
        r_emb, r_bias = positions
        return torch.cat([r_emb, r_bias.to(r_emb.dtype)[..., None]], dim=-1).transpose(0, 1)

    def query_biases(self, biases: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
        bias_u = F.pad(biases[0], (0, 1))
        bias_v = torch.zeros_like(bias_u)
        bias_v[:, -1] = 1.0
        return bias_u, bias_v

    def _heads(self, x: Tensor) -> Tensor:
        return F.pad(super()._heads(x), (0, 1))


ATTENTION = {0: RelativeAttention, 1: LearnedRelativeAttention, 2: Attention, 3: Attention}  # by attn_type

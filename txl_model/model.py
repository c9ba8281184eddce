"""Transformer-XL (Dai et al., 2019): relative attention over a memory of the segments before.

B batch, T tokens of this segment, M tokens remembered, K = M + T keys, H heads, D = d_head,
N rows of position embeddings, furthest distance first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import rel_attention
from txl_model.config import TransformerXLConfig
from txl_model.memory import Memory


def position_embedding(n_rows: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Sinusoids of the distances n_rows - 1, ..., 1, 0: [n_rows, d_model], sines first, then cosines.

    Always float32: bfloat16 has no 257 and float16 no 2049, so far distances would fall together.
    """
    distance = torch.arange(n_rows - 1, -1, -1, device=device, dtype=torch.float32)
    inv_freq = 10000 ** (-torch.arange(0, d_model, 2, device=device, dtype=torch.float32) / d_model)
    angle = torch.outer(distance, inv_freq)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class RelativeAttention(nn.Module):
    """Multi-head attention to memory and segment by content and by distance."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.n_head, self.d_head = config.n_head, config.d_head
        self.dropatt = config.dropatt
        self.pre_lnorm = config.pre_lnorm
        d_attn = config.n_head * config.d_head
        self.qkv_net = nn.Linear(config.d_model, 3 * d_attn, bias=False)
        self.r_net = nn.Linear(config.d_model, d_attn, bias=False)
        self.o_net = nn.Linear(d_attn, config.d_model, bias=False)
        self.drop = nn.Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        h: Tensor,
        mem: Tensor,
        pos_emb: Tensor,
        bias_u: Tensor,
        bias_v: Tensor,
        window_size: tuple[int, int],
        backend: str | None,
    ) -> Tensor:
        """h [B, T, d_model], mem [B, M, d_model], pos_emb [N, d_model], biases [H, D] -> [B, T, d_model]."""
        context = torch.cat([mem, h], dim=1)
        if self.pre_lnorm:
            context = self.layer_norm(context)
        # One weight for q, k and v as published, but memory asks no questions: no queries for its rows.
        d_attn = self.n_head * self.d_head
        w_q, w_kv = self.qkv_net.weight.split([d_attn, 2 * d_attn])
        q = self._heads(F.linear(context[:, mem.shape[1] :], w_q))
        k, v = (self._heads(x) for x in F.linear(context, w_kv).chunk(2, dim=-1))
        r = self._heads(self.r_net(pos_emb))
        out = rel_attention(
            q,
            k,
            v,
            r,
            bias_u,
            bias_v,
            window_size=window_size,
            dropout_p=self.dropatt if self.training else 0.0,
            backend=backend,
        )
        out = h + self.drop(self.o_net(out.transpose(1, 2).flatten(2)))
        return out if self.pre_lnorm else self.layer_norm(out)

    def _heads(self, x: Tensor) -> Tensor:
        """[..., rows, H * D] -> [..., H, rows, D], a view."""
        return x.unflatten(-1, (self.n_head, self.d_head)).transpose(-2, -3)


class FeedForward(nn.Module):
    """Two linear layers on each token by itself."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        self.net = nn.Sequential(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, h: Tensor) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]."""
        return h + self.net(self.layer_norm(h)) if self.pre_lnorm else self.layer_norm(h + self.net(h))


class Block(nn.Module):
    """One layer: attention, then feed-forward."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.attn = RelativeAttention(config)
        self.ff = FeedForward(config)

    def forward(
        self,
        h: Tensor,
        mem: Tensor,
        pos_emb: Tensor,
        bias_u: Tensor,
        bias_v: Tensor,
        window_size: tuple[int, int],
        backend: str | None,
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; the arguments are `RelativeAttention.forward`'s."""
        return self.ff(self.attn(h, mem, pos_emb, bias_u, bias_v, window_size, backend))


@dataclass
class TransformerXLOutput:
    """What one segment gives."""

    logits: Tensor  # [B, T, vocab_size]
    loss: Tensor | None  # mean over the labelled tokens, in nats
    token_losses: Tensor | None  # [B, T], 0 where the label is -100
    memory: Memory  # pass it in with the next segment


class TransformerXL(nn.Module):
    """The language model. `backend` names the attention kernel; None takes the best one that can run.

    >>> memory = None
    >>> for input_ids, labels in segments:  # each segment continues the one before
    ...     out = model(input_ids, memory, labels)
    ...     memory = out.memory
    """

    def __init__(self, config: TransformerXLConfig, backend: str | None = None) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        self.word_emb = nn.Embedding(config.vocab_size, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        n_bias = config.n_layer if config.untie_r else 1
        self.bias_u = nn.Parameter(torch.empty(n_bias, config.n_head, config.d_head))
        self.bias_v = nn.Parameter(torch.empty(n_bias, config.n_head, config.d_head))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size)
        self.apply(self._init_weights)
        for bias in (self.bias_u, self.bias_v):
            nn.init.normal_(bias, std=config.init_std)
        if config.tie_weight:
            self.lm_head.weight = self.word_emb.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_std)
        elif isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def new_memory(self, batch_size: int, mem_len: int | None = None) -> Memory:
        """An empty memory. It keeps `mem_len` tokens; None is the config's length, as `memory=None` gives."""
        mem_len = self.config.mem_len if mem_len is None else mem_len
        return Memory.empty(mem_len, self.config.n_layer, batch_size, like=self.word_emb.weight)

    def forward(
        self, input_ids: Tensor, memory: Memory | None = None, labels: Tensor | None = None
    ) -> TransformerXLOutput:
        """Predict the token after each of `input_ids` [B, T].

        `labels` [B, T] are those next tokens, aligned with input_ids (not shifted here); -100 is not scored.
        `memory` is what the forward pass over the segment before returned; None starts a new text.
        """
        config = self.config
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [B, T] with T >= 1, got shape {list(input_ids.shape)}")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels must be {list(input_ids.shape)} as input_ids, got {list(labels.shape)}")
        if memory is None:
            memory = self.new_memory(len(input_ids))
        memory.check(config.n_layer, len(input_ids), config.d_model)
        if config.same_length and memory.mem_len == 0:
            raise ValueError("same_length needs mem_len >= 1: with 0 no query may see even itself")
        window_size = (memory.mem_len - 1, 0) if config.same_length else (-1, -1)

        h = self.drop(self.word_emb(input_ids) * math.sqrt(config.d_model))
        n_rows = memory.length + input_ids.shape[1]
        if config.clamp_len >= 0:
            # rel_attention gives every distance beyond the furthest row that row: a short table clamps.
            n_rows = min(n_rows, config.clamp_len + 1)
        # One dropout mask for the positions, shared by all layers.
        pos_emb = self.drop(position_embedding(n_rows, config.d_model, h.device).to(h.dtype))

        inputs = []
        for i, (block, mem) in enumerate(zip(self.blocks, memory.hidden, strict=True)):
            inputs.append(h)
            u, v = (bias[i if config.untie_r else 0] for bias in (self.bias_u, self.bias_v))
            h = block(h, mem, pos_emb, u, v, window_size, self.backend)
        logits = self.lm_head(self.drop(h))

        loss = token_losses = None
        if labels is not None:
            at_least_float32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
            token_losses = F.cross_entropy(at_least_float32.flatten(0, 1), labels.flatten(), reduction="none")
            token_losses = token_losses.view_as(labels)
            loss = token_losses.sum() / (labels != -100).sum()
        return TransformerXLOutput(logits, loss, token_losses, memory.update(inputs))

"""Transformer-XL (Dai et al., 2019): relative attention over a memory of the segments before.

B batch, T tokens of this segment, M tokens remembered, K = M + T keys, H heads, D = d_head,
N rows of positions, furthest distance first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal, cast

import torch
import torch.nn as nn
from torch import Tensor

from txl_kernels import dropout, registry
from txl_kernels.reference import has_autocast
from txl_model import few_tokens
from txl_model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from txl_model.attention import Sight
from txl_model.block import Block
from txl_model.config import NOT_SCORED, TransformerXLConfig
from txl_model.layers import Dropout
from txl_model.memory import HiddenMemory, KeyValueMemory, KeyValues, Memory, Reading
from txl_model.positions import last_rows, position_embedding


@dataclass(frozen=True)
class TransformerXLOutput:
    """What the forward pass over one segment returns.

    Attributes:
        hidden: [B, T, d_model], what the softmax sees.
        memory: pass it in with the next segment.
        token_losses: [B, T] in nats, in token order, 0 where the label is -100. None without labels.
        loss: mean over the labelled tokens, in nats. None without labels.
        to_logits: hidden states [..., d_model] to logits [..., vocab_size]. With gradients if the forward
            pass had any; raises RuntimeError if the weights are no longer those of that pass.
    """

    hidden: Tensor
    memory: Memory
    token_losses: Tensor | None
    loss: Tensor | None
    to_logits: Callable[[Tensor], Tensor]
    # Of which hidden states, and the logits, once they are there.
    _logits: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def logits(self) -> Tensor:
        """[B, T, vocab_size]; log-probabilities if the softmax is adaptive.

        Computed on first access, or by the forward pass itself if it was called with logits=True: as DDP
        with find_unused_parameters, sharded weights and functional_call need it.
        """
        if not self._logits or self._logits[0] is not self.hidden:
            self._logits[:] = self.hidden, self.to_logits(self.hidden)
        return self._logits[1]

    def last_logits(self) -> Tensor:
        """[B, vocab_size]: those of the last token only."""
        return self.to_logits(self.hidden[:, -1])


class _ToLogits:
    """The softmax with the weights of a forward pass, and with gradients if that had any."""

    def __init__(self, model: TransformerXL) -> None:
        self.model = model
        self.with_gradients = torch.is_grad_enabled()
        self.weights = self._state()

    def __call__(self, hidden: Tensor) -> Tensor:
        pairs = zip(self._state(), self.weights, strict=False)  # a compiler saw none
        if any(a is not b or m != n for (a, m), (b, n) in pairs):
            raise RuntimeError(
                "the weights have changed since the forward pass whose logits these would be (by a step of "
                "the optimizer, functional_call or resharding): read out.logits before, or call the model "
                "with logits=True"
            )
        with torch.set_grad_enabled(self.with_gradients):
            return self.model.softmax.logits(hidden, self.model.word_emb)

    def _state(self) -> list[tuple[Tensor, int]]:
        """The weights, and how often each was changed; nothing to a compiler, which asks for neither."""
        if torch.compiler.is_compiling():
            return []
        modules = (self.model.softmax, self.model.word_emb)
        weights = [x for module in modules for x in module.parameters()]
        return [(x, 0 if x.is_inference() else x._version) for x in weights]


class TransformerXL(nn.Module):
    """The language model of Dai et al. 2019, with weights drawn anew.

    >>> memory = None
    >>> for input_ids, labels in segments:  # each segment continues the one before
    ...     out = model(input_ids, memory, labels)
    ...     memory = out.memory

    Args:
        config: its shape, for instance TransformerXLConfig.preset("enwik8-base").
        backend: of attention; None: as `rel_attention` chooses.

    Raises:
        TypeError: config is no TransformerXLConfig.
    """

    def __init__(self, config: TransformerXLConfig, backend: str | None = None) -> None:
        super().__init__()
        if not isinstance(config, TransformerXLConfig):
            raise TypeError(
                f"config must be a TransformerXLConfig, got {config!r}: "
                'TransformerXLConfig.preset("enwik8-base") or TransformerXLConfig(n_layer=6) makes one'
            )
        self.config = config
        self.backend = backend
        self.word_emb = AdaptiveEmbedding(config)
        self.drop = Dropout(config.dropout, config.variational)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.softmax = AdaptiveSoftmax(config)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * config.init_std)

        n_layer, heads = config.n_layer, (config.n_head, config.d_head)
        if config.attn_type == 0:
            n_bias = n_layer if config.untie_r else 1
            self.bias_u, self.bias_v = normal(n_bias, *heads), normal(n_bias, *heads)
        elif config.attn_type == 1:
            self.bias_u = normal(n_layer, *heads)
            self.r_emb = normal(n_layer, config.max_klen, *heads)
            self.r_bias = nn.Parameter(torch.zeros(n_layer, config.max_klen, config.n_head))
        elif config.attn_type == 3:
            self.r_emb = normal(n_layer, config.max_klen, *heads)
        self.blocks.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.config.init_std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=self.config.init_std)

    def new_memory(
        self,
        batch_size: int,
        mem_len: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        kind: Literal["hidden", "kv"] | None = None,
    ) -> Memory:
        """A memory to begin a text with. It also fixes how that text is read; None: as the config says.

        Args:
            batch_size: B.
            mem_len: tokens to remember.
            clamp_len: distances beyond it share its position embedding; -1: each has one of its own.
            same_length: every query sees the same number of keys.
            kind: "hidden" remembers hidden states, which the current weights project anew for every segment:
                for training. "kv" remembers keys and values: the same numbers with a fraction of the work,
                for reading without gradients while the weights do not change. None: "kv" for a model in
                eval mode with gradients off, but for torch.export, else "hidden". Absolute positions
                (attn_type 2 and 3) move with every segment and need "hidden".

        Raises:
            ValueError: for sizes that make no memory, or a kind this model cannot have.
        """
        config = self.config
        mem_len = config.mem_len if mem_len is None else mem_len
        clamp_len = config.clamp_len if clamp_len is None else clamp_len
        same_length = config.same_length if same_length is None else same_length
        for name, value in (("batch_size", batch_size), ("mem_len", mem_len), ("clamp_len", clamp_len)):
            if not isinstance(value, (int, Integral, torch.SymInt)):  # the last: under torch.export
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        for name, value in (("batch_size", batch_size), ("mem_len", mem_len)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if clamp_len < -1:
            raise ValueError(f"clamp_len must be -1 (off) or a distance, got {clamp_len}")
        if same_length and mem_len + config.same_length_extra == 0:
            raise ValueError("same_length needs mem_len >= 1: with 0 no query may see even itself")
        if kind is None:
            reads = not self.training and not torch.is_grad_enabled() and not torch.compiler.is_exporting()
            kind = "kv" if config.relative and reads else "hidden"
        elif kind == "kv" and not config.relative:
            raise ValueError(f"attn_type {config.attn_type} has absolute positions, which need kind='hidden'")
        elif kind not in ("hidden", "kv"):
            raise ValueError(f"kind must be 'hidden', 'kv' or None, got {kind!r}")

        reading = Reading(
            mem_len,
            clamp_len,
            bool(same_length),
            config.zero_memory,
            config.n_layer,
            config.d_model,
            config.n_head,
            config.d_key,
        )
        weight = self.softmax.biases[0]
        length = mem_len if config.zero_memory else 0
        if kind == "hidden":
            shape = (batch_size, length, config.d_model)
            like = {"device": weight.device, "dtype": weight.dtype}  # which may be sharded, and memory is not
            zeros = [torch.zeros(shape, **like) for _ in range(config.n_layer)]
            return HiddenMemory.of(reading, batch_size, None, zeros)
        if not length:
            nothing = torch.empty(2, batch_size, config.n_head, 0, config.d_key, device=weight.device)
            return KeyValueMemory.of(reading, batch_size, None, [nothing] * config.n_layer)
        zero = torch.zeros(1, 1, config.d_model, device=weight.device, dtype=weight.dtype)
        blocks = cast("list[Block]", self.blocks)
        zeros_by_layer = [b.attn.project(zero)[1].detach() for b in blocks]  # [2, 1, H, 1, D]
        states = [x.expand(-1, batch_size, -1, length, -1) for x in zeros_by_layer]
        memory = KeyValueMemory.of(reading, batch_size, None, states)
        memory.store.zeros = zeros_by_layer
        return memory

    def forward(
        self,
        input_ids: Tensor,
        memory: Memory | None = None,
        labels: Tensor | None = None,
        ext_len: int = 0,
        logits: bool = False,
    ) -> TransformerXLOutput:
        """Predict the token after each of `input_ids`.

        Args:
            input_ids: int64 [B, T].
            memory: the memory that the previous segment's forward pass returned; None: `new_memory(B)`, to
                begin a new text.
            labels: int64 [B, T], the token after each of input_ids: already shifted, as they are not shifted
                here. -100 is not scored.
            ext_len: how many tokens at the end of the segment will be read again with the next one; memory
                leaves them out.
            logits: compute out.logits now, not on first access.

        Raises:
            ValueError: for shapes that do not match, tokens out of range (checked where nobody traces, and on
                CPUs only: a GPU would have to be waited for), a memory of another model's shape, of another
                batch size, device or dtype, or a memory of keys and values in training mode or with
                gradients enabled.
        """
        config = self.config
        self._check(input_ids, labels, ext_len)
        batch_size, n_token = input_ids.shape
        if memory is None:
            memory = self.new_memory(batch_size)
        self._check_memory(memory, batch_size)

        reading, klen = memory.reading, memory.length + n_token
        pasts = memory.open(n_token)
        h = self.word_emb(input_ids) * math.sqrt(config.d_model)
        window = memory.mem_len - 1 + config.same_length_extra
        sight = Sight(
            window_size=(window, 0) if reading.same_length else (-1, -1),
            key_range=memory.key_range(n_token),
            backend=self.backend,
        )
        last = few_tokens.read(self, h, pasts, sight)
        inputs = [h]
        if last is None:
            inputs, last = self._layer_by_layer(h, pasts, sight, reading, klen)
        hidden = self.drop(last)

        loss = token_losses = None
        if labels is not None:
            token_losses = self.softmax.token_losses(hidden.flatten(0, 1), labels.flatten(), self.word_emb)
            token_losses = token_losses.view_as(labels)
            loss = token_losses.sum() / (labels != NOT_SCORED).sum().clamp(min=1)
        new_memory = memory.update(pasts, inputs, ext_len)
        out = TransformerXLOutput(hidden, new_memory, token_losses, loss, _ToLogits(self))
        if logits:
            out.logits  # noqa: B018  # which stays
        return out

    def _layer_by_layer(
        self,
        h: Tensor,
        pasts: Sequence[Tensor | KeyValues],
        sight: Sight,
        reading: Reading,
        klen: int,
    ) -> tuple[list[Tensor], Tensor]:
        """Each layer's input and what the last one makes of its own, [B, T, d_model] each."""
        config, n_token = self.config, h.shape[1]
        # Rows of positions to project: of all distances, or for the first time of as many as there
        # will ever be.
        n_project = pasts[0].n_project if isinstance(pasts[0], KeyValues) else reading.n_rows(klen)
        sinusoid = None
        if config.attn_type == 0 and n_project:
            # One dropout mask for the positions, shared by all layers.
            sinusoid = position_embedding(n_project, config.d_model, h.device).to(h.dtype)
            if self.training:
                sinusoid = dropout(sinusoid, config.dropout)
        positions_and_biases = self._positions_and_biases(n_project, sinusoid)
        if config.attn_type != 2:
            h = self.drop(h)
        inputs = []
        for i, (block, past) in enumerate(zip(self.blocks, pasts, strict=True)):
            inputs.append(h)  # without absolute positions: they will be others when this is memory
            absolute = self._absolute_positions(i, klen, reading, h)
            if absolute is not None:
                assert isinstance(past, Tensor)  # new_memory gives these models no other
                past, h = past + absolute[: klen - n_token], h + absolute[klen - n_token :]
                if config.attn_type == 2:
                    past, h = self.drop(past), self.drop(h)
            h = block(h, past, *positions_and_biases[i], sight)
        return inputs, h

    def _positions_and_biases(
        self, n_project: int, sinusoid: Tensor | None
    ) -> Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """What each layer's attention takes of positions (n_project rows, furthest first) and biases."""
        if self.config.attn_type == 0:
            positions = () if sinusoid is None else (sinusoid,)
            n_shared = 1 if self.config.untie_r else self.config.n_layer
            biases = zip(self.bias_u.unbind(), self.bias_v.unbind(), strict=True)
            return [(positions, pair) for pair in biases] * n_shared
        if self.config.attn_type == 1:
            return [
                (tuple(last_rows(table, n_project) for table in tables), (bias_u,))
                for *tables, bias_u in zip(self.r_emb, self.r_bias, self.bias_u, strict=True)
            ]
        return [((), ())] * self.config.n_layer

    def _absolute_positions(self, i: int, klen: int, reading: Reading, h: Tensor) -> Tensor | None:
        """What is added to the K inputs of layer i, memory included: [K, d_model], by distance from the end.

        The published code adds it in place, to remembered states that already contain the positions of an
        earlier segment. Here memory contains none, so every state gets the position that it has now.
        """
        n_rows = reading.n_rows(klen)
        if self.config.attn_type == 2 and i == 0:
            return last_rows(position_embedding(n_rows, self.config.d_model, h.device).to(h.dtype), klen)
        if self.config.attn_type == 3:
            return last_rows(last_rows(self.r_emb[i].flatten(1), n_rows), klen).to(h.dtype)
        return None

    def _check(self, input_ids: Tensor, labels: Tensor | None, ext_len: int) -> None:
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [B, T] with T >= 1, got shape {list(input_ids.shape)}")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels must be {list(input_ids.shape)} as input_ids, got {list(labels.shape)}")
        if not 0 <= ext_len <= input_ids.shape[1]:
            raise ValueError(f"ext_len must be between 0 and T = {input_ids.shape[1]}, got {ext_len}")
        n = self.config.vocab_size
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids is None:
                continue
            if ids.dtype != torch.int64:
                raise ValueError(f"{name} must be int64, got {ids.dtype}")
            if ids.device.type == "cpu" and ids.numel() and not registry.is_traced():
                wrong = (ids < 0) | (ids >= n)
                if ids is labels:
                    wrong &= ids != NOT_SCORED
                if wrong.any():
                    raise ValueError(f"{name} must be tokens 0 to {n - 1}, got {ids[wrong][0].item()}")

    def _check_memory(self, memory: Memory, batch_size: int) -> None:
        if not isinstance(memory, Memory):
            raise ValueError(
                "memory must be what new_memory or a forward pass gave (out.memory), got "
                f"{type(memory).__name__}; labels are an argument of their own"
            )
        config, reading = self.config, memory.reading
        expected = (config.n_layer, config.d_model, config.n_head, config.d_key)
        got = (reading.n_layer, reading.d_model, reading.n_head, reading.d_key)
        if got != expected or memory.batch_size != batch_size:
            raise ValueError(
                f"memory is of (n_layer, d_model, n_head, width of keys) = {got} "
                f"and batch {memory.batch_size}; the model and input_ids need {expected} "
                f"and batch {batch_size}"
            )
        weight = self.softmax.biases[0]
        if memory.device != weight.device:
            raise ValueError(
                f"memory is on {memory.device} and the model on {weight.device}: memory.to(device) moves it"
            )
        dtypes = {weight.dtype}
        if has_autocast(weight.device.type) and torch.is_autocast_enabled(weight.device.type):
            dtypes |= {torch.float32, torch.get_autocast_dtype(weight.device.type)}  # what layers make there
        if memory.dtype is not None and memory.dtype not in dtypes:
            needed = " or ".join(sorted(map(str, dtypes)))
            raise ValueError(
                f"memory is of {memory.dtype}, this model reads {needed}: memory.to(dtype) converts it"
            )
        if isinstance(memory, KeyValueMemory) and not config.relative:
            raise ValueError("memory is of a model with relative positions; this one's are absolute")
        if isinstance(memory, KeyValueMemory) and (self.training or torch.is_grad_enabled()):
            raise ValueError(
                "a memory of keys and values is for reading: call model.eval() and use torch.no_grad(), "
                "or make the memory with kind='hidden'"
            )

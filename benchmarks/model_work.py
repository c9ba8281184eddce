"""What a whole model is timed at, and ours as one side of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from measure import Task
from torch import Tensor

from txl_model import Memory, TransformerXL
from txl_model.config import NOT_SCORED

FILL = 1024  # tokens at a time while the memory of a work is filled
# Our memory has room for twice what it holds, and moves once that is used up: a sample of ours reads so
# much that it pays for a move. Of single tokens fewer, whose moves cost next to nothing.
MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Work:
    """Reading `n_token` tokens after a memory of `mem_len`: once more and once more, or a training step."""

    kind: str
    n_token: int
    mem_len: int
    clamp_len: int
    same_length: bool
    target: float | None = None
    training: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.n_token:,} + {self.mem_len:,}"

    @property
    def segments(self) -> int:
        """Segments that one sample of ours reads."""
        return min(MOST_SEGMENTS, math.ceil(self.mem_len / self.n_token))


class Side(Protocol):
    """An implementation of the model, with random weights."""

    vocab_size: int

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def train(self, on: bool) -> None:
        """With dropout, or without it."""

    def begin(self, work: Work) -> Any:
        """The memory of a text not begun, to be read as this work says."""

    def read(self, input_ids: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Log-probabilities [1, T, V] of the next tokens, and the next memory."""

    def loss(self, input_ids: Tensor, memory: Any) -> Tensor:
        """Mean loss, in nats, of each token but the first, given those before it."""

    def gradients(self) -> dict[str, Tensor]:
        """Of the last `loss`, by our names."""


class Ours:
    def __init__(self, model: TransformerXL) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def train(self, on: bool) -> None:
        self.model.train(on)

    def begin(self, work: Work) -> Memory:
        kind = "hidden" if work.training else "kv"
        return self.model.new_memory(1, work.mem_len, work.clamp_len, work.same_length, kind)

    def read(self, input_ids: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        out = self.model(input_ids, memory)
        return out.logits.log_softmax(-1), out.memory

    def loss(self, input_ids: Tensor, memory: Memory) -> Tensor:
        labels = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], NOT_SCORED)], dim=1)
        return self.model(input_ids, memory, labels).loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters()}


def tokens(side: Side, n: int, seed: int) -> Tensor:
    """Random text, [1, n]."""
    return torch.randint(side.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))


def fill(side: Side, work: Work) -> Any:
    """A memory that is full, of a random text."""
    side.train(False)
    memory = side.begin(work)
    with torch.no_grad():
        for segment in tokens(side, work.mem_len, seed=0).split(FILL, dim=1):
            _, memory = side.read(segment, memory)
    return memory


def clear_gradients(side: Side) -> None:
    for parameter in side.parameters():
        parameter.grad = None


def task(side: Side, work: Work, memory: Any, segments: int = 1) -> Task:
    """The next segment of a text, and the next; or a training step, gradients of the last one cleared."""
    ids = tokens(side, work.n_token, seed=1)

    def read(_: None) -> tuple[()]:
        nonlocal memory
        with torch.no_grad():
            for _ in range(segments):
                _, memory = side.read(ids, memory)
        return ()

    def step(_: None) -> tuple[()]:
        side.loss(ids, memory).backward()
        return ()

    side.train(work.training)
    if work.training:
        return Task(step, lambda: clear_gradients(side))
    return Task(read, passes=segments)

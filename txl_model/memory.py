"""What a model remembers of the segments before this one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """The last `mem_len` inputs of every layer, detached.

    Hidden states rather than keys and values, as published: in training the current weights project them
    again at every step. It starts empty, so that nothing is attended that was never read. A forward pass
    leaves the memory it was given as it is and returns the next one.
    """

    mem_len: int
    hidden: tuple[Tensor, ...]  # one [B, M, d_model] per layer, 0 <= M <= mem_len, newest last

    @classmethod
    def empty(cls, mem_len: int, n_layer: int, batch_size: int, like: Tensor) -> Memory:
        """A memory of nothing yet, with the d_model (last dimension), device and dtype of `like`."""
        if mem_len < 0:
            raise ValueError(f"mem_len must not be negative, got {mem_len}")
        return cls(mem_len, (like.new_empty(batch_size, 0, like.shape[-1]),) * n_layer)

    @property
    def length(self) -> int:
        """Tokens remembered so far."""
        return self.hidden[0].shape[1]

    def check(self, n_layer: int, batch_size: int, d_model: int) -> None:
        """Refuse the memory of another model or of another batch."""
        got = (len(self.hidden), self.hidden[0].shape[0], self.hidden[0].shape[2])
        if got != (n_layer, batch_size, d_model):
            raise ValueError(
                f"memory is of (n_layer, batch, d_model) = {got}, the model and input_ids need "
                f"{(n_layer, batch_size, d_model)}"
            )

    def update(self, inputs: list[Tensor]) -> Memory:
        """Append each layer's input, [B, T, d_model], and forget all but the last mem_len."""
        hidden = []
        for old, new in zip(self.hidden, inputs, strict=True):
            keep_old = max(0, min(old.shape[1], self.mem_len - new.shape[1]))
            keep_new = min(new.shape[1], self.mem_len)
            old, new = old[:, old.shape[1] - keep_old :], new[:, new.shape[1] - keep_new :]
            hidden.append(torch.cat([old, new.detach()], dim=1))
        return Memory(self.mem_len, tuple(hidden))

"""What a model remembers of the segments before this one.

A memory never changes for whoever holds it: a forward pass returns the next one and leaves the old
one valid, so a text can be continued twice from the same place. How a text is read (mem_len,
clamp_len, same_length) is fixed when its memory is made.

B batch, T tokens of a segment, M tokens remembered, K = M + T keys, H heads, D = d_head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Of padding: where a text begins is int32 to attention, after what is remembered.
MAX_SKIP = 2**30


@dataclass(frozen=True)
class Reading:
    """How a text is read, and by a model of which shape."""

    mem_len: int  # tokens remembered at most
    clamp_len: int  # further distances share this one's position embedding; -1: each has its own
    same_length: bool  # every query sees the same number of keys
    zero_memory: bool  # the text begins after mem_len zeros, which are attended
    n_layer: int
    d_model: int
    n_head: int
    d_key: int  # width of keys and values

    def n_rows(self, klen: int) -> int:
        """Distances with a position embedding of their own among klen keys."""
        return klen if self.clamp_len < 0 else min(klen, self.clamp_len + 1)


@dataclass(frozen=True, eq=False)
class Memory(ABC):
    """The last `mem_len` tokens as every layer saw them, detached. Made by `TransformerXL.new_memory`."""

    reading: Reading
    batch_size: int
    device: torch.device
    start: Tensor | None  # int64 [B]: of each row, the keys before it do not exist; None: all keys do

    @property
    def mem_len(self) -> int:
        """Tokens remembered at most."""
        return self.reading.mem_len

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens remembered so far, M."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """Of what is remembered. None: nothing is yet, and it will be that of what is written first."""

    @classmethod
    @abstractmethod
    def of(cls, reading: Reading, batch_size: int, start: Tensor | None, states: list[Tensor]) -> Memory:
        """A memory of these states of each layer: [B, M, d_model], or keys and values [2, B, H, M, D]."""

    @abstractmethod
    def open(self, n_token: int) -> list[Tensor] | list[KeyValues]:
        """What each layer attends before its own n_token tokens: hidden states, or keys and values."""

    @abstractmethod
    def update(self, pasts: list[Any], inputs: list[Tensor], ext_len: int) -> Memory:
        """The memory after a segment.

        Args:
            pasts: what `open` gave.
            inputs: each layer's input, [B, T, d_model].
            ext_len: the last tokens of the segment, which will be read again, are not to be remembered.
        """

    def reset(self, rows: Sequence[int] | Tensor, skip: int | Tensor = 0) -> Memory:
        """A memory in which `rows` of the batch have forgotten everything; the others are as they were.

        Args:
            rows: indices, or bool [B].
            skip: how many tokens from now the new text begins: an int, or int64 with one entry per
                reset row. What is read until then is padding that no token of the text sees
                (prompts of unequal length are padded on the left, so that they end together).

        Raises:
            ValueError: for rows that are not there, a skip below 0 or above 2^30, or padding after a memory
                of zeros (`zero_memory`).
        """
        chosen, skip = self._as_tensor("rows", rows), self._as_tensor("skip", skip)
        if chosen.dtype == torch.bool:
            if chosen.shape != (self.batch_size,):
                raise ValueError(f"rows must be bool [{self.batch_size}], got shape {list(chosen.shape)}")
            chosen = chosen.nonzero().squeeze(1)
        elif chosen.numel() and not 0 <= chosen.min() <= chosen.max() < self.batch_size:
            raise ValueError(f"rows must be indices into a batch of {self.batch_size}, got {chosen.tolist()}")
        for name, x in (("rows", chosen), ("skip", skip)):
            if x.is_floating_point() and x.numel():
                raise ValueError(f"{name} must be whole numbers, got {x.tolist()}")
        chosen = chosen.long()
        if skip.dim() and skip.shape != chosen.shape:
            raise ValueError(
                f"skip must be one number or one per row, got {len(skip)} for {len(chosen)} rows"
            )
        if skip.numel() and skip.min() < 0:
            raise ValueError(f"skip must not be negative, got {skip.tolist()}")
        if skip.numel() and skip.max() > MAX_SKIP:
            raise ValueError(f"skip must be at most {MAX_SKIP:,}, got {skip.tolist()}")
        if self.reading.zero_memory:
            if skip.any():
                raise ValueError(
                    "a text that begins after a memory of zeros (zero_memory) cannot begin after padding "
                    "as well: read texts of unequal length one by one"
                )
            return self._zeroed(chosen)
        start = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        start = start if self.start is None else self.start.clone()
        start[chosen] = self.length + skip.long()
        return replace(self, start=start)

    def _as_tensor(self, name: str, numbers: Any) -> Tensor:
        try:
            return torch.as_tensor(numbers, device=self.device)
        except (RuntimeError, TypeError, ValueError) as error:  # no numbers, or beyond int64
            raise ValueError(f"{name} must be whole numbers (int64), got {numbers!r}") from error

    def key_range(self, n_token: int) -> Tensor | None:
        """int32 [B, 2]: the keys that exist when a segment of n_token tokens is read; None: all of them."""
        if self.start is None:
            return None
        return torch.stack([self.start, torch.full_like(self.start, self.length + n_token)], dim=1).int()

    @abstractmethod
    def to(self, target: torch.device | torch.dtype | str) -> Memory:
        """The same memory on another device or in another dtype."""

    @abstractmethod
    def _zeroed(self, rows: Tensor) -> Memory: ...

    @abstractmethod
    def _states(self) -> list[Tensor]: ...

    def tensors(self) -> dict[str, Tensor]:
        """Everything remembered, for safetensors. `restore(tensors(), settings())` is this memory again."""
        start = {} if self.start is None else {"start": self.start}
        return start | {f"layer.{i}": x.contiguous() for i, x in enumerate(self._states())}

    def settings(self) -> dict[str, Any]:
        """The rest of it, for JSON."""
        return {"kind": type(self).__name__, "batch_size": self.batch_size, "reading": asdict(self.reading)}

    @staticmethod
    def restore(tensors: dict[str, Tensor], settings: dict[str, Any]) -> Memory:
        """The memory that `tensors` and `settings` were taken of. Raises ValueError for anything else."""
        try:
            kinds: dict[str, type[Memory]] = {k.__name__: k for k in (HiddenMemory, KeyValueMemory)}
            kind = kinds[settings["kind"]]
            reading, batch_size = Reading(**settings["reading"]), int(settings["batch_size"])
            states = [tensors[f"layer.{i}"] for i in range(reading.n_layer)]
            start, length = tensors.get("start"), states[0].shape[-2]
            shape: tuple[int, ...] = (batch_size, length, reading.d_model)
            if kind is KeyValueMemory:
                shape = (2, batch_size, reading.n_head, length, reading.d_key)
            if length > reading.mem_len or any(x.shape != shape for x in states):
                shapes = [list(x.shape) for x in states]
                raise ValueError(f"settings speak of layers of {list(shape)}, the tensors are {shapes}")
            if start is not None and start.shape != (batch_size,):
                raise ValueError(f"settings speak of batch {batch_size}, start is {list(start.shape)}")
            memory = kind.of(reading, batch_size, start, states)
            if isinstance(memory, KeyValueMemory) and reading.zero_memory and length:
                memory.store.zeros = [tensors[f"zero.{i}"] for i in range(reading.n_layer)]
            return memory
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"these are not the tensors and settings of a memory: {error!r}") from error


@dataclass(frozen=True, eq=False)
class HiddenMemory(Memory):
    """Each layer's inputs, as published: in training the current weights project them again at every step."""

    hidden: tuple[Tensor, ...]  # one [B, M, d_model] per layer, newest last

    @classmethod
    def of(
        cls, reading: Reading, batch_size: int, start: Tensor | None, states: list[Tensor]
    ) -> HiddenMemory:
        return cls(reading, batch_size, states[0].device, start, tuple(states))

    @property
    def length(self) -> int:
        return self.hidden[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden[0].dtype

    def open(self, n_token: int) -> list[Tensor]:
        return list(self.hidden)

    def update(self, pasts: list[Any], inputs: list[Tensor], ext_len: int) -> HiddenMemory:
        n_read = inputs[0].shape[1] - ext_len
        n_new = min(n_read, self.mem_len)
        n_old = min(self.length, self.mem_len - n_new)
        hidden = tuple(
            torch.cat([old[:, self.length - n_old :], new.detach()[:, n_read - n_new : n_read]], dim=1)
            # All of the segment and nothing else: the layer's input itself, which exists anyway.
            if n_old or n_new < new.shape[1]
            else new.detach()
            for old, new in zip(self.hidden, inputs, strict=True)
        )
        return replace(self, start=_moved(self.start, self.length + n_read - n_old - n_new), hidden=hidden)

    def to(self, target: torch.device | torch.dtype | str) -> HiddenMemory:
        hidden = [x.to(target) for x in self.hidden]
        start = None if self.start is None else self.start.to(hidden[0].device)
        return HiddenMemory.of(self.reading, self.batch_size, start, hidden)

    def _zeroed(self, rows: Tensor) -> HiddenMemory:
        return replace(self, hidden=tuple(x.index_fill(0, rows, 0.0) for x in self.hidden))

    def _states(self) -> list[Tensor]:
        return list(self.hidden)


class _Store:
    """Keys, values and projected positions of all layers, preallocated.

    Written at its end only, and there by whoever takes that end first: what any other memory sees of it
    stays as it was.
    """

    def __init__(self, n_layer: int, capacity: int = 0) -> None:
        self.capacity = capacity
        # Where it may be written on. `pop` takes an end away, from one thread alone: several may continue the
        # same memory at once.
        self.ends = {0: True}
        # Of each layer, [2, B, H, capacity, D] once something was written.
        self.keys_values: list[Tensor | None] = [None] * n_layer
        # r [H, N, D], furthest first.
        self.rows: list[Tensor | None] = [None] * n_layer
        # Those of all layers as `few_tokens` takes them, of which model, and whether its modules must be
        # called all the same. They do not move either.
        self.weights: tuple[object, list[Tensor], Callable[[], bool]] | None = None
        # With zero_memory, what a hidden state of zeros gives: [2, 1, H, 1, D].
        self.zeros: list[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: a memory is none of its model."""
        return {**self.__dict__, "weights": None}


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values that one layer remembers, with room for those of this segment."""

    store: _Store
    layer: int
    begin: int  # remembered are the keys begin <= j < end of the store
    end: int
    n_project: int  # positions to make `rows` of; 0: they are there, maybe for further distances too

    def append(self, kv: Tensor) -> tuple[Tensor, ...]:
        """kv [2, B, H, T, D] of this segment -> k and v of memory and segment, [B, H, K, D], views."""
        buffer, n_token = self.store.keys_values[self.layer], kv.shape[3]
        if buffer is None:
            buffer = kv.new_empty(*kv.shape[:3], self.store.capacity, kv.shape[4])
            self.store.keys_values[self.layer] = buffer
        buffer.narrow(3, self.end, n_token).copy_(kv)
        return buffer.narrow(3, self.begin, self.end - self.begin + n_token).unbind()

    def rows(self, project: Callable[[], Tensor]) -> Tensor:
        """r [H, N, D] by `project`, once and for all: the weights do not move."""
        if self.n_project:
            self.store.rows[self.layer] = project().contiguous()
        rows = self.store.rows[self.layer]
        assert rows is not None
        return rows


@dataclass(frozen=True, eq=False)
class KeyValueMemory(Memory):
    """Each layer's keys and values, for reading without gradients while the weights stay as they are.

    The same numbers as with hidden states, but nothing is projected twice. The buffers have room
    for twice what is remembered (or, beyond some thousands, for twice what is there); once full, what
    is still remembered moves to new ones, so that few steps copy memory.
    """

    store: _Store
    begin: int  # remembered are the keys begin <= j < end of the store
    end: int

    @classmethod
    def of(
        cls, reading: Reading, batch_size: int, start: Tensor | None, states: list[Tensor]
    ) -> KeyValueMemory:
        length = states[0].shape[3]
        store = _Store(reading.n_layer, length)
        if length:  # what nothing was written to takes the dtype of what is written first
            store.ends, store.keys_values = {length: True}, list(states)
        return cls(reading, batch_size, states[0].device, start, store, 0, length)

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def dtype(self) -> torch.dtype | None:
        first = self.store.keys_values[0]
        return None if first is None else first.dtype

    def open(self, n_token: int) -> list[KeyValues]:
        memory, needed = self, self.length + n_token
        if (
            self.end + n_token > self.store.capacity
            or self._is_closed()
            or not self.store.ends.pop(self.end, False)
        ):
            memory = self._copy(self._at_first(self.mem_len + max(n_token, self.mem_len), needed))
            memory.store.ends.clear()
        reading = self.reading
        n_rows = reading.n_rows(needed)
        # Of all layers: a forward pass that was interrupted has left some behind.
        there = all(rows is not None and rows.shape[1] >= n_rows for rows in memory.store.rows)
        n_project = 0 if there else reading.n_rows(self._at_first(self.mem_len + n_token, needed))
        return [
            KeyValues(memory.store, i, memory.begin, memory.end, n_project) for i in range(reading.n_layer)
        ]

    # How far the store is filled changes from step to step: a compiler that saw it would compile for each.
    @torch.compiler.disable
    def update(self, pasts: list[Any], inputs: list[Tensor], ext_len: int) -> KeyValueMemory:
        past: KeyValues = pasts[0]
        end = past.end + inputs[0].shape[1] - ext_len
        begin = max(past.begin, end - self.mem_len)
        past.store.ends[end] = True
        start = _moved(self.start, begin - past.begin)
        return replace(self, start=start, store=past.store, begin=begin, end=end)

    def to(self, target: torch.device | torch.dtype | str) -> KeyValueMemory:
        states = [x.to(target) for x in self._states()]
        start = None if self.start is None else self.start.to(states[0].device)
        memory = KeyValueMemory.of(self.reading, self.batch_size, start, states)
        if self.store.zeros is not None:
            memory.store.zeros = [x.to(target) for x in self.store.zeros]
        return memory

    @staticmethod
    def _at_first(most: int, needed: int) -> int:
        """Of so many keys that there may be, for how many to make room: who remembers everything, by a huge
        mem_len, pays for what there is."""
        return min(most, max(2 * needed, 8192))

    def _is_closed(self) -> bool:
        """Whether what was written in inference mode cannot be written on, because that is over."""
        first = self.store.keys_values[0]
        return first is not None and first.is_inference() and not torch.is_inference_mode_enabled()

    def _copy(self, capacity: int) -> KeyValueMemory:
        """The same memory in a store of its own, of this capacity."""
        store = _Store(self.reading.n_layer, capacity)
        store.ends = {self.length: True}
        store.rows, store.zeros = list(self.store.rows), self.store.zeros
        for i, old in enumerate(self.store.keys_values):
            if old is not None:
                new = old.new_empty(*old.shape[:3], capacity, old.shape[4])
                new[:, :, :, : self.length] = old[:, :, :, self.begin : self.end]
                store.keys_values[i] = new
        return replace(self, store=store, begin=0, end=self.length)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {f"zero.{i}": x for i, x in enumerate(self.store.zeros or ())}

    def _zeroed(self, rows: Tensor) -> KeyValueMemory:
        if not self.length:
            return self
        memory = self._copy(self.store.capacity)
        assert memory.store.zeros is not None
        for buffer, zeros in zip(memory.store.keys_values, memory.store.zeros, strict=True):
            assert buffer is not None
            buffer[:, rows, :, : self.length] = zeros.to(buffer.dtype)
        return memory

    def _states(self) -> list[Tensor]:
        reading = self.reading
        empty = torch.empty(2, self.batch_size, reading.n_head, 0, reading.d_key, device=self.device)
        return [empty if x is None else x[:, :, :, self.begin : self.end] for x in self.store.keys_values]


def _moved(start: Tensor | None, dropped: int) -> Tensor | None:
    """Where the keys of each row start once the oldest `dropped` are forgotten."""
    return None if start is None else (start - dropped).clamp(min=0)

"""What a model reads next: segments of a batch of texts, as the published iterators deal them out.

kimiyoung/transformer-xl, pytorch/data_utils.py: LMOrderedIterator is `OrderedBatches` here;
LMShuffledIterator and LMMultiFileIterator are `ShuffledBatches`. Added to that: any position can be saved
and resumed, exactly, and several processes can share the rows of one batch.

B rows of the batch that this process reads, T tokens of a segment.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from txl_model.config import NOT_SCORED
from txl_model.fields import check_at_least


@dataclass(frozen=True)
class Segment:
    """The next tokens of each row, and for each the token after it."""

    input_ids: Tensor  # int64 [B, T]
    labels: Tensor  # int64 [B, T]; NOT_SCORED where none counts
    new_text: bool  # an epoch begins: memory of what came before is to be dropped


class Batches(ABC):
    """Segments for ever, epoch after epoch."""

    def __init__(
        self, tokens: Tensor, batch_size: int, tgt_len: int, ext_len: int, seed: int, rows: range | None
    ) -> None:
        if tokens.dim() != 1:
            raise ValueError(f"tokens must be 1-D, got shape {list(tokens.shape)}")
        check_at_least(1, batch_size=batch_size, tgt_len=tgt_len)
        check_at_least(0, ext_len=ext_len)
        self.rows = range(batch_size) if rows is None else rows
        if not self.rows or not set(self.rows) <= set(range(batch_size)):
            raise ValueError(f"rows must be some of the {batch_size} rows of the batch, got {self.rows}")
        self.tokens, self.batch_size, self.tgt_len = tokens, batch_size, tgt_len
        self.ext_len, self.seed = ext_len, seed
        self.epoch = 0  # of the segment given last

    def __iter__(self) -> Iterator[Segment]:
        return self

    @abstractmethod
    def __next__(self) -> Segment:
        """The next segment; after the last one of an epoch the first one of the next."""

    @abstractmethod
    def one_epoch(self) -> Iterator[Segment]:
        """The first epoch, from its start, wherever `self` is."""

    def state(self) -> dict[str, Any]:
        """Where the next segment begins, for JSON. The same whichever rows are read here."""
        return {"settings": self._settings(), "epoch": self.epoch, **self._position()}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken. Raises ValueError where the batches were others than these."""
        for name, value in self._settings().items():
            if state["settings"].get(name) != value:
                raise ValueError(
                    f"cannot go on in the data: {name} is {value} now and was "
                    f"{state['settings'].get(name)} when the position was saved"
                )
        self.epoch = state["epoch"]
        self._seek(state)

    def _settings(self) -> dict[str, Any]:
        """All that decides what the segments are."""
        names = ("batch_size", "tgt_len", "ext_len", "seed")
        return {"tokens": len(self.tokens), **{name: getattr(self, name) for name in names}}

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """The place within the epoch."""

    @abstractmethod
    def _seek(self, position: Mapping[str, Any]) -> None: ...


def _generator(*key: int) -> torch.Generator:
    """Random numbers that depend on the key alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


class OrderedBatches(Batches):
    """A running text, cut into `batch_size` equal pieces that are read side by side, each in order.

    The text's last `len(tokens) % batch_size` tokens are not read, and an epoch's last segment may be
    shorter.

    Args:
        tokens: 1-D, integers; may be memory-mapped.
        batch_size: rows of the whole batch, of all processes.
        tgt_len: tokens of a segment that are new and have a label.
        ext_len: tokens before these that are read again, without a label (fewer at the start of the text).
        varlen: segments of random length, as published: tgt_len (once in twenty, half of it) on average,
            with a standard deviation of 5, within [5, tgt_len + 15]. It depends on seed, epoch and place
            alone. An epoch ends when fewer than two labels are left.
        seed: for varlen.
        rows: those of the batch that this process reads. None: all.

    Raises ValueError for settings out of range, and for a text too short for two tokens in each row.
    """

    def __init__(
        self,
        tokens: Tensor,
        batch_size: int,
        tgt_len: int,
        *,
        ext_len: int = 0,
        varlen: bool = False,
        seed: int = 1111,
        rows: range | None = None,
    ) -> None:
        super().__init__(tokens, batch_size, tgt_len, ext_len, seed, rows)
        self.varlen = varlen
        self.row_len = len(tokens) // batch_size
        if self.row_len < 2:
            raise ValueError(
                f"{len(tokens)} tokens are too few for a batch of {batch_size}: each row needs 2 or more"
            )
        self.place = 0  # in each row: how many tokens have been read

    def __len__(self) -> int:
        """Segments of an epoch; with varlen nobody knows."""
        if self.varlen:
            raise TypeError("with varlen an epoch has no fixed number of segments")
        return -(-(self.row_len - 1) // self.tgt_len)

    def __next__(self) -> Segment:
        if self._is_over(self.place):
            self.epoch, self.place = self.epoch + 1, 0
        segment, self.place = self._segment(self.epoch, self.place)
        return segment

    def one_epoch(self) -> Iterator[Segment]:
        place = 0
        while True:
            segment, place = self._segment(0, place)
            yield segment
            if self._is_over(place):
                return

    def _is_over(self, place: int) -> bool:
        # The published fixed-length iterator reads to the end, the other one leaves a single last label.
        return place >= self.row_len - (2 if self.varlen else 1)

    def _segment(self, epoch: int, place: int) -> tuple[Segment, int]:
        """The one that begins at a place, and where it ends."""
        end = min(place + self._length(epoch, place), self.row_len - 1)
        start = max(0, place - self.ext_len)
        row_tokens = [
            self.tokens[row * self.row_len + start : row * self.row_len + end + 1] for row in self.rows
        ]
        text = torch.stack(row_tokens).to(torch.int64)  # [B, T + 1]
        labels = text[:, 1:].clone()
        labels[:, : place - start] = NOT_SCORED
        return Segment(text[:, :-1].contiguous(), labels, new_text=place == 0), end

    def _length(self, epoch: int, place: int) -> int:
        if not self.varlen:
            return self.tgt_len
        generator = _generator(self.seed, epoch, place)
        mean = self.tgt_len if torch.rand((), generator=generator) < 0.95 else self.tgt_len / 2
        length = int(mean + 5 * torch.randn((), generator=generator))
        return min(max(length, 5), self.tgt_len + 15)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "varlen": self.varlen}

    def _position(self) -> dict[str, Any]:
        return {"place": self.place}

    def _seek(self, position: Mapping[str, Any]) -> None:
        self.place = position["place"]


# Of ShuffledBatches.
START_OF_EPOCH: dict[str, Any] = {"file": 0, "taken": 0, "new_text": True, "rows": None, "again": None}


class ShuffledBatches(Batches):
    """Sentences that do not belong together: a row that has read one to its end takes the next.

    Epoch by epoch the files are shuffled, and the sentences within each. As published, what is left at the
    end of a file, too little to fill every row, is not read.

    Args:
        tokens: 1-D, integers; may be memory-mapped.
        sentences: int64 [sentences + 1]; may be memory-mapped. Sentence i is `tokens[s[i] : s[i + 1] + 1]`:
            its last token is the next one's first.
        batch_size: rows of the whole batch, of all processes.
        tgt_len: tokens of a segment that are new and have a label.
        ext_len: tokens before these that are read again, without a label (none at the start of a file).
        files: of each file, where its sentences end; rising to the number of sentences. None: one file.
        shuffle: False reads all in the order it is in.
        seed: for the shuffling.
        rows: those of the batch that this process reads. None: all.

    Raises ValueError for settings out of range, and (when iterated) where an epoch cannot fill one segment.
    """

    file: int  # in the order of this epoch
    taken: int  # sentences dealt out of it
    new_text: bool
    _upcoming: Iterator[tuple[int, int]]  # of the sentences not dealt out yet: place and number of labels
    _rows: list[tuple[int, int]]  # of each row's sentence: the next place, and labels left
    _again: Tensor | None  # int64 [batch, E], E <= ext_len: places of the tokens to be read again

    def __init__(
        self,
        tokens: Tensor,
        sentences: Tensor,
        batch_size: int,
        tgt_len: int,
        *,
        ext_len: int = 0,
        files: Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 1111,
        rows: range | None = None,
    ) -> None:
        super().__init__(tokens, batch_size, tgt_len, ext_len, seed, rows)
        if sentences.dim() != 1 or len(sentences) < 2 or int(sentences[-1]) >= len(tokens):
            raise ValueError(f"sentences must be 1-D places in the {len(tokens)} tokens, 2 or more")
        self.sentences, self.shuffle = sentences, shuffle
        self.files = [len(sentences) - 1] if files is None else list(files)
        if self.files[-1] != len(sentences) - 1 or self.files != sorted(self.files):
            raise ValueError(
                f"files must rise to the number of sentences, {len(sentences) - 1}, got {self.files}"
            )
        self._seek(START_OF_EPOCH)

    def __next__(self) -> Segment:
        segment = self._next_of_epoch()
        if segment is None:
            self.epoch += 1
            self._seek(START_OF_EPOCH)
            segment = self._next_of_epoch()
        if segment is None:
            raise self._too_few()
        return segment

    def one_epoch(self) -> Iterator[Segment]:
        batches = copy.copy(self)
        batches.epoch = 0
        batches._seek(START_OF_EPOCH)
        segment = batches._next_of_epoch()
        if segment is None:
            raise self._too_few()
        while segment is not None:
            yield segment
            segment = batches._next_of_epoch()

    def _too_few(self) -> ValueError:
        return ValueError(
            f"{len(self.tokens)} tokens in {len(self.files)} file(s) are too few to fill a segment of "
            f"{self.batch_size} x {self.tgt_len}"
        )

    def _next_of_epoch(self) -> Segment | None:
        while (positions := self._fill()) is None:
            if self.file == len(self.files) - 1:
                return None
            self.taken, self.file = 0, self.file + 1
            self._open_file()
        again = positions[:, :0] if self._again is None else self._again
        self._again = torch.cat([again, positions], dim=1)[:, -self.ext_len :] if self.ext_len else None
        again, positions = again[list(self.rows)], positions[list(self.rows)]
        input_ids = self.tokens[torch.cat([again, positions], dim=1)].to(torch.int64)
        labels = self.tokens[positions + 1].to(torch.int64)
        labels = torch.cat([torch.full_like(again, NOT_SCORED), labels], dim=1)
        new_text, self.new_text = self.new_text, False
        return Segment(input_ids, labels, new_text)

    def _fill(self) -> Tensor | None:
        """Where each row's next tokens are: int64 [batch, tgt_len]; None at the end of the file."""
        places, lengths, rows = [], [], []
        for place, left in self._rows:
            missing = self.tgt_len
            while missing:
                if not left:
                    sentence = next(self._upcoming, None)
                    if sentence is None:
                        return None
                    self.taken += 1
                    place, left = sentence
                n = min(left, missing)
                places.append(place)
                lengths.append(n)
                place, left, missing = place + n, left - n, missing - n
            rows.append((place, left))
        self._rows = rows
        # Each piece is a run of positions: its place, plus how far into the piece.
        length = torch.tensor(lengths)
        before = length.cumsum(0) - length
        positions = torch.arange(self.batch_size * self.tgt_len)
        positions += (torch.tensor(places) - before).repeat_interleave(length)
        return positions.view(self.batch_size, self.tgt_len)

    def _open_file(self) -> None:
        """Deal out its sentences from `taken` on."""
        n_files = len(self.files)
        file = int(self._permutation(n_files, self.epoch)[self.file])
        first = self.files[file - 1] if file else 0
        order = first + self._permutation(self.files[file] - first, self.epoch, file)
        self._upcoming = self._sentences(order[self.taken :])
        self._rows = [(0, 0)] * self.batch_size
        self._again = None

    def _permutation(self, n: int, *key: int) -> Tensor:
        return torch.randperm(n, generator=_generator(self.seed, *key)) if self.shuffle else torch.arange(n)

    def _sentences(self, order: Tensor) -> Iterator[tuple[int, int]]:
        """Where each begins, and how many labels it has."""
        for some in order.split(4096):
            starts, ends = self.sentences[some], self.sentences[some + 1]
            yield from zip(starts.tolist(), (ends - starts).tolist(), strict=True)

    def _settings(self) -> dict[str, Any]:
        own = {"sentences": len(self.sentences) - 1, "files": len(self.files), "shuffle": self.shuffle}
        return {**super()._settings(), **own}

    def _position(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "taken": self.taken,
            "new_text": self.new_text,
            "rows": [list(row) for row in self._rows],
            "again": None if self._again is None else self._again.tolist(),
        }

    def _seek(self, position: Mapping[str, Any]) -> None:
        self.file, self.taken, self.new_text = position["file"], position["taken"], position["new_text"]
        self._open_file()
        if position["rows"] is not None:
            self._rows = [(place, left) for place, left in position["rows"]]
        if position["again"] is not None:
            self._again = torch.tensor(position["again"])

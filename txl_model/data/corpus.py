"""A prepared corpus: a folder with a vocabulary and a file of tokens per split, mapped into memory.

    corpus.json        what it is, and the size and SHA-256 of each split
    vocabulary.json    the symbols in the order of their numbers
    train.bin          tokens, unsigned integers of the smallest size that fits
    train.sentences    One Billion Word: where each sentence begins, int64

`txl prepare` makes such folders (`txl_model.data.prepare`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_model.data.batches import OrderedBatches, ShuffledBatches
from txl_model.data.vocabulary import CHUNK, Vocabulary

DESCRIPTION, VOCABULARY = "corpus.json", "vocabulary.json"
FORMAT = 1
FIELDS = {"format", "name", "vocab_size", "dtype", "cutoffs", "source", "splits"}
DTYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "uint32": torch.uint32}


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token."""
    return next(name for name, dtype in DTYPES.items() if vocab_size - 1 <= torch.iinfo(dtype).max)


def token_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"


def sentence_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.sentences"


@dataclass(frozen=True)
class Corpus:
    """What `Corpus.open` finds in a folder."""

    folder: Path
    description: dict[str, Any]  # what corpus.json says
    vocabulary: Vocabulary

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Raises FileNotFoundError for a missing folder or file, ValueError for a damaged one."""
        folder = Path(folder)
        path = folder / DESCRIPTION
        if not path.is_file():
            what = (
                f"{folder} is no prepared corpus: it has no {DESCRIPTION}"
                if folder.exists()
                else f"there is no folder {folder}"
            )
            raise FileNotFoundError(
                f"{what}. `txl prepare` makes a corpus, of any text or a published archive."
            )
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            if missing := FIELDS - description.keys():
                raise KeyError(*sorted(missing))
            version = description["format"]
            files = {
                name: (split["tokens"] * DTYPES[description["dtype"]].itemsize, split.get("sentences"))
                for name, split in description["splits"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): prepare the corpus again") from error
        if version != FORMAT:
            raise ValueError(
                f"{path} has format {version}, this program knows {FORMAT}: prepare the corpus again"
            )
        for split, (n_bytes, n_sentences) in files.items():
            _check_size(token_file(folder, split), n_bytes)
            if n_sentences is not None:
                _check_size(sentence_file(folder, split), 8 * (n_sentences + 1))
        vocabulary = Vocabulary.load(folder / VOCABULARY)
        if len(vocabulary) != description["vocab_size"]:
            raise ValueError(
                f"{folder / VOCABULARY} is not the vocabulary of {path}: prepare the corpus again"
            )
        return cls(folder, description, vocabulary)

    @property
    def name(self) -> str:
        return self.description["name"]

    @property
    def unit(self) -> str:
        """What a token is: "byte", "char" or "word"."""
        return self.vocabulary.unit

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """Where the published models cut the vocabulary for their adaptive softmax; () where they do not."""
        return tuple(self.description["cutoffs"])

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.description["splits"])

    @property
    def identity(self) -> dict[str, Any]:
        """What tells this corpus from others: name, unit, vocab_size, SHA-256 of each split's tokens."""
        sha256 = {name: split["sha256"] for name, split in self.description["splits"].items()}
        return {"name": self.name, "unit": self.unit, "vocab_size": self.vocab_size, "sha256": sha256}

    def tokens(self, split: str) -> Tensor:
        """All tokens of a split, in order: 1-D, uint8, uint16 or uint32; mapped, not to be written to.

        torch computes little with uint16 and uint32: take the slice that is needed, and `.long()` of it.
        """
        n_tokens = self._split(split)["tokens"]
        return _mapped(token_file(self.folder, split), DTYPES[self.description["dtype"]], n_tokens)

    def sentences(self, split: str) -> Tensor | None:
        """One Billion Word: where each sentence begins, int64 [sentences + 1], mapped. Else None.

        Sentence i is `tokens[s[i] : s[i + 1] + 1]`: the `<S>` between two sentences belongs to both.
        """
        n_sentences = self._split(split).get("sentences")
        if n_sentences is None:
            return None
        return _mapped(sentence_file(self.folder, split), torch.int64, n_sentences + 1)

    def batches(
        self,
        split: str,
        batch_size: int,
        tgt_len: int,
        *,
        ext_len: int = 0,
        varlen: bool = False,
        seed: int = 1111,
        rows: range | None = None,
    ) -> OrderedBatches | ShuffledBatches:
        """The iterator that the published code reads this split with.

        `OrderedBatches`; for One Billion Word `ShuffledBatches`, shuffled if the split is train.
        """
        tokens, sentences = self.tokens(split), self.sentences(split)
        if sentences is None:
            return OrderedBatches(
                tokens, batch_size, tgt_len, ext_len=ext_len, varlen=varlen, seed=seed, rows=rows
            )
        if varlen:
            raise ValueError(f"varlen is for running text: {self.name} is read by sentences")
        return ShuffledBatches(
            tokens,
            sentences,
            batch_size,
            tgt_len,
            ext_len=ext_len,
            files=self._split(split)["files"],
            shuffle=split == "train",
            seed=seed,
            rows=rows,
        )

    def verify(self) -> None:
        """Reads every token file. Raises ValueError for one that is not what was prepared."""
        for split in self.splits:
            digest = hashlib.sha256()
            with open(token_file(self.folder, split), "rb") as file:
                while data := file.read(CHUNK):
                    digest.update(data)
            if digest.hexdigest() != self._split(split)["sha256"]:
                raise ValueError(f"{token_file(self.folder, split)} is damaged: prepare the corpus again")

    def summary(self) -> str:
        """A few lines for people."""
        text = [f"{self.name}: a vocabulary of {self.vocab_size:,} {self.unit}s, {self.description['dtype']}"]
        source = self.description["source"]
        n_files = f", {source['files']:,} files" if source["files"] > 1 else ""
        text.append(f"  from {source['name']}{n_files}, {source['bytes']:,} bytes, sha256 {source['sha256']}")
        for name in self.splits:
            split = self._split(name)
            text.append(f"  {name:5} {split['tokens']:>13,} tokens, sha256 {split['sha256']}")
        return "\n".join(text)

    def _split(self, split: str) -> dict[str, Any]:
        try:
            return self.description["splits"][split]
        except KeyError:
            raise ValueError(f"{self.name} has no split {split!r}, only {', '.join(self.splits)}") from None


def _check_size(path: Path, n_bytes: int) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: prepare the corpus again")
    if path.stat().st_size != n_bytes:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes instead of {n_bytes:,}: prepare the corpus again"
        )


def _mapped(path: Path, dtype: torch.dtype, count: int) -> Tensor:
    with open(path, "rb") as file, warnings.catch_warnings():
        # torch has no read-only tensors and warns; nobody writes to a corpus. A private mapping that could
        # be written to (torch.from_file) is refused where the file is larger than memory.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype, count=count
        )

"""Which symbol has which number, and how a text becomes symbols.

The rules are those of the published vocabulary (kimiyoung/transformer-xl, pytorch/utils/vocabulary.py):
special symbols first, then by falling count, and among equals the one seen first comes first; a word is
what stands between white space; each line ends in `<eos>`, or, for One Billion Word, stands between two
`<S>`.
"""

from __future__ import annotations

import codecs
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, TextIO

UNITS = ("byte", "char", "word")
EOS, BORDER = "<eos>", "<S>"
UNKNOWN = "<unk>"
CHUNK = 2**20  # what is read at once: bytes, or characters


def read_symbols(
    stream: BinaryIO, unit: str, lower_case: bool = False, line_end: str | None = None
) -> Iterator[tuple[Sequence[Any], bool]]:
    """The symbols of a text, a piece at a time, so that neither a text nor a line of it need fit in memory.

    Yields (symbols, ends_line). Bytes come as `bytes`, characters as `str`, words as a list, one per line
    or part of a line; `ends_line` is always False for bytes and characters. The line end itself is never
    among words; among bytes and characters it is, unless `line_end` is "".

    Raises UnicodeDecodeError where characters or words are asked of what is not UTF-8.
    """
    if unit == "byte":
        while data := stream.read(CHUNK):
            yield data.translate(None, b"\n") if line_end == "" else data, False
    elif unit == "char":
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")  # a line end is read as it is written
        while piece := text.read(CHUNK):
            piece = piece.replace("\n", "") if line_end == "" else piece
            yield _lowered(piece) if lower_case else piece, False
    else:
        for piece, ends_line in _pieces_of_lines(io.TextIOWrapper(stream, encoding="utf-8")):
            yield (piece.lower() if lower_case else piece).split(), ends_line


def _lowered(piece: str) -> str:
    """Character by character: in str.lower a sigma at the end of a piece is one at the end of a word."""
    return piece.lower() if piece.isascii() else "".join(map(str.lower, piece))


def _pieces_of_lines(text: TextIO) -> Iterator[tuple[str, bool]]:
    """Lines, very long ones cut at white space, and whether the line ends with the piece."""
    word: list[str] = []  # of which no end was read yet
    inside = False
    while piece := text.readline(CHUNK):
        inside = not piece.endswith("\n")
        cut = len(piece)
        while inside and cut and not piece[cut - 1].isspace():
            cut -= 1
        if cut:
            yield "".join((*word, piece[:cut])), not inside
            word.clear()
        if cut < len(piece):
            word.append(piece[cut:])
    if inside:  # the last line of a file may lack its line end
        yield "".join(word), True


class _Index(dict[Any, int]):
    """Symbol to number; others have the number of the unknown symbol, or are an error where there is none."""

    unknown: int | None = None

    def __missing__(self, symbol: Any) -> int:
        if self.unknown is None:
            raise ValueError(f"{symbol!r} is not in the vocabulary, which has no symbol for what is unknown")
        return self.unknown


@dataclass(frozen=True)
class Vocabulary:
    """The symbols in the order of their numbers, and the rules by which a text was read."""

    unit: str  # "byte", "char" or "word"
    symbols: tuple[Any, ...]  # int for bytes, str otherwise
    lower_case: bool = False
    # What a line end becomes. None: it stays the byte or character that it is. "": it vanishes, as from the
    # published enwik8 and text8. "<eos>": that word. "<S>": that word, which stands before the first line
    # too.
    line_end: str | None = None
    unknown: str | None = None  # the symbol, if there is one, that stands for all there is none of

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")

    def __len__(self) -> int:
        return len(self.symbols)

    # ---- making one

    @classmethod
    def of_bytes(cls) -> Vocabulary:
        """All 256 bytes, each its own number."""
        return cls("byte", tuple(range(256)))

    @classmethod
    def from_counts(
        cls,
        counts: Counter[Any],
        unit: str,
        *,
        special: Iterable[str] = (),
        min_freq: int = 0,
        max_size: int | None = None,
        **rules: Any,
    ) -> Vocabulary:
        """The `max_size` most frequent symbols that occur `min_freq` times or more, after the special ones.

        Of equally frequent ones the one first counted comes first. As published, `max_size` counts a special
        symbol if it occurs in the text, as `<unk>` may. `rules` are the other fields.
        """
        symbols = dict.fromkeys(special)
        for symbol, count in counts.most_common(max_size):
            if count < min_freq:
                break
            symbols[symbol] = None
        return cls(unit, tuple(symbols), **rules)

    @classmethod
    def from_file(cls, path: Path, **rules: Any) -> Vocabulary:
        """One Billion Word's list: one word per line; what follows it in the line is ignored.

        Raises ValueError for an empty line, and where the line end or the unknown symbol is missing.
        """
        symbols: dict[str, None] = {}
        with open(path, encoding="utf-8") as lines:
            try:
                for line in lines:
                    symbols[line.split(maxsplit=1)[0]] = None
            except (IndexError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{path} is no list of words, one per line: line {len(symbols) + 1} is empty or not UTF-8"
                ) from error
        vocabulary = cls("word", tuple(symbols), **rules)
        for needed in (vocabulary.line_end, vocabulary.unknown):
            if needed not in symbols:
                raise ValueError(f"{path} does not list {needed}: is it the published vocabulary?")
        return vocabulary

    def save(self, path: Path) -> None:
        """As JSON."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, ensure_ascii=False)

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """What `save` wrote. Raises FileNotFoundError, or ValueError where the file is damaged."""
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
            return cls(**{**values, "symbols": tuple(values["symbols"])})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: it is no vocabulary ({error})") from error

    # ---- using it

    @cached_property
    def _index(self) -> _Index:
        index = _Index(zip(self.symbols, range(len(self.symbols)), strict=True))
        index.unknown = index.get(self.unknown)
        return index

    @cached_property
    def _table(self) -> bytes:
        """For bytes: the number of each."""
        table = bytearray(256)
        for number, symbol in enumerate(self.symbols):
            table[symbol] = number
        return bytes(table)

    def number(self, symbol: str | int) -> int:
        """The number of one symbol, or of the unknown one. ValueError where there is neither."""
        return self._index[symbol]

    def numbers(self, symbols: Sequence[Any]) -> bytes | Iterable[int]:
        """Of symbols as `read_symbols` yields them. ValueError, when they are read, for one that has none."""
        if isinstance(symbols, bytes):
            strange = symbols.translate(None, bytes(self.symbols))
            if strange:
                raise ValueError(f"byte {strange[0]} ({strange[:1]!r}) is not in the vocabulary")
            return symbols.translate(self._table)
        return map(self._index.__getitem__, symbols)

    def encode(self, text: str | bytes) -> list[int]:
        """A text, or what a file holds, to numbers, for instance a prompt: no line end is added to its last
        line.

        What the vocabulary lacks becomes its unknown symbol. Raises ValueError for what has no number,
        UnicodeDecodeError where characters or words are asked of what is not UTF-8.
        """
        return [number for symbols in self._symbols_of(text) for number in self.numbers(symbols)]

    def unknown_in(self, text: str | bytes) -> list[Any]:
        """The symbols of a text, each once, that the vocabulary lacks."""
        symbols = dict.fromkeys(symbol for piece in self._symbols_of(text) for symbol in piece)
        return [symbol for symbol in symbols if symbol not in self._index]

    def _symbols_of(self, text: str | bytes) -> Iterator[Sequence[Any]]:
        """As `read_symbols` gives them."""
        if self.unit != "word":
            data = text.encode() if isinstance(text, str) else text
            read = read_symbols(io.BytesIO(data), self.unit, self.lower_case, self.line_end)
            yield from (symbols for symbols, _ in read)
            return
        text = text if isinstance(text, str) else text.decode()
        words: list[str] = []
        # As a file would be read: whatever ends a line.
        for i, line in enumerate(io.StringIO(text, newline=None).read().split("\n")):
            if self.line_end and (i > 0 or self.line_end == BORDER):
                words.append(self.line_end)
            words += (line.lower() if self.lower_case else line).split()
        yield words

    def decode(self, numbers: Iterable[int]) -> str:
        """Numbers to text. Each word is followed by a space, so texts can be decoded in parts and joined.

        Bytes that are not UTF-8 become U+FFFD.
        """
        return self.decoder()(numbers, True)

    def decoder(self) -> Callable[..., str]:
        """`decode` for a text that comes in parts: a function of (numbers, final=False).

        It holds back the first bytes of a character until the others come, or `final` says that none will.
        """
        if self.unit == "byte":
            characters = codecs.getincrementaldecoder("utf-8")("replace")
            return lambda numbers, final=False: characters.decode(bytes(self._symbols(numbers)), final)
        if self.unit == "char":
            return lambda numbers, final=False: "".join(self._symbols(numbers))

        def words(numbers: Iterable[int], final: bool = False) -> str:
            symbols = self._symbols(numbers)
            return "".join("\n" if symbol == self.line_end else f"{symbol} " for symbol in symbols)

        return words

    def _symbols(self, numbers: Iterable[int]) -> Iterator[Any]:
        for n in numbers:
            if not 0 <= n < len(self.symbols):
                raise IndexError(f"{n} is no symbol's number: there are {len(self.symbols)} symbols")
            yield self.symbols[n]

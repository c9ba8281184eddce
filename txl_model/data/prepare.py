"""Making a prepared corpus: the published ones from their archives, and any text.

Nothing is held in memory but the vocabulary, and nothing is downloaded. The folder is written under another
name and renamed when it is whole, so an interrupted run leaves nothing that opens. An empty folder that is
there already stays (it may be somebody's current one, or a file system's): files are moved into it.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import shutil
from array import array
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from txl_model.data.corpus import (
    DESCRIPTION,
    FORMAT,
    VOCABULARY,
    Corpus,
    sentence_file,
    token_dtype,
    token_file,
)
from txl_model.data.published import PUBLISHED, SPLITS, Published
from txl_model.data.sources import (
    Part,
    Report,
    cut_by_file,
    cut_by_size,
    find_published,
    find_text,
    match,
    sha256,
)
from txl_model.data.vocabulary import BORDER, CHUNK, EOS, UNITS, UNKNOWN, Vocabulary, read_symbols

OPTIONS = (
    "unit",
    "pattern",
    "valid",
    "test",
    "whole_files",
    "min_freq",
    "max_size",
    "lower_case",
    "vocab_file",
)
TYPECODES = {"uint8": "B", "uint16": "H", "uint32": "I"}  # of array.array


def prepare_corpus(
    kind: str,
    source: str | Path,
    destination: str | Path,
    *,
    vocab_file: str | Path | None = None,
    progress: bool = False,
) -> Corpus:
    """Make a published corpus: "enwik8", "text8", "wt103", "wt2", "ptb" or "lm1b".

    Args:
        source: the archive, or a folder with the archive, its unpacked files, or what the published scripts
            make of it.
        destination: the folder to make, or an empty one.
        vocab_file: lm1b's list of words. None: 1b_word_vocab.txt beside the archive, or in the folder.
        progress: show bars, if tqdm is installed.

    Raises:
        FileNotFoundError: something is missing; the message says what, and where to get it.
        ValueError: damaged, or not what was published (sizes of the splits, number of symbols).
        OSError: `destination` exists, cannot be written, or the disk is full.
    """
    if kind not in PUBLISHED:
        raise ValueError(f"corpus must be one of {', '.join(PUBLISHED)}, got {kind!r}")
    published, source, destination = PUBLISHED[kind], Path(source), Path(destination)
    _check_new(destination)
    with _new_folder(destination) as folder:
        scratch = folder / "unpacked"
        parts, files = find_published(published, source, scratch)
        if published.unit != "word":
            for split in SPLITS:
                size = _size(parts[split])
                _check_published(
                    published, f"bytes of {split} text", size, published.sizes[split], published.stripped
                )
        rules: dict[str, Any] = {"lower_case": published.lower_case, "line_end": published.line_end}
        unknown = published.unknown
        description: dict[str, Any] = {"name": kind, "cutoffs": list(published.cutoffs)}
        if published.vocab_file:
            path = _vocab_file(published, source, vocab_file)
            vocabulary = Vocabulary.from_file(path, unknown=unknown, **rules)
            description["vocab_file"] = _digests([path], path.parent, progress)
        else:
            counted = [part for split in published.counted for part in parts[split]]
            counts = _count(counted, published.unit, rules, progress)
            vocabulary = Vocabulary.from_counts(
                counts, published.unit, special=published.special, unknown=unknown, **rules
            )
        _check_published(published, "symbols", len(vocabulary), published.vocab_size)
        description["source"] = _digests(files, source, progress)
        description["splits"] = _write_tokens(folder, parts, vocabulary, progress)
        if published.unit == "word":
            for split, written in description["splits"].items():
                size = written["tokens"] - (published.line_end == BORDER)  # the first one ends no line
                _check_published(
                    published, f"words and line ends of {split} text", size, published.sizes[split]
                )
        shutil.rmtree(scratch, ignore_errors=True)
        _write_description(folder, vocabulary, description)
    return Corpus.open(destination)


def prepare_text(
    source: str | Path,
    destination: str | Path,
    *,
    unit: str = "byte",
    pattern: str = "**/*",
    valid: float | str = 0.05,
    test: float | str = 0.05,
    whole_files: bool = False,
    min_freq: int = 0,
    max_size: int | None = None,
    lower_case: bool = False,
    progress: bool = False,
) -> Corpus:
    """Make a corpus of any text: a file, or the files of a folder one after another, in the order of their
    paths.

    The vocabulary is that of the train split and `<unk>`; for "byte" it is all 256, and nothing is unknown.
    Words are what stands between white space, and each line ends in `<eos>`. Text must be UTF-8 unless the
    unit is "byte"; a byte order mark that a file begins with is then no part of it. Files' names are of any
    bytes: what of them is not UTF-8 is described as `\\xff`.

    Args:
        source: a file or a folder.
        destination: the folder to make, or an empty one.
        unit: "byte", "char" or "word".
        pattern: which files of a folder, for instance "**/*.py". As in a shell, `*` matches no hidden file.
        valid, test: what is held out. A number: this share of the bytes, the last part of the text, cut
            between characters or lines; 0: no such split. A string: the files that this pattern matches.
        whole_files: a share is made up of whole files, chosen by a hash of their path, instead of the last
            part.
        min_freq, max_size: words (characters) that occur more seldom than this, and the most frequent ones
            beyond this many, are unknown. `<eos>` and `<unk>` always have a number, and count only where the
            text itself has such words.
        lower_case: of words and characters.
        progress: show bars, if tqdm is installed.

    Raises:
        FileNotFoundError, OSError: as `prepare_corpus`.
        ValueError: no text, a split without text, text that is not UTF-8, or options that do not go together.
    """
    source, destination = Path(source), Path(destination)
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    if unit == "byte" and (min_freq or max_size is not None or lower_case):
        raise ValueError(
            "min_freq, max_size and lower_case are for words and characters: a byte is kept as it is"
        )
    if min_freq < 0 or (max_size is not None and max_size < 1):
        raise ValueError(
            f"min_freq must not be negative and max_size at least 1, got {min_freq} and {max_size}"
        )
    _check_new(destination)
    files = find_text(source, pattern)
    root = source if source.is_dir() else source.parent
    parts = _split(files, root, unit, {"valid": valid, "test": test}, whole_files)
    rules: dict[str, Any] = {"lower_case": lower_case, "line_end": EOS if unit == "word" else None}
    with _new_folder(destination) as folder:
        if unit == "byte":
            vocabulary = Vocabulary.of_bytes()
        else:
            special = (EOS, UNKNOWN) if unit == "word" else (UNKNOWN,)
            limits: dict[str, Any] = {"min_freq": min_freq, "max_size": max_size}
            counts = _count(parts["train"], unit, rules, progress)
            vocabulary = Vocabulary.from_counts(
                counts, unit, special=special, unknown=UNKNOWN, **limits, **rules
            )
        description: dict[str, Any] = {
            "name": _in_utf_8(destination.resolve().name),
            "cutoffs": [],
            "options": {
                "pattern": pattern,
                "valid": valid,
                "test": test,
                "whole_files": whole_files,
                "min_freq": min_freq,
                "max_size": max_size,
            },
            "source": _digests(files, root, progress),
            "splits": _write_tokens(folder, parts, vocabulary, progress),
        }
        _check_lengths(description["splits"])
        _write_description(folder, vocabulary, description)
    return Corpus.open(destination)


# ---------------------------------------------------------------------------------------------- the steps


UNFINISHED = ".unfinished-"


def _check_new(destination: Path) -> None:
    if destination.exists() and not (
        destination.is_dir() and all(path.name.startswith(UNFINISHED) for path in destination.iterdir())
    ):
        raise FileExistsError(f"{destination} exists already: remove it, or name another folder")


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
    """A folder to fill, whose files are in `destination` if nothing goes wrong, and else are removed."""
    destination = destination.resolve()
    # Hidden, and with the process in its name: what a killed one left behind is in nobody's way.
    folder = destination.with_name(f".{destination.name}{UNFINISHED}{os.getpid()}")
    into = destination.is_dir()
    if into:  # on the same file system
        folder = destination / f"{UNFINISHED}{os.getpid()}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"cannot write {destination}: {error.strerror}") from error
    try:
        yield folder
        if into:
            _check_new(destination)
            for path in sorted(folder.iterdir(), key=lambda path: path.name == DESCRIPTION):  # that one last
                os.rename(path, destination / path.name)
        else:
            os.rename(folder, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(
                f"cannot write {destination}: {error.strerror}; what was written is removed"
            ) from error
        if error.filename is not None and str(folder) in str(error.filename):
            raise OSError(f"cannot write {destination}: {error.strerror}") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _bar(what: str, n_bytes: int, shown: bool) -> Iterator[Report]:
    """Progress in bytes."""
    if shown:
        try:
            from tqdm import tqdm
        except ImportError:
            shown = False
    if not shown:
        yield lambda n: None
        return
    with tqdm(total=n_bytes, desc=what, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update


def _size(parts: Iterable[Part]) -> int:
    return sum(len(part) for part in parts)


def _read(
    part: Part, unit: str, rules: Mapping[str, Any], report: Report
) -> Iterator[tuple[Sequence[Any], bool]]:
    """`read_symbols` of part of a file, without the byte order mark that it may begin with."""
    with part.open(report) as stream:
        if unit != "byte" and part.start == 0 and stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8):
            stream.read(len(BOM_UTF8))
        try:
            yield from read_symbols(stream, unit, **rules)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{part.path} is not UTF-8 text ({error.reason}): leave it out (--glob), or read bytes "
                "(--unit byte)"
            ) from error


def _count(parts: Sequence[Part], unit: str, rules: Mapping[str, Any], progress: bool) -> Counter[Any]:
    counts: Counter[Any] = Counter()
    with _bar("counting", _size(parts), progress) as report:
        for part in parts:
            for symbols, _ in _read(part, unit, rules, report):
                counts.update(symbols)
    return counts


def _digests(files: Sequence[Path], source: Path, progress: bool) -> dict[str, Any]:
    """What the source was: its name, how many files and bytes, and their SHA-256."""
    n_bytes = sum(path.stat().st_size for path in files)
    with _bar("sha256", n_bytes, progress) as report:
        digest = sha256(files, source, report)
    name = files[0].name if len(files) == 1 else source.resolve().name
    return {"name": _in_utf_8(name), "files": len(files), "bytes": n_bytes, "sha256": digest}


def _in_utf_8(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _write_tokens(
    folder: Path, parts: Mapping[str, Sequence[Part]], vocabulary: Vocabulary, progress: bool
) -> dict[str, Any]:
    """The files of each split, and what corpus.json says of them."""
    written = {}
    with _bar("writing", sum(map(_size, parts.values())), progress) as report:
        for split in parts:
            written[split] = _write_split(folder, split, parts[split], vocabulary, report)
    return written


def _check_lengths(splits: Mapping[str, Any]) -> None:
    for split, about in splits.items():
        if about["tokens"] < 2:
            raise ValueError(
                f"too little is left for the {split} split: at least 2 tokens are needed, to predict one "
                f"from the other, and it has {about['tokens']}. Give it more text, or another share "
                "(--valid, --test; 0: no such split)"
            )


def _write_split(
    folder: Path, split: str, parts: Sequence[Part], vocabulary: Vocabulary, report: Report
) -> dict[str, Any]:
    rules = {"lower_case": vocabulary.lower_case, "line_end": vocabulary.line_end}
    line_end = vocabulary.number(vocabulary.line_end) if vocabulary.line_end else -1
    file_ends = []  # One Billion Word: of each file, where its sentences end
    with (
        _ArrayFile(token_file(folder, split), TYPECODES[token_dtype(len(vocabulary))]) as tokens,
        _ArrayFile(sentence_file(folder, split), "q")
        if vocabulary.line_end == BORDER
        else nullcontext() as sentences,
    ):
        if sentences is not None:
            tokens.append(line_end)
            sentences.append(0)
        for part in parts:
            for symbols, ends_line in _read(part, vocabulary.unit, rules, report):
                tokens.extend(vocabulary.numbers(symbols))
                if ends_line:
                    tokens.append(line_end)
                    if sentences is not None:
                        sentences.append(len(tokens) - 1)
            if sentences is not None:
                file_ends.append(len(sentences) - 1)
        about: dict[str, Any] = {"tokens": len(tokens)}
        if sentences is not None:
            about |= {"sentences": len(sentences) - 1, "files": file_ends}
    return {**about, "sha256": tokens.sha256.hexdigest()}


class _ArrayFile:
    """Integers on their way to a file, a block at a time."""

    def __init__(self, path: Path, typecode: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._block, self._n_written = array(typecode), 0
        self.sha256 = hashlib.sha256()

    def __len__(self) -> int:
        return self._n_written + len(self._block)

    def append(self, number: int) -> None:
        self._block.append(number)

    def extend(self, numbers: bytes | Iterable[int]) -> None:
        if isinstance(numbers, bytes):
            self._block.frombytes(numbers)
        else:
            self._block.extend(numbers)
        if len(self._block) >= CHUNK:
            self._write()

    def _write(self) -> None:
        data = self._block.tobytes()
        self._file.write(data)
        self.sha256.update(data)
        self._n_written += len(self._block)
        del self._block[:]

    def __enter__(self) -> _ArrayFile:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if failed is None:
                self._write()
                self._file.flush()
                os.fsync(self._file.fileno())


def _write_description(folder: Path, vocabulary: Vocabulary, description: dict[str, Any]) -> None:
    """Last of all: a folder without it is no corpus."""
    vocabulary.save(folder / VOCABULARY)
    about = {
        "format": FORMAT,
        "name": description.pop("name"),
        "unit": vocabulary.unit,
        "vocab_size": len(vocabulary),
        "dtype": token_dtype(len(vocabulary)),
        **description,
    }
    # What of a pattern is not UTF-8 becomes JSON's own escape.
    with open(folder / DESCRIPTION, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(about, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _vocab_file(published: Published, source: Path, named: str | Path | None) -> Path:
    beside = source if source.is_dir() else source.parent
    path = beside / published.vocab_file if named is None else Path(named)
    if not path.is_file():
        raise FileNotFoundError(f"{path}, the list of words, is missing. {published.how_to_get()}")
    return path


def _check_published(published: Published, what: str, got: int, wanted: int, stripped: int = 0) -> None:
    slack = published.tolerance * wanted
    if not wanted - slack - stripped <= got <= wanted + slack:
        raise ValueError(
            f"this is not {published.title} as published: {got:,} {what} instead of {wanted:,}. "
            f"{published.how_to_get()} (Any other text: `txl prepare text`.)"
        )


def _split(
    files: Sequence[Path], root: Path, unit: str, held_out: Mapping[str, float | str], whole_files: bool
) -> dict[str, list[Part]]:
    """The parts of each split; see prepare_text."""
    named: dict[str, list[Path]] = {}
    shares = {"train": 1.0}
    left = list(files)
    for split, how in held_out.items():
        if isinstance(how, str):
            matching = set(match(root, how))
            named[split] = [path for path in left if path in matching]
            left = [path for path in left if path not in matching]
            if not named[split]:
                raise ValueError(f"no file in {root} matches {how!r}, which is to be the {split} text")
        elif not 0 <= how < 1:
            raise ValueError(f"{split} must be a share from 0 to 1, or a pattern, got {how}")
        elif how > 0:
            shares[split] = how
            shares["train"] -= how
    if shares["train"] <= 0:
        raise ValueError("valid and test together leave nothing to train on")
    parts = cut_by_file(left, root, shares) if whole_files else cut_by_size(left, shares, unit)
    parts |= {split: [Part.whole(path) for path in paths] for split, paths in named.items()}
    for split in parts:
        if not _size(parts[split]):
            raise ValueError(
                f"nothing is left for the {split} split: there is too little text, or too much is held out "
                "(--valid, --test)"
            )
    return {split: parts[split] for split in SPLITS if split in parts}


# ---------------------------------------------------------------------------------------- the command line


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `txl prepare`: one sub-command per published corpus, and `text` for any other text."""
    kinds = parser.add_subparsers(dest="kind", metavar="CORPUS", required=True)

    def add(kind: str, title: str, description: str, source: str) -> argparse.ArgumentParser:
        sub = kinds.add_parser(kind, help=title, description=description)
        sub.add_argument("source", type=Path, help=source)
        sub.add_argument("destination", type=Path, help="the folder to make, or an empty one")
        return sub

    text = add(
        "text", "any text: a file, or the files of a folder", "A corpus of any text.", "a file or a folder"
    )
    text.add_argument("--unit", choices=UNITS, default="byte", help="what a token is (default: %(default)s)")
    text.add_argument(
        "--glob",
        dest="pattern",
        default="**/*",
        metavar="PATTERN",
        help="which files of the folder, for instance '**/*.py' (default: all but the hidden ones)",
    )
    for split in ("valid", "test"):
        text.add_argument(
            f"--{split}",
            type=_share_or_pattern,
            default=0.05,
            metavar="SHARE|PATTERN",
            help=f"the {split} split: a share of the text, 0: none, or a pattern (default: %(default)s)",
        )
    text.add_argument(
        "--whole-files", action="store_true", help="hold out whole files, not the end of the text"
    )
    text.add_argument("--min-freq", type=int, default=0, metavar="N", help="words seen more seldom are <unk>")
    text.add_argument(
        "--max-size", type=int, metavar="N", help="only the N most frequent words, others are <unk>"
    )
    text.add_argument("--lower-case", action="store_true", help="turn words to lower case")
    for kind, published in PUBLISHED.items():
        archive = f"{published.archive}, or a folder with it, or with its files"
        sub = add(kind, published.title, published.how_to_get(), archive)
        if published.vocab_file:
            sub.add_argument(
                "--vocab-file",
                type=Path,
                metavar="FILE",
                help=f"the list of words (default: {published.vocab_file} beside the archive)",
            )


def _share_or_pattern(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def run_prepare(args: argparse.Namespace) -> None:
    """`txl prepare`: makes the corpus and prints what it is."""
    options = {name: value for name, value in vars(args).items() if name in OPTIONS}
    make = prepare_text if args.kind == "text" else partial(prepare_corpus, args.kind)
    corpus = make(args.source, args.destination, progress=True, **options)
    print(corpus.summary())

"""Where a text is: parts of files, found in a folder or unpacked from an archive, cut into splits."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from txl_model.data.published import SPLITS, Published
from txl_model.data.vocabulary import CHUNK

ZIP, GZIP = b"PK\x03\x04", b"\x1f\x8b"  # how the files begin
Report = Callable[[int], Any]  # told how many bytes have been dealt with


def _silent(n_bytes: int) -> None:
    pass


@dataclass(frozen=True)
class Part:
    """Bytes [start, end) of a file."""

    path: Path
    start: int
    end: int

    @classmethod
    def whole(cls, path: Path) -> Part:
        return cls(path, 0, path.stat().st_size)

    def __len__(self) -> int:
        return self.end - self.start

    def open(self, report: Report = _silent) -> io.BufferedReader:
        """For reading; `report` is told of the bytes that have been read."""
        return io.BufferedReader(_PartReader(self, report), CHUNK)


class _PartReader(io.RawIOBase):
    def __init__(self, part: Part, report: Report) -> None:
        self._file = open(part.path, "rb", buffering=0)  # noqa: SIM115 (see close)
        self._file.seek(part.start)
        self._left, self._report = len(part), report

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= n
        self._report(n)
        return n

    def close(self) -> None:
        self._file.close()
        super().close()


def sha256(paths: Sequence[Path], root: Path, report: Report = _silent) -> str:
    """Of one file; of several, of the list that `sha256sum` prints of them, with paths below root."""
    if len(paths) != 1:
        lines = (f"{sha256([path], root, report)}  ".encode() + _name(path, root) + b"\n" for path in paths)
        return hashlib.sha256(b"".join(lines)).hexdigest()
    digest = hashlib.sha256()
    with Part.whole(paths[0]).open(report) as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def _name(path: Path, root: Path) -> bytes:
    """The path of a file below root, as the system has it: it need not be UTF-8."""
    return os.fsencode(path.relative_to(root).as_posix())


# ---------------------------------------------------------------------------------- published corpora


def find_published(
    published: Published, source: Path, scratch: Path
) -> tuple[dict[str, list[Part]], list[Path]]:
    """The text of each split of a published corpus, and the files of `source` that it comes from.

    `source` is the archive, or a folder with the archive in it, with its unpacked files, or with what the
    published scripts leave. Archives are unpacked into `scratch`.

    Raises FileNotFoundError for what is missing, ValueError for what is damaged or something else.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist. {published.how_to_get()}")
    if source.is_dir():
        if not os.access(source, os.R_OK | os.X_OK):
            raise PermissionError(f"{source} cannot be read: permission denied")
        parts, files = _find_unpacked(published, source, scratch)
        if parts:
            return parts, files
        source = source / published.archive
        if not source.is_file():
            looked_for = dict.fromkeys([*(f"{split}.txt" for split in SPLITS), *published.members.values()])
            raise FileNotFoundError(
                f"no {published.title} in {source.parent}: it has neither {published.archive} nor "
                f"{', '.join(looked_for)}. {published.how_to_get()}"
            )
    with open(source, "rb") as file:
        magic = file.read(4)
    if magic == ZIP or magic.startswith(GZIP):
        _unpack(published, source, magic == ZIP, scratch)
        parts, _ = _find_unpacked(published, scratch, scratch)
        if not parts:
            raise ValueError(
                f"{source} has no {', '.join(published.members.values())}. {published.how_to_get()}"
            )
        return parts, [source]
    if "all" in published.members:
        return _cut_published(published, source), [source]
    raise ValueError(f"{source} is no archive. {published.how_to_get()}")


def _find_unpacked(
    published: Published, folder: Path, scratch: Path
) -> tuple[dict[str, list[Part]], list[Path]]:
    """As find_published, but for the archive; nothing where the folder has no file of the corpus."""
    found: dict[str, list[Path]] = {}
    for split in SPLITS:
        laid_out = folder / f"{split}.txt"  # the name that the published scripts give it
        pattern = published.members.get(split)
        if laid_out.is_file():
            found[split] = [laid_out]
        elif pattern is not None:
            found[split] = sorted(folder.rglob(pattern))
            if len(found[split]) > 1 and not pattern.endswith("*"):
                raise ValueError(f"{folder} has {pattern} more than once: name the folder of one of them")
    missing = [split for split in SPLITS if not found.get(split)]
    if not missing:
        files = list(dict.fromkeys(path for split in SPLITS for path in found[split]))
        if published.unit != "word":
            found = {split: [_restored(published, path, scratch)] for split, (path,) in found.items()}
        return {split: [Part.whole(path) for path in paths] for split, paths in found.items()}, files
    if len(missing) < len(SPLITS):
        raise FileNotFoundError(
            f"{folder} has {published.title}'s {', '.join(s for s in SPLITS if s not in missing)} text, but "
            f"not {', '.join(published.members.get(split, f'{split}.txt') for split in missing)}. "
            f"{published.how_to_get()}"
        )
    whole = folder / published.members.get("all", published.archive)
    if "all" in published.members and whole.is_file():
        return _cut_published(published, whole), [whole]
    return {}, []


def _cut_published(published: Published, path: Path) -> dict[str, list[Part]]:
    """The splits of a corpus that is one file, in their order."""
    size, wanted = path.stat().st_size, sum(published.sizes.values())
    if size != wanted:
        raise ValueError(
            f"{path} has {size:,} bytes, {published.title} has {wanted:,}. {published.how_to_get()} "
            "(Any other text: `txl prepare text`.)"
        )
    parts, start = {}, 0
    for split in SPLITS:
        part = Part(path, start, start + published.sizes[split])
        parts[split] = [_strip(part) if published.stripped else part]
        start = part.end
    return parts


def _strip(part: Part) -> Part:
    """Without the white space at both ends (at most 4 KiB of it, which is plenty), as `str.strip`."""
    with open(part.path, "rb") as file:
        file.seek(part.start)
        head = file.read(min(4096, len(part)))
        file.seek(max(part.start, part.end - 4096))
        tail = file.read(min(4096, len(part)))
    return Part(
        part.path, part.start + len(head) - len(head.lstrip()), part.end - (len(tail) - len(tail.rstrip()))
    )


def _restored(published: Published, path: Path, scratch: Path) -> Path:
    """The text that prep_enwik8.py or prep_text8.py spelled out symbol by symbol, in `scratch`."""
    restored = scratch / path.with_suffix(".raw").name
    scratch.mkdir(exist_ok=True)
    with open(path, "rb") as spelled, open(restored, "wb") as out:
        if published.unit == "char":  # "_ a n a r c h": the blank itself is spelled "_"
            to_blank = bytes.maketrans(b"_", b" ")
            while data := spelled.read(CHUNK):
                out.write(data.translate(to_blank, b" "))
            return restored
        for line in spelled:  # "60 109 101": bytes as numbers, but for the line ends
            try:
                out.write(bytes(map(int, line.split())) + b"\n" * line.endswith(b"\n"))
            except ValueError as error:
                raise ValueError(f"{path} is not what prep_enwik8.py writes: {error}") from error
    return restored


def _unpack(published: Published, archive: Path, is_zip: bool, scratch: Path) -> None:
    """The files of the corpus, and no others, into `scratch`."""
    patterns = set(published.members.values())

    def target(name: str) -> Path | None:
        member = PurePosixPath(name)
        if not any(member.match(pattern) for pattern in patterns):
            return None
        path = scratch.joinpath(*(step for step in member.parts if step not in ("/", "..")))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    try:
        if is_zip:
            with zipfile.ZipFile(archive) as zipped:
                for name in zipped.namelist():
                    if path := target(name):
                        with zipped.open(name) as packed, open(path, "wb") as out:
                            shutil.copyfileobj(packed, out, CHUNK)
        else:
            with tarfile.open(archive, "r|*") as tar:  # a stream: in one pass, in the order of the archive
                for member in tar:
                    if member.isfile() and (path := target(member.name)):
                        packed_file = tar.extractfile(member)
                        assert packed_file is not None  # it is a file
                        with packed_file, open(path, "wb") as out:
                            shutil.copyfileobj(packed_file, out, CHUNK)
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(
            f"{archive} is damaged or incomplete ({error}): remove it. {published.how_to_get()}"
        ) from error


# -------------------------------------------------------------------------------------------- any text


def match(folder: Path, pattern: str) -> list[Path]:
    """The files that match, in the order of their paths.

    Hidden files, and what is in hidden folders, only if the pattern has a name with a dot before it, too;
    linked folders are not entered by `**`.
    """
    if PurePosixPath(pattern).is_absolute():
        raise ValueError(f"the pattern must be one of paths below {folder}, got {pattern!r}")
    hidden = any(name.startswith(".") for name in PurePosixPath(pattern).parts)
    paths = {_name(path, folder): path for path in folder.glob(pattern) if path.is_file()}
    return [
        path
        for _, path in sorted(paths.items())
        if hidden or not any(step.startswith(".") for step in path.relative_to(folder).parts)
    ]


def find_text(source: Path, pattern: str) -> list[Path]:
    """The files of a folder that match and are not empty, in the order of their paths; or the one file.

    Raises FileNotFoundError, PermissionError, or ValueError where there is no text.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: name a text file, or a folder of them")
    if source.is_dir():
        if not os.access(source, os.R_OK | os.X_OK):
            raise PermissionError(f"{source} cannot be read: permission denied")
        # A file with two names is taken once, or it could be learned and held out.
        names: dict[str, Path] = {}
        for path in match(source, pattern):
            names.setdefault(os.path.realpath(path), path)
        files = [*names.values()]
    else:
        files = [source]
    if not files:
        raise ValueError(f"{source} holds no text: no file in it matches {pattern!r}")
    texts = [path for path in files if path.stat().st_size]
    if texts:
        return texts
    if files != [source]:
        raise ValueError(f"{source} holds no text: all files are empty")
    if _tells_no_size(source):
        raise ValueError(
            f"{source} is a pipe, a device or, as in /proc, a file that does not tell its size, by which a "
            "text is split: copy it to a file first"
        )
    raise ValueError(f"{source} holds no text: it is empty")


def _tells_no_size(path: Path) -> bool:
    """Whether a file of size 0 may have text all the same."""
    if not path.is_file():  # not to be opened: a pipe would wait for its writer
        return True
    with open(path, "rb") as file:
        return bool(file.read(1))


def cut_by_size(files: Sequence[Path], shares: Mapping[str, float], unit: str) -> dict[str, list[Part]]:
    """All files one after another, cut where each split has its share of the bytes, in the order of `shares`.

    A cut moves on to the next character or, for words, to the next line (in a very long line, to the next
    blank; a word longer than CHUNK is cut between characters).
    """
    starts = [0, *accumulate(path.stat().st_size for path in files)]
    cuts = [0]
    for share in accumulate(shares.values()):
        place = round(share * starts[-1])
        i = bisect_right(starts, place) - 1
        cuts.append(
            starts[i] + _next_boundary(files[i], place - starts[i], unit) if i < len(files) else place
        )
    cuts[-1] = starts[-1]  # whatever rounding makes of the sum
    return {
        split: [
            Part(path, max(start, first) - start, min(end, last) - start)
            for path, start, end in zip(files, starts, starts[1:], strict=False)
            if max(start, first) < min(end, last)
        ]
        for split, first, last in zip(shares, cuts, cuts[1:], strict=False)
    }


def _next_boundary(path: Path, offset: int, unit: str) -> int:
    """The first place at or after `offset` where a text can be cut."""
    if unit == "byte" or offset == 0:
        return offset
    with open(path, "rb") as file:
        file.seek(offset - 1)
        data = file.read(CHUNK)  # from the byte before, after which `offset` may be a good place already
    if unit == "char":
        inside = 1
        while inside < len(data) and data[inside] & 0xC0 == 0x80:  # not the first byte of a character
            inside += 1
        return offset - 1 + inside
    blank = re.search(rb"\n", data) or re.search(rb"\s", data)
    return offset - 1 + blank.end() if blank else _next_boundary(path, offset - 1 + len(data), "char")


def cut_by_file(files: Sequence[Path], root: Path, shares: Mapping[str, float]) -> dict[str, list[Part]]:
    """Whole files: each held-out split takes files until it has its share of the bytes, train has the others.

    They are taken in the order of the SHA-256 of their paths below `root`: arbitrary, and always the same.
    """
    parts = {path: Part.whole(path) for path in files}
    total = sum(len(part) for part in parts.values())
    left = sorted(files, key=lambda path: hashlib.sha256(_name(path, root)).digest())
    split_of = dict.fromkeys(files, "train")
    for split, share in shares.items():
        taken = 0
        while split != "train" and left and taken < share * total:
            path = left.pop()
            split_of[path] = split
            taken += len(parts[path])
    return {split: [parts[path] for path in files if split_of[path] == split] for split in shares}

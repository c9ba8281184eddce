"""The log of a training run: one JSON object per line, and its plot."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def figures(loss: float, unit: str) -> dict[str, float]:
    """A loss in nats per token, and what it is called: perplexity of words, bits per character of
    anything less.
    """
    if unit == "word":
        return {"loss": loss, "ppl": math.exp(min(loss, 100.0))}
    return {"loss": loss, "bpc": loss / math.log(2)}


class Log:
    """Appends events to a file. A run that goes on from a checkpoint cuts off what it had logged
    since."""

    def __init__(self, path: Path | None, size: int = 0) -> None:
        """`path` None: a log that is not kept. `size`: bytes of the file to keep."""
        self._path = path
        self._file = None if path is None else path.open("ab", buffering=0)
        if self._file is not None and self._file.tell() > size:
            self._file.truncate(size)

    def append(self, event: dict[str, Any]) -> None:
        """One more line. Raises OSError if it cannot be written."""
        if self._file is None:
            return
        line = json.dumps(event).encode() + b"\n"
        with self._errors():
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> int:
        """Wait until all of it is on the disk. Returns its size in bytes. Raises OSError."""
        if self._file is None:
            return 0
        with self._errors():
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the system says of the file, with its name."""
        try:
            yield
        except OSError as error:
            raise OSError(f"cannot write to {self._path}: {error.strerror}") from error

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a log; a last line that is still being written is left out.

    Raises FileNotFoundError, or ValueError naming the first line that is no event.
    """
    events = []
    lines = Path(path).read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            event = json.loads(line)
            event["event"], event["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is no event of a training log") from error
        events.append(event)
    return events


def plot_log(log: str | os.PathLike[str], png: str | os.PathLike[str]) -> None:
    """Draw training and validation loss, as bits per character or perplexity, against steps.

    Raises ImportError without matplotlib, ValueError for a log in which nothing was logged yet.
    """
    import matplotlib.figure

    events = [e for e in read_log(log) if e["event"] in ("train", "eval")]
    if not events:
        raise ValueError(f"{log} has no losses yet: nothing to plot")
    unit = "bpc" if "bpc" in events[0] else "ppl"
    figure = matplotlib.figure.Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for kind, label, style in (("train", "training", "-"), ("eval", "validation", "o-")):
        points = [(e["step"], e[unit]) for e in events if e["event"] == kind and math.isfinite(e[unit])]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.5, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per character" if unit == "bpc" else "perplexity")
    if unit == "ppl":
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=150)

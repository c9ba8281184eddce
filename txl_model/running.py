"""A run among other processes: its folder's lock, its time, the signals that end it."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from txl_model.checkpoint import reason

LOCK = ".lock"  # of a run's folder


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make a run's folder, and keep other trainings out of it: by a lock, which goes when its process does,
    however that ends.

    Raises ValueError if another training is in it, OSError if it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise OSError(f"cannot write to {folder}: {reason(error)}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"another training is running in {folder}: wait for it or end it, or name another folder"
            ) from error
        except OSError:  # a file system without locks
            pass
        yield


class Stopwatch:
    """Steps, tokens and seconds since a line of the log; evaluation and saving do not count."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.steps = self.tokens = 0
        self._began = time.perf_counter()

    def count(self, tokens: int) -> None:
        """One more step."""
        self.steps += 1
        self.tokens += tokens

    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / max(time.perf_counter() - self._began, 1e-9)

    def seconds_per_step(self) -> float:
        return (time.perf_counter() - self._began) / max(self.steps, 1)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began


class Stopped(Exception):
    """A signal has asked for an end."""


class StopSignal:
    """Notes SIGINT and SIGTERM instead of dying of them; the second one is not held back.

    Only the main thread gets signals: in others this does nothing. A signal that is ignored, as SIGINT is in
    a shell's background jobs, stays ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def check(self, tokens: int) -> None:
        """Raise `Stopped` if there was a signal. A progress callback: the tokens do not matter."""
        if self.number is not None:
            raise Stopped

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            self.__exit__()
            signal.raise_signal(number)
        self.number = number

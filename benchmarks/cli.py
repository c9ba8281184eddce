"""What the commands have in common: options, the progress bar, words for an error, the JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from measure import Task

from txl_kernels.api import MAX_HEAD_DIM

try:
    from tqdm import tqdm
except ImportError:  # parse() says so
    tqdm = object


STOPPED, READ_NO_FURTHER = 130, 141  # exit statuses, as of a shell's SIGINT and SIGPIPE


def positive(number: type, most: float = math.inf, or_0: bool = False) -> Any:
    """What argparse makes of a text: a number above 0, or 0 if that is allowed, and at most `most`."""

    def convert(text: str) -> Any:
        value = number(text)
        if value == math.inf or not (0 < value <= most or (or_0 and value == 0)):
            need = f"1 to {most}" if most < math.inf else "at least 0" if or_0 else "more than 0"
            if value == math.inf:  # JSON has none
                need = "a finite number"
            raise argparse.ArgumentTypeError(f"got {text}, needs {need}")
        return value

    convert.__name__ = number.__name__  # argparse puts it in "invalid int value"
    return convert


head_dim = positive(int, MAX_HEAD_DIM)  # D, numbers per head


def new_file(text: str) -> Path:
    """A file to be written later. Refused now, and not after all the work."""
    path = Path(text)
    folder = path.absolute().parent
    if os.path.isdir(path):  # that of Path, until Python 3.13, raises an error of a name that is too long
        raise argparse.ArgumentTypeError(f"got {path}, a folder, needs the name of a file")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {folder}")
    try:
        path.stat()
    except FileNotFoundError:
        return path
    except OSError as error:  # the name is too long
        raise argparse.ArgumentTypeError(f"cannot write to {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {path}")
    return path


def new_plot(text: str) -> Path:
    """A new file of a kind that matplotlib writes, which it knows by the suffix."""
    path = new_file(text)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"got {text}, needs a name that ends in .png, .pdf or .svg")
    return path


def add_options(parser: argparse.ArgumentParser, repeat: int, budget: float | None = None) -> None:
    """The options of every command; --budget where it has a default."""
    parser.add_argument(
        "--repeat", type=positive(int), default=repeat, help=f"samples; medians count ({repeat})"
    )
    if budget is not None:
        parser.add_argument(
            "--budget",
            type=positive(float),
            default=budget,
            help=f"seconds after which three samples are enough ({budget:g})",
        )
    cpus = os.cpu_count() or 1
    parser.add_argument("--threads", type=positive(int, cpus), help="CPU threads (torch's choice)")
    parser.add_argument(
        "--json", type=new_file, metavar="PATH", help="write all that was measured, and the machine"
    )


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if tqdm is object:
        parser.error("needs tqdm: pip install -e '.[bench]'")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def run(main: Callable[[], int]) -> int:
    """The exit status of a command. One that is stopped, or read no further, has no traceback."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:
        # Python flushes what is left once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READ_NO_FURTHER


class Progress(tqdm):
    """A bar over steps that become known on the way."""

    def __init__(self) -> None:
        every = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a log needs no more
        super().__init__(total=0, unit="step", mininterval=every, leave=False, dynamic_ncols=True)

    def expect(self, steps: int) -> None:
        self.total += steps
        self.refresh()

    def step(self, text: str) -> None:
        self.set_description_str(text, refresh=False)
        self.update()

    def sample(self, tasks: dict[str, Task], repeat: int, budget: float, what: str) -> dict[str, list[float]]:
        """Seconds of every task, taken in turns."""
        self.expect(repeat * len(tasks))
        return measure.interleave(tasks, repeat, budget, lambda name: self.step(f"{what}: timing {name}"))

    def first_calls(
        self,
        ways: dict[str, Callable[[], Task]],
        mistake: Callable[[str, Any], str | None],
        what: str,
    ) -> tuple[dict[str, Task], dict[str, str]]:
        """The tasks that can be timed, and of the other ways why not.

        mistake: given a way and its result, what is wrong with it, in words.
        """
        tasks: dict[str, Task] = {}
        notes: dict[str, str] = {}
        for way, build in ways.items():
            self.expect(1)
            self.step(f"{what}: {way}, first call")
            try:
                task = build()
                note = mistake(way, task.run())
            except Exception as error:  # whatever a way dies of
                note = why(error)
            if note:
                notes[way] = note
            else:
                tasks[way] = task
        return tasks, notes


def why(error: Exception) -> str:
    """The line of an exception that tells most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    while len(lines) > 1 and lines[0].endswith(("raised:", ":")):
        lines.pop(0)
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return text if len(text) <= 200 else text[:197] + "..."


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, allow_nan=False, default=str) + "\n")


def finite(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON has no infinity; the error of a row with NaN is one."""
    return {name: None if value == math.inf else value for name, value in items}

"""The `txl` command line: prepare, train, eval, generate, convert, info."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from txl_kernels import BackendUnavailable, __version__, registry
from txl_model import convert
from txl_model.cli import evaluate, generate, info, train
from txl_model.cli.options import let_go, to_stderr
from txl_model.data import prepare

Command = tuple[
    str, str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int | None]
]

_COMMANDS: list[Command] = [
    (
        "prepare",
        "make a corpus of a text or of a published archive",
        prepare.add_prepare_arguments,
        prepare.run_prepare,
    ),
    ("train", "train a model on a corpus, or go on training it", train.add_arguments, train.run),
    ("eval", "perplexity or bits per character at some memory lengths", evaluate.add_arguments, evaluate.run),
    ("generate", "continue a prompt", generate.add_arguments, generate.run),
    (
        "convert",
        "make a model of a published checkpoint",
        convert.add_convert_arguments,
        convert.run_convert,
    ),
    ("info", "what a preset, a model, a corpus or this machine is", info.add_arguments, info.run),
]

# What takes less memory, by command.
_SMALLER = {
    "train": "a smaller --batch-size, --tgt-len or --mem-len, or a larger --batch-chunk",
    "eval": "a smaller --batch-size, --tgt-len or --mem-len",
    "generate": "a smaller --mem-len, or fewer prompts at once",
}

# Errors of which the message is enough; of the last one, some.
_EXPLAINED = (
    ValueError,
    ArithmeticError,
    OSError,
    ModuleNotFoundError,
    BackendUnavailable,
    MemoryError,
    RuntimeError,
)

# Exit codes; argparse's own, for a command line it does not understand, is 2.
ERROR, INTERRUPTED = 1, 128 + signal.SIGINT
# What a shell says of cat or git where head has read enough: quiet, but 0 would claim that all was done.
UNREAD = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line. Returns the exit code: 0, 1 after an error that was explained, 130 after Ctrl-C,
    141 where whoever read the output has gone.
    """
    args = _parser().parse_args(argv)
    try:
        backend = getattr(args, "backend", None)
        if backend in registry.NAMES and backend != registry.REFERENCE:
            registry.load(backend)  # or says why not, before anything is written
        code = args.run(args) or 0
        print(end="", flush=True)  # Python would do it, too late for an error to be explained
        return code
    except KeyboardInterrupt:
        to_stderr("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output (head, less) has gone; `train` goes on without them
        let_go(sys.stdout)
        return UNREAD
    except _EXPLAINED as error:
        message = _message(error, args.command)
        if message is None or os.environ.get("TXL_DEBUG"):
            raise
        to_stderr(f"error: {message}")
        try:
            print(end="", flush=True)
        except OSError:  # the error was of the output itself: its disk is full
            let_go(sys.stdout)
        return ERROR


def _message(error: Exception, command: str) -> str | None:
    """What to say of an error; None for one of ours, which wants its traceback."""
    # torch has a type for the memory of GPUs only; bad_alloc is what our kernels throw.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and re.search("DefaultCPUAllocator|bad_alloc", str(error))
    ):
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
        message = "out of memory" + (f" (tried to allocate {asked[1]})" if asked else "")
        return f"{message}: less is needed with {_SMALLER[command]}" if command in _SMALLER else message
    if isinstance(error, RuntimeError) and not isinstance(error, BackendUnavailable):
        return None
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="txl",
        description="Transformer-XL: make a corpus of a text, train, evaluate with a long memory, generate.",
        epilog="TXL_DEBUG=1 shows where an error was raised.",
    )
    parser.add_argument("--version", action="version", version=f"txl-kernels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, summary, add_arguments, run in _COMMANDS:
        command = commands.add_parser(name, help=summary, description=summary)
        add_arguments(command)
        command.set_defaults(run=run, command=name)
    return parser

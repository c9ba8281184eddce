"""Train a small Transformer-XL on the source code of Python's own standard library, read as bytes, and say
how well it predicts files it has not seen: while it learns, then with memories of several lengths.

    pip install -e '.[train]'
    python examples/train_bytes.py                  # about two minutes on 2 cores
    python examples/train_bytes.py --keep runs/me   # keeps the corpus and the run: txl generate runs/me/run

It is three commands of `txl` in a row, which it prints: docs/model.md has more of them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from txl_model import __main__ as txl


def demonstrate(folder: Path, steps: int) -> int:
    """Prepares, trains and evaluates in `folder`; the exit code of the command that failed, or 0."""
    corpus, run = folder / "corpus", folder / "run"
    library, quarter = sysconfig.get_path("stdlib"), max(1, steps // 4)
    training = ("--preset", "tiny", "--max-step", steps, "--eval-interval", quarter)
    tested = ("--split", "test", "--mem-len", "0,64,128,256,512", "--batch-size", 8)
    for command in (
        ("prepare", "text", library, corpus, "--glob", "[a-z]*.py"),
        ("train", corpus, run, *training, "--eval-max-tokens", 50_000),
        ("eval", run, corpus, *tested, "--max-tokens", 65_536),
    ):
        words = [str(word) for word in command]
        print("\ntxl", shlex.join(words), flush=True)
        if status := txl.main(words):  # unlike cli.main it says what is to be installed
            return status
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1400, help="steps of training (default: 1400)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder to leave everything in")
    args = parser.parse_args(argv)
    if args.keep is not None:
        return demonstrate(args.keep, args.steps)
    with tempfile.TemporaryDirectory() as folder:
        return demonstrate(Path(folder), args.steps)


if __name__ == "__main__":
    sys.exit(main())

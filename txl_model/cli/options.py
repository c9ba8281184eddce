"""Options that several commands have, and options made from the fields of a configuration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TextIO

import torch

from txl_kernels import registry
from txl_model.data import Corpus, Vocabulary
from txl_model.data.corpus import VOCABULARY


def add_fields(
    parser: argparse.ArgumentParser,
    config: type,
    title: str,
    defaults: Mapping[str, str] = {},
    skip: tuple[str, ...] = (),
) -> None:
    """An option for every field of a dataclass; one that was not given leaves nothing in the namespace.

    defaults: in words, where it is not the field's.
    """
    group = parser.add_argument_group(title)
    for f in fields(config):
        if f.name not in skip:
            _add_field(group, f, defaults.get(f.name))


def _add_field(group: Any, f: Field[Any], default: str | None) -> None:
    option: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f.metadata["help"].replace("%", "%%")}
    kind = str(f.type)
    if kind == "bool":
        option["action"] = argparse.BooleanOptionalAction
    elif kind.startswith("tuple"):
        option |= {"type": numbers(bool) if "bool" in kind else numbers(int), "metavar": "A,B,..."}
    else:
        option |= {"type": {"int": int, "float": float}.get(kind.split(" ")[0], str), "metavar": "X"}
        if f.metadata.get("choices"):
            option |= {"choices": f.metadata["choices"], "metavar": None}
    if default is None and f.default not in (MISSING, None, ()):
        default = str(f.default)
    if default is not None:
        option["help"] += f" (default: {default})"
    group.add_argument("--" + f.name.replace("_", "-"), **option)


def numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """A parser of "500,1000": numbers, or for bool 0 and 1."""

    def parse(text: str) -> tuple[Any, ...]:
        values = tuple(int(part) for part in text.split(",") if part.strip())
        if kind is bool and not set(values) <= {0, 1}:
            raise ValueError
        return tuple(map(kind, values))

    parse.__name__ = "list of numbers"  # argparse names it in its error
    return parse


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The options of `add_fields` that were given."""
    return {f.name: getattr(args, f.name) for f in fields(config) if hasattr(args, f.name)}


def read_config(path: Path | None) -> dict[str, Any]:
    """A YAML or JSON file: {"preset": name, "model": {...}, "train": {...}}, all of them optional. Or a run's
    own config.json, which has its corpus and its changes too: they do not count."""
    if path is None:
        return {}
    import yaml  # reads JSON too

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from error
    if isinstance(content, dict) and {"model", "train"} <= set(content):
        content = {name: value for name, value in content.items() if name not in ("corpus", "changes")}
    if not isinstance(content, dict) or set(content) - {"preset", "model", "train"}:
        raise ValueError(f'{path} must hold "preset", "model" and "train", or some of them, and nothing else')
    for part in ("model", "train"):
        if not isinstance(content.get(part, {}), dict):
            raise ValueError(f"{path}: {part} must be fields and their values, got {content[part]!r}")
    if not isinstance(content.get("preset"), str | None):
        raise ValueError(f"{path}: preset must be the name of one, got {content['preset']!r}")
    return content


def chosen_device(args: argparse.Namespace) -> torch.device:
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch says why: no such device, no CUDA in this build
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error


def loss_in_words(event: dict[str, Any]) -> str:
    """Of a line of the log."""
    return f"{event['bpc']:.4f} bpc" if "bpc" in event else f"ppl {event['ppl']:.2f}"


def to_stderr(message: str) -> None:
    """A remark that is not part of a command's result; nothing ends because nobody reads it."""
    if sys.stderr is None:  # the shell has closed it (2>&-), and print would take standard output
        return
    try:
        print(f"txl: {message}", file=sys.stderr)
    except OSError:
        let_go(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Send to nowhere what is written to a stream that fails, and what is left in its buffer: Python, when it
    ends, would try to write that once more.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1; not given: a GPU where there is one")
    parser.add_argument("--backend", choices=registry.NAMES, help="kernels of attention; not given: the best")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def check_writable(*paths: Path | None) -> None:
    """Say before the work that its result could not be saved."""
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
        if path.exists():  # perhaps in a folder to which nothing can be added, such as /dev
            if not os.access(path, os.W_OK):
                raise PermissionError(f"cannot write {path}: permission denied")
        elif not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise FileNotFoundError(f"cannot write {path}: {folder} is no folder one can write to")


def check_plot(png: Path | None) -> None:
    """Say before the work that it could not be drawn: without matplotlib, or to a file of that kind."""
    if png is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    check_writable(png)
    kinds = FigureCanvasBase.get_supported_filetypes()
    if png.suffix and png.suffix[1:].lower() not in kinds:  # without one it is a PNG
        raise ValueError(f"--plot {png}: nothing draws {png.suffix}; name a file that ends in .png or .svg")


def vocabulary_of(model: Path) -> Path | None:
    """The vocabulary saved beside a model: in its folder, or in the run's that it is part of."""
    folder = model.absolute()
    return next((p / VOCABULARY for p in (folder, *folder.parents[:2]) if (p / VOCABULARY).exists()), None)


def check_vocabulary(model: Path, corpus: Corpus) -> None:
    path = vocabulary_of(model)
    if path is not None and Vocabulary.load(path).symbols != corpus.vocabulary.symbols:
        raise ValueError(
            f"{corpus.folder} numbers its symbols otherwise than the text {model} was trained on"
        )

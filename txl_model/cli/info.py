"""`txl info`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from txl_kernels import _report
from txl_model.checkpoint import Checkpoints, best_model, load_model, read_json, run_config
from txl_model.cli.options import loss_in_words, to_stderr
from txl_model.config import TransformerXLConfig
from txl_model.data import Corpus
from txl_model.data.corpus import DESCRIPTION
from txl_model.log import figures
from txl_model.model import TransformerXL
from txl_model.presets import PRESETS, preset
from txl_model.state import PROGRESS, Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", help="a preset, a run, a model or a corpus; nothing: this machine")


def run(args: argparse.Namespace) -> None:
    if args.what is None:
        print(_report.render(_report.collect()))
        print("presets")
        for name in PRESETS:
            print(f"  {name:15} {shape(TransformerXLConfig.preset(name))}")
        return
    path = Path(args.what)
    saved = run_config(path)
    progress: list[str] = []
    if args.what in PRESETS and not path.exists():
        model = _without_weights(TransformerXLConfig.preset(args.what))
        parts = {
            "model": model.config.to_dict(),
            "train": preset(args.what, "train"),
            "eval": preset(args.what, "eval"),
        }
    elif (path / DESCRIPTION).exists():
        corpus = Corpus.open(path)
        corpus.verify()
        print(corpus.summary())
        return
    elif saved is not None:
        model = _without_weights(TransformerXLConfig.from_dict(saved["model"]))
        progress = _progress(path, saved)
        parts = {name: part for name, part in saved.items() if name != "corpus"}
    else:
        model = load_model(path)
        parts = {"model": model.config.to_dict()}
    print(f"{args.what}: {sum(p.numel() for p in model.parameters()):,} parameters, {shape(model.config)}")
    for line in progress:
        print(f"  {line}")
    print(json.dumps(parts, indent=2))


def _without_weights(config: TransformerXLConfig) -> TransformerXL:
    with torch.device("meta"):
        return TransformerXL(config)


def _progress(folder: Path, saved: dict[str, Any]) -> list[str]:
    """How far a training run has come, and what it takes on the disk. Raises ValueError for damaged files."""
    checkpoints = Checkpoints(folder / "checkpoints")
    newest = checkpoints.newest(to_stderr)
    max_step = saved["train"]["max_step"]
    lines = [f"trained on   {saved['corpus']['name']}"]
    if newest is None:
        lines.append(f"step         no checkpoint yet, of {max_step:,} steps")
    else:
        done = Progress.from_dict(read_json(newest / PROGRESS))
        lines.append(f"step         {done.step:,} of {max_step:,}, {done.tokens:,} tokens")
        lines.append(f"checkpoints  {', '.join(path.name for path in checkpoints.all())}")
    best = best_model(folder)
    if best is not None:
        step, loss = best
        words = loss_in_words(figures(loss, saved["corpus"].get("unit", "word")))
        lines.append(f"best         valid {words} at step {step:,}")
        if newest is not None and loss != done.best_loss:  # until the run goes on
            ahead = step > done.step
            lines[-1] += ", after the newest checkpoint" if ahead else ", of steps that were given up"
    sizes = {path.name: _size(path) for path in sorted(folder.glob("[!.]*"))}
    each = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in sizes.items())
    lines.append(f"on disk      {sum(sizes.values()) / 1e6:,.1f} MB: {each}")
    return lines


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())


def shape(config: TransformerXLConfig) -> str:
    """A model in a few words."""
    return (
        f"{config.n_layer} layers of {config.d_model}, {config.n_head} heads of {config.d_head}, "
        f"segments of {config.tgt_len}, memory of {config.mem_len}, {config.vocab_size:,} symbols"
    )

"""`txl info`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from txl_kernels import _report
from txl_model.checkpoint import load_model
from txl_model.config import TransformerXLConfig
from txl_model.data import Corpus
from txl_model.data.corpus import DESCRIPTION
from txl_model.model import TransformerXL
from txl_model.presets import PRESETS, preset


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
    if args.what in PRESETS and not path.exists():
        config = TransformerXLConfig.preset(args.what)
        with torch.device("meta"):
            model = TransformerXL(config)
        parts = {
            "model": config.to_dict(),
            "train": preset(args.what, "train"),
            "eval": preset(args.what, "eval"),
        }
    elif (path / DESCRIPTION).exists():
        print(Corpus.open(path).summary())
        return
    else:
        model = load_model(path)
        parts = {"model": model.config.to_dict()}
    print(f"{args.what}: {sum(p.numel() for p in model.parameters()):,} parameters, {shape(model.config)}")
    print(json.dumps(parts, indent=2))


def shape(config: TransformerXLConfig) -> str:
    """A model in a few words."""
    return (
        f"{config.n_layer} layers of {config.d_model}, {config.n_head} heads of {config.d_head}, "
        f"segments of {config.tgt_len}, memory of {config.mem_len}, {config.vocab_size:,} symbols"
    )

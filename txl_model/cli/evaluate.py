"""`txl eval`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from txl_model.checkpoint import CONFIG, load_model, model_folder, read_json
from txl_model.cli.options import (
    add_machine_arguments,
    check_plot,
    check_vocabulary,
    check_writable,
    chosen_device,
    numbers,
    to_stderr,
)
from txl_model.config import TransformerXLConfig
from txl_model.data import Corpus
from txl_model.evaluate import Evaluation, as_many_keys, evaluate, evaluate_lengths
from txl_model.presets import PRESETS, preset
from txl_model.train_config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a run, a checkpoint or a converted model")
    add("corpus", type=Path, help="folder that `txl prepare` made")
    add("--split", default="valid", help="train, valid or test (default: valid)")
    add("--preset", choices=list(PRESETS), help="read as the published numbers of this preset were")
    add(
        "--mem-len",
        type=numbers(int),
        metavar="N[,N...]",
        help="tokens remembered (default: with a segment as many keys as in training: its tgt_len + mem_len, "
        "less --tgt-len); several: one evaluation each",
    )
    add(
        "--tgt-len",
        type=int,
        metavar="N",
        help="tokens of a segment (default: as many as training scored in one; without memory, as it read)",
    )
    add("--clamp-len", type=int, metavar="N", help="distances beyond share a position embedding; -1: none do")
    add("--same-length", action=argparse.BooleanOptionalAction, help="every token sees mem_len keys")
    add(
        "--stride",
        type=int,
        metavar="N",
        help="without memory: score the last N tokens of each window of tgt_len (default, where training had "
        "no memory and read tokens again: as many as it scored)",
    )
    add(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="rows of the text read side by side (default: 1)",
    )
    add(
        "--warm-up",
        type=int,
        metavar="N",
        help="tokens read before each row, not scored (default: 0; with several --mem-len, the longest)",
    )
    add("--max-tokens", type=int, metavar="N", help="score no more than the first N")
    add("--bf16", action="store_true", help="compute in bfloat16 where that is safe (autocast)")
    add("--json", type=Path, metavar="FILE", help="save the results")
    add("--plot", type=Path, metavar="PNG", help="draw them against the memory length")
    add_machine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    check_writable(args.json)
    check_plot(args.plot)
    device = chosen_device(args)
    corpus = Corpus.open(args.corpus)
    model = load_model(args.model, args.backend, to_stderr).to(device)
    check_vocabulary(args.model, corpus)
    tokens = corpus.tokens(args.split)
    mem_lens, reading = _reading(args, model.config)
    n_token = len(mem_lens) * min(len(tokens) - 1, args.max_tokens or len(tokens))
    results = []
    with tqdm(total=n_token, unit="token", unit_scale=True, disable=args.quiet or None) as bar:
        if len(mem_lens) > 1:
            del reading["stride"]
            runs = evaluate_lengths(model, tokens, mem_lens, progress=bar.update, **reading)
        else:
            reading |= {"mem_len": mem_lens[0], "warm_up": args.warm_up or 0}
            runs = (evaluate(model, tokens, progress=bar.update, **reading) for _ in range(1))
        word = corpus.unit == "word"
        _print(" mem_len       tokens     loss       " + ("ppl" if word else "bpc") + "   tokens/s")
        for result in runs:
            results.append(result)
            figure = result.ppl if word else result.bpc
            speed = result.tokens / result.seconds
            mem_len = result.settings["mem_len"]
            _print(f"{mem_len:8d} {result.tokens:12,d} {result.loss:8.4f} {figure:9.4f} {speed:10,.0f}")
    if args.json:
        about = {"model": str(args.model), "corpus": corpus.identity, "split": args.split}
        save(results, about, args.json)
    if args.plot:
        plot_lengths(results, corpus.unit, args.plot)


def _reading(
    args: argparse.Namespace, config: TransformerXLConfig
) -> tuple[tuple[int, ...] | tuple[None], dict[str, Any]]:
    """What was asked for, and the rest as in training: the memory lengths to evaluate with, and the other
    arguments of `evaluate`."""
    scored, ext_len = _segment_lengths(args.model, config)
    stride = args.stride
    if not (config.mem_len or args.preset or args.tgt_len or args.mem_len or args.warm_up) and ext_len:
        stride = scored if stride is None else stride
    with_memory = config.mem_len > 0 and stride is None
    reading: dict[str, Any] = {"tgt_len": scored if with_memory else scored + ext_len}
    reading |= preset(args.preset, "eval") if args.preset else {}
    for name in ("tgt_len", "clamp_len", "same_length"):
        if getattr(args, name) is not None:
            reading[name] = getattr(args, name)
    mem_len = reading.pop("mem_len", None)
    mem_lens = args.mem_len or (mem_len,)
    if len(mem_lens) > 1 and stride is not None:
        raise ValueError("--stride reads without memory: give it one --mem-len, or none")
    if mem_lens == (None,) and with_memory:
        mem_lens = (as_many_keys(config, reading["tgt_len"], scored + ext_len),)
        if mem_lens == (0,):
            to_stderr(
                f"without memory: a segment of {reading['tgt_len']} tokens has as many keys as there were in "
                "training; --mem-len gives it memory"
            )
    reading |= {
        "stride": stride,
        "warm_up": args.warm_up,
        "batch_size": args.batch_size,
        "max_tokens": args.max_tokens,
        "dtype": torch.bfloat16 if args.bf16 else None,
    }
    return mem_lens, reading


def _segment_lengths(path: Path, config: TransformerXLConfig) -> tuple[int, int]:
    """`TrainConfig.segment_lengths` of a model's training; of one that was converted, its tgt_len."""
    training = read_json(model_folder(path, lambda message: None) / CONFIG).get("train")
    if not training:
        return config.tgt_len, 0
    lengths = {name: training[name] for name in ("tgt_len", "ext_len", "half_loss") if name in training}
    return TrainConfig.from_dict(lengths).segment_lengths(config)


def _print(line: str) -> None:
    """To standard output, past the progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def save(results: Sequence[Evaluation], about: dict[str, Any], file: Path) -> None:
    """Write evaluations as JSON."""
    evaluations = [
        {
            **r.settings,
            "loss": r.loss,
            "ppl": r.ppl,
            "bpc": r.bpc,
            "tokens": r.tokens,
            "seconds": r.seconds,
        }
        for r in results
    ]
    file.write_text(json.dumps({**about, "evaluations": evaluations}, indent=2) + "\n")


def plot_lengths(results: Sequence[Evaluation], unit: str, png: Path) -> None:
    """Draw evaluations against their memory length: bits per character, or perplexity of words."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    points = sorted((r.settings["mem_len"], r.ppl if unit == "word" else r.bpc) for r in results)
    axes.plot(*zip(*points, strict=True), "o-")
    axes.set_xscale("symlog", linthresh=32)
    axes.set_xticks([x for x, _ in points], [str(x) for x, _ in points], minor=False)
    axes.set_xlabel("memory at evaluation (tokens)")
    axes.set_ylabel("perplexity" if unit == "word" else "bits per character")
    axes.grid(alpha=0.3)
    figure.savefig(png, dpi=150)

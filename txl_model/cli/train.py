"""`txl train`."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from txl_model.checkpoint import Checkpoints, model_folder, run_config
from txl_model.cli.info import shape
from txl_model.cli.options import (
    add_fields,
    add_machine_arguments,
    check_plot,
    chosen_device,
    given,
    let_go,
    loss_in_words,
    read_config,
    to_stderr,
)
from txl_model.config import TransformerXLConfig
from txl_model.data import Corpus
from txl_model.log import plot_log
from txl_model.presets import PRESETS, preset
from txl_model.train import train
from txl_model.train_config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("corpus", type=Path, help="folder that `txl prepare` made")
    parser.add_argument("out", type=Path, help="folder of the run: configuration, log, checkpoints")
    parser.add_argument("--preset", choices=list(PRESETS), help="configuration to start from")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML or JSON with preset, model, train; or a run's config.json",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run's last checkpoint; begin if it has none"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the loss curve when done")
    add_machine_arguments(parser)
    add_fields(
        parser,
        TransformerXLConfig,
        "model (overrides --config, which overrides --preset)",
        {"vocab_size": "the corpus's", "cutoffs": "the corpus's"},
    )
    add_fields(parser, TrainConfig, "training (likewise)", skip=("tgt_len",))


def _configs(args: argparse.Namespace, corpus: Corpus) -> tuple[TransformerXLConfig, TrainConfig]:
    """Preset, configuration file, options: the later one wins.

    A run that goes on starts from what it was; where a preset is named, from that, so that one command begins
    a run and goes on with it.
    """
    model: dict[str, Any] = {}
    training: dict[str, Any] = {}
    content = read_config(args.config)
    chosen = {**content.get("model", {}), **given(args, TransformerXLConfig)}
    name = args.preset or content.get("preset")
    if name:
        model, training = preset(name, "model"), preset(name, "train")
        del model["vocab_size"]  # the corpus has its own
        without = {"cutoffs": (), "tie_projs": (), "div_val": 1}
        size = chosen.get("vocab_size", corpus.vocab_size)
        if corpus.unit != "word":  # word-level presets have clusters for words
            model |= without
        elif "cutoffs" in chosen:
            cutoffs = chosen["cutoffs"]
            if isinstance(cutoffs, (list, tuple)) and len(cutoffs) != len(model.get("cutoffs", ())):
                model.pop("tie_projs", None)  # which are for as many clusters as the preset has
        elif isinstance(size, int) and max(model.get("cutoffs", ()), default=0) >= size:
            model |= without
            if _is_first():
                to_stderr(
                    f"{name} cuts a vocabulary of more than the {size:,} words there are: no adaptive "
                    "softmax (--cutoffs, --div-val and --tie-projs make one)"
                )
    elif args.resume and (saved := run_config(args.out)):
        model, training = saved["model"], saved["train"]
    if "cutoffs" not in model and corpus.cutoffs:
        model |= {"cutoffs": corpus.cutoffs}
    model = {"vocab_size": corpus.vocab_size, **model}
    model |= chosen
    training = {**training, **content.get("train", {}), **given(args, TrainConfig)}
    model_config, train_config = TransformerXLConfig.from_dict(model), TrainConfig.from_dict(training)
    if model_config.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"vocab_size {model_config.vocab_size} is less than the {corpus.vocab_size} of {corpus.name}"
        )
    return model_config, train_config


def _is_first() -> bool:
    """Of the processes that torchrun started."""
    return int(os.environ.get("RANK", 0)) == 0


def run(args: argparse.Namespace) -> int | None:
    corpus = Corpus.open(args.corpus)
    model_config, train_config = _configs(args, corpus)
    first = _is_first()
    if first:
        check_plot(args.plot)
        text = len(corpus.tokens("train"))
        _say(f"{corpus.name}: {text:,} {corpus.unit}s to train on; {shape(model_config)}")
    device = args.device and chosen_device(args)
    try:
        result = train(
            model_config,
            train_config,
            corpus,
            args.out,
            resume=args.resume,
            on_event=_report,
            progress=not args.quiet,
            backend=args.backend,
            device=device,
        )
    except KeyboardInterrupt:  # the second one: it does not wait for the step and its checkpoint
        if first:
            kept = Checkpoints(args.out / "checkpoints").all()
            to_stderr(f"interrupted; {_way_on(args, kept[-1] if kept else None)}")
        return 128 + signal.SIGINT
    if not first:
        return None
    if result.signal:
        to_stderr(f"stopped at step {result.step}; {_way_on(args, result.checkpoint)}")
    log = args.out / "log.jsonl"
    if args.plot and (log.stat().st_size or not result.signal):  # stopped early, it has nothing to draw yet
        plot_log(log, args.plot)
    if result.signal:
        return 128 + result.signal
    _say(f"step {result.step:,}: done; the model is {model_folder(args.out, to_stderr)}")
    return None


def _way_on(args: argparse.Namespace, checkpoint: Path | None) -> str:
    """Where a run that was stopped is kept, and the command that goes on with it."""
    if checkpoint is None:
        return "no checkpoint was saved yet"
    command = shlex.join(["txl", "train", str(args.corpus), str(args.out), "--resume"])
    return f"the last checkpoint is {checkpoint}, and this goes on from there: {command}"


def _report(event: dict[str, Any]) -> None:
    """A line for people of an event of training; the bar shows what happens between the evaluations."""
    kind, step = event["event"], event["step"]
    if kind == "eval":
        line = f"valid {loss_in_words(event)}" + (", the best so far" if event["best"] else "")
    elif kind == "train" and not sys.stderr.isatty():
        line = f"train {loss_in_words(event)}, {event['tokens_per_second']:,.0f} tokens/s"
        line += f", {tqdm.format_interval(event['seconds_left'])} left"
    elif kind == "resume":
        line = f"goes on from {event['path']}"
    elif kind == "note":
        line = event["message"]
    else:
        return
    _say(f"step {step:,}: {line}")


def _say(line: str) -> None:
    """A line on standard output, past the bar. Training does not end because nobody takes it any more."""
    if sys.stdout is None:  # the shell has closed it (>&-)
        return
    try:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
    except OSError as error:  # head has seen enough, tee was ended by the same Ctrl-C, a disk is full
        let_go(sys.stdout)
        to_stderr(
            f"standard output takes no more lines ({error.strerror}): training goes on without them; "
            "the run's log.jsonl has the losses"
        )

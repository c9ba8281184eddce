"""What bench_model.py and bench_eval.py share: the model's sizes, figures and targets, table, JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any

import cli
from cli import Progress, finite, positive
from machine import describe

from txl_model import TransformerXLConfig

# The published model the targets are meant for: 12 layers, d 512, 8 heads of 64, d_inner 2048, 204 symbols.
PRESET = "enwik8-base"
SIZES = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "vocab_size")

# What is rounding and no mistake: the largest difference of log-probabilities; the norm of a gradient's
# difference over the gradient's, where a hidden unit that rounding switches on or off adds its part.
TOLERANCE = {"log-probabilities": 1e-4, "gradients": 1e-2}


@dataclass
class Figure:
    """Ours and a rival side by side, and how many times as much the rival takes. `reason`: why not."""

    name: str
    unit: str  # of ours and rival
    target: float | None = None  # the ratio to reach; None: there is none at these sizes
    ours: float | None = None
    rival: float | None = None
    rival_is: str = ""
    errors: dict[str, float] = field(default_factory=dict)  # of the two sides, as in TOLERANCE
    reason: str | None = None
    remark: str = ""
    samples: dict[str, list[float]] | None = None  # seconds

    def fill(self, samples: dict[str, list[float]]) -> None:
        """Medians of samples in seconds, as milliseconds. The target is for the first rival."""
        medians = {name: median(taken) * 1e3 for name, taken in samples.items()}
        self.samples, self.ours = samples, medians.pop("ours")
        if medians:
            self.rival_is, *others = medians
            self.rival = medians[self.rival_is]
            beside = [f"{name} {medians[name]:,.4g} ms: {medians[name] / self.ours:.4g}x" for name in others]
            self.remark = "; ".join(filter(None, (*beside, self.remark)))

    @property
    def wrong(self) -> bool:
        return wrong(self.errors) is not None

    @property
    def ratio(self) -> float | None:
        """Refused where the two sides do not compute the same."""
        return None if self.wrong or not self.ours or self.rival is None else self.rival / self.ours

    @property
    def verdict(self) -> str:
        if self.wrong:
            return f"WRONG: {wrong(self.errors)}"
        if self.reason is not None or self.ratio is None:
            return self.reason or "no figure"
        if self.target is None:
            return "no target at these sizes"
        return "pass" if self.ratio >= self.target else "MISSED"

    @property
    def failed(self) -> bool:
        return self.verdict.startswith(("WRONG", "MISSED"))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        errors = finite(list(self.errors.items()))
        return asdict(self) | {"errors": errors, "ratio": self.ratio, "verdict": self.verdict}


def wrong(errors: dict[str, float]) -> str | None:
    """What is more than rounding, in words, or None."""
    return next(
        (
            f"{name} differ by {error:.1e}, allowed is {TOLERANCE[name]:.0e}"
            for name, error in errors.items()
            if not error <= TOLERANCE[name]
        ),
        None,
    )


def table(figures: list[Figure], titles: tuple[str, str]) -> str:
    """Figures as lines to read; `titles` are those of ours and of the rival."""
    heads = ("", *titles, "ratio", "target", "")
    rows = [heads]
    for f in figures:
        ratio = "" if f.ratio is None else f"{f.ratio:,.4g}x"
        target = "" if f.target is None else f"{f.target:,g}x"
        notes = "; ".join(filter(None, ("" if f.ratio is None else f.rival_is, f.remark)))
        verdict = f"{f.verdict} ({notes})" if notes else f.verdict
        rows.append((f.name, _value(f.ours, f.unit), _value(f.rival, f.unit), ratio, target, verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells, verdict in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:-1], strict=True)]
        lines.append("  ".join((name.ljust(widths[0]), *padded, verdict)).rstrip())
    return "\n".join(lines)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f} {unit}"


# ---- Command line --------------------------------------------------------------------------------


def parser(description: str) -> argparse.ArgumentParser:
    """With the options both benchmarks have."""
    it = argparse.ArgumentParser(description=description)
    whole = positive(int)
    kinds = {"d_head": cli.head_dim}
    defaults = TransformerXLConfig.preset(PRESET)
    help_of = {f.name: f.metadata["help"] for f in fields(TransformerXLConfig)}
    for name in SIZES:
        default = getattr(defaults, name)
        it.add_argument(
            f"--{name.replace('_', '-')}",
            type=kinds.get(name, whole),
            default=default,
            help=f"{help_of[name]} ({default})",
        )
    it.add_argument(
        "--shorten", type=whole, default=1, metavar="N", help="divide all lengths by N, for a trial (1)"
    )
    cli.add_options(it, repeat=15, budget=24.0)
    return it


def parse(it: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = cli.parse(it, argv)
    try:
        config(args)
    except ValueError as error:
        it.error(str(error))
    args.argv = sys.argv[1:] if argv is None else argv  # as it was given, for the JSON
    return args


def config(args: argparse.Namespace, **overrides: Any) -> TransformerXLConfig:
    """The published model, in the sizes of the command line."""
    return TransformerXLConfig.preset(PRESET, **{name: getattr(args, name) for name in SIZES}, **overrides)


def published_sizes(args: argparse.Namespace) -> bool:
    """Whether these are the sizes that the targets are meant for."""
    defaults = TransformerXLConfig.preset(PRESET)
    return args.shorten == 1 and all(getattr(args, name) == getattr(defaults, name) for name in SIZES)


def report(
    args: argparse.Namespace, measured: Callable[[Progress], list[Figure]], titles: tuple[str, str]
) -> int:
    """Print machine and figures, write the JSON. The exit status: 1 if a figure is wrong or missed."""
    about = describe("cpu")
    level = about["backends"].get("cpu", {}).get("level", "not built")
    sizes = ", ".join(f"{name} {getattr(args, name)}" for name in SIZES)
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, cpu kernels: {level}")
    print(f"{sizes}, batch 1, float32", flush=True)
    progress = Progress()
    try:
        figures = measured(progress)
    finally:
        progress.close()
    print("\n" + table(figures, titles))
    content = {"machine": about, "arguments": vars(args), "figures": [f.to_dict() for f in figures]}
    cli.write_json(args.json, content)
    return 1 if any(figure.failed for figure in figures) else 0

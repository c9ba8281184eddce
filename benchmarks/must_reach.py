"""The figures the CPU backend has to reach, each measured here and now and compared with its target.

    python benchmarks/must_reach.py
    python benchmarks/must_reach.py --rows forward decode --repeat 31

Every figure is a ratio of medians, taken in turns within one run, so that neither the machine nor its mood
matters: over torch's own product 2048^3 in the same dtype, a copy, another way, or ours on another problem.
Exit status 1 if a figure that could be measured is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import measure
import torch
from bench_attn import ERROR_BOUND, Truth, describe, extra_memory, why
from measure import DECODE, FORWARD, SHAPES, TRAIN, Problem, Task
from rivals import RIVALS, Way, ours

HEADLINE = SHAPES["headline"]
BACKEND = ours("cpu")
PEERS = {way.name: way for way in RIVALS}


PATIENCE = 20.0  # seconds after which a peer has been sampled enough


class Skipped(Exception):
    """The figure says nothing on this machine; the message says why."""


@dataclass(frozen=True)
class Figure:
    """A figure and its target. `of`: what it is a ratio of, or its unit."""

    name: str
    target: float
    of: str
    value: Callable[[int], float]  # measures, with so many samples
    at_least: bool = True

    def passes(self, value: float) -> bool:
        return value >= self.target if self.at_least else value <= self.target


def checked(way: Way, problem: Problem, which: str) -> Task:
    """The task of one way, after a look at its numbers: one head against the float64 reference."""
    sets = measure.input_sets(problem, which)
    task = measure.attention_task(way.build(problem)[0], problem, which, sets)
    error = Truth(problem, which, sets[0], heads=[problem.heads - 1]).error(task.run())
    if not error <= ERROR_BOUND[problem.dtype]:
        raise ArithmeticError(f"{way.name} is WRONG on {which} {problem}: relative error {error:.1e}")
    return task


def medians(tasks: dict[str, Task], repeat: int) -> dict[str, float]:
    samples = measure.interleave(tasks, repeat, PATIENCE)
    return {name: measure.median(taken) for name, taken in samples.items()}


def gemm_fraction(problem: Problem, which: str) -> Callable[[int], float]:
    """Useful operations per second over those of the machine's own matrix product."""

    def value(repeat: int) -> float:
        took = medians({"gemm": measure.gemm_task(problem), "ours": checked(BACKEND, problem, which)}, repeat)
        return problem.flops(which) / took["ours"] / (measure.gemm_flops() / took["gemm"])

    return value


def copy_fraction(problem: Problem) -> Callable[[int], float]:
    """Bytes of k, v and r per second over the bytes per second that a copy reads and writes."""

    def value(repeat: int) -> float:
        copy, copied = measure.copy_task(problem.device)
        took = medians({"copy": copy, "ours": checked(BACKEND, problem, DECODE)}, repeat)
        return problem.cache_bytes() / took["ours"] / (copied / took["copy"])

    return value


def time_ratio(over: Problem, under: Problem, which: str = FORWARD) -> Callable[[int], float]:
    """Our time for one problem over our time for another."""

    def value(repeat: int) -> float:
        if "bfloat16" in (over.dtype, under.dtype) and cpu_level() != "avx512_bf16":
            raise Skipped(f"vector level {cpu_level()}: no AVX512_BF16")
        took = medians(
            {"over": checked(BACKEND, over, which), "under": checked(BACKEND, under, which)}, repeat
        )
        return took["over"] / took["under"]

    return value


def speedup(which: str, *names: str) -> Callable[[int], float]:
    """Time of the fastest of these peers over ours. One that cannot run does not compete."""

    def value(repeat: int) -> float:
        torch._dynamo.reset()
        tasks, reasons = {"ours": checked(BACKEND, HEADLINE, which)}, []
        for name in names:
            try:
                tasks[name] = checked(PEERS[name], HEADLINE, which)
            except Exception as error:
                reasons.append(f"{name}: {why(error)}")
        if len(tasks) == 1:
            raise Skipped("; ".join(reasons))
        took = medians(tasks, repeat)
        return min(seconds for name, seconds in took.items() if name != "ours") / took["ours"]

    return value


def megabytes(problem: Problem) -> Callable[[int], float]:
    """Peak memory of forward + backward beyond inputs and gradients."""

    def value(repeat: int) -> float:
        taken = extra_memory(BACKEND, problem, [TRAIN])
        if not taken:
            raise RuntimeError("the process that measures it came to grief: bench_attn.py shows why")
        return taken[TRAIN] / 1e6

    return value


def cpu_level() -> str:
    return describe("cpu")["backends"].get("cpu", {}).get("level", "unknown")


def in_bfloat16(problem: Problem) -> Problem:
    return replace(problem, dtype="bfloat16")


GEMM = "gemm rate"
FIGURES = (
    Figure("forward 1900 x 3800", 0.93, GEMM, gemm_fraction(HEADLINE, FORWARD)),
    Figure("forward 512 x 3800", 0.85, GEMM, gemm_fraction(SHAPES["segment"], FORWARD)),
    Figure("forward 128 x 3800", 0.65, GEMM, gemm_fraction(SHAPES["evaluation"], FORWARD)),
    Figure("forward 80 x 2180", 0.60, GEMM, gemm_fraction(SHAPES["short-evaluation"], FORWARD)),
    Figure("forward 150 x 300, B 4, H 10, D 41", 0.40, GEMM, gemm_fraction(SHAPES["wt103-base"], FORWARD)),
    Figure("train 1900 x 3800", 0.80, GEMM, gemm_fraction(HEADLINE, TRAIN)),
    Figure("train 512 x 1024", 0.70, GEMM, gemm_fraction(SHAPES["training"], TRAIN)),
    Figure("clamp 1000", 0.85, "time without", time_ratio(SHAPES["clamped"], HEADLINE), at_least=False),
    Figure("bfloat16 1900 x 3800", 1.5, "float32 speed", time_ratio(HEADLINE, in_bfloat16(HEADLINE))),
    Figure(
        "bfloat16 512 x 3800",
        1.5,
        "float32 speed",
        time_ratio(SHAPES["segment"], in_bfloat16(SHAPES["segment"])),
    ),
    Figure(
        "bfloat16 train 1900 x 3800",
        1.5,
        "float32 speed",
        time_ratio(HEADLINE, in_bfloat16(HEADLINE), TRAIN),
    ),
    Figure("decode 1 x 3800", 0.90, "copy rate", copy_fraction(SHAPES["decode"])),
    Figure("memory, train 1900 x 3800", 40, "MB", megabytes(HEADLINE), at_least=False),
    Figure("forward over flex-compiled", 2.5, "its speed", speedup(FORWARD, "flex-compiled")),
    Figure("forward over sdpa-bias", 4, "its speed", speedup(FORWARD, "sdpa-bias")),
    Figure("forward over shift", 8, "its speed", speedup(FORWARD, "shift")),
    Figure("forward over published", 8, "its speed", speedup(FORWARD, "published")),
    Figure(
        "train over the best peer",
        6,
        "its speed",
        speedup(TRAIN, "shift", "shift-compiled", "sdpa-bias", "flex-compiled"),
    ),
)


def run(figure: Figure, repeat: int) -> dict[str, Any]:
    """A figure as a line of the report: `verdict` is pass, MISSED, skipped or FAILED, `note` its reason."""
    line = {"name": figure.name, "target": figure.target, "at_least": figure.at_least, "of": figure.of}
    try:
        value = figure.value(repeat)
    except Skipped as reason:
        return line | {"measured": None, "verdict": "skipped", "note": str(reason)}
    except Exception as error:
        return line | {"measured": None, "verdict": "FAILED", "note": why(error)}
    return line | {"measured": value, "verdict": "pass" if figure.passes(value) else "MISSED", "note": ""}


def text(line: dict[str, Any]) -> str:
    target = f"{'>=' if line['at_least'] else '<='} {line['target']:g}"
    measured = "" if line["measured"] is None else f"{line['measured']:.3g}"
    verdict = f"{line['verdict']} {line['note']}".rstrip()
    return f"{line['name']:<36} {target:>8} {measured:>9}  {line['of']:<14} {verdict}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measure the figures the CPU backend has to reach and compare them with their targets."
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="only figures whose name begins with one of these"
    )
    parser.add_argument("--repeat", type=int, default=15, help="samples per figure; medians count (15)")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's choice)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures and the machine")
    parser.add_argument("--list", action="store_true", help="print the names and targets, measure nothing")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error(f"--repeat: got {args.repeat}, needs at least 1")
    figures = [f for f in FIGURES if args.rows is None or f.name.startswith(tuple(args.rows))]
    if not figures:
        parser.error(f"--rows: none of {', '.join(f.name for f in FIGURES)} begins so")
    if args.list:
        for figure in figures:
            print(f"{figure.name:<36} {'>=' if figure.at_least else '<='} {figure.target:g} {figure.of}")
        return 0

    if args.threads:
        torch.set_num_threads(args.threads)
    about = describe("cpu")
    print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, level {cpu_level()}")
    lines = []
    for figure in figures:
        lines.append(run(figure, args.repeat))
        print(text(lines[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": about, "figures": lines}, indent=1) + "\n")
    return 1 if any(line["verdict"] in ("MISSED", "FAILED") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())

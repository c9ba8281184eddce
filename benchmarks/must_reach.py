"""The figures our backends have to reach, each measured here and now and compared with its target.

    python benchmarks/must_reach.py
    python benchmarks/must_reach.py --rows forward decode --repeat 31
    python benchmarks/must_reach.py --device cuda       # those of the backends for GPUs, meant for an H200

Every figure on a CPU is a ratio of medians, taken in turns within one run, so that neither the machine nor
its mood matters: over torch's own product 2048^3 in the same dtype, a copy, another way, or ours on another
problem. On a GPU some are rates.
Exit status 1 if a figure could not be measured where it should be (FAILED), else 10 if one is MISSED.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import cli
import measure
import torch
from cli import why
from machine import describe, tiles
from measure import Task
from problem import DECODE, FORWARD, GPU_DECODE, GPU_HEADLINE, SHAPES, TRAIN, Problem, Truth
from rivals import RIVALS, Way, by_warpgroups, extra_memory, floor_kernel, ours

from txl_kernels import cuda

HEADLINE = SHAPES["headline"]
BACKEND, GPU_BACKEND, CUDA_BACKEND = ours("cpu"), ours("triton"), ours("cuda")
PEERS = {way.name: way for way in (*RIVALS, CUDA_BACKEND)}
FLOOR = "sdpa-no-position"
GPU_TARGETS = {"flex-compiled": 2.5, "shift-compiled": 8}  # speed over theirs
GPU_PEERS = (FLOOR, *GPU_TARGETS)

PATIENCE = 20.0  # seconds after which a peer has been sampled enough
MISSED = 10  # exit status if figures are missed, and nothing else is the matter


class Skipped(Exception):
    """The figure says nothing on this machine; the message says why."""


class Noted(float):
    """A figure, and a remark on it."""

    note: str

    def __new__(cls, value: float, note: str) -> Noted:
        figure = super().__new__(cls, value)
        figure.note = note
        return figure


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


def our_way(problem: Problem) -> Way:
    return GPU_BACKEND if problem.on_gpu else BACKEND


def checked(way: Way, problem: Problem, which: str) -> Task:
    """The task of one way, after a look at its numbers: one head against the float64 reference."""
    sets = measure.input_sets(problem, which)
    task = measure.timed_task(way.build(problem)[0], problem, which, sets)
    error = Truth(problem, which, sets[0], heads=[problem.heads - 1]).error(task.run(), way.position)
    if mistake := error.mistake(problem.dtype, way.ours):
        raise ArithmeticError(f"{way.name} is WRONG on {which} {problem}: {mistake}")
    return task


def medians(tasks: dict[str, Task], repeat: int) -> dict[str, float]:
    samples = measure.interleave(tasks, repeat, PATIENCE)
    return {name: median(taken) for name, taken in samples.items()}


def gemm_fraction(problem: Problem, which: str) -> Callable[[int], float]:
    """Useful operations per second over those of the machine's own matrix product."""

    def value(repeat: int) -> float:
        tasks = {"gemm": measure.gemm_task(problem), "ours": checked(our_way(problem), problem, which)}
        took = medians(tasks, repeat)
        return problem.flops(which) / took["ours"] / (measure.gemm_flops(problem.device) / took["gemm"])

    return value


def copy_fraction(problem: Problem, way: Way | None = None) -> Callable[[int], float]:
    """Bytes of k, v and r per second over the bytes per second that a copy reads and writes."""

    def value(repeat: int) -> float:
        copy, copied = measure.copy_task(problem.device)
        took = medians({"copy": copy, "ours": checked(way or our_way(problem), problem, DECODE)}, repeat)
        return problem.cache_bytes() / took["ours"] / (copied / took["copy"])

    return value


def time_ratio(over: Problem, under: Problem, which: str = FORWARD) -> Callable[[int], float]:
    """Our time for one problem over our time for another."""

    def value(repeat: int) -> float:
        if "bfloat16" in (over.dtype, under.dtype) and "bf16" not in cpu_level():
            raise Skipped(f"vector level {cpu_level()}: no products of bfloat16")
        took = medians(
            {"over": checked(BACKEND, over, which), "under": checked(BACKEND, under, which)}, repeat
        )
        return took["over"] / took["under"]

    return value


def speedup(which: str, *names: str) -> Callable[[int], float]:
    """Time of the fastest of these peers over ours. One that cannot run does not compete, and is named."""

    def value(repeat: int) -> float:
        took, reasons = race(HEADLINE, which, names, repeat)
        note = "; ".join(reasons.values())
        if len(took) == 1:
            raise Skipped(note)
        return Noted(min(seconds for name, seconds in took.items() if name != "ours") / took["ours"], note)

    return value


def race(
    problem: Problem, which: str, names: tuple[str, ...], repeat: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Times of ours and of these peers, taken in turns; and why those that are missing are."""
    torch._dynamo.reset()
    tasks, reasons = {"ours": checked(our_way(problem), problem, which)}, {}
    for name in names:
        try:
            tasks[name] = checked(PEERS[name], problem, which)
        except Exception as error:
            reasons[name] = f"{name}: {why(error)}"
            measure.check_gpu(reasons[name])
    return medians(tasks, repeat), reasons


gpu_race = functools.cache(race)  # one for all figures of a problem: it compiles for a while


def gpu_speedup(problem: Problem, which: str, name: str, of: str = "ours") -> Callable[[int], float]:
    """Time of a peer over ours, Triton's, or that of another way `of`."""

    def value(repeat: int) -> float:
        took, reasons = gpu_race(problem, which, (*GPU_PEERS, CUDA_BACKEND.name), repeat)
        for needed in (name, of):
            if needed not in took:
                raise Skipped(reasons[needed])
        return took[name] / took[of]

    return value


def over_flash(problem: Problem, which: str, of: str = "ours") -> Callable[[int], float]:
    """Our time over that of flash attention, which has no position term."""

    def value(repeat: int) -> float:
        if (kernel := floor_kernel(problem)).name != "FLASH_ATTENTION":
            raise Skipped(f"the floor is {kernel.name} here")
        return 1 / gpu_speedup(problem, which, FLOOR, of)(repeat)

    return value


def teraflops(way: Way, problem: Problem, which: str) -> Callable[[int], float]:
    """Useful operations per second, in 10^12: those of visible pairs, all products."""

    def value(repeat: int) -> float:
        took = medians({"ours": checked(way, problem, which)}, repeat)
        return problem.flops(which) / took["ours"] / 1e12

    return value


def teraflops_by_warpgroups(problem: Problem) -> Callable[[int], float]:
    def value(repeat: int) -> float:
        if not cuda.has_warpgroups(torch.device("cuda")):
            raise Skipped("wgmma needs sm_90, and a library built for it")
        return teraflops(by_warpgroups(True), problem, FORWARD)(repeat)

    return value


def over_backend(way: Way, other: Way, problem: Problem, which: str) -> Callable[[int], float]:
    """Time of another of our backends over that of one."""

    def value(repeat: int) -> float:
        took = medians({w.name: checked(w, problem, which) for w in (way, other)}, repeat)
        return took[other.name] / took[way.name]

    return value


def memory_growth(longer: Problem, shorter: Problem) -> Callable[[int], float]:
    """Memory of a longer training step over that of a shorter one, each by its L + K: 1 if it is linear."""

    def per_row(problem: Problem, repeat: int) -> float:
        return megabytes(problem)(repeat) / (problem.qlen + problem.klen)

    return lambda repeat: per_row(longer, repeat) / per_row(shorter, repeat)


def megabytes(problem: Problem) -> Callable[[int], float]:
    """Peak memory of forward + backward beyond inputs and gradients."""

    def value(repeat: int) -> float:
        return extra_memory(our_way(problem), problem, [TRAIN])[TRAIN] / 1e6

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
        speedup(TRAIN, "shift", "shift-compiled", "sdpa-bias", "sdpa-bias-compiled", "flex-compiled"),
    ),
)

LONG = replace(GPU_HEADLINE[64], batch=1, qlen=32768, klen=65536)
FLASH = "time of flash"
# The slowest late: rivals are compiled for a while. Long inputs last: tiles are measured at the first call.
GPU_FIGURES = (
    *(
        Figure(f"decode, B 64, D {d_head}", 0.75, "copy rate", copy_fraction(problem))
        for d_head, problem in GPU_DECODE.items()
    ),
    *(
        Figure(f"CUDA C++ {name}, D {d_head}", target, "TFLOP/s", teraflops(way, problem, which))
        for d_head, problem in GPU_HEADLINE.items()
        for name, way, which, target in (
            ("forward by mma.sync", by_warpgroups(False), FORWARD, 300),
            ("train rate", CUDA_BACKEND, TRAIN, 250),
        )
    ),
    *(
        Figure(f"CUDA C++ forward by wgmma, D {d_head}", 450, "TFLOP/s", teraflops_by_warpgroups(problem))
        for d_head, problem in GPU_HEADLINE.items()
    ),
    *(
        Figure(f"CUDA C++ decode, B {batch}, D {d_head}", 0.8, "copy rate", copy_fraction(one, CUDA_BACKEND))
        for d_head, problem in GPU_DECODE.items()
        for batch in (1, 64)
        for one in [replace(problem, batch=batch)]
    ),
    *(
        Figure(
            f"CUDA C++ decode over Triton, B 1, D {d_head}",
            1.2,
            "its speed",
            over_backend(CUDA_BACKEND, GPU_BACKEND, replace(problem, batch=1), DECODE),
        )
        for d_head, problem in GPU_DECODE.items()
    ),
    *(
        figure
        for d_head, problem in GPU_HEADLINE.items()
        for name, which, at_most in (("forward", FORWARD, 2.0), ("train", TRAIN, 2.2))
        for prefix, of in (("", "ours"), ("CUDA C++ ", CUDA_BACKEND.name))
        for figure in (
            Figure(
                f"{prefix}{name}, D {d_head}", at_most, FLASH, over_flash(problem, which, of), at_least=False
            ),
            *(
                Figure(
                    f"{prefix}{name} over {peer}, D {d_head}",
                    target,
                    "its speed",
                    gpu_speedup(problem, which, peer, of),
                )
                for peer, target in GPU_TARGETS.items()
            ),
        )
    ),
    Figure(
        "memory per row, train 32768 x 65536",
        1.1,
        "2048 x 4096's",
        memory_growth(LONG, replace(LONG, qlen=2048, klen=4096)),
        at_least=False,
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
    verdict = "pass" if figure.passes(value) else "MISSED"
    return line | {"measured": value, "verdict": verdict, "note": getattr(value, "note", "")}


def text(line: dict[str, Any]) -> str:
    target = f"{'>=' if line['at_least'] else '<='} {line['target']:g}"
    measured = "" if line["measured"] is None else f"{line['measured']:.3g}"
    verdict = f"{line['verdict']} {line['note']}".rstrip()
    return f"{line['name']:<36} {target:>8} {measured:>9}  {line['of']:<14} {verdict}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Measure the figures our backends have to reach and compare them with their targets."
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu: the CPU backend's figures; cuda: those of the backends for GPUs (cpu)",
    )
    parser.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="only figures whose name begins with one of these"
    )
    parser.add_argument("--list", action="store_true", help="print the names and targets, measure nothing")
    cli.add_options(parser, repeat=15)
    args = cli.parse(parser, argv)
    of_device = FIGURES if args.device == "cpu" else GPU_FIGURES
    figures = [f for f in of_device if args.rows is None or f.name.startswith(tuple(args.rows))]
    if not figures:
        parser.error(f"--rows: none of {', '.join(f.name for f in of_device)} begins so")
    if args.list:
        for figure in figures:
            print(f"{figure.name:<36} {'>=' if figure.at_least else '<='} {figure.target:g} {figure.of}")
        return 0

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: got cuda, but torch {torch.__version__} sees no CUDA device")
    about = describe(args.device)
    if args.device == "cpu":
        print(f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, level {cpu_level()}")
    else:
        print(f"{about['gpu']}, torch {about['torch']}, Triton {about['triton']}, commit {about['commit']}")
    lines = []
    for figure in figures:
        lines.append(run(figure, args.repeat))
        print(text(lines[-1]), flush=True)
        machine = about | ({"tiles": tiles()} if args.device == "cuda" else {})
        cli.write_json(args.json, {"machine": machine, "figures": lines})  # now: what comes may be stopped
        measure.check_gpu(figure.name)
    verdicts = {line["verdict"] for line in lines}
    return 1 if "FAILED" in verdicts else MISSED if "MISSED" in verdicts else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))

"""Relative attention by every way there is: time, share of the machine's own rate, memory, what ours gains.

    python benchmarks/bench_attn.py --klen 3800
    python benchmarks/bench_attn.py --device cuda

Each way is checked against the float64 reference before it is timed; a wrong one is named so and gets no
speed-up. A way that cannot run is a row that says why. Columns are explained in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import median
from typing import Any

import cli
import measure
import torch
from cli import Progress, positive, why
from machine import describe, tiles
from measure import Task
from problem import BACKWARD, DECODE, DTYPES, FORWARD, GPU_HEADLINE, TRAIN, Problem, Truth
from rivals import GPU_RIVALS, LABELS, RIVALS, Attend, Way, extra_memory, ours
from torch import Tensor

from txl_kernels import backends

# What a problem is unless the command line says otherwise.
DEFAULTS = {"cpu": Problem(), "cuda": GPU_HEADLINE[64]}

PASSES = {"forward": (FORWARD,), "backward": (BACKWARD,), "both": (FORWARD, TRAIN), "decode": (DECODE,)}

SHOWN_KERNELS = 8  # of a GPU, per way; the JSON has all of them


@dataclass
class Row:
    """One way on one problem and pass. `reason` says why there are no figures."""

    way: str
    ours: bool
    reason: str | None = None
    error: float | None = None  # the largest of a head
    row_error: float | None = None
    wrong: bool = False
    seconds: float | None = None  # median
    samples: list[float] | None = None
    gflops: float | None = None
    gemm_fraction: float | None = None
    gbytes: float | None = None  # per second; decode only
    copy_fraction: float | None = None
    extra_bytes: int | None = None
    speedup: float | None = None  # of ours over this way
    kernel: str | None = None  # of PyTorch's, where it has several
    gpu_kernels: dict[str, float] | None = None  # seconds of each; of ours


@dataclass
class Result:
    """All rows of one problem and pass, and the machine's own rate in the same rounds."""

    problem: Problem
    which: str
    rate: float  # FLOP/s of the machine's own product; for decode, bytes/s of a copy
    checked_heads: list[int]
    rows: list[Row]


# ---- Can it run ----------------------------------------------------------------------------------


def too_much(needs: int, device: str) -> str | None:
    """Why not even to ask for so many bytes, or None."""
    free = measure.free_memory(device)
    if needs <= 0.9 * free:
        return None
    return f"about {needs / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"


def refusal(
    way: Way, problem: Problem, which: str, gemm_rate: float, memory_rate: float, patience: float
) -> str | None:
    """Why not even to try, or None. The time is what the machine's product and memory take at least."""
    needs = way.needs(problem, which)
    if reason := too_much(needs, problem.device):
        return f"does not fit: needs {reason}"
    seconds = way.work(problem, which) / gemm_rate + needs / memory_rate
    if seconds > patience:
        return f"skipped: about {seconds:.0f} s a call, allowed is --budget {patience:g} s"
    return None


# ---- One problem ---------------------------------------------------------------------------------


class Bench:
    """Measures problems, one after another, with one progress bar over all of it."""

    def __init__(self, ways: list[Way], repeat: int, budget: float, memory: bool):
        self.ways, self.repeat, self.budget, self.memory = ways, repeat, budget, memory
        self.bar = Progress()
        self._built: dict[str, Attend] = {}

    def run(
        self, problem: Problem, passes: Iterable[str], save: Callable[[list[Result]], None]
    ) -> list[Result]:
        """save(results so far) after every pass: what comes may be stopped."""
        self._built.clear()
        torch._dynamo.reset()  # or the compiler makes sizes variable when it meets a second problem
        results: list[Result] = []
        for which in passes:
            results.append(self._one_pass(problem, which))
            save(results)
        if self.memory:
            self._measure_memory(results)
        if problem.on_gpu:
            self._measure_kernels(results)
        return results

    def _one_pass(self, problem: Problem, which: str) -> Result:
        sets = measure.input_sets(problem, which)
        truth = Truth(problem, which, sets[0])
        yardstick, per_call = measure.gemm_task(problem), measure.gemm_flops(problem.device)
        yardstick.run()
        gemm_rate = per_call / yardstick.seconds()
        memory_rate = measure.fresh_memory_rate(problem.device)
        if which == DECODE:
            yardstick, per_call = measure.copy_task(problem.device)

        rows = [Row(way.name, way.ours) for way in self.ways]
        tasks = {"the machine": yardstick}
        self.bar.expect(len(rows))
        for way, row in zip(self.ways, rows, strict=True):
            self.bar.step(f"{which}: checking {way.name}")
            row.reason = refusal(way, problem, which, gemm_rate, memory_rate, self.budget)
            if row.reason is None and (task := self._checked_task(way, row, truth, sets)):
                tasks[way.name] = task

        samples = self.bar.sample(tasks, self.repeat, self.budget, which)
        rate = per_call / median(samples.pop("the machine"))
        for way, row in zip(self.ways, rows, strict=True):
            if way.name in samples:
                _fill(row, way, problem, which, samples[way.name], rate)
        _compare(rows)
        return Result(problem, which, rate, truth.heads, rows)

    def _checked_task(self, way: Way, row: Row, truth: Truth, sets: list[tuple[Tensor, ...]]) -> Task | None:
        """Runs a way once. Its task if the numbers are right; if not, `row` says what is the matter."""
        try:
            truth.expected(way.position)
        except (MemoryError, RuntimeError) as failure:
            row.reason = f"not timed, for the float64 reference fails: {why(failure)}"
            measure.check_gpu(row.reason)
            return None
        try:
            if way.name not in self._built:
                self._built[way.name], _ = way.build(truth.problem)
            row.kernel = way.kernel(truth.problem)
            task = measure.timed_task(self._built[way.name], truth.problem, truth.which, sets)
            error = truth.error(task.run(), way.position)
        except Exception as failure:  # whatever a way dies of
            row.reason = why(failure)
            measure.check_gpu(f"{way.name}: {row.reason}")
            return None
        row.error, row.row_error = error.head, error.row
        if mistake := error.mistake(truth.problem.dtype, way.ours):
            row.wrong, row.reason = True, f"WRONG: {mistake}"
            return None
        return task

    def _measure_kernels(self, results: list[Result]) -> None:
        """Adds `gpu_kernels` to ours. After all timing: the profiler may leave launches slower."""
        for result in results:
            problem, which = result.problem, result.which
            rows = [row for row in result.rows if row.ours and row.seconds]
            sets = measure.input_sets(problem, which) if rows else []
            for row in rows:
                try:
                    task = measure.timed_task(self._built[row.way], problem, which, sets)
                    row.gpu_kernels = measure.gpu_kernels(task)
                except (AssertionError, RuntimeError) as error:  # it does not work everywhere
                    measure.check_gpu(f"{row.way}: {why(error)}")
                    self.bar.write(f"no times by kernel: {why(error)}", file=sys.stderr)

    def _measure_memory(self, results: list[Result]) -> None:
        """Adds `extra_bytes` to every row that was timed. One process per way covers its passes."""
        problem = results[0].problem
        timed = {
            way: {r.which: row for r in results for row in r.rows if row.way == way.name and row.seconds}
            for way in self.ways
        }
        timed = {way: rows for way, rows in timed.items() if rows}

        def measured(way: Way) -> tuple[Way, dict[str, int]]:
            try:
                return way, extra_memory(way, problem, list(timed[way]))
            except ChildProcessError:  # no figure, and the rest of the table goes on
                return way, {}

        # Two at a time where they fit: loading libraries and compiling, each by one thread, takes most of it.
        two = 2 * max((way.needs(problem, which) for way, rows in timed.items() for which in rows), default=0)
        alone = problem.on_gpu or too_much(two, problem.device)  # a GPU's is measured in this process
        self.bar.expect(len(timed))
        with ThreadPool(1 if alone else 2) as pool:
            for way, taken in pool.imap_unordered(measured, timed):
                self.bar.step(f"memory of {way.name}")
                for which, extra in taken.items():
                    timed[way][which].extra_bytes = extra


def _fill(row: Row, way: Way, problem: Problem, which: str, samples: list[float], rate: float) -> None:
    """Puts the figures of timed samples into a row."""
    row.samples, row.seconds = samples, median(samples)
    flops = problem.flops(which, way.position) / row.seconds
    row.gflops = flops / 1e9
    if which == DECODE:
        read = problem.cache_bytes(way.position) / row.seconds
        row.gbytes, row.copy_fraction = read / 1e9, read / rate
    else:
        row.gemm_fraction = flops / rate


def _compare(rows: list[Row]) -> None:
    """Adds the speed-ups of the fastest of our backends over the others; none if one of ours is wrong."""
    if any(row.ours and row.wrong for row in rows):
        return
    times = [row.seconds for row in rows if row.ours and row.seconds]
    for row in rows:
        if times and row.seconds and not row.ours:
            row.speedup = row.seconds / min(times)


# ---- Output --------------------------------------------------------------------------------------


def table(result: Result) -> str:
    """A result as lines to read. A way without figures has a note across the columns."""
    decode = result.which == DECODE
    unit, _ = _flops_unit(result.problem)
    rate_titles = ("GB/s", "of copy") if decode else (f"{unit}FLOP/s", "of gemm")
    names = [row.way + (" *" if row.ours else "") for row in result.rows]
    figures = [None if row.reason else _figures(row, result) for row in result.rows]
    titles = ("ms", *rate_titles, "extra MB", "error", "ours is")
    widths = [max(map(len, column)) for column in zip(titles, *filter(None, figures), strict=True)]
    name_width = max(map(len, names))

    def line(name: str, cells: Iterable[str]) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "  ".join((name.ljust(name_width), *padded)).rstrip()

    lines = [f"{result.which}: {result.problem}; {_machine_rate(result)}", line("", titles)]
    for row, name, cells in zip(result.rows, names, figures, strict=True):
        kernel = f"  by {row.kernel}" if row.kernel else ""
        lines.append(line(name, cells) + kernel if cells else f"{name:<{name_width}}  {row.reason}")
    for row in result.rows:
        if row.gpu_kernels:
            longest = list(row.gpu_kernels.items())[:SHOWN_KERNELS]
            parts = ", ".join(f"{name} {seconds * 1e3:.4f}" for name, seconds in longest)
            lines.append(f"{row.way}, ms by kernel: {parts}")
    return "\n".join(lines)


def _flops_unit(problem: Problem) -> tuple[str, float]:
    return ("T", 1e12) if problem.on_gpu else ("G", 1e9)


def _machine_rate(result: Result) -> str:
    if result.which == DECODE:
        graph = ", times in a CUDA graph" if result.problem.on_gpu else ""
        return f"copy {result.rate / 1e9:.1f} GB/s{graph}"
    unit, size = _flops_unit(result.problem)
    return f"gemm {measure.gemm_size(result.problem.device)}^3 {result.rate / size:.1f} {unit}FLOP/s"


def _figures(row: Row, result: Result) -> tuple[str, ...]:
    if result.which == DECODE:
        rate, fraction = row.gbytes, row.copy_fraction
    else:
        rate, fraction = row.gflops * 1e9 / _flops_unit(result.problem)[1], row.gemm_fraction
    digits = 0 if row.seconds >= 1 else 4 if result.problem.on_gpu else 2  # a GPU's may be microseconds
    return (
        f"{row.seconds * 1e3:.{digits}f}",
        f"{rate:.1f}",
        f"{fraction:.0%}",
        "?" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:.1f}",
        f"{row.error:.0e}",
        "" if row.speedup is None else f"{row.speedup:.2f}x faster",
    )


def write_json(args: argparse.Namespace, results: list[Result], about: dict[str, Any]) -> None:
    content = {
        "machine": about | ({} if args.device == "cpu" else {"tiles": tiles()}),
        "arguments": vars(args),
        "results": [asdict(result, dict_factory=cli.finite) for result in results],
    }
    cli.write_json(args.json, content)


def write_plot(path: Path, results: list[Result], about: dict[str, Any]) -> None:
    """Time, and below it memory where that was measured, against klen: a column of panels per pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    passes = list(dict.fromkeys(result.which for result in results))
    klens = sorted({result.problem.klen for result in results})
    figures = {"ms": lambda row: None if row.seconds is None else row.seconds * 1e3}
    if any(row.extra_bytes is not None for result in results for row in result.rows):
        # What is too little to measure stays on the scale.
        figures["extra MB"] = lambda row: None if row.extra_bytes is None else max(row.extra_bytes / 1e6, 0.1)
    size = (6.2 * len(passes), 4.2 * len(figures))
    canvas, panels = plt.subplots(len(figures), len(passes), figsize=size, squeeze=False, sharex=True)
    for row_of_panels, (unit, figure) in zip(panels, figures.items(), strict=True):
        for panel, which in zip(row_of_panels, passes, strict=True):
            _plot_panel(panel, [result for result in results if result.which == which], figure)
            panel.set(title=which, xlabel="klen", ylabel=unit)
            if panel.has_data():
                panel.set(xscale="log", yscale="log")
                panel.set_xticks(klens, [str(klen) for klen in klens])
                panel.set_xticks([], minor=True)
                panel.grid(True, which="both", alpha=0.25)
    problem = results[-1].problem
    sizes = f"B {problem.batch}, H {problem.heads}, D {problem.d_head}, {problem.dtype}"
    canvas.suptitle(f"{sizes}: {about['gpu'] or about['cpu']}, {about['threads']} threads")
    legend = {line.get_label(): line for panel in panels.flat for line in panel.get_lines()}
    columns = 2 * len(passes)
    below = 0.22 * -(-len(legend) // columns) + 0.1  # inches
    canvas.legend(legend.values(), legend.keys(), loc="lower center", ncols=columns, frameon=False)
    canvas.tight_layout(rect=(0, below / size[1], 1, 1))
    canvas.savefig(path, dpi=120)
    plt.close(canvas)


def _plot_panel(panel: Any, results: list[Result], figure: Callable[[Row], float | None]) -> None:
    """A line per way that has figures; the colour of a way is the same in every panel."""
    for index, row in enumerate(results[0].rows):
        values = {r.problem.klen: figure(same) for r in results for same in r.rows if same.way == row.way}
        shown = {klen: value for klen, value in values.items() if value is not None}
        if shown:
            label = f"rel_attention ({row.way})" if row.ours else LABELS[row.way]
            style = {"color": f"C{index}", "linewidth": 3 if row.ours else 1.3, "label": label}
            panel.plot(list(shown), list(shown.values()), "o-", **style)


# ---- Command line --------------------------------------------------------------------------------


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time relative attention by our backends and by every way PyTorch has, each checked.",
        epilog="Example: python benchmarks/bench_attn.py --sweep 475 950 1900 3800 --plot attention.png",
    )
    whole = positive(int)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--klen", type=whole, help=f"keys: memory and segment ({_default('klen')})")
    parser.add_argument("--qlen", type=whole, help="queries, at most klen (half of klen; decode: 1)")
    parser.add_argument("--batch", type=whole, help=f"({_default('batch')})")
    parser.add_argument("--heads", type=whole, help=f"({_default('heads')})")
    parser.add_argument("--d-head", type=cli.head_dim, help=f"numbers per head ({_default('d_head')})")
    parser.add_argument("--dtype", choices=DTYPES, help=f"({_default('dtype')})")
    parser.add_argument(
        "--clamp-len",
        type=positive(int, or_0=True),
        help="the last distance with a row of r to itself (none)",
    )
    parser.add_argument(
        "--pass",
        dest="which",
        choices=PASSES,
        default="both",
        help="both: forward without gradient, then forward + backward; decode: one query over inputs larger "
        "than the caches, against the rate of a copy (both)",
    )
    parser.add_argument(
        "--backends",
        nargs="*",
        metavar="NAME",
        help="of ours (every fused one that can run; on a GPU triton and cuda)",
    )
    names = [way.name for way in RIVALS]
    parser.add_argument(
        "--rivals",
        nargs="*",
        metavar="NAME",
        help=f"from {', '.join(names)} (all; on a GPU from {GPU_RIVALS[0].name} on)",
    )
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="leave out the memory measurement"
    )
    parser.add_argument(
        "--sweep",
        nargs="*",
        type=whole,
        metavar="KLEN",
        help="these klen in turn (klen/16 ... klen if none is given)",
    )
    parser.add_argument(
        "--plot",
        type=cli.new_plot,
        metavar="PATH",
        help="write time and memory against klen as a PNG, PDF or SVG, by the suffix",
    )
    cli.add_options(parser, repeat=7, budget=4.0)
    args = cli.parse(parser, argv)

    device, _, number = args.device.partition(":")
    if device not in DEFAULTS or (number and not number.isdecimal()):
        parser.error(f"--device: got {args.device}, needs cpu or cuda")
    if device == "cpu":
        args.device = "cpu"  # cpu:0 is the same, and there is no other
    elif not torch.cuda.is_available():
        parser.error(f"--device: got {args.device}, but torch {torch.__version__} sees no CUDA device")
    elif int(number or 0) >= torch.cuda.device_count():
        parser.error(f"--device: got {args.device}, but torch sees {torch.cuda.device_count()}")
    for name in ("klen", "batch", "heads", "d_head", "dtype"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(DEFAULTS[device], name))
    if args.rivals is None:
        args.rivals = [way.name for way in (RIVALS if device == "cpu" else GPU_RIVALS)]
    if unknown := [name for name in args.rivals if name not in names]:
        parser.error(f"--rivals: got {', '.join(unknown)}, needs names from {', '.join(names)}")
    if unknown := [name for name in args.backends or [] if name not in backends()]:
        parser.error(f"--backends: got {', '.join(unknown)}, needs names from {', '.join(backends())}")
    if device == "cpu" and args.dtype == "float16":
        parser.error("--dtype: float16 needs --device cuda: no backend has it on a CPU")
    if not args.rivals and args.backends == []:
        parser.error("--backends, --rivals: got no name, needs at least one")
    if args.which == "decode" and args.qlen not in (None, 1):
        parser.error(f"--qlen: got {args.qlen}, needs 1: --pass decode is of one query")
    if args.qlen is not None and args.qlen > args.klen and not args.sweep:
        parser.error(f"--qlen: got {args.qlen}, needs at most klen, {args.klen}")
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            parser.error(f"--plot: {error}; pip install -e '.[bench]'")
    for problem in problems(args):
        for which in PASSES[args.which]:
            if reason := too_much(measure.input_bytes(problem, which), problem.device):
                what = "the inputs and their gradients" if which in (BACKWARD, TRAIN) else "the inputs"
                parser.error(f"{problem}: {what} do not fit: they need {reason}")
    return args


def _default(name: str) -> str:
    values = [getattr(problem, name) for problem in DEFAULTS.values()]
    return str(values[0]) if len(set(values)) == 1 else "{}; on a GPU {}".format(*values)


def problems(args: argparse.Namespace) -> list[Problem]:
    klens = (
        [args.klen] if args.sweep is None else args.sweep or [max(1, args.klen >> n) for n in (4, 3, 2, 1, 0)]
    )
    klens = sorted(set(klens))
    default = (lambda klen: 1) if args.which == "decode" else (lambda klen: max(1, klen // 2))
    return [
        Problem(
            qlen=min(args.qlen or default(klen), klen),
            klen=klen,
            batch=args.batch,
            heads=args.heads,
            d_head=args.d_head,
            dtype=args.dtype,
            clamp_len=args.clamp_len,
            device=args.device,
        )
        for klen in klens
    ]


def our_ways(names: list[str] | None, device: str) -> list[Way]:
    """The named backends; by default the fused ones that can run, or all for their reasons if none can. On a
    GPU both that are made for it, in any case."""
    if names is None and device != "cpu":
        names = ["triton", "cuda"]
    if names is None:
        fused = [info for name, info in backends().items() if name != "reference"]
        names = [info.name for info in fused if info.available] or [info.name for info in fused]
    return [ours(name) for name in dict.fromkeys(names)]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.device != "cpu":
        torch.cuda.set_device(torch.device(args.device).index or 0)
    about = describe(args.device)
    print(
        f"{about['gpu'] or about['cpu']}, {about['threads']} threads, torch {about['torch']}, "
        f"commit {about['commit']}"
    )

    if cut := [str(problem.klen) for problem in problems(args) if problem.qlen < (args.qlen or 0)]:
        print(f"--qlen {args.qlen} is more than klen {', '.join(cut)}: there it is cut to as many as keys")

    wanted = [way for way in RIVALS if way.name in args.rivals]
    bench = Bench(our_ways(args.backends, args.device) + wanted, args.repeat, args.budget, args.memory)
    results: list[Result] = []
    measured: list[Result] = []  # not shown yet, of one problem

    def save(so_far: Iterable[Result] = ()) -> None:
        measured[:] = so_far
        write_json(args, [*results, *measured], about)

    def show() -> None:
        bench.bar.clear()
        while measured:
            print("\n" + table(measured.pop(0)), flush=True)

    try:
        for problem in problems(args):
            results += bench.run(problem, PASSES[args.which], save)
            show()
    except KeyboardInterrupt:
        show()
        bench.bar.close()
        return cli.STOPPED
    bench.bar.close()
    if args.device != "cpu":
        print("\n" + "\n".join(["Tiles chosen by measuring:", *(tiles() or ["none"])]))
    print(
        "\n* ours. Errors are against the float64 reference. sdpa-no-position does less: a floor, no rival."
    )

    save()
    if args.plot:
        write_plot(args.plot, results, about)
    return 1 if any(row.wrong for result in results for row in result.rows) else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))

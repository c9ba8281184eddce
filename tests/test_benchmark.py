"""The benchmark at sizes where nothing takes time: it measures, checks, refuses and explains."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import runpy
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from helpers import EMULATED, ROOT, why_not

pytest.importorskip("tqdm", reason="the benchmarks need it: pip install -e '.[bench]'")
sys.path.insert(0, str(ROOT / "benchmarks"))


import bench_attn
import bench_chunks
import bench_huggingface
import bench_layers
import cli
import measure
import must_reach
import rivals
from problem import BACKWARD, DECODE, FORWARD, TRAIN, Error, Problem, Truth
from rivals import Way
from torch.nn.attention import SDPBackend

from txl_kernels import cuda, rel_attention
from txl_kernels.reference import reference, visible_keys

# Timed on every machine: the fused backend where it is built, else the reference in its place.
OURS = "reference" if why_not("cpu") else "cpu"
EAGER = [way.name for way in rivals.RIVALS if not way.compiled]
TINY = ["--klen", "40", "--qlen", "12", "--heads", "2", "--d-head", "8", "--repeat", "2", "--no-memory"]


@pytest.fixture(autouse=True)
def small_yardsticks(monkeypatch):
    monkeypatch.setattr(measure, "GEMM_SIZE", 32)
    monkeypatch.setattr(measure, "SHORTEST_SAMPLE", 0.0)
    monkeypatch.setattr(measure, "beyond_caches", lambda device: 2**16)


def bench(capsys, *arguments: str, ways=EAGER, backends=(OURS,)) -> tuple[int, str]:
    """Exit status and what was printed."""
    if "decode" in arguments:
        arguments += ("--qlen", "1")
    status = bench_attn.main([*TINY, "--backends", *backends, "--rivals", *ways, *arguments])
    return status, capsys.readouterr().out


def line_of(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(name))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("clamp", [[], ["--clamp-len", "7"]], ids=["", "clamp"])
@pytest.mark.parametrize("which", ["both", "backward", "decode"])
def test_every_eager_way_is_right(capsys, which, clamp, dtype):
    status, out = bench(capsys, "--pass", which, "--dtype", dtype, *clamp)
    assert status == 0 and "WRONG" not in out, out
    for name in EAGER:
        assert "x faster" in line_of(out, name), out


def test_square_and_batch(capsys):
    status, out = bench(capsys, "--qlen", "40", "--batch", "2", "--d-head", "41")
    assert status == 0 and "WRONG" not in out, out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_ways(capsys):
    status, out = bench(capsys, ways=[way.name for way in rivals.RIVALS if way.compiled])
    assert status == 0, out
    forward, training = out.split("forward+backward:")
    for name in ("shift-compiled", "sdpa-bias-compiled", "flex-compiled"):
        assert "x faster" in line_of(forward, name)
    for name in ("shift-compiled", "sdpa-bias-compiled"):
        assert "x faster" in line_of(training, name)
    assert "does not support backward on CPU" in line_of(training, "flex-compiled")


def test_json(capsys, tmp_path):
    path = tmp_path / "figures.json"
    status, _ = bench(capsys, "--sweep", "20", "40", "--pass", "forward", "--json", str(path), ways=["shift"])
    assert status == 0
    content = json.loads(path.read_text())
    assert {"cpu", "threads", "torch", "commit", "backends"} <= content["machine"].keys()
    assert content["arguments"]["sweep"] == [20, 40]
    assert [result["problem"]["klen"] for result in content["results"]] == [20, 40]
    for result in content["results"]:
        ours, shift = result["rows"]
        assert (ours["way"], shift["way"]) == (OURS, "shift")
        assert shift["speedup"] == pytest.approx(shift["seconds"] / ours["seconds"])
        assert len(shift["samples"]) == 2 and shift["error"] < 1e-6
        problem = Problem(**result["problem"])
        assert shift["gflops"] * shift["seconds"] * 1e9 == pytest.approx(problem.flops(FORWARD))


def test_what_was_stopped(capsys, monkeypatch, tmp_path):
    def stop(bench, problem, which):
        if which == TRAIN:
            raise KeyboardInterrupt
        return one_pass(bench, problem, which)

    one_pass = bench_attn.Bench._one_pass
    monkeypatch.setattr(bench_attn.Bench, "_one_pass", stop)
    path = tmp_path / "figures.json"
    status, out = bench(capsys, "--json", str(path), ways=["shift"])
    assert status == 130 and "x faster" in line_of(out, "shift") and "forward+backward" not in out
    (result,) = json.loads(path.read_text())["results"]
    assert result["which"] == FORWARD and len(result["rows"]) == 2


def test_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert list(rivals.LABELS) == [way.name for way in rivals.RIVALS]
    path = tmp_path / "plot.png"
    status, _ = bench(capsys, "--sweep", "20", "40", "--plot", str(path), ways=["shift"])
    assert status == 0
    assert path.read_bytes().startswith(b"\x89PNG")


# ---- Refusals ------------------------------------------------------------------------------------


def replace_shift(monkeypatch, attend, **options):
    """Puts another function in the place of a rival."""
    monkeypatch.setattr(bench_attn, "RIVALS", (Way("shift", lambda problem: (attend, []), **options),))


def right(*inputs):
    return rel_attention(*inputs, backend="reference")


def too_large(*inputs):
    return right(*inputs) * 1.001


def too_far(q, k, v, r, u, w):
    return right(q, k, v, r.roll(1, 1), u, w)


def not_a_number(*inputs):
    return right(*inputs) * float("nan")


def wrong_gradient(q, k, v, r, u, w):
    return right(q * 2 - q.detach(), k, v, r, u, w)


def no_gradient(q, k, v, r, u, w):
    return right(q, k, v, r.detach(), u, w)


@pytest.mark.parametrize("attend", [too_large, too_far, not_a_number])
@pytest.mark.parametrize("which", ["forward", "backward", "decode"])
def test_wrong_rival(capsys, monkeypatch, which, attend):
    replace_shift(monkeypatch, attend)
    status, out = bench(capsys, "--pass", which, ways=["shift"])
    assert status == 1
    assert "WRONG: relative error" in line_of(out, "shift") and "faster" not in out


def test_json_of_a_wrong_rival(capsys, monkeypatch, tmp_path):
    replace_shift(monkeypatch, not_a_number)
    path = tmp_path / "figures.json"
    bench(capsys, "--json", str(path), ways=["shift"])
    row = json.loads(path.read_text())["results"][0]["rows"][1]
    assert row["wrong"] and row["error"] is None and row["speedup"] is None


@pytest.mark.parametrize("attend", [wrong_gradient, no_gradient])
def test_wrong_gradient(capsys, monkeypatch, attend):
    replace_shift(monkeypatch, attend)
    status, out = bench(capsys, "--pass", "both", ways=["shift"])
    forward, training = out.split("forward+backward:")
    assert status == 1
    assert "faster" in line_of(forward, "shift") and "WRONG" in line_of(training, "shift")


def test_no_speedup_of_a_wrong_result_of_ours(capsys, monkeypatch):
    monkeypatch.setattr(
        bench_attn, "ours", lambda name: Way(name, lambda problem: (too_large, []), ours=True)
    )
    status, out = bench(capsys, ways=["shift", "sdpa-bias"])
    assert status == 1
    assert "WRONG" in line_of(out, OURS) and "faster" not in out


def test_row_of_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.setattr(measure, "free_memory", lambda device: 10_000)  # the inputs do fit
    _, out = bench(capsys, "--pass", "forward", ways=["naive", "shift"], backends=["cpu"])
    assert "does not fit: needs about" in line_of(out, "naive")
    assert "does not fit" in line_of(out, "shift") and "does not fit" not in line_of(out, "cpu")


def test_row_of_what_takes_too_long(capsys):
    _, out = bench(capsys, "--budget", "1e-9", ways=["naive"])
    assert "skipped: about" in line_of(out, "naive") and "--budget" in line_of(out, "naive")


def test_row_of_what_is_not_supported(capsys, monkeypatch):
    def attend(*inputs):
        raise NotImplementedError("backend='x' raised:\nno such thing on this device\n  File ...")

    replace_shift(monkeypatch, attend)
    status, out = bench(capsys, ways=["shift"])
    assert status == 0
    assert line_of(out, "shift").endswith("NotImplementedError: no such thing on this device")


def test_row_of_a_backend_that_is_missing(capsys):
    reason = why_not("cuda")
    if reason is None:
        pytest.skip("it is not missing here")
    _, out = bench(capsys, ways=[], backends=["cuda"])
    assert "cuda" in line_of(out, "cuda *") and "GFLOP" not in line_of(out, "cuda *")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--qlen", "41"], "--qlen: got 41, needs at most klen, 40"),
        (["--pass", "decode", "--qlen", "7"], "--qlen: got 7, needs 1: --pass decode is of one query"),
        (["--klen", "0"], "argument --klen: got 0, needs more than 0"),
        (["--klen", "many"], "argument --klen: invalid int value: 'many'"),
        (["--rivals", "shift", "magic"], "--rivals: got magic, needs names from naive, published, shift"),
        (["--backends", "magic"], "--backends: got magic, needs names from reference, cpu"),
        (["--backends", "--rivals"], "--backends, --rivals: got no name, needs at least one"),
        (["--device", "tpu"], "--device: got tpu, needs cpu or cuda"),
        (["--device", "cuda:x"], "--device: got cuda:x, needs cpu or cuda"),
        (["--budget", "inf"], "argument --budget: got inf, needs a finite number"),
        (["--budget", "nan"], "argument --budget: got nan, needs more than 0"),
        (["--threads", "999999999999"], "argument --threads: got 999999999999, needs 1 to"),
        (["--json", "x" * 300], f"argument --json: cannot write to {'x' * 300}: File name too long"),
        (["--json", f"{'x' * 300}/y"], "argument --json: cannot write to /"),
        (["--d-head", "0"], "argument --d-head: got 0, needs 1 to 256"),
        (["--d-head", "300"], "argument --d-head: got 300, needs 1 to 256"),
        (["--json", "/no/such/folder/x.json"], "argument --json: cannot write to /no/such/folder"),
        (["--json", "/"], "argument --json: got /, a folder, needs the name of a file"),
        (["--json", f"{__file__}/x.json"], f"argument --json: cannot write to {__file__}"),
        (["--plot", "/"], "argument --plot: got /, a folder, needs the name of a file"),
        (["--plot", "/no/such/folder/x.png"], "argument --plot: cannot write to /no/such/folder"),
        (["--plot", "x.jpgg"], "argument --plot: got x.jpgg, needs a name that ends in .png, .pdf or .svg"),
        (["--plot", "x"], "argument --plot: got x, needs a name that ends in .png, .pdf or .svg"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        bench_attn.main([*TINY, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--pass", "forward"], "the inputs do not fit"),
        (["--pass", "backward"], "the inputs and their gradients do not fit"),
        (["--pass", "decode", "--qlen", "1"], "the inputs do not fit"),
        (["--sweep", "4", str(10**12)], "the inputs do not fit"),
    ],
)
def test_inputs_that_do_not_fit(capsys, arguments, what):
    sizes = ["--klen", "64", "--qlen", "32", "--batch", str(10**9)]
    with pytest.raises(SystemExit) as stop:
        bench_attn.main([*sizes, *arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and not captured.out
    line = captured.err.splitlines()[-1]
    assert "B 1000000000" in line and what in line and "GiB are free" in line


@pytest.mark.parametrize("which", [FORWARD, TRAIN, DECODE])
def test_counted_bytes_of_inputs(which):
    problem = Problem(5, 9, batch=2, heads=3, d_head=7, dtype="bfloat16", clamp_len=3)
    tensors = [tensor for inputs in measure.input_sets(problem, which) for tensor in inputs]
    copies = 2 if which == TRAIN else 1
    assert measure.input_bytes(problem, which) == copies * sum(tensor.nbytes for tensor in tensors)


def test_without_tqdm(capsys, monkeypatch):
    """A line says what to install; `--help` needs nothing."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    parse = runpy.run_path(cli.__file__)["parse"]
    for arguments, status in (["--help"], 0), ([], 2):
        with pytest.raises(SystemExit) as stop:
            parse(argparse.ArgumentParser(), arguments)
        assert stop.value.code == status
    assert capsys.readouterr().err.endswith("error: needs tqdm: pip install -e '.[bench]'\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("main", [bench_attn.main, must_reach.main])
def test_no_gpu(capsys, main):
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "sees no CUDA device" in capsys.readouterr().err


def test_clamp_len_and_dtype(capsys):
    assert bench_attn.parse(["--clamp-len", "0"]).clamp_len == 0
    for arguments, message in (
        (["--clamp-len", "-1"], "--clamp-len: got -1, needs at least 0"),
        (["--dtype", "float16"], "--dtype: float16 needs --device cuda"),
    ):
        with pytest.raises(SystemExit):
            bench_attn.parse(arguments)
        assert message in capsys.readouterr().err


def test_defaults(monkeypatch):
    """Of a device: sizes, dtype, rivals."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(measure, "free_memory", lambda device: 2**40)
    for arguments, heads, dtype, first in (
        (["--device", "cpu"], 8, "float32", "naive"),
        (["--device", "cuda"], 16, "bfloat16", "shift"),
        (["--device", "cuda:1", "--dtype", "float16", "--heads", "3"], 3, "float16", "shift"),
    ):
        args = bench_attn.parse(arguments)
        (problem,) = bench_attn.problems(args)
        assert (problem.heads, problem.dtype, args.rivals[0]) == (heads, dtype, first)
        assert problem.device == args.device and problem.qlen * 2 == problem.klen


@pytest.mark.parametrize("main", [bench_attn.main, must_reach.main])
def test_help(capsys, main):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "--repeat" in capsys.readouterr().out


def test_a_number_of_a_cpu_is_none(monkeypatch):
    assert bench_attn.parse(["--device", "cpu:0"]).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        bench_attn.parse(["--device", "cuda:2"])


def test_nothing_is_measured_twice(capsys):
    """And a line of the plot goes from left to right."""
    problems = bench_attn.problems(bench_attn.parse(["--sweep", "40", "20", "40"]))
    assert [problem.klen for problem in problems] == [20, 40]
    _, out = bench(capsys, "--pass", "forward", ways=[], backends=[OURS, OURS])
    assert sum(line.startswith(OURS) for line in out.splitlines()) == 1


def test_queries_that_are_cut_to_klen_are_said(capsys):
    _, out = bench(capsys, "--pass", "forward", "--sweep", "8", "20", ways=[])
    assert "--qlen 12 is more than klen 8: there it is cut" in out
    _, out = bench(capsys, "--pass", "forward", "--sweep", "12", "20", ways=[])
    assert "--qlen" not in out


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
def test_output_that_nobody_reads(tmp_path):
    """As of `| head`: no traceback, and the exit status that a shell gives for it."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bench_attn.py"),
        *TINY,
        "--rivals",
        "--pass",
        "forward",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    finally:
        os.close(writer)
    assert done.returncode == cli.READ_NO_FURTHER and "Error" not in done.stderr, done.stderr


def test_a_command_that_is_stopped():
    def stop():
        raise KeyboardInterrupt

    assert cli.run(stop) == 130
    assert cli.run(lambda: 1) == 1


# ---- Is it right ---------------------------------------------------------------------------------


def mask_off_by_one(q, k, v, r, u, w):
    """A key that comes next is seen too, with the row of distance 0."""
    return reference(q, k, v, r, u, w, causal=False, window_size=(-1, 1), r_zero=r.shape[1] - 1)


def last_rows_zero(*inputs):
    out = right(*inputs)
    return torch.cat([out[:, :, :-2], torch.zeros_like(out[:, :, -2:])], 2)


def four_percent_more(*inputs):
    return right(*inputs) * 1.04


@pytest.mark.parametrize("which", [FORWARD, TRAIN])
@pytest.mark.parametrize("attend", [mask_off_by_one, last_rows_zero, four_percent_more])
def test_what_is_plainly_wrong_in_bfloat16(attend, which):
    """At a size where each is a matter of some percent."""
    problem = Problem(200, 600, heads=4, d_head=32, dtype="bfloat16")
    error = error_of(attend, problem, which)
    assert error.mistake("bfloat16", ours=True)
    assert error_of(right, problem, which).mistake("bfloat16", ours=True) is None
    if attend is last_rows_zero:  # no matter whose, and how few they are
        assert error.row > 0.5 and "of a row" in Error(1e-3, error.row).mistake("bfloat16", ours=False)


def error_of(attend, problem, which):
    inputs = problem.inputs()
    results = measure.attention_task(attend, problem, which, [inputs]).run()
    return Truth(problem, which, inputs).error(results)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 1, heads=2, d_head=8),
        Problem(2, 2, heads=2, d_head=8),
        Problem(12, 40, heads=2, d_head=8, clamp_len=0),
        Problem(100, 300, heads=2, clamp_len=0),
        Problem(100, 300, heads=2, clamp_len=3),
        Problem(100, 100, batch=2, heads=2, d_head=41),
        Problem(128, 300, heads=1, d_head=128),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
def test_what_is_right(problem, which, dtype):
    """Also where gradients cancel to nothing."""
    problem = replace(problem, dtype=dtype)
    for name in {OURS, "reference"}:
        attend, _ = rivals.ours(name).build(problem)
        assert error_of(attend, problem, which).mistake(dtype, ours=True) is None, name


def test_the_check_needs_little_memory(monkeypatch):
    """However many keys there are; and its blocks are one whole."""
    sizes = []

    def attend(q, k, *others, **options):
        sizes.append(q.shape[2] * k.shape[2])
        return rel_attention(q, k, *others, **options)

    problem = Problem(30, 50, heads=1, d_head=8)
    whole = Truth(problem, TRAIN, problem.inputs()).expected()
    monkeypatch.setattr("problem.CHECKED_BLOCK", 200)
    monkeypatch.setattr("problem.rel_attention", attend)
    for got, expected in zip(Truth(problem, TRAIN, problem.inputs()).expected()[0], whole[0], strict=True):
        torch.testing.assert_close(got, expected)
    assert len(sizes) > 5 and max(sizes) <= 200
    monkeypatch.setattr("problem.CHECKED_BLOCK", 1)
    Truth(problem, FORWARD, problem.inputs()).expected()


def test_a_check_that_fails_is_no_fault_of_the_way(capsys, monkeypatch):
    def fail(truth, position=True):
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(Truth, "expected", fail)
    status, out = bench(capsys, "--pass", "forward", ways=["shift"])
    assert status == 0
    reason = "not timed, for the float64 reference fails: RuntimeError: not enough memory"
    assert reason in line_of(out, "shift") and reason in line_of(out, OURS)


# ---- What the figures rest on --------------------------------------------------------------------


@pytest.mark.parametrize("clamp", [None, 0, 1, 6, 30])
@pytest.mark.parametrize(("qlen", "klen"), [(1, 1), (1, 9), (5, 5), (4, 9), (9, 11)])
def test_counted_pairs(qlen, klen, clamp):
    problem = Problem(qlen, klen, batch=2, heads=3, d_head=5, clamp_len=clamp)
    visible = visible_keys(qlen, klen)[0, 0]
    distance = torch.arange(qlen)[:, None] + klen - qlen - torch.arange(klen)
    near = visible & (distance < problem.rows)
    pairs, near_pairs = 6 * int(visible.sum()), 6 * int(near.sum())
    assert problem.visible_pairs() == pairs
    assert problem.flops(FORWARD) == 10 * (2 * pairs + near_pairs)
    assert problem.flops(TRAIN) == 10 * (7 * pairs + 4 * near_pairs)
    assert problem.flops(BACKWARD) == problem.flops(TRAIN) - problem.flops(FORWARD)
    assert problem.flops(FORWARD, position=False) == 10 * 2 * pairs


def test_eleven_products_without_clamp():
    problem = Problem(9, 20)
    assert problem.flops(TRAIN) == 11 * 2 * problem.d_head * problem.visible_pairs()


def test_interleaved_samples():
    order = []
    tasks = {name: measure.Task(lambda _, name=name: order.append(name)) for name in "ab"}
    samples = measure.interleave(tasks, 3)
    assert order == list("ab" * 4)  # one call each to find the length, then in turns
    assert [len(taken) for taken in samples.values()] == [3, 3]


def test_budget_ends_sampling(monkeypatch):
    task = measure.Task(lambda _: None)
    monkeypatch.setattr(measure.Task, "_seconds_on_cpu", lambda self, calls: float(calls))
    assert len(measure.interleave({"": task}, 9, budget=2.5)[""]) == 3
    assert len(measure.interleave({"": task}, 9, budget=5.5)[""]) == 6
    assert len(measure.interleave({"": task}, 9, budget=0.5)[""]) == 1


def test_a_call_of_several_passes(monkeypatch):
    task = measure.Task(lambda _: None, passes=4)
    monkeypatch.setattr(measure.Task, "_seconds_on_cpu", lambda self, calls: float(calls))
    assert task.seconds(3) == 0.25
    assert len(measure.interleave({"": task}, 9, budget=5.5)[""]) == 6


@pytest.mark.parametrize("which", [FORWARD, DECODE, TRAIN])
def test_only_training_is_recorded(which):
    recorded = []

    def attend(*inputs):
        recorded.append(torch.is_grad_enabled())
        return inputs[0] * 1

    problem = Problem(1, 8, heads=1, d_head=2)
    task = measure.attention_task(attend, problem, which, [problem.inputs(0)])
    task.run(), task.seconds()
    assert recorded == 2 * [which == TRAIN]
    assert torch.is_grad_enabled()


def test_decode_takes_the_sets_in_turn():
    seen = []
    problem = Problem(1, 8, heads=1, d_head=2)
    sets = [problem.inputs(seed) for seed in range(3)]

    def attend(*inputs):
        seen.append(next(i for i, x in enumerate(sets) if x[1] is inputs[1]))
        return inputs[0]

    task = measure.attention_task(attend, problem, DECODE, sets)
    assert task.fewest_calls == 3
    task.seconds(4)
    assert seen == [0, 1, 2, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_measured_memory():
    """In a process of its own, through the command line: the shift forms scores, the fused kernel none."""
    problem = Problem(950, 1900, heads=2, d_head=16)
    (shift,) = (way for way in rivals.RIVALS if way.name == "shift")
    taken = rivals.extra_memory(shift, problem, [FORWARD, TRAIN])
    for extra in taken.values():
        assert 2 * problem.square_bytes() < extra < 12 * problem.square_bytes()
    if OURS == "cpu":
        taken = rivals.extra_memory(rivals.ours("cpu"), problem, [TRAIN])
        assert taken[TRAIN] < problem.square_bytes()


def test_a_process_that_dies_is_named():
    with pytest.raises(ChildProcessError, match="ended with status 1"):
        measure.in_fresh_process(rivals.extra_memory_here, "no such way", {}, [])


def test_no_memory_of_a_way_whose_process_dies(capsys, monkeypatch):
    def die(way, problem, passes):
        raise ChildProcessError("ended with status -9")

    monkeypatch.setattr(bench_attn, "extra_memory", die)
    options = [option for option in TINY if option != "--no-memory"]
    assert bench_attn.main([*options, "--backends", OURS, "--rivals", "shift"]) == 0
    out = capsys.readouterr().out
    assert line_of(out, "shift").split()[4] == "?" and "x faster" in line_of(out, "shift")


@pytest.mark.parametrize("fits", [True, False])
def test_memory_of_two_ways_at_a_time_where_they_fit(capsys, monkeypatch, fits):
    """naive, which is not timed, does not count."""
    running, most = 0, 0
    lock, both = threading.Lock(), threading.Event()

    def one(way, problem, passes):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                both.set()
        both.wait(10 if fits else 0.1)
        with lock:
            running -= 1
        return dict.fromkeys(passes, 3_000_000 if way.ours else 5_000_000)

    shift_bytes = next(way for way in rivals.RIVALS if way.name == "shift").needs(
        Problem(16, 32, d_head=4), TRAIN
    )
    room = 2 * shift_bytes if fits else 2 * shift_bytes - 1
    monkeypatch.setattr(bench_attn, "extra_memory", one)
    monkeypatch.setattr(bench_attn, "too_much", lambda needs, device: "too much" if needs > room else None)
    sizes = ["--klen", "32", "--qlen", "16", "--d-head", "4", "--repeat", "1"]
    ways = ["--backends", OURS, "--rivals", "naive", "shift", "sdpa-no-position"]
    assert bench_attn.main([*sizes, *ways]) == 0
    assert most == (2 if fits else 1)
    out = capsys.readouterr().out
    assert line_of(out, OURS).split()[5] == "3.0" and line_of(out, "shift").split()[4] == "5.0"
    assert "does not fit" in line_of(out, "naive")


# ---- must_reach ----------------------------------------------------------------------------------


def test_list_of_figures(capsys):
    assert must_reach.main(["--list", "--rows", "forward", "decode"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("decode") for line in lines)
    assert all(line.startswith(("forward", "decode")) for line in lines)


def test_list_of_a_gpu(capsys):
    assert must_reach.main(["--list", "--device", "cuda"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == len(set(names)) == len(must_reach.GPU_FIGURES)


def test_figures_of_a_gpu(monkeypatch):
    """Side by side with every peer once, however many figures come of it."""
    problem = Problem(6, 20, heads=2, d_head=8)
    monkeypatch.setattr(must_reach, "BACKEND", rivals.ours(OURS))
    monkeypatch.setattr(must_reach, "GPU_PEERS", ("sdpa-no-position", "shift", "naive"))
    monkeypatch.setitem(must_reach.PEERS, "naive", Way("naive", lambda problem: (not_a_number, [])))
    speedups = [must_reach.gpu_speedup(problem, FORWARD, name) for name in ("shift", "sdpa-no-position")]
    first = [speedup(2) for speedup in speedups]
    assert min(first) > 0 and first == [speedup(2) for speedup in speedups]
    with pytest.raises(must_reach.Skipped, match="naive is WRONG"):
        must_reach.gpu_speedup(problem, FORWARD, "naive")(2)

    monkeypatch.setattr(must_reach, "floor_kernel", lambda problem: SDPBackend.FLASH_ATTENTION)
    assert must_reach.over_flash(problem, FORWARD)(2) == pytest.approx(1 / first[1])
    monkeypatch.setattr(must_reach, "floor_kernel", lambda problem: SDPBackend.MATH)
    with pytest.raises(must_reach.Skipped, match="MATH"):
        must_reach.over_flash(problem, FORWARD)(2)


def test_peers_that_cannot_run_are_named(monkeypatch):
    problem = Problem(6, 20, heads=2, d_head=8)
    monkeypatch.setattr(must_reach, "BACKEND", rivals.ours(OURS))
    monkeypatch.setattr(must_reach, "HEADLINE", problem)
    monkeypatch.setitem(must_reach.PEERS, "naive", Way("naive", lambda problem: (not_a_number, [])))
    figure = must_reach.Figure("a figure", 0.0, "its speed", must_reach.speedup(FORWARD, "shift", "naive"))
    line = must_reach.run(figure, 2)
    assert line["verdict"] == "pass" and line["note"].startswith("naive: ArithmeticError: naive is WRONG")
    (best,) = (figure for figure in must_reach.FIGURES if figure.name == "train over the best peer")
    assert "sdpa-bias-compiled" in inspect.getclosurevars(best.value).nonlocals["names"]


def test_a_way_is_refused_for_the_time_its_memory_takes():
    """A product that is fast says nothing about one that fills 15 GB first."""
    way = Way("wide", lambda problem: (not_a_number, []), needs=lambda problem, which: 2**20)
    problem = Problem(6, 20, heads=2, d_head=8)
    assert bench_attn.refusal(way, problem, FORWARD, 1e15, 2**20 / 3, 4) is None
    assert "about 5 s a call" in bench_attn.refusal(way, problem, FORWARD, 1e15, 2**20 / 5, 4)
    assert 1e6 < measure.fresh_memory_rate("cpu") < measure.fresh_memory_rate("cuda") == math.inf


def test_rates_and_backends_side_by_side(monkeypatch):
    problem, ours, reference = Problem(6, 20, heads=2, d_head=8), rivals.ours(OURS), rivals.ours("reference")
    taken = {"ours": 2.0, OURS: 2.0, "reference": 6.0}
    monkeypatch.setattr(must_reach, "medians", lambda tasks, repeat: {name: taken[name] for name in tasks})
    rate = must_reach.teraflops(ours, problem, FORWARD)(1)
    assert rate == pytest.approx(problem.flops(FORWARD) / 2e12)
    assert must_reach.over_backend(ours, reference, problem, FORWARD)(1) == pytest.approx(3)


@pytest.mark.skipif(not EMULATED, reason="needs TXL_CUDA_EMULATION")
@pytest.mark.parametrize("on", [True, False])
def test_cuda_by_warpgroups(on, monkeypatch, tmp_path):
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    problem = Problem(20, 40, heads=2, d_head=64, dtype="bfloat16")
    before = cuda.WARPGROUPS
    rivals.by_warpgroups(on).build(problem)[0](*problem.inputs())
    assert ("WarpgroupQueryBlock" in (tmp_path / "trace").read_text()) == on
    assert before == cuda.WARPGROUPS


def test_a_figure_that_needs_warpgroups_is_left_out_without(monkeypatch):
    monkeypatch.setattr(cuda, "has_warpgroups", lambda device: False)
    with pytest.raises(must_reach.Skipped, match="wgmma needs sm_90"):
        must_reach.teraflops_by_warpgroups(Problem(6, 20, heads=2, d_head=8))(1)


def test_growth_of_memory(monkeypatch):
    monkeypatch.setattr(
        must_reach, "extra_memory", lambda way, problem, passes: {TRAIN: problem.qlen * problem.klen}
    )
    assert must_reach.memory_growth(Problem(8, 16), Problem(2, 4))(1) == pytest.approx(4)


def skipped(repeat):
    raise must_reach.Skipped("no such instruction")


def failed(repeat):
    raise ArithmeticError("cpu is WRONG")


@pytest.mark.parametrize(
    ("value", "at_least", "verdict", "status"),
    [
        (lambda repeat: 0.9, True, "pass", 0),
        (lambda repeat: 0.7, True, "MISSED", 10),
        (lambda repeat: 0.9, False, "MISSED", 10),
        (lambda repeat: must_reach.Noted(0.9, "b: is WRONG"), True, "pass b: is WRONG", 0),
        (skipped, True, "skipped no such instruction", 0),
        (failed, True, "FAILED ArithmeticError: cpu is WRONG", 1),
    ],
)
def test_verdicts(capsys, monkeypatch, tmp_path, value, at_least, verdict, status):
    figure = must_reach.Figure("a figure", 0.8, "gemm rate", value, at_least)
    monkeypatch.setattr(must_reach, "FIGURES", (figure,))
    path = tmp_path / "figures.json"
    assert must_reach.main(["--json", str(path)]) == status
    assert capsys.readouterr().out.rstrip().endswith(verdict)
    assert json.loads(path.read_text())["figures"][0]["name"] == "a figure"


def test_figures_of_what_was_stopped(monkeypatch, tmp_path):
    def stop(repeat):
        raise KeyboardInterrupt

    figures = [
        must_reach.Figure(name, 0.8, "gemm rate", f) for name, f in (("a", lambda n: 1.0), ("b", stop))
    ]
    monkeypatch.setattr(must_reach, "FIGURES", figures)
    path = tmp_path / "figures.json"
    with pytest.raises(KeyboardInterrupt):
        must_reach.main(["--json", str(path)])
    assert [line["name"] for line in json.loads(path.read_text())["figures"]] == ["a"]


def test_a_broken_gpu_ends_the_benchmark(monkeypatch, tmp_path):
    """What comes after it would fail for no fault of its own."""

    def broken():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    figures = [must_reach.Figure(name, 0.8, "gemm rate", failed) for name in ("a figure", "another")]
    monkeypatch.setattr(must_reach, "FIGURES", figures)
    path = tmp_path / "figures.json"
    with pytest.raises(RuntimeError, match="the GPU is broken: a figure"):
        must_reach.main(["--json", str(path)])
    (line,) = json.loads(path.read_text())["figures"]
    assert (line["name"], line["verdict"]) == ("a figure", "FAILED")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["--help"], 0, "All that needs an NVIDIA GPU"),
        (["--tests"], 2, "torch finds no GPU to use"),
        (["--test"], 2, "--benchmarks"),
        (["--benchmarks", "here", "there"], 2, "--benchmarks"),
    ],
)
def test_the_suite_for_gpus_without_one(arguments, status, message):
    command = ["bash", ROOT / "benchmarks" / "gpu_suite.sh", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
    )
    assert done.returncode == status and message in done.stdout + done.stderr


FAKE_PYTHON = """#!/bin/sh
case "$*" in
*get_device_name*) echo "a GPU" ;;
*must_reach.py*) exit {missed} ;;
*"--d-head 128 --json"*) exit {failed} ;;
esac
"""


@pytest.mark.parametrize(("failed", "status", "how"), [(0, 0, "ok"), (1, 1, "FAILED")])
def test_the_suite_for_gpus_tells_targets_from_failures(tmp_path, failed, status, how):
    """With a Python by a path from here, which has nothing to do."""
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(missed=must_reach.MISSED, failed=failed))
    python.chmod(0o755)
    command = ["bash", ROOT / "benchmarks" / "gpu_suite.sh", "--benchmarks", "results"]
    environment = {**os.environ, "PYTHON": "./python"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    summary = (tmp_path / "results" / "tables-benchmarks.txt").read_text()
    assert "missed targets" in line_of(summary, "must_reach ")
    assert how in line_of(summary, "attention-d128") and "ok" in line_of(summary, "attention-d64")


@pytest.mark.skipif(OURS != "cpu", reason="the CPU backend is not built")
def test_measured_figures():
    tiny = Problem(6, 20, heads=2, d_head=8)
    assert must_reach.gemm_fraction(tiny, TRAIN)(2) > 0
    assert must_reach.copy_fraction(Problem(1, 20, heads=2, d_head=8))(2) > 0
    assert must_reach.time_ratio(Problem(6, 20, clamp_len=3), Problem(6, 20))(2) > 0


def test_wrong_numbers_reach_nothing(monkeypatch):
    wrong = Way("cpu", lambda problem: (too_large, []), ours=True)
    monkeypatch.setattr(must_reach, "BACKEND", wrong)
    with pytest.raises(ArithmeticError, match="WRONG"):
        must_reach.gemm_fraction(Problem(6, 20, heads=2, d_head=8), FORWARD)(1)


# ---- bench_layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_beside_torchs(capsys, tmp_path, dtype):
    path = tmp_path / "layers.json"
    assert bench_layers.main(["--dtype", dtype, "--repeat", "2", "--json", str(path)]) == 0
    lines = json.loads(path.read_text())["ms"]
    assert len(lines) == len(bench_layers.ROWS) * len(bench_layers.WEIGHTS) + 1
    out = capsys.readouterr().out
    for line in lines:
        assert line["ours"] > 0 and line["torch"] > 0
        assert line_of(out, line["name"]).endswith("x")


@pytest.mark.parametrize("name", ["linear", "dropout"])
def test_wrong_layers_are_not_timed(monkeypatch, name):
    monkeypatch.setattr(bench_layers, name, lambda x, other: x[:, :1].expand(len(x), 2048) * 0)
    with pytest.raises(ArithmeticError, match=f"{name} is WRONG"):
        bench_layers.main(["--repeat", "1"])


# ---- bench_chunks ----------------------------------------------------------------------------------

FEW_FRAMES = ["--frames=31", "--chunk=4", "--left=6", "--heads=2", "--d-head=8", "--repeat=2"]


@pytest.mark.parametrize("batch", [1, 3])
def test_chunks_beside_torchs_ways(capsys, tmp_path, batch):
    path = tmp_path / "chunks.json"
    assert bench_chunks.main([*FEW_FRAMES, f"--batch={batch}", "--no-compile", "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    eager = [way for way, (_, compiled) in bench_chunks.WAYS.items() if not compiled]
    assert [result["which"] for result in results] == list(bench_chunks.PASSES)
    for result in results:
        assert list(result["ms"]) == eager and not result["notes"]  # all of them right
    assert line_of(capsys.readouterr().out, "    chunks as a batch, SDPA").endswith("x")


@pytest.mark.slow
def test_chunks_beside_compiled_ways(tmp_path):
    path = tmp_path / "chunks.json"
    assert bench_chunks.main([*FEW_FRAMES, "--json", str(path)]) == 0
    forward, training = json.loads(path.read_text())["results"]
    assert list(forward["ms"]) == list(bench_chunks.WAYS) and not forward["notes"]
    assert list(training["notes"]) == ["FlexAttention, compiled"]  # has no backward on CPUs


def test_wrong_chunks_are_not_timed(capsys, monkeypatch):
    right = bench_chunks.attention_in_chunks
    monkeypatch.setattr(bench_chunks, "attention_in_chunks", lambda *x, **sizes: 1.001 * right(*x, **sizes))
    assert bench_chunks.main([*FEW_FRAMES, "--no-compile"]) == 1
    assert "WRONG" in line_of(capsys.readouterr().out, f"    {bench_chunks.OURS}")


def test_chunks_with_nan_in_one_gradient_are_wrong(capsys, monkeypatch):
    right = bench_chunks.attention_in_chunks

    def attend(q, k, v, *x, **sizes):
        v = v.clone()
        if v.requires_grad:
            v.register_hook(lambda gradient: gradient * math.nan)
        return right(q, k, v, *x, **sizes)

    monkeypatch.setattr(bench_chunks, "attention_in_chunks", attend)
    assert bench_chunks.main([*FEW_FRAMES, "--no-compile"]) == 1
    assert "WRONG: differs from float64 by nan" in capsys.readouterr().out


# ---- bench_huggingface -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "timed", "notes"),
    [
        ({"eager": 1.0, "sdpa": 1.0, "ours": 1.0}, ["ours", "eager", "sdpa"], {}),
        ({"sdpa": 1.0, "ours": 1.0}, ["ours", "sdpa"], {"eager": "RuntimeError: eager cannot run"}),
        (
            {"ours": 1.0},
            [],
            {
                "eager": "RuntimeError: eager cannot run",
                "sdpa": "RuntimeError: sdpa cannot run",
                "ours": "not timed: none of theirs runs, to compare with",
            },
        ),
        ({"eager": 1.0, "sdpa": 1.0}, ["eager", "sdpa"], {"ours": "RuntimeError: ours cannot run"}),
        (
            {"eager": 1.0, "sdpa": 1.0, "ours": 1.1},
            ["eager", "sdpa"],
            {"ours": "WRONG: differs from theirs by 1.0e-01"},
        ),
    ],
    ids=["all", "theirs fails", "all of theirs fail", "ours fails", "ours is wrong"],
)
def test_layers_that_cannot_run_or_are_wrong(monkeypatch, results, timed, notes):
    def task(job, way):
        if way not in results:
            raise RuntimeError(f"{way} cannot run")
        return measure.Task(lambda _: (torch.full((3,), results[way]),))

    monkeypatch.setattr(bench_huggingface.Job, "task", task)
    args = argparse.Namespace(compile=False, memory=False, repeat=2, budget=1.0)
    job = bench_huggingface.Job("parakeet", 8, "block", "forward")
    result = bench_huggingface.measured(job, args, cli.Progress())
    assert list(result["ms"]) == timed and result["notes"] == notes
    lines = bench_huggingface.table([result]).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [*timed, *notes]
    for way, line in zip(timed, lines[2:], strict=False):  # ratios are to ours
        assert line.endswith("x") == (way != "ours" and "ours" in timed)


@pytest.mark.parametrize(
    ("weight", "note"),
    [
        ([1.0, 2.0], None),
        ([1.0, 2.01], "WRONG: weight 2's gradient differs from theirs by 4.5e-03"),
        (None, "WRONG: weight 2's gradient is missing here"),
    ],
)
def test_gradients_of_weights_are_compared(weight, note):
    """Those that are nothing but rounding are not, and neither are those that nobody has."""
    x = torch.ones(3)
    theirs = [x, None, torch.tensor([1.0, 2.0]), torch.tensor([1e-7, -2e-7])]
    ours = [x, None, None if weight is None else torch.tensor(weight), torch.tensor([3e-7, 1e-7])]
    assert bench_huggingface.mistake(ours, theirs) == note
    assert bench_huggingface.mistake(theirs, theirs) is None


@pytest.mark.parametrize("clamp_len", [None, 6])
def test_bytes_of_a_problem(clamp_len: int | None) -> None:
    problem = Problem(4, 20, batch=3, heads=2, d_head=8, dtype="bfloat16", clamp_len=clamp_len)
    _, k, v, r, *_ = problem.inputs()
    assert problem.cache_bytes() == k.nbytes + v.nbytes + r.nbytes
    assert problem.cache_bytes(position=False) == k.nbytes + v.nbytes
    assert problem.square_bytes() == 3 * 2 * 4 * 20 * 2


@pytest.mark.parametrize("seconds, fewest, calls", [(0.003, 1, 7), (0.003, 9, 9), (0.03, 1, 1), (0.03, 3, 3)])
def test_short_calls_are_repeated_within_a_sample(
    monkeypatch, seconds: float, fewest: int, calls: int
) -> None:
    """Until it is as long as a clock needs; a long one is called as often as it asks for."""
    monkeypatch.setattr(measure, "SHORTEST_SAMPLE", 0.02)
    monkeypatch.setattr(measure.Task, "seconds", lambda self, calls=1: seconds)
    assert measure.calls_per_sample(measure.Task(lambda _: None, fewest_calls=fewest)) == calls

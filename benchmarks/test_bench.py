"""The CPU backend on the shapes the project holds itself to, for pytest-benchmark to record and compare.

    pytest benchmarks/test_bench.py --benchmark-autosave
    pytest benchmarks/test_bench.py --benchmark-compare

The product 2048^3 is among them: a run on a slower machine, or on a busy one, shows there too.
"""

from __future__ import annotations

from dataclasses import replace

import measure
import pytest
from problem import DECODE, FORWARD, SHAPES, TRAIN
from rivals import ours

from txl_kernels import backends

pytest.importorskip("pytest_benchmark")

CASES = [
    *((name, FORWARD) for name in SHAPES if name != "decode"),
    ("headline", TRAIN),
    ("training", TRAIN),
    ("decode", DECODE),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "which"), CASES)
def test_attention(benchmark, shape, which, dtype):
    cpu = backends()["cpu"]
    if not cpu.available:
        pytest.skip(cpu.reason)
    problem = replace(SHAPES[shape], dtype=dtype)
    attend, _ = ours("cpu").build(problem)
    task = measure.attention_task(attend, problem, which, measure.input_sets(problem, which))
    benchmark.extra_info.update(problem=str(problem), gflop=problem.flops(which) / 1e9)
    benchmark.pedantic(task.run, warmup_rounds=1, rounds=20, iterations=task.fewest_calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gemm(benchmark, dtype):
    task = measure.gemm_task(replace(SHAPES["headline"], dtype=dtype))
    benchmark.extra_info.update(gflop=measure.gemm_flops() / 1e9)
    benchmark.pedantic(task.run, warmup_rounds=1, rounds=20)

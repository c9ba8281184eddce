"""The same bits every time, on one thread and on two, in any company."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EMULATED,
    INTERPRET,
    assert_same_bits,
    each_dtype,
    each_fused,
    inputs,
    key_range,
    randn_like,
    run,
)

CASES = {
    "square": (dict(B=2, H=2, L=130, K=130, D=64), {}),
    "memory": (dict(B=1, H=3, L=113, K=500, D=41), {}),
    "clamp": (dict(B=2, H=1, L=64, K=400, N=50, D=32), {}),
    "both-directions": (dict(B=1, H=2, L=100, K=150, D=24, causal=False), dict(causal=False)),
    "window": (dict(B=2, H=2, L=100, K=300, D=16), dict(window_size=(70, 0))),
    "dropout": (dict(B=2, H=2, L=70, K=140, D=32), dict(dropout_p=0.3, dropout_seed=1)),
    "decode": (dict(B=1, H=1, L=1, K=5000, D=64), {}),
    "decode-many": (dict(B=3, H=2, L=6, K=1800, D=40), {}),
    "one-head": (dict(B=1, H=1, L=300, K=700, D=64), {}),
}


def those_that_race(backends):
    """Not Triton's interpreter, in which nothing does, and which is slow: test_triton.py has a small case."""
    return [p for p in backends if not (INTERPRET and p.values[0].name == "triton")]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend, dtype", those_that_race(each_dtype(exact=True)))
def test_twenty_runs_on_one_and_two_threads(backend, dtype, case, threads):
    sizes, options = CASES[case]
    tensors = inputs(**sizes, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    threads(2)
    first = run(backend, tensors, dout, **options)
    few, many = [(2, 2)], [(2, 19)]
    for n, runs in {
        "reference": few,  # its products are torch's, split by the number of threads
        "cpu": [*many, (1, 20)],
        "cuda": few if EMULATED else many,  # the emulation reports races without their happening
    }.get(backend.name, many):
        threads(n)
        for _ in range(runs):
            assert_same_bits(run(backend, tensors, dout, **options), first)


@pytest.mark.parametrize("L", range(1, 10))
@pytest.mark.parametrize("backend", [p for p in each_fused() if p.id == "cpu"])
def test_decode_on_one_and_more_threads(backend, L, threads):
    """A long memory is split over threads: the split may not depend on how many there are."""
    tensors = inputs(B=1, H=2, L=L, K=4321, D=64, dtype=backend.dtypes[0], device=backend.device)
    dout = randn_like(tensors["q"])
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(run(backend, tensors, dout))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window_size=(77, 0)),
        dict(causal=False, window_size=(200, 30)),
        dict(N=50),
        dict(K=2048, window_size=(1000, 0), scale=1.0),  # scores so large that a softmax begins anew
    ],
    ids=str,
)
@pytest.mark.parametrize("H", [1, 5])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True, only=("cpu",)))
def test_few_heads_on_one_and_more_threads(backend, dtype, H, options, threads):
    """A thread that finds no head left helps with the others; where heads are fewer, blocks are smaller."""
    options = dict(options)
    sizes = dict(B=1, H=H, L=270, K=options.pop("K", 700), D=64, causal=options.get("causal", True))
    tensors = inputs(**sizes, N=options.pop("N", None), dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    results = []
    for n in (1, 2, 3, 7):
        threads(n)
        results.append(run(backend, tensors, dout, **options))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@pytest.mark.parametrize("L", [2, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True, only=("cpu",)))
def test_a_batch_gives_what_its_entries_give_alone(backend, dtype, L):
    """Forward, and the gradients that are not summed over the batch. On a GPU the size of the batch decides
    how far keys are shared out."""
    tensors = inputs(B=3, H=2, L=L, K=300, D=40, dtype=dtype, device=backend.device)
    ranges = key_range((0, 300), (71, 300), (5, 200), device=backend.device)
    dout = randn_like(tensors["q"])
    together = run(backend, tensors, dout, key_range=ranges)
    for b in range(3):
        alone = {n: t[b : b + 1] if n in ("q", "k", "v") else t for n, t in tensors.items()}
        got = run(backend, alone, dout[b : b + 1], key_range=ranges[b : b + 1])
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(got[name][0], together[name][b]), name

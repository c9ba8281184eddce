"""`key_range`: the keys that exist, per batch entry. The others are garbage that nobody reads."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    INTERPRET,
    assert_same_bits,
    check,
    each_dtype,
    inputs,
    key_range,
    randn_like,
    run,
)

INT32 = 2**31 - 1
RANGES = {
    "whole": (0, 203),
    "warm-up": (90, 203),
    "mid-tile": (77, 203),
    "padded": (0, 150),
    "inside": (33, 101),
    "one-key": (64, 65),
    "last-key": (202, 203),
    "first-key": (0, 1),
    "empty": (50, 50),
    "reversed": (120, 40),
    "beyond": (60, 999),
    "before": (-50, 120),
    "outside-left": (-50, -3),
    "outside-right": (203, 400),
    "extremes": (-INT32 - 1, INT32),
    "extremes-reversed": (INT32, -INT32 - 1),
}


@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=False), dict(window_size=(40, 0)), dict(causal=False, window_size=(9, 50))],
    ids=str,
)
@pytest.mark.parametrize("L", [2, 113])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_every_kind_of_range(backend, dtype, L, options):
    """All kinds as one batch: each entry has a range of its own."""
    ranges = key_range(*RANGES.values(), device=backend.device)
    causal = options.get("causal", True)
    tensors = inputs(B=len(RANGES), H=1, L=L, K=203, D=24, causal=causal, dtype=dtype, device=backend.device)
    got = check(backend, tensors, key_range=ranges, **options)
    for b, name in enumerate(RANGES):
        if name in ("empty", "reversed", "outside-left", "outside-right", "extremes-reversed"):
            assert (got["out"][b] == 0).all()
            assert (got["lse"][b] == -math.inf).all()
            assert all((got[gradient][b] == 0).all() for gradient in ("dq", "dk", "dv"))


@pytest.mark.parametrize("options", [{}, dict(window_size=(90, 0)), dict(causal=False)], ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype(only=("cpu",)))
def test_ranges_of_a_long_memory(backend, dtype, options):
    """AMX's tiles take keys 512 at a time: ranges in one such span, in two, in three, and none."""
    ranges = key_range((0, 1300), (530, 1290), (1030, 1100), (0, 500), (700, 700), device=backend.device)
    causal = options.get("causal", True)
    sizes = dict(B=len(ranges), H=1, L=70, K=1300, D=32)
    tensors = inputs(**sizes, causal=causal, dtype=dtype, device=backend.device)
    check(backend, tensors, key_range=ranges, **options)


@pytest.mark.parametrize("kind", RANGES)
@pytest.mark.parametrize("L", [2, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_garbage_outside_the_range(backend, dtype, L, kind):
    """NaN, infinity and huge values where no key exists reach neither outputs nor gradients: same bits."""
    if INTERPRET and L == 2 and kind not in ("padded", "inside", "empty", "beyond", "extremes"):
        pytest.skip("Triton's interpreter is slow: with more queries only")
    start, end = RANGES[kind]
    tensors = inputs(B=2, H=1, L=L, K=203, D=24, dtype=dtype, device=backend.device)
    ranges = key_range((start, end), (0, 203), device=backend.device)
    dout = randn_like(tensors["q"])
    clean = run(backend, tensors, dout, key_range=ranges)
    j = torch.arange(203)
    missing = ~((start <= j) & (j < end))
    infinite = () if INTERPRET else (math.inf, -math.inf)
    for garbage in (math.nan, *infinite, torch.finfo(dtype).max):
        spoilt = dict(tensors, k=tensors["k"].clone(), v=tensors["v"].clone())
        spoilt["k"][0, :, missing] = garbage
        spoilt["v"][0, :, missing] = garbage
        got = run(backend, spoilt, dout, key_range=ranges)
        assert_same_bits(got, clean)
        assert (got["dk"][0, :, missing] == 0).all()
        assert (got["dv"][0, :, missing] == 0).all()


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_none_is_the_whole_range(backend, dtype):
    tensors = inputs(B=2, H=2, L=70, K=150, D=24, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    whole = run(backend, tensors, dout, key_range=key_range((0, 150), (-3, 1000), device=backend.device))
    assert_same_bits(whole, run(backend, tensors, dout))


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_start_of_the_range_is_a_shorter_memory(backend, dtype):
    """Warm-up of a fixed-size memory: hiding the first keys gives what passing fewer keys gives."""
    L, K, start = 40, 150, 61
    tensors = inputs(B=1, H=2, L=L, K=K, D=24, dtype=dtype, device=backend.device)
    hidden = run(backend, tensors, key_range=key_range((start, K), device=backend.device))
    fewer = {n: t[:, :, start:] if n in ("k", "v") else t for n, t in tensors.items()}
    fewer["r"] = tensors["r"][:, start:]
    check(backend, fewer)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(hidden["out"], run(backend, fewer)["out"], rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_entries_do_not_touch_each_other(backend, dtype):
    """An entry's result does not depend on the ranges of the others."""
    tensors = inputs(B=3, H=1, L=20, K=90, D=16, dtype=dtype, device=backend.device)
    first = run(backend, tensors, key_range=key_range((0, 90), (40, 90), (0, 0), device=backend.device))
    second = run(backend, tensors, key_range=key_range((77, 80), (40, 90), (9, 33), device=backend.device))
    assert torch.equal(first["out"][1], second["out"][1])
    assert torch.equal(first["lse"][1], second["lse"][1])


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_strided_range(backend, dtype):
    """A column-major [B, 2], and every other row of a larger one."""
    tensors = inputs(B=3, H=1, L=20, K=90, D=16, dtype=dtype, device=backend.device)
    ranges = key_range((10, 90), (40, 71), (0, 55), device=backend.device)
    contiguous = run(backend, tensors, key_range=ranges)
    transposed = ranges.T.contiguous().T
    larger = key_range(*[(0, 0)] * 7, device=backend.device)[:6:2]
    larger.copy_(ranges)
    for strided in (transposed, larger):
        assert not strided.is_contiguous()
        assert_same_bits(run(backend, tensors, key_range=strided), contiguous)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_dropout_counts_keys_from_zero(backend, dtype):
    """A range hides keys; it does not renumber them."""
    tensors = inputs(B=1, H=2, L=20, K=90, D=16, dtype=dtype, device=backend.device)
    check(
        backend, tensors, key_range=key_range((37, 90), device=backend.device), dropout_p=0.5, dropout_seed=3
    )

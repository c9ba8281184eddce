"""Rows of r: fewer than there are distances (the paper's clamp_len), more, and `r_zero` anywhere."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import (
    RELATIVE,
    assert_accurate,
    assert_same,
    assert_untouched,
    bf16,
    check,
    distances,
    each_dtype,
    inputs,
    plain,
    randn_like,
    run,
    truth,
)

CASES = [
    (dict(L=113, K=203, N=1), {}),
    (dict(L=113, K=203, N=2), {}),
    (dict(L=113, K=203, N=64), {}),
    (dict(L=113, K=203, N=113), {}),
    (dict(L=113, K=203, N=202), {}),
    (dict(L=113, K=203, N=204), {}),
    (dict(L=113, K=203, N=500), {}),
    (dict(L=64, K=1000, N=33), {}),  # nearly all of the memory is far
    (dict(L=128, K=640, N=257), {}),
    (dict(L=3, K=1000, N=100), {}),
    (dict(L=1, K=1000, N=1), {}),
    (dict(L=1, K=1000, N=999), {}),
    # The window cuts inside, and outside, the clamped part.
    (dict(L=64, K=600, N=50), dict(window_size=(30, 0))),
    (dict(L=64, K=600, N=50), dict(window_size=(300, 0))),
    # Both directions: r is too short on both sides.
    (dict(L=113, K=203, N=40), dict(causal=False, r_zero=20)),
    (dict(L=113, K=203, N=40), dict(causal=False, r_zero=0)),
    (dict(L=113, K=203, N=40), dict(causal=False, r_zero=39)),
    (dict(L=40, K=90, N=128), dict(causal=False, r_zero=89)),  # one row too short on the right alone
    # The last keys are all far: nothing adds to what the band has left over.
    (dict(L=64, K=257, N=1), dict(causal=False, r_zero=0)),
    (dict(L=200, K=260, N=90), dict(causal=False, r_zero=60, window_size=(70, 50))),
    (dict(L=113, K=203, N=500), dict(causal=False, r_zero=250)),
    # r_zero in the middle, and outside r on either side, near and far.
    (dict(L=113, K=203, N=100), dict(r_zero=50)),
    (dict(L=113, K=203, N=100), dict(r_zero=0)),
    (dict(L=113, K=203, N=100), dict(r_zero=-1)),
    (dict(L=113, K=203, N=100), dict(r_zero=-70, causal=False)),
    (dict(L=113, K=203, N=100), dict(r_zero=-(10**6), causal=False)),
    (dict(L=113, K=203, N=100), dict(r_zero=100)),
    (dict(L=113, K=203, N=100), dict(r_zero=160)),
    (dict(L=113, K=203, N=100), dict(r_zero=10**6, causal=False)),
    (dict(L=2, K=300, N=100), dict(r_zero=-5)),
    (dict(L=2, K=300, N=100), dict(r_zero=250)),
]


@pytest.mark.parametrize("sizes, options", CASES, ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_rows_of_r(backend, dtype, sizes, options):
    tensors = inputs(B=2, H=1, D=33, **sizes, dtype=dtype, device=backend.device)
    check(backend, tensors, **options)


@pytest.mark.parametrize(
    "N, options",
    [
        (89, dict()),
        (128, dict(causal=False, r_zero=88)),
        (128, dict(causal=False, r_zero=89)),
        (129, dict(causal=False, r_zero=89)),
    ],
    ids=["first, causal", "first", "last", "none"],
)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_end_rows_that_one_pair_is_clamped_to(backend, dtype, N, options):
    """Few pairs use an end row: one more or less is a large part of its gradient, and in bfloat16 less than
    the error that dr as a whole may have."""
    tensors = inputs(B=2, H=1, L=40, K=90, D=33, N=N, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    got, exact = (of(tensors, dout, **options)["dr"] for of in (functools.partial(run, backend), truth))
    for row in (0, -1):
        error = (got[:, row].double().cpu() - exact[:, row]).norm() / exact[:, row].norm()
        assert error <= 2 * RELATIVE[dtype], f"row {row} of dr: relative error {error:.3g}"


@pytest.mark.parametrize("N", [1, 30, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_clamp_equals_repeated_rows(backend, dtype, causal, N):
    """Clamping is the same as writing out the repeated rows, and a clamped row collects the gradients of all
    of them."""
    L, K = 40, 110
    r_zero = N - 1 if causal else N // 2
    tensors = inputs(B=2, H=2, L=L, K=K, D=20, N=N, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    short = run(backend, tensors, dout, causal=causal, r_zero=r_zero)

    needed = K + L - 1  # distances K-1 ... -(L-1); distance 0 in row K-1
    source = (torch.arange(needed, device=backend.device) - (K - 1) + r_zero).clamp(0, N - 1)
    long = dict(tensors, r=tensors["r"][:, source])
    written_out = run(backend, long, dout, causal=causal, r_zero=K - 1)
    written_out["dr"] = torch.zeros_like(tensors["r"], dtype=torch.float64).index_add(
        1, source, written_out["dr"].double()
    )
    # Both are the same function of the same numbers; each may err as plain PyTorch does.
    yardstick = plain(tensors, dout, causal=causal, r_zero=r_zero)
    exact = truth(tensors, dout, causal=causal, r_zero=r_zero)
    assert_accurate(short, exact, yardstick, dtype)
    if dtype.itemsize >= 4:  # the rows of a bfloat16 dr are rounded before they are added here
        assert_accurate(written_out, exact, yardstick, dtype)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_rows_beyond_every_distance_are_unused(backend, dtype):
    """Extra rows on both ends, filled with NaN, change nothing and get no gradient."""
    L, K = 40, 110
    tensors = inputs(B=1, H=2, L=L, K=K, D=20, N=K, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    fitting = run(backend, tensors, dout)
    H, N, D = tensors["r"].shape
    longer = torch.full((H, 9 + N + 70, D), torch.nan, dtype=dtype, device=backend.device)
    longer[:, 9 : 9 + N] = tensors["r"]
    got = run(backend, dict(tensors, r=longer), dout, r_zero=9 + N - 1)
    dr = got["dr"]
    if dtype == bf16:
        for name, result in dict(got, dr=dr[:, 9 : 9 + N]).items():
            assert_untouched(result, fitting[name], dtype)
    else:
        if backend.name == "cuda":  # whose sum goes by blocks of r's rows, and these begin elsewhere
            of_bias = got.pop("dbias_v"), fitting.pop("dbias_v")
            torch.testing.assert_close(*of_bias, rtol=1e-6, atol=4e-6)
        assert_same(backend, dict(got, dr=dr[:, 9 : 9 + N]), fitting)
    assert (dr[:, :9] == 0).all() and (dr[:, 9 + N :] == 0).all()


@pytest.mark.parametrize("L", [2, 40])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_gradient_reaches_exactly_the_rows_in_use(backend, dtype, L):
    K, N, r_zero = 110, 60, 70  # causal: rows 60 ... 70 would be the near distances; they clamp to row 59
    tensors = inputs(B=1, H=1, L=L, K=K, D=8, N=N, dtype=dtype, device=backend.device)
    dr = run(backend, tensors, randn_like(tensors["q"]), r_zero=r_zero)["dr"]
    d = distances(L, K)
    used = (r_zero - d[d >= 0]).clamp(0, N - 1).unique()
    assert (dr[0].abs().sum(-1) > 0).nonzero()[:, 0].tolist() == used.tolist()

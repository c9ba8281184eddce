"""Which keys a query sees: causal, windows, both directions. What it does not see cannot reach it."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    EMULATED,
    FUSED,
    INTERPRET,
    allowed,
    assert_same_bits,
    assert_untouched,
    check,
    each_dtype,
    f16,
    f32,
    f64,
    inputs,
    key_range,
    randn_like,
    roundings_by_tiles,
    rows_of_r,
    run,
)

from txl_kernels import gpu

WINDOWS = [
    (dict(L=5, K=9), dict(window_size=(0, 0))),
    (dict(L=113, K=203), dict(window_size=(1, 0))),
    (dict(L=113, K=203), dict(window_size=(63, -1))),
    (dict(L=113, K=203), dict(window_size=(64, 5))),
    (dict(L=128, K=217), dict(window_size=(150, 0))),
    (dict(L=64, K=900), dict(window_size=(70, 0))),  # most key tiles seen by nobody
    (dict(L=200, K=200), dict(window_size=(3, 0))),
    (dict(L=239, K=239), dict(window_size=(20, 20), causal=False)),
    (dict(L=150, K=400), dict(window_size=(-1, 7), causal=False)),
    (dict(L=150, K=400), dict(window_size=(7, -1), causal=False)),
    (dict(L=150, K=400), dict(window_size=(0, 130), causal=False)),
    (dict(L=65, K=65), dict(window_size=(0, 0), causal=False)),
    (dict(L=2, K=700), dict(window_size=(300, 0))),
    (dict(L=1, K=700), dict(window_size=(12, 3), causal=False)),
    (dict(L=113, K=203), dict(window_size=(10**9, 10**9), causal=False)),
]


@pytest.mark.parametrize("sizes, options", WINDOWS, ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_windows(backend, dtype, sizes, options):
    causal = options.get("causal", True)
    tensors = inputs(B=1, H=2, D=40, **sizes, causal=causal, dtype=dtype, device=backend.device)
    check(backend, tensors, **options)


@pytest.mark.parametrize("D", [1, 41, 64])
@pytest.mark.parametrize("L, K", [(1, 1), (7, 7), (70, 71), (65, 193), (130, 130)])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_both_directions(backend, dtype, L, K, D):
    tensors = inputs(B=2, H=1, L=L, K=K, D=D, causal=False, dtype=dtype, device=backend.device)
    check(backend, tensors, causal=False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_window_that_hides_nothing(backend, dtype, causal):
    L, K = 70, 150
    tensors = inputs(B=1, H=2, L=L, K=K, D=16, causal=causal, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    unlimited = run(backend, tensors, dout, causal=causal)
    for window in [(K - 1, L - 1), (-1, L - 1), (K - 1, -1), (2**62 - 1, 2**62 - 1)]:
        assert_same_bits(run(backend, tensors, dout, causal=causal, window_size=window), unlimited)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_causal_is_a_window_to_the_right_of_zero(backend, dtype):
    tensors = inputs(B=1, H=2, L=70, K=150, D=16, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    r_zero = tensors["r"].shape[1] - 1
    window = run(backend, tensors, dout, causal=False, window_size=(-1, 0), r_zero=r_zero)
    assert_same_bits(window, run(backend, tensors, dout, causal=True, window_size=(-1, 5)))


MASKS = {
    "causal": {},
    "window": dict(window_size=(20, 0)),
    "both-windows": dict(window_size=(20, 30), causal=False),
    "key-range": dict(causal=False, key_range=((40, 110),)),
    "short-window": dict(window_size=(5, 0)),
}


def masked(name, device):
    options = dict(MASKS[name])
    if "key_range" in options:
        options["key_range"] = key_range(*options["key_range"], device=device)
    return options


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("L, D", [(3, 24), (70, 24), (70, 41)])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_nan_in_a_key_reaches_the_rows_that_see_it_alone(backend, dtype, L, D, where, mask):
    """All other rows keep their bits."""
    K = 150
    options = masked(mask, backend.device)
    causal = options.get("causal", True)
    tensors = inputs(B=1, H=2, L=L, K=K, D=D, causal=causal, dtype=dtype, device=backend.device)
    clean = run(backend, tensors, **options)
    seen = allowed(1, L, K, **options)[0, 0]  # [L, K]
    # Triton's interpreter is slow.
    for j in (0, 63, 64, 127, 149) if INTERPRET else (0, 17, 50, 63, 64, 100, 127, 128, 147, 149):
        spoilt = dict(tensors, **{where: tensors[where].clone()})
        spoilt[where][0, 1, j] = math.nan
        got = run(backend, spoilt, **options)
        hit = seen[:, j]
        assert_untouched(got["out"][0, 0], clean["out"][0, 0], dtype)  # the other head
        assert got["out"][0, 1, hit].isnan().all()
        assert_untouched(got["out"][0, 1, ~hit], clean["out"][0, 1, ~hit], dtype)
        if where == "k":
            assert got["lse"][0, 1, hit].isnan().all()
            assert_untouched(got["lse"][0, 1, ~hit], clean["lse"][0, 1, ~hit], dtype)
        else:
            assert_untouched(got["lse"], clean["lse"], dtype)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("L", [3, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_infinite_value_reaches_the_rows_that_see_it_alone(backend, dtype, L, value):
    tensors = inputs(B=1, H=1, L=L, K=150, D=24, dtype=dtype, device=backend.device)
    clean = run(backend, tensors)
    seen = allowed(1, L, 150)[0, 0]
    for j in (0, 100, 148):
        spoilt = dict(tensors, v=tensors["v"].clone())
        spoilt["v"][0, 0, j, 5] = value
        got = run(backend, spoilt)["out"][0, 0]
        hit = seen[:, j]
        assert not got[hit][:, 5].isfinite().any()
        assert_untouched(got[~hit], clean["out"][0, 0][~hit], dtype)
        others = [x for x in range(24) if x != 5]
        assert_untouched(got[:, others], clean["out"][0, 0][:, others], dtype)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True, only=("cpu",)))
def test_largest_value_reaches_the_rows_that_see_it_alone(backend, dtype):
    """A padding of finfo.max or min. A sum of three bfloat16 must not begin with infinity for it."""
    tensors = inputs(B=1, H=1, L=70, K=150, D=64, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    dout[:, :, 20:] = 0
    clean = run(backend, tensors, dout)
    for value in (torch.finfo(dtype).max, torch.finfo(dtype).min):
        spoilt = dict(tensors, v=tensors["v"].clone())
        spoilt["v"][:, :, 100:] = value  # of 70 queries the first 20 do not see these keys
        got = run(backend, spoilt, dout)
        for name in ("out", "lse", "dq"):
            assert_untouched(got[name][:, :, :20], clean[name][:, :, :20], dtype)


@pytest.mark.parametrize("L", [3, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_infinite_key_reaches_the_rows_that_see_it_alone(backend, dtype, L):
    """A score of +inf spoils its row: softmax is inf - inf. One of -inf may be a weight of 0."""
    tensors = inputs(B=1, H=1, L=L, K=150, D=24, dtype=dtype, device=backend.device)
    tensors["q"][..., 3] = 1.0  # so that the score has the sign of the key's third element
    tensors["bias_u"][:, 3] = 0.0
    clean = run(backend, tensors)
    seen = allowed(1, L, 150)[0, 0]
    for j in (0, 100, 148):
        for value in (math.inf, -math.inf):
            spoilt = dict(tensors, k=tensors["k"].clone())
            spoilt["k"][0, 0, j, 3] = value
            got = run(backend, spoilt)
            hit = seen[:, j]
            assert_untouched(got["out"][0, 0, ~hit], clean["out"][0, 0, ~hit], dtype)
            assert_untouched(got["lse"][0, 0, ~hit], clean["lse"][0, 0, ~hit], dtype)
            if value > 0:
                assert got["out"][0, 0, hit].isnan().all()
                assert not got["lse"][0, 0, hit].isfinite().any()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("L", [1, 40])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_scores_of_minus_infinity(monkeypatch, backend, dtype, L, splits):
    """They weigh nothing, however many tiles or splits of them a query sees. Of nothing else, no softmax
    exists."""
    monkeypatch.setattr(gpu, "key_splits", lambda *_: splits)
    K, huge = 400, {f64: -1e308, f16: -math.inf}.get(dtype, -2e38)  # 8 times that is -inf
    tensors = inputs(B=1, H=1, L=L, K=K, D=16, dtype=dtype, device=backend.device)
    tensors["q"][..., 3], tensors["bias_u"][:, 3] = 8.0, 0.0
    want = run(backend, tensors, key_range=key_range((300, K), device=backend.device))
    tensors["k"][:, :, :300, 3] = huge
    got = run(backend, tensors)
    for name in ("out", "lse"):
        torch.testing.assert_close(got[name], want[name], rtol=0.02, atol=0.02)
    tensors["k"][..., 3] = huge
    got = run(backend, tensors)
    assert got["out"].isnan().all() and not got["lse"].isfinite().any()


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_nan_in_a_query_stays_in_its_row(backend, dtype):
    for L in (4, 70):
        tensors = inputs(B=2, H=2, L=L, K=150, D=24, dtype=dtype, device=backend.device)
        clean = run(backend, tensors)
        for i in {0, 1, L // 2, L - 1}:
            spoilt = dict(tensors, q=tensors["q"].clone())
            spoilt["q"][1, 0, i, 7] = math.nan
            got = run(backend, spoilt)
            for name in ("out", "lse"):
                assert got[name][1, 0, i].isnan().all()
                got[name][1, 0, i] = clean[name][1, 0, i]
                assert_untouched(got[name], clean[name], dtype)


@pytest.mark.parametrize("N", [150, 40, 1])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_nan_in_r_reaches_the_rows_that_use_it_alone(backend, dtype, mask, N):
    L, K = 70, 150
    options = masked(mask, backend.device)
    r_zero = N - 1 if options.get("causal", True) else N // 2
    tensors = inputs(B=1, H=2, L=L, K=K, D=24, N=N, dtype=dtype, device=backend.device)
    clean = run(backend, tensors, r_zero=r_zero, **options)
    rows = rows_of_r(L, K, N, r_zero)
    seen = allowed(1, L, K, **options)[0, 0]
    for row in {0, N // 3, N // 2, max(0, N - 6), N - 1}:
        spoilt = dict(tensors, r=tensors["r"].clone())
        spoilt["r"][1, row, 2] = math.nan
        got = run(backend, spoilt, r_zero=r_zero, **options)
        hit = ((rows == row) & seen).any(-1)
        assert_untouched(got["out"][0, 0], clean["out"][0, 0], dtype)
        assert got["out"][0, 1, hit].isnan().all()
        assert_untouched(got["out"][0, 1, ~hit], clean["out"][0, 1, ~hit], dtype)


@pytest.mark.parametrize("r_zero", [0, -1000])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_nan_in_the_only_row_of_r_leaves_queries_without_keys_alone(backend, dtype, r_zero):
    """At r_zero = -1000 every pair is clamped, and by far."""
    L, K = 100, 140
    ranges = key_range((45, K), device=backend.device)  # the first five queries see nothing
    tensors = inputs(B=1, H=1, L=L, K=K, D=8, N=1, dtype=dtype, device=backend.device)
    tensors["r"] = torch.full_like(tensors["r"], math.nan)
    got = run(backend, tensors, torch.ones_like(tensors["q"]), r_zero=r_zero, key_range=ranges)
    for x in (got["out"], got["dq"]):
        assert (x[0, 0, :5] == 0).all()
        assert x[0, 0, 5:].isnan().all()


@pytest.mark.parametrize("L, K", [(1, 20), (1, 90), (70, 90)])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_queries_whose_scores_are_all_minus_infinity_get_nan(backend, dtype, L, K):
    """They see keys, but no softmax of theirs exists: no zeros, as for queries that see none."""
    tensors = inputs(B=1, H=1, L=L, K=K, D=4, N=1, dtype=dtype, device=backend.device)
    tensors["q"][..., 0] = 9  # positive with its bias
    tensors["r"][0, 0, 0] = -math.inf
    got = run(backend, tensors, torch.ones_like(tensors["q"]))
    for name in ("out", "lse", "dq"):
        assert got[name].isnan().all(), name


@pytest.mark.parametrize("name", ["bias_u", "bias_v"])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_nan_in_a_bias_stays_in_its_head(backend, dtype, name):
    tensors = inputs(B=2, H=3, L=30, K=70, D=24, dtype=dtype, device=backend.device)
    ranges = key_range((0, 70), (50, 70), device=backend.device)  # the first rows of entry 1 see nothing
    clean = run(backend, tensors, key_range=ranges)
    tensors[name] = tensors[name].clone()
    tensors[name][1, 3] = math.nan
    got = run(backend, tensors, key_range=ranges)
    seen = allowed(2, 30, 70, key_range=ranges).any(-1)[:, 0]  # [B, L]
    assert got["out"][:, 1][seen].isnan().all()
    assert (got["out"][:, 1][~seen] == 0).all()
    for head in (0, 2):
        assert_untouched(got["out"][:, head], clean["out"][:, head], dtype)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_keys_nobody_sees(backend, dtype, mask):
    """NaN in keys that no query sees changes no bit of any result or gradient; their own gradient is zero."""
    L, K = 40, 150
    options = masked(mask, backend.device)
    causal = options.get("causal", True)
    tensors = inputs(B=1, H=2, L=L, K=K, D=24, causal=causal, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    clean = run(backend, tensors, dout, **options)
    unseen = ~allowed(1, L, K, **options)[0, 0].any(0)  # [K]
    assert unseen.any() == (mask != "causal")
    spoilt = dict(tensors, k=tensors["k"].clone(), v=tensors["v"].clone())
    spoilt["k"][:, :, unseen] = math.nan
    spoilt["v"][:, :, unseen] = math.inf
    got = run(backend, spoilt, dout, **options)
    for name in got:
        assert_untouched(got[name], clean[name], dtype)
    assert (got["dk"][:, :, unseen] == 0).all() and (got["dv"][:, :, unseen] == 0).all()
    rows = torch.arange(tensors["r"].shape[1])
    r_zero = len(rows) - 1 if causal else len(rows) - L
    used = rows_of_r(L, K, len(rows), r_zero)[allowed(1, L, K, **options)[0, 0]].unique()
    unused = torch.ones(len(rows), dtype=torch.bool).index_fill(0, used, False)
    assert (got["dr"][:, unused] == 0).all()
    assert (got["dr"][:, ~unused] != 0).any(-1).all()


@pytest.mark.parametrize(
    "options", [{}, dict(window_size=(12, 0)), dict(causal=False, window_size=(3, 9))], ids=str
)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_rows_that_see_nothing(backend, dtype, options):
    """out = 0, lse = -inf, no gradient: through the window and the key range together."""
    causal = options.get("causal", True)
    L, K = 90, 130
    ranges = key_range((70, 130), (20, 60), (129, 130), (0, 3), device=backend.device)
    tensors = inputs(B=4, H=2, L=L, K=K, D=33, causal=causal, dtype=dtype, device=backend.device)
    got = check(backend, tensors, key_range=ranges, **options)
    empty = ~allowed(4, L, K, key_range=ranges, **options).any(-1).expand(4, 2, L)
    assert 0 < empty.sum() < empty.numel()
    assert (got["out"][empty] == 0).all()
    assert (got["lse"][empty] == -math.inf).all()
    assert (got["dq"][empty] == 0).all()


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_dout_of_rows_that_see_nothing_is_not_read(backend, dtype):
    """A loss that masks such rows may leave anything in their gradient."""
    L, K = 40, 70
    ranges = key_range((50, 70), device=backend.device)
    tensors = inputs(B=1, H=2, L=L, K=K, D=24, dtype=dtype, device=backend.device)
    empty = ~allowed(1, L, K, key_range=ranges).any(-1)[0, 0]
    dout = randn_like(tensors["q"])
    clean = run(backend, tensors, dout, key_range=ranges)
    dout[:, :, empty] = math.nan
    got = run(backend, tensors, dout, key_range=ranges)
    for name in got:
        assert_untouched(got[name], clean[name], dtype)


@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(), {}),
        (dict(N=90), {}),
        (dict(), dict(window_size=(64, 0))),
        (dict(), dict(window_size=(20, 20), causal=False)),
        (dict(N=200), dict(causal=False, r_zero=80)),
        (dict(), dict(key_range=(5, 170))),
        (dict(D=64), {}),
        (dict(D=100), dict(window_size=(100, 30), causal=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_gradients_reach_exactly_what_is_seen(backend, dtype, sizes, options):
    """A gradient that arrives at one query alone goes on to the keys it sees and the rows of r it uses; where
    one key alone has a value, to the queries that see it. No other test finds a pair too many or too few in
    gradients of 16 bits."""
    L, K = 113, 203
    sizes = dict(dict(B=1, H=1, L=L, K=K, D=24, causal=options.get("causal", True)), **sizes)
    if "key_range" in options:
        options = dict(options, key_range=key_range(options["key_range"], device=backend.device))
    seen = allowed(1, L, K, **options)[0, 0]
    tensors = inputs(**sizes, dtype=dtype, device=backend.device, scale=0.3)
    dout = randn_like(tensors["q"])

    for i in (31, 112) if INTERPRET else (0, 31, 64, 112):
        alone = torch.zeros_like(dout)
        alone[:, :, i] = dout[:, :, i]
        got = {n: t.cpu()[0].squeeze(0) != 0 for n, t in run(backend, tensors, alone, **options).items()}
        N = tensors["r"].shape[1]
        r_zero = options.get("r_zero", N - 1 if sizes["causal"] else N - L)
        rows = rows_of_r(L, K, N, r_zero)[i, seen[i]]
        used = torch.zeros(N, dtype=torch.bool).index_fill(0, rows, True)
        assert torch.equal(got["dk"].any(-1), seen[i]), f"dk of query {i}"
        assert torch.equal(got["dv"].any(-1), seen[i]), f"dv of query {i}"
        assert torch.equal(got["dr"].any(-1), used), f"dr of query {i}"
        assert torch.equal(got["dq"].any(-1), torch.arange(L) == i), f"dq of query {i}"
    for j in (63, 150) if INTERPRET else (0, 63, 150, 202):
        alone = torch.zeros_like(tensors["v"])
        alone[:, :, j] = tensors["v"][:, :, j]
        dq = run(backend, dict(tensors, v=alone), dout, **options)["dq"].cpu()[0, 0]
        assert torch.equal((dq != 0).any(-1), seen[:, j]), f"dq by key {j}"


@pytest.mark.parametrize("L", [4, 40, 113])
@pytest.mark.parametrize("backend, dtype", [p for p in each_dtype(only=FUSED) if p.values[1] != f16])
def test_scores_that_overflow_spoil_the_gradients_of_what_is_seen_alone(backend, dtype, L):
    """Finite inputs: a query whose one key gives an infinite score. Its lse is NaN, for the keys it does not
    see too."""
    tensors = inputs(B=1, H=1, L=L, K=L, D=16, dtype=dtype, device=backend.device)
    huge = torch.finfo(dtype).max ** 0.6
    tensors["q"][0, 0] /= huge
    tensors["q"][0, 0, 0] = tensors["k"][0, 0, 0] = huge
    got = run(backend, tensors, randn_like(tensors["q"]))
    assert not got["lse"][0, 0, 0].isfinite()
    rows_of = {"out": 0, "dq": 0, "dk": 0, "dv": 0, "dr": L - 1}
    for name, row in rows_of.items():
        spoilt = ~got[name].cpu().flatten(0, -3)[0].isfinite().all(-1)
        assert spoilt.nonzero().flatten().tolist() == [row], name


@pytest.mark.parametrize("size", [1e4, 3e4, 1e5, 1e6])
@pytest.mark.parametrize("backend, dtype", each_dtype(only=("cpu", "triton")))
def test_huge_scores_have_bounded_gradients(backend, dtype, size):
    """Where lse is as coarse as the scores' differences, probabilities made from it are still at most 1."""
    if size > torch.finfo(dtype).max / 5:
        pytest.skip("inputs beyond the dtype's range")
    tensors = inputs(B=1, H=1, L=40, K=40, D=32, dtype=dtype, device=backend.device)
    for name in ("q", "k", "r"):
        tensors[name] *= size
    dout = randn_like(tensors["q"])
    got = run(backend, tensors, dout)
    assert (got["dv"].abs() <= dout.abs().sum(2, keepdim=True) * 1.01).all()
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize("K", [150, 1500])  # within a chunk of keys, and over many
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "r", "dout"])
@pytest.mark.parametrize("backend, dtype", each_dtype(only=FUSED))
def test_what_is_not_finite_reaches_the_gradients_of_those_that_see_it_alone(backend, dtype, name, value, K):
    """A row of one head: the queries that see it pass it on to the keys and rows of r that they see. (The
    reference's gradients are autograd's, which multiplies NaN by the zeros of what is hidden.)"""
    if K > 150 and INTERPRET:
        pytest.skip("takes long in Triton's interpreter, whose tiles of keys are small anyway")
    if K > 150 and EMULATED and backend.name == "cuda" and dtype == f32:
        pytest.skip("takes long in the emulation, whose bfloat16 has the same tiles")
    L = 70
    row = {"q": 61, "k": K - 89, "v": K - 89, "r": K - 31, "dout": 61}[name]
    tensors = inputs(B=1, H=2, L=L, K=K, D=24, dtype=dtype, device=backend.device, scale=0.3)
    dout = randn_like(tensors["q"])
    options = dict(window_size=(40 if K == 150 else 1200, 0))
    seen = allowed(1, L, K, **options)[0, 0]
    row_of_r = rows_of_r(L, K, K, K - 1)
    reached = {
        "q": torch.arange(L) == row,
        "k": seen[:, row],
        "v": seen[:, row],
        "r": (seen & (row_of_r == row)).any(1),
        "dout": torch.arange(L) == row,
    }[name]
    keys = seen[reached].any(0)
    rows = torch.zeros(K, dtype=torch.bool).index_fill(0, row_of_r[seen & reached[:, None]], True)

    clean = run(backend, tensors, dout, **options)
    spoilt = {n: t.clone() for n, t in {**tensors, "dout": dout}.items()}
    spoilt[name].flatten(0, -3)[0, row] = value
    got = run(backend, spoilt, spoilt.pop("dout"), **options)
    least = roundings_by_tiles(backend, dtype)
    for gradient, of in {"dq": reached, "dk": keys, "dv": keys, "dr": rows}.items():
        if (name, gradient) == ("v", "dv"):
            of = torch.zeros_like(of)  # values do not matter to probabilities
        a, b = (results[gradient].cpu().flatten(0, -3) for results in (got, clean))
        assert not a[0][of].isfinite().all(-1).any(), f"{gradient} of those that see it"
        # The CPU sums a block that holds one pair by pair; its products add up dq by pieces.
        roundings = max(least, K // 75 if backend.name == "cpu" and gradient == "dq" else 0)
        assert_untouched(a[0][~of], b[0][~of], dtype, roundings)
        assert_untouched(a[1], b[1], dtype, least)
    for gradient in ("dbias_u", "dbias_v"):
        assert not got[gradient][0].isfinite().all()
        assert_untouched(got[gradient][1].cpu(), clean[gradient][1].cpu(), dtype, least)

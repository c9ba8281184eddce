"""Gradients: numerically in float64, and against the float64 reference at every dtype."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    FLOOR,
    TENSORS,
    check,
    each_backend,
    each_dtype,
    each_fused,
    f64,
    inputs,
    key_range,
    plain,
    randn_like,
    run,
    truth,
)
from torch.autograd import gradcheck

from txl_kernels import rel_attention

SMALL = dict(B=2, H=2, L=3, K=5, D=3)

CASES = {
    "plain": ({}, {}),
    "no-memory": (dict(L=5), {}),
    "one-query": (dict(L=1, K=7), {}),
    "both-directions": (dict(causal=False), dict(causal=False)),
    "window": (dict(K=8), dict(window_size=(2, 0))),
    "window-both": (dict(causal=False), dict(causal=False, window_size=(1, 1))),
    "clamp": (dict(K=9, N=3), {}),
    "one-row": (dict(N=1), {}),
    "r-long": (dict(N=11), {}),
    "r-zero": (dict(N=4), dict(r_zero=2)),
    "r-zero-outside": (dict(N=4), dict(r_zero=-1, causal=False)),
    "key-range": ({}, dict(key_range=((1, 4), (0, 5)))),
    "key-range-empty": ({}, dict(key_range=((3, 5), (4, 2)))),
    "scale": ({}, dict(scale=-0.8)),
    "dropout": (dict(L=4, K=6), dict(dropout_p=0.4, dropout_seed=11)),
    "dropout-window": (
        dict(causal=False),
        dict(causal=False, window_size=(2, 1), dropout_p=0.3, dropout_seed=-7),
    ),
    "no-bias": (dict(bias=False), {}),
}


def options_on(device, options):
    if "key_range" in options:
        return dict(options, key_range=key_range(*options["key_range"], device=device))
    return options


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", each_backend(f64))
def test_gradcheck(backend, case):
    sizes, options = CASES[case]
    options = options_on(backend.device, options)
    tensors = inputs(**{**SMALL, **sizes}, dtype=f64, device=backend.device)
    tensors = {n: None if t is None else t.requires_grad_() for n, t in tensors.items()}
    assert gradcheck(lambda *a: rel_attention(*a, **options, backend=backend.name), tuple(tensors.values()))


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", each_backend(f64))
def test_gradcheck_of_one_input(backend, name):
    """Only one input needs a gradient: the others must not be needed for it."""
    tensors = inputs(B=1, H=2, L=3, K=6, N=4, D=3, dtype=f64, device=backend.device)
    tensors[name].requires_grad_()
    assert gradcheck(lambda *a: rel_attention(*a, backend=backend.name), tuple(tensors.values()))


@pytest.mark.parametrize(
    "options", [{}, dict(causal=False, dropout_p=0.2, dropout_seed=3)], ids=["causal", "both"]
)
@pytest.mark.parametrize(
    "sizes", [dict(L=70, K=150, D=33), dict(L=33, K=200, N=40, D=65)], ids=["full", "clamp"]
)
@pytest.mark.parametrize("backend", each_backend(f64))
def test_gradcheck_across_tiles(backend, sizes, options):
    """Random directions instead of every element."""
    causal = options.get("causal", True)
    if not causal and "N" in sizes:
        options = dict(options, r_zero=20)
    tensors = inputs(B=2, H=2, **sizes, causal=causal, dtype=f64, device=backend.device)
    tensors = tuple(t.requires_grad_() for t in tensors.values())
    assert gradcheck(lambda *a: rel_attention(*a, **options, backend=backend.name), tensors, fast_mode=True)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_one_gradient_is_the_same_as_among_all(backend, dtype, name):
    tensors = inputs(B=2, L=40, K=90, D=24, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    everything = run(backend, tensors, dout)
    alone = {n: t.clone().requires_grad_(n == name) for n, t in tensors.items()}
    rel_attention(*alone.values(), backend=backend.name).backward(dout)
    assert torch.equal(alone[name].grad, everything[f"d{name}"])
    assert all(t.grad is None for n, t in alone.items() if n != name)


@pytest.mark.parametrize("B, N", [(2, 90), (2, 40), (1, 90)], ids=["full", "clamp", "one"])
@pytest.mark.parametrize("frozen", ["r", "bias_u bias_v", "r bias_v", "r bias_u bias_v"])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_frozen_inputs_change_no_other_gradient(backend, dtype, frozen, B, N):
    """What r and the biases do not want is not computed."""
    tensors = inputs(B=B, H=2, L=70, K=90, D=40, N=N, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    everything = run(backend, tensors, dout)
    some = {n: t.clone().requires_grad_(n not in frozen.split()) for n, t in tensors.items()}
    rel_attention(*some.values(), backend=backend.name).backward(dout)
    for name, x in some.items():
        assert x.grad is None if name in frozen.split() else torch.equal(x.grad, everything[f"d{name}"]), name


ACCURACY = [
    (dict(B=1, H=1, L=1, K=1, D=1), {}),
    (dict(B=2, H=3, L=3, K=7, D=2), {}),
    (dict(B=1, H=2, L=113, K=203, D=41), {}),
    (dict(B=2, H=1, L=128, K=217, D=64), {}),
    (dict(B=1, H=2, L=239, K=239, D=33), {}),
    (dict(B=1, H=2, L=1, K=1023, D=64), {}),
    (dict(B=2, H=2, L=64, K=128, D=7), {}),
    (dict(B=1, H=1, L=113, K=203, D=128), dict(causal=False)),
    (dict(B=1, H=2, L=128, K=217, D=80), dict(causal=False, window_size=(40, 70))),
    (dict(B=2, H=1, L=239, K=400, D=16), dict(window_size=(50, 0))),
    (dict(B=1, H=2, L=113, K=600, N=90, D=31), {}),
    (dict(B=1, H=1, L=65, K=129, N=33, D=256), {}),
    (dict(B=1, H=1, L=100, K=203, N=60, D=255), dict(causal=False, r_zero=30)),
    (dict(B=3, H=1, L=50, K=150, D=100), dict(key_range=((30, 150), (0, 117), (101, 90)))),
    (dict(B=1, H=2, L=113, K=203, D=64), dict(dropout_p=0.2, dropout_seed=99)),
    (dict(B=2, H=2, L=97, K=97, D=64, bias=False), {}),
]


@pytest.mark.parametrize("sizes, options", ACCURACY, ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_as_accurate_as_plain_pytorch(backend, dtype, sizes, options):
    tensors = inputs(**sizes, causal=options.get("causal", True), dtype=dtype, device=backend.device)
    check(backend, tensors, **options_on(backend.device, options))


@pytest.mark.parametrize("sizes, options", [case for case in ACCURACY if case[0]["L"] > 60], ids=str)
@pytest.mark.parametrize("backend, dtype", [p for p in each_dtype() if not p.id.endswith("float64")])
def test_at_most_twice_the_error_of_plain_pytorch(backend, dtype, sizes, options):
    """Of a thousand numbers and more, where luck has little part: root mean squares, and no allowance. It has
    some: gradients of few rows of r hang together. So, where that takes no time, for several draws."""
    options = options_on(backend.device, options)
    for seed in range(4 if backend.name == "cpu" else 1):
        tensors = inputs(
            **sizes, causal=options.get("causal", True), dtype=dtype, device=backend.device, seed=seed
        )
        dout = randn_like(tensors["q"], seed=seed + 1)
        exact, rounded = truth(tensors, dout, **options), plain(tensors, dout, **options)
        got = run(backend, tensors, dout, **options)
        names = [name for name in got if got[name].numel() >= 1000]
        assert "out" in names and "dq" in names
        for name in names:
            ours, plains = (
                (x[name].double().cpu() - exact[name]).square().mean().sqrt() for x in (got, rounded)
            )
            assert ours <= 2 * plains, f"{name}, seed {seed}: {ours:.3g}, plain {dtype} makes {plains:.3g}"


@pytest.mark.parametrize("L", [1, 5, 9, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_backward_rebuilds_the_probabilities_of_forward(backend, dtype, L):
    """Of one visible key the probability is 1, so dv is dout and no gradient passes through the score. Were
    the score rounded otherwise than in the lse that forward saved, its probability would not be 1."""
    tensors = inputs(B=2, H=2, L=L, K=90, D=40, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    got = run(backend, tensors, dout, window_size=(0, 0))
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps / 4)
    torch.testing.assert_close(got["dv"][:, :, 90 - L :], dout, rtol=tolerance, atol=0)
    nothing = 1e-13 if dtype == f64 else 1e-5
    for name in ("dq", "dk", "dr", "dbias_u", "dbias_v"):
        assert got[name].abs().max() <= nothing, name


@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_flat_and_sharp_softmax(backend, dtype, scale):
    """Nearly uniform probabilities, and all but one-hot ones (exp of the raw scores overflows)."""
    check(backend, inputs(L=66, K=131, D=48, dtype=dtype, device=backend.device), scale=scale)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_dtypes_and_shapes_of_gradients(backend, dtype):
    tensors = inputs(B=2, H=3, L=4, K=6, N=5, D=7, dtype=dtype, device=backend.device)
    results = run(backend, tensors, randn_like(tensors["q"]))
    for name, t in tensors.items():
        assert results[f"d{name}"].dtype == dtype
        assert results[f"d{name}"].shape == t.shape


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_position_gradient_sums_over_batch(backend, dtype):
    """dr of a batch of equal entries is the batch size times dr of one."""
    one = inputs(B=1, L=9, K=20, D=8, dtype=dtype, device=backend.device)
    dout = randn_like(one["q"])
    two = {n: torch.cat([t, t]) if n in ("q", "k", "v") else t for n, t in one.items()}
    got = run(backend, two, torch.cat([dout, dout]))
    alone = run(backend, one, dout)
    for name in ("dr", "dbias_u", "dbias_v"):
        expected = 2 * alone[name]
        tolerance = 2 * FLOOR[dtype] * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(got[name], expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_lse_has_no_gradient(backend, dtype):
    tensors = inputs(dtype=dtype, device=backend.device)
    tensors = {n: t.requires_grad_() for n, t in tensors.items()}
    out, lse = rel_attention(*tensors.values(), return_lse=True, backend=backend.name)
    assert out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("backend", each_fused())
def test_double_backward_raises(backend):
    tensors = inputs(L=2, K=3, D=2, dtype=backend.dtypes[0], device=backend.device)
    q = tensors["q"].requires_grad_()
    (dq,) = torch.autograd.grad(
        rel_attention(*tensors.values(), backend=backend.name).sum(), q, create_graph=True
    )
    with pytest.raises(RuntimeError, match="double backward is not supported by rel_attention"):
        dq.sum().backward()


@pytest.mark.parametrize("backend", each_backend())
def test_gradients_accumulate(backend):
    """Two uses of the same tensors add up: nothing is kept between calls, nothing overwritten."""
    dtype = backend.dtypes[0]
    tensors = inputs(L=20, K=33, D=8, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    once = run(backend, tensors, dout)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    for _ in range(2):
        rel_attention(*leaves.values(), backend=backend.name).backward(dout)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, 2 * once[f"d{name}"])


@pytest.mark.parametrize("backend", each_backend())
def test_inputs_are_left_alone(backend):
    dtype = backend.dtypes[0]
    tensors = inputs(L=20, K=33, D=8, dtype=dtype, device=backend.device)
    before = {n: t.clone() for n, t in tensors.items()}
    dout = randn_like(tensors["q"])
    run(backend, tensors, dout, dropout_p=0.1, dropout_seed=1)
    assert torch.equal(dout, randn_like(tensors["q"]))
    for name, t in tensors.items():
        assert torch.equal(t, before[name])

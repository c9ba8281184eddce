"""Dropout: every backend drops what the definition says, backward replays it, torch.manual_seed governs."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import (
    INTERPRET,
    allowed,
    assert_same_bits,
    check,
    each_backend,
    each_dtype,
    inputs,
    key_range,
    randn_like,
    run,
)

from txl_kernels import philox, rel_attention

SEEDS = [0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)]


def keep_mask(seed, B, H, L, K, p):
    return philox.keep_mask(torch.tensor([seed]), p, B, H, L, K, "cpu")


def probabilities(backend, tensors, **options):
    """The probabilities after dropout [B, H, L, K], by columns of the identity as values."""
    K, D = tensors["k"].shape[2:]
    blocks = []
    for start in range(0, K, D):
        v = torch.zeros_like(tensors["v"])
        width = min(D, K - start)
        v[:, :, start : start + width, :width] = torch.eye(width, dtype=v.dtype, device=v.device)
        blocks.append(run(backend, dict(tensors, v=v), **options)["out"][..., :width])
    return torch.cat(blocks, dim=-1)


@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=False), dict(window_size=(90, 0)), dict(causal=False, window_size=(20, 40))],
    ids=str,
)
@pytest.mark.parametrize("L", [1, 3, 113])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_mask(backend, dtype, L, options):
    """What is dropped is exactly what Philox says, in every batch entry, head, row and key."""
    B, H, K, p, seed = 2, 2, 203, 0.35, 20190609
    causal = options.get("causal", True)
    tensors = inputs(B=B, H=H, L=L, K=K, D=64, causal=causal, dtype=dtype, device=backend.device, scale=0.3)
    kept = probabilities(backend, tensors, dropout_p=p, dropout_seed=seed, **options) != 0
    assert torch.equal(kept.cpu(), keep_mask(seed, B, H, L, K, p) & allowed(B, L, K, **options))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend", each_backend())
def test_every_bit_of_the_seed(backend, seed):
    tensors = inputs(B=1, H=1, L=30, K=64, D=64, dtype=backend.dtypes[0], device=backend.device, scale=0.3)
    kept = probabilities(backend, tensors, dropout_p=0.5, dropout_seed=seed) != 0
    assert torch.equal(kept.cpu(), keep_mask(seed, 1, 1, 30, 64, 0.5) & allowed(1, 30, 64))


@pytest.mark.parametrize("L", [2, 30])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_values_and_gradients(backend, dtype, L):
    for p in (0.1, 0.5, 0.9):
        tensors = inputs(B=2, H=2, L=L, K=150, D=40, dtype=dtype, device=backend.device)
        check(backend, tensors, dropout_p=p, dropout_seed=77)


@pytest.mark.parametrize("L", [2, 70])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_backward_replays_the_mask(backend, dtype, L):
    """dv = P^T dout: with the identity as dout, the gradient of v is the dropped probabilities themselves."""
    K, p, seed = 150, 0.4, 8
    tensors = inputs(B=2, H=2, L=L, K=K, D=L, dtype=dtype, device=backend.device, scale=0.3)
    eye = torch.eye(L, dtype=dtype, device=backend.device).expand(2, 2, L, L)
    dv = run(backend, tensors, eye, dropout_p=p, dropout_seed=seed)["dv"]  # [B, H, K, L]
    assert torch.equal(dv.mT.cpu() != 0, keep_mask(seed, 2, 2, L, K, p) & allowed(2, L, K))


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_survivors_are_scaled(backend, dtype):
    p = 0.3
    tensors = inputs(B=1, H=2, L=30, K=64, D=64, dtype=dtype, device=backend.device, scale=0.3)
    dropped = probabilities(backend, tensors, dropout_p=p, dropout_seed=4).double()
    whole = probabilities(backend, tensors).double()
    kept = dropped != 0
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - p), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("backend", each_backend())
def test_mean_and_variance(backend, p):
    """Over many seeds: each entry is kept at the rate 1 - p, the mean is the undropped result, the variance
    is p / (1 - p) of the squared probabilities. Bounds of five standard deviations; the seeds are fixed."""
    L, K, seeds = 32, 64, 20 if INTERPRET else 50
    tensors = inputs(B=2, H=2, L=L, K=K, D=64, dtype=backend.dtypes[0], device=backend.device, scale=0.2)
    whole = probabilities(backend, tensors, causal=False, r_zero=60).double()
    samples = torch.stack(
        [
            probabilities(backend, tensors, causal=False, r_zero=60, dropout_p=p, dropout_seed=s).double()
            for s in range(seeds)
        ]
    )
    kept = (samples != 0).double()
    n = kept.numel()
    assert abs(kept.mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dims in [(0, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 4), (0, 1, 2, 3)]:  # per entry, head, row, key
        deviation = (kept.mean(dims) - (1 - p)).abs().max().item()
        assert deviation < 5 * math.sqrt(p * (1 - p) / (n / kept.mean(dims).numel()))
    relative = samples / whole
    assert abs(relative.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / n)
    fourth = (1 - p) * (p / (1 - p)) ** 4 + p
    spread = math.sqrt((fourth - (p / (1 - p)) ** 2) / n)
    assert abs(relative.var().item() - p / (1 - p)) < 5 * spread + 1e-3


@pytest.mark.parametrize("backend", each_backend())
def test_entries_are_independent(backend):
    """No correlation between neighbours along any axis, nor between neighbouring seeds."""
    tensors = inputs(B=4, H=4, L=64, K=64, D=64, dtype=backend.dtypes[0], device=backend.device, scale=0.2)

    def sample(seed):
        options = dict(causal=False, r_zero=60, dropout_p=0.5, dropout_seed=seed)
        return (probabilities(backend, tensors, **options) != 0).double() - 0.5

    def correlation(x, y):
        return abs((x * y).mean().item()) * 4 * math.sqrt(x.numel())  # in standard deviations

    a = sample(1)
    assert correlation(a, sample(2)) < 5
    assert correlation(a, sample(1 + 2**32)) < 5
    for axis in range(4):
        n = a.shape[axis]
        for step in (1, n // 2):
            assert correlation(a.narrow(axis, step, n - step), a.narrow(axis, 0, n - step)) < 5
    assert correlation(a[..., 16:], a[..., :48]) < 5  # the words of one Philox call


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_lse_is_before_dropout(backend, dtype):
    tensors = inputs(B=1, H=2, L=30, K=90, D=24, dtype=dtype, device=backend.device)
    for p in (0.2, 0.95):
        assert torch.equal(
            run(backend, tensors, dropout_p=p, dropout_seed=1)["lse"], run(backend, tensors)["lse"]
        )


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_rate_of_zero_drops_nothing(backend, dtype):
    """Nor does one so small that its threshold is zero."""
    tensors = inputs(B=1, H=2, L=30, K=90, D=24, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    without = run(backend, tensors, dout)
    assert_same_bits(run(backend, tensors, dout, dropout_p=0.0, dropout_seed=5), without)
    tiny = run(backend, tensors, dout, dropout_p=1e-11, dropout_seed=5)
    for name in tiny:
        torch.testing.assert_close(tiny[name], without[name], rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_rows_that_drop_every_key(backend, dtype):
    tensors = inputs(B=1, H=2, L=40, K=50, D=24, dtype=dtype, device=backend.device)
    got = check(backend, tensors, dropout_p=0.999, dropout_seed=5)
    assert ((got["out"] == 0).all(-1)).any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_seed_as_tensor(backend, dtype, seed):
    tensors = inputs(B=1, H=1, L=20, K=33, D=8, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    number = run(backend, tensors, dout, dropout_p=0.4, dropout_seed=seed)
    for shape in [(), (1,)]:
        tensor = torch.full(shape, seed, dtype=torch.int64, device=backend.device)
        assert_same_bits(run(backend, tensors, dout, dropout_p=0.4, dropout_seed=tensor), number)
        assert tensor.item() == seed


@pytest.mark.parametrize("backend", each_backend())
def test_manual_seed_governs(backend):
    tensors = inputs(B=1, H=2, L=30, K=64, D=24, dtype=backend.dtypes[0], device=backend.device)
    dout = randn_like(tensors["q"])
    torch.manual_seed(5)
    first = run(backend, tensors, dout, dropout_p=0.5)
    second = run(backend, tensors, dout, dropout_p=0.5)
    torch.manual_seed(5)
    assert_same_bits(run(backend, tensors, dout, dropout_p=0.5), first)
    assert_same_bits(run(backend, tensors, dout, dropout_p=0.5), second)
    assert not torch.equal(first["out"], second["out"])
    torch.manual_seed(6)
    assert not torch.equal(run(backend, tensors, dout, dropout_p=0.5)["out"], first["out"])


@pytest.mark.parametrize("backend", each_backend())
def test_drawn_seed_is_replayed_by_backward(backend):
    """With no seed given, backward still uses forward's: out is linear in v, so v's gradient tells."""
    L = 40
    tensors = inputs(B=1, H=2, L=L, K=60, D=L, dtype=backend.dtypes[0], device=backend.device, scale=0.3)
    v = tensors["v"].requires_grad_()
    out = rel_attention(*tensors.values(), dropout_p=0.5, backend=backend.name)
    dout = randn_like(out)
    torch.rand(100)  # the generator has moved on
    out.backward(dout)
    inner = (v.grad.double() * v.detach().double()).sum()
    near = max(1e-4, 2 * torch.finfo(v.dtype).eps)  # out and the gradient are rounded
    torch.testing.assert_close(inner, (out.detach().double() * dout.double()).sum(), rtol=near, atol=near)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_with_everything(backend, dtype):
    options = dict(dropout_p=0.25, dropout_seed=-12, window_size=(60, 20), causal=False, r_zero=30, scale=0.2)
    tensors = inputs(B=2, H=2, L=65, K=200, D=41, N=50, dtype=dtype, device=backend.device)
    check(backend, tensors, key_range=key_range((30, 180), (0, 99), device=backend.device), **options)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_through_checkpoint(backend, dtype):
    """torch.utils.checkpoint runs forward again in backward, with the generator wound back: the same mask."""
    tensors = inputs(B=1, H=2, L=30, K=64, D=24, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    torch.manual_seed(9)
    straight = run(backend, tensors, dout, dropout_p=0.5)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    torch.manual_seed(9)
    out = torch.utils.checkpoint.checkpoint(
        lambda *a: rel_attention(*a, dropout_p=0.5, backend=backend.name),
        *leaves.values(),
        use_reentrant=False,
    )
    out.backward(dout)
    assert torch.equal(out, straight["out"])
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, straight[f"d{name}"])


def test_seeds_are_drawn_from_all_that_there_are() -> None:
    seeds = [philox.seed_tensor(None, torch.device("cpu")).item() for _ in range(1000)]
    assert len(set(seeds)) == 1000 and min(seeds) >= 0
    assert max(seeds) > 2**63 - 2**57 and min(seeds) < 2**57

"""Addresses have 64 bits: strides and offsets past 2^31 elements, on storage of which only the pages
where rows lie are ever touched. Poison would touch them all, so it is off."""

from __future__ import annotations

import pytest
import torch
from helpers import Backend, assert_same_bits, bf16, each_fused, f32, inputs, key_range, randn_like, run

from txl_kernels import rel_attention

pytestmark = pytest.mark.unpoisoned

MORE_THAN_31_BITS = 2**31 + 2**12


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def spread(t: torch.Tensor, dim: int, span: int = MORE_THAN_31_BITS) -> torch.Tensor:
    """The same values with one dimension's rows so far apart that its last one lies `span` elements from its
    first, which is more than 2^31. Memory that was never written to takes no room."""
    # Backend "cuda" has a way of its own for rows that begin at multiples of 16 bytes: bfloat16 takes it.
    multiple = 8 if t.dtype == bf16 else 1
    stride = -(-span // (t.shape[dim] - 1) // multiple) * multiple
    storage = torch.empty(stride * t.shape[dim] + t.numel(), dtype=t.dtype, device=t.device)
    strides, step = [0] * t.dim(), 1
    for other in reversed([d for d in range(t.dim()) if d != dim]):
        strides[other] = step
        step *= t.shape[other]
    assert stride >= step
    strides[dim] = stride
    view = storage.as_strided(t.shape, strides)
    view.copy_(t)
    assert sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True)) >= 2**31
    return view


def assert_read_where_it_lies(backend: Backend, t: torch.Tensor) -> None:
    """Backend "triton" copies what its kernels do not take, and a copy has addresses of 31 bits."""
    if backend.name == "triton":
        from txl_kernels.triton import _rows

        assert _rows(t) is t


# Of three entries or heads the stride is a number of 32 bits, in Triton too, and only twice it has more; of
# two the stride itself would have 64. Rows of 16 channels Triton takes wherever they begin.
SIZES = dict(B=3, H=3, L=20, K=70, D=16)
DECODE = dict(B=3, H=3, L=2, K=150, D=16)
PLACES = [
    *((name, dim) for name in ("q", "k", "v", "dout") for dim in (0, 1, 2)),
    ("r", 0),
    ("r", 1),
    ("bias_u", 0),
    ("bias_v", 0),
]


@pytest.mark.parametrize("name, dim", PLACES)
@pytest.mark.parametrize("sizes", [SIZES, DECODE], ids=["tiles", "decode"])
@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("backend", each_fused())
def test_one_dimension_spread_out(backend, dtype, sizes, name, dim):
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype} here")
    tensors = inputs(**sizes, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    expected = run(backend, tensors, dout)
    far = spread(dict(tensors, dout=dout)[name], dim)
    if dim < far.dim() - 2:  # rows themselves may be too far apart for 32-bit offsets within a tile
        assert_read_where_it_lies(backend, far)
    got = run(backend, tensors, far) if name == "dout" else run(backend, dict(tensors, **{name: far}), dout)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "r", "dout"])
@pytest.mark.parametrize("backend", each_fused())
def test_many_rows_of_few_channels_spread_out(backend, name):
    """Of 256 rows none is so far from the next one that a kernel with tiles of 128 would need a copy, and the
    last ones' tiles, of 64 too, begin more than 2^31 elements from the first."""
    # The last row of r stands for many distances, for which it is read alone. Without biases q itself is read
    # by all kernels, not its sums with them, whose rows are neighbours.
    options = dict(causal=False, r_zero=300)
    tensors = inputs(B=1, H=1, L=256, K=256, N=256, D=16, bias=False, device=backend.device)
    dout = randn_like(tensors["q"])
    expected = run(backend, tensors, dout, **options)
    near = dict(tensors, dout=dout)[name]
    far = spread(near, near.dim() - 2, span=3 * 2**30)
    assert 192 * far.stride(-2) > 2**31
    assert_read_where_it_lies(backend, far)
    if name == "dout":
        got = run(backend, tensors, far, **options)
    else:
        got = run(backend, dict(tensors, **{name: far}), dout, **options)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize("backend", each_fused())
def test_offset_into_a_large_storage(backend, dtype):
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype} here")
    tensors = inputs(**SIZES, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    expected = run(backend, tensors, dout)

    def far(t):
        storage = torch.empty(MORE_THAN_31_BITS + t.numel(), dtype=t.dtype, device=t.device)
        view = storage[MORE_THAN_31_BITS:].view(t.shape)
        view.copy_(t)
        return view

    assert_same_bits(run(backend, {n: far(t) for n, t in tensors.items()}, far(dout)), expected)


@pytest.mark.parametrize("L", [1, 20])
@pytest.mark.parametrize("backend", each_fused(bf16))
def test_more_than_31_bits_of_keys_in_one_tensor(backend, L):
    """A memory of 2^31 elements of which the key range lets one stretch, at its far end, be seen."""
    D = 256
    K = MORE_THAN_31_BITS // D
    near = inputs(B=1, H=1, L=L, K=100, D=D, N=70, dtype=bf16, device=backend.device)
    far = dict(near)
    for name in ("k", "v"):
        storage = torch.empty(1, 1, K, D, dtype=bf16, device=backend.device)
        storage[:, :, K - 100 :] = near[name]
        far[name] = storage
    expected = run(backend, near)
    got = run(backend, far, key_range=key_range((K - 100, K), device=backend.device))
    eps = torch.finfo(bf16).eps
    torch.testing.assert_close(got["out"], expected["out"], rtol=2 * eps, atol=2 * eps)
    torch.testing.assert_close(got["lse"], expected["lse"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("backend", each_fused(bf16))
def test_more_than_31_bits_of_results(backend):
    """out, dq, dk, dv of 2^31 elements each: the inputs are expanded, the results are not."""
    if backend.device == "cpu" and available_memory() < 20 * 2**30:
        pytest.skip("needs 20 GB of free memory")
    B, H, L, D = 2**15 + 8, 4, 64, 256
    assert B * H * L * D > 2**31
    small = inputs(B=1, H=H, L=L, K=L, D=D, dtype=bf16, device=backend.device)
    tensors = {n: t.expand(B, *t.shape[1:]) if n in ("q", "k", "v") else t for n, t in small.items()}
    v = tensors["v"].detach().requires_grad_()
    out = rel_attention(**{**tensors, "v": v}, window_size=(0, 0), backend=backend.name)
    for entries in (slice(0, 2), slice(B // 2, B // 2 + 2), slice(B - 2, B)):
        assert torch.equal(out[entries], v[entries])  # one visible key: its value
    (dv,) = torch.autograd.grad(out, v, tensors["q"])
    for entries in (slice(0, 2), slice(B // 2, B // 2 + 2), slice(B - 2, B)):
        assert torch.equal(dv[entries], tensors["q"][entries])  # its probability is 1: dv = dout

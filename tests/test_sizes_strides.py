"""Layouts: transposed, sliced, strided, expanded, empty tensors, and gradients that arrive in any layout."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EMULATED,
    INTERPRET,
    TENSORS,
    assert_same,
    check,
    each_backend,
    each_dtype,
    each_fused,
    inputs,
    inside_larger,
    randn_like,
    run,
)

from txl_kernels import rel_attention

# Triton's interpreter is slow.
SIZES = dict(B=2 if INTERPRET else 3, H=2, L=37, K=101, D=24)
DECODE = dict(SIZES, L=2, K=101 if INTERPRET else 301)


def transposed(t):
    """[B, L, H, D] (and [N, H, D]) in memory, as projections leave it; biases by columns."""
    dims = (-3, -2) if t.dim() > 2 else (0, 1)
    return t.transpose(*dims).contiguous().transpose(*dims)


def reversed_dimensions(t):
    """Every stride in the opposite order: the last dimension is the slowest."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def every_other(t):
    """The last dimension with stride 2, NaN in between."""
    larger = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    view = larger[..., ::2]
    view.copy_(t)
    return view


def one_projection(t):
    """A slice of a wider last dimension, as q, k, v are of one projection."""
    wide = torch.full((*t.shape[:-1], 3 * t.shape[-1]), torch.nan, dtype=t.dtype, device=t.device)
    view = wide[..., t.shape[-1] : 2 * t.shape[-1]]
    view.copy_(t)
    return view


def off_by_one_element(t):
    """Contiguous, but no longer aligned to a vector."""
    flat = torch.full((t.numel() + 1,), torch.nan, dtype=t.dtype, device=t.device)
    view = flat[1:].view(t.shape)
    view.copy_(t)
    return view


LAYOUTS = [transposed, reversed_dimensions, every_other, one_projection, inside_larger, off_by_one_element]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [SIZES, DECODE, dict(SIZES, D=1), dict(SIZES, N=30)], ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_layout_does_not_matter(backend, dtype, sizes, layout):
    """Same bits as contiguous inputs: everything in that layout, then dout alone, then each input alone, or,
    in Triton's interpreter and the CUDA emulation, which are slow, each input in a layout of its own."""
    tensors = inputs(**sizes, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    contiguous = run(backend, tensors, dout)
    strided = {n: layout(t) for n, t in tensors.items()}
    assert all(torch.equal(strided[n], tensors[n]) for n in tensors)
    assert_same(backend, run(backend, strided, layout(dout)), contiguous)
    assert_same(backend, run(backend, tensors, layout(dout)), contiguous)
    if INTERPRET or EMULATED:
        layouts = LAYOUTS[LAYOUTS.index(layout) :] + LAYOUTS[: LAYOUTS.index(layout)]
        mixed = {name: other(tensors[name]) for name, other in zip(TENSORS, layouts, strict=True)}
        assert_same(backend, run(backend, mixed, dout), contiguous)
        return
    for name in TENSORS:
        assert_same(backend, run(backend, dict(tensors, **{name: strided[name]}), dout), contiguous)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_expanded_batch_and_heads(backend, dtype):
    """Stride 0: one key sequence for the whole batch, one r and one bias for all heads."""
    tensors = inputs(**SIZES, dtype=dtype, device=backend.device)
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name][:1, :1].expand(*tensors[name].shape)
    for name in ("r", "bias_u", "bias_v"):
        tensors[name] = tensors[name][:1].expand(*tensors[name].shape)
    dout = randn_like(tensors["q"])
    assert_same(
        backend,
        run(backend, tensors, dout),
        run(backend, {n: t.contiguous() for n, t in tensors.items()}, dout),
    )


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_expanded_leaf_collects_its_gradient(backend, dtype):
    tensors = inputs(**SIZES, dtype=dtype, device=backend.device)
    dout = randn_like(tensors["q"])
    one = tensors["k"][:1].clone().requires_grad_()
    out = rel_attention(**dict(tensors, k=one.expand(SIZES["B"], -1, -1, -1)), backend=backend.name)
    out.backward(dout)
    every = run(backend, dict(tensors, k=one.detach().expand(SIZES["B"], -1, -1, -1)), dout)["dk"]
    torch.testing.assert_close(one.grad, every.sum(0, keepdim=True))


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_overlapping_memory(backend, dtype):
    """Keys as a window that slides over one buffer: rows of different batch entries share storage."""
    B, K = SIZES["B"], SIZES["K"]
    tensors = inputs(**SIZES, dtype=dtype, device=backend.device)
    for name in ("k", "v"):
        buffer = randn_like(tensors[name][0, :, :1].expand(-1, K + B - 1, -1), seed=3)  # [H, K+B-1, D]
        tensors[name] = buffer.unfold(1, K, 1).permute(1, 0, 3, 2)  # [B, H, K, D]
        assert tensors[name].shape == (B, SIZES["H"], K, SIZES["D"]) and tensors[name].stride(-1) == 1
        assert tensors[name].stride(0) == tensors[name].stride(2)
    dout = randn_like(tensors["q"])
    assert_same(
        backend,
        run(backend, tensors, dout),
        run(backend, {n: t.contiguous() for n, t in tensors.items()}, dout),
    )


@pytest.mark.parametrize("sizes", [SIZES, DECODE], ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_gradient_with_stride_zero(backend, dtype, sizes):
    """out.sum().backward() sends one number expanded; a mean over rows sends rows expanded."""
    tensors = inputs(**sizes, dtype=dtype, device=backend.device)
    for dout in (
        torch.ones((), dtype=dtype, device=backend.device).expand(tensors["q"].shape),
        randn_like(tensors["q"][:, :, :1]).expand(tensors["q"].shape),
        randn_like(tensors["q"][:1]).expand(tensors["q"].shape),
        randn_like(tensors["q"][..., :1]).expand(tensors["q"].shape),
    ):
        assert 0 in dout.stride()
        assert_same(backend, run(backend, tensors, dout), run(backend, tensors, dout.contiguous()))


@pytest.mark.parametrize("backend", each_backend())
def test_sum_backward(backend):
    tensors = inputs(**SIZES, dtype=backend.dtypes[0], device=backend.device)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    rel_attention(*leaves.values(), backend=backend.name).sum().backward()
    expected = run(backend, tensors, torch.ones_like(tensors["q"]))
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[f"d{name}"])


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_projections_as_in_a_model(backend, dtype):
    """q, k, v from one projection by chunk and transpose, the output reshaped: as the model calls it."""
    B, H, L, K, D = 2, 2, 20, 50, 16
    heads = randn_like(torch.empty(B, K, 3 * H * D, dtype=dtype, device=backend.device)).requires_grad_()
    other = inputs(B=B, H=H, L=L, K=K, D=D, dtype=dtype, device=backend.device)

    def model(heads, contiguous):
        q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in heads.chunk(3, dim=-1))
        q = q[:, :, K - L :]
        if contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = rel_attention(q, k, v, other["r"], other["bias_u"], other["bias_v"], backend=backend.name)
        return out.transpose(1, 2).reshape(B, L, H * D)

    dout = randn_like(torch.empty(B, L, H * D, dtype=dtype, device=backend.device))
    results = []
    for contiguous in (False, True):
        out = model(heads, contiguous)
        (gradient,) = torch.autograd.grad(out, heads, dout)
        results.append({"out": out, "gradient": gradient})
    assert_same(backend, *results)


@pytest.mark.parametrize("layout", [lambda t: t, transposed], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("backend", each_fused())
def test_out_has_the_layout_of_q(backend, layout):
    """So that the reshape to [B, L, H * D] after it copies nothing."""
    tensors = inputs(**SIZES, dtype=backend.dtypes[0], device=backend.device)
    q = layout(tensors["q"])
    out = rel_attention(**dict(tensors, q=q), backend=backend.name)
    assert out.stride() == q.stride()


@pytest.mark.parametrize(
    "sizes", [dict(B=0), dict(H=0), dict(B=0, H=0), dict(B=0, L=1), dict(L=0), dict(L=0, K=0, N=3)], ids=str
)
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_empty(backend, dtype, sizes):
    """No entries, heads or queries: empty results, and gradients of zero for what is left."""
    tensors = inputs(**{**SIZES, **sizes}, dtype=dtype, device=backend.device)
    got = run(backend, tensors, randn_like(tensors["q"]), dropout_p=0.1, dropout_seed=1)
    assert got["out"].shape == tensors["q"].shape and got["out"].dtype == dtype
    assert got["lse"].shape == tensors["q"].shape[:-1]
    for name, t in tensors.items():
        assert got[f"d{name}"].shape == t.shape
        assert (got[f"d{name}"] == 0).all()


@pytest.mark.parametrize("extent", [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_around_tiles(backend, dtype, extent):
    """Each extent next to a multiple of a vector or a tile: queries, keys, rows of r."""
    for L, K, N in [(extent, extent, None), (5, extent + 5, None), (extent, 200, None), (40, 200, extent)]:
        tensors = inputs(B=1, H=1, L=L, K=K, D=20, N=N, dtype=dtype, device=backend.device)
        check(backend, tensors)

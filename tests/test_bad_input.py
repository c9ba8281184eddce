"""Bad input is refused before any kernel runs; each message names the argument, what it got and needs."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import each_backend, inputs

from txl_kernels import BackendUnavailable, registry, rel_attention

B, H, L, K, N, D = 2, 3, 4, 7, 7, 8


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


# (arguments that replace good ones, error, what the message must hold: argument, got, needed)
SHAPES = [
    (dict(q=tensor(H, L, D)), ValueError, ["q:", "[3, 4, 8]", "[B, H, L, D]"]),
    (dict(q=tensor(1, B, H, L, D)), ValueError, ["q:", "[1, 2, 3, 4, 8]", "[B, H, L, D]"]),
    (dict(q=tensor(B, H, L, 257)), ValueError, ["q:", "257", "256"]),
    (dict(q=tensor(B, H, L, 0)), ValueError, ["q:", "D = 0", "256"]),
    (dict(q=tensor(B, H, K + 1, D)), ValueError, ["k:", "K = 7", "L = 8"]),
    (dict(k=tensor(B, H, K)), ValueError, ["k:", "[2, 3, 7]", "[2, 3, K, 8]"]),
    (dict(k=tensor(1, H, K, D)), ValueError, ["k:", "[1, 3, 7, 8]", "[2, 3, K, 8]"]),  # no broadcasting
    (dict(k=tensor(B, 1, K, D)), ValueError, ["k:", "[2, 1, 7, 8]", "[2, 3, K, 8]"]),
    (dict(k=tensor(B, H, K, D + 1)), ValueError, ["k:", "[2, 3, 7, 9]", "[2, 3, K, 8]"]),
    (dict(k=tensor(B, H, L - 1, D), v=tensor(B, H, L - 1, D)), ValueError, ["k:", "K = 3", "L = 4"]),
    (dict(v=tensor(B, H, K - 1, D)), ValueError, ["v:", "[2, 3, 6, 8]", "[2, 3, 7, 8]"]),
    (dict(v=tensor(B, H, K, D + 1)), ValueError, ["v:", "[2, 3, 7, 9]", "[2, 3, 7, 8]"]),
    (dict(v=tensor(H, K, D)), ValueError, ["v:", "[3, 7, 8]", "[2, 3, 7, 8]"]),
    (dict(r=tensor(N, D)), ValueError, ["r:", "[7, 8]", "[3, N, 8]"]),
    (dict(r=tensor(B, H, N, D)), ValueError, ["r:", "[2, 3, 7, 8]", "[3, N, 8]"]),
    (dict(r=tensor(1, N, D)), ValueError, ["r:", "[1, 7, 8]", "[3, N, 8]"]),
    (dict(r=tensor(H, N, D - 1)), ValueError, ["r:", "[3, 7, 7]", "[3, N, 8]"]),
    (  # all as [B, L, H, D]
        dict(q=tensor(B, L, H, D), k=tensor(B, L, H, D), v=tensor(B, L, H, D)),
        ValueError,
        ["r:", "[3, 7, 8]", "[H, N, D] = [4, N, 8]", "q is [B, H, L, D] = [2, 4, 3, 8]"],
    ),
    (dict(r=tensor(H, 0, D)), ValueError, ["r:", "[3, 0, 8]", "N >= 1"]),
    (dict(bias_u=tensor(D)), ValueError, ["bias_u:", "[8]", "[3, 8]"]),
    (dict(bias_u=tensor(H, D + 1)), ValueError, ["bias_u:", "[3, 9]", "[3, 8]"]),
    (dict(bias_u=tensor(H, 1, D)), ValueError, ["bias_u:", "[3, 1, 8]", "[3, 8]"]),
    (dict(bias_v=tensor(1, D)), ValueError, ["bias_v:", "[1, 8]", "[3, 8]"]),
    (dict(key_range=tensor(B, 3, dtype=torch.int32)), ValueError, ["key_range:", "[2, 3]", "[2, 2]"]),
    (dict(key_range=tensor(2, dtype=torch.int32)), ValueError, ["key_range:", "[2]", "[2, 2]"]),
    (dict(key_range=tensor(B + 1, 2, dtype=torch.int32)), ValueError, ["key_range:", "[3, 2]", "[2, 2]"]),
]

DTYPES = [
    (dict(q=tensor(B, H, L, D, dtype=torch.int32)), TypeError, ["q:", "torch.int32", "torch.float32"]),
    (
        dict(q=tensor(B, H, L, D, dtype=torch.complex64)),
        TypeError,
        ["q:", "torch.complex64", "torch.float32"],
    ),
    (dict(q=tensor(B, H, L, D, dtype=torch.float16)), TypeError, ["q:", "torch.float16", "torch.bfloat16"]),
    (dict(q=tensor(B, H, L, D, dtype=torch.bfloat16)), TypeError, ["k:", "torch.float32", "torch.bfloat16"]),
    (dict(k=tensor(B, H, K, D, dtype=torch.float64)), TypeError, ["k:", "torch.float64", "torch.float32"]),
    (dict(v=tensor(B, H, K, D, dtype=torch.bfloat16)), TypeError, ["v:", "torch.bfloat16", "torch.float32"]),
    (dict(r=tensor(H, N, D, dtype=torch.float64)), TypeError, ["r:", "torch.float64", "torch.float32"]),
    (
        dict(bias_u=tensor(H, D, dtype=torch.float64)),
        TypeError,
        ["bias_u:", "torch.float64", "q's dtype, torch.float32"],
    ),
    (dict(bias_v=tensor(H, D, dtype=torch.int64)), TypeError, ["bias_v:", "torch.int64", "torch.float32"]),
    (
        dict(key_range=tensor(B, 2, dtype=torch.int64)),
        TypeError,
        ["key_range:", "torch.int64", "torch.int32"],
    ),
    (dict(key_range=tensor(B, 2)), TypeError, ["key_range:", "torch.float32", "torch.int32"]),
]

KINDS = [
    (dict(q=None), TypeError, ["q:", "None", "tensor"]),
    (dict(q=[[1.0]]), TypeError, ["q:", "list", "tensor"]),
    (dict(k="k"), TypeError, ["k:", "str", "tensor"]),
    (dict(v=3.0), TypeError, ["v:", "float", "tensor"]),
    (dict(r=None), TypeError, ["r:", "None", "tensor"]),
    (dict(bias_u=0.0), TypeError, ["bias_u:", "float", "tensor or None"]),
    (dict(bias_v=[0.0]), TypeError, ["bias_v:", "list", "tensor or None"]),
    (dict(key_range=(0, 7)), TypeError, ["key_range:", "tuple", "tensor or None"]),
    (dict(q=tensor(B, H, L, D).to_sparse()), TypeError, ["q:", "torch.sparse_coo", "dense"]),
    (dict(k=tensor(B, H, K, D).to_sparse()), TypeError, ["k:", "torch.sparse_coo", "dense"]),
    (dict(v=tensor(B, H, K, D).to_mkldnn()), TypeError, ["v:", "torch._mkldnn", "dense"]),
    (dict(bias_u=tensor(H, D).to_sparse()), TypeError, ["bias_u:", "torch.sparse_coo", "dense"]),
    (dict(key_range=tensor(B, 2, dtype=torch.int32).to_sparse()), TypeError, ["key_range:", "dense"]),
    (dict(dropout_seed=tensor(1, dtype=torch.int64).to_sparse()), TypeError, ["dropout_seed:", "dense"]),
]

DEVICES = [
    (dict(k=tensor(B, H, K, D, device="meta")), ValueError, ["k:", "meta", "cpu"]),
    (dict(v=tensor(B, H, K, D, device="meta")), ValueError, ["v:", "meta", "cpu"]),
    (dict(r=tensor(H, N, D, device="meta")), ValueError, ["r:", "meta", "cpu"]),
    (dict(bias_u=tensor(H, D, device="meta")), ValueError, ["bias_u:", "meta", "cpu"]),
    (dict(bias_v=tensor(H, D, device="meta")), ValueError, ["bias_v:", "meta", "cpu"]),
    (
        dict(key_range=tensor(B, 2, dtype=torch.int32, device="meta")),
        ValueError,
        ["key_range:", "meta", "cpu"],
    ),
    (
        dict(dropout_p=0.1, dropout_seed=tensor(1, dtype=torch.int64, device="meta")),
        ValueError,
        ["dropout_seed:", "meta", "cpu"],
    ),
]

OPTIONS = [
    (dict(return_lse=1), TypeError, ["return_lse:", "1", "True or False"]),
    (dict(return_lse=None), TypeError, ["return_lse:", "None", "True or False"]),
    (dict(causal=1), TypeError, ["causal:", "1", "True or False"]),
    (dict(causal=None), TypeError, ["causal:", "None", "True or False"]),
    (dict(window_size=5), TypeError, ["window_size:", "5", "(left, right)"]),
    (dict(window_size=(5,)), TypeError, ["window_size:", "(5,)", "(left, right)"]),
    (dict(window_size=(1, 2, 3)), TypeError, ["window_size:", "(1, 2, 3)", "(left, right)"]),
    (dict(window_size=(1.0, 0)), TypeError, ["window_size:", "(1.0, 0)", "(left, right)"]),
    (dict(window_size=None), TypeError, ["window_size:", "None", "(left, right)"]),
    (dict(window_size=(-2, 0)), ValueError, ["window_size:", "(-2, 0)", "-1 for no limit"]),
    (dict(window_size=(0, -3)), ValueError, ["window_size:", "(0, -3)", "-1 for no limit"]),
    (dict(window_size=(2**63, 0)), ValueError, ["window_size:", str(2**63), "2**62"]),
    (dict(r_zero=1.0), TypeError, ["r_zero:", "1.0", "int or None"]),
    (dict(r_zero="last"), TypeError, ["r_zero:", "'last'", "int or None"]),
    (dict(r_zero=2**63), ValueError, ["r_zero:", str(2**63), "2**62"]),
    (dict(scale="small"), TypeError, ["scale:", "'small'", "float or None"]),
    (dict(scale=tensor(1)), TypeError, ["scale:", "Tensor", "float or None"]),
    (dict(scale=math.nan), ValueError, ["scale:", "nan", "finite"]),
    (dict(scale=-math.inf), ValueError, ["scale:", "-inf", "finite"]),
    (dict(scale=10**400), ValueError, ["scale:", "1000", "finite"]),
    (dict(dropout_p=1.0), ValueError, ["dropout_p:", "1.0", "0 <= dropout_p < 1"]),
    (dict(dropout_p=-0.1), ValueError, ["dropout_p:", "-0.1", "0 <= dropout_p < 1"]),
    (dict(dropout_p=math.nan), ValueError, ["dropout_p:", "nan", "0 <= dropout_p < 1"]),
    (dict(dropout_p="0.1"), TypeError, ["dropout_p:", "'0.1'", "float"]),
    (dict(dropout_p=None), TypeError, ["dropout_p:", "None", "float"]),
    (dict(dropout_p=0.1, dropout_seed=1.0), TypeError, ["dropout_seed:", "1.0", "int"]),
    (dict(dropout_p=0.1, dropout_seed=2**64), ValueError, ["dropout_seed:", str(2**64), "64 bits"]),
    (dict(dropout_p=0.1, dropout_seed=-(2**63) - 1), ValueError, ["dropout_seed:", "64 bits"]),
    (
        dict(dropout_p=0.1, dropout_seed=tensor(1)),
        TypeError,
        ["dropout_seed:", "torch.float32", "torch.int64"],
    ),
    (
        dict(dropout_p=0.1, dropout_seed=tensor(2, dtype=torch.int64)),
        ValueError,
        ["dropout_seed:", "[2]", "one element"],
    ),
    (dict(dropout_seed="x"), TypeError, ["dropout_seed:", "'x'", "int"]),  # also where nothing is dropped
    (dict(backend="gpu"), ValueError, ["backend:", "'gpu'", "'cpu'", "'reference'"]),
    (dict(backend=""), ValueError, ["backend:", "''", "'cpu'"]),
]


def named(case):
    return pytest.param(*case, id="".join(case[2][:2]))


@pytest.mark.parametrize("bad, error, words", list(map(named, SHAPES + DTYPES + KINDS + DEVICES + OPTIONS)))
@pytest.mark.parametrize("backend", [None, "reference"])
def test_message(backend, bad, error, words, monkeypatch):
    def no_kernel(*args, **kwargs):
        raise AssertionError("a kernel ran")

    monkeypatch.setattr("txl_kernels.ops.rel_attention", no_kernel)
    monkeypatch.setattr("txl_kernels.reference.reference", no_kernel)
    if backend == "reference" and "torch.float16" in words:
        pytest.skip("the reference has float16")
    good = inputs(B=B, H=H, L=L, K=K, D=D)
    with pytest.raises(error) as caught:
        rel_attention(**{"backend": backend, **good, **bad})
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"


def test_good_input_is_not_refused():
    """The arguments that the cases above spoil, unspoilt."""
    rel_attention(**inputs(B=B, H=H, L=L, K=K, D=D), dropout_p=0.1, dropout_seed=2**64 - 1)


@pytest.mark.parametrize("backend", each_backend())
def test_seeds_are_64_bits_signed_or_not(backend):
    tensors = inputs(L=20, K=30, dtype=backend.dtypes[0], device=backend.device)
    signed = rel_attention(**tensors, dropout_p=0.5, dropout_seed=-1, backend=backend.name)
    unsigned = rel_attention(**tensors, dropout_p=0.5, dropout_seed=2**64 - 1, backend=backend.name)
    assert torch.equal(signed, unsigned)


def test_whose_need_a_dtype_is():
    """It is fine for another backend, or autocast has made it of the user's."""
    q = tensor(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"q: got torch\.float64 on cpu, backend 'triton' needs one of"):
        rel_attention(q.double(), q.double(), q.double(), q[0].double(), backend="triton")
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(TypeError, match=r"torch\.float32, cast to torch\.float16 by autocast, on cpu"),
    ):
        rel_attention(q, q, q, q[0])


def test_tensors_a_backend_has_no_kernel_for():
    """The dtype is fine elsewhere, the device is not the backend's: says which backend and what it needs."""
    with pytest.raises(BackendUnavailable, match=r"(?s)'cpu'.*CPU.*cuda"):
        registry.choose("cpu", torch.device("cuda"), torch.float32, 4)


def test_cpu_backend_has_no_float16():
    q = tensor(1, 1, 2, 4, dtype=torch.float16)
    with pytest.raises((TypeError, BackendUnavailable), match=r"(?s)torch\.float16.*torch\.bfloat16"):
        rel_attention(q, q, q, q[0], backend="cpu")


def test_unknown_argument():
    q = tensor(1, 1, 2, 4)
    with pytest.raises(TypeError, match="window"):
        rel_attention(q, q, q, q[0], window=(1, 0))
    with pytest.raises(TypeError, match="positional"):
        rel_attention(q, q, q, q[0], None, None, True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_autocast_makes_no_numbers_of_integers(dtype: torch.dtype) -> None:
    tensors = inputs(L=4, K=7, D=8)
    for name in ("q", "bias_u"):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(TypeError, match=rf"{name}: got {dtype}"),
        ):
            rel_attention(**{**tensors, name: tensors[name].to(dtype)})


@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_largest_offsets(backend: str | None) -> None:
    """Beyond them positions would leave 64 bits."""
    tensors, most = inputs(L=4, K=7, D=8), 2**62 - 1
    unlimited = rel_attention(**tensors, backend=backend)
    window = (most, most)
    assert torch.equal(rel_attention(**tensors, window_size=window, backend=backend), unlimited)
    furthest = {**tensors, "r": tensors["r"][:, :1]}
    assert torch.allclose(
        rel_attention(**tensors, r_zero=-most, backend=backend), rel_attention(**furthest, backend=backend)
    )
    for options in (dict(window_size=(most + 1, 0)), dict(window_size=(0, most + 1)), dict(r_zero=most + 1)):
        with pytest.raises(ValueError, match=str(2**62)):
            rel_attention(**tensors, **options, backend=backend)
    with pytest.raises(ValueError, match=str(2**62)):
        rel_attention(**tensors, r_zero=-most - 1, backend=backend)


def test_only_a_device_without_backends_is_said_to_have_none() -> None:
    with pytest.raises(BackendUnavailable, match="no backend has kernels for tensors on xpu"):
        registry.choose(None, torch.device("xpu"), torch.float32, 4)
    with pytest.raises(BackendUnavailable, match="needs tensors on the CPU") as caught:
        registry.choose("cpu", torch.device("cuda"), torch.float32, 4)
    assert "no backend has kernels" not in str(caught.value)

"""out and lse at every dtype, over sizes that no tile divides and head dimensions from 1 to 256."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import INTERPRET, TENSORS, assert_value, check, each_backend, each_dtype, inputs, run

from txl_kernels import rel_attention

HEADS = (1, 2, 3, 7, 16, 31, 33, 41, 64, 80, 100, 128, 255, 256)
LENGTHS = [(1, 1), (3, 7), (64, 64), (113, 203), (128, 217), (239, 239), (1, 1023), (40, 1500)]
FEW = 1 if INTERPRET else 2  # entries of the batch: Triton's interpreter is slow


@pytest.mark.parametrize("D", HEADS)
@pytest.mark.parametrize("L, K", [(3, 7), (113, 203)])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_head_dimensions(backend, dtype, L, K, D):
    check(backend, inputs(B=1, H=2, L=L, K=K, D=D, dtype=dtype, device=backend.device), backward=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("D", [41, 64])
@pytest.mark.parametrize("L, K", LENGTHS)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_lengths(backend, dtype, L, K, D, causal):
    tensors = inputs(B=2, H=2, L=L, K=K, D=D, causal=causal, dtype=dtype, device=backend.device)
    check(backend, tensors, backward=False, causal=causal)


@pytest.mark.parametrize("L", range(1, 10))
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_decode(backend, dtype, L):
    """Few queries over a long memory: another shape of work, with its own kernel."""
    tensors = inputs(B=FEW, H=2, L=L, K=2111, D=64, dtype=dtype, device=backend.device)
    check(backend, tensors, backward=L in (1, 5))


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=False),
        dict(window_size=(700, 0)),
        dict(N=1001),
        dict(N=40, r_zero=20, causal=False),
        dict(dropout_p=0.3, dropout_seed=5),
        dict(bias=False, D=41),
    ],
    ids=str,
)
@pytest.mark.parametrize("L", [1, 3])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_decode_with_options(backend, dtype, L, options):
    options = dict(options)
    sizes = {n: options.pop(n) for n in ("N", "bias", "D") if n in options}
    causal = options.get("causal", True)
    sizes = dict(dict(B=FEW, H=2, L=L, K=1511, D=64), **sizes)
    check(backend, inputs(**sizes, causal=causal, dtype=dtype, device=backend.device), **options)


@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_many_heads_and_entries(backend, dtype):
    check(backend, inputs(B=5, H=7, L=17, K=33, D=16, dtype=dtype, device=backend.device), backward=False)


@pytest.mark.parametrize("scale", [None, 1.0, 0.125, -0.5, 0.0])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_scale(backend, dtype, scale):
    check(backend, inputs(L=20, K=41, D=9, dtype=dtype, device=backend.device), backward=False, scale=scale)


@pytest.mark.parametrize("scale, of_inputs", [(0.0, 1e14), (1e-33, 1e16), (-1e-33, 1e16)])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_scale_of_huge_scores(backend, dtype, scale, of_inputs):
    """Scores of 1e28 and more before the scale, which leaves nothing of them, or some 1."""
    if dtype == torch.float16:
        pytest.skip("float16 has no such numbers")
    tensors = inputs(L=20, K=41, D=9, dtype=dtype, device=backend.device, scale=of_inputs)
    check(backend, tensors, backward=False, scale=scale)


@pytest.mark.parametrize("K", [150, 601])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_scores_far_from_zero(backend, dtype, K):
    """Softmax is unmoved by a constant added to all scores of a row, also where exp of them overflows."""
    tensors = inputs(B=1, H=1, L=3, K=K, D=4, dtype=dtype, device=backend.device)
    for height in (-2000.0, 2000.0):
        tensors["q"] = torch.zeros_like(tensors["q"])
        tensors["q"][..., 0] = height
        tensors["bias_u"], tensors["bias_v"] = None, None
        tensors["r"] = torch.zeros_like(tensors["r"])
        tensors["k"] = torch.zeros_like(tensors["k"])
        tensors["k"][..., 0] = 1.0
        got = run(backend, tensors, causal=False, scale=1.0, r_zero=0)
        mean = tensors["v"].double().mean(2, keepdim=True).expand_as(got["out"])
        torch.testing.assert_close(got["out"].double(), mean, rtol=0, atol=3 * torch.finfo(dtype).eps)
        torch.testing.assert_close(got["lse"], torch.full_like(got["lse"], height + math.log(K)))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 5}], ids=["", "dropout"])
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_later_keys_outweigh_all_before(backend, dtype, options):
    """exp of a score over the largest before overflows, within a chunk of keys and in the next."""
    tensors = inputs(B=1, H=1, L=300, K=1200, D=4, dtype=dtype, device=backend.device, bias=False)
    tensors["q"] = torch.zeros_like(tensors["q"])
    tensors["q"][..., 0] = 1.0
    tensors["r"] = torch.zeros_like(tensors["r"])
    for key, height in {70: 30, 200: 100, 201: 101, 410: 300, 950: 500, 1000: 502, 1150: 600}.items():
        tensors["k"][:, :, key, 0] = height
    check(backend, tensors, backward=False, scale=1.0, **options)


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_one_key_gives_its_value(backend, dtype):
    """A query that sees one key returns that key's value, exactly."""
    tensors = inputs(B=2, H=2, L=37, K=80, D=24, dtype=dtype, device=backend.device)
    got = run(backend, tensors, window_size=(0, 0))
    assert_value(backend, got["out"], tensors["v"][:, :, 80 - 37 :])


@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_position_term_alone_finds_its_distance(backend, dtype):
    """k = 0 and r zero but for one row: every query attends to the key at that distance and to no other.

    Says in one line what `r_zero` and "furthest distance first" mean.
    """
    L, K, D, distance = 70, 150, 8, 45
    tensors = inputs(B=1, H=2, L=L, K=K, D=D, dtype=dtype, device=backend.device)
    tensors["q"], tensors["k"], tensors["r"] = (torch.zeros_like(tensors[n]) for n in "qkr")
    tensors["bias_u"] = None
    tensors["bias_v"] = torch.ones_like(tensors["bias_v"])
    tensors["r"][:, K - 1 - distance] = 1000.0  # causal: N = K rows, distances K-1 ... 0
    got = run(backend, tensors)
    assert_value(backend, got["out"], tensors["v"][:, :, K - L - distance : K - distance])


@pytest.mark.parametrize("backend", each_backend())
def test_return_lse(backend):
    tensors = inputs(B=2, H=3, L=4, K=6, D=5, dtype=backend.dtypes[0], device=backend.device)
    arguments = [tensors[n] for n in TENSORS]
    alone = rel_attention(*arguments, backend=backend.name)
    assert isinstance(alone, torch.Tensor) and alone.shape == (2, 3, 4, 5)
    out, lse = rel_attention(*arguments, backend=backend.name, return_lse=True)
    assert torch.equal(out, alone)
    assert lse.shape == (2, 3, 4) and lse.is_contiguous()


@pytest.mark.parametrize("backend", each_backend())
def test_biases_by_keyword(backend):
    tensors = inputs(dtype=backend.dtypes[0], device=backend.device)
    positional = rel_attention(*tensors.values(), backend=backend.name)
    assert torch.equal(rel_attention(**tensors, backend=backend.name), positional)


@pytest.mark.parametrize("name", ["bias_u", "bias_v"])
@pytest.mark.parametrize("backend, dtype", each_dtype(exact=True))
def test_missing_bias_is_a_zero_bias(backend, dtype, name):
    tensors = inputs(L=30, K=50, D=12, dtype=dtype, device=backend.device)
    zero = run(backend, dict(tensors, **{name: torch.zeros_like(tensors[name])}))
    missing = run(backend, dict(tensors, **{name: None}))
    torch.testing.assert_close(missing["out"], zero["out"], rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(missing["lse"], zero["lse"], rtol=0, atol=1e-5)


def test_cpu_tensors_go_to_the_cpu_kernels():
    tensors = inputs(L=20, K=30, D=16)
    chosen = rel_attention(*tensors.values())
    assert torch.equal(chosen, rel_attention(*tensors.values(), backend="cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(N=1001)], ids=str)
@pytest.mark.parametrize("backend, dtype", each_dtype())
def test_published_shape(backend, dtype, options):
    """1,900 queries over 3,800 keys, forward and backward."""
    options = dict(options)
    N = options.pop("N", None)
    causal = options.get("causal", True)
    tensors = inputs(B=1, H=1, L=1900, K=3800, D=64, N=N, causal=causal, dtype=dtype, device=backend.device)
    check(backend, tensors, **options)

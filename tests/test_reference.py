"""The reference against an oracle that knows no tensors: the contract's formula, one number at a time."""

from __future__ import annotations

import itertools
import math

import helpers
import pytest
import torch
from helpers import f64, inputs, key_range, randn_like, run

from txl_kernels import philox
from txl_kernels.reference import naive, naive_gather, reference, shift

MASK32 = 0xFFFFFFFF


# ---- Philox ------------------------------------------------------------------------------------------------


def philox_by_hand(counter, key):
    """Philox4x32-10 (Salmon et al. 2011) in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
    return c


# Random123's known answers.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, (MASK32,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_philox_known_answers(counter, key, answer):
    assert tuple(philox_by_hand(counter, key)) == answer
    words = philox.philox4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(map(int, words)) == answer


def keep_by_hand(seed, b, h, i, j, p):
    key = (seed & MASK32, (seed >> 32) & MASK32)
    counter = [((j >> 6) * 16 + (j & 15)) & MASK32, i & MASK32, h & MASK32, b & MASK32]
    word = philox_by_hand(counter, key)[(j >> 4) & 3]
    return word >= min(2**32 - 1, round(p * 2**32))


@pytest.mark.parametrize("p", [1e-12, 0.25, 1 - 1e-12])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63)])
def test_keep_mask(seed, p):
    """Every element, over several groups of 64 keys. Other files take `philox.keep_mask` as truth."""
    B, H, L, K = 2, 3, 2, 150
    mask = philox.keep_mask(torch.tensor([seed]), p, B, H, L, K, "cpu")
    assert mask.shape == (B, H, L, K)
    for b, h, i, j in itertools.product(range(B), range(H), range(L), range(K)):
        assert keep_by_hand(seed, b, h, i, j, p) == mask[b, h, i, j]


# ---- oracle ------------------------------------------------------------------------------------------------


def oracle(
    tensors, *, causal=True, window_size=(-1, -1), r_zero=None, key_range=None, scale=None, dropout=None
):
    """out [B, H, L, D] and lse [B, H, L] by the contract's formula. `dropout` is (p, seed) or None."""
    q, k, v, r, u, w = (None if tensors[n] is None else tensors[n].tolist() for n in helpers.TENSORS)
    (B, H, L, D), K, N = tensors["q"].shape, tensors["k"].shape[2], tensors["r"].shape[1]
    if r_zero is None:
        r_zero = N - 1 if causal else N - L
    if scale is None:
        scale = 1 / math.sqrt(D)
    left, right = window_size
    out = torch.zeros(B, H, L, D, dtype=f64)
    lse = torch.full((B, H, L), -math.inf, dtype=f64)
    for b in range(B):
        start, end = (0, K) if key_range is None else key_range[b].tolist()
        for h in range(H):
            for i in range(L):
                p = i + (K - L)
                scores = {}
                for j in range(K):
                    d = p - j
                    if not start <= j < end or (causal and d < 0):
                        continue
                    if (left >= 0 and d > left) or (right >= 0 and -d > right):
                        continue
                    row = min(max(r_zero - d, 0), N - 1)
                    total = 0.0
                    for x in range(D):
                        u_x, w_x = (0.0 if bias is None else bias[h][x] for bias in (u, w))
                        total += (q[b][h][i][x] + u_x) * k[b][h][j][x]
                        total += (q[b][h][i][x] + w_x) * r[h][row][x]
                    scores[j] = scale * total
                if not scores:
                    continue
                total = sum(math.exp(s) for s in scores.values())
                lse[b, h, i] = math.log(total)
                for j, s in scores.items():
                    probability = math.exp(s) / total
                    if dropout is not None:
                        rate, seed = dropout
                        probability *= keep_by_hand(seed, b, h, i, j, rate) / (1 - rate)
                    for x in range(D):
                        out[b, h, i, x] += probability * v[b][h][j][x]
    return out, lse


SIZES = [
    dict(B=1, H=1, L=1, K=1, D=1),
    dict(B=2, H=2, L=4, K=4, D=3),
    dict(B=2, H=1, L=3, K=8, D=2),
    dict(B=1, H=2, L=1, K=7, D=5),
    dict(B=1, H=1, L=5, K=71, D=2),  # dropout's counter moves on after 64 keys
]
OPTIONS = [
    {},
    dict(causal=False),
    dict(window_size=(2, 0)),
    dict(window_size=(0, 0)),
    dict(window_size=(1, 2), causal=False),
    dict(window_size=(-1, 1), causal=False),
    dict(window_size=(2, -1), causal=False),
    dict(window_size=(3, 3)),
    dict(scale=0.7),
    dict(scale=-0.3),
    dict(dropout=(0.4, 12345)),
    dict(dropout=(0.4, -3), causal=False),
    dict(dropout=(0.9, (5 << 32) + 9)),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s.values())))
def test_against_oracle(sizes, options):
    check(inputs(**sizes, causal=options.get("causal", True), dtype=f64), options)


def check(tensors, options):
    out, lse = oracle(tensors, **options)
    options = dict(options)
    p, seed = options.pop("dropout", None) or (0.0, None)
    got = run(reference, tensors, dropout_p=p, dropout_seed=seed, **options)
    torch.testing.assert_close(got["out"], out, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(got["lse"], lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("r_zero", [None, -4, 0, 2, 11])
@pytest.mark.parametrize("N", [1, 3, 6, 30])
def test_rows_of_r(N, r_zero, causal):
    check(inputs(B=1, H=2, L=4, K=9, N=N, D=2, dtype=f64), dict(r_zero=r_zero, causal=causal))


@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(window_size=(1, 0))], ids=str)
def test_key_range(options):
    pairs = [(0, 6), (2, 5), (5, 2), (3, 3), (-7, 2), (5, 99), (6, 6), (-9, -2), (2**31 - 1, -(2**31))]
    tensors = inputs(B=len(pairs), H=1, L=3, K=6, D=2, causal=options.get("causal", True), dtype=f64)
    check(tensors, dict(options, key_range=key_range(*pairs)))


@pytest.mark.parametrize("bias", [("bias_u",), ("bias_v",), ("bias_u", "bias_v")], ids="-".join)
def test_missing_bias_is_zero(bias):
    tensors = inputs(L=3, K=5, dtype=f64)
    for name in bias:
        tensors[name] = None
    check(tensors, {})


# ---- the other ways of doing it ----------------------------------------------------------------------------


def both(attention, arguments, dout):
    """out, then the gradient of every argument."""
    leaves = [None if a is None else a.clone().requires_grad_() for a in arguments]
    out = attention(*leaves)
    out.backward(dout)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, dict(window_size=(4, 0)), dict(scale=0.3)], ids=str)
@pytest.mark.parametrize("L, K", [(1, 1), (5, 5), (6, 17), (1, 9)])
def test_shift(L, K, options, bias):
    tensors = inputs(B=2, H=2, L=L, K=K, D=6, bias=bias, dtype=f64)
    dout = randn_like(tensors["q"])
    got = both(lambda *a: shift(*a, **options), tensors.values(), dout)
    torch.testing.assert_close(got, both(lambda *a: reference(*a, **options), tensors.values(), dout))


PAIRWISE = [
    {},
    dict(window_size=(4, 0)),
    dict(scale=0.3),
    dict(causal=False, r_zero=6),
    dict(causal=False, r_zero=2, window_size=(3, 5)),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", PAIRWISE, ids=str)
@pytest.mark.parametrize("N", [17, 7])
def test_naive_gather(N, options, bias):
    tensors = inputs(B=2, H=2, L=6, K=17, D=5, N=N, bias=bias, dtype=f64)
    dout = randn_like(tensors["q"])
    got = both(lambda *a: naive_gather(*a, **options), tensors.values(), dout)
    torch.testing.assert_close(got, both(lambda *a: reference(*a, **options), tensors.values(), dout))


@pytest.mark.parametrize("options", PAIRWISE, ids=str)
@pytest.mark.parametrize("N", [17, 7])
def test_naive(N, options):
    """r projected once per distance or once per pair: the same numbers."""
    H, D, d_model = 2, 5, 9
    tensors = inputs(B=2, H=H, L=6, K=17, D=D, N=N, dtype=f64)
    embeddings, weight = torch.randn(N, d_model, dtype=f64), torch.randn(H * D, d_model, dtype=f64)
    q, k, v, _, bias_u, bias_v = tensors.values()
    dout = randn_like(q)

    def projected_once(q, k, v, embeddings, weight, bias_u, bias_v):
        r = (embeddings @ weight.T).view(N, H, D).transpose(0, 1)
        return reference(q, k, v, r, bias_u, bias_v, **options)

    arguments = (q, k, v, embeddings, weight, bias_u, bias_v)
    torch.testing.assert_close(
        both(lambda *a: naive(*a, **options), arguments, dout), both(projected_once, arguments, dout)
    )


def test_shift_refuses_what_it_gets_wrong():
    tensors = inputs(L=4, K=6)
    for options, name in [(dict(causal=False), "causal"), (dict(r_zero=2), "r_zero")]:
        with pytest.raises(ValueError, match=name):
            shift(*tensors.values(), **options)
    with pytest.raises(ValueError, match="r: got 3 rows"):
        shift(*inputs(L=4, K=6, N=3).values())


def test_upcast_is_float32_inside():
    """The reference of bfloat16 inputs is as good as its rounded result allows; without upcast it is not."""
    tensors = inputs(B=1, H=2, L=40, K=90, D=64, dtype=torch.bfloat16)
    exact = helpers.truth(tensors)["out"]
    good = (run(reference, tensors)["out"].double() - exact).abs().max()
    poor = (helpers.plain(tensors)["out"].double() - exact).abs().max()
    assert good <= exact.abs().max() * 2**-8
    assert poor > good

"""What torch's counter of operations says of rel_attention: the work of visible pairs."""

from __future__ import annotations

import pytest
import torch
from helpers import inputs, key_range
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from txl_kernels import rel_attention
from txl_kernels.flops import BACKWARD, FORWARD, rel_attention_flops
from txl_kernels.reference import default_r_zero, visible_keys

SIDE = st.integers(-1, 30)


def counted(products, q, k, r, causal, window_size, r_zero):
    """Pair by pair."""
    L, K, N = q.shape[2], k.shape[2], r.shape[-2]
    r_zero = default_r_zero(causal, N, L) if r_zero is None else r_zero
    visible = visible_keys(L, K, causal, window_size)[0, 0]
    row = r_zero - (torch.arange(K - L, K)[:, None] - torch.arange(K))
    near = visible & (row >= 0) & (row < N)
    work = products[0] * int(visible.sum()) + products[1] * int(near.sum())
    return 2 * q.shape[0] * q.shape[1] * q.shape[3] * work


@given(
    st.integers(1, 12), st.integers(0, 9), st.integers(1, 24), SIDE, SIDE, st.booleans(), st.integers(-9, 30)
)
def test_counted_pair_by_pair(L, memory, N, left, right, causal, r_zero):
    q, k, r = torch.empty(2, 3, L, 5), torch.empty(2, 3, L + memory, 5), torch.empty(3, N, 5)
    for products in (FORWARD, BACKWARD, (1, 0), (0, 1)):
        got = rel_attention_flops(products, q.shape, L + memory, N, causal, (left, right), r_zero)
        assert got == counted(products, q, k, r, causal, (left, right), r_zero)


@pytest.mark.parametrize(
    ("causal", "rows", "window"), [(True, 11, (-1, -1)), (True, 4, (5, -1)), (False, 7, (2, 3))]
)
def test_torchs_counter(causal, rows, window):
    t = inputs(B=2, H=3, L=6, K=11, N=rows, D=8, causal=causal, dtype=torch.float32)
    q, k, v, r, u, bias_v = (x.requires_grad_() for x in t.values())
    options = {"causal": causal, "window_size": window}
    forward, backward = (counted(p, q, k, r, causal, window, None) for p in (FORWARD, BACKWARD))
    with FlopCounterMode(display=False) as counter:
        out = rel_attention(q, k, v, r, u, bias_v, **options)
        assert counter.get_total_flops() == forward
        out.sum().backward()
    assert counter.get_total_flops() == forward + backward

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        rel_attention(
            q, k, v, r, dropout_p=0.5, dropout_seed=1, key_range=key_range((0, 3), (2, 9)), **options
        )
    assert counter.get_total_flops() == forward

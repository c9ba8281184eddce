"""Attention in chunks: what a mask over all pairs would give, and gradients."""

import pytest
import torch
from torch import nn

from txl_kernels.chunks import attention_in_chunks

B, H, D = 2, 2, 8


def problem(T, N):
    torch.manual_seed(0)
    shapes = ((B, H, T, D), (B, H, T, D), (B, H, T, D), (H, N, D), (H, D), (H, D))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def by_mask(q, k, v, r, u, w, chunk, left, r_zero, key_range=None):
    T = q.shape[2]
    i, j = torch.arange(T)[:, None], torch.arange(T)
    sees = (j >= i // chunk * chunk - left) & (j < i // chunk * chunk + chunk)
    if key_range is not None:
        sees = sees & (j >= key_range[:, :1, None, None]) & (j < key_range[:, 1:, None, None])
    row = (r_zero - (i - j)).clamp(0, r.shape[1] - 1).expand(B, H, T, T)
    scores = (q + u[:, None]) @ k.mT + ((q + w[:, None]) @ r.mT).gather(-1, row)
    return (scores / D**0.5).masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num() @ v


@pytest.mark.parametrize("ranges", [None, [[0, 15], [0, 8]], [[3, 14], [9, 15]]])
@pytest.mark.parametrize("T", [15, 13, 2])
@pytest.mark.parametrize("chunk, left", [(3, 4), (5, 0), (1, 6), (4, 40)])
def test_as_by_a_mask(chunk, left, T, ranges):
    inputs = problem(T, left + 2 * chunk - 1)
    key_range = None if ranges is None else torch.tensor(ranges, dtype=torch.int32).clamp(max=T)
    expected = by_mask(*inputs, chunk, left, left + chunk - 1, key_range)
    out = attention_in_chunks(*inputs, chunk=chunk, left=left, key_range=key_range)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    for got, grad in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, grad)


def test_rows_of_another_table():
    inputs = problem(15, 2 * 15 - 1)
    out = attention_in_chunks(*inputs, chunk=4, left=6, r_zero=14)
    torch.testing.assert_close(out, by_mask(*inputs, 4, 6, 14))


def test_no_frames():
    inputs = problem(0, 9)
    out = attention_in_chunks(*inputs, chunk=3, left=4)
    assert out.shape == (B, H, 0, D)
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


def test_what_is_refused():
    q, k, v, r, *_ = problem(15, 9)
    for chunk, left in ((0, 3), (3, -1)):
        with pytest.raises(ValueError, match=rf"chunk, left: got {chunk}, {left}, needs at least 1 and 0"):
            attention_in_chunks(q, k, v, r, chunk=chunk, left=left)
    with pytest.raises(ValueError, match="q, k, v: got 14, 15, 15 frames"):
        attention_in_chunks(q[:, :, 1:], k, v, r, chunk=3, left=3)


def test_compiled():
    class Layer(nn.Module):
        def forward(self, q, k, v, r):
            return attention_in_chunks(q, k, v, r, chunk=3, left=4)

    q, k, v, r, *_ = (x.detach() for x in problem(15, 9))
    out = torch.compile(Layer(), fullgraph=True)(q, k, v, r)
    torch.testing.assert_close(out, attention_in_chunks(q, k, v, r, chunk=3, left=4))

"""Attention in chunks: what a mask over all pairs would give, and gradients."""

import pytest
import torch
from torch import nn

from txl_kernels.chunks import attention_in_chunks

B, H, D = 2, 2, 8


def problem(T, N, B=B):
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


def assert_the_same(out, expected, inputs):
    """And gradients."""
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(out)
    for got, grad in zip(
        torch.autograd.grad((out * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, grad)


@pytest.mark.parametrize("ranges", [None, [[0, 15], [0, 8]], [[3, 14], [9, 15]]])
@pytest.mark.parametrize("T", [15, 13, 2])
@pytest.mark.parametrize("chunk, left", [(3, 4), (5, 0), (1, 6), (4, 40)])
def test_as_by_a_mask(chunk, left, T, ranges):
    inputs = problem(T, left + 2 * chunk - 1)
    key_range = None if ranges is None else torch.tensor(ranges, dtype=torch.int32).clamp(max=T)
    expected = by_mask(*inputs, chunk, left, left + chunk - 1, key_range)
    out = attention_in_chunks(*inputs, chunk=chunk, left=left, key_range=key_range)
    assert_the_same(out, expected, inputs)


@pytest.mark.parametrize("left", [124, 400])
def test_gradients_that_many_chunks_add_to(left):
    """In bfloat16 they are added up in float32: their error is no more than of the roundings of one chunk."""
    torch.manual_seed(0)
    tensors = [x.bfloat16().requires_grad_() for x in torch.randn(3, 1, 1, 640, 16)]
    r, dout = torch.randn(1, left + 7, 16).bfloat16(), torch.randn(1, 1, 640, 16).bfloat16()

    def gradients(dtype):
        q, k, v, rows = (x.to(dtype) for x in (*tensors, r))
        out = attention_in_chunks(q, k, v, rows, chunk=4, left=left)
        return torch.autograd.grad(out, (k, v), dout.to(dtype))

    for got, exact in zip(gradients(torch.bfloat16), gradients(torch.float64), strict=True):
        assert (got - exact).norm() < 6e-3 * exact.norm()  # in bfloat16: 1.2e-2


@pytest.mark.parametrize("ranges", [None, [[0, 70], [20, 41]]])
def test_more_copies_than_are_taken(ranges):
    """One call for each chunk, of unlimited left context, say."""
    inputs = problem(70, 70 + 1)
    key_range = None if ranges is None else torch.tensor(ranges, dtype=torch.int32)
    expected = by_mask(*inputs, 1, 68, 69, key_range)
    out = attention_in_chunks(*inputs, chunk=1, left=68, r_zero=69, key_range=key_range)
    assert_the_same(out, expected, inputs)


def test_no_more_is_padded_than_there_are_frames():
    inputs = problem(15, 29)
    out = attention_in_chunks(*inputs, chunk=4, left=10**9, r_zero=14)
    torch.testing.assert_close(out, by_mask(*inputs, 4, 10**9, 14))


def test_rows_of_another_table():
    inputs = problem(15, 2 * 15 - 1)
    out = attention_in_chunks(*inputs, chunk=4, left=6, r_zero=14)
    torch.testing.assert_close(out, by_mask(*inputs, 4, 6, 14))


@pytest.mark.parametrize("B, T", [(2, 0), (0, 7), (0, 0)])
def test_nothing(B, T):
    inputs = problem(T, 9, B)
    out = attention_in_chunks(*inputs, chunk=3, left=4)
    assert out.shape == (B, H, T, D)
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("T", [15, 13])
def test_nan_stays_in_its_entry_of_the_batch(T):
    """Entries lie one behind the other: before the first chunks of one are the last frames of another."""
    inputs = problem(T, 9)
    for x in inputs[:3]:
        with torch.no_grad():
            x[0] = torch.nan
    out = attention_in_chunks(*inputs, chunk=3, left=4)
    gradients = torch.autograd.grad(out[1].sum(), inputs[:3])
    q, k, v, *others = (x.detach() for x in inputs)
    alone = [x[1:].requires_grad_() for x in (q, k, v)]
    expected = attention_in_chunks(*alone, *others, chunk=3, left=4)
    torch.testing.assert_close(out[1:], expected)
    for got, right in zip(gradients, torch.autograd.grad(expected.sum(), alone), strict=True):
        torch.testing.assert_close(got[1:], right)


def test_a_range_beyond_the_frames_is_clamped():
    """As `rel_attention` does: what is padded there exists for nobody."""
    inputs = problem(7, 7)
    for given, meant in (([0, 8], [0, 7]), ([-1, 7], [0, 7]), ([-5, 400], [0, 7]), ([6, 2], [0, 0])):
        given, meant = (torch.tensor([x] * B, dtype=torch.int32) for x in (given, meant))
        out = attention_in_chunks(*inputs, chunk=2, left=4, key_range=given)
        assert torch.equal(out, attention_in_chunks(*inputs, chunk=2, left=4, key_range=meant))


int32 = dict(dtype=torch.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(q=None), TypeError, "q: got None of type NoneType, needs a tensor"),
        (dict(chunk=0), ValueError, "chunk: got 0, needs at least 1"),
        (dict(chunk=3.0), TypeError, "chunk: got 3.0 of type float, needs an int"),
        (dict(left=-1), ValueError, "left: got -1, needs at least 0"),
        (dict(q=torch.ones(B, H, 14, D)), ValueError, r"q, k, v: got shapes \[2, 2, 14, 8\], \[2, 2, 15,"),
        (dict(q=torch.ones(H, 15, D)), ValueError, r"q, k, v: got shapes \[2, 15, 8\], .*, needs \[B, H, T"),
        (dict(r=torch.ones(H, 29, D)), ValueError, "r: got 29 rows, needs left .* = 8, or r_zero"),
        (dict(key_range=[[0, 15]] * B), TypeError, "key_range: got .* of type list"),
        (dict(key_range=torch.tensor([15, 15], **int32)), ValueError, r"key_range: .* needs \[2, 2\]"),
        (dict(key_range=torch.tensor([[0, 15]], **int32)), ValueError, r"key_range: .* needs \[2, 2\]"),
        (dict(key_range=torch.tensor([[0, 15]] * B)), TypeError, "key_range: got torch.int64"),
    ],
)
def test_what_is_refused(change, error, message):
    q, k, v, r, *_ = problem(15, 8)
    with pytest.raises(error, match=message):
        attention_in_chunks(**(dict(q=q, k=k, v=v, r=r, chunk=3, left=3) | change))


class Layer(nn.Module):
    def forward(self, q, k, v, r):
        return attention_in_chunks(q, k, v, r, chunk=3, left=4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    layer = torch.compile(Layer(), fullgraph=True, dynamic=dynamic)
    for T in (15, 13, 12):
        q, k, v, r, *_ = (x.detach() for x in problem(T, 9))
        torch.testing.assert_close(layer(q, k, v, r), attention_in_chunks(q, k, v, r, chunk=3, left=4))


@pytest.mark.parametrize("traced", [15, 13])
def test_exported_for_other_numbers_of_frames_and_entries(traced):
    auto = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    inputs = tuple(x.detach() for x in problem(traced, 9)[:4])
    program = torch.export.export(Layer(), inputs, dynamic_shapes=(auto, auto, auto, None)).module()
    for T in (3, 4, 12, 13, 15, 40):
        for entries in (2, 3):
            q, k, v, r, *_ = (x.detach() for x in problem(T, 9, entries))
            torch.testing.assert_close(program(q, k, v, r), attention_in_chunks(q, k, v, r, chunk=3, left=4))

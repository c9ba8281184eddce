"""`txl_kernels.linear`: the kernel for few rows, oneDNN's for more, and torch's where neither serves."""

from __future__ import annotations

import sys

import helpers
import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import txl_kernels
from txl_kernels import cpu, linear
from txl_kernels.linear import FEW_ROWS

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C++ kernels are not built")


MODULE = sys.modules[linear.__module__]
LARGE = MODULE._LARGE


@pytest.fixture
def kernel_calls(monkeypatch):
    """Counts the calls of the kernel, which here has small weights, too."""
    monkeypatch.setattr(MODULE, "_LARGE", 0)
    calls = []
    op = torch.ops.txl_kernels.cpu_linear.default

    class Counted:
        @staticmethod
        def default(*args):
            calls.append(args)
            return op(*args)

    monkeypatch.setattr(torch.ops.txl_kernels, "cpu_linear", Counted)
    return calls


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize("depth", [1, 3, 16, 41, 64, 513])
@pytest.mark.parametrize("outputs", [1, 5, 64, 131])
@pytest.mark.parametrize("rows", [1, 2, 3, FEW_ROWS])
def test_equals_float64(rows, outputs, depth, dtype, kernel_calls):
    helpers.check_linear(rows, outputs, depth, dtype)
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("outputs, calls", [(127, 0), (128, 2)])
def test_small_weights_are_torchs(outputs, calls, kernel_calls, monkeypatch):
    monkeypatch.setattr(MODULE, "_LARGE", LARGE)
    helpers.check_linear(1, outputs, 1024, torch.float32)
    assert len(kernel_calls) == calls


def test_large_weights_are_shared_out_and_repeat_to_the_bit(threads, kernel_calls):
    """More weights than one item; the same bits for any number of threads."""
    x, weight = torch.randn(2, 300), torch.randn(1003, 300)
    with torch.no_grad():
        results = []
        for n in (1, 2, 2):
            threads(n)
            results.append(linear(x, weight))
    torch.testing.assert_close(results[0], x @ weight.T, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(results[0], result) for result in results[1:])
    assert len(kernel_calls) == 3


def test_strides_and_shapes(kernel_calls):
    weight = torch.randn(7, 40)[:, 4:20]  # rows further apart than they are long
    bias = torch.randn(7)
    with torch.no_grad():
        for x in (
            torch.randn(1, 2, 16),
            torch.randn(16),
            torch.randn(16, 3).T,
            torch.randn(1, 1, 16).expand(2, 1, 16),
        ):
            torch.testing.assert_close(
                linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5
            )
    assert len(kernel_calls) == 4


@pytest.mark.parametrize("depth, outputs", [(1, 1), (16, 7), (41, 131), (512, 64)])
@pytest.mark.parametrize("rows", [FEW_ROWS + 1, 32, 33])
@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_many_rows(rows, outputs, depth, dtype, kernel_calls):
    helpers.check_linear(rows, outputs, depth, dtype)
    assert not kernel_calls


@pytest.mark.parametrize("shape", [(16,), (1, 16), (2, 3, 16), (2, 16, 16), (16, 9), (1, 1, 16)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("outputs", [7, 40])
def test_gradients(shape, with_bias, transposed, outputs):
    """Those of torch's own function in float64, with weights either way round."""
    x = torch.randn(shape) if shape != (16, 9) else torch.randn(shape).T
    weight = torch.randn(16, outputs).T if transposed else torch.randn(outputs, 16)
    bias = torch.randn(outputs) if with_bias else None
    dy = torch.randn(*x.shape[:-1], outputs)

    def gradients(function, cast):
        inputs = [cast(t.detach()).requires_grad_() for t in (x, weight, bias) if t is not None]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, cast(dy))]

    # `+ 0` keeps the strides.
    for got, want in zip(
        gradients(linear, lambda t: t + 0), gradients(F.linear, torch.Tensor.double), strict=True
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_gradients_of_some_and_of_a_sum():
    """No gradient for what wants none; a gradient of stride 0, as `sum` hands back."""
    x, weight, bias = torch.randn(6, 16), torch.randn(7, 16), torch.randn(7)
    for wanted in (x, weight, bias):
        wanted.requires_grad_()
        linear(x, weight, bias).sum().backward()
        want = {id(x): weight.sum(0).expand(6, 16), id(weight): x.sum(0).expand(7, 16)}
        torch.testing.assert_close(wanted.grad, want.get(id(wanted), torch.full((7,), 6.0)))
        wanted.requires_grad_(False)
        assert [t.grad is not None for t in (x, weight, bias)].count(True) == 1
        wanted.grad = None


def test_weights_without_outputs():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(0, 8, requires_grad=True)
    linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.zeros(6, 8)) and weight.grad.shape == (0, 8)


def test_texts_of_all_lengths_are_few_sizes_to_onednn(monkeypatch):
    """Each takes a megabyte or two for good."""
    op, sizes = torch.ops.mkldnn._linear_pointwise.default, set()

    class Counted:
        @staticmethod
        def default(x, *args):
            sizes.add(x.shape)
            return op(x, *args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Counted)
    weight = torch.randn(9, 8, requires_grad=True)
    for rows in range(5, 1029):
        linear(torch.randn(rows, 8, requires_grad=True), weight).sum().backward()
    assert bool(sizes) == MODULE._ONEDNN and len(sizes) <= 3 * 32


def test_second_gradients():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)

    def twice(function):
        (dx,) = torch.autograd.grad(function(x, weight).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, weight))

    torch.testing.assert_close(twice(linear), twice(F.linear), rtol=1e-4, atol=1e-3)


def test_torch_func(kernel_calls):
    """Transforms are torch's business: they cannot see into kernels."""
    x, weight = torch.randn(6, 8), torch.randn(3, 8)

    def loss(x):
        return linear(x, weight).pow(2).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), 2 * x @ weight.T @ weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.vmap(loss)(x), (x @ weight.T).pow(2).sum(1), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        _, tangent = torch.func.jvp(lambda x: linear(x, weight), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, weight.sum(1).expand(6, 3))
    assert not kernel_calls


def test_torch_serves_the_rest(kernel_calls):
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with torch.no_grad():
        linear(torch.randn(FEW_ROWS + 1, 8), weight)
        linear(torch.randn(0, 8), weight)
        linear(x, torch.randn(8, 3).T)
        assert linear(x.half(), weight.half()).dtype == torch.float16
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        with torch.device("meta"):
            assert linear(torch.empty(2, 8), torch.empty(3, 8)).shape == (2, 3)
        assert not kernel_calls
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert txl_kernels.linear is linear


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
def test_other_layouts_are_torchs(rows, kernel_calls):
    x, weight = torch.randn(rows, 8), torch.randn(3, 8)
    want = F.linear(x, weight)
    with torch.no_grad():
        for one, other in (
            (x, weight.to_sparse_csr()),
            (x.to_mkldnn(), weight.to_mkldnn()),
            (torch.nested.nested_tensor([x]), weight),
        ):
            got = linear(one, other)
            got = got[0] if got.is_nested else got.to_dense() if got.is_mkldnn else got
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not kernel_calls


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
@pytest.mark.parametrize("grad", [False, True])
def test_who_traces_sees_torchs_own(rows, grad, kernel_calls):
    x, weight = torch.randn(rows, 8), torch.randn(3, 8, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(linear, (x, weight), check_trace=False)
        with FlopCounterMode(display=False) as flops:
            want = linear(x, weight)
    assert "aten::linear" in str(traced.inlined_graph) and flops.get_total_flops() == 2 * rows * 3 * 8
    assert not kernel_calls
    torch.testing.assert_close(traced(x, weight), want)


@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
def test_several_gradients_at_once(rows):
    leaves = [torch.randn(size, requires_grad=True) for size in ((rows, 8), (3, 8), (3,))]
    out, douts = linear(*leaves), torch.randn(5, rows, 3)
    batched = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    for got, *want in zip(batched, *each, strict=True):
        torch.testing.assert_close(got, torch.stack(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
@pytest.mark.parametrize("gradients", [False, True])
def test_what_does_not_go_together(rows, gradients, kernel_calls):
    x, weight = torch.randn(rows, 8), torch.randn(3, 8, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        for others in (
            [torch.randn(3, 9)],
            [weight, torch.randn(4)],
            [weight.double()],
            [weight[None, None]],
        ):
            with pytest.raises(RuntimeError):
                linear(x, *others)
    assert not kernel_calls


@pytest.mark.parametrize("rows", [1, 9])
def test_a_bias_of_any_stride(rows):
    """oneDNN would read it as if it were contiguous, past its end too."""
    x, weight = torch.randn(rows, 16), torch.randn(4, 16)
    for bias in (torch.randn(8)[::2], torch.randn(4, 4)[:, 1], torch.tensor([3.0]).expand(4)):
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_rows_that_overlap():
    """Frames of a signal, and a Toeplitz matrix; forward and backward."""
    frames = torch.randn(400).unfold(0, 32, 8).requires_grad_()
    toeplitz = torch.randn(36).unfold(0, 32, 1).requires_grad_()
    got = linear(frames, toeplitz)
    torch.testing.assert_close(got, F.linear(frames, toeplitz))
    gradients = torch.autograd.grad(got.sum(), (frames, toeplitz))
    expected = torch.autograd.grad(F.linear(frames, toeplitz).sum(), (frames, toeplitz))
    torch.testing.assert_close(gradients, expected)


def test_keeps_what_gradients_need_alone():
    """A layer of frozen weights keeps no activations, which may then be changed in place."""
    x, weight = torch.randn(9, 8, requires_grad=True), torch.randn(5, 8)
    hidden = x * 1
    y = linear(hidden, weight)
    hidden.add_(1)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(9, 8))


def test_a_number_is_no_row():
    with pytest.raises(RuntimeError, match="at least 1"):
        linear(torch.tensor(1.0), torch.ones(5, 1))


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("rows", [2, FEW_ROWS + 1])
def test_forward_mode(rows: int, grad: bool) -> None:
    """A kernel would take the tangent for zero."""
    x, weight = torch.randn(rows, 8), torch.randn(3, 8)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        out = linear(forward_ad.make_dual(x, torch.ones_like(x)), weight)
        tangent = forward_ad.unpack_dual(out).tangent
    torch.testing.assert_close(tangent, weight.sum(1).expand(rows, 3))

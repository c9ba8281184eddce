"""`txl_kernels.linear`: the kernel for few rows, and torch's function where it does not serve."""

from __future__ import annotations

import helpers
import pytest
import torch
import torch.nn.functional as F

import txl_kernels
from txl_kernels import cpu, linear
from txl_kernels.linear import FEW_ROWS

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C++ kernels are not built")


@pytest.fixture
def kernel_calls(monkeypatch):
    """Counts the calls of the kernel."""
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


def test_torch_serves_the_rest(kernel_calls):
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    linear(x, weight.requires_grad_()).sum().backward()
    assert weight.grad is not None
    weight = weight.detach()
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
        with pytest.raises(RuntimeError):
            linear(x, torch.randn(3, 9))
        with pytest.raises(RuntimeError):
            linear(x, weight, torch.randn(4))
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert txl_kernels.linear is linear

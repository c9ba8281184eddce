"""`txl_kernels.dropout`: dropout of a tensor's elements, and torch's own where the kernel does not serve."""

from __future__ import annotations

import math

import helpers
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import txl_kernels
from txl_kernels import cpu, dropout

needs_kernels = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C++ kernels are not built")
both = pytest.mark.parametrize("relu", [False, True])


@needs_kernels
@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize("shape", [(1,), (63,), (5, 64), (2, 3, 41), (16385,), (70, 513)])
@pytest.mark.parametrize("p", [0.001, 0.3, 0.9])
def test_drops_what_the_definition_says(shape, p, dtype):
    helpers.check_dropout(shape, p, dtype)


@both
@pytest.mark.parametrize("p", [1e-9, 0.01, 0.5, 0.97])
def test_mean_and_variance(p, relu):
    x = torch.ones(1000, 999)
    y = dropout(x, p, relu)
    lost = (y == 0).double().mean()
    assert abs(lost - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-12
    assert abs(y.double().mean() - 1) < 5 * (p / (1 - p) / x.numel()) ** 0.5 + 1e-6


@both
def test_the_seed_decides(relu):
    x = torch.rand(40, 41)
    torch.manual_seed(3)
    first = dropout(x, 0.4, relu)
    assert not torch.equal(dropout(x, 0.4, relu), first)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.4, relu), first)


@both
def test_the_same_on_any_number_of_threads(relu, threads):
    x = torch.randn(300, 301)
    results = []
    for n in (1, 2, 5):
        threads(n)
        torch.manual_seed(3)
        results.append(dropout(x, 0.4, relu))
    assert all(torch.equal(results[0], result) for result in results)


@both
@pytest.mark.parametrize("order", ["transposed", "expanded", "sliced"])
def test_strides(order, relu):
    x = {
        "transposed": torch.randn(40, 30).T,
        "expanded": torch.randn(30, 1).expand(30, 40),
        "sliced": torch.randn(30, 80)[:, ::2],
    }[order]
    leaf = x.detach().requires_grad_()
    torch.manual_seed(3)
    y = dropout(leaf, 0.4, relu)
    torch.manual_seed(3)
    assert torch.equal(y, dropout(x.contiguous(), 0.4, relu))
    y.sum().backward()  # a gradient of stride 0
    torch.testing.assert_close(leaf.grad, (y != 0) / 0.6)


@both
def test_the_ends_of_p(relu):
    x = torch.randn(30, 40, requires_grad=True)
    for p, of_positive in ((0, 1.0), (1, 0.0)):
        y = dropout(x, p, relu)
        (dx,) = torch.autograd.grad(y.sum(), x)
        sign = (x > 0).float() if relu else torch.ones_like(x)
        assert torch.equal(dx, sign * of_positive) and torch.equal(y, x * sign * of_positive)
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError):
            dropout(x, p, relu)


@both
def test_what_is_not_a_number_stays(relu):
    x = torch.full((100,), float("nan"))
    kept = dropout(x, 0.5, relu).isnan().sum().item()
    assert 25 <= kept <= 75, "what is dropped is 0, the rest as it was"


@both
def test_no_elements(relu):
    assert dropout(torch.zeros(0, 3), 0.5, relu).shape == (0, 3)


@both
def test_torch_serves_the_rest(relu):
    x = (torch.rand(50, 40) + 0.5).half().requires_grad_()
    y = dropout(x, 0.5, relu)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert y.dtype == dx.dtype == torch.float16
    assert torch.equal(dx, torch.where(y != 0, 6.0, 0.0).half())
    with FakeTensorMode():
        assert dropout(torch.empty(3, 4), 0.5, relu).shape == (3, 4)
    compiled = torch.compile(lambda x: dropout(x, 0.5, relu), backend="aot_eager", fullgraph=True)
    leaf = (torch.rand(50, 40) + 0.5).requires_grad_()
    y = compiled(leaf)
    y.sum().backward()
    torch.testing.assert_close(leaf.grad, torch.where(y != 0, 2.0, 0.0))
    assert txl_kernels.dropout is dropout


@both
def test_who_traces_sees_torchs_own(relu):
    x = torch.rand(30, 40) + 0.5
    graph = make_fx(lambda x: dropout(x, 0.5, relu))(x)
    assert not any("txl_kernels" in str(node.target) for node in graph.graph.nodes)
    assert 400 < (graph(x) == 0).sum() < 800


@both
def test_several_gradients_at_once(relu):
    leaf = torch.randn(30, 40, requires_grad=True)
    y, dys = dropout(leaf, 0.4, relu), torch.randn(3, 30, 40)
    (batched,) = torch.autograd.grad(y, leaf, dys, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for dy in dys]
    torch.testing.assert_close(batched, torch.stack(each))


@both
def test_second_derivatives(relu):
    """A penalty on the gradient of sum y^2, by the weights that are before the dropout."""
    x = torch.randn(30, 40, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 40, dtype=torch.float64, requires_grad=True)

    def penalty(of):
        torch.manual_seed(7)
        (dx,) = torch.autograd.grad(of(x @ weight).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), weight)[0]

    def by_hand(h):
        return (h.relu() if relu else h) * dropout(torch.ones_like(h), 0.4)

    torch.testing.assert_close(penalty(lambda h: dropout(h, 0.4, relu)), penalty(by_hand))


@pytest.mark.parametrize("p", [-0.1, 1.5, math.nan])
@both
def test_what_is_no_probability(relu, p):
    with pytest.raises(ValueError, match=r"p: got .*, needs 0 <= p <= 1"):
        dropout(torch.ones(3), p, relu)


@needs_kernels
@both
def test_only_what_backward_needs_is_kept(relu):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = dropout(torch.randn(30, 40, requires_grad=True), 0.5, relu)
    assert len(kept) == relu and all(t.data_ptr() == y.data_ptr() for t in kept)


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
def test_forward_mode(grad: bool) -> None:
    x = torch.rand(30, 40) + 0.5
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        out = dropout(forward_ad.make_dual(x, torch.full_like(x, 3.0)), 0.5)
        y, tangent = forward_ad.unpack_dual(out)
    torch.testing.assert_close(tangent, torch.where(y != 0, 6.0, 0.0))


@both
def test_transforms(relu):
    """Of torch.func and forward mode: torch's own, as they see no kernels."""
    x, expected = torch.randn(3, 40), torch.tensor([0.0, 2.0])

    def loss(row):
        return dropout(row, 0.5, relu).sum()

    with torch.no_grad():
        gradient = torch.func.grad(loss)(x)
        rows = torch.vmap(torch.func.grad(loss), randomness="different")(x)
        _, tangent = torch.func.jvp(lambda x: dropout(x, 0.5, relu), (x,), (torch.ones_like(x),))
    for got in (gradient, rows, tangent):
        assert torch.isin(got, expected).all() and 0 < (got > 0).sum() < 120
        assert not relu or (got[x < 0] == 0).all()

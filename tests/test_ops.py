"""The torch op: schema, fakes, autograd; torch.compile, torch.export, autocast, functorch."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import (
    TENSORS,
    assert_same_bits,
    bf16,
    each_backend,
    each_fused,
    f32,
    f64,
    inputs,
    key_range,
    randn_like,
    run,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from txl_kernels import cpu, ops, rel_attention

OPTIONS = {
    "plain": (dict(B=2, L=5, K=9), {}),
    "memory-free": (dict(L=6, K=6), {}),
    "no-bias": (dict(bias=False), {}),
    "one-bias": ({}, {}),
    "clamp": (dict(N=4), {}),
    "both-directions": (dict(causal=False), dict(causal=False, window_size=(4, 2))),
    "key-range": (dict(B=2), dict(key_range=((2, 9), (5, 3)))),
    "dropout": ({}, dict(dropout_p=0.4, dropout_seed=3)),
    "transposed": (dict(B=2, H=3), {}),
    "every-other-channel": (dict(B=2, H=3), {}),
    "one-channel": (dict(B=2, H=3, D=1), {}),
    "float64": (dict(dtype=f64), {}),
    "bfloat16": (dict(dtype=bf16), {}),
}


def transposed(t):
    """[B, L, H, D] in memory."""
    return t.transpose(-3, -2).contiguous().transpose(-3, -2)


def case(name, backend):
    """(tensors, options) of a call; skips a dtype that the backend lacks."""
    sizes, options = OPTIONS[name]
    sizes = {"dtype": backend.dtypes[0], **sizes}
    if sizes["dtype"] not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {sizes['dtype']}")
    tensors = inputs(**sizes, device=backend.device)
    if name == "one-bias":
        tensors["bias_u"] = None
    if name in ("transposed", "one-channel"):
        tensors = {n: t.mT.contiguous().mT if t.dim() == 2 else transposed(t) for n, t in tensors.items()}
    if name == "every-other-channel":  # of such a layout
        for n in ("q", "k", "v", "r"):
            tensors[n] = torch.stack([tensors[n].transpose(-3, -2)] * 2, -1)[..., 0].transpose(-3, -2)
    if "key_range" in options:
        options = dict(options, key_range=key_range(*options["key_range"], device=backend.device))
    return tensors, options


def op_arguments(tensors, options, backend):
    """What api.rel_attention passes to torch.ops.txl_kernels.rel_attention."""
    L, D, N = tensors["q"].shape[2], tensors["q"].shape[3], tensors["r"].shape[1]
    causal = options.get("causal", True)
    left, right = options.get("window_size", (-1, -1))
    p = options.get("dropout_p", 0.0)
    seed = torch.tensor([options["dropout_seed"]], device=backend.device) if p else None
    return (
        *(tensors[n] for n in TENSORS),
        options.get("key_range"),
        seed,
        causal,
        left,
        right,
        N - 1 if causal else N - L,
        D**-0.5,
        p,
        backend.name,
    )


# ---- the op ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", each_fused())
def test_op_is_what_the_api_calls(backend, name):
    tensors, options = case(name, backend)
    out, lse = torch.ops.txl_kernels.rel_attention(*op_arguments(tensors, options, backend))
    got = run(backend, tensors, **options)
    assert torch.equal(out, got["out"]) and torch.equal(lse, got["lse"])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", each_fused())
def test_opcheck(backend, name):
    tensors, options = case(name, backend)
    tensors = {n: None if t is None else t.requires_grad_() for n, t in tensors.items()}
    results = torch.library.opcheck(
        torch.ops.txl_kernels.rel_attention.default, op_arguments(tensors, options, backend)
    )
    assert set(results.values()) == {"SUCCESS"}
    assert set(results) == {
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    }


def changed(arguments, at, x):
    return *arguments[:at], x, *arguments[at + 1 :]


@pytest.mark.parametrize("backend", [b for b in each_fused() if b.id != "triton"])
def test_ops_of_cplusplus_refuse_what_does_not_go_together(backend):
    """Who calls one by hand, past the API, gets an error, and no memory of others."""
    dtype = backend.dtypes[0]
    tensors = inputs(L=4, K=7, D=8, dtype=dtype, device=backend.device)
    good = op_arguments(tensors, {}, backend)
    op, backward = torch.ops.txl_kernels.rel_attention, torch.ops.txl_kernels.rel_attention_backward
    out, lse = op(*good)
    short = lambda at: good[at][..., :-1, :]  # noqa: E731
    other = torch.float64 if dtype == torch.float32 else torch.float32
    for at, name in enumerate(("k", "v", "r", "bias_u", "bias_v"), 1):
        bad = [good[at].to(other), good[at][..., :-1], good[at][None]]
        bad += [short(at)] if name not in ("k", "r") else []  # which say how many there are
        for x in bad:
            with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
                op(*changed(good, at, x))
    key_range, seed = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for at, x, name in ((6, key_range, "key_range"), (7, seed, "dropout_seed"), (13, 0.5, "dropout_seed")):
        with pytest.raises(RuntimeError, match=name):
            op(*changed(good, at, x))
    wanted, dout = (True, True, True), torch.ones_like(out)
    for name, given in (
        ("dout", (dout[:, :, 1:], out, lse)),
        ("out", (dout, out[:, :1], lse)),
        ("lse", (dout, out, lse[:, :, 1:].contiguous())),
        ("lse", (dout, out, lse.double())),
    ):
        with pytest.raises(RuntimeError, match=rf"\b{name} must"):
            backward(given[0], *good[:8], *given[1:], wanted, *good[8:])


def test_layers_ops_refuse_what_does_not_go_together():
    assert cpu.unavailable() is None
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    linear, dropout = torch.ops.txl_kernels.cpu_linear, torch.ops.txl_kernels.cpu_dropout
    for bad in (torch.ones(2, 2), torch.ones(2, 3).double(), torch.ones(3, 2).t()):
        with pytest.raises(RuntimeError, match="out must"):
            linear(x, weight, None, bad)
    for bad in (torch.ones(8), torch.ones(3, 8).double()):
        with pytest.raises(RuntimeError, match="weight must"):
            linear(x, bad, None, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="bias must"):
        linear(x, weight, torch.ones(2), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="out must"):
        dropout(x, None, 1, 0.5, torch.ones(15))
    with pytest.raises(RuntimeError, match="gate must"):
        dropout(x, torch.ones(15), 1, 0.5, torch.ones(2, 8))


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False)], ids=["all", "some"])
@pytest.mark.parametrize("name", ["plain", "no-bias", "one-bias", "key-range", "dropout", "transposed"])
@pytest.mark.parametrize("backend", each_fused())
def test_opcheck_backward(backend, name, wanted):
    tensors, options = case(name, backend)
    arguments = op_arguments(tensors, options, backend)
    results = run(backend, tensors, **options)
    arguments = (
        randn_like(tensors["q"]),
        *arguments[:8],
        results["out"],
        results["lse"],
        tuple(
            w and tensors[name] is not None for w, name in zip(wanted, ("r", "bias_u", "bias_v"), strict=True)
        ),
        *arguments[8:],
    )
    checked = torch.library.opcheck(
        torch.ops.txl_kernels.rel_attention_backward.default,
        arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("backend", each_fused())
def test_fake_tensors(backend, grad, name):
    """Shapes, strides and dtypes without data, forward and backward."""
    tensors, options = case(name, backend)
    real = run(backend, tensors, randn_like(tensors["q"]) if grad else None, **options)
    with FakeTensorMode() as mode:

        def fake(t):
            return mode.from_tensor(t) if isinstance(t, torch.Tensor) else t

        faked = {n: fake(t) for n, t in tensors.items()}
        options = {n: fake(o) for n, o in options.items()}
        got = run(backend, faked, torch.empty_like(faked["q"]) if grad else None, **options)
    assert got.keys() == real.keys()
    for result in real:
        assert got[result].shape == real[result].shape, result
        assert got[result].stride() == real[result].stride(), result
        assert got[result].dtype == real[result].dtype, result


@pytest.mark.parametrize("backend", each_fused())
def test_traced_without_dynamo(backend):
    """The graph has the op, not a backend's of the machine that traced; sizes may be symbols."""
    tensors = list(inputs(D=8, device=backend.device, dtype=backend.dtypes[0]).values())
    for mode in ("real", "fake", "symbolic"):
        with torch.no_grad():
            graph = make_fx(lambda *t: rel_attention(*t, backend=backend.name), tracing_mode=mode)(*tensors)
        called = [node.target for node in graph.graph.nodes if "txl_kernels" in str(node.target)]
        assert called == [torch.ops.txl_kernels.rel_attention.default]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
def test_meta_tensors_have_shapes(grad):
    tensors = {n: t.to("meta").requires_grad_(grad) for n, t in inputs(B=2, H=3).items()}
    out, lse = rel_attention(*tensors.values(), return_lse=True)
    assert out.is_meta and out.shape == tensors["q"].shape and lse.shape == out.shape[:3]


# ---- torch.compile -----------------------------------------------------------------------------------------


def compiled_run(attention, backend, tensors, dout, options):
    leaves = {n: None if t is None else t.clone().requires_grad_() for n, t in tensors.items()}
    out, lse = attention(*leaves.values(), **options, return_lse=True, backend=backend.name)
    out.backward(dout)
    gradients = {f"d{n}": t.grad for n, t in leaves.items() if t is not None}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", each_fused())
def test_compile_without_graph_breaks(backend, name):
    tensors, options = case(name, backend)
    dout = randn_like(tensors["q"])
    compiled = torch.compile(rel_attention, fullgraph=True, backend="aot_eager")
    assert_same_bits(
        compiled_run(compiled, backend, tensors, dout, options), run(backend, tensors, dout, **options)
    )


@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="Inductor needs Python's headers"
)
@pytest.mark.parametrize("backend", each_fused())
def test_compile_with_inductor(backend):
    """Around the op there is something to fuse: a projection before, a sum after."""

    def layer(x, weight, r, bias_u, bias_v):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        out = rel_attention(q[:, :, 4:], k, v, r, bias_u, bias_v, backend=backend.name)
        return (out.transpose(1, 2).flatten(2) * 1.5).relu().sum(-1)

    tensors = inputs(L=5, K=9, dtype=backend.dtypes[0], device=backend.device)
    x = randn_like(tensors["q"].new_empty(2, 9, 16))
    weight = randn_like(tensors["q"].new_empty(16, 48), seed=2)
    arguments = [x, weight, tensors["r"], tensors["bias_u"], tensors["bias_v"]]
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [a.clone().requires_grad_() for a in arguments]
        out = function(*leaves)
        out.sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("backend", each_fused())
def test_dynamic_shapes_compile_once(backend, grad):
    """One graph serves every batch size, length, memory and number of rows."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def attention(*tensors, window):
        return rel_attention(*tensors, window_size=(window, 0), return_lse=True, backend=backend.name)

    # Sizes that are equal in the first call would be taken for one size.
    graphs = []
    for B, L, K, N, window in [(3, 5, 12, 10, 4), (4, 7, 13, 6, 5), (5, 4, 40, 40, 17), (2, 33, 33, 33, 9)]:
        tensors = inputs(B=B, L=L, K=K, N=N, dtype=backend.dtypes[0], device=backend.device)
        expected = run(backend, tensors, window_size=(window, 0))
        arguments = [t.clone().requires_grad_(grad) for t in tensors.values()]
        with torch.set_grad_enabled(grad):
            out, lse = attention(*arguments, window=window)
        assert torch.equal(out, expected["out"]) and torch.equal(lse, expected["lse"])
        assert out.requires_grad == grad
        graphs.append(counter.frame_count)
    assert graphs[0] > 0 and len(set(graphs)) == 1


@pytest.mark.parametrize("backend", each_fused())
def test_compiled_dropout_follows_manual_seed(backend):
    """The seed is drawn inside the graph, without leaving it: other entries in each call, the same after
    manual_seed. Gradients belong to the call's own mask."""
    tensors = inputs(L=20, K=30, D=20, dtype=backend.dtypes[0], device=backend.device)
    dout = randn_like(tensors["q"])
    compiled = torch.compile(rel_attention, fullgraph=True, backend="aot_eager")

    def call():
        return compiled_run(compiled, backend, tensors, dout, dict(dropout_p=0.5))

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert_same_bits(call(), first)
    assert not torch.equal(first["out"], second["out"])
    torch.manual_seed(3)
    assert_same_bits(run(backend, tensors, dout, dropout_p=0.5), first)


@pytest.mark.parametrize("backend", each_fused())
def test_compiled_call_refuses_bad_input(backend):
    q = torch.ones(1, 1, 3, 4, device=backend.device)
    compiled = torch.compile(rel_attention, backend="aot_eager")
    with pytest.raises(ValueError, match=r"k: got K = 2 keys, needs at least L = 3"):
        compiled(q, q[:, :, :2], q[:, :, :2], q[0], backend=backend.name)


# ---- torch.export ------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, r, bias_u, bias_v):
        return rel_attention(q, k, v, r, bias_u, bias_v, **self.options)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("backend", each_fused())
def test_export(backend, grad, strict, tmp_path):
    """One node in the graph, symbolic batch, length and memory; saved, loaded and run at other sizes."""
    tensors = inputs(B=2, L=5, K=9, N=6, dtype=backend.dtypes[0], device=backend.device)
    batch, length, keys, rows = (torch.export.Dim(n, min=2, max=4096) for n in ("B", "L", "K", "N"))
    shapes = ({0: batch, 2: length}, {0: batch, 2: keys}, {0: batch, 2: keys}, {1: rows}, None, None)
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(
            Attention(backend=backend.name), tuple(tensors.values()), dynamic_shapes=shapes, strict=strict
        )
    nodes = [n.target for n in exported.graph.nodes if n.op == "call_function" and "txl" in str(n.target)]
    assert nodes == [torch.ops.txl_kernels.rel_attention.default]
    torch.export.save(exported, tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2").module()
    for sizes in (dict(B=2, L=5, K=9, N=6), dict(B=3, L=20, K=77, N=40)):
        tensors = inputs(**sizes, dtype=backend.dtypes[0], device=backend.device)
        assert torch.equal(loaded(*tensors.values()), run(backend, tensors)["out"])


# ---- autocast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", each_fused(bf16))
def test_autocast(backend):
    """Inputs are cast, outputs are in the autocast dtype, gradients come back in the dtype of the leaves."""
    tensors = inputs(B=2, L=20, K=33, D=16, dtype=f32, device=backend.device)
    dout = randn_like(tensors["q"]).to(bf16)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    with torch.autocast(backend.device, dtype=bf16):
        out, lse = rel_attention(**leaves, return_lse=True, backend=backend.name)
    assert out.dtype == bf16 and lse.dtype == f32
    out.backward(dout)
    expected = run(backend, {n: t.to(bf16) for n, t in tensors.items()}, dout)
    assert torch.equal(out, expected["out"]) and torch.equal(lse, expected["lse"])
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == f32
        assert torch.equal(leaf.grad, expected[f"d{name}"].float())


@pytest.mark.parametrize("backend", each_fused(bf16))
def test_autocast_of_mixed_dtypes(backend):
    """As in a model: q, k, v from an autocast Linear are bfloat16, r and the biases are still float32."""
    tensors = inputs(B=1, L=10, K=16, D=16, dtype=f32, device=backend.device)
    mixed = {n: t.to(bf16) if n in ("q", "k", "v") else t for n, t in tensors.items()}
    with torch.autocast(backend.device, dtype=bf16):
        out = rel_attention(**mixed, backend=backend.name)
    assert torch.equal(out, run(backend, {n: t.to(bf16) for n, t in tensors.items()})["out"])
    with pytest.raises(TypeError, match=r"r: got torch\.float32"):
        rel_attention(**mixed, backend=backend.name)


@pytest.mark.parametrize("backend", each_fused(f64))
def test_autocast_leaves_float64_alone(backend):
    tensors = inputs(L=10, K=16, dtype=f64, device=backend.device)
    with torch.autocast(backend.device, dtype=bf16):
        out = rel_attention(**tensors, backend=backend.name)
    assert torch.equal(out, run(backend, tensors)["out"])


@pytest.mark.parametrize("backend", each_fused(bf16))
def test_compiled_autocast(backend):
    tensors = inputs(L=10, K=16, dtype=backend.dtypes[0], device=backend.device)
    compiled = torch.compile(rel_attention, fullgraph=True, backend="aot_eager")
    with torch.autocast(backend.device, dtype=bf16):
        assert torch.equal(
            compiled(**tensors, backend=backend.name), rel_attention(**tensors, backend=backend.name)
        )


# ---- the rest of autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", each_fused())
def test_forward_mode_is_refused(backend, requires_grad):
    """No formula for tangents: an error, not a derivative of zero."""
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    q = tensors["q"].requires_grad_(requires_grad)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward mode"):
            rel_attention(**{**tensors, "q": dual}, backend=backend.name)


@pytest.mark.parametrize("other_requires_grad", [False, True])
@pytest.mark.parametrize("backend", each_fused())
def test_forward_mode_is_refused_in_torch_func(backend, other_requires_grad):
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    k = tensors.pop("k")
    tensors["q"].requires_grad_(other_requires_grad)

    def of_keys(k):
        return rel_attention(**tensors, k=k, backend=backend.name)

    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(of_keys, (k,), (torch.ones_like(k),))
    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jacfwd(of_keys)(k)
    with pytest.raises(Exception, match="forward mode"):
        torch.compile(
            lambda k: torch.func.jvp(of_keys, (k,), (torch.ones_like(k),)), backend="eager", fullgraph=True
        )(k)


@pytest.mark.parametrize("backend", each_backend())
def test_numbers_of_numpy(backend):
    tensors = inputs(L=4, K=6, causal=False, dtype=backend.dtypes[0], device=backend.device)
    options = dict(window_size=(3, 1), r_zero=5, scale=0.25, dropout_p=0.5, dropout_seed=2**63 + 1)
    kinds = dict(r_zero=np.int32, scale=np.float32, dropout_p=np.float16, dropout_seed=np.uint64)
    theirs = {name: kind(options[name]) for name, kind in kinds.items()}
    theirs["window_size"] = (np.int64(3), np.int8(1))
    got, expected = (
        rel_attention(**tensors, causal=False, backend=backend.name, **of) for of in (theirs, options)
    )
    assert torch.equal(got, expected)


class Wrapped(torch.Tensor):
    """Somebody's, who says what becomes of an op."""

    asked: ClassVar[list[object]] = []

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked.append(func)
        return func(*(x.x if isinstance(x, Wrapped) else x for x in args), **(kwargs or {}))


@pytest.mark.parametrize("name", ["q", "v", "bias_v"])
def test_a_wrapped_tensor_sees_the_op(name, monkeypatch):
    monkeypatch.setattr(Wrapped, "asked", [])
    tensors = inputs(L=4, K=6, dtype=f32)
    got = rel_attention(**{**tensors, name: Wrapped(tensors[name])}, scale=0.3)
    assert Wrapped.asked == [torch.ops.txl_kernels.rel_attention.default]
    assert torch.equal(got, rel_attention(**tensors, scale=0.3))


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("backend", each_fused())
def test_gradients_by_torch_func(backend):
    """The same bits as autograd's, of several entries at once too; and no gradients of gradients."""
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    names = tuple(tensors)

    def attend(*given):
        return rel_attention(**dict(zip(names, given, strict=True)), backend=backend.name)

    def total(*given):
        return attend(*given).square().sum()

    given, each = tuple(tensors.values()), tuple(range(len(names)))
    leaves = [x.clone().requires_grad_() for x in given]
    expected = torch.autograd.grad(total(*leaves), leaves)
    _, pull = torch.func.vjp(total, *given)
    for got in (torch.func.grad(total, each)(*given), pull(torch.ones_like(total(*given)))):
        assert all(map(torch.equal, got, expected))

    q, *rest = given
    of_q = torch.vmap(torch.func.grad(total, each), (0, *(None for _ in rest)))(
        torch.stack([2 * q, q]), *rest
    )
    assert all(torch.equal(got[1], one) for got, one in zip(of_q, expected, strict=True))
    rows = torch.func.jacrev(lambda q: attend(q, *rest)[0, 0, 0])(q)
    for row, dout in zip(rows, torch.eye(q.shape[-1], dtype=q.dtype, device=q.device), strict=True):
        _, pull = torch.func.vjp(lambda q: attend(q, *rest)[0, 0, 0], q)
        torch.testing.assert_close(row, pull(dout)[0])
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        torch.func.grad(lambda q: torch.func.grad(total)(q, *rest).sum())(q)
    with pytest.raises(NotImplementedError, match=r"forward mode .* not supported by rel_attention"):
        torch.func.hessian(lambda q: total(q, *rest))(q)


@pytest.mark.parametrize("backend", each_fused())
def test_functionalize(backend):
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    q = tensors.pop("q")

    def attend(q):
        return rel_attention(q, **tensors, backend=backend.name)

    assert torch.equal(torch.func.functionalize(attend)(q), attend(q))
    graph = make_fx(torch.func.functionalize(attend))(q)
    assert torch.ops.txl_kernels.rel_attention.default in {node.target for node in graph.graph.nodes}


@pytest.mark.parametrize("backend", each_fused())
def test_tangents_of_dout_are_refused(backend):
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    out = rel_attention(**{**tensors, "v": tensors["v"].requires_grad_()}, backend=backend.name)
    with torch.autograd.forward_ad.dual_level():
        dout = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="forward mode"):
            torch.autograd.grad(out, tensors["v"], dout)


def test_reference_has_what_the_errors_say():
    """Forward mode, and gradients of gradients."""
    tensors = inputs(B=1, H=2, L=3, K=5, D=4, dtype=f64)

    def attend(*given):
        return rel_attention(*given, backend="reference")

    given = tuple(tensors.values())
    tangents = tuple(torch.randn_like(t) for t in given)
    _, got = torch.func.jvp(attend, given, tangents)
    step = 1e-6
    ahead, behind = (
        attend(*(x + sign * step * t for x, t in zip(given, tangents, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close(got, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradgradcheck(attend, tuple(t.requires_grad_() for t in given))


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", each_fused())
def test_vmap(backend, requires_grad):
    """One call for each entry, by torch's fallback."""
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    tensors["k"].requires_grad_(requires_grad)
    q = tensors.pop("q")
    qs = torch.stack([q, 2 * q, 3 * q])

    def attend(q):
        return rel_attention(q, **tensors, backend=backend.name)

    assert torch.equal(torch.vmap(attend)(qs), torch.stack([attend(q) for q in qs]))


@pytest.mark.parametrize("backend", each_fused())
def test_saved_for_backward(backend):
    """q, k, v, r, both biases, out and lse, and nothing larger."""
    tensors = inputs(B=1, H=2, L=40, K=90, D=8, dtype=backend.dtypes[0], device=backend.device)
    saved = []

    def pack(t):
        saved.append(t)
        return t

    leaves = {n: t.requires_grad_() for n, t in tensors.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, lse = rel_attention(**leaves, return_lse=True, backend=backend.name)
    expected = [t.data_ptr() for t in (*leaves.values(), out, lse)]
    assert sorted(t.data_ptr() for t in saved) == sorted(expected)


@pytest.mark.parametrize("backend", each_fused())
def test_unused_output_passes_no_gradient(backend):
    tensors = inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device)
    q = tensors["q"].requires_grad_()
    out, lse = rel_attention(**tensors, return_lse=True, backend=backend.name)
    with pytest.raises(RuntimeError, match="does not require grad"):
        lse.sum().backward()
    (q * 2 + out * 0).sum().backward()
    assert torch.equal(q.grad, torch.full_like(q, 2.0))


@pytest.mark.parametrize("backend", each_fused())
def test_inputs_changed_after_forward_are_noticed(backend):
    """Backward recomputes from the inputs: changing one in between is an error, as for torch's own ops."""
    for name in TENSORS:
        tensors = {
            n: t.clone() for n, t in inputs(L=4, K=6, dtype=backend.dtypes[0], device=backend.device).items()
        }
        weight = torch.ones((), device=backend.device, requires_grad=True)
        out = rel_attention(
            **{n: t * weight for n, t in tensors.items() if n != name},
            **{name: tensors[name]},
            backend=backend.name,
        )
        tensors[name].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("backend", each_fused())
def test_no_tangents_within_a_level_of_forward_mode(backend) -> None:
    """Only tensors with one are refused; absent biases have none."""
    tensors = inputs(bias=False, dtype=backend.dtypes[0], device=backend.device)
    expected = rel_attention(**tensors, backend=backend.name)
    with forward_ad.dual_level():
        assert torch.equal(rel_attention(**tensors, backend=backend.name), expected)


# ---- Training where nobody traces: past the op, unless somebody is to see it

DROPPED = dict(dropout_p=0.3, dropout_seed=3)


def trained(tensors, dout, call=rel_attention, **options):
    """Gradients of all inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors.values()]
    call(*leaves, **options).backward(dout)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("backend", each_fused())
def test_training_calls_no_op_of_python(backend, monkeypatch):
    tensors = inputs(dtype=backend.dtypes[0], device=backend.device)
    dout = randn_like(tensors["q"])
    options = dict(DROPPED, backend=backend.name)
    seen = OpsSeen()
    with seen:
        expected = trained(tensors, dout, **options)
    # A mode that counts operations, say, sees both.
    ours = ("txl_kernels.rel_attention.default", "txl_kernels.rel_attention_backward.default")
    assert tuple(name for name in seen.names if name.startswith("txl_kernels.rel_")) == ours
    for op in ("_rel_attention", "_rel_attention_backward"):
        monkeypatch.setattr(ops, op, None)
    for got, exact in zip(trained(tensors, dout, **options), expected, strict=True):
        assert torch.equal(got, exact)


class OpsSeen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def checkpointed(use_reentrant):
    return lambda *args, **options: checkpoint(
        lambda *tensors: rel_attention(*tensors, **options), *args, use_reentrant=use_reentrant
    )


def offloaded(*args, **options):
    with torch.autograd.graph.save_on_cpu():
        return rel_attention(*args, **options)


@pytest.mark.parametrize(
    "call",
    [checkpointed(False), checkpointed(True), offloaded],
    ids=["computed-again", "reentrant", "saved-elsewhere"],
)
@pytest.mark.parametrize("backend", each_fused())
def test_what_is_saved_may_be_kept_otherwise(backend, call):
    tensors = inputs(dtype=backend.dtypes[0], device=backend.device)
    dout = randn_like(tensors["q"])
    options = dict(DROPPED, backend=backend.name)
    expected = trained(tensors, dout, **options)
    for got, exact in zip(trained(tensors, dout, call, **options), expected, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.parametrize("backend", each_fused())
def test_several_gradients_at_once(backend):
    """is_grads_batched, and so jacobian(vectorize=True): by a vmap that is not torch.func's."""
    tensors = inputs(dtype=backend.dtypes[0], device=backend.device)
    leaves = {name: x.requires_grad_() for name, x in tensors.items() if x is not None}
    out = rel_attention(**leaves, backend=backend.name)
    douts = torch.stack([randn_like(out) for _ in range(3)])

    def gradients(dout, **options):
        return torch.autograd.grad(out, list(leaves.values()), dout, retain_graph=True, **options)

    each = [gradients(dout) for dout in douts]
    for got, *want in zip(gradients(douts, is_grads_batched=True), *each, strict=True):
        assert torch.equal(got, torch.stack(want))


def test_compiled_autograd():
    tensors = inputs()
    dout = randn_like(tensors["q"])
    expected = trained(tensors, dout, **DROPPED)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for got, exact in zip(trained(tensors, dout, **DROPPED), expected, strict=True):
            assert torch.equal(got, exact)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_keeps_the_op(grad):
    tensors = [t.requires_grad_(grad) for t in inputs().values()]
    traced = torch.jit.trace(lambda *args: rel_attention(*args), tensors)
    assert "txl_kernels::rel_attention" in [node.kind() for node in traced.graph.nodes()]
    assert torch.equal(traced(*tensors), rel_attention(*tensors))

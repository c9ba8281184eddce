"""torch.ops.txl_kernels.rel_attention and its backward: schemas, shapes for tracing, autograd.

Only torch is needed here; a backend's kernels are loaded when an op first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from txl_kernels import registry
from txl_kernels.registry import Gradients, Inputs, Options

# `api.rel_attention` has validated the arguments and filled in every default. Only the backend may still be
# None: it is chosen when an op runs, so an exported graph runs on what its machine has.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor r, Tensor? bias_u, Tensor? bias_v, "
    "Tensor? key_range, Tensor? dropout_seed"
)
_OPTIONS = (
    "bool causal, SymInt window_left, SymInt window_right, SymInt r_zero, float scale, float dropout_p, "
    "str? backend"
)
_N_INPUTS, _N_OPTIONS = len(Inputs._fields), len(Options._fields) + 1

_lib = torch.library.Library("txl_kernels", "FRAGMENT")
_lib.define(f"rel_attention({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_lib.define(
    f"rel_attention_backward(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, bool[3] wanted, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dr, Tensor du, Tensor dv_bias)"
)
_rel_attention = torch.ops.txl_kernels.rel_attention.default
_rel_attention_backward = torch.ops.txl_kernels.rel_attention_backward.default


def rel_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """The op's out and lse.

    Where nobody traces, the backend is called directly: an op written in Python costs more than all else
    around a decode kernel, and with torch's autograd of it more than a small layer's training.
    """
    inputs = args[:_N_INPUTS]
    if forward_ad._current_level >= 0:
        _refuse_tangents(inputs)
    function: Any = _RelAttention
    if _is_traced(inputs):
        if torch.compiler.is_compiling() or not _is_differentiated():
            return _rel_attention(*args)
        function = _Transformed
    elif not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return _forward(*args)
    output: tuple[Tensor, Tensor] = function.apply(*args)
    return output


def _is_differentiated() -> bool:
    """By torch.func's grad, vjp or jacrev, not by autograd."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    return any(one.key() == torch._C._functorch.TransformType.Grad for one in transforms)


_PLAIN = frozenset((Tensor, Parameter, type(None)))


def _is_traced(tensors: Sequence[Tensor | None]) -> bool:
    """Whether somebody, not only the backend, is to see the op: by a mode, or by the type of one, as of a
    fake tensor."""
    first = tensors[0]
    assert first is not None
    return (
        registry.is_traced()
        or first.is_meta
        or registry.is_batched(first)
        or not _PLAIN.issuperset(map(type, tensors))
    )


def _refuse_tangents(tensors: Iterable[Tensor | None]) -> None:
    """torch itself would take a derivative that it knows no formula for as zero."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        _no_forward_mode(None)


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "forward mode differentiation (jvp) is not supported by rel_attention; backend='reference' has it"
    )


def _choose(backend: str | None, q: Tensor) -> registry.Backend:
    return registry.choose(backend, q.device, q.dtype, q.shape[-1])


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs, options, name = forward_arguments(args)
    backend = _choose(name, inputs.q)
    return registry.new_results(inputs.q) if inputs.q.numel() == 0 else backend.forward(inputs, options)


def _backward(dout: Tensor, *args: Any) -> Gradients:
    inputs, out, lse, wanted, options, name = backward_arguments(args)
    backend = _choose(name, inputs.q)
    if inputs.q.numel() != 0:
        return backend.backward(dout, inputs, out, lse, wanted, options)
    gradients = registry.new_gradients(inputs, wanted)
    for gradient in gradients:  # of keys, positions and biases that nobody used
        gradient.zero_()
    return gradients


def forward_arguments(args: tuple[Any, ...]) -> tuple[Inputs, Options, str | None]:
    return Inputs(*args[:_N_INPUTS]), Options(*args[_N_INPUTS:-1]), args[-1]


def backward_arguments(
    args: tuple[Any, ...],
) -> tuple[Inputs, Tensor, Tensor, registry.Wanted, Options, str | None]:
    """Backward's but dout."""
    inputs, (out, lse, wanted, *options, name) = Inputs(*args[:_N_INPUTS]), args[_N_INPUTS:]
    return inputs, out, lse, wanted, Options(*options), name


_lib.impl("rel_attention", _forward, "CompositeExplicitAutograd")
_lib.impl("rel_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("txl_kernels::rel_attention", lib=_lib)
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return registry.new_results(q)


@torch.library.register_fake("txl_kernels::rel_attention_backward", lib=_lib)
def _(dout: Tensor, *args: Any) -> Gradients:
    inputs, _, _, wanted, *_ = backward_arguments(args)
    return registry.new_gradients(inputs, wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_N_INPUTS], out, lse)
    ctx.options = inputs[_N_INPUTS:]


def _gradients(
    ctx: Any, dout: Tensor | None, _dlse: None, backward: Callable[..., Gradients] | None = None
) -> tuple[Tensor | None, ...]:
    unused = (None,) * (2 + _N_OPTIONS)  # key_range and dropout_seed, options
    if dout is None:
        return (None,) * 6 + unused
    _refuse_tangents((dout,))
    *inputs, out, lse = ctx.saved_tensors
    if backward is None:
        # With create_graph, which is refused if it comes to using that graph.
        seen = torch.is_grad_enabled() or _is_traced((dout,))
        backward = _rel_attention_backward if seen else _backward
    _, _, _, *wanted = ctx.needs_input_grad[:6]  # of q, k and v all are made
    gradients = backward(dout, *inputs, out, lse, wanted, *ctx.options)
    return *registry.given(gradients, wanted), *unused


class _RelAttention(torch.autograd.Function):
    """The op where nobody traces. In one with its context: a `setup_context` of its own costs more."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_gradients)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "double backward is not supported by rel_attention: its gradients cannot be differentiated again. "
        "backend='reference' can: it is plain PyTorch."
    )


class _Transformed(torch.autograd.Function):
    """The op to torch.func's grad, which asks for a Function in this form and makes none of an op."""

    generate_vmap_rule = True
    setup_context = staticmethod(_save)
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = _rel_attention(*args)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dout, dlse, _TransformedBackward.apply)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True
    backward = staticmethod(_no_double_backward)
    jvp = staticmethod(_no_forward_mode)

    @staticmethod
    def forward(*args: Any) -> Gradients:
        gradients: Gradients = _rel_attention_backward(*args)
        return gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        pass


torch.library.register_autograd("txl_kernels::rel_attention", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("txl_kernels::rel_attention_backward", _no_double_backward, lib=_lib)

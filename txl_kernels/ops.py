"""torch.ops.txl_kernels.rel_attention and its backward: schemas, shapes for tracing, autograd.

Only torch is needed here; a backend's kernels are loaded when an op first runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from txl_kernels import registry

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
_N_INPUTS, _N_OPTIONS = 8, 7

_lib = torch.library.Library("txl_kernels", "FRAGMENT")
_lib.define(f"rel_attention({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)")
_lib.define(
    f"rel_attention_backward(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dr, Tensor du, Tensor dv_bias)"
)
_rel_attention = torch.ops.txl_kernels.rel_attention.default
_rel_attention_backward = torch.ops.txl_kernels.rel_attention_backward.default


def rel_attention(*args: Any) -> tuple[Tensor, Tensor]:
    """The op's out and lse.

    Where nobody differentiates or traces, the backend is called directly: an op written in Python costs more
    than all else around a decode kernel.
    """
    inputs = args[:_N_INPUTS]
    if torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    ):
        return _rel_attention(*args)
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise NotImplementedError(
            "forward mode differentiation (jvp) is not supported by rel_attention; backend='reference' has it"
        )
    return _forward(*args)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    *arguments, backend = args
    q = args[0]
    return registry.choose(backend, q.device, q.dtype, q.shape[-1]).forward(*arguments)


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *arguments, backend = args
    q = args[1]
    return registry.choose(backend, q.device, q.dtype, q.shape[-1]).backward(*arguments)


_lib.impl("rel_attention", _forward, "CompositeExplicitAutograd")
_lib.impl("rel_attention_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("txl_kernels::rel_attention", lib=_lib)
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    B, H, L, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return registry.dense_like(q), q.new_empty((B, H, L), dtype=lse_dtype)


@torch.library.register_fake("txl_kernels::rel_attention_backward", lib=_lib)
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    d_bias = (q.new_empty(0 if bias is None else bias.shape) for bias in (bias_u, bias_v))
    return *(registry.dense_like(x) for x in (q, k, v, r)), *d_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:_N_INPUTS], out, lse)
    ctx.options = inputs[_N_INPUTS:]


def _gradients(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
    unused = (None,) * (2 + _N_OPTIONS)  # key_range and dropout_seed, options
    if dout is None:
        return (None,) * 6 + unused
    *inputs, out, lse = ctx.saved_tensors
    *gradients, du, dv_bias = _rel_attention_backward(dout, *inputs, out, lse, *ctx.options)
    bias_u, bias_v = inputs[4:6]
    return *gradients, None if bias_u is None else du, None if bias_v is None else dv_bias, *unused


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "double backward is not supported by rel_attention: its gradients cannot be differentiated again. "
        "backend='reference' can: it is plain PyTorch."
    )


torch.library.register_autograd("txl_kernels::rel_attention", _gradients, setup_context=_save, lib=_lib)
torch.library.register_autograd("txl_kernels::rel_attention_backward", _no_double_backward, lib=_lib)

"""Backend "cpu": makes last dimensions contiguous, allocates gradients, calls the kernels of csrc/cpu/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from txl_kernels.registry import (
    Gradients,
    Inputs,
    Options,
    Wanted,
    is_batched,
    is_traced,
    load_library,
    run_backward,
)

NAME = "cpu"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_DENSE = (Tensor, torch.nn.Parameter)
_LIBRARY = Path(__file__).with_name("libtxl_cpu.so")
_MEND = "build it with `pip install -e .` in the source tree (needs a C++ compiler)"

_forward_op: Any = None  # once the library is loaded, and has a level that runs here


def unavailable() -> str | None:
    """Why the backend cannot run on this machine, and the mend; None if it can. Loads the library, once."""
    global _forward_op
    if _forward_op is not None:
        return None
    reason = load_library(_LIBRARY, "C++", _MEND)
    if reason is not None:
        return reason
    try:
        torch.ops.txl_kernels.cpu_level()
    except RuntimeError as error:  # TXL_CPU_LEVEL asks for one that is not there
        return str(error)
    _forward_op = torch.ops.txl_kernels.cpu_forward.default
    return None


def takes(*tensors: Tensor) -> bool:
    """Dense tensors on the CPU of DTYPES, where nobody traces and outside of forward mode's levels. Other
    kinds (sharded, fake, sparse, in torch.func) are torch's."""
    return not is_traced() and forward_ad._current_level < 0 and all(map(_is_dense, tensors))


def _is_dense(x: Tensor) -> bool:
    return (
        x.is_cpu
        and x.dtype in DTYPES
        and type(x) in _DENSE
        and x.layout is torch.strided
        and not x.is_nested
        and not is_batched(x)
    )


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot serve tensors of this device, dtype and D; None if it can."""
    if device.type != "cpu":
        return f"it needs tensors on the CPU, q is on {device}"
    if dtype not in DTYPES:
        return f"it needs one of {', '.join(map(str, DTYPES))}, q is {dtype}"
    return None


def details() -> dict[str, str]:
    """The vector level in use, and those that were built and run on this CPU."""
    return {"level": torch.ops.txl_kernels.cpu_level(), "levels": torch.ops.txl_kernels.cpu_levels()}


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D], lse [B, H, L]."""
    results: tuple[Tensor, Tensor] = _forward_op(*inputs.prepared(), *options)
    return results


def backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, wanted: Wanted, options: Options
) -> Gradients:
    """Gradients of q, k, v, r, bias_u and bias_v; one that is not wanted has no elements."""
    return run_backward(torch.ops.txl_kernels.cpu_backward.default, dout, inputs, out, lse, wanted, options)


def layers(
    h: Tensor,
    keys_values: list[Tensor],
    begin: int,
    end: int,
    r: list[Tensor],
    weights: list[Tensor],
    key_range: Tensor | None,
    window_left: int,
    scale: float,
    eps: float,
    norm_first: bool,
) -> Tensor:
    """Layers of Transformer-XL, one after the other, for up to eight tokens h [B, T, d_model]; no gradients.

    Causal, r_zero = N - 1. Everything contiguous and of one dtype.

    Args:
        keys_values: of each layer, [2, B, H, capacity, D]. The keys begin <= j < end are attended; the last T
            of them are room for those of h, which the call writes.
        r: of each layer, [H, N, D].
        weights: of each layer u and v [H, D]; what makes q, k and v [3 H D, d_model]; what takes attention's
            result [d_model, H D]; LayerNorm's weight and bias [d_model]; weight and bias of feed-forward's
            halves, [d_inner, d_model] and [d_model, d_inner]; LayerNorm's again.
        key_range: int32 [B, 2] or None, as of `rel_attention`.
        window_left: keys seen before a query's own; -1: all.
        scale: of attention's scores.
        eps: LayerNorm's.
        norm_first: pre-LN: LayerNorm of what attention and feed-forward read, not of the sums they end in.

    Returns:
        [B, T, d_model].

    Raises:
        RuntimeError: for tensors that do not go together.
    """
    out = torch.empty_like(h)
    torch.ops.txl_kernels.cpu_layers.default(
        h, keys_values, begin, end, r, weights, key_range, window_left, scale, eps, norm_first, out
    )
    return out

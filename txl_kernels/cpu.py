"""Backend "cpu": allocates, makes last dimensions contiguous, and calls the kernels of csrc/cpu/."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from txl_kernels.registry import compact, contiguous_rows, dense_like, load_library, new_gradients

NAME = "cpu"
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

_DENSE = (Tensor, torch.nn.Parameter)
_LIBRARY = Path(__file__).with_name("libtxl_cpu.so")
_OPS = ("cpu_forward", "cpu_backward", "cpu_linear", "cpu_layers", "cpu_dropout")
_MEND = "build it with `pip install -e .` in the source tree (needs a C++ compiler)"

_loaded = False
_reason: str | None = None


def unavailable() -> str | None:
    """Why the backend cannot run on this machine, and the mend; None if it can. Loads the library, once."""
    global _loaded, _reason
    if not _loaded:
        _reason = _load()
        _loaded = _reason is None
    return _reason


def _load() -> str | None:
    return load_library(
        _LIBRARY, "C++", ("cpu_forward", "cpu_backward", "cpu_linear", "cpu_layers", "cpu_dropout"), _MEND
    )


def takes(x: Tensor) -> bool:
    """A dense tensor on the CPU of one of DTYPES, outside of the compiler. Other kinds (sharded, fake, in
    torch.func) are torch's."""
    return (
        not torch.compiler.is_compiling()
        and x.is_cpu
        and x.dtype in DTYPES
        and type(x) in _DENSE
        and not torch._C._are_functorch_transforms_active()
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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    key_range: Tensor | None,
    dropout_seed: Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    r_zero: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D], lse [B, H, L]."""
    out = dense_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)
    if out.numel() != 0:
        torch.ops.txl_kernels.cpu_forward.default(
            contiguous_rows(q),
            contiguous_rows(k),
            contiguous_rows(v),
            contiguous_rows(r),
            compact(bias_u),
            compact(bias_v),
            compact(key_range),
            dropout_seed,
            causal,
            window_left,
            window_right,
            r_zero,
            scale,
            dropout_p,
            out,
            lse,
        )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    key_range: Tensor | None,
    dropout_seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    r_zero: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, r, bias_u and bias_v; an absent bias has one of no elements."""
    dq, dk, dv, dr, du, dv_bias = new_gradients(q, k, v, r, bias_u, bias_v)
    if q.numel() == 0:  # no query: keys, positions and biases that nobody used
        for gradient in (dk, dv, dr, du, dv_bias):
            gradient.zero_()
    else:
        torch.ops.txl_kernels.cpu_backward.default(
            contiguous_rows(dout),
            contiguous_rows(q),
            contiguous_rows(k),
            contiguous_rows(v),
            contiguous_rows(r),
            compact(bias_u),
            compact(bias_v),
            compact(key_range),
            dropout_seed,
            contiguous_rows(out),
            lse.contiguous(),
            causal,
            window_left,
            window_right,
            r_zero,
            scale,
            dropout_p,
            dq,
            dk,
            dv,
            dr,
            None if bias_u is None else du,
            None if bias_v is None else dv_bias,
        )
    return dq, dk, dv, dr, du, dv_bias


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

"""Relative attention in readable PyTorch.

`reference` is the definition: what it computes, every backend computes. `shift`, `naive` and `naive_gather`
reach the same numbers by the ways that were there before; benchmarks measure against them.

B batch, H heads, L queries, K keys, N rows of r, D = d_head.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from txl_kernels import philox

# ---- Indices and masks -------------------------------------------------------------------------------------


def default_r_zero(causal: bool, N: int, L: int) -> int:
    """The row of r that holds distance 0: the last, or the one before distances -1 ... -(L - 1)."""
    return N - 1 if causal else N - L


def relative_rows(L: int, K: int, N: int, r_zero: int, device: torch.device | None = None) -> Tensor:
    """The row of r that query i and key j use: int64 [L, K]."""
    position = torch.arange(L, device=device)[:, None] + (K - L)  # of query i on the key axis
    distance = position - torch.arange(K, device=device)
    return (r_zero - distance).clamp(0, N - 1)


def visible_keys(
    L: int,
    K: int,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    key_range: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """True where query i may see key j: bool [1, 1, L, K] ([B, 1, L, K] with a key_range).

    Every row is one interval of keys.
    """
    left, right = window_size
    position = torch.arange(L, device=device)[:, None] + (K - L)
    key = torch.arange(K, device=device)
    visible = torch.ones(1, 1, L, K, dtype=torch.bool, device=device)
    if causal:
        visible = visible & (key <= position)
    if left >= 0:
        visible = visible & (key >= position - left)
    if right >= 0:
        visible = visible & (key <= position + right)
    if key_range is not None:
        start, end = key_range[:, :, None, None, None].unbind(1)  # [B, 1, 1, 1]
        visible = visible & (start <= key) & (key < end)
    return visible


# ---- NaN and infinity --------------------------------------------------------------------------------------
#
# A query is affected by what it sees and by nothing else. But in a matrix product a hidden key's probability,
# 0, times its NaN (memory nobody wrote to yet, say) is NaN. So products take the finite numbers, and NaN is
# added where it is seen.


class _Finite(torch.autograd.Function):
    """NaN and infinity replaced by 0; the gradient passes unchanged."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.where(torch.isfinite(x), x, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _FiniteInAnyMode(_Finite):
    """Tangents too, also under torch.vmap. Torch's compiler refuses a function that has such rules."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].clone()  # torch wants a tensor of its own


def _finite(x: Tensor) -> Tensor:
    return (_Finite if torch.compiler.is_compiling() else _FiniteInAnyMode).apply(x)


def _taint(x: Tensor) -> Tensor:
    """[..., D] -> [...]: NaN for a row that holds NaN or infinity, else 0."""
    return (x.detach() * 0).sum(-1)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x_i . y_j for every pair of rows: [..., rows of x, rows of y]. Only pairs of a tainted row are NaN."""
    return _finite(x) @ _finite(y).mT + _taint(x)[..., :, None] + _taint(y)[..., None, :]


# ---- The definition ----------------------------------------------------------------------------------------


def has_autocast(kind: str) -> bool:
    """Whether torch.autocast knows this kind of device. (torch 2.10's compiler cannot trace the question.)"""
    return kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    r_zero: int | None = None,
    key_range: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    upcast: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """`rel_attention`, defined. Arguments are the same, and not validated. Gradients by ordinary autograd.

    upcast: compute 16-bit inputs in float32 (as the kernels accumulate); False stays in the inputs' dtype
        throughout, which shows what that dtype alone costs.

    A query that sees a NaN or an infinity in k, r or v gets NaN (v: in that column); no other query does.
    Kernels may take a score that comes out as -inf, as a key of infinity can make it, for a weight of 0; if
    all that a query sees are such, it gets NaN.
    """
    dtype, device = q.dtype, q.device
    (B, H, L, D), K, N = q.shape, k.shape[2], r.shape[1]
    r_zero = default_r_zero(causal, N, L) if r_zero is None else r_zero
    scale = D**-0.5 if scale is None else scale
    seed = philox.seed_tensor(dropout_seed, device) if dropout_p > 0 else None

    kind = device.type
    with torch.autocast(kind, enabled=False) if has_autocast(kind) else contextlib.nullcontext():
        if upcast and dtype.itemsize < 4:
            q, k, v, r = q.float(), k.float(), v.float(), r.float()
            bias_u, bias_v = (None if bias is None else bias.float() for bias in (bias_u, bias_v))
        q_u = q if bias_u is None else q + bias_u[:, None]  # [B, H, L, D]
        q_v = q if bias_v is None else q + bias_v[:, None]

        content = _product(q_u, k)  # [B, H, L, K]
        by_row = _product(q_v, r)  # [B, H, L, N], a column per row of r
        rows = relative_rows(L, K, N, r_zero, device)  # [L, K]
        position = by_row.gather(-1, rows.expand(B, H, L, K))  # [B, H, L, K]

        visible = visible_keys(L, K, causal, window_size, key_range, device)  # [B or 1, 1, L, K]
        sees_a_key = visible.any(-1, keepdim=True)
        # A row of nothing but -inf has no softmax: a blank row gets zeros here, and zero probability below.
        hidden = torch.where(sees_a_key, -math.inf, 0.0).to(q.dtype)
        score = torch.where(visible, scale * (content + position), hidden)
        probability = torch.where(visible, score.softmax(-1), 0.0)
        if seed is not None:
            probability = (
                probability * philox.keep_mask(seed, dropout_p, B, H, L, K, device) / (1 - dropout_p)
            )

        sees_taint = visible.to(v.dtype) @ (~torch.isfinite(v)).to(v.dtype) > 0  # [B, H, L, D]
        out = (probability @ _finite(v)).masked_fill(sees_taint, math.nan)
        out = torch.where(sees_a_key, out, 0.0).to(dtype)
        if not return_lse:
            return out
        lse = score.detach().logsumexp(-1).masked_fill(~sees_a_key[..., 0], -math.inf)
    return out, lse.to(torch.float64 if dtype == torch.float64 else torch.float32)


# ---- Other ways to the same numbers ------------------------------------------------------------------------


def shift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    r_zero: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Appendix B of the paper as published: one product with every row of r, shifted by pad and view.

    Right only in the causal triangle, with one row of r per key. A query that may see no key gets NaN.

    q [B, H, L, D], k and v [B, H, K, D], r [H, K, D], biases [H, D] -> [B, H, L, D].
    """
    (B, H, L, D), K, N = q.shape, k.shape[2], r.shape[1]
    if not causal:
        raise ValueError("causal: got False; the shift by pad and view is right only for causal=True")
    if N != K:
        raise ValueError(f"r: got {N} rows; the shift needs one row per key, {K}, and does no clamp")
    if r_zero is not None and r_zero != N - 1:
        raise ValueError(f"r_zero: got {r_zero}; the shift needs distance 0 in the last row, {N - 1}")
    q_u = q if bias_u is None else q + bias_u[:, None]
    q_v = q if bias_v is None else q + bias_v[:, None]

    position = F.pad(q_v @ r.mT, (1, 0))  # [B, H, L, K + 1]
    position = position.view(B, H, K + 1, L)[:, :, 1:].view(B, H, L, K)
    score = (q_u @ k.mT).add_(position).mul_(D**-0.5 if scale is None else scale)
    score.masked_fill_(~visible_keys(L, K, True, window_size, device=q.device), -math.inf)
    return score.softmax(-1) @ v


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_emb: Tensor,
    w_kr: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    r_zero: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """The path the paper's Appendix B starts from: W_kR R_{i-j} computed for every pair (i, j).

    pos_emb [N, d_model] are the position embeddings R, furthest distance first; w_kr [H * D, d_model] is the
    weight of the projection as nn.Linear holds it. With F.linear(pos_emb, w_kr) split into heads for r
    [H, N, D], reference(q, k, v, r, ...) gives the same result.
    """
    (H, L, D), K, N = q.shape[1:], k.shape[2], pos_emb.shape[0]
    rows = relative_rows(L, K, N, default_r_zero(causal, N, L) if r_zero is None else r_zero, q.device)
    r_of_pair = F.linear(pos_emb[rows], w_kr).view(L, K, H, D).permute(2, 0, 1, 3)  # [H, L, K, D]
    return _attend_pairwise(q, k, v, r_of_pair, bias_u, bias_v, causal, window_size, scale)


def naive_gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    r_zero: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """`naive` without its projections: r [H, N, D], one row per distance, laid out for every pair."""
    L, K, N = q.shape[2], k.shape[2], r.shape[1]
    rows = relative_rows(L, K, N, default_r_zero(causal, N, L) if r_zero is None else r_zero, q.device)
    return _attend_pairwise(q, k, v, r[:, rows], bias_u, bias_v, causal, window_size, scale)


def _attend_pairwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r_of_pair: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """r_of_pair [H, L, K, D] -> [B, H, L, D]."""
    L, D, K = q.shape[2], q.shape[3], k.shape[2]
    q_u = q if bias_u is None else q + bias_u[:, None]
    q_v = q if bias_v is None else q + bias_v[:, None]
    position = torch.einsum("bhid,hijd->bhij", q_v, r_of_pair)
    score = (q_u @ k.mT).add_(position).mul_(D**-0.5 if scale is None else scale)
    score.masked_fill_(~visible_keys(L, K, causal, window_size, device=q.device), -math.inf)
    return score.softmax(-1) @ v

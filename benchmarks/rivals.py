"""The ways of computing relative attention: our backends, and what PyTorch has, each in its fastest form.

Every way is built for one problem and is then a function of (q, k, v, r, bias_u, bias_v), shapes as in
`rel_attention`, causal. B batch, H heads, L queries, K keys, N rows of r, D = d_head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import measure
import torch
import torch.nn.functional as F
from problem import BACKWARD, TRAIN, Problem
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from txl_kernels import backends, cuda, rel_attention
from txl_kernels.reference import naive as reference_naive

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Build = Callable[[Problem], tuple[Attend, list[Tensor]]]


def no_demand(problem: Problem, which: str) -> int:
    """Nothing worth an estimate."""
    return 0


@dataclass(frozen=True)
class Way:
    """One way of computing the attention.

    build: the function for one problem, and the tensors it keeps for it (masks), which count as memory.
    needs: an estimate of the bytes one pass takes, to refuse what cannot fit before trying it.
    work: an estimate of the floating-point operations, where they are far above the useful ones.
    kernel: which of its kernels PyTorch runs, where it has several and they differ.
    """

    name: str
    build: Build
    needs: Callable[[Problem, str], int] = no_demand
    work: Callable[[Problem, str], int] = no_demand
    kernel: Callable[[Problem], str | None] = lambda problem: None
    ours: bool = False
    compiled: bool = False
    position: bool = True  # False: leaves the position term out, so it is a floor and no rival


def ours(backend: str) -> Way:
    """A backend of this package."""
    attend = functools.partial(rel_attention, backend=backend)
    # The reference forms all scores; a fused backend forms none.
    needs = _scores(forward=7, training=8) if backend == "reference" else no_demand
    return Way(backend, lambda problem: (attend, []), needs, ours=True)


def by_warpgroups(on: bool) -> Way:
    """Backend "cuda", its forward by wgmma; or by mma.sync, where that has to be asked for."""

    def attend(*tensors: Tensor) -> Tensor:
        before, cuda.WARPGROUPS = cuda.WARPGROUPS, on
        try:
            return rel_attention(*tensors, backend="cuda")
        finally:
            cuda.WARPGROUPS = before

    return Way("cuda-wgmma" if on else "cuda-mma", lambda problem: (attend, []), ours=True)


# ---- What a pass needs, in tensors of [B, H, L, K] -----------------------------------------------


def _scores(forward: float, training: float) -> Callable[[Problem, str], int]:
    def needs(problem: Problem, which: str) -> int:
        return int((training if which in (BACKWARD, TRAIN) else forward) * problem.square_bytes())

    return needs


# ---- Every pair projected ------------------------------------------------------------------------


def _build_naive(problem: Problem) -> tuple[Attend, list[Tensor]]:
    # Embeddings and weight that give this r: its rows, and the identity. The product is done all the same, as
    # wide as in a published model, where d_model is about H * D.
    width = problem.heads * problem.d_head
    w_kr = torch.eye(width, dtype=problem.torch_dtype, device=problem.device)

    def naive(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        pos_emb = r.transpose(0, 1).reshape(r.shape[1], width)  # [N, H * D]
        return reference_naive(q, k, v, pos_emb, w_kr, u, w)

    return naive, []


def _pairwise_bytes(problem: Problem) -> int:
    """Bytes of one [L, K, H * D] tensor."""
    return problem.qlen * problem.klen * problem.heads * problem.d_head * problem.itemsize


def _naive_needs(problem: Problem, which: str) -> int:
    # The embeddings of every pair and their projection; backward, the gradients take their places.
    return int(2.1 * _pairwise_bytes(problem))


def _naive_work(problem: Problem, which: str) -> int:
    projections = 2 if which in (BACKWARD, TRAIN) else 1
    return projections * 2 * problem.qlen * problem.klen * (problem.heads * problem.d_head) ** 2


# ---- Appendix B: shifted by pad and view ---------------------------------------------------------


def every_distance(r: Tensor, klen: int) -> Tensor:
    """r with its first row repeated for clamped distances, as in published code. [H, N, D] -> [H, K, D]"""
    missing = klen - r.shape[1]
    return r if missing == 0 else torch.cat([r[:, :1].expand(-1, missing, -1), r], 1)


def _build_shift(problem: Problem) -> tuple[Attend, list[Tensor]]:
    hidden = _causal_bias(problem)  # [L, K]
    scale = problem.d_head**-0.5

    def shift(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        position = shifted(((q + w[:, None]) * scale) @ every_distance(r, k.shape[2]).mT)  # [B, H, L, K]
        score = ((q + u[:, None]) * scale) @ k.mT
        return score.add_(position).add_(hidden).softmax(-1) @ v

    return shift, [hidden]


def shifted(x: Tensor) -> Tensor:
    """Row i of L moved L - 1 - i places to the left; right where j <= i + K - L. [B, H, L, K]

    Without gradient that is free: a view. The gradient of that view costs more than pad and view.
    """
    return shift_by_copy(x) if x.requires_grad else shift_by_view(x)


def shift_by_copy(x: Tensor) -> Tensor:
    B, H, L, K = x.shape
    return F.pad(x, (1, 0)).view(B, H, K + 1, L)[:, :, 1:].view(B, H, L, K)


def shift_by_view(x: Tensor) -> Tensor:
    """Rows that lie one element closer together."""
    _, H, L, K = x.shape
    return x.as_strided(x.shape, (H * L * K, L * K, K - 1, 1), x.storage_offset() + L - 1)


def _causal_bias(problem: Problem) -> Tensor:
    """0 where query i may see key j, else -inf. [L, K]"""
    L, K = problem.qlen, problem.klen
    hidden = torch.full((L, K), -math.inf, dtype=problem.torch_dtype, device=problem.device)
    return hidden.triu_(K - L + 1)


def published(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Appendix B as the authors' code and its descendants write it: scores [L, K, B, H], cat and view."""
    L, K = q.shape[2], k.shape[2]
    r = every_distance(r, K).permute(1, 0, 2)  # [K, H, D]
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # [rows, B, H, D]
    content = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
    position = torch.einsum("ibnd,jnd->ijbn", q + w, r)
    padded = torch.cat([position.new_zeros(L, 1, *position.shape[2:]), position], 1)
    position = padded.view(K + 1, L, *position.shape[2:])[1:].view_as(position)
    hidden = torch.ones(L, K, dtype=torch.bool, device=q.device).triu(K - L + 1)
    scores = ((content + position) * q.shape[-1] ** -0.5).masked_fill(hidden[:, :, None, None], -math.inf)
    return torch.einsum("ijbn,jbnd->ibnd", scores.softmax(1), v).permute(1, 2, 0, 3)


# ---- Scaled dot-product attention over a materialised bias ---------------------------------------


def _build_sdpa_bias(problem: Problem) -> tuple[Attend, list[Tensor]]:
    hidden = _causal_bias(problem)  # [L, K]
    scale = problem.d_head**-0.5

    def sdpa_bias(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        position = shifted(((q + w[:, None]) * scale) @ every_distance(r, k.shape[2]).mT)  # [B, H, L, K]
        return F.scaled_dot_product_attention(q + u[:, None], k, v, attn_mask=position + hidden)

    return sdpa_bias, [hidden]


# ---- FlexAttention -------------------------------------------------------------------------------


def _build_flex(problem: Problem) -> tuple[Attend, list[Tensor]]:
    memory, last_row, scale = problem.klen - problem.qlen, problem.rows - 1, problem.d_head**-0.5

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + memory

    block_mask = create_block_mask(visible, None, None, problem.qlen, problem.klen, device=problem.device)

    def flex(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        # A score_mod sees one pair and can form no product, so the position scores come materialised.
        by_row = ((q + w[:, None]) * scale) @ r.mT  # [B, H, L, N]

        def add_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + by_row[b, h, i, (last_row + j - i - memory).clamp(0, last_row)]

        return flex_attention(q + u[:, None], k, v, score_mod=add_position, block_mask=block_mask)

    return _compile(flex), []


# ---- The floor: no position term -----------------------------------------------------------------


def _build_floor(problem: Problem) -> tuple[Attend, list[Tensor]]:
    if problem.on_gpu:
        backend = floor_kernel(problem)

        def on_gpu(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return _sdpa(q, k, v)

        return on_gpu, []
    if problem.qlen == 1:  # the one query sees every key
        return lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v), []
    if problem.qlen == problem.klen:
        return lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True), []
    return lambda q, k, v, *_: _MemoryAndSegment.apply(q, k, v), []


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, the last query at the last key: `is_causal=True` would put the first query at the first key."""
    L, K = q.shape[2], k.shape[2]
    mask = None if L == 1 else causal_lower_right(L, K)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@functools.cache
def floor_kernel(problem: Problem) -> SDPBackend:
    """The first of PyTorch's kernels that takes such tensors on this GPU: flash, unless they are float32."""
    inputs = replace(problem, batch=1, heads=1).inputs()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                _sdpa(*inputs[:3])
        except RuntimeError:  # "No available kernel"
            continue
        return backend
    return SDPBackend.MATH


class _MemoryAndSegment(torch.autograd.Function):
    """Causal attention of L queries over K > L keys by PyTorch's flash attention for CPUs.

    That kernel puts the causal triangle in the upper left corner, and given a mask instead it works through
    the hidden pairs as well. So memory (all visible) and segment (a square triangle) apart, merged by lse.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        memory = k.shape[2] - q.shape[2]
        out_m, lse_m = flash(q, k[:, :, :memory], v[:, :, :memory])
        out_s, lse_s = flash(q, k[:, :, memory:], v[:, :, memory:], is_causal=True)
        out = torch.lerp(out_m, out_s, torch.sigmoid(lse_s - lse_m)[..., None].to(q.dtype))
        ctx.save_for_backward(q, k, v, out, torch.logaddexp(lse_m, lse_s))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        (dout,) = grads
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        memory = k.shape[2] - q.shape[2]
        dq_m, dk_m, dv_m = flash_backward(dout, q, k[:, :, :memory], v[:, :, :memory], out, lse, 0.0, False)
        dq_s, dk_s, dv_s = flash_backward(dout, q, k[:, :, memory:], v[:, :, memory:], out, lse, 0.0, True)
        return dq_m + dq_s, torch.cat([dk_m, dk_s], 2), torch.cat([dv_m, dv_s], 2)


# ---- The list ------------------------------------------------------------------------------------


def _compile(attend: Attend) -> Attend:
    # Shapes are constants: the best code the compiler has for this problem.
    return torch.compile(attend, dynamic=False)


def _compiled(build: Build) -> Build:
    def compiled(problem: Problem) -> tuple[Attend, list[Tensor]]:
        attend, constants = build(problem)
        return _compile(attend), constants

    return compiled


# The factors of `needs` are those measured on CPUs, rounded up.
RIVALS = (
    Way("naive", _build_naive, needs=_naive_needs, work=_naive_work),
    Way("published", lambda problem: (published, []), needs=_scores(forward=6, training=8)),
    Way("shift", _build_shift, needs=_scores(forward=3.5, training=3.5)),
    Way("shift-compiled", _compiled(_build_shift), needs=_scores(forward=2.5, training=3.5), compiled=True),
    Way("sdpa-bias", _build_sdpa_bias, needs=_scores(forward=2.5, training=6)),
    Way(
        "sdpa-bias-compiled",
        _compiled(_build_sdpa_bias),
        needs=_scores(forward=2.5, training=3.5),
        compiled=True,
    ),
    Way("flex-compiled", _build_flex, needs=_scores(forward=1.5, training=3), compiled=True),
    Way(
        "sdpa-no-position",
        _build_floor,
        kernel=lambda problem: floor_kernel(problem).name if problem.on_gpu else None,
        position=False,
    ),
)
# What a plot calls them.
LABELS = {
    "naive": "R projected for every pair",
    "published": "Appendix B as published",
    "shift": "Appendix B, fastest eager form",
    "shift-compiled": "Appendix B, compiled",
    "sdpa-bias": "SDPA with the bias",
    "sdpa-bias-compiled": "SDPA with the bias, compiled",
    "flex-compiled": "FlexAttention, compiled",
    "sdpa-no-position": "SDPA without a position term: less work",
}
# The first two of RIVALS are there to show where the others come from.
GPU_RIVALS = tuple(way for way in RIVALS if way.name not in ("naive", "published"))


# ---- Memory of one way ---------------------------------------------------------------------------


def extra_memory(way: Way, problem: Problem, passes: list[str]) -> dict[str, int]:
    """Peak bytes of each pass beyond inputs and results. On the CPU measured in a fresh process."""
    if problem.on_gpu:
        return _extra_memory(way, problem, passes)
    return measure.in_fresh_process(extra_memory_here, way.name, asdict(problem), passes)


def extra_memory_here(name: str, problem: dict[str, Any], passes: list[str]) -> dict[str, int]:
    """What `extra_memory` has the process do."""
    way = next(way for way in (*map(ours, backends()), *RIVALS) if way.name == name)
    return _extra_memory(way, Problem(**problem), passes)


def _extra_memory(way: Way, problem: Problem, passes: list[str]) -> dict[str, int]:
    attend, constants = way.build(problem)
    kept = sum(tensor.nbytes for tensor in constants)
    return {which: kept + _extra_memory_of_pass(way, attend, problem, which) for which in passes}


def _extra_memory_of_pass(way: Way, attend: Attend, problem: Problem, which: str) -> int:
    task = measure.attention_task(attend, problem, which, [problem.inputs()])
    if way.compiled or problem.on_gpu:
        return measure.extra_memory(task, warm_up=task)
    small = replace(problem, qlen=min(problem.qlen, 32), klen=min(problem.klen, 64))
    warm_up = measure.attention_task(way.build(small)[0], small, which, [small.inputs()])
    return measure.extra_memory(task, warm_up)

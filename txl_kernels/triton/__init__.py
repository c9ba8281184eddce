"""Backend "triton": allocates, chooses tiles, and launches the kernels of _forward.py and _backward.py.

Under TRITON_INTERPRET=1 (set before Triton is first imported) the kernels run on CPU tensors, slowly: their
logic, without a GPU. In float32 and float16: in bfloat16 the interpreter computes garbage
(triton-lang/triton#11584).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from txl_kernels import gpu, philox
from txl_kernels.registry import (
    Gradients,
    Inputs,
    Options,
    Wanted,
    compact,
    new_gradients,
    new_results,
)
from txl_kernels.triton import configs
from txl_kernels.triton._backward import dk_dv_kernel, dq_kernel, dr_kernel
from txl_kernels.triton._chunks import Chunks
from txl_kernels.triton._chunks import cdiv as _cdiv
from txl_kernels.triton._forward import forward_kernel, merge_kernel
from txl_kernels.triton._operands import add_biases_kernel, delta_kernel
from txl_kernels.triton.configs import Tile
from txl_kernels.triton.tiles import Problem, View

NAME = "triton"
_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_OLDEST = (3, 6)
INTERPRETED = _VERSION >= _OLDEST and bool(triton.knobs.runtime.interpret)
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)

KERNELS = {
    "forward": forward_kernel,
    "decode": forward_kernel,
    "dq": dq_kernel,
    "dk_dv": dk_dv_kernel,
    "dr": dr_kernel,
}
_MAX_ROW_STRIDE = 2**31 // configs.LARGEST  # of a tile's rows, whose offsets are 32-bit numbers
# A multiply and an add in one instruction. From Triton 3.10 on the default is not to; 3.9 warns of it.
_FUSED = {"enable_fp_fusion": True}
# Score pairs of a call from which on it is worth measuring tiles.
_TUNE_PAIRS = 2**26


def unavailable() -> str | None:
    """Why the backend cannot run on this machine, and the mend; None if it can."""
    if _VERSION < _OLDEST:
        return f"it needs Triton 3.6 or later, this is {triton.__version__}; pip install --upgrade triton"
    if INTERPRETED and isinstance(tl.cdiv, triton.JITFunction):
        return "TRITON_INTERPRET=1 was set after Triton had been imported: set it before Python starts"
    if not INTERPRETED and not torch.cuda.is_available():
        return (
            "torch sees no GPU (torch.cuda.is_available() is False); with TRITON_INTERPRET=1 in the "
            "environment the kernels run on CPU tensors, slowly"
        )
    return None


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot serve tensors of this device, dtype and D; None if it can."""
    if INTERPRETED and device.type != "cpu":
        return f"under TRITON_INTERPRET=1 it takes tensors on the CPU, q is on {device}"
    if not INTERPRETED and device.type != "cuda":
        return f"it needs tensors on a GPU, q is on {device}"
    if dtype not in DTYPES:
        return f"it needs one of {', '.join(map(str, DTYPES))}, q is {dtype}"
    if torch.version.hip is None and not INTERPRETED and torch.cuda.get_device_capability(device) < (8, 0):
        return f"it needs compute capability 8.0 or later, {torch.cuda.get_device_name(device)} has less"
    return None


def details() -> dict[str, str]:
    """For the report."""
    return {
        "mode": "interpreted on the CPU" if INTERPRETED else "compiled",
        "autotune": "on" if configs.autotune() else "off",
    }


# ---- Choosing tiles and launching --------------------------------------------------------------------------


@functools.cache
def _arch(device: torch.device) -> int | str | None:
    if INTERPRETED:
        return None
    with gpu.current(device):
        return triton.runtime.driver.active.get_current_target().arch


def _tuning_key(name: str) -> list[str]:
    """What the best tile depends on, of the kernel's arguments; D comes first."""
    return [n for n in ("D", "CLAMP", "DROPOUT") if n in KERNELS[name].arg_names]


def _tuner(name: str, tiles: tuple[Tile, ...], arch: int | str | None) -> Any:
    """One for each time: while it measures it holds the arguments."""
    choices = [triton.Config(tile.constants, **tile.options(arch)) for tile in tiles]
    return triton.autotune(choices, key=_tuning_key(name), cache_results=True)(KERNELS[name])


_tuned: dict[tuple[Any, ...], Tile] = {}
_tuning = threading.Lock()  # autograd has a thread for each GPU


def tuned() -> list[str]:
    """The tiles that the tuner chose in this process, a line each: by measuring, or by what it has kept of
    earlier processes' measurements. Other calls took the defaults."""
    return [
        f"{kernel} {str(dtype).removeprefix('torch.')} D {D}: {tile}"
        for (kernel, dtype, _, D, *_), tile in list(_tuned.items())  # another thread may add one
    ]


def _launch(
    name: str,
    q: Tensor,
    pairs: int,
    grid: Any,
    *args: Any,
    fixed: Tile | None = None,
    may_measure: bool = True,
    **constants: Any,
) -> Tile:
    """Launches the kernel for a grid, a function of the Tile; returns the one it ran with.

    Calls that are large enough, by their score pairs, take the best of the candidates, which the first of
    them measures, if it may; not while a CUDA graph is captured. Smaller ones take the default, before and
    after: the same call gives the same bits. fixed: the tile that it is to run with, if that matters. q: for
    its dtype and device.
    """
    arch = _arch(q.device)
    tiles = configs.candidates(name, constants["D"], q.dtype.itemsize, arch)
    tile = fixed or tiles[0]
    if len(tiles) > 1 and fixed is None and pairs >= _TUNE_PAIRS and _may_tune():
        key = (name, q.dtype, arch, *(constants[n] for n in _tuning_key(name)))
        with _tuning:
            if may_measure and key not in _tuned and not torch.cuda.is_current_stream_capturing():
                with contextlib.suppress(torch.OutOfMemoryError):  # measuring takes memory of its own
                    _tuned[key] = _fastest(name, tiles, arch, grid, *args, **constants)
        tile = _tuned.get(key, tile)
    # After the tuner too: Triton keeps its code by the options' order, among others, and would load it once
    # more for the next call, which a CUDA graph may be capturing: no code can be loaded then.
    KERNELS[name][grid(tile)](*args, **constants, **tile.constants, **tile.options(arch), **_FUSED)
    return tile


def _fastest(
    name: str, tiles: tuple[Tile, ...], arch: int | str | None, grid: Any, *args: Any, **constants: Any
) -> Tile:
    """Of these tiles, by launching the kernel with each."""
    tuner = _tuner(name, tiles, arch)
    tuner[lambda meta: grid(Tile(meta["BM"], meta["BN"], 0, 0))](*args, **constants, **_FUSED)
    best = tuner.best_config
    chosen = (best.kwargs, best.num_warps, best.num_stages)
    return next(t for t in tiles if (t.constants, t.num_warps, t.num_stages) == chosen)


def _may_tune() -> bool:
    """Not where torch is to be deterministic, or fail: another process may find another tile the fastest."""
    return configs.autotune() and not INTERPRETED and torch.get_deterministic_debug_mode() < 2


# ---- Arguments ---------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous, if rows lie too far apart for 32-bit offsets, or
    if they do not begin where `load_rows` takes them to. Kernels do not see that torch means -x (is_neg)."""
    x = x.resolve_neg()
    strides = x.stride()
    aligned = x.shape[-1] % 16 != 8 or (
        x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides[:-1])
    )
    if strides[-1] == 1 and strides[-2] < _MAX_ROW_STRIDE and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _small(x: Tensor | None) -> Tensor | None:
    """A bias or key_range, of which kernels do not see that either."""
    return None if x is None else compact(x.resolve_neg())


def _view(x: Tensor) -> View:
    """Of [B, H, rows, D], or of [H, rows, D], which every batch entry shares."""
    strides = x.stride()
    return View(x, *strides[:3]) if len(strides) == 4 else View(x, 0, *strides[:2])


def _problem(inputs: Inputs, options: Options) -> tuple[Problem, dict[str, Any]]:
    """The problem, every number within 32 bits; and the constants that all kernels are compiled for."""
    B, H, L, D = inputs.q.shape
    K, N = inputs.k.shape[2], inputs.r.shape[1]
    causal, window_left, window_right, r_zero, scale, dropout_p = options
    gpu.check_sizes(NAME, inputs)
    # No key is further than K - 1 before a query, L - 1 after it.
    left = K - 1 if window_left < 0 else min(window_left, K - 1)
    right = 0 if causal else L - 1 if window_right < 0 else min(window_right, L - 1)
    r_zero = max(-L, min(r_zero, K + N))  # beyond that every distance is clamped
    clamp = r_zero < left or r_zero + right > N - 1
    threshold, keep = ctypes.c_int32(philox.threshold(dropout_p)).value, 1 / (1 - dropout_p)
    constants = dict(
        D=D,
        BD=configs.block_of_head(D),
        HAS_RANGE=inputs.key_range is not None,
        CLAMP=clamp,
        NEGATIVE=scale < 0,
        DROPOUT=dropout_p > 0,
    )
    # A float32 in the kernels, no less than its least normal number: 0 * -inf, the score of a hidden pair,
    # would be NaN.
    size = max(abs(scale), torch.finfo(torch.float32).tiny)
    scale = -size if scale < 0 else size
    return Problem(B, H, L, K, N, r_zero, left, right, scale, threshold, keep), constants


def _with_biases(q: Tensor, bias_u: Tensor | None, bias_v: Tensor | None) -> tuple[Tensor, Tensor]:
    """q + u and q + v, q where there is no bias. Rows are as kernels take them."""
    B, H, L, D = q.shape
    q = _rows(q)
    if bias_u is None and bias_v is None:
        return q, q
    q_u = q if bias_u is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    q_v = q if bias_v is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    BD, BM = configs.block_of_head(D), configs.rows_added(D)
    with gpu.current(q.device):
        add_biases_kernel[(_cdiv(L, BM) * B * H,)](
            _view(q),
            _small(bias_u),
            _small(bias_v),
            _view(q_u),
            _view(q_v),
            H,
            L,
            D=D,
            BD=BD,
            HAS_U=bias_u is not None,
            HAS_V=bias_v is not None,
            BM=BM,
            **_FUSED,
        )
    return q_u, q_v


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D], lse [B, H, L]."""
    q, k, v, r, bias_u, bias_v, key_range, dropout_seed = inputs
    B, H, L, D = q.shape
    K = k.shape[2]
    out, lse = new_results(q)
    p, constants = _problem(inputs, options)

    decode = L <= gpu.DECODE_QUERIES
    if decode:  # few queries: the kernel adds the biases itself
        q_u = q_v = _rows(q)
    else:
        q_u, q_v = _with_biases(q, bias_u, bias_v)
        bias_u = bias_v = None

    split_keys = _cdiv(_cdiv(K, gpu.key_splits(inputs)), gpu.SPLIT_KEYS) * gpu.SPLIT_KEYS
    splits = _cdiv(K, split_keys)
    part, part_lse = out, lse
    if splits > 1:
        part = torch.empty(splits * B, H, L, D, dtype=torch.float32, device=q.device)
        # Of each the largest score and the total, which are merged.
        part_lse = torch.empty(2, splits * B, H, L, dtype=torch.float32, device=q.device)

    with gpu.current(q.device):
        _launch(
            "decode" if decode else "forward",
            q,
            B * H * max(L, 64) * K,  # one query reads all keys, as a block of them does
            lambda tile: (_cdiv(L, tile.BM) * splits * B * H,),
            *(_view(x) for x in (q_u, q_v, _rows(k), _rows(v), _rows(r))),
            *(_small(x) for x in (bias_u, bias_v, key_range)),
            dropout_seed,
            _view(part),
            part_lse,
            *p,
            splits,
            split_keys,
            HAS_U=bias_u is not None,
            HAS_V=bias_v is not None,
            **constants,
        )
        if splits > 1:
            merge_kernel[(B * H * L,)](
                _view(part),
                part_lse,
                _view(out),
                lse,
                B,
                H,
                L,
                splits,
                abs(p.scale),
                D=D,
                BD=constants["BD"],
                **configs.merged(D, splits),
                **_FUSED,
            )
    return out, lse


def backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, wanted: Wanted, options: Options
) -> Gradients:
    """Gradients of q, k, v, r, bias_u and bias_v; one that is not wanted has no elements."""
    q, k, v, r, bias_u, bias_v, key_range, dropout_seed = inputs
    B, H, L, D = q.shape
    K, N = k.shape[2], r.shape[1]
    gradients = new_gradients(inputs, wanted)
    dq, dk, dv, dr, *_ = gradients
    p, constants = _problem(inputs, options)
    of_dq = {name: constants[name] for name in ("D", "BD", "HAS_RANGE", "CLAMP")}
    of_dr = {name: constants[name] for name in ("D", "BD", "HAS_RANGE")}

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    q_u, q_v = (_view(x) for x in _with_biases(q, bias_u, bias_v))
    k_rows, v_rows, r_rows = (_view(_rows(x)) for x in (k, v, r))
    lse, dout_rows, key_range = lse.contiguous(), _view(_rows(dout)), _small(key_range)
    delta = torch.empty_like(lse)
    chunks = Chunks.of(p, q.dtype.itemsize, gpu.slope_bytes(q.device))
    # Of a row of r beyond the last, dr's kernel reads dS beyond the last.
    slopes = torch.empty(chunks.elements + configs.LARGEST, dtype=q.dtype, device=q.device)
    sums = floats(2, K, D) if chunks.cut_queries(p) else floats(0)
    tiles = configs.candidates("dq", D, q.dtype.itemsize, _arch(q.device))
    parts = floats(B * H * _cdiv(L, min(tile.BM for tile in tiles)) * 4 * D)

    # Few rows of r: share out the batch too.
    programs = _cdiv(N, 64) * chunks.heads
    splits = max(1, min(2 * gpu.processors(q.device) // programs, B))
    entries = _cdiv(B, splits)
    splits = _cdiv(B, entries)
    whole_dr = splits == 1 and not chunks.cut_heads(p) and not constants["CLAMP"]
    of_r, *_ = wanted
    dr_parts = dr.unsqueeze(0) if whole_dr or not of_r else floats(splits, H, N, D)

    with gpu.current(q.device):
        BM = configs.rows_added(D)
        delta_kernel[(_cdiv(L, BM) * B * H,)](
            _view(_rows(out)), dout_rows, delta, H, L, D=D, BD=constants["BD"], BM=BM, **_FUSED
        )
        pairs = chunks.batches * chunks.heads * chunks.queries * K  # of a chunk, and so one tile for all
        dq_tile = None
        for chunk in chunks.each(p):
            heads = chunk.batches * chunk.heads
            # The first one alone: in it no kernel adds to what another has left, so that it may be launched
            # more than once.
            may_measure = dq_tile is None
            _launch(
                "dk_dv",
                q,
                pairs,
                lambda tile, heads=heads: (_cdiv(K, tile.BN) * heads,),
                *(q_u, q_v, k_rows, v_rows, r_rows, key_range, dropout_seed),
                *(lse, dout_rows, delta, slopes, sums, _view(dk), _view(dv)),
                *p,
                *chunk,
                may_measure=may_measure,
                **constants,
            )
            dq_tile = _launch(
                "dq",
                q,
                pairs,
                lambda tile, heads=heads, chunk=chunk: (_cdiv(chunk.end_i - chunk.first_i, tile.BM) * heads,),
                *(slopes, q_v, k_rows, r_rows, key_range, _view(dq), parts),
                *p,
                *chunk,
                fixed=dq_tile,
                **of_dq,
            )
            if not of_r:
                continue
            shares = (chunk.first_b + chunk.batches - 1) // entries - chunk.first_b // entries + 1
            _launch(
                "dr",
                q,
                pairs,
                lambda tile, programs=chunk.heads * shares: (_cdiv(N, tile.BN) * programs,),
                *(slopes, q_v, key_range, _view(dr_parts)),
                *p,
                *chunk,
                entries,
                may_measure=may_measure,
                **of_dr,
            )

        assert dq_tile is not None
        blocks = _cdiv(L, dq_tile.BM)
        parts = parts[: B * H * blocks * 4 * D].view(B, H, blocks, 4, D)
        _add_up(parts, dr_parts if of_r and not whole_dr else None, gradients, constants["CLAMP"])
    return gradients


def _add_up(parts: Tensor, dr_parts: Tensor | None, gradients: Gradients, clamp: bool) -> None:
    """Set du, dv_bias and, unless dr's kernel has written it (dr_parts None), dr.

    parts: of dq's kernel, [B, H, blocks of queries, 4, D]: du, dv_bias and, if any pair is clamped, the first
    and the last row of dr. dr_parts: of dr's kernel, [shares of the batch, H, N, D].
    """
    *_, dr, du, dv_bias = gradients
    ends, biases = None, [(n, x) for n, x in enumerate((du, dv_bias)) if x.numel() > 0]
    if biases or clamp:
        ends = parts[:, :, :, : 4 if clamp else 2].sum((0, 2))
        for n, gradient in biases:
            gradient.copy_(ends[:, n])
    if dr_parts is not None:
        dr_sum = dr_parts[0] if len(dr_parts) == 1 else dr_parts.sum(0)
        if ends is not None and clamp:
            dr_sum[:, 0] += ends[:, 2]
            dr_sum[:, -1] += ends[:, 3]
        dr.copy_(dr_sum)

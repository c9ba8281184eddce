"""`rel_attention`, the public function: validates the arguments, fills in defaults, calls the op."""

from __future__ import annotations

import reprlib
from numbers import Integral, Real
from typing import Literal, overload

import torch
from torch import Tensor

from txl_kernels import cpu, ops, philox, reference, registry

MAX_HEAD_DIM = 256

_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REFERENCE_DTYPES = (*cpu.DTYPES, torch.float16)
_DTYPES_OF_BACKEND: dict[str, tuple[torch.dtype, ...]] = {
    registry.REFERENCE: _REFERENCE_DTYPES,
    "cpu": cpu.DTYPES,
    "triton": _GPU_DTYPES,
    "cuda": _GPU_DTYPES,
}
_DTYPES_OF_DEVICE: dict[str, tuple[torch.dtype, ...]] = {"cpu": cpu.DTYPES, "cuda": _GPU_DTYPES}
# Offsets on the key axis are added to positions in 64 bits.
_MAX_OFFSET = 2**62
_LARGEST = torch.finfo(torch.float64).max


@overload
def rel_attention(
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
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...


@overload
def rel_attention(
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
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rel_attention(
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
    return_lse: bool,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def rel_attention(
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
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Multi-head relative attention over a memory and the current segment.

    Computes the four-term score of Transformer-XL (Dai et al. 2019, section 3.3) without the relative shift
    of its Appendix B, and without an L x K matrix (but on a GPU, backward stores the gradient of scores for
    a bounded part of the problem at a time, of a small one for all of it). For query i and key j:

        p(i)      = i + (K - L)                             position of query i on the key axis
        d(i, j)   = p(i) - j                                distance; 0 is the query's own position
        row(i, j) = clamp(r_zero - d(i, j), 0, N - 1)       the row of r for that distance
        A(i, j)   = scale * [ (q_i + u) . k_j  +  (q_i + v) . r_row(i, j) ]
        out_i     = sum_j dropout(softmax_j A(i, j)) v_j    over the keys that i may see

    The clamp is the paper's clamp_len: with clamp_len + 1 rows in r, every distance beyond clamp_len uses
    row 0.

    Which keys a query may see (1: yes), for L = 2 and K = 5, of which three are memory:

        causal          causal,             not causal          not causal,         causal,
                        window_size=(2, 0)                      window_size=(1, 1)  key_range=[[2, 5]]
        1 1 1 1 0       0 1 1 1 0           1 1 1 1 1           0 0 1 1 1           0 0 1 1 0
        1 1 1 1 1       0 0 1 1 1           1 1 1 1 1           0 0 0 1 1           0 0 1 1 1

    and the distances d(i, j) of these pairs:

        3 2 1 0 -1
        4 3 2 1  0

    A query that may see no key gives out = 0 and lse = -inf, and passes no gradient.

    NaN and infinity in q, k, v, r and the biases reach the queries that see them, and no others.

    Gradients flow to q, k, v, r, bias_u and bias_v; where r is frozen, training on a CPU takes a tenth less.
    Results and gradients are the same bits every time (of "triton" with one choice of tiles: docs/usage.md).
    There is no double backward and no forward-mode differentiation (backend "reference" has both).
    torch.func.grad, vjp and jacrev are served where they are not compiled; torch.vmap makes one call per
    entry. Under autocast, tensors other than float64 are first cast to its dtype. If B, H or L is 0, the
    results are empty. Import txl_kernels before loading an exported program or a package of AOTInductor.

    Args:
        q: queries of the current segment, [B, H, L, D] with 1 <= D <= 256. float32, float64 or bfloat16 on
            the CPU; float32, bfloat16 or float16 on a GPU. Strides are free, but this tensor, like the
            others, is copied if its last dimension is not contiguous; by "cuda" also if its rows do not begin
            at multiples of 16 bytes.
        k, v: keys and values of memory followed by segment, [B, H, K, D] with K >= L.
        r: projected relative keys W_kR R, [H, N, D], furthest distance first, N >= 1. All distances have rows
            of their own with N = K if causal, and with N = K + L - 1 if not. With fewer rows the distances
            beyond share the first row (or the last): that is clamp_len, and so rows that were forgotten are
            no error, such as r of causal attention with causal=False.
        bias_u, bias_v: the paper's u (content bias) and v (position bias), [H, D]. None: zeros.
        causal: a query sees no key after its own position.
        window_size: (left, right): how many keys before and after its own position a query may see; -1: all.
        r_zero: the row of r that holds distance 0. None: N - 1 if causal, else N - L (so that
            N = K + L - 1 rows cover the distances from K - 1 down to -(L - 1)).
        key_range: int32 [B, 2], (start, end) for each batch entry: only the keys start <= j < end exist.
            Clamped to [0, K]; an empty or reversed range contains no key.
        scale: factor of the scores. None: D ** -0.5.
        dropout_p: probability of dropping a softmax probability, 0 <= dropout_p < 1; those kept are
            multiplied by 1 / (1 - dropout_p).
        dropout_seed: the seed of the dropout mask, which depends only on it and on (b, h, i, j): a 64-bit
            int, or an int64 tensor of one element on q's device. None draws one from torch's default
            generator, which torch.manual_seed governs.
        return_lse: also return lse.
        backend: "cpu", "triton", "cuda" or "reference". None: "cpu" on the CPU; on a GPU of compute
            capability 9.0 "cuda", which was measured to be faster there, and "triton" on all others; or the
            other of these two if the preferred one cannot serve the call.

    Returns:
        out [B, H, L, D], of q's dtype (under autocast, of that to which q is cast). With return_lse also
        lse [B, H, L]: the natural logarithm of sum_j exp A(i, j), before dropout; float32 (float64 for
        float64 inputs), and not differentiable.

    Raises:
        TypeError, ValueError: an argument is not what is asked for above.
        BackendUnavailable: the named backend (with None, every one that could serve the call) cannot run
            here or has no kernel for such tensors. A named backend is never replaced by another.
        RuntimeError: from the double backward.
        NotImplementedError: from forward mode.

    Example:
        >>> q = torch.randn(1, 8, 512, 64)
        >>> k, v = torch.randn(2, 1, 8, 1024, 64)  # 512 keys of memory, then those of the segment
        >>> r = torch.randn(8, 1024, 64)  # a row per distance, furthest first
        >>> out = rel_attention(q, k, v, r)  # [1, 8, 512, 64]
    """
    check_layouts(q, k, v, r, bias_u, bias_v, key_range)
    device, given = q.device, q.dtype
    kind = device.type
    if reference.has_autocast(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v, r = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype), _cast(r, dtype)
        bias_u = None if bias_u is None else _cast(bias_u, dtype)
        bias_v = None if bias_v is None else _cast(bias_v, dtype)

    _check_tensors(q, k, v, r, bias_u, bias_v, key_range, backend, given)
    window_left, window_right, r_zero, scale, dropout_p = _check_options(
        causal, window_size, r_zero, scale, dropout_p
    )
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse: got {described(return_lse)}, needs True or False")
    dropout_seed = _check_seed(dropout_seed, device)

    L, D, N = q.shape[2], q.shape[3], r.shape[1]
    if r_zero is None:
        r_zero = reference.default_r_zero(causal, N, L)
    if scale is None:
        scale = torch.sym_float(D) ** -0.5  # a number also where torch.jit.trace has tensors for sizes
    seed = philox.seed_tensor(dropout_seed, device) if dropout_p > 0 else None

    if backend == registry.REFERENCE:
        return reference.reference(
            q,
            k,
            v,
            r,
            bias_u,
            bias_v,
            causal=causal,
            window_size=(window_left, window_right),
            r_zero=r_zero,
            key_range=key_range,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=seed,
            return_lse=return_lse,
        )
    out, lse = ops.rel_attention(
        q,
        k,
        v,
        r,
        bias_u,
        bias_v,
        key_range,
        seed,
        causal,
        window_left,
        window_right,
        r_zero,
        float(scale),
        float(dropout_p),
        backend,
    )
    return (out, lse) if return_lse else out


def backends() -> dict[str, registry.BackendInfo]:
    """Reports on every backend, by name: whether it can run here, with details such as the CPU's vector
    level; or, if it cannot, why and what to do about it. Loads every backend that can be loaded."""
    return registry.report()


# ---- Validation --------------------------------------------------------------------------------------------
#
# Shapes and dtypes only: looking at values would wait for a GPU, and could not be traced.


def check_layouts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    key_range: Tensor | None,
) -> None:
    """That they are dense tensors."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("r", r)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {described(tensor)}, needs a tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise _wrong_layout(name, tensor)
    for name, optional in (("bias_u", bias_u), ("bias_v", bias_v), ("key_range", key_range)):
        if optional is None:
            continue
        if not isinstance(optional, Tensor):
            raise TypeError(f"{name}: got {described(optional)}, needs a tensor or None")
        if optional.layout is not torch.strided or optional.is_nested:
            raise _wrong_layout(name, optional)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _wrong_layout(name: str, x: Tensor) -> TypeError:
    kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
    return TypeError(f"{name}: got {kind}, needs a dense one")


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None,
    bias_v: Tensor | None,
    key_range: Tensor | None,
    backend: str | None,
    given: torch.dtype,
) -> None:
    """given: q's dtype before autocast."""
    if backend is not None and backend not in registry.NAMES:
        raise ValueError(
            f"backend: got {reprlib.repr(backend)}, "
            f"needs None or one of {', '.join(map(repr, registry.NAMES))}"
        )

    q_shape, k_shape, r_shape = q.shape, k.shape, r.shape
    if len(q_shape) != 4:
        raise ValueError(f"q: got shape {_shape(q)}, needs [B, H, L, D]")
    B, H, L, D = q_shape
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"q: got D = {D} in shape {_shape(q)}, needs 1 <= D <= {MAX_HEAD_DIM}")
    if len(k_shape) != 4 or k_shape[0] != B or k_shape[1] != H or k_shape[3] != D:
        raise ValueError(f"k: got shape {_shape(k)}, needs [B, H, K, D] = [{B}, {H}, K, {D}], {_as_q_is(q)}")
    K = k_shape[2]
    if K < L:
        raise ValueError(
            f"k: got K = {K} keys, needs at least L = {L}: those of the segment follow those of memory"
        )
    if v.shape != k_shape:
        raise ValueError(f"v: got shape {_shape(v)}, needs k's, {_shape(k)}")
    if len(r_shape) != 3 or r_shape[0] != H or r_shape[2] != D:
        raise ValueError(f"r: got shape {_shape(r)}, needs [H, N, D] = [{H}, N, {D}], {_as_q_is(q)}")
    if r_shape[1] < 1:
        raise ValueError(f"r: got N = 0 rows in shape {_shape(r)}, needs N >= 1")

    dtype, device = q.dtype, q.device
    if backend is None:
        allowed = _DTYPES_OF_DEVICE.get(device.type, _REFERENCE_DTYPES)
    else:
        allowed = _DTYPES_OF_BACKEND[backend]
    if dtype not in allowed:
        got = str(dtype) if dtype == given else f"{given}, cast to {dtype} by autocast,"
        who = "" if backend is None else f"backend {backend!r} "
        raise TypeError(f"q: got {got} on {device}, {who}needs one of {', '.join(map(str, allowed))}")
    if k.dtype != dtype or v.dtype != dtype or r.dtype != dtype:
        name, other = next((n, t) for n, t in (("k", k), ("v", v), ("r", r)) if t.dtype != dtype)
        raise TypeError(f"{name}: got {other.dtype}, needs q's dtype, {dtype}")
    if k.device != device or v.device != device or r.device != device:
        name, other = next((n, t) for n, t in (("k", k), ("v", v), ("r", r)) if t.device != device)
        raise ValueError(f"{name}: got a tensor on {other.device}, needs q's device, {device}")
    if bias_u is not None:
        _check_small("bias_u", bias_u, H, D, dtype, device, q)
    if bias_v is not None:
        _check_small("bias_v", bias_v, H, D, dtype, device, q)
    if key_range is not None:
        check_key_range(key_range, q)


def check_key_range(key_range: Tensor, q: Tensor) -> None:
    _check_small("key_range", key_range, q.shape[0], 2, torch.int32, q.device, q)


def _check_small(
    name: str, x: Tensor, rows: int, columns: int, dtype: torch.dtype, device: torch.device, q: Tensor
) -> None:
    shape = x.shape
    if len(shape) != 2 or shape[0] != rows or shape[1] != columns:
        raise ValueError(f"{name}: got shape {_shape(x)}, needs [{rows}, {columns}], {_as_q_is(q)}")
    if x.dtype != dtype:
        whose = "q's dtype, " if dtype == q.dtype else ""
        raise TypeError(f"{name}: got {x.dtype}, needs {whose}{dtype}")
    if x.device != device:
        raise ValueError(f"{name}: got a tensor on {x.device}, needs q's device, {device}")


def _check_options(
    causal: bool, window_size: tuple[int, int], r_zero: int | None, scale: float | None, dropout_p: float
) -> tuple[int, int, int | None, float | None, float]:
    """The window's two sides and what follows it, as Python's numbers."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {described(causal)}, needs True or False")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size: got {reprlib.repr(window_size)}, needs two ints, (left, right)")
    left, right = window_size
    if not isinstance(left, _INT) or not isinstance(right, _INT):
        raise TypeError(f"window_size: got {reprlib.repr(window_size)}, needs two ints, (left, right)")
    if not (-1 <= left < _MAX_OFFSET and -1 <= right < _MAX_OFFSET):
        raise ValueError(
            f"window_size: got {window_size!r}, needs numbers from 0 to 2**62 - 1, or -1 for no limit"
        )
    if r_zero is not None:
        if not isinstance(r_zero, _INT):
            raise TypeError(f"r_zero: got {described(r_zero)}, needs an int or None")
        if not -_MAX_OFFSET < r_zero < _MAX_OFFSET:
            raise ValueError(f"r_zero: got {r_zero}, needs a number between -2**62 and 2**62")
    if scale is not None:
        if not isinstance(scale, _NUMBER):
            raise TypeError(f"scale: got {described(scale)}, needs a float or None")
        scale = _number(scale)
        # A symbol may have no value before the graph runs.
        if not isinstance(scale, torch.SymFloat) and not -_LARGEST <= scale <= _LARGEST:
            raise ValueError(f"scale: got {scale}, needs a finite number")
    if not isinstance(dropout_p, _NUMBER):
        raise TypeError(f"dropout_p: got {described(dropout_p)}, needs a float")
    dropout_p = _number(dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p}, needs 0 <= dropout_p < 1")
    return _int(left), _int(right), None if r_zero is None else _int(r_zero), scale, dropout_p


def _check_seed(seed: int | Tensor | None, device: torch.device) -> int | Tensor | None:
    """The seed, a number as Python's."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.layout is not torch.strided or seed.is_nested:
            raise _wrong_layout("dropout_seed", seed)
        if seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed: got {seed.dtype}, needs torch.int64")
        if seed.numel() != 1:
            raise ValueError(f"dropout_seed: got shape {_shape(seed)}, needs one element")
        if seed.device != device:
            raise ValueError(f"dropout_seed: got a tensor on {seed.device}, needs q's device, {device}")
        return seed
    if not isinstance(seed, _INT):
        raise TypeError(
            f"dropout_seed: got {described(seed)}, needs an int, an int64 tensor of one element, or None"
        )
    seed = _int(seed)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"dropout_seed: got {seed}, needs a number of 64 bits")
    return seed


# Sizes and options are symbols while shapes are traced. The last: NumPy's numbers, which are slower to tell.
_INT = (int, torch.SymInt, Integral)
_NUMBER = (int, float, torch.SymInt, torch.SymFloat, Real)


def _int(x: int) -> int:
    return x if type(x) is int or isinstance(x, torch.SymInt) else int(x)


def _number(x: float) -> float:
    return x if isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) else float(x)


def described(x: object) -> str:
    of = type(x)
    name = of.__name__ if of.__module__ in ("builtins", "torch") else f"{of.__module__}.{of.__name__}"
    return f"{reprlib.repr(x)} of type {name}"


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _as_q_is(q: Tensor) -> str:
    # With names: others have [B, L, H, D].
    return f"as q is [B, H, L, D] = {_shape(q)}"

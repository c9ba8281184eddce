"""Which backends there are, whether they can run here, and which of them serves a call."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# The reference is plain PyTorch: no module of kernels, and nothing that could be missing.
REFERENCE = "reference"
_MODULES = {"cpu": "txl_kernels.cpu", "triton": "txl_kernels.triton", "cuda": "txl_kernels.cuda"}
NAMES = (REFERENCE, *_MODULES)


class BackendUnavailable(RuntimeError):
    """A backend cannot serve the call. The message says why, and what to do about it."""


class Inputs(NamedTuple):
    """The tensors of a call, as `txl_kernels.rel_attention` describes them: validated."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor
    bias_u: Tensor | None
    bias_v: Tensor | None
    key_range: Tensor | None
    dropout_seed: Tensor | None  # None: nothing is dropped

    def prepared(self) -> tuple[Tensor | None, ...]:
        """All of them, as C++ takes them: last dimensions contiguous, small tensors altogether."""
        q, k, v, r, bias_u, bias_v, key_range, dropout_seed = self  # loops cost more than all of it
        rows = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v), contiguous_rows(r)
        return *rows, compact(bias_u), compact(bias_v), compact(key_range), dropout_seed


class Options(NamedTuple):
    """The numbers of a call: validated and complete."""

    causal: bool
    window_left: int
    window_right: int
    r_zero: int
    scale: float
    dropout_p: float


Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# Whether r, bias_u and bias_v are to have gradients: not where they are frozen, or absent. All others have.
Wanted = tuple[bool, bool, bool]


class Backend(Protocol):
    """What the module of a backend holds. There is at least one query in every call."""

    NAME: str

    def unavailable(self) -> str | None:
        """Why the backend cannot run on this machine, and the mend; None if it can."""

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the backend cannot serve tensors of this device, dtype and D; None if it can."""

    def details(self) -> dict[str, str]:
        """For the report: what was built and what is in use."""

    def forward(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """out, lse: `new_results`, filled."""

    def backward(
        self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, wanted: Wanted, options: Options
    ) -> Gradients:
        """dq, dk, dv, dr, du, dv_bias: `new_gradients`, filled."""


@dataclass(frozen=True)
class BackendInfo:
    """One line of the report that `txl_kernels.backends()` gives."""

    name: str
    available: bool
    reason: str | None  # why not, and the mend
    details: dict[str, str] = field(default_factory=dict)


_loaded: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """The module of a backend that can run on this machine."""
    if name in _loaded:
        return _loaded[name]
    try:
        backend: Backend = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {error}; pip install {error.name}"
        ) from error
    except Exception as error:
        raise BackendUnavailable(
            f"backend {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    _loaded[name] = backend
    return backend


def _preferred(device: torch.device) -> tuple[str, ...]:
    """What backend=None tries, in this order."""
    if device.type != "cuda":
        return ("cpu",) if device.type == "cpu" else ()
    # By an H200, the only GPU that was measured (benchmarks/results/): CUDA C++ is faster.
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    return ("cuda", "triton") if hopper else ("triton", "cuda")


@functools.lru_cache
def choose(name: str | None, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The backend to serve tensors of this device, dtype and D: `name`, or for None the preferred one."""
    problems = []
    for candidate in _preferred(device) if name is None else (name,):
        try:
            backend = load(candidate)
        except BackendUnavailable as error:
            problems.append(str(error))
            continue
        problem = backend.unsupported(device, dtype, head_dim)
        if problem is None:
            return backend
        problems.append(f"backend {candidate!r} cannot serve these tensors: {problem}")
    if not problems:
        problems.append(f"no backend has kernels for tensors on {device}")
    raise BackendUnavailable(
        "; ".join(problems) + ". backend='reference' (plain PyTorch, slow) runs on anything."
    )


def report() -> dict[str, BackendInfo]:
    """Every backend, available or not."""
    infos = {REFERENCE: BackendInfo(REFERENCE, True, None)}
    for name in _MODULES:
        try:
            infos[name] = BackendInfo(name, True, None, load(name).details())
        except RuntimeError as error:  # BackendUnavailable, or a setting that it refuses
            infos[name] = BackendInfo(name, False, str(error))
    return infos


def load_library(path: Path, kernels: str, mend: str) -> str | None:
    """Loads a library of `kernels` (C++, CUDA); why it cannot be, and the mend, or None."""
    if not path.exists():
        return f"the library of {kernels} kernels, {path}, does not exist; {mend}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        # torch's error names the file, its cause holds the loader's own words.
        words = error.__cause__ or error
        return (
            f"the library of {kernels} kernels does not load with torch {torch.__version__}: {words}; {mend}"
        )
    return None


# Whether a tensor is one of several that autograd computes at once (is_grads_batched): none of torch.func's.
is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def is_traced() -> bool:
    """Whether somebody, not only a kernel, is to see what is called."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx, FakeTensorMode: of modes that trace or count
        or torch._C._is_tracing()  # torch.jit.trace
    )


def dense_like(x: Tensor) -> Tensor:
    """An uninitialised tensor like x: in x's order of strides where its last dimension is contiguous and that
    keeps it so, else in torch's own.

    Kernels and fakes allocate by this one rule, or a compiled graph would meet strides it was not promised.
    Of a last dimension of one element fakes and tensors have other strides.
    """
    if x.shape[-1] > 1 and x.stride(-1) == 1:
        y = torch.empty_like(x)
        if y.stride(-1) == 1:
            return y
    return _compact_like(x)


def _compact_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def new_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised out [B, H, L, D] and lse [B, H, L]."""
    return dense_like(q), q.new_empty(
        q.shape[:3], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32
    )


def new_gradients(inputs: Inputs, wanted: Wanted) -> Gradients:
    """Uninitialised dq, dk, dv, dr, du and dv_bias; one that is not wanted has no elements."""
    q, k, v, r, bias_u, bias_v, *_ = inputs
    of_r, of_u, of_v = wanted
    dr = dense_like(r) if of_r else q.new_empty(0)
    du = _compact_like(bias_u) if of_u and bias_u is not None else q.new_empty(0)
    dv_bias = _compact_like(bias_v) if of_v and bias_v is not None else q.new_empty(0)
    return dense_like(q), dense_like(k), dense_like(v), dr, du, dv_bias


def contiguous_rows(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def compact(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def run_backward(
    op: Any,
    dout: Tensor,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    wanted: Wanted,
    options: Options,
    *more: Any,
) -> Gradients:
    """The gradients by an op of C++, which may take more arguments at the end."""
    gradients = new_gradients(inputs, wanted)
    results = contiguous_rows(out), lse.contiguous()
    op(contiguous_rows(dout), *inputs.prepared(), *results, *options, *given(gradients, wanted), *more)
    return gradients


def given(gradients: Gradients, wanted: Wanted) -> tuple[Tensor | None, ...]:
    """The gradients, None for one that is not wanted."""
    dq, dk, dv, dr, du, dv_bias = gradients
    of_r, of_u, of_v = wanted
    return dq, dk, dv, dr if of_r else None, du if of_u else None, dv_bias if of_v else None

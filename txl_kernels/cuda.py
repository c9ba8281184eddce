"""Backend "cuda": allocates, makes last dimensions contiguous, and calls the kernels of csrc/cuda/.

TXL_CUDA_EMULATION names a library of the same kernels built for the CPU (tests/cuda_emulation/): then the
backend serves tensors on the CPU, slowly, every access to memory checked.

On sm_90 bfloat16 and float16 have kernels of its own (TXL_CUDA_WARPGROUPS=0, or WARPGROUPS = False in this
module: the others', by mma.sync): by wgmma forward with D up to 128 and more than 16 queries or dropout, and
backward with D 33 to 64 or 97 to 128 where the copy engine can copy k, r and dO: those without a stride of 0.
For up to 16 queries (decode, no dropout) the kernel that joins what blocks found is launched while they work
(programmatic dependent launch), unless they come in several rounds.

Backward keeps the gradient of scores for a while, of as many heads (or of as many of a head's queries) at a
time as gpu.slope_bytes allows.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from txl_kernels import gpu
from txl_kernels.registry import (
    Gradients,
    Inputs,
    Options,
    Wanted,
    load_library,
    new_results,
    run_backward,
)

NAME = "cuda"
_EMULATION = os.environ.get("TXL_CUDA_EMULATION")
# Emulated, both ways are to be tested, and mma.sync's is most of the code.
WARPGROUPS = os.environ.get("TXL_CUDA_WARPGROUPS", "0" if _EMULATION else "1") != "0"
_LIBRARY = Path(_EMULATION or Path(__file__).with_name("libtxl_cuda.so"))
_MEND = "build it with `TXL_BUILD_CUDA=1 pip install -e .` in the source tree (needs nvcc)"

# As csrc/cuda/dispatch.cpp: the largest D of float32, whose rows are the longest that a block has room for.
_FLOAT32_HEAD = 128
# Of rows of more bytes blocks take up to so much shared memory, as csrc/cuda/backward.h asserts; of others no
# more than every GPU has, but for sm_90's own kernels.
_WIDE_ROW, _WIDE_SHARED_BYTES = 256, 163 * 1024

# Of few queries (csrc/cuda/forward.h: is_decode): blocks that a multiprocessor is taken to work on at a time,
# and keys that are worth a block.
_AT_ONCE, _SPLIT_KEYS = 6, 64

_loaded = False


def unavailable() -> str | None:
    """Why the backend cannot run on this machine, and the mend; None if it can. Loads the library, once."""
    global _loaded
    reason = None if _loaded else load_library(_LIBRARY, "CUDA", _MEND)
    _loaded = reason is None
    if _loaded and not _EMULATION and not torch.cuda.is_available():
        return "no CUDA device (torch.cuda.is_available() is False); backend='cpu' serves tensors on the CPU"
    return reason


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot serve tensors of this device, dtype and D; None if it can."""
    kind = "cpu" if _EMULATION else "cuda"
    if device.type != kind:
        return f"it needs tensors on {kind}, q is on {device}"
    if kind == "cuda" and (problem := _not_for(device)):
        return problem
    if dtype == torch.float32 and head_dim > _FLOAT32_HEAD:
        return f"it needs D <= {_FLOAT32_HEAD} in float32, q has {head_dim}; backend='triton' may serve it"
    widest = _WIDE_ROW // dtype.itemsize
    if head_dim > widest and _shared_bytes(device) < _WIDE_SHARED_BYTES:
        return (
            f"D = {head_dim} > {widest} in {dtype} needs up to {_WIDE_SHARED_BYTES // 1024} KiB of shared "
            f"memory in a block, {_name(device)} has {_shared_bytes(device) // 1024} KiB; backend='triton' "
            "may serve it"
        )
    return None


def details() -> dict[str, str]:
    """What the kernels were compiled for."""
    return {
        "targets": torch.ops.txl_kernels.cuda_targets(),
        "warpgroups": "on sm_90" if WARPGROUPS else "off",
    }


@functools.cache
def _not_for(device: torch.device) -> str | None:
    """Why the library has no code that the GPU runs; None if it has."""
    capability, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    if capability < (8, 0):
        return f"it needs compute capability 8.0 or later, {name} has less"
    targets = details()["targets"]
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)\b", targets):
        # Code runs on later parts of its generation; PTX on all that are later.
        of = (int(major), int(minor))
        if of <= capability and (kind == "compute" or of[0] == capability[0]):
            return None
    asked = "{}.{}".format(*capability)
    return (
        f"it was compiled for {targets}, {name} is sm_{asked.replace('.', '')}: build it again with "
        f"TORCH_CUDA_ARCH_LIST={asked}"
    )


def _shared_bytes(device: torch.device) -> int:
    if _EMULATION:
        return _WIDE_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it


def _name(device: torch.device) -> str:
    return "the emulation" if _EMULATION else torch.cuda.get_device_name(device)


@functools.cache
def has_warpgroups(device: torch.device) -> bool:
    """Whether the library and the GPU have what WARPGROUPS asks for."""
    if _EMULATION:
        return True
    if unavailable():
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and "sm_90a" in details()["targets"].split()


def _stream(device: torch.device) -> int:
    return 0 if _EMULATION else torch.cuda.current_stream(device).cuda_stream


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """out [B, H, L, D], lse [B, H, L]."""
    gpu.check_sizes(NAME, inputs)
    q, (B, H, L, D) = inputs.q, inputs.q.shape
    out, lse = new_results(q)
    if L <= gpu.DECODE_QUERIES and options.dropout_p == 0:
        step = 32 if q.dtype.itemsize == 2 and D <= 64 else 16  # a tile, as forward.h's kForwardKeys
        splits = gpu.key_splits(inputs, _AT_ONCE, _SPLIT_KEYS, step)
    else:
        splits = gpu.key_splits(inputs)
    warpgroups = WARPGROUPS and has_warpgroups(q.device)
    # The kernel that joins splits would be in the way of those that wait.
    pdl = warpgroups and B * H * splits <= _AT_ONCE * gpu.processors(q.device)
    with gpu.current(q.device):
        torch.ops.txl_kernels.cuda_forward.default(
            *inputs.prepared(), *options, out, lse, splits, warpgroups, pdl, _stream(q.device)
        )
    return out, lse


def backward(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, wanted: Wanted, options: Options
) -> Gradients:
    """Gradients of q, k, v, r, bias_u and bias_v; one that is not wanted has no elements."""
    gpu.check_sizes(NAME, inputs)
    op, device = torch.ops.txl_kernels.cuda_backward.default, inputs.q.device
    with gpu.current(device):
        bound, warpgroups = gpu.slope_bytes(device), WARPGROUPS and has_warpgroups(device)
        more = bound, warpgroups, _stream(device)
        return run_backward(op, dout, inputs, out, lse, wanted, options, *more)

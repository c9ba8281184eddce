"""What both backends for GPUs decide in the same way, also where their kernels run on the CPU without one."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

from txl_kernels.registry import Inputs

# Up to so many queries are one block (as in csrc/cuda/forward.h), and keys are what there is to share out.
DECODE_QUERIES = 16
# Keys that are worth a program of their own: a multiple of every tile, and enough for loads to run ahead.
SPLIT_KEYS = 128
_MAX_SIZE = 2**28

# A bound in place of slope_bytes' own.
SLOPE_BYTES: int | None = None


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors; 1 of a CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes it the current device for a while."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def key_splits(inputs: Inputs, at_once: int = 4, least: int = SPLIT_KEYS, step: int = 64) -> int:
    """Into how many splits the keys are shared out: more than one where blocks of queries are too few for the
    GPU, or where so many of one query would leave much of it idle at the end.

    at_once: blocks that a multiprocessor works on at a time. least: keys that are worth a block. step: what
    the number of a split's keys is a multiple of.
    """
    B, H, L, _ = inputs.q.shape
    K = inputs.k.shape[2]
    decode = L <= DECODE_QUERIES
    blocks, slots = -(-L // (DECODE_QUERIES if decode else 64)) * B * H, at_once * processors(inputs.q.device)
    splits = min(max(1, slots // blocks), -(-K // least))
    if decode and splits == 1 and K >= 8 * SPLIT_KEYS:
        # Rounds of the GPU over its blocks; merging costs a few percent.
        splits = min((1, 2, 3, 4), key=lambda n: -(-blocks * n // slots) / n * (1 if n == 1 else 1.05))
    # As many as have keys: each but the last has a multiple of `step`.
    return max(1, -(-K // max(step, -(-K // splits // step) * step)))


@functools.cache
def _memory(device: torch.device) -> int:
    """Bytes of the GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def slope_bytes(device: torch.device) -> int:
    """How much of the gradient of scores both backends' backward may keep at a time, in bytes, whatever L and
    K are.

    1 GiB, or a 32nd of the GPU's memory if that is less; 64 queries of a head are the least. With less of it
    there is less to do at once.
    """
    if SLOPE_BYTES is not None:
        return SLOPE_BYTES
    if asked := os.environ.get("TXL_SLOPE_MIB"):
        if not (asked.isascii() and asked.isdecimal() and len(asked) < 12):
            raise ValueError(f"TXL_SLOPE_MIB: got {asked!r}, needs a number of MiB")
        return int(asked) << 20
    return 2**30 if device.type == "cpu" else min(2**30, _memory(device) // 32)


def check_sizes(backend: str, inputs: Inputs) -> None:
    """Sizes and distances are 32-bit numbers in the kernels; so is the number of blocks, each of them of 16
    queries at least."""
    B, H, L, _ = inputs.q.shape
    if B * H * -(-L // 16) >= 2**31:
        raise ValueError(
            f"q: got {B * H} heads of {L} queries; backend {backend!r} needs fewer than 2**31 blocks of 16 "
            "queries: call it for parts of the batch"
        )
    for name, x in (("k", inputs.k), ("r", inputs.r)):
        if x.shape[-2] >= _MAX_SIZE:
            raise ValueError(
                f"{name}: got {x.shape[-2]} rows; backend {backend!r} counts them in 32 bits and needs fewer "
                "than 2**28"
            )

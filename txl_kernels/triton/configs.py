"""Tile sizes: for each kernel a short list, the first of which is the default.

Chosen by what the compiler makes of them: docs/triton_kernels.md, written by tests/triton_static.py. Up to
D = 128 Hopper's defaults are also the fastest that were measured on an H200 (bfloat16, B 4, H 16, L 2048,
K 4096, causal).

* A tile of the band must fit into registers beside the scores, so tiles are smaller than flash attention's;
  and BM is at most BN: the band of BM queries by BN keys then lies in two tiles of BN columns.
* Backward's BM divides tiles.ROWS, and so does dk_dv's BN: no tile of dS crosses the end of a chunk.
* 64 x 64 over four warps where registers and shared memory allow it (99 KiB per block on smaller parts):
  that is what Hopper and datacenter Blackwell multiply at once.
* dk_dv loads no tile ahead by default: a multiprocessor then has room for two blocks, one of which works
  while the other waits. dq and dr compute little and wait for dS: they load one or two tiles ahead where
  registers and shared memory leave room for two blocks of four warps, or for one of eight.
* dq needs dS twice, for the keys and, moved, for the band. To read it a second time, each row one key further
  (`again`), issues up to a third fewer instructions and waits for nobody's shared memory, but reads more from
  L1 and L2. On an H200 it takes 0.63 and 0.69 of the time (D 64, 128). On Ampere, not timed, it is a
  runner-up, but where moving dS spills (D 128).
* What a loop of the others issues per pair decides: a warp that holds more of a tile issues fewer
  instructions for it, even where it spills a few registers. So the defaults are those of few instructions per
  pair whose accesses to local memory are at most a quarter of the loop, and the runners-up are candidates.
* In float32 NVIDIA's products are plain multiply-adds (IEEE; tensor cores would round to tf32): operands live
  in registers, and small tiles over many warps keep them there.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import triton


class Tile(NamedTuple):
    BM: int  # queries
    BN: int  # keys, or rows of r
    num_warps: int
    num_stages: int
    again: bool = False  # dq alone: dS is read once more for the band, not moved

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {"BM": self.BM, "BN": self.BN, **({"AGAIN": True} if self.again else {})}

    def options(self, arch: int | str | None) -> dict[str, int]:
        """What a launch takes. maxnreg: left alone, ptxas sometimes settles on 32 registers and spills."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if not isinstance(arch, int) else {**options, "maxnreg": 255}


KERNELS = ("forward", "decode", "dq", "dk_dv", "dr")

# By the head dimension up to which they hold.
_HOPPER = {
    "forward": {
        64: [Tile(64, 64, 4, 2), Tile(128, 128, 8, 1)],
        128: [Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(128, 128, 8, 1)],
        256: [Tile(64, 64, 8, 1), Tile(32, 32, 4, 2)],
    },
    "decode": {
        64: [Tile(16, 64, 4, 3), Tile(16, 64, 8, 3), Tile(16, 32, 4, 4)],
        128: [Tile(16, 32, 4, 3), Tile(16, 64, 8, 3)],
        256: [Tile(16, 32, 8, 2)],
    },
    "dq": {
        64: [Tile(64, 64, 4, 2, again=True), Tile(64, 64, 4, 3)],
        128: [Tile(32, 64, 4, 3, again=True), Tile(64, 64, 8, 2, again=True)],
        256: [Tile(64, 64, 8, 1), Tile(32, 32, 4, 3)],
    },
    "dk_dv": {
        128: [Tile(64, 64, 4, 1)],
        256: [Tile(64, 64, 8, 1), Tile(32, 32, 4, 2)],
    },
    "dr": {
        64: [Tile(64, 128, 4, 3), Tile(64, 64, 4, 1)],
        128: [Tile(64, 64, 4, 1), Tile(64, 128, 8, 2)],
        256: [Tile(64, 64, 8, 2), Tile(64, 64, 8, 1)],
    },
}
_AMPERE = {
    "forward": {
        64: [Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)],
        128: [Tile(64, 64, 4, 1), Tile(32, 64, 4, 2)],
        256: [Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)],
    },
    "decode": {
        64: [Tile(16, 64, 4, 3), Tile(16, 32, 4, 4)],
        128: [Tile(16, 32, 4, 3)],
        256: [Tile(16, 32, 8, 2)],
    },
    "dq": {
        64: [Tile(64, 64, 4, 2), Tile(64, 64, 4, 2, again=True), Tile(32, 64, 4, 3)],
        128: [Tile(64, 64, 4, 2, again=True), Tile(32, 64, 4, 2), Tile(32, 32, 4, 3)],
        256: [Tile(32, 32, 4, 3), Tile(32, 64, 4, 2)],
    },
    "dk_dv": {
        64: [Tile(64, 64, 4, 1), Tile(64, 64, 4, 2), Tile(32, 32, 4, 2)],
        128: [Tile(64, 64, 4, 1), Tile(32, 32, 4, 2)],
        256: [Tile(32, 32, 8, 1)],
    },
    "dr": {
        64: [Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(32, 64, 4, 3)],
        128: [Tile(64, 128, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 4, 3)],
        256: [Tile(64, 64, 8, 2)],
    },
}
# 64 KiB of shared memory, wavefronts of 64: four of them have the registers for 64 x 64.
_AMD = {
    "forward": {
        64: [Tile(64, 64, 4, 2), Tile(32, 32, 4, 2)],
        128: [Tile(64, 64, 4, 1), Tile(32, 64, 4, 2)],
        256: [Tile(32, 32, 4, 1)],
    },
    "decode": {64: [Tile(16, 64, 4, 2)], 128: [Tile(16, 32, 4, 2)], 256: [Tile(16, 32, 4, 1)]},
    "dq": {
        64: [Tile(64, 64, 4, 1), Tile(64, 64, 4, 1, again=True)],
        128: [Tile(64, 64, 4, 1), Tile(64, 64, 4, 1, again=True)],
        256: [Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)],
    },
    "dk_dv": {
        64: [Tile(64, 64, 4, 1), Tile(32, 32, 4, 2)],
        128: [Tile(64, 64, 4, 1), Tile(32, 32, 4, 2)],
        256: [Tile(32, 32, 4, 1)],
    },
    "dr": {
        128: [Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)],
        256: [Tile(32, 64, 4, 1), Tile(32, 32, 4, 1)],
    },
}
_FLOAT32 = {
    "forward": {128: [Tile(32, 32, 8, 1)], 256: [Tile(16, 16, 8, 1)]},
    "decode": {64: [Tile(16, 32, 4, 1)], 128: [Tile(16, 32, 8, 1)], 256: [Tile(16, 16, 8, 1)]},
    "dq": {128: [Tile(32, 32, 8, 1)], 256: [Tile(16, 32, 8, 1)]},
    "dk_dv": {128: [Tile(32, 32, 8, 1)], 256: [Tile(16, 16, 8, 1)]},
    "dr": {256: [Tile(32, 32, 8, 1)]},
}
# AMD's tensor cores do multiply in float32.
_AMD_FLOAT32 = {kernel: {256: [Tile(32, 32, 4, 1)]} for kernel in KERNELS}
_AMD_FLOAT32["decode"] = {64: [Tile(16, 32, 4, 1)], 256: [Tile(16, 16, 4, 1)]}


# Rows or columns of a tile.
LARGEST = 128


# What a step costs Triton's interpreter hardly depends on the size of its tiles.
_INTERPRETED = Tile(64, 64, 4, 1)


@functools.cache
def candidates(kernel: str, D: int, itemsize: int, arch: int | str | None) -> tuple[Tile, ...]:
    """The tiles to choose from, the default first.

    kernel: one of KERNELS. arch: compute capability as Triton writes it (90), AMD's name ("gfx942"), or None
    for Triton's interpreter.
    """
    if arch is None:
        return (_INTERPRETED if kernel == "dq" else _INTERPRETED._replace(again=False),)
    if isinstance(arch, str):
        table = _AMD_FLOAT32 if itemsize == 4 else _AMD
    elif itemsize == 4:
        table = _FLOAT32
    else:
        table = _HOPPER if 90 <= arch < 120 else _AMPERE  # from 120 on parts are small again
    return next(tuple(tiles) for largest, tiles in table[kernel].items() if largest >= D)


def autotune() -> bool:
    """Whether to measure the candidates (TXL_TRITON_AUTOTUNE, on by default) rather than take the first."""
    return os.environ.get("TXL_TRITON_AUTOTUNE", "1") != "0"


@functools.cache
def block_of_head(D: int) -> int:
    """BD: columns of a tile that holds D channels."""
    return max(16, triton.next_power_of_2(D))


def rows_added(D: int) -> int:
    """BM of the kernels that add biases and work out delta: 16-bit numbers take four loads of 16 bytes for
    each of 128 threads."""
    return min(LARGEST, 4096 // block_of_head(D))


def merged(D: int, splits: int) -> dict[str, int]:
    """BS, no fewer than all splits of a query, and BT, how many are added at a time: each of 128 threads then
    has 32 numbers of them in registers."""
    BS = triton.next_power_of_2(splits)
    return {"BS": BS, "BT": min(BS, 4096 // block_of_head(D))}

"""The CUDA kernels as nvcc compiles them for GPUs that are not here: tensor cores, no spilled registers,
shared memory within the part's limit; and by their addresses: which banks of shared memory a warp meets."""

from __future__ import annotations

import collections
import re

import pytest
from helpers import EMULATED, ROOT

pytest.importorskip("triton")  # has the disassembler
import cuda_static as static
from cuda_static import cuda_build

if EMULATED:
    pytest.skip("TXL_CUDA_EMULATION: there is nothing to compile", allow_module_level=True)

PAGE = ROOT / "docs" / "cuda_kernels.md"
needs_nvcc = pytest.mark.skipif(cuda_build.find_nvcc() is None, reason="no nvcc")


def assert_sound(report: static.Report) -> None:
    works_on_tiles = not re.match(r"(Merge|Sum|Prepare)Kernel", report.kernel)
    if works_on_tiles:
        assert report.whole.tensor > 0, f"{report.kernel}: no product by tensor cores"
    assert report.blocks >= 1, f"{report.kernel} on sm_{report.arch}: {report.shared} bytes of shared memory"
    if report.head in (64, 128) and not report.kernel.endswith("true>"):  # without dropout
        assert report.stack == 0 and report.local == 0, f"{report.kernel} spills on sm_{report.arch}"


@needs_nvcc
def test_the_class_of_64():
    for report in static.reports([64], [90]):
        assert_sound(report)


@needs_nvcc
@pytest.mark.slow
def test_every_class():
    found = static.reports()
    for report in found:
        assert_sound(report)
    # Which kernels there are and their shared memory; registers depend on nvcc's version.
    facts = [(r.head, r.arch, r.kernel, f"{r.shared / 1024:.0f}") for r in found]
    assert facts == facts_in(PAGE.read_text()), (
        "docs/cuda_kernels.md is out of date: python tests/cuda_static.py --write docs/cuda_kernels.md"
    )


def facts_in(page: str) -> list[tuple[int, int, str, str]]:
    found, head, arch = [], 0, 0
    for line in page.splitlines():
        if match := re.match(r"## D up to (\d+), sm_(\d+)", line):
            head, arch = int(match[1]), int(match[2])
        elif line.startswith("| ") and not line.startswith("| kernel"):
            kernel, _, _, shared, *_ = (cell.strip() for cell in line.strip("| ").split(" | "))
            found.append((head, arch, kernel, shared))
    return found


# ---- Banks of shared memory: 32 of 4 bytes ----


def passes(accesses: list[tuple[int, ...]]) -> int:
    """How often shared memory must be asked: the most different words that lanes want of one bank.

    accesses: the words (4 bytes) of each lane that takes part.
    """
    words = {word for lane in accesses for word in lane}
    return max(collections.Counter(word % 32 for word in words).values())


@pytest.mark.parametrize("head", cuda_build.HEADS)
def test_matrix_loads_meet_no_bank_twice(head):
    """ldmatrix: eight rows of 16 bytes at a time, Rows<kHead>::kPitch apart."""
    pitch = (2 * head + 16) // 4
    assert passes([tuple(row * pitch + word for word in range(4)) for row in range(8)]) == 1


@pytest.mark.parametrize("BN", [16, 32, 64])
def test_the_band_is_written_without_conflicts_and_read_with_the_fewest(BN):
    """As csrc/cuda/forward.h does: lane 4 a + b writes columns 2 b, 2 b + 1 of row a at once (half a warp at
    a time), and reads, one by one, the same columns moved a places left."""
    columns = 16 + BN
    pitch = columns + (0 if columns % 16 else 8)  # kBandPitch
    lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
    for half in (lanes[:16], lanes[16:]):
        assert passes([(a * pitch + c, a * pitch + c + 1) for a, c in half]) == 1
    reads = [passes([(a * pitch + c + x - a,) for a, c in lanes]) for x in (0, 1)]
    assert reads == [2, 2]


def test_no_pitch_reads_the_band_without_conflicts():
    """Two columns written at once need an even pitch; then rows are an odd number of words apart for reading,
    and of the 32 banks the four rows with an even distance share 16."""
    for pitch in range(32, 98, 2):
        lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
        assert passes([(a * pitch + c - a,) for a, c in lanes]) >= 2, pitch

"""The CUDA kernels as nvcc compiles them for GPUs that are not here: tensor cores, no spilled registers,
shared memory within the part's limit."""

from __future__ import annotations

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
        assert report.tensor > 0, f"{report.kernel} on sm_{report.arch}: no product by tensor cores in a loop"
    if "Warpgroup" in report.kernel:
        products, waits, boxes, turns = (
            sum(n for loop in report.loops for name, n in loop.names.items() if name.startswith(kind))
            for kind in ("HGMMA", "WARPGROUP.DEPBAR", "UTMALDG", "BRA.U.ANY")
        )
        # Forward: for a near tile three, and one where a band begins; for a plain one three, which without
        # dropout has a loop of its own. Of keys: two for a band, two for a near tile, the second of which
        # short rows without dropout leave to the next tile; of long rows loops over queries alone, of tiles
        # of three kinds, one of them twice. Of dS: one for near tiles, one for far ones. Of rows of r: one.
        # Else registers were in the compiler's way, and it lets every instruction wait for the one before.
        short, dropout = report.head <= 64, report.kernel.endswith("true>")
        block = re.search(r"Warpgroup\w+", report.kernel)[0]
        expected = {
            "WarpgroupQueryBlock": 4 if dropout else 7,
            "WarpgroupKeyBlock": 7 if not short else 4 if dropout else 3,
            "WarpgroupSlopeBlock": 2,
            "WarpgroupRowBlock": 1,
        }[block]
        assert waits == expected and products >= 4 * waits, (
            f"{report.kernel}: {products} wgmma, {waits} waits"
        )
        # Of keys, values and r; of queries three times, and r; of keys and r; of queries. And not told by
        # every thread in turn.
        least = {
            "WarpgroupQueryBlock": 3,
            "WarpgroupKeyBlock": 4 if short else 0,
            "WarpgroupSlopeBlock": 2,
            "WarpgroupRowBlock": 1,
        }[block]
        assert boxes >= least * report.head // 64 and turns == 0, (
            f"{report.kernel}: {boxes} boxes, {turns} turns"
        )
    # What joins splits may be launched early, and a compiler may move what it takes for constant up.
    waits = re.match(r"MergeKernel<.*true>", report.kernel)
    assert report.early == (0 if waits else None), (
        f"{report.kernel} on sm_{report.arch}: {report.early} early"
    )
    size = f"{report.kernel} on sm_{report.arch}: {report.shared} bytes of shared memory"
    assert report.blocks >= 1, size
    if report.arch == 80 and report.head <= static.NARROW[report.element]:  # txl_kernels/cuda.py: of others
        assert report.small_blocks >= 1, size
    spills = f"{report.kernel} on sm_{report.arch}: {report.stack} bytes of stack, {report.local} accesses"
    assert report.stack <= static.may_spill(report.kernel) and report.local == 0, spills


def assert_as_documented(found: list[static.Report], sections: slice = slice(None)) -> None:
    """All figures, if nvcc is the page's; else which kernels there are and their shared memory."""
    page = PAGE.read_text()
    expected, facts = facts_in(page)[sections], facts_in(static.document(found))
    if f"nvcc {static.nvcc_version()}," not in page:
        expected, facts = (
            [(heading, [(kernel, shared) for kernel, _, _, shared, *_ in rows]) for heading, rows in of]
            for of in (expected, facts)
        )
    assert facts == expected, (
        "docs/cuda_kernels.md is out of date: python tests/cuda_static.py --write docs/cuda_kernels.md"
    )
    for report in found:
        assert_sound(report)


@needs_nvcc
def test_the_class_of_64():
    sections = [heading for heading, _ in facts_in(PAGE.read_text())]
    n = sections.index("bfloat16, D up to 64, sm_90")
    assert_as_documented(static.reports(["bf16"], [64], [90]), slice(n, n + 1))


@needs_nvcc
@pytest.mark.slow
def test_every_class():
    assert_as_documented(static.reports())


def facts_in(page: str) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Of each section the heading, and the cells of its rows."""
    found: list[tuple[str, list[tuple[str, ...]]]] = []
    for line in page.splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif line.startswith("| ") and not line.startswith("| kernel"):
            found[-1][1].append(tuple(cell.strip() for cell in line.strip("| ").split(" | ")))
    return found

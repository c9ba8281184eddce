"""The emulation that CUDA kernels are tested in without a GPU: right kernels pass, faults are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cuda_emulation" / "test_emulation.cpp"
COMPILER = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++"))), None)

RIGHT = [
    *("product_bf16", "product_f16", "product_f32", "product_trans_bf16", "product_trans_f16"),
    "product_cut_off",
    *("shuffles", "pipeline", "warpgroup_bf16", "warpgroup_f16", "boxes", "boxes_of_heads", "boxes_of_what"),
    "stored_boxes",
    *("exchange_warp", "exchange_block", "meeting", "uninitialised", "conversions", "convert"),
    *("same_in_any_order", "random_races", "global.copy_not_valid", "global.early_but_waits"),
    "call.results",
]

# Case: the error it must end with.
FAULTS = {
    "product_wrong_index": "the product differs",
    "product_wrong_index_f32": "the product differs",
    "product_not_tf32": "mma_tf32: an operand is not a tf32: 3f800001",
    "product_no_barrier": r"race: shared read of 16 bytes at \+32 after a write by thread 2, no sync_warp or",
    "pipeline_no_wait": r"thread 127 .*: shared read of 16 bytes at \+496: copy not waited for, by thread 31",
    "pipeline_late_wait": "copy not waited for, by thread 31",
    "pipeline_no_barrier": "race: shared copy of 16 bytes .* after a read by thread 0, no sync_threads",
    "pipeline_only_sync_warp": "race: shared copy of 16 bytes .* after a read by thread 0, no sync_threads",
    "pipeline_reuse": r"race: shared copy of 16 bytes at \+0 after a read by thread 96, no sync_threads in",
    "pipeline_pending_at_end": "ends with a copy not waited for",
    "warpgroup_no_fence": r"warpgroup_mma reads \+9088, which thread 0 has written without a fence_async",
    "warpgroup_early_fence": r"warpgroup_mma reads \+9088, which thread 0 has written without a fence_async",
    "warpgroup_late_fence": r"warpgroup_mma reads \+9088, which thread 0 has written without a fence_async",
    "warpgroup_no_barrier": r"shared read of 16 bytes at \+9088: copy not waited for, by thread 0",
    "warpgroup_no_begin": "warpgroup_mma without a warpgroup_begin since the last wait",
    "warpgroup_no_commit": "ends with a product of a warpgroup not waited for",
    "warpgroup_no_wait": "the product differs",
    "warpgroup_pending_at_end": "ends with a product of a warpgroup not waited for",
    "warpgroup_one_warp_less": r"\(warp 2, .*: divergence: other products of a warpgroup than warp 0",
    "warpgroup_one_warp_late": r"\(warp 2, .*: divergence: other products of a warpgroup than warp 0",
    "warpgroup_overwrite": r"thread 40 .*: race: shared write of 4 bytes at \+9488 after a read by thread 3",
    "warpgroup_overwrite_between_barriers": r"thread 40 .*: race: shared write of \+9488 after warpgroup_mma",
    "warpgroup_overwrite_left": r"thread 40 .*: race: shared write of 4 bytes at \+1296 after a read by",
    "warpgroup_no_fence_left": r"warpgroup_mma reads \+9088, which thread 0 has written without a fence",
    "warpgroup_wrong_index_left": "the product differs",
    "warpgroup_no_swizzle": "warpgroup_mma: only descriptors of the 128-byte swizzle",
    "warpgroup_wrong_index": "the product differs",
    "warpgroup_unaligned": "the product differs",
    "boxes_no_mbarrier": r"there is no mbarrier at \+17280",
    "boxes_no_fence": r"copy_box: the mbarrier at \+17280, which thread 0 has written without a fence",
    "boxes_no_barrier": r"race: shared use of an mbarrier of 8 bytes at \+17280 after a mbarrier_init by",
    "boxes_no_arrival": "deadlock: no thread can run",
    "boxes_two_arrivals": "thread 0 .*: mbarrier_arrive: one arrival too many",
    "boxes_overwritten": r"thread 5 .*: the mbarrier at \+17280 was overwritten",
    "boxes_no_wait": r"shared read of 16 bytes at \+896: copy not waited for, by thread 0",
    "boxes_wrong_parity": r"shared read of 16 bytes at \+896: copy not waited for, by thread 0",
    "boxes_only_wait": r"thread 1 .*: race: shared read of 2 bytes at \+898 after a write by thread 0",
    "boxes_product_without_barrier": r"warpgroup_mma reads \+896, which a copy_box has written, without a",
    "boxes_read_without_fence": r"copy_box: writes to \+928, which thread 16 has read without a fence_async",
    "boxes_reuse": r"copy_box: writes to \+896, which thread 0 has read without a fence_async_proxy and a",
    "boxes_pending_at_end": "ends with a box not waited for",
    "boxes_unaligned": "copy_box: to 2176, which is no multiple of 1024",
    "boxes_out_of_bounds": "global copy_box of 2 bytes .* is out of bounds: nearest is 'x'",
    "stored_boxes_no_fence": r"store_box reads \+128, which thread 0 has written without a fence_async_proxy",
    "stored_boxes_one_lane_no_fence": r"store_box reads \+176, which thread 9 has written without a fence",
    "stored_boxes_late_fence": r"store_box reads \+128, which thread 0 has written without a fence_async",
    "stored_boxes_no_barrier": r"store_box reads \+128, which thread 0 has written without a fence_async",
    "stored_boxes_write_before_wait": r"shared write of 16 bytes at \+128, from where a store_box has not",
    "stored_boxes_no_barrier_after_wait": r"thread 1 .*: race: shared write of 16 bytes at \+160 after a",
    "stored_boxes_pending_at_end": "ends with a store_box not waited for",
    "stored_boxes_no_swizzle": "an element differs",
    "stored_boxes_wrong_index": "store_box: of 64 channels",
    "stored_boxes_unaligned": "store_box: from 1408, which is no multiple of 256",
    "stored_boxes_out_of_bounds": "global store_box of 2 bytes .* is out of bounds: nearest is 'to'",
    "exchange_warp_no_barrier": r"thread 1 .*: race: shared write of 4 bytes at \+4 after a read by thread 0",
    "exchange_warp_reuse": r"race: shared read of 4 bytes at \+0 after a write by thread 0, no sync_warp or",
    "exchange_block_no_barrier": r"race: shared write of 4 bytes at \+128 after a read by thread 0, no sync",
    "exchange_block_only_sync_warp": r"race: shared write of 4 bytes at \+128 after a read by thread 0",
    "exchange_block_reuse": r"race: shared read of 4 bytes at \+128 after a write by thread 32, no sync",
    "meeting_one_warp_only": "thread 16 .*: divergence: at sync_warp while thread 0 waits at sync_threads",
    "meeting_some_lanes_only": "thread 16 .*: divergence: at any while thread 0 waits at sync_threads",
    "meeting_ends_early": r"thread 5 .*: divergence: ends while thread 0 waits at sync_threads",
    "first_failing_block": "block 20, thread 0 ",
    "collective.two_collectives": "thread 7 .*: divergence: at any while thread 0 waits at shuffle_xor",
    "collective.collective_and_end": "thread 7 .*: divergence: ends while thread 0 waits at any",
    "collective.end_and_collective": "thread 1 .*: divergence: at any while thread 0 has ended",
    "collective.not_uniform": "thread 31 .*: uniform: 1 in lane 1, 0 in lane 0",
    "collective.exception": "exception: thrown by the kernel",
    "shared.out_of_bounds": r"thread 31 .*: shared write of 4 bytes at \+124 is out of bounds: there are 124",
    "shared.partly_out_of_bounds": r"thread 30 .*: shared read of 4 bytes at \+120 is out of bounds",
    "shared.before_the_start": "shared read of 4 bytes at -4 is out of bounds",
    "shared.without_base": "shared read of 4 bytes at .* is out of bounds",
    "shared.misaligned": r"thread 1 .*: shared read of 8 bytes at \+4 is misaligned",
    "shared.matrix_misaligned": r"thread 1 .*: shared read of 16 bytes at \+24 is misaligned",
    "shared.matrix_out_of_bounds": r"thread 17 .*: shared read of 16 bytes at \+272 is out of bounds",
    "shared.copy_out_of_bounds": r"thread 30 .*: shared copy of 16 bytes at \+480 is out of bounds",
    "shared.write_to_pending": r"shared write of 4 bytes at \+0: copy not waited for, by thread 0",
    "shared.too_much": "233472 bytes of shared memory",
    "global.read_out_of_bounds": r"thread 31 .*: global read of 4 bytes .* of bounds: nearest is 'x' \+128",
    "global.partly_out_of_bounds": "thread 7 .*: global read of 16 bytes .* out of bounds: nearest is 'x'",
    "global.write_out_of_bounds": "thread 0 .*: global write of 4 bytes .* of bounds: nearest is 'out' -4",
    "global.write_read_only": "thread 0 .*: global write of 4 bytes at 'x' .*, which is read-only",
    "global.misaligned": "thread 1 .*: global read of 8 bytes .* is misaligned",
    "global.nothing_registered": "global read: no global memory is registered",
    "global.copy_out_of_bounds": "thread 8 .*: global copy of 16 bytes .* is out of bounds",
    "global.copy_misaligned": "thread 1 .*: global copy of 16 bytes .* is misaligned",
    "global.early": "thread 0 .*: global read of 4 bytes before await_previous, in a launch with pdl",
    "global.early_write": "thread 5 .*: global write of 4 bytes before await_previous, in a launch with pdl",
    "global.written_twice": "thread 31 .*: global write .*, where block 0, thread 0 of this launch",
    "global.written_by_two_blocks": "block 1, thread 0 .*: global write .*, where block 0, thread 0",
    "global.read_after_write": "global read of 4 bytes .*, where block 0, thread 0",
    "call.operand_written": "thread 0 .*: global write of 4 bytes at 'q' .*, which is read-only",
    "call.written_twice": "thread 31 .*: global write .*, where block 0, thread 0 of this launch",
    "call.beyond_a_part": r"thread 31 .*: global write .* out of bounds: nearest is 'du_parts' \+1536, which",
}


@pytest.fixture(scope="session")
def run_case(tmp_path_factory):
    """Runs a case of test_emulation.cpp: (exit status, what it printed)."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("cuda_emulation") / "test_emulation"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCE.parent}"]
    build = subprocess.run([COMPILER, *flags, SOURCE, "-o", program, "-ldl"], capture_output=True, text=True)
    assert build.returncode == 0, build.stderr

    def run(case):
        done = subprocess.run([program, case], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("case", RIGHT)
def test_right(run_case, case):
    assert run_case(case) == (0, "")


@pytest.mark.parametrize("case", FAULTS)
def test_fault(run_case, case):
    status, output = run_case(case)
    assert status == 1
    assert re.search(FAULTS[case], output), output


def test_banks(run_case, monkeypatch, tmp_path):
    path = tmp_path / "banks"
    monkeypatch.setenv("TXL_EMULATION_BANKS", str(path))
    assert run_case("banks") == (0, "")
    lines = [line.rsplit("|", 5) for line in path.read_text().splitlines()]
    # What, bytes of a lane, how often shared memory must be asked, how often it would be without conflicts.
    assert sorted((what, int(size), int(n), int(least)) for _, what, size, _, n, least in lines) == [
        ("read", 2, 1, 1),
        ("read", 4, 1, 1),  # all lanes the same word
        ("read", 4, 1, 1),  # half of them every other word
        ("read", 4, 272, 32),  # 1 to 32 lanes every 16th word: two banks for all
        ("read", 8, 2, 2),
        ("read", 8, 4, 2),
        ("read", 16, 4, 4),
        ("read", 16, 8, 4),
        ("read_matrix", 16, 4, 4),
        ("read_matrix", 16, 32, 4),
        ("write", 4, 1, 1),
        ("write", 4, 32, 1),
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_nvcc(tmp_path, arch):
    """The same kernels, with every intrinsic, are PTX that the assembler takes."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    command = [nvcc, "-x", "cu", "-cubin", f"-arch={arch}", "-std=c++17", "-Werror", "all-warnings"]
    if arch == "sm_90a":  # what alone has warpgroups
        command.append("-DTXL_TEST_WARPGROUPS")
    build = subprocess.run([*command, SOURCE, "-o", tmp_path / "cubin"], capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    assert "warning" not in (build.stdout + build.stderr).lower()

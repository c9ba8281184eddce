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
            "WarpgroupBlock": 4 if dropout else 7,
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
            "WarpgroupBlock": 3,
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
    assert report.blocks >= 1, f"{report.kernel} on sm_{report.arch}: {report.shared} bytes of shared memory"
    spills = f"{report.kernel} on sm_{report.arch}: {report.stack} bytes of stack, {report.local} accesses"
    assert report.stack <= static.may_spill(report.kernel) and report.local == 0, spills


def assert_as_documented(found: list[static.Report], expected: list[tuple[str, int, int, str, str]]) -> None:
    """Which kernels there are and their shared memory; registers depend on nvcc's version."""
    facts = [(static.DTYPES[r.element], r.head, r.arch, r.kernel, f"{r.shared / 1024:.0f}") for r in found]
    assert facts == expected, (
        "docs/cuda_kernels.md is out of date: python tests/cuda_static.py --write docs/cuda_kernels.md"
    )
    for report in found:
        assert_sound(report)


@needs_nvcc
def test_the_class_of_64():
    expected = [fact for fact in facts_in(PAGE.read_text()) if fact[:3] == ("bfloat16", 64, 90)]
    assert_as_documented(static.reports(["bf16"], [64], [90]), expected)


@needs_nvcc
@pytest.mark.slow
def test_every_class():
    assert_as_documented(static.reports(), facts_in(PAGE.read_text()))


def facts_in(page: str) -> list[tuple[str, int, int, str, str]]:
    found, dtype, head, arch = [], "", 0, 0
    for line in page.splitlines():
        if match := re.match(r"## (\w+), D up to (\d+), sm_(\d+)", line):
            dtype, head, arch = match[1], int(match[2]), int(match[3])
        elif line.startswith("| ") and not line.startswith("| kernel"):
            kernel, _, _, shared, *_ = (cell.strip() for cell in line.strip("| ").split(" | "))
            found.append((dtype, head, arch, kernel, shared))
    return found


# ---- Banks of shared memory: 32 of 4 bytes ----


def passes(accesses: list[tuple[int, ...]]) -> int:
    """How often shared memory must be asked: the most different words that lanes want of one bank.

    accesses: the words (4 bytes) of each lane that takes part.
    """
    words = {word for lane in accesses for word in lane}
    return max(collections.Counter(word % 32 for word in words).values())


def word_of(element: str, head: int, row: int, channel: int) -> int:
    """csrc/cuda/tiles.h: Rows<E, kHead>::at, in words."""
    size = 4 if element == "f32" else 2
    whole = head * size % 128 == 0
    pitch, byte = head * size + (0 if whole else 16), channel * size
    return (row * pitch + (byte ^ row % 8 * 16 if whole else byte)) // 4


@pytest.mark.parametrize("element, head", cuda_build.units())
def test_rows_meet_no_bank_twice(element, head):
    """ldmatrix: 16 bytes of eight rows at a time; and what is copied, eight neighbouring pieces of a row."""
    piece = 4 if element == "f32" else 8  # elements of 16 bytes

    def words(row, n):
        start = word_of(element, head, row, n * piece)
        assert start % 4 == 0
        return tuple(range(start, start + 4))

    for n in range(head // piece):
        assert passes([words(row, n) for row in range(8)]) == 1
    for row in range(8):
        for first in range(0, head // piece - 7, 8):
            lanes = [words(row, n) for n in range(first, first + 8)]
            assert passes(lanes) == 1
            # Else a line of memory goes to two lines here, one after the other.
            if head * (16 // piece) % 128 == 0:
                assert len({word // 32 for lane in lanes for word in lane}) == 1


@pytest.mark.parametrize("head", cuda_build.WARPGROUP_CLASSES["bf16"])
def test_panels_meet_no_bank_twice(head):
    """As csrc/cuda/tiles.h, Panels::at, places them: eight lanes write the pieces of a row, ldmatrix reads
    the same piece of eight rows."""

    def words(row, piece):
        start = piece // 8 * 64 * 32 + row * 32 + (piece % 8 ^ row % 8) * 4
        return tuple(range(start, start + 4))

    for piece in range(head // 8):
        assert passes([words(row, piece) for row in range(8)]) == 1
    for row in range(8):
        assert passes([words(row, piece) for piece in range(8)]) == 1


@pytest.mark.parametrize("head", cuda_build.CLASSES["f32"])
def test_rows_of_float32_are_read_transposed_without_conflicts(head):
    """SquareRows::load: lane 4 a + b reads channel a of rows 2 b and 2 b + 1, one by one."""
    for x in (0, 1):
        assert passes([(word_of("f32", head, 2 * b + x, a),) for a in range(8) for b in range(4)]) == 1


@pytest.mark.parametrize("BN", [16, 32])
def test_the_bands_gradient_in_float32_is_read_without_conflicts(BN):
    """csrc/cuda/slope_block.h: lane 4 a + b has columns 2 b, 2 b + 1 of row a, half a warp at a time."""
    pitch = 16 + BN + 8  # kSlopePitch
    lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
    for half in (lanes[:16], lanes[16:]):
        assert passes([(a * pitch + c, a * pitch + c + 1) for a, c in half]) == 1


@pytest.mark.parametrize("element, rows, worst", [("bf16", 64, 1), ("bf16", 128, 1), ("f32", 64, 2)])
def test_the_gradient_of_scores_is_read_along_its_columns_with_few_conflicts(element, rows, worst):
    """csrc/cuda/backward_dr.h: lane 4 a + b reads column a of queries 2 b and 2 b + 1, one by one. Rows begin
    with whole pieces of 16 bytes, so that from query to query there is one element more to skip."""
    size = 4 if element == "f32" else 2
    piece = 16 // size
    pitch = (rows // piece + 1) * 16  # kSlopeBytes

    def word(query, column, first):
        return (query * pitch + (column + (first + query) % piece) * size) // 4

    for first in range(piece):
        for x in (0, 1):
            lanes = [(word(2 * b + x, a, first),) for a in range(8) for b in range(4)]
            assert passes(lanes) <= worst


@pytest.mark.parametrize("BN", [16, 32, 64])
def test_the_band_is_written_without_conflicts_and_read_with_the_fewest(BN):
    """As csrc/cuda/query_block.h does: lane 4 a + b writes columns 2 b, 2 b + 1 of row a at once (half a warp
    at a time), and reads, one by one, the same columns moved a places left."""
    columns = 16 + BN
    pitch = columns + 8  # kBandPitch
    lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
    for half in (lanes[:16], lanes[16:]):
        assert passes([(a * pitch + c, a * pitch + c + 1) for a, c in half]) == 1
    reads = [passes([(a * pitch + c + x - a,) for a, c in lanes]) for x in (0, 1)]
    assert reads == [2, 2]


def test_warpgroups_write_the_band_and_read_it_without_conflicts():
    """As csrc/cuda/warpgroup_block.h does: lane 4 a + b writes columns 2 b, 2 b + 1 of two rows a, of the
    first one by one, one place to the left; and reads two columns of each, moved by their distances."""
    columns, pitch = 128, 128 + 8  # kBandPitch
    lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
    moved = {}
    for row in range(64):  # query_of_row
        query = row // 64 * 64 + (2 * row % 8 + row % 8 // 4) * 8 + row // 16 % 4 * 2 + row // 8 % 2
        moved[row] = 63 - query  # what the row's first column is of the warpgroup's
    assert sorted(moved.values()) == list(range(64))
    for half in (lanes[:16], lanes[16:]):
        assert passes([(a * pitch + c, a * pitch + c + 1) for a, c in half]) == 1
    for turn in (0, 1):
        one_by_one = [a * pitch + (c + (turn if a < 4 else 1 - turn) - 1) % columns for a, c in lanes]
        assert passes([(word,) for word in one_by_one]) == 1
    for warp in range(4):
        for y in (0, 1):
            for n in range(0, 64, 8):
                for half in (lanes[:16], lanes[16:]):
                    starts = [
                        a * pitch + (moved[16 * warp + 8 * y + a] + y - 1 + n + c) % columns for a, c in half
                    ]
                    assert all(start % 2 == 0 for start in starts)
                    assert passes([(start, start + 1) for start in starts]) == 1


def test_warpgroups_of_keys_write_the_band_and_read_it_without_conflicts():
    """csrc/cuda/warpgroup_key_block.h, BandOfTile: lane 4 a + b writes columns 2 b, 2 b + 1 of two rows a,
    and reads of queries 2 b and 2 b + 1 what key a sees, one by one."""
    pitch = 64 + 128 + 13  # kPitch
    lanes = [(a, b) for a in range(8) for b in range(4)]

    def word(query, column):
        return query * pitch + query % 2 + column

    written = set()
    for warp in range(4):
        for y in (0, 1):
            rows = [8 * a + 2 * warp + y for a in range(8)]  # query_of_row
            written.update(rows)
            for half in (lanes[:16], lanes[16:]):
                starts = [word(rows[a], 2 * b) for a, b in half]
                assert all(start % 2 == 0 for start in starts)
                assert passes([(start, start + 1) for start in starts]) == 1
    assert written == set(range(64))
    for n in range(0, 64, 8):
        for x in (0, 1):
            for key in range(0, 128, 8):
                queries = [n + x + 2 * b for _, b in lanes]
                reads = [(word(i, 63 - i + key + a),) for i, (a, _) in zip(queries, lanes, strict=True)]
                assert passes(reads) == 1


def test_warpgroups_of_keys_turn_slopes_without_conflicts():
    """csrc/cuda/warpgroup_key_block.h: stmatrix writes 16 bytes of eight queries at once, rows of 32 bytes in
    whose second four of eight the halves have changed places."""
    for first in range(0, 64, 8):
        for piece in (0, 1):
            words = [8 * i + 4 * (piece ^ i // 4 % 2) for i in range(first, first + 8)]
            assert passes([(word, word + 1, word + 2, word + 3) for word in words]) == 1


def test_warpgroups_of_slopes_read_them_twice_at_most_and_moved_without_conflicts():
    """csrc/cuda/warpgroup_slope_block.h: eight lanes write a line of a tile's row; ldmatrix reads the same
    piece of eight rows; lane 4 a + b the words of two keys of row a, as many keys on as its query is."""
    pitch = 3 * 128 // 4  # kSlopePitch

    def word(row, tile, key):
        return row * pitch + tile * 32 + (key // 2 + 8 * row) % 32

    def piece(row, tile, n):
        return tuple(word(row, tile, 8 * n + 2 * x) for x in range(4))

    for row in range(128):
        for tile in range(3):
            line = [piece(row, tile, n) for n in range(8)]
            assert all(words == tuple(range(words[0], words[0] + 4)) for words in line)
            assert passes(line) == 1 and len({words[0] // 32 for words in line}) == 1
    for first in range(0, 128, 8):
        for n in range(8):
            assert passes([piece(first + row, 0, n) for row in range(8)]) == 2
    for warp in range(4):
        for n in range(0, 64, 8):
            for y, moved in ((0, -1), (0, 1), (1, 0)):  # of the first query the words around its pair
                lanes = []
                for a in range(8):
                    for b in range(4):
                        row = 16 * warp + 8 * y + a
                        query = row % 8 * 8 + row // 8  # query_of_row
                        key = n + 2 * b - 63 + query + moved
                        assert key % 2 == 0
                        lanes.append((word(row, 1 if key < 0 else 2, key % 64),))
                assert passes(lanes) == 1


def test_no_pitch_reads_the_band_without_conflicts():
    """Two columns written at once need an even pitch; then rows are an odd number of words apart for reading,
    and of the 32 banks the four rows with an even distance share 16."""
    for pitch in range(32, 98, 2):
        lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
        assert passes([(a * pitch + c - a,) for a, c in lanes]) >= 2, pitch

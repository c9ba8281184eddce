"""Backend "triton": what its pieces promise, in Triton's interpreter; and the contract at other tile sizes.

The contract's own tests run on it too, with TRITON_INTERPRET=1 in the environment:

    TRITON_INTERPRET=1 pytest -k triton

Without that variable this file runs itself that way, in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import (
    BACKENDS,
    INTERPRET,
    ROOT,
    assert_accurate,
    assert_same_bits,
    check,
    distances,
    f16,
    f32,
    inputs,
    key_range,
    plain,
    randn_like,
    run,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

from txl_kernels import BackendUnavailable, gpu, philox, rel_attention
from txl_kernels.registry import Inputs, Options

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from txl_kernels import triton as backend  # noqa: E402
from txl_kernels.triton import configs, tiles  # noqa: E402
from txl_kernels.triton._chunks import Chunks  # noqa: E402
from txl_kernels.triton.configs import Tile  # noqa: E402
from txl_kernels.triton.tiles import Chunk, Problem  # noqa: E402

interpreted = pytest.mark.skipif(not INTERPRET, reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(INTERPRET, reason="needs TRITON_INTERPRET unset")

TRITON = next(b for b in BACKENDS if b.name == "triton")


@compiled
@pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"),
    reason="Triton 3.6's interpreter needs NumPy < 2.4",
)
def test_the_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# ---- The pieces ------------------------------------------------------------------------------------------


if INTERPRET:

    @triton.jit
    def _skew_kernel(band, first, skewed, BM: tl.constexpr, BN: tl.constexpr):
        y, x = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
        tile_0 = tl.load(band + y * 2 * BN + x)
        tile_1 = tl.load(band + y * 2 * BN + BN + x)
        tile = tiles.skew(tile_0, tile_1, tl.load(first + tl.arange(0, BM)), BN)
        tl.store(skewed + y * BN + x, tile)

    @triton.jit
    def _kept_kernel(out, seed, p, b, h, i0, j0, BM: tl.constexpr, BN: tl.constexpr):
        y, x = tl.arange(0, BM), tl.arange(0, BN)
        keep = tiles.kept(p, tl.load(seed), b, h, i0 + y, j0, BN)
        tl.store(out + y[:, None] * BN + x[None, :], keep.to(tl.int8))

    @triton.jit
    def _rows_kernel(rows, copies, stride, start, out, D: tl.constexpr, BM: tl.constexpr):
        y, d = tl.arange(0, BM), tl.arange(0, D)
        tile = tiles.load_rows(rows, stride, start, y, None, D, D, True)
        tiles.store_rows(copies, stride, start, y, y < BM, tile, D, D)
        tl.store(out + d, tiles.load_row(rows, stride, start, D, D))

    @triton.jit
    def _bounds_kernel(
        out, p, lo, hi, start,
        KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CLAMP: tl.constexpr,
    ):  # fmt: skip
        if KIND == "keys":
            a, b, c, d, e, f, g, h = tiles.key_tiles(p, lo, hi, start, BM, BN, CLAMP)
            tl.store(out + 6, g)
            tl.store(out + 7, h)
        elif KIND == "queries":
            a, b, c, d, e, f = tiles.query_tiles(p, lo, hi, start, BM, BN, CLAMP)
        else:
            a, b, c, d = tiles.queries_of_rows(p, lo, hi, start, BM, BN)
            e, f = d, d
        tl.store(out, a)
        tl.store(out + 1, b)
        tl.store(out + 2, c)
        tl.store(out + 3, d)
        tl.store(out + 4, e)
        tl.store(out + 5, f)


def problem(L=1, K=1, N=1, r_zero=0, left=0, right=0, p=0.0) -> Problem:
    threshold = ctypes.c_int32(philox.threshold(p)).value
    return Problem(1, 1, L, K, N, r_zero, left, right, 1.0, threshold, 1 / (1 - p))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("BM, BN", [(16, 16), (16, 64), (32, 64), (64, 64), (64, 128), (128, 128)])
def test_skew_reads_every_row_from_its_own_column_on(BM, BN, dtype):
    band = torch.randn(BM, 2 * BN).to(dtype)
    down = BM - 1 - torch.arange(BM, dtype=torch.int32)  # the band, read one place over for every row
    for first in (down, BN - down, torch.randint(0, BN + 1, (BM,), dtype=torch.int32)):
        skewed = torch.empty(BM, BN, dtype=dtype)
        _skew_kernel[(1,)](band, first, skewed, BM=BM, BN=BN)
        assert torch.equal(skewed, band.gather(1, first[:, None] + torch.arange(BN)))


@interpreted
@pytest.mark.parametrize("BN, j0", [(16, 0), (16, 48), (32, 96), (64, 64), (128, 0), (128, 64)])
def test_dropout_drops_what_the_reference_drops(BN, j0):
    seed, BM, i0, b, h = torch.tensor([-987654321987]), 16, 5, 3, 2
    out = torch.empty(BM, BN, dtype=torch.int8)
    _kept_kernel[(1,)](out, seed, problem(p=0.7), b, h, i0, j0, BM=BM, BN=BN)
    mask = philox.keep_mask(seed, 0.7, b + 1, h + 1, i0 + BM, 400, "cpu")[b, h, i0:]
    assert torch.equal(out.bool(), mask[:, j0 : j0 + BN])


@interpreted
@pytest.mark.unpoisoned
def test_rows_far_into_a_tensor():
    """Where a tile begins is an address of 64 bits, for results too, whose rows no other test brings so far
    apart. Only the pages of the tile are ever touched."""
    BM, D, stride, start = 16, 16, 2**23, 300
    assert start * stride > 2**31
    rows, copies = (
        torch.empty((start + BM) * stride, dtype=f16).as_strided((start + BM, D), (stride, 1))
        for _ in range(2)
    )
    rows[start:] = torch.randn(BM, D)
    out = torch.empty(D)
    _rows_kernel[(1,)](rows, copies, stride, start, out, D=D, BM=BM)
    assert torch.equal(copies[start:], rows[start:]) and torch.equal(out, rows[start].float())


@st.composite
def problems(draw):
    L = draw(st.integers(1, 150))
    K = L + draw(st.integers(0, 250))
    N = draw(st.integers(1, K + L))
    far = st.one_of(st.integers(0, K), st.just(K))
    lo, hi = draw(st.integers(0, K)), draw(st.integers(0, K))
    r_zero = draw(st.integers(-L, K + N))
    return problem(L, K, N, r_zero, draw(far), draw(st.one_of(st.just(0), st.integers(0, L)))), lo, hi


def pairs(p: Problem, lo: int, hi: int):
    """Which pairs are seen, and their rows of r before clamping: [L, K]."""
    d, j = distances(p.L, p.K), torch.arange(p.K)
    seen = (d <= p.window_left) & (-d <= p.window_right) & (j >= lo) & (j < hi)
    return seen, p.r_zero - d


def bounds(
    kind: str, p: Problem, lo: int, hi: int, start: int, BM: int, BN: int, clamp: bool = True
) -> list[int]:
    out = torch.zeros(8, dtype=torch.int32)
    _bounds_kernel[(1,)](out, p, lo, hi, start, KIND=kind, BM=BM, BN=BN, CLAMP=clamp)
    return out.tolist()


def assert_tight(used: torch.Tensor, begin: int, end: int, size: int) -> None:
    """Every key or query in use lies between begin and end, and the first tile there has one, and the last.
    None in use: one tile at most."""
    assert not used[:begin].any() and not used[end:].any()
    if used.any():
        last = begin + (end - 1 - begin) // size * size
        assert used[begin : begin + size].any() and used[last:end].any()
    else:
        assert end - begin < size


def in_tiles_of(these: torch.Tensor, size: int) -> int:
    """How many of the keys or queries in [n, pairs] lie in whole tiles that have these pairs alone."""
    n = len(these) // size
    return these[: n * size].reshape(n, these.numel() // len(these) * size).all(1).sum().item() * size


@interpreted
@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("BM, BN", [(16, 32), (32, 32)])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(case=problems())
def test_tiles_of_keys_are_what_they_are_said_to_be(BM, BN, clamp, case):
    p, lo, hi = case
    seen, c = pairs(p, lo, hi)
    for i0 in range(0, p.L, BM):
        rows = slice(i0, i0 + BM)
        begin, *cuts, end = bounds("keys", p, lo, hi, i0, BM, BN, clamp)
        assert begin % BN == 0 and [begin, *cuts, end] == sorted([begin, *cuts, end])
        assert all(cut % BN == 0 or cut == end for cut in cuts)
        assert_tight(seen[rows].any(0), begin, end, BN)
        first, near, last = ((cuts[n], cuts[n + 1]) for n in (0, 2, 4))
        for a, b in (first, near, last):
            assert (b - a) % BN == 0 and seen[rows, a:b].all()
        if not clamp:
            assert first[0] == first[1] and last[0] == last[1]
            assert near[1] - near[0] == in_tiles_of(seen[rows].T, BN)
            continue
        assert (c[rows, slice(*first)] < 0).all()
        assert ((c[rows, slice(*near)] >= 0) & (c[rows, slice(*near)] < p.N)).all()
        assert (c[rows, slice(*last)] >= p.N).all()
        if i0 + BM <= p.L:  # else the rows of r of queries that do not exist count too
            kinds = (c[rows] < 0, (c[rows] >= 0) & (c[rows] < p.N), c[rows] >= p.N)
            found = [in_tiles_of((seen[rows] & kind).T, BN) for kind in kinds]
            assert found == [b - a for a, b in (first, near, last)]


@interpreted
def test_a_long_clamped_memory_is_far():
    """Of 64 tiles all but the few at the clamp and at the diagonal take the short way."""
    p = problem(L=32, K=2048, N=101, r_zero=100, left=2048)
    begin, far_0, far_1, near_0, near_1, *_, end = bounds("keys", p, 0, 2048, 0, 32, 32)
    assert (begin, end) == (0, 2048)
    assert (far_1 - far_0) // 32 == 59 and (near_1 - near_0) // 32 >= 1


@interpreted
def test_a_window_skips_the_tiles_beyond_it():
    p = problem(L=64, K=2048, N=2048, r_zero=2047, left=100)
    begin, *_, end = bounds("keys", p, 0, 2048, 0, 64, 64)
    assert (begin, end) == (1856, 2048)
    begin, *_, end = bounds("queries", p, 0, 2048, 1900 // 64 * 64, 64, 64)[:6]
    assert (begin, end) == (0, 36)


@interpreted
@pytest.mark.parametrize("clamp", [True, False])
@pytest.mark.parametrize("BM, BN", [(16, 32), (32, 32)])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(case=problems())
def test_tiles_of_queries_are_what_they_are_said_to_be(BM, BN, clamp, case):
    p, lo, hi = case
    seen, c = pairs(p, lo, hi)
    for j0 in range(0, p.K, BN):
        keys = slice(j0, j0 + BN)
        begin, *cuts, end = bounds("queries", p, lo, hi, j0, BM, BN, clamp)[:6]
        assert begin % BM == 0 and [begin, *cuts, end] == sorted([begin, *cuts, end])
        assert_tight(seen[:, keys].any(1), begin, end, BM)
        last, near, near_end, edge = cuts
        if last < edge:
            assert edge <= p.L and j0 + BN <= p.K and seen[last:edge, keys].all()
        if j0 + BN <= p.K:
            assert edge - last == in_tiles_of(seen[:, keys], BM)
        assert all(cut % BM == 0 or cut == end for cut in cuts)
        if not clamp:
            assert last == near and near_end == edge
        assert (c[last:near, keys] >= p.N).all() and (c[near_end:edge, keys] < 0).all()
        if clamp and j0 + BN <= p.K:
            assert near - last == in_tiles_of(seen[:, keys] & (c[:, keys] >= p.N), BM)
            assert edge - near_end == in_tiles_of(seen[:, keys] & (c[:, keys] < 0), BM)


@interpreted
@pytest.mark.parametrize("BM, BN", [(16, 32), (32, 32)])
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(case=problems())
def test_queries_of_rows_of_r_are_what_they_are_said_to_be(BM, BN, case):
    p, lo, hi = case
    seen, c = pairs(p, lo, hi)
    exist, _ = pairs(p._replace(window_left=p.K, window_right=p.L), lo, hi)
    for c0 in range(0, p.N, BN):
        block = (c >= c0) & (c < min(c0 + BN, p.N))
        used = seen & block
        begin, near, edge, end = bounds("rows", p, lo, hi, c0, BM, BN)[:4]
        assert begin % BM == 0 and begin <= near <= edge <= end
        assert not used[:begin].any() and not used[end:].any()
        if used.any():  # a window that hides some of the rows, not all, cuts no queries off
            assert_tight((exist & block).any(1), begin, end, BM)
        else:
            assert end - begin < BM + BN
        all_used = used.sum(1) == min(c0 + BN, p.N) - c0  # of a query that sees the key of each row of them
        if near < edge:
            assert edge <= p.L and (edge - near) % BM == 0 and all_used[near:edge].all()
        assert edge - near == in_tiles_of(all_used, BM)


# ---- The contract at other tile sizes --------------------------------------------------------------------


TILES = [Tile(16, 16, 4, 1, True), Tile(16, 64, 4, 1), Tile(32, 64, 4, 1, True), Tile(64, 64, 4, 1)]
CASES = [
    (dict(B=2, H=1, L=50, K=117, D=24), {}),
    (dict(B=1, H=1, L=75, K=140, D=8, N=40), dict(dropout_p=0.4, dropout_seed=11)),
    (dict(B=1, H=1, L=60, K=130, D=20, N=70, causal=False), dict(r_zero=30)),
    (dict(B=1, H=1, L=33, K=90, D=16, N=50), dict(scale=-0.3)),
    (dict(B=1, H=1, L=33, K=90, D=16), dict(scale=0.0)),
    (dict(B=2, H=1, L=40, K=100, D=41), dict(window_size=(30, 0), key_range=((13, 100), (0, 77)))),
]


@pytest.mark.parametrize("D", [8, 40])
def test_rows_begin_where_loads_of_16_bytes_need_them(D):
    """A GPU stops at a wide load from elsewhere; the interpreter does not."""
    wide = torch.randn(2, 3, 5, 48).half()
    odd_row = torch.randn(2, 3, 5, D + 1).half()[..., :D]
    odd_batch = (
        torch.randn(2, 3 * 5 * 48 + 4).half().as_strided((2, 3, 5, D), (3 * 5 * 48 + 4, 5 * 48, 48, 1))
    )
    for x in (wide[..., 1 : D + 1], odd_row, odd_batch):
        rows = backend._rows(x)
        assert torch.equal(rows, x)
        assert rows.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in rows.stride()[:-1])
    aligned = wide[..., :D]
    assert backend._rows(aligned) is aligned


@interpreted
@pytest.mark.parametrize("sizes, options", CASES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.BM}x{t.BN}")
def test_tile_sizes(monkeypatch, tile, sizes, options):
    monkeypatch.setattr(configs, "_INTERPRETED", tile)
    options = {"causal": sizes.get("causal", True), **options}
    if "key_range" in options:
        options["key_range"] = key_range(*options["key_range"])
    check(TRITON, inputs(**sizes), **options)


# The widest in the lists, and dr's default where D <= 64 on Hopper and D = 128 on Ampere.
WIDE = {"forward": Tile(128, 128, 8, 1), "dr": Tile(64, 128, 4, 3)}


def test_no_tile_is_wider_than_those_that_are_tried():
    listed = {
        (kernel, tile.BM, tile.BN)
        for arch in (80, 90, "gfx942")
        for kernel in configs.KERNELS
        for itemsize in (2, 4)
        for D in (64, 128, 256)
        for tile in configs.candidates(kernel, D, itemsize, arch)
        if tile.BN > 64
    }
    assert listed == {(kernel, tile.BM, tile.BN) for kernel, tile in WIDE.items()}


@interpreted
@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(B=2, H=1, L=200, K=300, D=24), {}),
        (dict(B=1, H=2, L=150, K=520, D=16, N=300, causal=False), dict(r_zero=270, window_size=(400, 90))),
        (dict(B=2, H=1, L=140, K=400, D=20, N=150), dict(key_range=((13, 400), (0, 277)), dropout_p=0.4)),
    ],
    ids=["plain", "clamped", "dropped"],
)
@pytest.mark.parametrize("dtype", [f32, f16])
def test_wide_tiles(monkeypatch, dtype, sizes, options):
    monkeypatch.setattr(configs, "candidates", lambda kernel, *_: (WIDE.get(kernel, configs._INTERPRETED),))
    options = {"causal": sizes.get("causal", True), **options}
    if "key_range" in options:
        options.update(key_range=key_range(*options["key_range"]), dropout_seed=7)
    check(TRITON, inputs(**sizes, dtype=dtype), **options)


@interpreted
@pytest.mark.parametrize("dtype", [f32, f16])
@pytest.mark.parametrize("L", [1, 3, 16, 40])
def test_keys_and_batch_shared_out(monkeypatch, L, dtype):
    """As on a GPU of many processors: the keys are split forward (some splits see none), the batch for dr."""
    monkeypatch.setattr(gpu, "processors", lambda device: 64)
    tensors = inputs(B=3, H=1, L=L, K=700, D=16, N=500, dtype=dtype)
    ranges = key_range((0, 700), (300, 310), (50, 50))
    check(TRITON, tensors, key_range=ranges)


@interpreted
@pytest.mark.parametrize("L", [1, 20])
def test_more_splits_than_are_merged_at_a_time(monkeypatch, L):
    monkeypatch.setattr(gpu, "key_splits", lambda inputs: 20)
    assert configs.merged(256, 20) == {"BS": 32, "BT": 16}
    tensors = inputs(B=2, H=1, L=L, K=2500, D=200, N=50)
    check(TRITON, tensors, key_range=key_range((0, 2500), (1800, 2400)), backward=False)


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-46, -1e-46, 5e-324, -1e-300, 1e-37, -2.0])
def test_a_scale_that_float32_does_not_have_is_the_smallest_that_counts(scale):
    q = torch.empty(1, 1, 1, 4)
    of = Inputs(q, q, q, q[0], None, None, None, None)
    problem, constants = backend._problem(of, Options(True, -1, -1, 0, scale, 0.0))
    assert (
        abs(problem.scale) == max(abs(scale), torch.finfo(f32).tiny)
        and ctypes.c_float(problem.scale).value != 0
    )
    assert constants["NEGATIVE"] == (problem.scale < 0) == (scale < 0)


@pytest.mark.parametrize(
    "B, L, K, splits",
    [
        (1, 1, 3800, 30),
        (64, 1, 3800, 1),
        (1, 1, 100, 1),
        (1, 16, 129, 2),
        (1, 17, 3800, 30),
        (4, 2048, 4096, 1),
        (66, 1, 3800, 1),
        (80, 1, 3800, 4),
        (80, 1, 1024, 4),
        (80, 1, 1023, 1),
        (100, 1, 3800, 3),
    ],
)
def test_into_how_many_splits_keys_are_shared_out(monkeypatch, B, L, K, splits):
    """Of 8 heads on 132 multiprocessors: up to four blocks for each, of 128 keys at least. 640 blocks would
    leave the second round of 528 nearly idle, 2560 of a fourth of the keys leave little of the fifth."""
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    q, k = (torch.empty(1, 1, 1, 1).expand(B, 8, rows, 64) for rows in (L, K))
    assert gpu.key_splits(Inputs(q, k, k, k[0], None, None, None, None)) == splits


@interpreted
@pytest.mark.parametrize(
    "dtype, D, processors, options",
    [
        (f32, 24, 1, dict()),
        (f32, 16, 64, dict(N=90, window_size=(150, 20), causal=False, r_zero=60)),
        (f16, 41, 64, dict(N=40, key_range=((0, 230), (60, 61), (5, 5)), dropout_p=0.3, dropout_seed=3)),
    ],
    ids=["plain", "clamped", "dropped"],
)
def test_the_gradient_of_scores_in_parts(monkeypatch, dtype, D, processors, options):
    monkeypatch.setattr(gpu, "processors", lambda device: processors)  # of many, dr shares out the batch
    options = dict(options)
    if "key_range" in options:
        options["key_range"] = key_range(*options["key_range"])
    tensors = inputs(B=3, H=2, L=150, K=230, D=D, N=options.pop("N", None), dtype=dtype)
    dout = randn_like(tensors["q"])
    whole, *exact = (of(tensors, dout, **options) for of in (functools.partial(run, TRITON), truth, plain))
    launches, launch = [], backend._launch
    monkeypatch.setattr(
        backend, "_launch", lambda name, *a, **c: launches.append(name) or launch(name, *a, **c)
    )
    # Rows of dS, of which a head has 192 here, and how many chunks they make of three entries by two heads.
    for rows, chunks in [(4 * 192, 2), (2 * 192, 4), (0, 18)]:
        monkeypatch.setattr(gpu, "SLOPE_BYTES", rows * 256 * dtype.itemsize)
        parts = run(TRITON, tensors, dout, **options)
        assert [launches.count(name) for name in ("dk_dv", "dq", "dr")] == [chunks] * 3
        launches.clear()
        # dk and dv go on where the chunk before has left them, and dq has one chunk. dr begins anew.
        assert_same_bits(*({n: of[n] for n in ("dq", "dk", "dv")} for of in (whole, parts)))
        assert_accurate(parts, *exact, dtype)


def pieces(p: Problem, itemsize: int, budget: int) -> list[Chunk]:
    return list(Chunks.of(p, itemsize, budget).each(p))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 500), st.integers(0, 500)),
    itemsize=st.sampled_from([2, 4]),
    budget=st.integers(0, 2**22),
)
def test_chunks_have_everything_once_and_no_more_than_the_bound(sizes, itemsize, budget):
    B, H, L, M = sizes
    p = problem(L, L + M)._replace(B=B, H=H)
    found, columns = torch.zeros(B, H, L), -(-p.K // 64) * 64
    for b, batches, h, heads, i, end in pieces(p, itemsize, budget):
        found[b : b + batches, h : h + heads, i:end] += 1
        assert i % 64 == 0 and (batches == B or heads == 1) and (end - i == L or batches * heads == 1)
        elements = batches * heads * -(-(end - i) // 64) * 64 * columns
        assert elements <= Chunks.of(p, itemsize, budget).elements
        assert elements * itemsize <= max(budget, 64 * columns * itemsize)
    assert (found == 1).all()


@interpreted
def test_the_same_bits_every_time(monkeypatch):
    monkeypatch.setattr(gpu, "processors", lambda device: 8)
    tensors = inputs(B=2, H=1, L=70, K=150, D=16, N=90)
    dout = randn_like(tensors["q"])
    results = [run(TRITON, tensors, dout, dropout_p=0.2, dropout_seed=3) for _ in range(3)]
    for other in results[1:]:
        assert_same_bits(results[0], other)


# ---- Which tiles a call runs with ------------------------------------------------------------------------


class Launches:
    """Stands for a kernel, and for a tuner of it that finds the last candidate best."""

    arg_names = ("D", "CLAMP", "BM", "BN")

    def __init__(self, tiles_tried):
        self.calls, self.tuned, self.tiles_tried, self.room = [], 0, tiles_tried, True

    def __getitem__(self, grid):
        def launch(*args, **options):
            if callable(grid):
                if not self.room:
                    raise torch.OutOfMemoryError("what the tuner takes")
                time.sleep(0.01)
                self.tuned += 1
                tile = self.tiles_tried[-1]
                grid({"BM": tile.BM, "BN": tile.BN})
                self.best_config = SimpleNamespace(
                    kwargs=tile.constants,
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                )
            else:
                self.calls.append((options["BM"], options.get("AGAIN", False)))

        return launch


@pytest.fixture
def launches(monkeypatch):
    candidates = [Tile(64, 64, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, again=True)]
    fake = Launches(candidates)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "_arch", lambda device: 90)
    monkeypatch.setattr(backend, "_tuned", {})
    monkeypatch.setattr(backend, "_tuner", lambda *args: fake)
    monkeypatch.setitem(backend.KERNELS, "dq", fake)
    monkeypatch.setattr(configs, "candidates", lambda *args: candidates)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("TXL_TRITON_AUTOTUNE", raising=False)
    return fake


Q = torch.empty(0, dtype=f16)
DEFAULT, FASTEST = Tile(64, 64, 4, 2), Tile(32, 32, 4, 2, again=True)


def launch(pairs):
    return backend._launch("dq", Q, pairs, lambda tile: (tile.BM,), D=64, CLAMP=False)


def test_the_first_large_call_is_tuned(launches):
    assert launch(1000) == DEFAULT  # too small to tell
    assert launch(2**30) == FASTEST
    # Launched once more as later calls launch it, whose code is then there, for CUDA graphs too.
    assert launches.tuned == 1 and launches.calls == [(64, False), (32, True)]
    assert launch(2**30) == FASTEST and launches.tuned == 1
    assert launch(1000) == DEFAULT, "the same call gives the same bits, before and after"
    assert launches.calls[2:] == [(32, True), (64, False)]


def test_threads_measure_one_after_the_other(launches):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(launch, [2**30] * 8)) == [FASTEST] * 8
    assert launches.tuned == 1


def test_deterministic_algorithms_are_not_measured(launches):
    torch.use_deterministic_algorithms(True)
    try:
        assert launch(2**30) == DEFAULT and launches.tuned == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_memory_to_measure_with_the_default_runs(launches):
    launches.room = False
    assert launch(2**30) == DEFAULT and not backend._tuned
    launches.room = True
    assert launch(2**30) == FASTEST


@interpreted
def test_without_memory_to_measure_backward_is_right(monkeypatch):
    """A kernel that has run when memory ends has added to what chunks before have left: it runs again."""
    tensors = inputs(L=150, K=230, D=16, N=90)
    dout = randn_like(tensors["q"])
    monkeypatch.setattr(gpu, "SLOPE_BYTES", 0)
    expected, measured = run(TRITON, tensors, dout), []

    def fastest(name, tiles, arch, grid, *args, **constants):
        measured.append(name)
        backend.KERNELS[name][grid(tiles[0])](*args, **constants, **tiles[0].constants)
        raise torch.OutOfMemoryError("what the tuner takes")

    monkeypatch.setattr(backend, "_TUNE_PAIRS", 1)
    monkeypatch.setattr(backend, "_may_tune", lambda: True)
    monkeypatch.setattr(backend, "_fastest", fastest)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(configs, "candidates", lambda *args, of=configs.candidates: of(*args) * 2)
    assert_same_bits(expected, run(TRITON, tensors, dout))
    assert measured == ["forward", "dk_dv", "dq", "dr"]


@interpreted
def test_all_chunks_run_with_the_tile_that_the_first_found(monkeypatch):
    tensors = inputs(L=150, K=230, D=16, N=90)
    fast, ran, launch = Tile(32, 32, 4, 1), {}, backend._launch

    def recorded(name, *args, **kwargs):
        tile = launch(name, *args, **kwargs)
        ran.setdefault(name, []).append(tile)
        return tile

    monkeypatch.setattr(gpu, "SLOPE_BYTES", 0)
    monkeypatch.setattr(backend, "_TUNE_PAIRS", 1)
    monkeypatch.setattr(backend, "_may_tune", lambda: True)
    monkeypatch.setattr(backend, "_tuned", {})
    monkeypatch.setattr(backend, "_fastest", lambda *args, **constants: fast)
    monkeypatch.setattr(backend, "_launch", recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(configs, "candidates", lambda *args: (Tile(64, 64, 4, 1), fast))
    run(TRITON, tensors, randn_like(tensors["q"]))
    for name in ("dk_dv", "dq", "dr"):
        assert len(ran[name]) > 3 and set(ran[name]) == {fast}, name


@pytest.mark.parametrize("name", backend.KERNELS)
def test_a_tuner_is_told_arguments_of_its_kernel_alone(name):
    """Triton from 3.9 on refuses others."""
    key = backend._tuning_key(name)
    assert key[0] == "D" and set(key) <= set(backend.KERNELS[name].arg_names)
    if not INTERPRET:
        tuner = backend._tuner(name, configs.candidates(name, 64, 2, 90), 90)
        assert tuner.keys == key and tuner.fn is backend.KERNELS[name]


def test_each_gpu_has_its_own_tiles(monkeypatch):
    device = []  # the current one

    class Current(contextlib.nullcontext):
        def __enter__(self):
            device.append(self.enter_result.index)

        def __exit__(self, *error):
            device.pop()

    def target():
        return SimpleNamespace(arch=(90, 86)[device[-1]])

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(gpu, "current", Current)
    monkeypatch.setattr(triton.runtime, "driver", driver)
    of = backend._arch.__wrapped__
    assert [of(torch.device("cuda", n)) for n in (1, 0, 1)] == [86, 90, 86]


def test_autotune_off_pins_the_default(launches, monkeypatch):
    monkeypatch.setenv("TXL_TRITON_AUTOTUNE", "0")
    assert launch(2**30) == Tile(64, 64, 4, 2) and launches.tuned == 0


def test_a_graph_under_capture_is_not_disturbed(launches, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launch(2**30) == Tile(64, 64, 4, 2) and launches.tuned == 0


@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120, "gfx942"])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("D", [1, 41, 64, 65, 128, 256])
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_there_is_a_tile_for_everything(kernel, D, itemsize, arch):
    found = configs.candidates(kernel, D, itemsize, arch)
    assert found
    for tile in found:
        assert not tile.again or kernel == "dq"
        assert tile.BM <= tile.BN <= configs.LARGEST and tile.num_warps * 32 * 255 <= 65536
        if kernel in ("dq", "dk_dv", "dr"):  # no tile of dS crosses the end of a chunk
            assert tiles.ROWS.value % tile.BM == 0 and (kernel != "dk_dv" or tiles.ROWS.value % tile.BN == 0)


# ---- What it says where it cannot run --------------------------------------------------------------------


@compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu():
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(BackendUnavailable, match=r"no GPU.*TRITON_INTERPRET=1"):
        rel_attention(q, q, q, q[0], backend="triton")


def test_a_triton_that_is_too_old(monkeypatch):
    monkeypatch.setattr(backend, "_VERSION", (3, 5))
    assert re.match(r"it needs Triton 3.6 or later, this is \d.*pip install", backend.unavailable())


@compiled
def test_an_interpreter_that_was_asked_for_too_late(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert "set it before Python starts" in backend.unavailable()


@interpreted
def test_bfloat16_is_refused_in_the_interpreter():
    q = torch.randn(1, 1, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match=r"needs one of torch.float32, torch.float16"):
        rel_attention(q, q, q, q[0], backend="triton")


def test_float64_is_refused():
    q = torch.randn(1, 1, 2, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"q: got torch.float64"):
        rel_attention(q, q, q, q[0], backend="triton")


def test_too_many_keys_for_32_bits():
    k = torch.empty(1, 1, 1, 1).expand(1, 1, 2**28, 1)
    of = Inputs(k[:, :, :1], k, k, k[0, :, :1], None, None, None, None)
    with pytest.raises(ValueError, match=r"k: got 268435456 rows.*fewer than 2\*\*28"):
        backend._problem(of, Options(True, -1, -1, 0, 1.0, 0.0))

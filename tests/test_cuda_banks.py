"""Bank conflicts of the CUDA kernels, counted as the emulation runs them."""

from __future__ import annotations

import collections
import itertools
import re

import pytest
import torch
from helpers import BACKENDS, EMULATED, inputs, randn_like, run

from txl_kernels import cuda

CUDA = next(b for b in BACKENDS if b.name == "cuda")
bf16, f32 = torch.bfloat16, torch.float32

# Kernel (regular expression), what it does, bytes of a lane: how often at most one place in the code asks for
# what once would do. All else meets no conflict at all.
CONFLICTS = {
    # No order of pieces of whole lines serves reading rows and reading them moved (below).
    (r"DqKernel<WarpgroupSlopeBlock<", "read_matrix", 16): 2,
    # Not a conflict: in edge tiles some lanes leave out a key, and the next is taken for it.
    (r"DqKernel<WarpgroupSlopeBlock<", "read", 2): 1.3,
    # Sums of clamped pairs, the block's queries being eight apart. Once a block.
    (r"DqKernel<WarpgroupSlopeBlock<", "write", 4): 2,
    # Columns of dS in float32, of which pieces have four.
    (r"DrKernel<RowBlock<float", "read", 4): 2,
    # Results in float32: half a warp has the same 32 bytes of four rows, two of them in the same banks. Once
    # a block.
    (r"Kernel<\w+Block<float", "write", 8): 2,
    # Sums by the threads of a block, where rows are no multiple of 128 bytes. Once a block.
    (r"D\w+Kernel<\w+Block<\w+, (32|96)", "write", 16): 2,
}

PROBLEMS = {
    "plain": dict(),
    "clamped": dict(N=90, window_size=(150, 20), causal=False),
    "dropped": dict(dropout_p=0.3, dropout_seed=3),
}


def counted(monkeypatch, path, dtype, D, warpgroups, L=192, N=None, causal=True, **options):
    """(kernel, what, bytes of a lane) -> [[passes, least] of each place in its code]."""
    monkeypatch.setattr(cuda, "WARPGROUPS", warpgroups)
    monkeypatch.setenv("TXL_EMULATION_BANKS", str(path))
    tensors = inputs(B=1, H=1, L=L, K=330, D=D, N=N, dtype=dtype, causal=causal)
    run(CUDA, tensors, randn_like(tensors["q"]), causal=causal, **options)
    counts = collections.defaultdict(list)
    for line in path.read_text().splitlines():
        kernel, what, size, _, passes, least = line.rsplit("|", 5)
        counts[kernel.replace("txl::cuda::", ""), what, int(size)].append((int(passes), int(least)))
    return counts


def allowed(kernel, what, size):
    found = [k for k in CONFLICTS if k[1:] == (what, size) and re.search(k[0], kernel)]
    return max((CONFLICTS[k] for k in found), default=1), found


@pytest.mark.skipif(not EMULATED, reason="needs TXL_CUDA_EMULATION")
def test_conflicts(monkeypatch, tmp_path):
    seen, kernels = set(), set()
    for warpgroups, dtype, D in [
        *((False, bf16, D) for D in (32, 64, 96, 128, 256)),
        *((False, f32, D) for D in (64, 128)),
        *((True, bf16, D) for D in (64, 128)),
    ]:
        for name, problem in PROBLEMS.items():
            path = tmp_path / f"{warpgroups}-{dtype}-{D}-{name}"
            for key, places in counted(monkeypatch, path, dtype, D, warpgroups, **problem).items():
                kernels.add(key[0])
                most, by = allowed(*key)
                for passes, least in places:
                    assert least <= passes <= most * least, (name, *key, passes, least)
                    if passes > least:
                        seen.update(by)
    assert seen == set(CONFLICTS), "no such conflict any more"
    for block in ("ForwardBlock", "KeyBlock", "SlopeBlock", "RowBlock"):  # "Warpgroup..." too
        assert sum(f"<{block}<" in kernel for kernel in kernels) >= 7, block
    for block in ("WarpgroupQueryBlock", "WarpgroupKeyBlock", "WarpgroupSlopeBlock", "WarpgroupRowBlock"):
        assert sum(f"<{block}<" in kernel for kernel in kernels) >= 2, block


@pytest.mark.skipif(not EMULATED, reason="needs TXL_CUDA_EMULATION")
def test_conflicts_of_decode(monkeypatch, tmp_path):
    for D in (64, 128):
        counts = counted(monkeypatch, tmp_path / str(D), bf16, D, False, L=1)
        for key in filter(lambda key: re.search("ForwardBlock|MergeKernel", key[0]), counts):
            for passes, least in counts[key]:
                assert passes == least, (key, passes, least)


def test_no_order_of_pieces_serves_rows_and_moved_rows():
    """dq's tile of dS by warpgroups, rows of whole lines, each with its eight pieces in the line's eight
    places: eight rows, read at the same piece, must have it in eight places, and so must they if each is read
    one piece further than the one before. Then the cells (row, piece) of one place are a transversal of the
    table of addition modulo 8: a permutation g for which a + g(a) is one, too."""
    for g in itertools.permutations(range(8)):
        assert len({(a + place) % 8 for a, place in enumerate(g)}) < 8

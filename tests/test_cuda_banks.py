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

# Kernel (regular expression), what it does, bytes of a lane: how often at most it asks for what once would
# do. All else meets no conflict at all. Results are stored once for a block.
CONFLICTS = {
    # Queries in order: no pitch serves writing the band and reading it moved (below).
    (r"ForwardKernel<ForwardBlock<", "read", 4): 2,
    (r"DkDvKernel<KeyBlock<", "read", 4): 2,
    (r"DqKernel<SlopeBlock<\w+16", "write", 2): 2,
    (r"DqKernel<SlopeBlock<float", "write", 4): 2,
    # The bits of dropout, two queries of which share banks.
    (r"DkDvKernel<KeyBlock<.*, true>$", "read", 2): 2,
    # No order of pieces serves reading rows and reading them moved (below): this one serves what is moved.
    (r"DqKernel<WarpgroupSlopeBlock<", "read_matrix", 16): 1.3,
    # In edge tiles some lanes read nothing, and others one key at a time.
    (r"DqKernel<WarpgroupSlopeBlock<", "read", 2): 1.3,
    # Sums of clamped pairs, the block's queries being eight apart.
    (r"DqKernel<WarpgroupSlopeBlock<", "write", 4): 1.25,
    # Columns of dS in float32, of which pieces have four.
    (r"DrKernel<RowBlock<float", "read", 4): 1.25,
    # Results in float32: half a warp has the same 32 bytes of four rows, and two of them in the same banks.
    (r"Kernel<\w+Block<float", "write", 8): 2,
    # The results of sums by the threads of a block, where rows are no multiple of 128 bytes.
    (r"Kernel<\w+Block<\w+, (32|96)", "write", 16): 2,
}

PROBLEMS = {
    "plain": dict(),
    "clamped": dict(N=90, window_size=(150, 20), causal=False),
    "dropped": dict(dropout_p=0.3, dropout_seed=3),
}


def counted(monkeypatch, path, dtype, D, warpgroups, L=192, N=None, causal=True, **options):
    """(kernel, what, bytes of a lane) -> [passes, least]."""
    monkeypatch.setattr(cuda, "WARPGROUPS", warpgroups)
    monkeypatch.setenv("TXL_EMULATION_BANKS", str(path))
    tensors = inputs(B=1, H=1, L=L, K=330, D=D, N=N, dtype=dtype, causal=causal)
    run(CUDA, tensors, randn_like(tensors["q"]), causal=causal, **options)
    counts = collections.defaultdict(lambda: [0, 0])
    for line in path.read_text().splitlines():
        kernel, what, size, _, passes, least = line.rsplit("|", 5)
        of = counts[kernel.replace("txl::cuda::", ""), what, int(size)]
        of[0] += int(passes)
        of[1] += int(least)
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
            for key, (passes, least) in counted(monkeypatch, path, dtype, D, warpgroups, **problem).items():
                kernels.add(key[0])
                most, by = allowed(*key)
                assert least <= passes <= most * least, (name, *key, passes, least)
                if passes > least:
                    seen.update(by)
    assert seen == set(CONFLICTS), "no such conflict any more"
    for block in ("ForwardBlock", "KeyBlock", "SlopeBlock", "RowBlock"):  # "Warpgroup..." too
        assert sum(f"<{block}<" in kernel for kernel in kernels) >= 7, block
    for block in ("WarpgroupBlock", "WarpgroupKeyBlock", "WarpgroupSlopeBlock", "WarpgroupRowBlock"):
        assert sum(f"<{block}<" in kernel for kernel in kernels) >= 2, block


@pytest.mark.skipif(not EMULATED, reason="needs TXL_CUDA_EMULATION")
def test_conflicts_of_decode(monkeypatch, tmp_path):
    for D in (64, 128):
        for key, (passes, least) in counted(monkeypatch, tmp_path / str(D), bf16, D, False, L=1).items():
            if "ForwardBlock" in key[0] or "MergeKernel" in key[0]:
                assert passes <= allowed(*key)[0] * least, (key, passes, least)


# ---- What is written and read moved cannot do without ----


def passes(accesses):
    """How often shared memory must be asked: the most different words that lanes want of one bank."""
    return max(
        collections.Counter(word % 32 for word in {word for lane in accesses for word in lane}).values()
    )


def test_no_pitch_reads_the_band_without_conflicts():
    """Two columns written at once need an even pitch; then rows are an odd number of words apart for reading,
    and of the 32 banks the four rows with an even distance share 16."""
    for pitch in range(32, 98, 2):
        lanes = [(a, 2 * b) for a in range(8) for b in range(4)]
        assert passes([(a * pitch + c - a,) for a, c in lanes]) >= 2, pitch


def test_no_order_of_pieces_serves_rows_and_moved_rows():
    """dq's tile of dS: eight rows, read at the same piece, must have it in eight places, and so must they if
    each is read one piece further than the one before. Then the cells (row, piece) of one place are a
    transversal of the table of addition modulo 8: a permutation g for which a + g(a) is one, too."""
    for g in itertools.permutations(range(8)):
        assert len({(a + place) % 8 for a, place in enumerate(g)}) < 8

"""How backward cuts the problem, so that dS of a part of it takes a bounded number of bytes; as Chunks in
csrc/cuda/workspace.h."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from txl_kernels.triton.tiles import ROWS, Chunk, Problem


def cdiv(x: int, y: int) -> int:
    """Triton's own takes 5 us: kernels may call it too."""
    return -(-x // y)


def _even(n: int, most: int) -> int:
    """The size of as few equal parts of n as have at most `most`, or 1."""
    return cdiv(n, cdiv(n, max(most, 1)))


class Chunks(NamedTuple):
    """Of one size, but for the last ones: of all entries of some heads, or of some entries of one, or of some
    queries of one. A head's entries come together, because they share dr."""

    batches: int
    heads: int
    queries: int
    elements: int  # of dS

    @classmethod
    def of(cls, p: Problem, itemsize: int, budget: int) -> Chunks:
        """dS of a chunk takes at most `budget` bytes, or ROWS queries of a head if that is more."""
        rows, columns = ROWS.value, cdiv(p.K, ROWS.value) * ROWS.value
        groups, of_head = budget // (columns * itemsize) // rows, cdiv(p.L, rows)
        whole = groups // of_head  # heads
        queries = p.L if whole else _even(of_head, groups) * rows
        batches = _even(p.B, whole)
        heads = _even(p.H, 1 if batches < p.B else whole // p.B)
        return cls(batches, heads, queries, batches * heads * cdiv(queries, rows) * rows * columns)

    def each(self, p: Problem) -> Iterator[Chunk]:
        for h in range(0, p.H, self.heads):
            for b in range(0, p.B, self.batches):
                for i in range(0, p.L, self.queries):
                    yield Chunk(
                        b,
                        min(self.batches, p.B - b),
                        h,
                        min(self.heads, p.H - h),
                        i,
                        min(i + self.queries, p.L),
                    )

    def cut_queries(self, p: Problem) -> bool:
        return self.queries < p.L

    def cut_heads(self, p: Problem) -> bool:
        """Whether dr of a head comes from several chunks."""
        return self.batches < p.B or self.cut_queries(p)

"""What is to be computed: one attention, the work in it, and the numbers that are right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from txl_kernels import flops, rel_attention

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FORWARD, BACKWARD, TRAIN, DECODE = "forward", "backward", "forward+backward", "decode"

# Products over the visible pairs: (content, position).
PRODUCTS = {FORWARD: flops.FORWARD, BACKWARD: flops.BACKWARD, DECODE: flops.FORWARD}
PRODUCTS[TRAIN] = tuple(map(sum, zip(flops.FORWARD, flops.BACKWARD, strict=True)))

# Largest relative error of a head that is rounding and no mistake. A shift that is off by one has one near 1,
# a mask that is off by one of thousands of keys has some percent.
ERROR_BOUND = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 5e-2, "float16": 5e-3}
# Ours are right to 4 to 6e-3; rivals, which round the scores as well, to 2e-2.
OUR_ERROR_BOUND = ERROR_BOUND | {"bfloat16": 1e-2}
ROW_BOUND = 5  # times as much in a single row, or a few wrong ones would hide among thousands
# Of more visible pairs than this, some heads are checked instead of all: float64 on a CPU takes its time.
CHECKED_PAIRS = 60_000_000
# Queries at a time, and pairs of them and keys (128 MiB), so that the check itself needs little memory.
CHECKED_ROWS, CHECKED_BLOCK = 256, 2**24


@dataclass(frozen=True)
class Problem:
    """One causal attention as in `rel_attention`: the queries are the last `qlen` of `klen` positions."""

    qlen: int = 1900
    klen: int = 3800
    batch: int = 1
    heads: int = 8
    d_head: int = 64
    dtype: str = "float32"
    clamp_len: int | None = None
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """N: rows of r. Further distances than `clamp_len` all use row 0."""
        return self.klen if self.clamp_len is None else min(self.klen, self.clamp_len + 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def visible_pairs(self) -> int:
        """Pairs (query, key) that the causal mask lets through."""
        return self.batch * self.heads * flops.pairs(self.qlen, self.klen, left=self.klen, right=0)

    def flops(self, which: str, position: bool = True) -> int:
        """Useful work: visible pairs only, and no position product for pairs whose distance is clamped."""
        content_products, position_products = PRODUCTS[which]
        return flops.rel_attention_flops(
            (content_products, position_products if position else 0),
            (self.batch, self.heads, self.qlen, self.d_head),
            self.klen,
            self.rows,
            causal=True,
            window_size=(-1, -1),
            r_zero=self.rows - 1,
        )

    def cache_bytes(self, position: bool = True) -> int:
        """Bytes of k, v and r: what one decoding step has to read."""
        per_head = 2 * self.batch * self.klen + (self.rows if position else 0)
        return per_head * self.heads * self.d_head * self.itemsize

    def input_bytes(self) -> int:
        """Bytes of the inputs."""
        rows = self.batch * (self.qlen + 2 * self.klen) + self.rows + 2
        return rows * self.heads * self.d_head * self.itemsize

    def square_bytes(self) -> int:
        """Bytes of one [B, H, L, K] tensor."""
        return self.batch * self.heads * self.qlen * self.klen * self.itemsize

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """q [B,H,L,D], k and v [B,H,K,D], r [H,N,D], bias_u and bias_v [H,D]: standard normal."""
        b, h, d = self.batch, self.heads, self.d_head
        shapes = (
            (b, h, self.qlen, d),
            (b, h, self.klen, d),
            (b, h, self.klen, d),
            (h, self.rows, d),
            (h, d),
            (h, d),
        )
        generator = torch.Generator(self.device).manual_seed(seed)
        return tuple(self._randn(shape, generator) for shape in shapes)

    def dout(self) -> Tensor:
        """The gradient that arrives at the output, [B,H,L,D]."""
        generator = torch.Generator(self.device).manual_seed(1)
        return self._randn((self.batch, self.heads, self.qlen, self.d_head), generator)

    def _randn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device).to(self.torch_dtype)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def __str__(self) -> str:
        clamp = "" if self.clamp_len is None else f", clamp {self.clamp_len}"
        sizes = f"B {self.batch}, H {self.heads}, L {self.qlen}, K {self.klen}, D {self.d_head}"
        return f"{sizes}{clamp}, {self.dtype} on {self.device}"


# The shapes the project holds itself to (B 1, H 8, D 64 unless said).
SHAPES = {
    "headline": Problem(1900, 3800),
    "segment": Problem(512, 3800),
    "evaluation": Problem(128, 3800),
    "short-evaluation": Problem(80, 2180),
    "wt103-base": Problem(150, 300, batch=4, heads=10, d_head=41),
    "training": Problem(512, 1024),
    "clamped": Problem(1900, 3800, clamp_len=1000),
    "decode": Problem(1, 3800),
}
# The same for GPUs: 64 heads in all, 16 to a batch entry; by the head dimension.
GPU_HEADLINE = {
    d_head: Problem(2048, 4096, batch=4, heads=16, d_head=d_head, dtype="bfloat16", device="cuda")
    for d_head in (64, 128)
}
GPU_DECODE = {
    d_head: replace(problem, qlen=1, klen=3800, batch=64) for d_head, problem in GPU_HEADLINE.items()
}


@dataclass(frozen=True)
class Error:
    """The largest relative errors of results: norm of the difference over norm of the truth.

    head: of a result of one head. row: of one of its rows, over that row's norm or a mean one's, the larger.
    """

    head: float = 0.0
    row: float = 0.0

    def mistake(self, dtype: str, ours: bool) -> str | None:
        """What is more than rounding, in words, or None."""
        bound = (OUR_ERROR_BOUND if ours else ERROR_BOUND)[dtype]
        if self.head > bound:
            return f"relative error {self.head:.1e}, allowed is {bound:.0e}"
        if self.row > ROW_BOUND * bound:
            return f"relative error of a row {self.row:.1e}, allowed is {ROW_BOUND * bound:.1e}"
        return None


class Truth:
    """The float64 reference's numbers for one problem and pass; of a large problem, for some heads."""

    def __init__(
        self, problem: Problem, which: str, inputs: tuple[Tensor, ...], heads: list[int] | None = None
    ):
        self.problem, self.which, self.inputs = problem, which, inputs
        self.heads = heads or _affordable_heads(problem)
        self._known: dict[bool, list[list[Tensor]]] = {}

    def error(self, got: Iterable[Tensor | None], position: bool = True) -> Error:
        """The largest over results (the output, or six gradients) and checked heads."""
        head_errors, row_errors = [0.0], [0.0]
        for head, expected in zip(self.heads, self.expected(position), strict=True):
            # Rounding leaves errors of the size of what was added up, where nearly nothing is left of it too:
            # of r's gradient where nearly all distances are clamped, of all but v's where there is one key.
            # The gradient of v is never 0, and as large as the others where they are not.
            smallest = float(expected[2].norm()) if len(expected) > 1 else 0.0
            for result, truth in zip(got, expected, strict=True):
                if result is None:  # no gradient; of a way without position term nobody expects all six
                    if position:
                        return Error(math.inf, math.inf)
                    continue
                difference = _of_head(result, head).double() - truth
                norm, rows = max(float(truth.norm()), smallest), truth.norm(dim=-1)
                head_errors.append(float(difference.norm()) / norm)
                mean = norm / math.sqrt(rows.numel())
                row_errors.append(float((difference.norm(dim=-1) / rows.clamp(min=mean)).max()))
        return Error(_largest(head_errors), _largest(row_errors))

    def expected(self, position: bool = True) -> list[list[Tensor]]:
        """The right results, by checked head; computed once."""
        if position not in self._known:
            self._known[position] = [self._of_one_head(head, position) for head in self.heads]
        return self._known[position]

    def _of_one_head(self, head: int, position: bool) -> list[Tensor]:
        """Output, or gradients of the six inputs. A block of queries needs the keys up to its last one's."""
        L, K, N = self.problem.qlen, self.problem.klen, self.problem.rows
        backward = self.which in (BACKWARD, TRAIN)
        leaves = [_of_head(tensor, head).double() for tensor in self.inputs]
        if not position:
            leaves[3:] = [torch.zeros_like(tensor) for tensor in leaves[3:]]
        leaves = [tensor.requires_grad_(backward) for tensor in leaves]
        q, k, v, *positions = leaves
        outs = []
        block = max(1, min(CHECKED_ROWS, CHECKED_BLOCK // K))
        for first in range(0, L, block):
            rows = slice(first, min(first + block, L))
            keys = K - L + rows.stop
            out = rel_attention(
                q[:, :, rows], k[:, :, :keys], v[:, :, :keys], *positions, r_zero=N - 1, backend="reference"
            )
            if backward:
                out.backward(_of_head(self.problem.dout(), head)[:, :, rows].double())
            else:
                outs.append(out)
        return [tensor.grad for tensor in leaves] if backward else [torch.cat(outs, 2)]


def _largest(errors: list[float]) -> float:
    """NaN is the worst of all."""
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _affordable_heads(problem: Problem) -> list[int]:
    heads = max(1, CHECKED_PAIRS * problem.heads // max(1, problem.visible_pairs()))
    return list(range(0, problem.heads, math.ceil(problem.heads / heads)))


def _of_head(tensor: Tensor, head: int) -> Tensor:
    """[B, H, rows, D] or [H, ...]: that head alone, the dimension kept."""
    return tensor[:, head : head + 1] if tensor.dim() == 4 else tensor[head : head + 1]

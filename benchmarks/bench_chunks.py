"""A streaming Conformer's attention in chunks: PyTorch's ways, and `txl_kernels.chunks.attention_in_chunks`.

    python benchmarks/bench_chunks.py

All frames of a recording at once, as in training and in evaluation offline: a frame sees its chunk and some
frames before it. What the ways compute is compared before it is timed; times are medians, taken in turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import cli
import torch
import torch.nn.functional as F
from cli import Progress, head_dim, positive
from machine import describe
from measure import Task
from rivals import shifted
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from txl_kernels.chunks import attention_in_chunks

PASSES = ("forward", "forward + backward")
TOLERANCE = 1e-5  # norm of a difference over the norm of float64's: some roundings of float32
OURS = "attention_in_chunks"

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Streaming:
    """The sizes: recordings, frames of each, of a chunk, seen before it, heads, numbers per head."""

    batch: int
    frames: int
    chunk: int
    left: int
    heads: int
    d_head: int

    @property
    def r_zero(self) -> int:
        """The row of r for distance 0, with a row for each distance."""
        return self.left + self.chunk - 1

    def inputs(self) -> list[Tensor]:
        """q, k, v, r, bias_u, bias_v."""
        torch.manual_seed(0)
        H, D = self.heads, self.d_head
        shapes = (*(((self.batch, H, self.frames, D),) * 3), (H, self.r_zero + self.chunk, D), (H, D), (H, D))
        return [torch.randn(shape) for shape in shapes]

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        first = i // self.chunk * self.chunk
        return (j >= first - self.left) & (j < first + self.chunk)


def masked(sizes: Streaming) -> Attend:
    """As NeMo computes it: the position scores of all pairs, shifted, masked, and the bias of SDPA.

    r has a row for each of the 2 T - 1 distances there, here zeros for those that nobody sees.
    """
    T = sizes.frames
    frame = torch.arange(T)
    hidden = torch.zeros(T, T).masked_fill_(~sizes.visible(frame[:, None], frame), -math.inf)
    before = T - 1 - sizes.r_zero

    def attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        r = F.pad(r, (0, 0, before, 2 * T - 1 - before - r.shape[1]))
        position = shifted(((q + w[:, None]) * sizes.d_head**-0.5) @ r.mT)[..., :T]
        return F.scaled_dot_product_attention(q + u[:, None], k, v, attn_mask=position + hidden)

    return attend


def in_chunks(sizes: Streaming) -> Attend:
    """Every chunk an entry of the batch, as ours has it, and then SDPA with the bias shifted in memory."""
    T, chunk, left = sizes.frames, sizes.chunk, sizes.left
    n = -(-T // chunk)
    key = chunk * torch.arange(n).view(n, 1, 1, 1) - left + torch.arange(left + chunk)
    hidden = (
        torch.zeros(key.shape).masked_fill_((key < 0) | (key >= T), -math.inf).repeat(sizes.batch, 1, 1, 1)
    )

    def in_a_row(x: Tensor, before: int) -> Tensor:
        """The recordings one behind the other: [H, before + B n chunk, D]."""
        if len(x) == 1:
            return F.pad(x[0], (0, 0, before, n * chunk - T))
        x = F.pad(x.transpose(0, 1), (0, 0, 0, n * chunk - T)).flatten(1, 2)
        return F.pad(x, (0, 0, before, 0)) if before else x

    def with_frames_before(x: Tensor) -> Tensor:
        """Of every chunk: [B n, H, left + chunk, D]."""
        return in_a_row(x, left).unfold(1, left + chunk, chunk).permute(1, 0, 3, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        q = in_a_row(q, 0).unflatten(1, (-1, chunk)).transpose(0, 1)
        k, v = with_frames_before(k), with_frames_before(v)
        position = shifted(((q + w[:, None]) * sizes.d_head**-0.5) @ r.mT)[..., : left + chunk]
        out = F.scaled_dot_product_attention(q + u[:, None], k, v, attn_mask=position + hidden)
        return out.unflatten(0, (-1, n)).transpose(1, 2).flatten(2, 3)[:, :, :T]

    return attend


def flex(sizes: Streaming) -> Attend:
    """FlexAttention, which passes over blocks that nobody sees; the position scores of all rows of r."""
    T, last = sizes.frames, sizes.r_zero + sizes.chunk - 1

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return sizes.visible(i, j)

    blocks = create_block_mask(visible, None, None, T, T, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
        by_row = ((q + w[:, None]) * sizes.d_head**-0.5) @ r.mT

        def add_position(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + by_row[b, h, i, (sizes.r_zero + j - i).clamp(0, last)]

        return flex_attention(q + u[:, None], k, v, score_mod=add_position, block_mask=blocks)

    return attend


def ours(sizes: Streaming) -> Attend:
    return partial(attention_in_chunks, chunk=sizes.chunk, left=sizes.left)


WAYS = {  # and whether they are compiled
    OURS: (ours, False),
    "all pairs, masked": (masked, False),
    "all pairs, masked, compiled": (masked, True),
    "chunks as a batch, SDPA": (in_chunks, False),
    "chunks as a batch, SDPA, compiled": (in_chunks, True),
    "FlexAttention, compiled": (flex, True),
}


def task(attend: Attend, inputs: list[Tensor], which: str) -> Task:
    """forward: the output. Else the gradients of all inputs."""
    if which == PASSES[0]:
        return Task(lambda _: (attend(*inputs),), grad=False)
    leaves = [x.detach().requires_grad_() for x in inputs]
    dout = torch.ones_like(inputs[0])
    dout[..., 1::2] = -1  # or nothing would reach r
    return Task(lambda _: torch.autograd.grad(attend(*leaves), leaves, dout))


def measured(sizes: Streaming, which: str, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Milliseconds of every way, and why a way has none."""
    inputs = sizes.inputs()
    truth = task(in_chunks(sizes), [x.double() for x in inputs], which).run()

    def build(way: str) -> Task:
        of_sizes, compiled = WAYS[way]
        attend = of_sizes(sizes)
        if compiled:
            torch._dynamo.reset()
            attend = torch.compile(attend, dynamic=False)
        return task(attend, inputs, which)

    def mistake(way: str, result: tuple[Tensor, ...]) -> str | None:
        errors = (float((x - y).norm() / y.norm()) for x, y in zip(result, truth, strict=True))
        wrong = [error for error in errors if not error < TOLERANCE]
        return f"WRONG: differs from float64 by {wrong[0]:.1e}" if wrong else None

    ways = {way: partial(build, way) for way, (_, compiled) in WAYS.items() if args.compile or not compiled}
    tasks, notes = progress.first_calls(ways, mistake, which)
    samples = progress.sample(tasks, args.repeat, args.budget, which)
    return {"which": which, "ms": {way: 1e3 * median(s) for way, s in samples.items()}, "notes": notes}


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        lines.append(f"{result['which']:40} {'ms':>9} {'ours is':>9}")
        best = result["ms"].get(OURS)
        for way, took in result["ms"].items():
            ratio = "" if best is None or way == OURS else f"{took / best:.1f}x"
            lines.append(f"    {way:36} {took:9.2f} {ratio:>9}".rstrip())
        lines += [f"    {way:36} {note}" for way, note in result["notes"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time attention in chunks, PyTorch's ways and ours.")
    number = positive(int)
    parser.add_argument("--batch", type=number, default=1, help="recordings (1)")
    parser.add_argument("--frames", type=number, default=1904, help="of a recording (1904)")
    parser.add_argument("--chunk", type=number, default=14, help="frames of a chunk (14)")
    parser.add_argument(
        "--left", type=positive(int, or_0=True), default=70, help="frames seen before a chunk (70)"
    )
    parser.add_argument("--heads", type=number, default=8, help="(8)")
    parser.add_argument("--d-head", type=head_dim, default=64, help="(64)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out compiled ways")
    cli.add_options(parser, repeat=9, budget=20.0)
    args = cli.parse(parser, argv)
    sizes = Streaming(args.batch, args.frames, args.chunk, args.left, args.heads, args.d_head)
    machine = describe("cpu")
    print(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, float32, "
        f"{sizes.batch} x {sizes.frames} frames in chunks of {sizes.chunk} that see {sizes.left} before, "
        f"{sizes.heads} x {sizes.d_head}",
        flush=True,
    )
    results: list[dict[str, Any]] = []
    progress = Progress()
    for which in PASSES:
        results.append(measured(sizes, which, args, progress))
        cli.write_json(args.json, {"machine": machine, "sizes": vars(sizes), "results": results})
    progress.close()
    print(table(results))
    return 1 if any(OURS in result["notes"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))

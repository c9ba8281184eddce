"""`txl_kernels.linear` and `txl_kernels.dropout` beside torch's own, on the CPU.

    python benchmarks/bench_layers.py

The sizes are those of the published enwik8 model: d_model 512, d_inner 2048. Times are medians, taken in
turns; each is checked before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import cli
import measure
import torch
import torch.nn.functional as F
from cli import tqdm
from machine import describe
from measure import Task
from torch import Tensor

from txl_kernels import dropout, linear

ROWS = (1, 4, 80, 512)  # of the input: one token and four, a segment of evaluation, one of training
WEIGHTS = ((512, 2048), (2048, 512))  # inputs, outputs
DROPOUT_P = 0.1


def linear_tasks(rows: int, depth: int, outputs: int, dtype: torch.dtype) -> dict[str, Task]:
    """Weights come from memory, as in a model of many layers: there are more than the caches hold."""
    weight_bytes = depth * outputs * dtype.itemsize
    weights = [
        torch.randn(outputs, depth).to(dtype) for _ in range(1 + measure.beyond_caches("cpu") // weight_bytes)
    ]
    x = torch.randn(rows, depth).to(dtype)

    def all_weights(layer: Callable[..., Tensor], _: None) -> None:
        with torch.no_grad():
            for weight in weights:
                layer(x, weight)

    exact = F.linear(x.double(), weights[0].double())
    error = (linear(x, weights[0]) - exact).norm() / exact.norm()
    if not error < 16 * torch.finfo(dtype).eps:
        raise ArithmeticError(f"linear is WRONG for {rows} rows of {dtype}: relative error {error:.1e}")
    return {
        name: Task(partial(all_weights, layer), passes=len(weights), evicts=True)
        for name, layer in (("torch", F.linear), ("ours", linear))
    }


def dropout_tasks(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Task]:
    """Forward and backward."""
    x = (torch.rand(rows, columns) + 0.5).to(dtype).requires_grad_()
    dy = (torch.rand(rows, columns) + 0.5).to(dtype)

    def step(layer: Callable[..., Tensor], _: None) -> None:
        torch.autograd.grad(layer(x, DROPOUT_P), x, dy)

    y = dropout(x, DROPOUT_P)
    kept = (y != 0).to(dtype) / (1 - DROPOUT_P)
    (dx,) = torch.autograd.grad(y, x, dy)
    wrong = max((y - kept * x).abs().max().item(), (dx - kept * dy).abs().max().item())
    share = (y != 0).double().mean().item()
    if not (wrong < 8 * torch.finfo(dtype).eps and abs(share - (1 - DROPOUT_P)) < 0.01):
        raise ArithmeticError(f"dropout is WRONG in {dtype}: it kept {share:.3f}, factors off by {wrong:.1e}")
    return {name: Task(partial(step, layer)) for name, layer in (("torch", F.dropout), ("ours", dropout))}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time linear and dropout beside torch's own, on the CPU.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    cli.add_options(parser, repeat=15)
    args = cli.parse(parser, argv)
    dtype = getattr(torch, args.dtype)
    cases = {
        f"linear, {rows} x {depth} -> {outputs}": partial(linear_tasks, rows, depth, outputs, dtype)
        for rows in ROWS
        for depth, outputs in WEIGHTS
    } | {"dropout, forward + backward, 512 x 2048": partial(dropout_tasks, 512, 2048, dtype)}
    machine = describe("cpu")
    print(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, {args.dtype}")
    print(f"{'':40} {'torch, ms':>10} {'ours, ms':>10} {'ratio':>7}")
    lines: list[dict[str, Any]] = []
    bar = tqdm(cases.items(), leave=False, dynamic_ncols=True)
    for name, tasks in bar:
        bar.set_description_str(name)
        samples = measure.interleave(tasks(), args.repeat)
        took = {way: 1e3 * median(taken) for way, taken in samples.items()}
        lines.append({"name": name, **took})
        ratio = took["torch"] / took["ours"]
        tqdm.write(f"{name:40} {took['torch']:10.3f} {took['ours']:10.3f} {ratio:6.2f}x")
        cli.write_json(args.json, {"machine": machine, "dtype": args.dtype, "ms": lines})
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))

"""Layers of Hugging Face's Conformers and XLNet: theirs, and by `txl_kernels.integrations.use_rel_attention`.

    pip install 'transformers>=5'
    python benchmarks/bench_huggingface.py

One layer (all of a model are alike) in the published models' sizes, with random weights: the attention with
its projections, and the whole block around it. Theirs runs with each implementation of attention that the
model has (eager, sdpa), as it comes and compiled. What they compute is compared before it is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import cli
import measure
import torch
from cli import Progress, positive
from machine import describe
from measure import Task
from torch import Tensor, nn

from txl_kernels.integrations import use_rel_attention

TOLERANCE = 1e-4  # norm of a difference over the norm of theirs: float32's rounding
WEIGHT_TOLERANCE = 1e-3  # the same of a weight's gradient
# Root mean square of a gradient below which there is rounding to see: that of the keys' bias, which has no
# influence, is 1e-7, those of all others are 0.1 to 10.
SMALLEST_GRADIENT = 1e-2
PASSES = ("forward", "forward + backward")
PARTS = ("attention", "block")
OURS = "ours"

Call = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A block of a model, the attention in it, and how to call either on hidden states [1, T, C]."""

    block: nn.Module
    attention: nn.Module
    call: Call


def with_positions(**positions: Tensor) -> Call:
    """A call that hands these on, by the name which a model's modules have for them."""

    def call(module: nn.Module, x: Tensor) -> Tensor:
        out = module(x, **positions)
        return out[0] if isinstance(out, tuple) else out

    return call


def parakeet(implementation: str, T: int) -> Layer:
    """Parakeet 0.6B: d 1,024, 8 heads of 128. 12.5 frames to a second of sound."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    model = ParakeetEncoder(ParakeetEncoderConfig(num_hidden_layers=1, attn_implementation=implementation))
    positions = model.encode_positions(torch.zeros(1, T, model.config.hidden_size))
    call = with_positions(position_embeddings=positions)
    return Layer(model.layers[0], model.layers[0].self_attn, call)


def nemotron(implementation: str, T: int) -> Layer:
    """Nemotron's streaming speech recognition 0.6B, a recording at once: Parakeet's sizes, in chunks of 14
    frames that see 70 before. Ours reads the mask once for all layers of a model: off the clock here.
    """
    from transformers import NemotronAsrStreamingEncoder, NemotronAsrStreamingEncoderConfig

    config = NemotronAsrStreamingEncoderConfig(num_hidden_layers=1, attn_implementation=implementation)
    model = NemotronAsrStreamingEncoder(config)
    positions = model.encode_positions(torch.zeros(1, T, config.hidden_size))
    chunk = torch.arange(T) // (config.default_num_lookahead_tokens + 1)
    back = chunk[:, None] - chunk
    most = (config.sliding_window - 1) // (config.default_num_lookahead_tokens + 1)
    mask = ((back >= 0) & (back <= most)).expand(1, 1, T, T)
    call = with_positions(position_embeddings=positions, attention_mask=mask)
    return Layer(model.layers[0], model.layers[0].self_attn, call)


def wav2vec2_conformer(implementation: str, T: int) -> Layer:
    """Wav2Vec2-Conformer large: d 1,024, 16 heads of 64. 50 frames to a second of sound."""
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    config = Wav2Vec2ConformerConfig(
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        num_hidden_layers=1,
        position_embeddings_type="relative",
        attn_implementation=implementation,
    )
    model = Wav2Vec2ConformerEncoder(config)
    positions = model.embed_positions(torch.zeros(1, T, 1024)).detach()
    call = with_positions(relative_position_embeddings=positions)
    return Layer(model.layers[0], model.layers[0].self_attn, call)


def xlnet(implementation: str, T: int) -> Layer:
    """XLNet large: d 1,024, 16 heads of 64, with a memory as long as the segment."""
    from transformers import XLNetConfig, XLNetModel

    config = XLNetConfig(vocab_size=8, n_layer=1, attn_implementation=implementation)
    model = XLNetModel(config)
    memory = torch.randn(T, 1, config.d_model, generator=torch.Generator().manual_seed(2))
    positions = model.relative_positional_encoding(T, 2 * T, 1)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x.transpose(0, 1), None, None, None, positions, None, mems=memory)[0].transpose(0, 1)

    return Layer(model.layer[0], model.layer[0].rel_attn, call)


MODELS = {
    "parakeet": parakeet,
    "nemotron": nemotron,
    "wav2vec2-conformer": wav2vec2_conformer,
    "xlnet": xlnet,
}
THEIRS = {name: ("eager",) if name == "xlnet" else ("eager", "sdpa") for name in MODELS}
LENGTHS = {"parakeet": 1900, "nemotron": 1900, "wav2vec2-conformer": 1500, "xlnet": 512}


def ways(name: str) -> dict[str, tuple[str, bool]]:
    """By their names in the table: the implementation of attention to ask for, and whether to compile it.

    Ours comes last: it is compared with the first of theirs that runs.
    """
    theirs = THEIRS[name]
    return {
        **{way: (way, False) for way in theirs},
        **{f"{way}, compiled": (way, True) for way in theirs},
        OURS: (theirs[0], False),
    }


@dataclass(frozen=True)
class Job:
    """One of the things to time."""

    model: str
    T: int
    part: str
    which: str

    def __str__(self) -> str:
        return f"{self.model}, {self.T}, {self.part}, {self.which}"

    def task(self, way: str) -> Task:
        """forward: the output, without gradients. Else gradients, the input's first, then the weights'."""
        implementation, compiled = ways(self.model)[way]
        torch.manual_seed(0)  # all ways have the same weights
        layer = MODELS[self.model](implementation, self.T)
        layer.block.eval()
        with torch.no_grad():
            for weight in layer.block.parameters():  # biases too, and scores that matter
                weight.add_(0.02 * torch.randn_like(weight))
        if way == OURS:
            use_rel_attention(layer.block)
        module = getattr(layer, self.part)
        call: Callable[[Tensor], Tensor] = partial(layer.call, module)
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(call, dynamic=False)
        x = torch.randn(1, self.T, 1024, generator=torch.Generator().manual_seed(1))
        dout = torch.randn(1, self.T, 1024, generator=torch.Generator().manual_seed(2))

        def forward(_: None) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (call(x),)

        def step(_: None) -> tuple[Tensor, ...]:
            leaves = [x.requires_grad_(), *module.parameters()]
            return torch.autograd.grad(call(x), leaves, dout, allow_unused=True)

        return Task(forward if self.which == PASSES[0] else step)


def measured(job: Job, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Milliseconds and peak MB of every way, and why a way has none."""
    truth: list[Tensor | None] | None = None

    def compare(way: str, result: tuple[Tensor | None, ...]) -> str | None:
        nonlocal truth
        got = [None if tensor is None else tensor.detach() for tensor in result]
        if truth is None and way != OURS:
            truth = got
        return "not timed: none of theirs runs, to compare with" if truth is None else mistake(got, truth)

    builders = {
        way: partial(job.task, way)
        for way, (_, compiled) in ways(job.model).items()
        if args.compile or not compiled
    }
    tasks, notes = progress.first_calls(builders, compare, str(job))
    if OURS in tasks:  # the first in the table
        tasks = {OURS: tasks.pop(OURS), **tasks}
    samples = progress.sample(tasks, args.repeat, args.budget, str(job))
    ms = {way: 1e3 * median(taken) for way, taken in samples.items()}
    mb: dict[str, float | None] = {}
    for way in tasks if args.memory else ():
        progress.expect(1)
        progress.step(f"{job}: memory of {way}")
        try:
            mb[way] = measure.in_fresh_process(extra_bytes, asdict(job), way) / 1e6
        except ChildProcessError:  # no figure, and the rest goes on
            mb[way] = None
    return {**asdict(job), "ms": ms, "extra_mb": mb, "notes": notes}


def mistake(result: list[Tensor | None], truth: list[Tensor | None]) -> str | None:
    """What is more than rounding, in words, or None. First comes the output or the input's gradient."""
    for index, (got, right) in enumerate(zip(result, truth, strict=True)):
        if got is None and right is None:
            continue
        what = f"weight {index}'s gradient " if index else ""
        if got is None or right is None:
            return f"WRONG: {what}is missing {'here' if got is None else 'in theirs'}"
        smallest = SMALLEST_GRADIENT * right.numel() ** 0.5 if index else 0.0
        error = float((got - right).norm()) / max(float(right.norm()), smallest)
        if not error <= (WEIGHT_TOLERANCE if index else TOLERANCE):
            return f"WRONG: {what}differs from theirs by {error:.1e}"
    return None


def extra_bytes(job: dict[str, Any], way: str) -> int:
    """What `measured` has a process measure."""
    task, (_, compiled) = Job(**job).task(way), ways(job["model"])[way]
    return measure.extra_memory(task, warm_up=task if compiled else Job(**{**job, "T": 16}).task(way))


def table(results: list[dict[str, Any]]) -> str:
    lines = [f"{'':58} {'ms':>9} {'extra MB':>9} {'ours is':>9}"]
    for result in results:
        lines.append("{model}, {T} steps, {part}, {which}".format(**result))
        ms, mb = result["ms"], result["extra_mb"]
        for way, took in ms.items():
            ratio = f"{took / ms[OURS]:.2f}x" if OURS in ms and way != OURS else ""
            size = "" if mb.get(way) is None else f"{mb[way]:,.0f}"
            lines.append(f"    {way:54} {took:9,.1f} {size:>9} {ratio:>9}".rstrip())
        lines += [f"    {way:54} {note}" for way, note in result["notes"].items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Time layers of Hugging Face's Conformers and XLNet, theirs and by rel_attention."
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=list(MODELS),
        metavar="NAME",
        help=f"of {', '.join(MODELS)} (all)",
    )
    lengths = ", ".join(f"{name} {length}" for name, length in LENGTHS.items())
    parser.add_argument("--steps", type=positive(int), metavar="T", help=f"frames or tokens ({lengths})")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(both)")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave out theirs compiled"
    )
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out peak memory")
    cli.add_options(parser, repeat=9, budget=20.0)
    args = cli.parse(parser, argv)
    try:
        import transformers
    except ImportError:
        parser.error("needs transformers 5: pip install 'transformers>=5'")
    machine = {**describe("cpu"), "transformers": transformers.__version__}
    print(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"transformers {transformers.__version__}, float32, batch 1",
        flush=True,
    )
    results = []
    progress = Progress()
    for name in args.models:
        for part in args.parts:
            for which in PASSES:
                results.append(measured(Job(name, args.steps or LENGTHS[name], part, which), args, progress))
                cli.write_json(args.json, {"machine": machine, "results": results})
    progress.close()
    print(table(results))
    return 1 if any(OURS in result["notes"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(cli.run(main))

"""The whole model against Hugging Face's TransfoXLLMHeadModel on the same weights: evaluation,
generation and training, time and memory.

    pip install -r tests/parity/requirements.txt   # transformers 4.37.2, the last that works
    python benchmarks/bench_model.py

Numbers are compared before anything is timed; where they differ there is no figure. Without that
release ours is measured alone. benchmarks/README.md says what each row compares.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import measure
import model_figures
import torch
from bench_attn import Progress, why
from measure import Task
from model_figures import Figure
from torch import Tensor

from txl_model import Memory, TransformerXL, TransformerXLConfig
from txl_model.config import NOT_SCORED
from txl_model.convert import from_huggingface

RELEASE = "4.37.2"
NEEDED = f"needs transformers=={RELEASE}: pip install -r tests/parity/requirements.txt"
RIVAL = "Hugging Face"

FILL = 1024  # tokens at a time while the memory of a work is filled
CHECKED_SEGMENTS = 2
# Our memory has room for twice what it holds, and moves once that is used up: a sample of ours reads so
# much that it pays for a move. Of single tokens fewer, whose moves cost next to nothing.
MOST_SEGMENTS = 32


@dataclass(frozen=True)
class Work:
    """Reading `n_token` tokens after a memory of `mem_len`: once more and once more, or a training step."""

    kind: str
    n_token: int
    mem_len: int
    clamp_len: int
    same_length: bool
    target: float | None = None
    training: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.n_token:,} + {self.mem_len:,}"

    @property
    def segments(self) -> int:
        """Segments that one sample of ours reads."""
        return min(MOST_SEGMENTS, math.ceil(self.mem_len / self.n_token))


WORKS = (
    Work("evaluation", 80, 2100, 820, True, 5.0),
    Work("evaluation", 128, 3672, 1000, True, 6.0),
    Work("generation", 1, 3799, 1000, False, 40.0),
    Work("training", 512, 512, -1, False, 1.8, training=True),
)
MEMORY_TARGET = 2.0


def shortened(work: Work, by: int) -> Work:
    clamp_len = work.clamp_len if work.clamp_len < 0 else max(1, work.clamp_len // by)
    return replace(
        work, n_token=max(1, work.n_token // by), mem_len=max(1, work.mem_len // by), clamp_len=clamp_len
    )


# ---- The two sides -------------------------------------------------------------------------------


class Side(Protocol):
    """An implementation of the model, with random weights."""

    vocab_size: int

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def train(self, on: bool) -> None:
        """With dropout, or without it."""

    def begin(self, work: Work) -> Any:
        """The memory of a text not begun, to be read as this work says."""

    def read(self, input_ids: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Log-probabilities [1, T, V] of the next tokens, and the next memory."""

    def loss(self, input_ids: Tensor, memory: Any) -> Tensor:
        """Mean loss, in nats, of each token but the first, given those before it."""

    def gradients(self) -> dict[str, Tensor]:
        """Of the last `loss`, by our names."""


class Ours:
    def __init__(self, model: TransformerXL) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def train(self, on: bool) -> None:
        self.model.train(on)

    def begin(self, work: Work) -> Memory:
        kind = "hidden" if work.training else "kv"
        return self.model.new_memory(1, work.mem_len, work.clamp_len, work.same_length, kind)

    def read(self, input_ids: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        out = self.model(input_ids, memory)
        return out.logits.log_softmax(-1), out.memory

    def loss(self, input_ids: Tensor, memory: Memory) -> Tensor:
        labels = torch.cat([input_ids[:, 1:], torch.full_like(input_ids[:, :1], NOT_SCORED)], dim=1)
        return self.model(input_ids, memory, labels).loss

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters()}


class HuggingFace:
    """TransfoXLLMHeadModel, as it comes or compiled."""

    def __init__(self, model: Any, compiled: bool = False) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size
        self.forward = torch.compile(model, dynamic=False) if compiled else model

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters()

    def train(self, on: bool) -> None:
        self.model.train(on)

    def begin(self, work: Work) -> list[Tensor]:
        transformer = self.model.transformer
        transformer.mem_len, transformer.clamp_len = work.mem_len, work.clamp_len
        transformer.same_length = work.same_length
        # Left to itself it begins with mem_len zeros. Nothing remembered is less to do while memory fills.
        return [torch.empty(0, 1, transformer.d_model)] * transformer.n_layer

    def read(self, input_ids: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out = self.forward(input_ids, mems=memory)
        return out.prediction_scores, out.mems

    def loss(self, input_ids: Tensor, memory: list[Tensor]) -> Tensor:
        return self.forward(input_ids, mems=memory, labels=input_ids).loss  # which it shifts itself

    def gradients(self) -> dict[str, Tensor]:
        by_their_names = {name: p.grad for name, p in self.model.named_parameters()}
        return from_huggingface(by_their_names, settings_of(self.model)).tensors


def rival_missing() -> str | None:
    """Why there is no rival, and the mend; None if there is one."""
    try:
        import transformers
    except ImportError:
        return NEEDED
    return None if transformers.__version__ == RELEASE else f"{NEEDED} (here is {transformers.__version__})"


def their_model(config: TransformerXLConfig) -> Any:
    """A TransfoXLLMHeadModel with random weights."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {name: getattr(config, name) for name in (*model_figures.SIZES, "d_embed", "dropout", "dropatt")}
    return transformers.TransfoXLLMHeadModel(
        transformers.TransfoXLConfig(
            **sizes, cutoffs=[], div_val=1, untie_r=config.untie_r, tie_projs=[False]
        )
    )


def settings_of(their_model: Any) -> dict[str, Any]:
    return json.loads(their_model.config.to_json_string(use_diff=False))


def same_weights(their_model: Any) -> TransformerXL:
    """Ours of theirs. Memory starts empty: see `HuggingFace.begin`."""
    converted = from_huggingface(their_model.state_dict(), settings_of(their_model))
    converted.config.zero_memory = False
    return converted.model()


# ---- Is it right ---------------------------------------------------------------------------------


def tokens(side: Side, n: int, seed: int) -> Tensor:
    """Random text, [1, n]."""
    return torch.randint(side.vocab_size, (1, n), generator=torch.Generator().manual_seed(seed))


def fill(side: Side, work: Work) -> Any:
    """A memory that is full, of a random text."""
    side.train(False)
    memory = side.begin(work)
    with torch.no_grad():
        for segment in tokens(side, work.mem_len, seed=0).split(FILL, dim=1):
            _, memory = side.read(segment, memory)
    return memory


def errors(sides: tuple[Side, Side], memories: list[Any], work: Work) -> dict[str, float]:
    """How far the two are apart on some segments, by the names of `model_figures.TOLERANCE`."""
    log_probabilities, gradients = [], []
    for seed in range(CHECKED_SEGMENTS):
        ids = tokens(sides[0], work.n_token, seed=1 + seed)
        if work.training:
            got, truth = (_gradients(side, ids, memory) for side, memory in zip(sides, memories, strict=True))
            gradients += [(got[name] - truth[name]).norm() / truth[name].norm() for name in truth]
        with torch.no_grad():
            results = [side.read(ids, memory) for side, memory in zip(sides, memories, strict=True)]
        (got, _), (truth, _) = results
        log_probabilities.append((got - truth).abs().max())
        memories = [memory for _, memory in results]
    worst = {"log-probabilities": _worst(log_probabilities)}
    return worst | {"gradients": _worst(gradients)} if work.training else worst


def _worst(errors: list[Tensor]) -> float:
    worst = float(torch.stack(errors).max())
    return math.inf if math.isnan(worst) else worst


def _gradients(side: Side, input_ids: Tensor, memory: Any) -> dict[str, Tensor]:
    clear_gradients(side)
    side.loss(input_ids, memory).backward()
    gradients = side.gradients()
    clear_gradients(side)
    return gradients


def clear_gradients(side: Side) -> None:
    for parameter in side.parameters():
        parameter.grad = None


# ---- Time ----------------------------------------------------------------------------------------


def task(side: Side, work: Work, memory: Any, segments: int = 1) -> Task:
    """The next segment of a text, and the next; or a training step, gradients of the last one cleared."""
    ids = tokens(side, work.n_token, seed=1)

    def read(_: None) -> tuple[()]:
        nonlocal memory
        with torch.no_grad():
            for _ in range(segments):
                _, memory = side.read(ids, memory)
        return ()

    def step(_: None) -> tuple[()]:
        side.loss(ids, memory).backward()
        return ()

    side.train(work.training)
    if work.training:
        return Task(step, lambda: clear_gradients(side))
    return Task(read, passes=segments)


class Bench:
    """Both sides, on every work that is wanted."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.args, self.progress = args, progress
        self.missing = rival_missing()
        if self.missing is None:
            self.theirs = their_model(model_figures.config(args))
            self.ours = Ours(same_weights(self.theirs))
        else:
            self.ours = Ours(TransformerXL(model_figures.config(args)))

    def run(self) -> list[Figure]:
        works = [shortened(work, self.args.shorten) for work in WORKS]
        figures = [self.time(work) for work in works if self._wanted(work.kind)]
        if self._wanted("memory"):
            figures.append(self.memory(works[-1]))
        return figures

    def time(self, work: Work) -> Figure:
        """How long both take."""
        figure = self._figure(work.name, "ms", work.target)
        self.progress.expect(1)
        self.progress.step(f"{work.name}: filling memory")
        memory = fill(self.ours, work)
        tasks = {}
        if self.missing is None:
            rivals, their_memory = self._rivals(work, memory, figure)
            tasks = {name: task(rival, work, their_memory) for name, rival in rivals.items()}
        tasks["ours"] = task(self.ours, work, memory, work.segments)
        figure.fill(model_figures.race(tasks, self.args, self.progress, work.name))
        return figure

    def _rivals(self, work: Work, memory: Any, figure: Figure) -> tuple[dict[str, Side], Any]:
        """Theirs as it comes and compiled, and their memory. None where numbers differ: `figure` has it."""
        torch._dynamo.reset()
        eager = HuggingFace(self.theirs)
        their_memory = fill(eager, work)
        rivals: dict[str, Side] = {}
        for name in ("eager", "compiled") if self.args.compile else ("eager",):
            self.progress.expect(1)
            self.progress.step(f"{work.name}: comparing {name}")
            rival = eager if name == "eager" else HuggingFace(self.theirs, compiled=True)
            try:
                found = errors((self.ours, rival), [memory, their_memory], work)
            except Exception as failure:  # whatever the compiler dies of
                if name == "eager":
                    raise
                figure.remark = f"torch.compile fails: {why(failure)}"
                continue
            if name == "eager":
                figure.errors = found
            elif mistake := model_figures.wrong(found):
                figure.remark = f"of torch.compile {mistake}"
                continue
            rivals[name] = rival
        return {} if figure.wrong else rivals, their_memory

    def memory(self, work: Work) -> Figure:
        """Peak memory of the training step, gradients included, beyond what was there before it."""
        figure = self._figure(f"peak memory of {work.name}", "MB", MEMORY_TARGET)
        sides = ["ours"] if self.missing else ["ours", "eager"]
        self.progress.expect(len(sides))
        for side in sides:
            self.progress.step(f"memory of {side}")
            done = subprocess.run(
                [sys.executable, __file__, *self.args.argv, "--probe", side],
                env={**os.environ, **measure.MEASURABLE_HEAP},
                capture_output=True,
                text=True,
            )
            if done.returncode:  # killed for want of memory, perhaps
                figure.reason = f"the process that measures {side} ended with status {done.returncode}"
                return figure
            megabytes = int(done.stdout) / 1e6
            if side == "ours":
                figure.ours = megabytes
            else:
                figure.rival, figure.rival_is = megabytes, side
        return figure

    def _figure(self, name: str, unit: str, target: float) -> Figure:
        on_target = model_figures.published_sizes(self.args)
        return Figure(name, unit, target if on_target else None, reason=self.missing)

    def _wanted(self, kind: str) -> bool:
        return self.args.rows is None or kind in self.args.rows


def probe(name: str, args: argparse.Namespace) -> int:
    """What `Bench.memory` starts: one side's bytes, printed."""
    work = shortened(WORKS[-1], args.shorten)
    config = model_figures.config(args)
    side = Ours(TransformerXL(config)) if name == "ours" else HuggingFace(their_model(config))
    memory = fill(side, work)
    # Loads libraries and starts threads, and leaves nothing behind that the real size could use.
    task(side, replace(work, n_token=8), memory).run()
    print(measure.extra_memory(task(side, work, memory)))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = model_figures.parser(
        "Time the whole model against Hugging Face's TransfoXLLMHeadModel on the same weights."
    )
    kinds = [*dict.fromkeys(work.kind for work in WORKS), "memory"]
    parser.add_argument(
        "--rows", nargs="+", choices=kinds, metavar="ROW", help=f"of {', '.join(kinds)} (all)"
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave out Hugging Face's model compiled"
    )
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = model_figures.parse(parser, argv)
    if args.probe:
        return probe(args.probe, args)
    # The compiler remarks on each place where their forward pass cannot be one graph, and gives up on a
    # function with more than eight versions: there are twelve layers.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = 64
    return model_figures.report(args, lambda progress: Bench(args, progress).run(), ("ours", RIVAL))


if __name__ == "__main__":
    sys.exit(main())

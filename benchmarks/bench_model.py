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
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import cli
import measure
import model_figures
import torch
from cli import Progress, why
from model_figures import Figure
from model_work import Ours, Side, Work, clear_gradients, fill, task, tokens
from torch import Tensor

from txl_model import TransformerXL, TransformerXLConfig
from txl_model.convert import from_huggingface

RELEASE = "4.37.2"
NEEDED = f"needs transformers=={RELEASE}: pip install -r tests/parity/requirements.txt"
RIVAL = "Hugging Face"

CHECKED_SEGMENTS = 2

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


# ---- The rival -----------------------------------------------------------------------------------


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


# ---- The rows ------------------------------------------------------------------------------------


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
        figure.fill(self.progress.sample(tasks, self.args.repeat, self.args.budget, work.name))
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
        config = asdict(model_figures.config(self.args))
        self.progress.expect(len(sides))
        for side in sides:
            self.progress.step(f"memory of {side}")
            try:
                megabytes = measure.in_fresh_process(extra_bytes, side, asdict(work), config) / 1e6
            except ChildProcessError as error:
                figure.reason = f"{side}: {error}"
                return figure
            if side == "ours":
                figure.ours = megabytes
            else:
                figure.rival, figure.rival_is = megabytes, side
        return figure

    def _figure(self, name: str, unit: str, target: float | None) -> Figure:
        on_target = model_figures.published_sizes(self.args)
        return Figure(name, unit, target if on_target else None, reason=self.missing)

    def _wanted(self, kind: str) -> bool:
        return self.args.rows is None or kind in self.args.rows


def extra_bytes(name: str, work: dict[str, Any], config: dict[str, Any]) -> int:
    """What `Bench.memory` has a process measure of one side."""
    step, settings = Work(**work), TransformerXLConfig(**config)
    side = Ours(TransformerXL(settings)) if name == "ours" else HuggingFace(their_model(settings))
    memory = fill(side, step)
    return measure.extra_memory(task(side, step, memory), task(side, replace(step, n_token=8), memory))


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
    args = model_figures.parse(parser, argv)
    # The compiler remarks on each place where their forward pass cannot be one graph, and gives up on a
    # function with more than eight versions: there are twelve layers.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch._dynamo.config.recompile_limit = 64
    return model_figures.report(args, lambda progress: Bench(args, progress).run(), ("ours", RIVAL))


if __name__ == "__main__":
    sys.exit(cli.run(main))

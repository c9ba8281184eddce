"""A training run small enough to be made, stopped and made again many times; what the tests of
training share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from txl_model import TransformerXL, TransformerXLConfig
from txl_model.checkpoint import best_model
from txl_model.data import OrderedBatches
from txl_model.distributed import Processes
from txl_model.log import read_log
from txl_model.train import Trainer, TrainResult, new_model
from txl_model.train_config import TrainConfig

VOCAB = 11
ALONE = Processes(0, 1, torch.device("cpu"))
# Of each line of the log; the others tell the time.
EXACT = ("event", "step", "loss", "bpc", "lr", "grad_norm", "tokens", "best")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """In every module that imports it: with matrices this small, threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def text(length: int = 700, seed: int = 0) -> torch.Tensor:
    """Tokens of which each is mostly its predecessor plus one: a little to learn."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, VOCAB, (length,), generator=generator)
    steps = torch.where(torch.rand(length, generator=generator) < 0.7, torch.ones_like(jumps), jumps)
    return (steps.cumsum(0) % VOCAB).to(torch.uint8)


def model_config(**fields: object) -> TransformerXLConfig:
    sizes = dict(vocab_size=VOCAB, n_layer=2, n_head=2, d_model=12, d_head=6, d_inner=18)
    lengths = dict(tgt_len=6, mem_len=8)
    return TransformerXLConfig.from_dict({**sizes, **lengths, "dropout": 0.1, "dropatt": 0.1, **fields})


def train_config(**fields: object) -> TrainConfig:
    intervals = dict(log_interval=1, eval_interval=4, save_interval=3)
    return TrainConfig.from_dict(
        {"max_step": 12, "batch_size": 4, "lr": 0.02, "clip": 1.0, **intervals, **fields}
    )


def evaluate(model: TransformerXL, progress: object = None) -> float:
    """Stands for the evaluation of a validation text."""
    held_out = text(101, seed=1).long().to(model.softmax.biases[0].device)
    with torch.no_grad():
        return model.eval()(held_out[None, :-1], labels=held_out[None, 1:]).loss.item()


def make_trainer(
    out_dir: Path, model: dict | None = None, processes: Processes = ALONE, *, batches=None, **fields: object
) -> Trainer:
    """`model` and `fields`: those of the two configs that are not to be as above; `batches`: others
    to read.
    """
    options = {
        name: fields.pop(name) for name in ("on_event", "evaluator", "progress", "corpus") if name in fields
    }
    sizes, config = model_config(**(model or {})), train_config(**fields)
    if batches is None:
        tgt_len, ext_len = config.segment_lengths(sizes)
        rows = processes.rows(config.batch_size, config.batch_chunk)
        batches = OrderedBatches(
            text(),
            config.batch_size,
            tgt_len,
            ext_len=ext_len,
            varlen=config.varlen,
            seed=config.seed,
            rows=rows,
        )
    options = {"evaluator": evaluate, "corpus": {"name": "test", "unit": "byte"}, **options}
    return Trainer(
        new_model(sizes, config, processes), config, batches, out_dir, processes=processes, **options
    )


def run(out_dir: Path, *, resume: bool = False, **fields: object) -> TrainResult:
    return make_trainer(out_dir, **fields).run(resume)


def losses(out_dir: Path) -> list[float]:
    """Of the training steps, in order."""
    return [e["loss"] for e in read_log(out_dir / "log.jsonl") if e["event"] == "train"]


def fingerprint(out_dir: Path) -> dict:
    """All of a run that must not depend on whether it was stopped: its log, its best model, and its newest
    checkpoint to the byte.
    """
    log = [{k: e[k] for k in EXACT if k in e} for e in read_log(out_dir / "log.jsonl")]
    newest = max((out_dir / "checkpoints").glob("step-*"))
    files = json.loads((newest / "manifest.json").read_text())["files"]
    # It tells the time, too.
    sums = {name: file["sha256"] for name, file in files.items() if name != "progress.json"}
    return {"log": log, "best": best_model(out_dir), "checkpoint": newest.name, "files": sums}

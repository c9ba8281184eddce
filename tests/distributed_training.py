"""What test_distributed.py has several processes do: torchrun ... tests/distributed_training.py
FOLDER [SCENARIO]

Without the name of one it does all, for DDP and FSDP2; with it, that one for DDP. Every scenario
leaves a run in a folder of its own, and what else is to be looked at in FOLDER/notes-RANK.json.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import training

import txl_model.checkpoint
from txl_model.data import OrderedBatches
from txl_model.distributed import Processes

NO_DROPOUT = {"dropout": 0.0, "dropatt": 0.0}
# One process's rows have none of the tokens of the last cluster: some parameters get no gradient
# there.
UNEVEN = torch.cat([training.text(350), training.text(350) % 5])
SAME_CURVE: dict[str, dict[str, Any]] = {
    "plain": {"model": NO_DROPOUT},
    "chunks": {"model": NO_DROPOUT, "batch_chunk": 2, "varlen": True, "optim": "sgd", "mom": 0.9},
    "average": {
        "model": {**NO_DROPOUT, "untie_r": True},
        "average": "ema",
        "optim": "adamw",
        "weight_decay": 0.1,
    },
    "clusters": {
        "model": {**NO_DROPOUT, "cutoffs": (4, 7), "div_val": 2, "tie_projs": (False, True, False)},
        "text": UNEVEN,
    },
    "untied": {
        "model": {**NO_DROPOUT, "attn_type": 1, "tie_weight": False},
        "half_loss": True,
        "optim": "adagrad",
    },
}


def trainer(out_dir: Path, processes: Processes, text: torch.Tensor | None = None, **fields: Any) -> Any:
    if text is not None:
        fields["batches"] = OrderedBatches(text, 4, 6, rows=processes.rows(4))
    return training.make_trainer(out_dir, processes=processes, **fields)


class Interrupting:
    """Batches in which one process gets a signal before a step."""

    def __init__(self, batches: Any, step: int) -> None:
        self.batches, self.left = batches, step
        self.state, self.resume = batches.state, batches.resume

    def __iter__(self) -> Any:
        for segment in self.batches:
            self.left -= 1
            if self.left == 0 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGTERM)
            yield segment


def error_of(run: Any) -> str:
    try:
        run()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def stopped(here: Path, processes: Processes, parallel: str) -> Any:
    """With dropout: one run, and one that a signal to one of the processes stopped after step 5 and
    that went on.
    """
    rows = {"batch_chunk": 2, "batch_size": 2 * processes.count}
    fields = {"parallel": parallel, "average": "swa", "varlen": True, **rows}
    trainer(here / "whole", processes, **fields).run()
    stopping = trainer(here / "stopped", processes, **fields)
    stopping.batches = stopping.state.batches = Interrupting(stopping.batches, 5)
    result = stopping.run()
    trainer(here / "stopped", processes, **fields).run(resume=True)
    return [result.step, result.signal]


def grown(here: Path, processes: Processes, parallel: str) -> Any:
    """What one process made goes on in two."""
    with processes.together("copying"):
        if processes.first:
            shutil.copytree(here.parent / "alone", here / "grown")
    events: list[dict[str, Any]] = []
    fields = {"parallel": parallel, "max_step": 15, "model": NO_DROPOUT, "on_event": events.append}
    trainer(here / "grown", processes, **fields).run(resume=True)
    return [e["message"] for e in events if e["event"] == "note"]


def failing(here: Path, processes: Processes, parallel: str) -> Any:
    """One process alone cannot write."""
    write = txl_model.checkpoint.write

    def full(path: Path, *args: Any) -> None:
        if path.name == "process-1.json":
            raise OSError("the disk is full")
        write(path, *args)

    txl_model.checkpoint.write = full
    try:
        return error_of(trainer(here / "failing", processes, parallel=parallel).run)
    finally:
        txl_model.checkpoint.write = write


def poisoned(here: Path, processes: Processes, parallel: str) -> Any:
    """One process alone has a loss that is no number."""
    run = trainer(here / "poisoned", processes, parallel=parallel, model=NO_DROPOUT, save_interval=2)

    def poison(module: Any, args: Any, out: Any) -> Any:
        return (out[0] * float("nan"), out[1]) if run.state.progress.step == 4 else out

    if processes.rank == 1:
        run.scorer.register_forward_hook(poison)
    return error_of(run.run)


def main(folder: Path, processes: Processes, only: str | None = None) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if only is not None:
        return {f"ddp {only}": globals()[only](folder / "ddp", processes, "ddp")}
    for parallel in ("ddp", "fsdp2"):
        here = folder / parallel
        for name, fields in SAME_CURVE.items():
            trainer(here / name, processes, parallel=parallel, **fields).run()
        for scenario in (stopped, grown, failing, poisoned):
            notes[f"{parallel} {scenario.__name__}"] = scenario(here, processes, parallel)
    notes["uneven"] = error_of(lambda: trainer(folder / "x", processes, batch_size=3))
    training.new_model(training.model_config(), training.train_config(), processes)
    notes["random"] = torch.rand(()).item()
    return notes


if __name__ == "__main__":
    with Processes.joined() as processes:
        rank = processes.rank
        notes = main(Path(sys.argv[1]), processes, *sys.argv[2:])
    (Path(sys.argv[1]) / f"notes-{rank}.json").write_text(json.dumps(notes))

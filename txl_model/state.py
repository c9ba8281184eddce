"""All that a training run is between two steps, and how a checkpoint holds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl_model.checkpoint import AVERAGE, CONFIG, WEIGHTS, load_weights, read_json, read_tensors
from txl_model.config import TransformerXLConfig
from txl_model.data.batches import Batches
from txl_model.distributed import Processes, sharded_like, whole
from txl_model.memory import Memory
from txl_model.model import TransformerXL
from txl_model.optim import AveragedWeights, Schedule, make_optimizer
from txl_model.train_config import TrainConfig

OPTIMIZER, PROGRESS = "optimizer.safetensors", "progress.json"

# Under another value of these a checkpoint's memory, optimizer or place in the text would mean
# something else.
FIXED = (
    "batch_size",
    "batch_chunk",
    "tgt_len",
    "ext_len",
    "half_loss",
    "varlen",
    "seed",
    "optim",
    "average",
)
# Nor of these, where weights are averaged.
FIXED_IN_AVERAGES = ("ema_decay", "average_start")
# And of the corpus's and the model's, which matter all, but for these.
FREE_IN_MODEL = ("dropout", "dropatt", "init_std", "proj_init_std")
# Losses of the validation text that was read otherwise say nothing of one another.
READING = ("eval_tgt_len", "eval_max_tokens", "eval_batch_size")

# Of a run that goes on: what a field was, and what it is from then on.
Changes = dict[str, list[Any]]


@dataclass
class Progress:
    """How far a run has come: its numbers, for JSON."""

    step: int = 0  # updates made
    tokens: int = 0  # scored, by all processes
    best_loss: float | None = None  # of the validation text
    evaluated: int = 0  # the step of the last evaluation
    losses: list[float] = field(default_factory=list)  # of the steps since the last line of the log
    log_bytes: int = 0  # of the log, so far

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        return cls(**{f.name: values[f.name] for f in fields(cls)})


class TrainState:
    """Model, optimizer, averages, memory, place in the text, random numbers, and the numbers in
    `progress`.

    Make it once the model's parameters are what the optimizer is to update: after `parallelize`.
    """

    def __init__(
        self,
        model: TransformerXL,
        config: TrainConfig,
        batches: Batches,
        processes: Processes,
        about: dict[str, Any],
    ) -> None:
        """`about`: more for the checkpoints' config.json; what "corpus" says there must not change."""
        self.model, self.config, self.batches, self.processes = model, config, batches, processes
        self.about: dict[str, Any] = {
            **about,
            "model": model.config.to_dict(),
            "train": config.to_dict(),
        }
        self.optimizer = make_optimizer(model, config)
        self.schedule = Schedule(self.optimizer, config)
        self.average = None if config.average == "none" else AveragedWeights(model.parameters(), config)
        self.memories: list[Memory | None] = [None] * config.batch_chunk
        self.progress = Progress()

    # ---------------------------------------------------------------------------------------- save

    def shared_files(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds once, by file name.

        Every process must call this; the first one has the result.
        """
        files: dict[str, dict[str, Any]] = {
            CONFIG: self.about,
            WEIGHTS: self._gather(self.model.state_dict()),
            OPTIMIZER: self._gather(self._optimizer_tensors()),
            PROGRESS: {
                **asdict(self.progress),
                "schedule": self.schedule.state(),
                "averaged": self.average.count if self.average else 0,
                "processes": self.processes.count,
            },
        }
        if self.average and self.average.count:
            files[AVERAGE] = self._gather(self._averages())
        return files

    def own_files(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds of each process, by file name."""
        tensors = {"rng.cpu": torch.get_rng_state()}
        if self.processes.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.processes.device)
        for i, memory in enumerate(self.memories):
            if memory is not None:
                tensors |= {f"memory.{i}.{name}": x for name, x in memory.tensors().items()}
        settings = [None if memory is None else memory.settings() for memory in self.memories]
        name = f"process-{self.processes.rank}"
        return {
            f"{name}.safetensors": tensors,
            f"{name}.json": {"batches": self.batches.state(), "memories": settings},
        }

    def evaluated_weights(self) -> dict[str, Tensor]:
        """The weights to evaluate, whole, in every process: averaged ones where averaging has
        begun.
        """
        weights = self.model.state_dict()
        if self.average and self.average.count:
            weights |= self._averages()
        return {name: whole(x) for name, x in weights.items()}

    def _averages(self) -> dict[str, Tensor]:
        assert self.average is not None
        names = [name for name, _ in self.model.named_parameters()]
        return dict(zip(names, self.average.averages, strict=True))

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
            if value is not None  # the momentum of sgd without momentum
        }

    def _gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors, in the first process; one at a time on the device."""
        if self.processes.count == 1:
            return tensors
        gathered = {}
        for name, tensor in tensors.items():
            tensor = whole(tensor)
            if self.processes.first:
                gathered[name] = tensor.cpu()
        return gathered

    # ------------------------------------------------------------------------------------- restore

    def restore(self, checkpoint: Path) -> tuple[Changes, str | None]:
        """Go on from a checkpoint. Returns what is configured otherwise from here on, and what could not
        be restored, in words.

        Raises ValueError if it is another run's: of another shape, or configured otherwise than a run
        that goes on may be.
        """
        try:
            changes = self._changes(checkpoint / CONFIG)
            load_weights(self.model, read_tensors(checkpoint / WEIGHTS), checkpoint / WEIGHTS)
            self._load_optimizer(checkpoint / OPTIMIZER)
            saved = read_json(checkpoint / PROGRESS)
            self.progress = Progress.from_dict(saved)
            self.schedule.resume(saved["schedule"], new_lr="lr" in changes)
            if self.average and saved["averaged"]:
                self.average.count = saved["averaged"]
                averages = self._averages()
                for name, value in read_tensors(checkpoint / AVERAGE).items():
                    averages[name].copy_(sharded_like(value, averages[name]))
            if saved["processes"] == self.processes.count:
                self._restore_own(checkpoint)
                return changes, None
            self.batches.resume(read_json(checkpoint / "process-0.json")["batches"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{checkpoint} is no checkpoint of this version: {error!r}") from error
        return changes, (
            f"{checkpoint.name} was made by {saved['processes']} processes, now there are "
            f"{self.processes.count}: memory begins empty, and dropout draws other masks"
        )

    def _restore_own(self, checkpoint: Path) -> None:
        name = f"process-{self.processes.rank}"
        own = read_json(checkpoint / f"{name}.json")
        tensors = read_tensors(checkpoint / f"{name}.safetensors")
        self.batches.resume(own["batches"])
        for i, settings in enumerate(own["memories"]):
            if settings is not None:
                prefix = f"memory.{i}."
                mine = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
                self.memories[i] = Memory.restore(mine, settings).to(self.processes.device)
        torch.set_rng_state(tensors["rng.cpu"])
        if self.processes.device.type == "cuda" and "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.processes.device)

    def _load_optimizer(self, path: Path) -> None:
        tensors = read_tensors(path)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state: dict[int, dict[str, Tensor]] = {}
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        for i, parameter in enumerate(ordered):
            prefix = f"{names[parameter]}."
            # Adam counts the steps in one number; all else is one per weight.
            state[i] = {
                key.removeprefix(prefix): sharded_like(x, parameter) if x.shape == parameter.shape else x
                for key, x in tensors.items()
                if key.startswith(prefix)
            }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _changes(self, path: Path) -> Changes:
        """Raises ValueError for one that a run that goes on must not make."""
        saved, asked, changes = _complete(read_json(path)), _complete(self.about), {}
        fixed_in_train = FIXED if self.average is None else FIXED + FIXED_IN_AVERAGES
        for part in ("corpus", "model", "train"):
            for name, now in asked[part].items():
                before = saved[part].get(name)
                # The same text may be in a folder of another name.
                if before == now or (part, name) == ("corpus", "name"):
                    continue
                fixed = name in fixed_in_train if part == "train" else name not in FREE_IN_MODEL
                if fixed:
                    raise ValueError(
                        f"the run in {path.parent} was begun with {part} {name} = {before}, now it is {now}: "
                        "to resume it, leave that as it was"
                    )
                changes[name] = [before, now]
        return changes


def _complete(about: dict[str, Any]) -> dict[str, Any]:
    """What a run's config.json says, with what it leaves to a default: fields that it is too old to have, and
    train's tgt_len, which is the model's."""
    model = TransformerXLConfig.from_dict(about["model"]).to_dict()
    train = TrainConfig.from_dict(about["train"]).to_dict()
    return {**about, "model": model, "train": {**train, "tgt_len": train["tgt_len"] or model["tgt_len"]}}

"""How a model is trained, with the field names of the authors' train.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from txl_model.config import TransformerXLConfig
from txl_model.fields import Fields, check_at_least, option
from txl_model.presets import preset


@dataclass
class TrainConfig(Fields):
    """All of training that is neither the model nor the text. The defaults are the published ones.

    `txl train --help` says what each field is. Raises ValueError, naming the field, for a value that makes
    no sense.
    """

    max_step: int = option(100_000, "updates of the weights in all")
    batch_size: int = option(60, "rows of text read side by side, by all processes together")
    batch_chunk: int = option(
        1, "cut each process's rows into so many parts, one after the other: less memory"
    )
    tgt_len: int | None = option(None, "tokens of a segment; not given: the model's tgt_len")
    ext_len: int = option(0, "tokens of the text before it that each segment reads again, not scored")
    half_loss: bool = option(False, "score the second half of each segment only; the first is read again")
    varlen: bool = option(False, "segments of varying length")

    optim: str = option("adam", "optimizer", ("adam", "adamw", "sgd", "adagrad"))
    lr: float = option(0.00025, "learning rate after the warm-up; see inv_sqrt of --scheduler")
    mom: float = option(0.0, "momentum of sgd")
    weight_decay: float = option(0.0, "weight decay; biases and LayerNorm have none")
    clip: float = option(0.25, "the norm of all gradients together is held to this; 0: not")
    scheduler: str = option(
        "cosine",
        "how the learning rate goes on after the warm-up; inv_sqrt, as published: lr / sqrt(update), so that "
        "the warm-up rises to lr / sqrt(warmup_step)",
        ("cosine", "inv_sqrt", "dev_perf", "constant"),
    )
    warmup_step: int = option(0, "updates with a learning rate that rises linearly")
    eta_min: float = option(0.0, "cosine: the learning rate at max_step")
    decay_rate: float = option(0.5, "dev_perf: factor when the validation loss has stopped falling")
    patience: int = option(0, "dev_perf: evaluations without a better loss before that")
    lr_min: float = option(0.0, "dev_perf: the smallest learning rate")
    average: str = option(
        "none",
        "weights that are evaluated: the newest, or their exponential or plain average",
        ("none", "ema", "swa"),
    )
    ema_decay: float = option(0.999, "ema: weight of the average against the newest weights, at each update")
    average_start: int = option(0, "updates before averaging begins")

    log_interval: int = option(200, "updates between two lines of the log")
    eval_interval: int = option(4000, "updates between two evaluations of the validation text; 0: none")
    eval_batch_size: int = option(10, "rows read side by side in evaluation")
    eval_tgt_len: int | None = option(None, "tokens of a segment in evaluation; not given: as in training")
    eval_max_tokens: int | None = option(None, "evaluate on so many tokens; not given: on the whole text")
    save_interval: int = option(1000, "updates between two checkpoints; 0: only at the end")
    keep: int = option(3, "newest checkpoints kept")

    seed: int = option(1111, "of the initial weights, dropout and varlen")
    bf16: bool = option(False, "compute in bfloat16 where that is safe (autocast); weights stay float32")
    compile: bool = option(False, "compile each block with torch.compile")
    parallel: str = option(
        "ddp", "under torchrun: weights whole or sharded in each process", ("ddp", "fsdp2")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one = ("max_step", "batch_size", "batch_chunk", "eval_batch_size", "log_interval", "keep")
        for name in (*at_least_one, "tgt_len", "eval_tgt_len", "eval_max_tokens"):
            check_at_least(1, **{name: getattr(self, name)})
        for name in ("lr", "mom", "weight_decay", "clip", "eta_min", "lr_min"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        for name in (
            *("ext_len", "mom", "weight_decay", "clip", "warmup_step", "eta_min", "patience", "lr_min"),
            *("average_start", "eval_interval", "save_interval", "seed"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.seed >= 2**63:  # torch's seeds are less than 2^64, and each process has one of its own
            raise ValueError(f"seed must be less than 2^63, got {self.seed}")
        for name in ("decay_rate", "ema_decay"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.lr <= 0:
            raise ValueError(f"lr must be greater than 0, got {self.lr}")
        if self.half_loss and self.ext_len:
            raise ValueError("half_loss sets ext_len to half of tgt_len: leave ext_len out")
        if self.half_loss and self.tgt_len == 1:
            raise ValueError("half_loss needs tgt_len >= 2, got 1")
        if self.scheduler == "dev_perf" and not self.eval_interval:
            raise ValueError(
                "scheduler dev_perf follows the validation loss: eval_interval must be at least 1"
            )

    def segment_lengths(self, model_config: TransformerXLConfig) -> tuple[int, int]:
        """Tokens that a segment of the model scores, and tokens before them that it reads again."""
        tgt_len = self.tgt_len or model_config.tgt_len
        if self.half_loss:
            return tgt_len - tgt_len // 2, tgt_len // 2
        return tgt_len, self.ext_len

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TrainConfig:
        """How a published configuration was trained (`txl_model.presets`), fields changed."""
        return cls.from_dict({**preset(name, "train"), **overrides})

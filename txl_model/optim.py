"""The optimizer, its learning rate from update to update, and averages of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from txl_model.train_config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of `config` over all of the model's parameters.

    Betas and eps are torch's defaults, as published. What is only ever added (biases, u, v) and
    LayerNorm's weights do not decay.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if parameter.dim() < 2 or "bias" in name else decaying).append(parameter)
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # Fused: all of an update in one kernel, on CPUs too, where torch's default is a loop in Python.
    if config.optim == "adam":
        return torch.optim.Adam(groups, lr=config.lr, fused=True)
    if config.optim == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, fused=True)
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.mom)
    return torch.optim.Adagrad(groups, lr=config.lr)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of the update that follows `step` updates, dev_perf's reductions left out.

    As in the authors' train.py: the cosine is not offset by the warm-up, so that it ends at
    max_step, and inv_sqrt is lr / sqrt(step), reached linearly. There the very first update of a
    warm-up is made with the full rate, with inv_sqrt with none; here with the second's.
    """
    warmup = config.warmup_step
    if config.scheduler == "inv_sqrt":
        step = max(step, 1)
        return config.lr * (step**-0.5 if step > warmup else step / warmup**1.5)
    if step < warmup:
        return config.lr * max(step, 1) / warmup
    if config.scheduler == "cosine":
        progress = min(step / config.max_step, 1.0)
        return config.eta_min + (config.lr - config.eta_min) * (1 + math.cos(math.pi * progress)) / 2
    return config.lr


class Schedule:
    """Keeps an optimizer's learning rate as `config` wants it."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: TrainConfig) -> None:
        self.optimizer, self.config = optimizer, config
        self.plateau: ReduceLROnPlateau | None = None
        if config.scheduler == "dev_perf":
            self.plateau = ReduceLROnPlateau(
                optimizer, factor=config.decay_rate, patience=config.patience, min_lr=config.lr_min
            )

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return self.optimizer.param_groups[0]["lr"]

    def before_update(self, step: int) -> None:
        """Set the learning rate of the update that follows `step` updates."""
        if self.plateau is not None and step > self.config.warmup_step:
            return  # what the evaluations have left of it
        self._set(learning_rate(self.config, step))

    def after_evaluation(self, loss: float) -> None:
        """dev_perf lowers the learning rate when the validation loss has stopped falling: for good after the
        warm-up, which sets it anew for every update, the first behind it included."""
        if self.plateau is not None:
            self.plateau.step(loss)

    def forget_evaluations(self) -> None:
        """dev_perf compares the next loss with none before it."""
        if self.plateau is not None:
            self.plateau.best, self.plateau.num_bad_epochs = math.inf, 0

    def state(self) -> dict[str, Any]:
        """Everything but the config, for JSON."""
        if self.plateau is None:
            return {}
        # Infinity, before the first evaluation, is not JSON.
        best = self.plateau.best if math.isfinite(self.plateau.best) else None
        return {"lr": self.lr, "best": best, "num_bad_epochs": self.plateau.num_bad_epochs}

    def resume(self, state: dict[str, Any], new_lr: bool = False) -> None:
        """Go on where `state` was taken; with the rate of the config if that is a `new_lr`."""
        # A state of another scheduler is empty: dev_perf begins there.
        if self.plateau is not None and state:
            if not new_lr:
                self._set(state["lr"])
            self.plateau.best = math.inf if state["best"] is None else state["best"]
            self.plateau.num_bad_epochs = state["num_bad_epochs"]

    def _set(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr


class AveragedWeights:
    """Exponential (ema) or plain (swa) averages of parameters over the updates.

    torch's AveragedModel copies whole modules, which sharded ones do not allow; the averages
    themselves are its functions.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainConfig) -> None:
        self.parameters = list(parameters)
        self.averages: list[Tensor] = [p.detach().clone() for p in self.parameters]
        self.count = 0  # updates averaged so far
        self.start = config.average_start
        ema = config.average == "ema"
        self._accumulate = get_ema_multi_avg_fn(config.ema_decay) if ema else get_swa_multi_avg_fn()

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Take in the weights as they are after `step` updates."""
        if step <= self.start:
            return
        weights = [p.detach() for p in self.parameters]
        if self.count == 0:
            for average, weight in zip(self.averages, weights, strict=True):
                average.copy_(weight)
        else:
            self._accumulate(self.averages, weights, self.count)
        self.count += 1

"""Learning rates, weight decay and averages: against the published loop and torch's own."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import fields

import pytest
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from training import model_config, train_config

from txl_model import TransformerXL
from txl_model.optim import AveragedWeights, Schedule, learning_rate, make_optimizer
from txl_model.presets import PRESETS
from txl_model.train_config import TrainConfig


def published_rates(config: TrainConfig) -> list[float]:
    """The rate of each update, as the authors' train.py sets it (kimiyoung/transformer-xl,
    pytorch/train.py).
    """
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(()))], lr=config.lr)

    def inv_sqrt(step):
        if step == 0 and config.warmup_step == 0:
            return 1.0
        return 1.0 / (step**0.5) if step > config.warmup_step else step / (config.warmup_step**1.5)

    if config.scheduler == "cosine":
        scheduler = CosineAnnealingLR(optimizer, config.max_step, eta_min=config.eta_min)
    elif config.scheduler == "inv_sqrt":
        scheduler = LambdaLR(optimizer, lr_lambda=inv_sqrt)
    rates, train_step = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # step(epoch) is deprecated; an optimizer that makes no steps
        while train_step < config.max_step:
            rates.append(optimizer.param_groups[0]["lr"])
            train_step += 1
            if config.scheduler in ["cosine", "constant"]:
                if train_step < config.warmup_step:
                    curr_lr = config.lr * train_step / config.warmup_step
                    optimizer.param_groups[0]["lr"] = curr_lr
                elif config.scheduler == "cosine":
                    scheduler.step(train_step)
            elif config.scheduler == "inv_sqrt":
                scheduler.step(train_step)
    return rates


@pytest.mark.parametrize("warmup_step", [0, 1, 7])
@pytest.mark.parametrize("scheduler", ["cosine", "inv_sqrt", "constant"])
def test_learning_rate_is_the_published_one(scheduler, warmup_step):
    config = train_config(
        scheduler=scheduler, warmup_step=warmup_step, max_step=40, lr=0.3, eta_min=0.01, eval_interval=0
    )
    got = [learning_rate(config, step) for step in range(config.max_step)]
    want = published_rates(config)
    if warmup_step > (scheduler != "inv_sqrt"):
        # Documented: no first update with the full rate, or none at all, before the warm-up.
        assert got[0] == got[1] == pytest.approx(want[1])
        got, want = got[1:], want[1:]
    if scheduler == "constant" and warmup_step > 1:
        # The published loop stays one step short of the full rate for ever.
        want = [*want[: warmup_step - 1], *[0.3] * (len(want) - warmup_step + 1)]
    assert got == pytest.approx(want, rel=1e-9)


def test_cosine_ends_with_the_run_and_is_not_offset_by_the_warm_up():
    config = train_config(warmup_step=10, max_step=100, lr=1.0)
    assert learning_rate(config, 50) == pytest.approx(0.5)
    assert learning_rate(config, 100) == pytest.approx(0.0, abs=1e-15)
    assert learning_rate(config, 130) == pytest.approx(0.0, abs=1e-15)


def test_dev_perf_lowers_the_rate_when_the_validation_loss_stops_falling():
    config = train_config(scheduler="dev_perf", lr=1.0, patience=1, decay_rate=0.5, lr_min=0.2, warmup_step=2)
    model = nn.Linear(2, 2)
    schedule = Schedule(make_optimizer(model, config), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    want = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, min_lr=0.2)
    for step in range(3):
        schedule.before_update(step)
        assert schedule.lr == min(max(step, 1) / 2, 1.0)
    rates = []
    for step, loss in enumerate([3.0, 2.0, 2.1, 2.2, 2.3, 1.9, 2.0, 2.0, 2.0, 2.0, 2.0], start=3):
        schedule.after_evaluation(loss)
        want.step(loss)
        # As a checkpoint keeps it.
        other = Schedule(make_optimizer(model, config), config)
        other.resume(json.loads(json.dumps(schedule.state())))
        schedule = other
        schedule.before_update(step)
        rates.append(schedule.lr)
        assert schedule.lr == optimizer.param_groups[0]["lr"]
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2]


def test_state_before_the_first_evaluation_is_json():
    config = train_config(scheduler="dev_perf")
    schedule = Schedule(make_optimizer(nn.Linear(2, 2), config), config)
    state = json.loads(json.dumps(schedule.state(), allow_nan=False))
    schedule.resume(state)
    assert schedule.plateau.best == math.inf


def test_dev_perf_goes_on_from_a_new_rate_and_begins_after_another_scheduler():
    model = nn.Linear(2, 2)

    def schedule(lr):
        config = train_config(scheduler="dev_perf", lr=lr, patience=1, decay_rate=0.5)
        return Schedule(make_optimizer(model, config), config)

    before = schedule(1.0)
    for loss in (2.0, 2.1, 2.2, 2.3):
        before.after_evaluation(loss)
    assert before.state() == {"lr": 0.5, "best": 2.0, "num_bad_epochs": 1}
    same, other = schedule(1.0), schedule(0.3)
    same.resume(before.state())
    other.resume(before.state(), new_lr=True)
    assert same.state() == before.state()
    assert other.state() == {"lr": 0.3, "best": 2.0, "num_bad_epochs": 1}
    cosine = train_config(scheduler="cosine", lr=1.0)
    fresh = schedule(0.3)
    fresh.resume(Schedule(make_optimizer(model, cosine), cosine).state())
    assert fresh.state() == {"lr": 0.3, "best": None, "num_bad_epochs": 0}


@pytest.mark.parametrize("fields", [{}, {"attn_type": 1}, {"cutoffs": (4, 7), "div_val": 2}], ids=str)
def test_only_matrices_decay(fields):
    model = TransformerXL(model_config(untie_r=True, **fields))
    optimizer = make_optimizer(model, train_config(optim="adamw", weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    decays = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert set(decays) == set(dict(model.named_parameters()))
    for name, decay in decays.items():
        biases = ("bias", "bias_u", "bias_v", "r_bias")
        added = name.endswith(biases) or "biases" in name or "layer_norm" in name
        assert decay == (0.0 if added else 0.1), name


@pytest.mark.parametrize("optim", ["adam", "adamw", "sgd", "adagrad"])
def test_an_update_is_that_of_torch(optim):
    """Published: default betas and eps."""
    torch.manual_seed(3)
    model, other = (nn.Linear(4, 3).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    config = train_config(optim=optim, lr=0.1, mom=0.9 if optim == "sgd" else 0.0)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
    if optim == "sgd":
        want = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    else:
        decay = {"weight_decay": 0.0} if optim == "adamw" else {}
        want = kinds[optim](other.parameters(), lr=0.1, **decay)
    got = make_optimizer(model, config)
    for _ in range(3):
        x = torch.randn(5, 4, dtype=torch.float64)
        for m, o in ((model, got), (other, want)):
            o.zero_grad()
            m(x).square().sum().backward()
            o.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_are_those_of_torch(kind):
    model = nn.Linear(3, 2)
    config = train_config(average=kind, ema_decay=0.8, average_start=2)
    average = AveragedWeights(model.parameters(), config)
    function = get_ema_multi_avg_fn(0.8) if kind == "ema" else get_swa_multi_avg_fn()
    want = AveragedModel(model, multi_avg_fn=function)
    values = []
    for step in range(1, 7):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p))
        average.after_update(step)
        if step > 2:
            want.update_parameters(model)
            values.append(model.weight.detach().clone())
    assert average.count == 4
    for got, expected in zip(average.averages, want.module.parameters(), strict=True):
        torch.testing.assert_close(got, expected)
    if kind == "swa":
        torch.testing.assert_close(average.averages[0], torch.stack(values).mean(0))


# ----------------------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lr": 0.0}, "lr must be greater than 0, got 0.0"),
        *(
            ({name: value}, f"{name} must be a finite number, got {value}")
            for name in ("lr", "mom", "weight_decay", "clip", "eta_min", "lr_min")
            for value in (math.nan, math.inf)
        ),
        ({"ema_decay": math.nan}, "ema_decay must be between 0 and 1, got nan"),
        ({"seed": 2**63}, f"seed must be less than 2.63, got {2**63}"),
        ({"max_step": 0}, "max_step must be at least 1, got 0"),
        ({"tgt_len": 0}, "tgt_len must be at least 1, got 0"),
        ({"clip": -1.0}, "clip must not be negative, got -1.0"),
        ({"optim": "lion"}, "optim must be one of adam, adamw, sgd, adagrad, got 'lion'"),
        ({"scheduler": "linear"}, "scheduler must be one of cosine, inv_sqrt, dev_perf, constant"),
        ({"parallel": "none"}, "parallel must be one of ddp, fsdp2, got 'none'"),
        ({"ema_decay": 1.0}, "ema_decay must be between 0 and 1, got 1.0"),
        ({"half_loss": True, "ext_len": 3}, "half_loss sets ext_len"),
        ({"half_loss": True, "tgt_len": 1}, "half_loss needs tgt_len >= 2, got 1"),
        ({"scheduler": "dev_perf", "eval_interval": 0}, "dev_perf follows the validation loss"),
        ({"learning_rate": 1.0, "batch": 3}, "TrainConfig has no field batch, learning_rate"),
    ],
    ids=str,
)
def test_bad_config(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(values)


def test_config_goes_through_json():
    config = train_config(average="ema", eval_tgt_len=5)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    for field in fields(TrainConfig):
        assert field.metadata["help"], field.name


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = TrainConfig.preset(name, seed=5)
    assert config.seed == 5
    for field, value in PRESETS[name]["train"].items():
        assert getattr(config, field) == value
    if name not in ("tiny", "small"):
        got = (config.optim, config.lr, config.clip, config.scheduler, config.weight_decay)
        assert got == ("adam", 0.00025, 0.25, "cosine", 0.0)

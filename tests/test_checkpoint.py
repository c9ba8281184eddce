"""Checkpoints: going on is exact wherever a run was stopped or killed, and no damage goes
unnoticed.
"""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training
from safetensors.torch import load_file, save_file
from training import (  # noqa: F401 (one_thread is used by being here)
    fingerprint,
    make_trainer,
    model_config,
    one_thread,
    run,
)

import txl_model
import txl_model.checkpoint
from txl_model import TransformerXL, cli
from txl_model.checkpoint import (
    Checkpoints,
    best_model,
    load_model,
    read_json,
    read_tensors,
    save_model,
)
from txl_model.distributed import Processes
from txl_model.log import read_log
from txl_model.train import TrainResult

TESTS = Path(__file__).parent


def newest(out_dir: Path) -> Path:
    return Checkpoints(out_dir / "checkpoints").all()[-1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 12 steps with checkpoints of steps 6, 9 and 12. Copy it before changing it."""
    out_dir = tmp_path_factory.mktemp("run") / "run"
    run(out_dir)
    return out_dir


@pytest.fixture
def copy(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


def stop_at(step: int, out_dir: Path, **fields: object) -> TrainResult:
    """Begin or go on with a run, and stop it by a signal during its update number `step`."""

    class Stopping:
        def __init__(self, batches):
            self.batches = batches
            self.state, self.resume = batches.state, batches.resume

        def __iter__(self):
            for segment in self.batches:
                if trainer.state.progress.step == step - 1:
                    signal.raise_signal(signal.SIGTERM)
                yield segment

    trainer = make_trainer(out_dir, **fields)
    trainer.batches = trainer.state.batches = Stopping(trainer.batches)
    return trainer.run(resume=True)


# ---------------------------------------------------------------------------------------------- going on

RUNS = [
    ({}, {}),
    ({}, {"varlen": True, "tgt_len": 9, "batch_chunk": 2}),
    ({"variational": True}, {"half_loss": True, "average": "ema", "ema_decay": 0.9}),
    ({"mem_len": 0}, {"optim": "adamw", "weight_decay": 0.1, "average": "swa", "average_start": 4}),
    (
        {"attn_type": 1},
        # A validation loss that rises now and then, and a learning rate that falls.
        {"optim": "sgd", "lr": 2.0, "scheduler": "dev_perf", "decay_rate": 0.3, "eval_interval": 3},
    ),
    ({"attn_type": 3}, {"optim": "sgd", "ext_len": 2, "log_interval": 5}),
    ({"cutoffs": (4, 7), "div_val": 2}, {"optim": "adagrad", "scheduler": "inv_sqrt", "warmup_step": 5}),
    ({"zero_memory": True, "same_length": True}, {"bf16": True, "log_interval": 4}),
]


@pytest.mark.parametrize("model, fields", RUNS, ids=str)
def test_going_on_is_exact(tmp_path, model, fields):
    """32 steps, past the end of an epoch, stopped at places that are no multiples of anything."""
    fields = {"model": model, "max_step": 32, "save_interval": 8, "eval_interval": 12, **fields}
    run(tmp_path / "whole", **fields)
    for stop in (5, 13, 31):
        assert stop_at(stop, tmp_path / "stopped", **fields).step == stop
    run(tmp_path / "stopped", resume=True, **fields)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"bf16": True, "average": "ema", "batch_chunk": 2}], ids=str)
def test_going_on_is_exact_on_a_gpu(tmp_path, fields):
    fields = {"processes": Processes(0, 1, torch.device("cuda")), "max_step": 20, **fields}
    run(tmp_path / "whole", **fields)
    assert stop_at(7, tmp_path / "stopped", **fields).step == 7
    run(tmp_path / "stopped", resume=True, **fields)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")


def test_a_longer_run_goes_on_where_the_shorter_one_ended(copy):
    result = run(copy, resume=True, max_step=15)
    assert result.step == 15
    steps = [e["step"] for e in read_log(copy / "log.jsonl") if e["event"] == "train"]
    assert steps == list(range(1, 16))


def test_what_may_change_and_what_may_not(copy):
    events = []
    changed = {"max_step": 13, "lr": 0.01, "keep": 1, "model": {"dropout": 0.2}}
    run(copy, resume=True, on_event=events.append, **changed)
    (said,) = (e["message"] for e in events if e["event"] == "note")
    assert said.startswith("from here on dropout is 0.2 (was 0.1), max_step is 13 (was 12), lr is 0.01 (was")
    for fields, message in [
        ({"batch_size": 8}, "train batch_size = 4, now it is 8"),
        ({"seed": 1}, "train seed = 1111, now it is 1"),
        ({"optim": "sgd"}, "train optim = adam, now it is sgd"),
        ({"model": {"mem_len": 5}}, "model mem_len = 8, now it is 5"),
        ({"corpus": {"name": "test", "unit": "char"}}, "corpus unit = byte, now it is char"),
    ]:
        with pytest.raises(ValueError, match=rf"step-00000013 was begun with {message}: to resume it"):
            run(copy, resume=True, **fields)


@pytest.mark.parametrize("average", ["ema", "swa"])
def test_averages_go_on_as_they_began(tmp_path, average):
    run(tmp_path, average=average, max_step=4)
    for name, before, now in [("average_start", 0, 6), ("ema_decay", 0.999, 0.9)]:
        with pytest.raises(ValueError, match=f"begun with train {name} = {before}, now it is {now}"):
            run(tmp_path, resume=True, average=average, max_step=5, **{name: now})


def test_what_averages_would_be_does_not_matter_where_there_are_none(copy):
    assert run(copy, resume=True, max_step=13, average_start=6, ema_decay=0.9).step == 13


def test_the_same_text_under_another_name(copy):
    before = fingerprint(copy)
    run(copy, resume=True, corpus={"name": "other", "unit": "byte"})
    assert fingerprint(copy) == before


def test_a_model_of_another_shape(copy):
    before, config = fingerprint(copy), (copy / "config.json").read_bytes()
    for name, there, here in [("d_inner", 18, 20), ("n_layer", 2, 3), ("n_layer", 2, 1)]:
        with pytest.raises(ValueError, match=rf"begun with model {name} = {there}, now it is {here}"):
            run(copy, resume=True, model={name: here})
    assert fingerprint(copy) == before
    assert (copy / "config.json").read_bytes() == config


def test_changes_are_noted_in_the_runs_configuration(copy):
    def noted() -> dict:
        return read_json(copy / "config.json")

    run(copy, resume=True)
    assert "changes" not in noted()
    run(copy, resume=True, max_step=14, lr=0.01)
    run(copy, resume=True, max_step=15, lr=0.01)
    at_12 = {"step": 12, "changed": {"max_step": [12, 14], "lr": [0.02, 0.01]}}
    assert noted()["changes"] == [at_12, {"step": 14, "changed": {"max_step": [14, 15]}}]
    assert noted()["train"]["max_step"] == 15 and noted()["train"]["lr"] == 0.01
    for step in (15, 14):  # what was changed at step 14 led to nothing that is left
        shutil.rmtree(copy / "checkpoints" / f"step-000000{step}")
    run(copy, resume=True, max_step=13)
    assert noted()["changes"] == [{"step": 12, "changed": {"max_step": [12, 13]}}]


@pytest.mark.parametrize("max_step", [12, 4])
def test_nothing_left_to_do_is_said(copy, max_step):
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    events = []
    result = run(copy, resume=True, max_step=max_step, lr=0.01, on_event=events.append)
    assert result.step == 12 and result.checkpoint == newest(copy)
    (event,) = events
    said = rf"nothing left to do: .*step-00000012 is there already, and max_step is {max_step}\. A larger"
    assert event["event"] == "note" and re.match(said, event["message"])
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_an_evaluation_that_was_left_out_is_something_to_do(tmp_path):
    run(tmp_path, eval_interval=0)
    events = []
    run(tmp_path, resume=True, on_event=events.append)
    assert [e["event"] for e in events] == ["resume", "note", "eval"]


def test_going_on_before_anything_was_saved(tmp_path):
    run(tmp_path / "whole")
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "new")
    (tmp_path / "new" / "log.jsonl").write_text('{"event": "train", "step": 1}\n')  # killed in step 2
    run(tmp_path / "new", resume=True)
    assert fingerprint(tmp_path / "new") == fingerprint(tmp_path / "whole")


def test_a_changed_rate_or_scheduler_holds_from_there_on(tmp_path):
    def rates() -> list[float]:
        return [e["lr"] for e in read_log(tmp_path / "log.jsonl") if e["event"] == "train"]

    fields = {"scheduler": "dev_perf", "patience": 100}
    run(tmp_path, max_step=4, scheduler="constant")
    run(tmp_path, resume=True, max_step=6, **fields)
    run(tmp_path, resume=True, max_step=8, lr=0.001, **fields)
    run(tmp_path, resume=True, max_step=10, lr=0.001, **fields)
    assert rates() == [0.02] * 6 + [0.001] * 4


# ------------------------------------------------------------------------------------- one training a folder


def test_two_trainings_in_one_folder(tmp_path):
    """The second, begun or resumed, says so and changes nothing; ended in any way, the first makes room."""
    refused = []

    def meanwhile(event):
        before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        for resume in {event["step"] >= 3, True}:
            message = f"another training is running in {tmp_path}: wait for it or end it, or name another"
            with pytest.raises(ValueError, match=message):
                run(tmp_path, resume=resume)
            refused.append(resume)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        if event["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_event=meanwhile)
    assert {True, False} == set(refused)
    assert run(tmp_path, resume=True).step == 12
    assert run(tmp_path, resume=True).step == 12, "there is nothing left to do"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert run(tmp_path).step == 12


# ---------------------------------------------------------------------------------- the best model, going on


def run_with_losses(out_dir: Path, losses: dict[int, float], **fields: object) -> list[bool]:
    """Begin or go on with a run of which these are the validation losses, by step. Which evaluations so far
    were the best, by its log; what is in best/ must be of the last of these."""
    trainer = make_trainer(
        out_dir, evaluator=lambda model, progress: losses[trainer.state.progress.step], **fields
    )
    result = trainer.run(resume=True)
    evals = [e for e in read_log(out_dir / "log.jsonl") if e["event"] == "eval"]
    last = [e for e in evals if e["best"]][-1]
    assert best_model(out_dir) == (last["step"], last["loss"]) and result.best_loss == last["loss"]
    return [e["best"] for e in evals]


def go_back(out_dir: Path, step: int) -> None:
    for checkpoint in Checkpoints(out_dir / "checkpoints").all():
        if Checkpoints.step(checkpoint) > step:
            shutil.rmtree(checkpoint)


def test_the_best_model_is_ahead_of_steps_that_are_repeated(tmp_path):
    """Step 8's is not the best, though what was the best at step 6 is not there any more."""
    losses = {4: 3.0, 8: 3.5, 12: 1.0}
    assert run_with_losses(tmp_path, losses) == [True, False, True]
    before = fingerprint(tmp_path)
    go_back(tmp_path, 6)
    assert run_with_losses(tmp_path, losses) == [True, False, True]
    assert fingerprint(tmp_path) == before


@pytest.mark.parametrize(
    "losses, fields, best",
    [
        ({8: 2.5, 12: 2.7}, {}, [True, True, False]),  # worse than what was given up, better than before it
        ({8: 3.5, 12: 4.0}, {}, [True, False, True]),  # worse than both, but these are not there any more
        ({8: 3.5, 9: 4.0}, {"max_step": 9}, [True, False, True]),  # the step of best/ is never reached
    ],
    ids=str,
)
def test_the_best_model_of_a_branch_that_was_given_up_does_not_stay(tmp_path, capsys, losses, fields, best):
    run_with_losses(tmp_path, {4: 3.0, 8: 2.0, 12: 1.0})
    go_back(tmp_path, 6)
    assert cli.main(["info", str(tmp_path)]) == 0
    assert (
        "best         valid 1.4427 bpc at step 12, after the newest checkpoint\n" in capsys.readouterr().out
    )
    assert run_with_losses(tmp_path, losses, lr=0.01, **fields) == best
    assert cli.main(["info", str(tmp_path)]) == 0
    assert re.search(r"best         valid [\d.]+ bpc at step \d+\n", capsys.readouterr().out)


def test_the_best_model_of_a_branch_that_was_given_up_some_checkpoints_ago(tmp_path, capsys):
    run_with_losses(tmp_path, {4: 3.0, 8: 2.0, 12: 2.5})
    go_back(tmp_path, 6)
    fields = {"lr": 0.01, "eval_interval": 10}
    assert stop_at(9, tmp_path, **fields).step == 9  # past the step of best/, without an evaluation
    assert cli.main(["info", str(tmp_path)]) == 0
    assert "at step 8, of steps that were given up\n" in capsys.readouterr().out
    assert run_with_losses(tmp_path, {10: 4.0, 12: 5.0}, **fields) == [True, True, False]


def test_a_best_model_that_was_deleted_is_followed_by_the_next(tmp_path):
    run_with_losses(tmp_path, {4: 3.0, 8: 4.0, 12: 5.0})
    go_back(tmp_path, 6)
    shutil.rmtree(tmp_path / "best")
    assert run_with_losses(tmp_path, {8: 4.0, 12: 5.0}) == [True, True, False]


@pytest.mark.parametrize("name, value", [("eval_tgt_len", 3), ("eval_max_tokens", 9), ("eval_batch_size", 2)])
def test_losses_of_another_reading_are_no_losses_to_beat(tmp_path, name, value):
    losses, notes = {4: 1.0, 8: 3.0, 12: 2.0, 16: 2.5}, []
    fields = {"scheduler": "dev_perf", "patience": 0, "keep": 99}
    run_with_losses(tmp_path, losses, max_step=4, **fields)
    fields |= {name: value, "max_step": 16, "on_event": notes.append}
    assert run_with_losses(tmp_path, losses, **fields) == [True, True, True, False]
    rates = [e["lr"] for e in notes if e["event"] == "train"]
    assert rates == [0.02] * 12, "the plateau begins anew"
    said = [e["message"] for e in notes if e["event"] == "note"]
    assert said[1:] == ["the next evaluation replaces best/, whose losses are of another reading"]
    go_back(tmp_path, 4)  # before its first checkpoint: the same once more
    assert run_with_losses(tmp_path, losses, **fields) == [True, True, True, False]


# ----------------------------------------------------------------------------------------------- killing


def killed(out_dir: Path, how: str) -> int:
    command = [sys.executable, str(TESTS / "kill_training.py"), str(out_dir), how]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("never killed") / "run"
    assert killed(out_dir, "never") == 0
    return fingerprint(out_dir)


def test_killed_at_random_times(tmp_path, never_killed):
    assert killed(tmp_path / "run", "random") >= 3
    assert fingerprint(tmp_path / "run") == never_killed


@pytest.mark.parametrize(
    "how, least", [("some-lines", 10), pytest.param("lines", 150, marks=pytest.mark.slow)]
)
def test_killed_at_lines_of_the_code_that_writes_files(tmp_path, never_killed, how, least):
    assert killed(tmp_path / "run", how) >= least
    assert fingerprint(tmp_path / "run") == never_killed
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000012", "step-00000015"]


# ------------------------------------------------------------------------------------- damage on the disk


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def corrupt(path: Path) -> None:
    """One bit of one byte; the size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "process-0.safetensors",
    "process-0.json",
    "progress.json",
    "config.json",
    "manifest.json",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", [truncate, corrupt, Path.unlink])
def test_damage_is_named_and_the_checkpoint_before_is_used(finished, copy, name, harm):
    harm(newest(copy) / name)
    if (harm, name) == (corrupt, "manifest.json"):
        # Still JSON, perhaps: then of another file.
        what = r"(manifest\.json is no manifest|\S+ (is missing|has .* bytes instead|has changed))"
    else:
        what = re.escape(name) + (
            " is no manifest" if name == "manifest.json" and harm is truncate else
            " has .* bytes instead of" if harm is truncate else
            " has changed since it was written" if harm is corrupt else " is missing"
        )  # fmt: skip
    events = []
    result = run(copy, resume=True, on_event=events.append)
    assert [e["event"] for e in events[:2]] == ["note", "resume"]
    assert re.search(rf"step-00000012 is damaged: {what}", events[0]["message"])
    assert events[0]["message"].endswith("going back to step-00000009")
    assert events[1]["step"] == 9 and result.step == 12
    assert fingerprint(copy) == fingerprint(finished)
    assert (copy / "checkpoints" / "damaged-step-00000012").is_dir(), "kept for who wants to look"


def test_a_checkpoint_that_cannot_be_read_is_passed_over(finished, copy, monkeypatch):
    bad, sha256, events = newest(copy), txl_model.checkpoint._sha256, []

    def read(path):
        if path == bad / "optimizer.safetensors":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return sha256(path)

    monkeypatch.setattr(txl_model.checkpoint, "_sha256", read)
    assert run(copy, resume=True, on_event=events.append).step == 12
    assert "is damaged: optimizer.safetensors cannot be read: Input/output error" in events[0]["message"]
    assert fingerprint(copy) == fingerprint(finished)


def test_an_average_that_was_not_copied_is_missed(tmp_path):
    run(tmp_path / "run", average="ema", max_step=3)
    checkpoint = newest(tmp_path / "run")
    (checkpoint / "average.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is damaged: average\.safetensors is missing"):
        load_model(checkpoint)


def test_a_run_that_is_older_than_a_field_goes_on(copy):
    """What its config.json leaves out had its default."""
    path = newest(copy) / "config.json"
    config = read_json(path)
    del config["model"]["same_length_extra"], config["train"]["average"]
    assert config["train"]["tgt_len"] is None
    path.write_text(json.dumps(config))
    manifest = read_json(path.with_name("manifest.json"))
    manifest["files"]["config.json"] = {
        "bytes": path.stat().st_size,
        "sha256": txl_model.checkpoint._sha256(path),
    }
    path.with_name("manifest.json").write_text(json.dumps(manifest))
    tgt_len = config["model"]["tgt_len"]  # said now, as it was anyway
    assert run(copy, resume=True, max_step=13, tgt_len=tgt_len).step == 13


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def of_files(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    if number == errno.EINVAL:
        save_model(TransformerXL(model_config()), tmp_path / "model")
        load_model(tmp_path / "model")
    else:
        with pytest.raises(OSError, match="Input/output error"):
            save_model(TransformerXL(model_config()), tmp_path / "model")


def test_all_checkpoints_damaged(copy):
    for checkpoint in Checkpoints(copy / "checkpoints").all():
        truncate(checkpoint / "model.safetensors")
    every = ".*".join(f"step-000000{n} is damaged: model.safetensors has" for n in ("12", "09", "06"))
    with pytest.raises(ValueError, match=f"{every}.*no other is left"):
        run(copy, resume=True)
    shutil.rmtree(copy / "best")
    with pytest.raises(ValueError, match="no other is left"):
        load_model(copy)


def test_a_checkpoint_of_another_format(copy):
    path = newest(copy) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="its format is 99, and this version reads 1"):
        load_model(newest(copy))


def test_what_was_left_by_a_kill_is_swept(copy):
    for name in (".saving-step-00000015", ".deleting-step-00000003"):
        shutil.copytree(newest(copy), copy / "checkpoints" / name)
    run(copy, resume=True, keep=2)  # there is nothing left to do but that
    names = sorted(p.name for p in (copy / "checkpoints").iterdir())
    assert names == ["step-00000009", "step-00000012"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(tmp_path, keep):
    run(tmp_path, keep=keep, save_interval=2, eval_interval=0)
    steps = [Checkpoints.step(p) for p in Checkpoints(tmp_path / "checkpoints").all()]
    assert steps == [2, 4, 6, 8, 10, 12][-keep:]


# ---------------------------------------------------------------------------------- disk full, no permission


def test_disk_full_at_any_call(copy, monkeypatch):
    """Each call that reaches the disk fails in turn; the checkpoints before are as they were."""
    calls = failing = 0
    fsync = os.fsync

    def full(descriptor):
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    saved = read_json(newest(copy) / "manifest.json")
    monkeypatch.setattr(os, "fsync", full)
    what = r"(save the checkpoint \S+step-00000015|save the model in \S+best|write to \S+)"
    while True:
        calls, failing = 0, failing + 1
        with pytest.raises(OSError, match=rf"^cannot {what}: No space left on device") as error:
            run(copy, resume=True, max_step=15, eval_interval=5, save_interval=0)
        assert not list((copy / "checkpoints").glob(".*"))
        if "step-00000015 is there" in str(error.value):
            break  # it was renamed already; what failed is to sync the folder that it is in
        assert ("step-00000012 is there" in str(error.value)) == ("the checkpoint" in str(error.value))
        assert newest(copy).name == "step-00000012"
        assert read_json(newest(copy) / "manifest.json") == saved
        load_model(copy)
    assert failing > 10
    monkeypatch.undo()
    assert run(copy, resume=True, max_step=16).step == 16
    steps = [e["step"] for e in read_log(copy / "log.jsonl") if e["event"] == "train"]
    assert steps == list(range(1, 17))


LIMITED = """
import resource, sys, training
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    training.run(Path(sys.argv[1]), resume=True, max_step=15)
except OSError as error:
    print(error)
"""


def test_files_that_really_cannot_grow(copy):
    """The system refuses what goes beyond 20,000 bytes: not the weights, but the optimizer's file."""
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(copy), "20000"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    message = r"cannot save the checkpoint .*: optimizer.safetensors: .*File too large"
    assert re.match(message, done.stdout), done
    assert newest(copy).name == "step-00000012" and not list((copy / "checkpoints").glob(".*"))
    assert run(copy, resume=True, max_step=15).step == 15


def test_a_log_that_cannot_be_written(copy, monkeypatch):
    class Full:
        def write(self, line):
            return len(line) - 1

        def tell(self):
            return 0

        def close(self):
            pass

    opened = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *a, **k: Full() if self.name == "log.jsonl" else opened(self, *a, **k)
    )
    with pytest.raises(OSError, match=r"cannot write to .*log\.jsonl: No space left on device"):
        run(copy, resume=True, max_step=15)


# ---------------------------------------------------------------------------------------- models on disk


def test_save_and_load(tmp_path):
    model = TransformerXL(model_config(cutoffs=(4, 7), div_val=2))
    save_model(model, tmp_path / "new" / "folder", {"note": "by hand"}, {"step": "3"})
    loaded = load_model(tmp_path / "new" / "folder", backend="reference")
    assert not loaded.training and loaded.backend == "reference" and loaded.config == model.config
    for (name, got), want in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(got, want), name
    assert read_json(tmp_path / "new" / "folder" / "config.json")["note"] == "by hand"
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    mode = (tmp_path / "new" / "folder" / "model.safetensors").stat().st_mode
    assert mode & 0o777 == (tmp_path / "new" / "folder" / "config.json").stat().st_mode & 0o777


def test_loading_draws_no_weights(tmp_path):
    save_model(TransformerXL(model_config(pre_lnorm=True)).half(), tmp_path)
    before = torch.get_rng_state()
    with torch.device("meta"):  # somebody's default
        loaded = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    for parameter in loaded.parameters():
        assert parameter.dtype == torch.float32 and parameter.device.type == "cpu" and parameter.requires_grad
    assert loaded.state_dict().keys() == dict(loaded.named_parameters()).keys()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    loaded.train()(tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_an_evaluation_draws_no_weights(tmp_path, monkeypatch):
    trainer, states = make_trainer(tmp_path, max_step=4), []
    build = TransformerXL.__init__
    monkeypatch.setattr(
        TransformerXL, "__init__", lambda *args: (build(*args), states.append(torch.get_default_device()))[0]
    )
    trainer.run()
    assert [device.type for device in states] == ["meta"]


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path, monkeypatch):
    model = TransformerXL(model_config())
    save_model(torch.compile(model), tmp_path / "model")
    assert torch.equal(load_model(tmp_path / "model").bias_u, model.bias_u)
    new_model = training.new_model
    monkeypatch.setattr(training, "new_model", lambda *args: torch.compile(new_model(*args)))
    with torch.compiler.set_stance("force_eager"):
        run(tmp_path / "run", max_step=4)
        run(tmp_path / "run", max_step=8, resume=True)
    for folder in (tmp_path / "run", newest(tmp_path / "run")):
        assert load_model(folder).config == model.config


def test_load_from_a_run(finished, copy):
    evals = [e for e in read_log(finished / "log.jsonl") if e["event"] == "eval"]
    best = min(evals, key=lambda e: e["loss"])
    from safetensors import safe_open

    with safe_open(copy / "best" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata == {"step": str(best["step"]), "valid_loss": str(best["loss"])}
    weights = load_model(copy).state_dict()
    assert all(
        torch.equal(x, weights[name]) for name, x in read_tensors(copy / "best" / "model.safetensors").items()
    )
    shutil.rmtree(copy / "best")
    last = load_model(copy).state_dict()
    assert all(torch.equal(x, last[n]) for n, x in read_tensors(newest(copy) / "model.safetensors").items())
    direct = load_model(newest(copy)).state_dict()
    assert all(torch.equal(x, last[n]) for n, x in direct.items())
    truncate(newest(copy) / "model.safetensors")
    before = load_model(copy).state_dict()
    nine = copy / "checkpoints" / "step-00000009" / "model.safetensors"
    assert all(torch.equal(x, before[n]) for n, x in read_tensors(nine).items())
    with pytest.raises(ValueError, match=r"step-00000012 is damaged: model\.safetensors has .* bytes"):
        load_model(newest(copy))


def test_the_best_is_not_the_newest(tmp_path):
    """Of three evaluations the second is the best."""
    values = iter((2.0, 1.0, 3.0))
    seen = []

    def evaluator(model, progress):
        seen.append({name: t.clone() for name, t in model.state_dict().items()})
        return next(values)

    run(tmp_path / "run", evaluator=evaluator)
    best = load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(x, best[name]) for name, x in seen[1].items())
    others = [seen[0], seen[2], load_model(newest(tmp_path / "run")).state_dict()]
    assert not any(torch.equal(weights["bias_u"], best["bias_u"]) for weights in others)


def test_saving_that_fails_leaves_the_model_that_was_there(tmp_path, monkeypatch):
    first, second = (TransformerXL(model_config()) for _ in range(2))
    save_model(first, tmp_path)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"cannot save the model in {tmp_path}: No space left on device"):
        save_model(second, tmp_path)
    assert torch.equal(load_model(tmp_path).bias_u, first.bias_u)
    assert len(list(tmp_path.iterdir())) == 2


def change_config(folder: Path, **fields: object) -> None:
    config = read_json(folder / "config.json")
    config["model"] |= fields
    (folder / "config.json").write_text(json.dumps(config))


def rename_tensor(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[new] = tensors.pop(old).clone()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda f: shutil.rmtree(f), "does not exist"),
        (lambda f: (f / "model.safetensors").unlink(), "there is no model in .* expected the folder of a"),
        (lambda f: (f / "config.json").unlink(), "there is no model in"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json does not describe a model: .*model"),
        (lambda f: change_config(f, n_layers=2), "does not describe a model: .* no field n_layers"),
        (lambda f: change_config(f, n_layer=0), "does not describe a model: n_layer must be at least 1"),
        (lambda f: change_config(f, n_layer="two"), "does not describe a model: n_layer"),
        (lambda f: change_config(f, d_inner=20), r"of another shape: blocks\.0\.ff\.net\.0\.weight is "),
        (lambda f: truncate(f / "model.safetensors"), "model.safetensors is truncated, or no safe"),
        (lambda f: (f / "model.safetensors").write_bytes(b"PK\3\4 a pickle"), "no safetensors file"),
        (lambda f: rename_tensor(f, "bias_u", "bias_x"), "another model: it has no bias_u"),
        (lambda f: (f / "checkpoints").mkdir(), "has saved no checkpoint yet"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded(tmp_path, harm, message):
    folder = tmp_path / "model"
    save_model(TransformerXL(model_config()), folder)
    harm(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_model(folder)


def test_no_pickle(finished):
    """Nothing that is written could hold code, and nothing that is read is given the chance."""
    kinds = {p.suffix for p in finished.rglob("*") if p.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors", ""}  # the last: .lock, which is empty
    for path in Path(txl_model.__file__).parent.rglob("*.py"):
        source = path.read_text()
        if "pickle" in source:
            assert not re.search(r"^\s*(import|from) .*pickle", source, re.MULTILINE), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), path
        assert "object_list" not in source and "gather_object" not in source, path

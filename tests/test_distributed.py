"""Training in two processes, gloo on CPUs, started by torchrun: the same curve as in one, exact to
go on with.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_training import NO_DROPOUT, SAME_CURVE, trainer
from training import (  # noqa: F401 (one_thread is used by being here)
    ALONE,
    fingerprint,
    losses,
    one_thread,
    run,
)

from txl_model.checkpoint import load_model
from txl_model.log import read_log

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")

TESTS = Path(__file__).parent
PARALLEL = ("ddp", "fsdp2")


def torchrun(*arguments: str, processes: int = 2) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
        *arguments,
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes did, and a run of one."""
    folder = tmp_path_factory.mktemp("two")
    run(folder / "alone", model=NO_DROPOUT)
    process = torchrun(str(TESTS / "distributed_training.py"), str(folder))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "Warning" not in output.replace("OMP_NUM_THREADS", ""), output
    return folder


@pytest.fixture(scope="module")
def notes(folder):
    return [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("parallel", PARALLEL)
@pytest.mark.parametrize("name", SAME_CURVE)
def test_same_curve_as_one_process(folder, tmp_path, parallel, name):
    trainer(tmp_path, ALONE, **SAME_CURVE[name]).run()
    got, want = (read_log(path / "log.jsonl") for path in (folder / parallel / name, tmp_path))
    assert [(e["event"], e["step"]) for e in got] == [(e["event"], e["step"]) for e in want]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        values = [[e[key] for e in log if key in e] for log in (got, want)]
        rtol = 1e-4 if key == "grad_norm" else 1e-5
        torch.testing.assert_close(values[0], values[1], rtol=rtol, atol=0.0, msg=key)
    for source in (".", "checkpoints/step-00000012"):
        loaded = load_model(folder / parallel / name / source).state_dict()
        for parameter, value in load_model(tmp_path / source).state_dict().items():
            torch.testing.assert_close(loaded[parameter], value, rtol=1e-3, atol=1e-4, msg=parameter)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_going_on_is_exact(folder, notes, parallel):
    assert [n[f"{parallel} stopped"] for n in notes] == [[5, signal.SIGTERM]] * 2
    whole, stopped = (fingerprint(folder / parallel / name) for name in ("whole", "stopped"))
    assert stopped == whole
    assert {"process-0.safetensors", "process-1.safetensors", "average.safetensors"} <= set(whole["files"])


def test_going_on_is_exact_with_three(tmp_path):
    """Two numbers have one sum, three have more: DDP must add in the order it had before."""
    process = torchrun(str(TESTS / "distributed_training.py"), str(tmp_path), "stopped", processes=3)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    whole, stopped = (fingerprint(tmp_path / "ddp" / name) for name in ("whole", "stopped"))
    assert stopped == whole


@pytest.mark.parametrize("parallel", PARALLEL)
def test_more_processes_begin_with_an_empty_memory(folder, notes, tmp_path, parallel):
    assert notes[1][f"{parallel} grown"] == []
    note, changed = notes[0][f"{parallel} grown"]
    assert "step-00000012 was made by 1 processes, now there are 2: memory begins empty" in note
    assert "max_step is 15 (was 12)" in changed
    run(tmp_path, model=NO_DROPOUT, max_step=15)
    got, want = losses(folder / parallel / "grown"), losses(tmp_path)
    assert got[:12] == losses(folder / "alone") and len(got) == 15
    assert got[12] != pytest.approx(want[12], rel=1e-4), "memory, then, was not restored"
    torch.testing.assert_close(got[12:], want[12:], rtol=0.3, atol=0.0)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_fewer_processes(folder, tmp_path, parallel):
    copy = Path(shutil.copytree(folder / parallel / "plain", tmp_path / "run"))
    events = []
    assert run(copy, resume=True, model=NO_DROPOUT, max_step=13, on_event=events.append, parallel=parallel)
    assert "was made by 2 processes, now there are 1" in events[1]["message"]
    assert len(losses(copy)) == 13


@pytest.mark.parametrize("parallel", PARALLEL)
def test_what_fails_in_one_process_fails_in_all(folder, notes, parallel):
    first, second = (n[f"{parallel} failing"] for n in notes)
    assert first.startswith("OSError: cannot save the checkpoint")
    assert "failed in another process" in first and "the disk is full" in second
    assert list((folder / parallel / "failing" / "checkpoints").iterdir()) == []
    for note in notes:
        assert "diverged: at step 5 the loss is nan" in note[f"{parallel} poisoned"]
        assert note[f"{parallel} poisoned"].endswith("step-00000004")


def test_dropout_differs_between_processes(notes):
    assert notes[0]["random"] != notes[1]["random"]


def test_rows_that_do_not_divide(notes):
    for note in notes:
        assert note["uneven"] == "ValueError: batch_size 3 does not divide into batch_chunk 1 x 2 processes"


STOPPED = """
import sys, training
from pathlib import Path
from txl_model.distributed import Processes
with Processes.joined() as processes:
    fields = dict(max_step=100000, save_interval=0, eval_interval=0)
    result = training.make_trainer(Path(sys.argv[1]), processes=processes, **fields).run()
    # To a file of its own: on the terminal, lines of several processes may run into one another.
    Path(sys.argv[1], f"stopped-{processes.rank}").write_text(str(result.step))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun(tmp_path, number):
    (tmp_path / "script.py").write_text(STOPPED)
    process = torchrun(str(tmp_path / "script.py"), str(tmp_path / "run"))
    while not (tmp_path / "run" / "log.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    stopped = [path.read_text() for path in (tmp_path / "run").glob("stopped-*")]
    assert len(stopped) == 2 and stopped[0] == stopped[1], output
    step = int(stopped[0])
    assert len(losses(tmp_path / "run")) == step
    assert load_model(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")

"""Trains in child processes that are killed (SIGKILL), again and again, until a run is through.

    python tests/kill_training.py FOLDER HOW

where HOW is

    never        to have a run to compare the others with
    random       after a random time
    lines        at the n-th line of the code that writes files, n = 1, 4, 7, ...
    some-lines   at the n-th line, n = 1, 38, 75, ...

Each child is forked from this process, which has imported everything and computed nothing: it is
there at once. Prints how many were killed. FOLDER then holds a run as if nothing had happened.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import training

import txl_model.checkpoint
import txl_model.log

RUN: dict[str, Any] = dict(max_step=15, varlen=True, batch_chunk=2, average="ema", optim="adamw", keep=2)
STEPS = {"some-lines": 37, "lines": 3}  # from the line that kills one child to that of the next
FILES = {txl_model.checkpoint.__file__, txl_model.log.__file__}


def kill_at_line(n: int) -> None:
    """This process dies at the n-th line that it runs of FILES from now on."""
    left = n

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def child(folder: Path, kill_at: int | None = None) -> int:
    """Start a child that goes on with the run; its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            if kill_at is not None:
                kill_at_line(kill_at)
            training.run(folder, resume=True, **RUN)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def survived(pid: int) -> bool:
    """Waits for a child: whether it came through. Any end but that and SIGKILL is an error."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"a child ended with status {status}")
    return status == 0


def main(folder: Path, how: str) -> None:
    kills = 0
    if how == "never":
        assert survived(child(folder))
    elif how == "random":
        chance, longest, newest = random.Random(0), 0.1, ""
        while True:
            pid = child(folder)
            time.sleep(chance.uniform(0.0, longest))
            os.kill(pid, signal.SIGKILL)
            if survived(pid):
                break
            kills += 1
            # Long enough to get on, on any machine, and no longer.
            before, newest = newest, max((p.name for p in folder.glob("checkpoints/step-*")), default="")
            longest *= 1.2 if newest == before else 0.9
    else:
        line, step = 1, STEPS[how]
        while not survived(child(folder, line)):
            line, kills = line + step, kills + 1
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

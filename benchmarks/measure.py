"""The clock and the memory meter."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from problem import BACKWARD, DECODE, FORWARD, TRAIN, Problem
from torch import Tensor

GEMM_SIZE = 2048
GPU_GEMM_SIZE = 8192
SHORTEST_SAMPLE = 0.02  # seconds; shorter calls are repeated within one sample
FEWEST_SAMPLES = 3
MIB = 2**20

# ---- Time ----------------------------------------------------------------------------------------


@dataclass
class Task:
    """Something to time: `setup` runs off the clock before each call and hands its result to `call`.

    passes: how often one call does what is to be timed; times are of one of them.
    evicts: a call reads more than the caches hold, so that the next one finds nothing of its own in them.
    grad: False: autograd does not record. (To turn it off within a call would be 4 % of a short call that
        finds nothing of Python's own in the caches.)
    """

    call: Callable[[Any], Any]
    setup: Callable[[], Any] = field(default=lambda: None)
    fewest_calls: int = 1
    device: str = "cpu"
    passes: int = 1
    evicts: bool = False
    grad: bool = True

    def run(self) -> Any:
        return self.once(self.setup())

    def once(self, state: Any) -> Any:
        with self._recording():
            return self.call(state)

    def seconds(self, calls: int = 1) -> float:
        """Mean time of a pass over `calls` calls, in seconds."""
        with self._recording():
            clock = self._seconds_on_cpu if self.device == "cpu" else self._seconds_on_gpu
            return clock(calls) / calls / self.passes

    def _recording(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.grad and torch.is_grad_enabled())

    def _seconds_on_cpu(self, calls: int) -> float:
        total = 0.0
        for _ in range(calls):
            state = self.setup()
            start = time.perf_counter()
            self.call(state)
            total += time.perf_counter() - start
        return total

    def _seconds_on_gpu(self, calls: int) -> float:
        """By CUDA events around every call. As in triton.testing.do_bench, each call finds an L2 cache that
        holds none of its inputs. Emptying it, several times, also keeps the GPU busy while the call is being
        launched: as where the host runs ahead, and a GPU does not wait for Python."""
        events = []
        for _ in range(calls):
            state = self.setup()
            for _ in range(0 if self.evicts else 4):
                _l2_eraser(self.device).zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.call(state)
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in events) / 1e3


@functools.cache
def _l2_eraser(device: str) -> Tensor:
    return torch.empty(beyond_caches(device), dtype=torch.uint8, device=device)


def attention_task(
    attend: Callable[..., Tensor], problem: Problem, which: str, sets: list[tuple[Tensor, ...]]
) -> Task:
    """One pass of `attend(q, k, v, r, bias_u, bias_v)`. Calls return the output, or else the gradients.

    Forward passes take the input sets in turn: sets larger than the caches together are read from memory.
    """
    if which in (FORWARD, DECODE):
        turns = itertools.cycle(sets)

        def forward(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (attend(*inputs),)

        return Task(forward, lambda: next(turns), len(sets), problem.device, grad=False)

    leaves = [tensor.detach().requires_grad_() for tensor in sets[0]]
    dout = problem.dout()

    def gradients(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, allow_unused=True)

    if which == BACKWARD:
        return Task(gradients, lambda: attend(*leaves), device=problem.device)
    return Task(lambda _: gradients(attend(*leaves)), device=problem.device)


def graph_task(attend: Callable[..., Tensor], problem: Problem, sets: list[tuple[Tensor, ...]]) -> Task:
    """The forward pass on a GPU as a CUDA graph of one pass over every input set, the host's part left out.

    A call replays it and returns the first set's output.
    """

    def over_all_sets() -> tuple[Tensor]:
        first, *_ = [attend(*inputs) for inputs in sets]
        return (first,)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(stream):  # compiles and allocates: not while a graph is being captured
            over_all_sets()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            result = over_all_sets()

    def replay(_: None, kept: list[tuple[Tensor, ...]] = sets) -> tuple[Tensor]:
        """kept: the graph knows their addresses, and does not keep them."""
        graph.replay()
        return result

    return Task(replay, device=problem.device, passes=len(sets), evicts=True)


def timed_task(
    attend: Callable[..., Tensor], problem: Problem, which: str, sets: list[tuple[Tensor, ...]]
) -> Task:
    """As `attention_task`; decoding on a GPU as a CUDA graph, for its kernels take less than their launch."""
    if which == DECODE and problem.on_gpu:
        return graph_task(attend, problem, sets)
    return attention_task(attend, problem, which, sets)


def gemm_task(problem: Problem) -> Task:
    """The machine's own matrix product, 2048^3 (on a GPU 8192^3), in the problem's dtype."""
    options = {"dtype": problem.torch_dtype, "device": problem.device}
    size = gemm_size(problem.device)
    # A GPU slows down for numbers that make it work: there it gets random ones.
    fill = torch.randn if problem.on_gpu else torch.ones
    a, b, c = (fill(size, size, **options) for _ in range(3))
    return Task(lambda _: torch.mm(a, b, out=c), device=problem.device)


def gemm_size(device: str) -> int:
    return GEMM_SIZE if device == "cpu" else GPU_GEMM_SIZE


def gemm_flops(device: str = "cpu") -> int:
    return 2 * gemm_size(device) ** 3


def copy_task(device: str) -> tuple[Task, int]:
    """A copy between buffers larger than the caches, and its bytes: those read and written, as in STREAM."""
    source = torch.ones(beyond_caches(device), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return Task(lambda _: target.copy_(source), device=device, evicts=True), 2 * source.numel()


def fresh_memory_rate(device: str, size: int = 64 << 20) -> float:
    """Bytes a second of memory that the process did not have before.

    A CPU's comes page by page, zeroed; a GPU's is there: infinity.
    """
    if device != "cpu":
        return math.inf
    start = time.perf_counter()
    torch.empty(size, dtype=torch.uint8).zero_()
    return size / (time.perf_counter() - start)


def interleave(
    tasks: dict[str, Task],
    repeat: int,
    budget: float = math.inf,
    report: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Samples (seconds per call) of every task, taken in turns: a drift of the machine meets all alike.

    A task leaves the rounds once it has used up `budget` seconds: after three samples, or after one that did
    so alone.
    """
    calls = {name: calls_per_sample(task) for name, task in tasks.items()}
    samples: dict[str, list[float]] = {name: [] for name in tasks}

    def finished(name: str) -> bool:
        taken = samples[name]
        spent = sum(taken) * calls[name] * tasks[name].passes
        return spent >= budget and (len(taken) >= FEWEST_SAMPLES or taken[-1] >= budget)

    for _ in range(repeat):
        for name, task in tasks.items():
            if not finished(name):
                samples[name].append(task.seconds(calls[name]))
            report(name)
    return samples


def calls_per_sample(task: Task) -> int:
    """Calls that make a sample long enough to time well. This first call also warms the task up."""
    once = task.seconds() * task.passes
    return max(
        task.fewest_calls, math.ceil(SHORTEST_SAMPLE / max(once, 1e-6)) if once < SHORTEST_SAMPLE else 1
    )


def input_sets(problem: Problem, which: str) -> list[tuple[Tensor, ...]]:
    """One set of inputs; for decode as many as it takes to exceed the caches."""
    return [problem.inputs(seed) for seed in range(_number_of_sets(problem, which))]


def input_bytes(problem: Problem, which: str) -> int:
    """Bytes of the input sets, and of the gradients, of which there are as many."""
    copies = 2 if which in (BACKWARD, TRAIN) else _number_of_sets(problem, which)
    return copies * problem.input_bytes()


def _number_of_sets(problem: Problem, which: str) -> int:
    """Of small problems no more than 256: a round of thousands takes minutes."""
    if which != DECODE:
        return 1
    return min(1 + beyond_caches(problem.device) // problem.cache_bytes(), 256)


def beyond_caches(device: str) -> int:
    """A number of bytes well beyond the last cache."""
    return max(4 * last_cache_bytes(device), 256 * MIB if device == "cpu" else 512 * MIB)


def last_cache_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [
        path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(size[:-1]) * {"K": 2**10, "M": MIB}[size[-1]] for size in sizes), default=64 * MIB)


def gpu_kernels(task: Task) -> dict[str, float]:
    """Seconds that each GPU kernel of one pass takes, longest first, as torch's profiler sees them."""
    task.run()
    state = task.setup()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        task.once(state)
        torch.cuda.synchronize()
    seconds = {e.key: e.self_device_time_total / 1e6 / task.passes for e in profiler.key_averages()}
    return {name: s for name, s in sorted(seconds.items(), key=lambda item: -item[1]) if s > 0}


def check_gpu(what: str) -> None:
    """Raises an error that names `what` if it has broken the GPU: this process can use it no more."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"the GPU is broken: {what}") from error


# ---- Memory --------------------------------------------------------------------------------------


def free_memory(device: str) -> int:
    """Bytes a new tensor could take."""
    if device != "cpu":
        # What torch holds and does not use it can give out again.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = _proc_kib("/proc/meminfo", "MemAvailable") or os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    return min([free, *_cgroup_room()])


def _cgroup_room() -> Iterator[int]:
    """What a container's limit leaves, where there is one."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int(Path("/sys/fs/cgroup", limit).read_text()) - int(
                Path("/sys/fs/cgroup", used).read_text()
            )
        except (OSError, ValueError):  # no such file, or "max"
            continue


def extra_memory(task: Task, warm_up: Task) -> int:
    """Peak bytes of one call beyond what was there before and what it returns; on the CPU `in_fresh_process`.

    warm_up: loads libraries and starts threads. A smaller task, which leaves nothing behind that this one
    could use; or this one, where that compiles or tunes for its sizes.
    """
    warm_up.run()
    state = task.setup()
    gc.collect()
    if task.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = task.once(state)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        reset_peak()
        before = peak_resident()
        result = task.once(state)
        peak = peak_resident()
    returned = sum(tensor.nbytes for tensor in result if tensor is not None)
    return max(0, peak - before - returned)


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module in this folder returns; it and the arguments have to be JSON's."""
    module = Path(inspect.getfile(function)).stem  # its __module__ may be "__main__"
    call = json.dumps([module, function.__name__, arguments, torch.get_num_threads()])
    done = subprocess.run(
        [sys.executable, __file__, call],
        # glibc then returns every larger block once it is freed; a kept one would hide later needs.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
    )
    if done.returncode:  # killed, most likely for want of memory
        raise ChildProcessError(f"the process that measures memory ended with status {done.returncode}")
    return json.loads(done.stdout)


def reset_peak() -> None:
    """Set the peak of resident memory to what is resident now (Linux; elsewhere the peak so far stays)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_resident() -> int:
    """The largest resident memory since `reset_peak`, in bytes."""
    peak = _proc_kib("/proc/self/status", "VmHWM")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _proc_kib(file: str, key: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


if __name__ == "__main__":  # the process that `in_fresh_process` starts
    module, function, arguments, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    print(json.dumps(getattr(importlib.import_module(module), function)(*arguments)))

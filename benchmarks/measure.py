"""What the benchmarks share: the problem, the clock, the memory meter, the machine."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FORWARD, BACKWARD, TRAIN, DECODE = "forward", "backward", "forward+backward", "decode"

# Products over the visible pairs: (content, position). Forward: Q K^T and P V; (Q + v) R^T. Backward: the
# scores again, dP, dV, dK, dQ; of the position term the scores again, dQ, dR.
PRODUCTS = {FORWARD: (2, 1), BACKWARD: (5, 3), TRAIN: (7, 4), DECODE: (2, 1)}

GEMM_SIZE = 2048
GPU_GEMM_SIZE = 8192
SHORTEST_SAMPLE = 0.02  # seconds; shorter calls are repeated within one sample
FEWEST_SAMPLES = 3
MIB = 2**20


@dataclass(frozen=True)
class Problem:
    """One causal attention as in `rel_attention`: the queries are the last `qlen` of `klen` positions."""

    qlen: int = 1900
    klen: int = 3800
    batch: int = 1
    heads: int = 8
    d_head: int = 64
    dtype: str = "float32"
    clamp_len: int | None = None
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """N: rows of r. Further distances than `clamp_len` all use row 0."""
        return self.klen if self.clamp_len is None else min(self.klen, self.clamp_len + 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    def visible_pairs(self, nearer_than: int | None = None) -> int:
        """Pairs (query, key) that the causal mask lets through, with a distance below `nearer_than`."""
        longest = self.klen if nearer_than is None else min(self.klen, nearer_than)
        # Query i sees klen - qlen + i + 1 keys.
        first, last = self.klen - self.qlen + 1, self.klen
        ramp_end = min(last, longest)
        ramp = (first + ramp_end) * (ramp_end - first + 1) // 2 if ramp_end >= first else 0
        flat = longest * (last - max(first, longest + 1) + 1) if last > longest else 0
        return self.batch * self.heads * (ramp + flat)

    def flops(self, which: str, position: bool = True) -> int:
        """Useful work: visible pairs only, and no position product for pairs whose distance is clamped."""
        content_products, position_products = PRODUCTS[which]
        work = content_products * self.visible_pairs()
        if position:
            work += position_products * self.visible_pairs(nearer_than=self.rows)
        return 2 * self.d_head * work

    def cache_bytes(self, position: bool = True) -> int:
        """Bytes of k, v and r: what one decoding step has to read."""
        per_head = 2 * self.batch * self.klen + (self.rows if position else 0)
        return per_head * self.heads * self.d_head * self.itemsize

    def square_bytes(self) -> int:
        """Bytes of one [B, H, L, K] tensor."""
        return self.batch * self.heads * self.qlen * self.klen * self.itemsize

    def inputs(self, seed: int = 0) -> tuple[Tensor, ...]:
        """q [B,H,L,D], k and v [B,H,K,D], r [H,N,D], bias_u and bias_v [H,D]: standard normal."""
        b, h, d = self.batch, self.heads, self.d_head
        shapes = (
            (b, h, self.qlen, d),
            (b, h, self.klen, d),
            (b, h, self.klen, d),
            (h, self.rows, d),
            (h, d),
            (h, d),
        )
        generator = torch.Generator(self.device).manual_seed(seed)
        return tuple(self._randn(shape, generator) for shape in shapes)

    def dout(self) -> Tensor:
        """The gradient that arrives at the output, [B,H,L,D]."""
        generator = torch.Generator(self.device).manual_seed(1)
        return self._randn((self.batch, self.heads, self.qlen, self.d_head), generator)

    def _randn(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=generator, device=self.device).to(self.torch_dtype)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def __str__(self) -> str:
        clamp = "" if self.clamp_len is None else f", clamp {self.clamp_len}"
        sizes = f"B {self.batch}, H {self.heads}, L {self.qlen}, K {self.klen}, D {self.d_head}"
        return f"{sizes}{clamp}, {self.dtype} on {self.device}"


# The shapes the project holds itself to (B 1, H 8, D 64 unless said).
SHAPES = {
    "headline": Problem(1900, 3800),
    "segment": Problem(512, 3800),
    "evaluation": Problem(128, 3800),
    "short-evaluation": Problem(80, 2180),
    "wt103-base": Problem(150, 300, batch=4, heads=10, d_head=41),
    "training": Problem(512, 1024),
    "clamped": Problem(1900, 3800, clamp_len=1000),
    "decode": Problem(1, 3800),
}
# The same for GPUs: 64 heads in all, 16 to a batch entry; by the head dimension.
GPU_HEADLINE = {
    d_head: Problem(2048, 4096, batch=4, heads=16, d_head=d_head, dtype="bfloat16", device="cuda")
    for d_head in (64, 128)
}
GPU_DECODE = {
    d_head: replace(problem, qlen=1, klen=3800, batch=64) for d_head, problem in GPU_HEADLINE.items()
}

# ---- Time ----------------------------------------------------------------------------------------


@dataclass
class Task:
    """Something to time: `setup` runs off the clock before each call and hands its result to `call`.

    passes: how often one call does what is to be timed; times are of one of them.
    evicts: a call reads more than the caches hold, so that the next one finds nothing of its own in them.
    """

    call: Callable[[Any], Any]
    setup: Callable[[], Any] = field(default=lambda: None)
    fewest_calls: int = 1
    device: str = "cpu"
    passes: int = 1
    evicts: bool = False

    def run(self) -> Any:
        return self.call(self.setup())

    def seconds(self, calls: int = 1) -> float:
        """Mean time of a pass over `calls` calls, in seconds."""
        if self.device != "cpu":
            return self._seconds_on_gpu(calls)
        total = 0.0
        for _ in range(calls):
            state = self.setup()
            total += self._clock(state)
        return total / calls / self.passes

    def _clock(self, state: Any) -> float:
        start = time.perf_counter()
        self.call(state)
        return time.perf_counter() - start

    def _seconds_on_gpu(self, calls: int) -> float:
        """By CUDA events around every call. As in triton.testing.do_bench, each call finds an L2 cache that
        holds none of its inputs; emptying it also keeps the GPU busy while the call is being launched."""
        events = []
        for _ in range(calls):
            state = self.setup()
            if not self.evicts:
                _l2_eraser(self.device).zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.call(state)
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in events) / 1e3 / calls / self.passes


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
            with torch.no_grad():
                return (attend(*inputs),)

        return Task(forward, lambda: next(turns), len(sets), problem.device)

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
    count = 1 + beyond_caches(problem.device) // problem.cache_bytes() if which == DECODE else 1
    return [problem.inputs(seed) for seed in range(count)]


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
        task.call(state)
        torch.cuda.synchronize()
    seconds = {e.key: e.self_device_time_total / 1e6 / task.passes for e in profiler.key_averages()}
    return {name: s for name, s in sorted(seconds.items(), key=lambda item: -item[1]) if s > 0}


def median(samples: list[float]) -> float:
    return statistics.median(samples)


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


def extra_memory(task: Task) -> int:
    """Peak bytes of one call beyond what was there before and what it returns.

    On the CPU this wants a process of its own, started with `MEASURABLE_HEAP` in its environment.
    """
    state = task.setup()
    gc.collect()
    if task.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = task.call(state)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    else:
        reset_peak()
        before = peak_resident()
        result = task.call(state)
        peak = peak_resident()
    returned = sum(tensor.nbytes for tensor in result if tensor is not None)
    return max(0, peak - before - returned)


# glibc then returns every larger block to the system once it is freed; a kept one would hide later needs.
MEASURABLE_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536"}


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


# ---- Machine -------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Where and with what the figures were taken."""
    about = {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_cache_mib": last_cache_bytes("cpu") // MIB,
        "gpu": torch.cuda.get_device_name(device) if device != "cpu" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return about if device == "cpu" else about | gpu(device)


def gpu(device: str) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_mib": properties.total_memory // MIB,
        "l2_cache_mib": properties.L2_cache_size // MIB,
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def nvidia_driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:  # in a container or a virtual machine, perhaps
        command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def commit() -> str | None:
    """The source's commit, with `+changes` where the tree differs from it, or what TXL_COMMIT says; None
    outside a git checkout."""
    if given := os.environ.get("TXL_COMMIT"):
        return given
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None

"""No buffer of order L x K: peak memory of a call in a process of its own, as the system measures it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import EMULATED, INTERPRET, each_fused, inputs, python

MiB = 2**20

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
    pytest.mark.skipif(INTERPRET, reason="TRITON_INTERPRET=1: an interpreter's memory tells nothing"),
    pytest.mark.skipif(EMULATED, reason="TXL_CUDA_EMULATION: an emulation's memory tells nothing"),
]

# Prints the peak of resident memory during the call, less what was resident before it, less the tensors that
# it returned. The first, small call loads libraries and starts threads.
MEASURE = """
import json, sys
import torch
from helpers import BACKENDS, inputs, key_range, randn_like, run

def resident(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

job = json.loads(sys.argv[1])
backend = next(b for b in BACKENDS if b.name == job["backend"])
dtype = getattr(torch, job["dtype"])
options = dict(job["options"], **({"dropout_seed": 1} if "dropout_p" in job["options"] else {}))
causal = options.get("causal", True)

def call(**sizes):
    tensors = inputs(**sizes, causal=causal, dtype=dtype)
    dout = randn_like(tensors["q"]) if job["backward"] else None
    before = resident("VmRSS")
    try:
        open("/proc/self/clear_refs", "w").write("5")  # start the peak again
    except OSError:
        pass  # then the peak may be an earlier, higher one: never too low
    results = run(backend, tensors, dout, **options)
    return resident("VmHWM") - before, sum(t.nbytes for t in results.values())

small = {**job["sizes"], "L": min(40, job["sizes"]["L"]), "K": 90}
small["N"] = min(small["N"], 90) if small.get("N") else None
call(**small)
peak, returned = call(**job["sizes"])
print(peak - returned)
"""


def extra(backend: str, sizes: dict, options=None, dtype="float32", backward=True) -> int:
    job = dict(backend=backend, sizes=sizes, options=options or {}, dtype=dtype, backward=backward)
    return int(python(f"import sys; sys.argv.append({json.dumps(json.dumps(job))})\n" + MEASURE).stdout)


SCORES = 8 * 1900 * 3800 * 4  # what one buffer of all scores would take at the shape: 220 MiB
PUBLISHED = dict(B=1, H=8, L=1900, K=3800, D=64)


def test_the_measure_sees_a_buffer_of_scores():
    """The reference forms all scores, so it must be caught."""
    sizes = dict(B=1, H=2, L=950, K=1900, D=64)
    assert extra("reference", sizes, backward=False) > 2 * 950 * 1900 * 4


@pytest.mark.parametrize(
    "options, backward",
    [
        ({}, False),
        ({}, True),
        (dict(causal=False), True),
        (dict(dropout_p=0.1), True),
        (dict(window_size=(600, 0)), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", each_fused())
def test_published_shape(backend, options, backward):
    if backend.device != "cpu":
        pytest.skip("measured through the operating system")
    assert extra(backend.name, PUBLISHED, options, backward=backward) < 40 * MiB < SCORES


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("backend", each_fused())
def test_other_dtypes(backend, dtype):
    if backend.device != "cpu":
        pytest.skip("measured through the operating system")
    assert extra(backend.name, dict(PUBLISHED, H=4), dtype=dtype) < 40 * MiB


@pytest.mark.parametrize("backend", each_fused())
def test_clamp(backend):
    if backend.device != "cpu":
        pytest.skip("measured through the operating system")
    assert extra(backend.name, dict(PUBLISHED, N=1001)) < 40 * MiB


@pytest.mark.parametrize("backend", each_fused())
def test_long_sequence(backend):
    """One head, 8,192 keys: scores would take 256 MiB; what is needed grows with the length alone."""
    if backend.device != "cpu":
        pytest.skip("measured through the operating system")
    assert extra(backend.name, dict(B=1, H=1, L=8192, K=8192, D=32)) < 40 * MiB


@pytest.mark.parametrize("L", [1, 8])
@pytest.mark.parametrize("backend", each_fused())
def test_decode(backend, L):
    """No copy of the memory: k and v take 61 MiB each."""
    if backend.device != "cpu":
        pytest.skip("measured through the operating system")
    sizes = dict(B=1, H=8, L=L, K=30_000, D=64)
    assert extra(backend.name, sizes, backward=False) < 10 * MiB


# ---- uninitialised memory ----------------------------------------------------------------------------------


def test_torch_empty_is_poisoned():
    """What the other tests rely on: they see NaN wherever a result was not written."""
    allocated = [
        torch.empty(3),
        torch.empty(3, dtype=torch.bfloat16),
        torch.empty_like(torch.ones(2, 3).T),
        torch.ones(2, dtype=torch.float64).new_empty(4),
        torch.empty_strided((2, 3), (1, 2)),
    ]
    for t in allocated:
        assert t.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_of_the_cpu_kernels_are_poisoned(dtype, monkeypatch):
    """With kernels that write nothing, all that txl_kernels.cpu allocates is NaN: what a kernel leaves
    out is seen."""
    from txl_kernels import cpu
    from txl_kernels.registry import Inputs, Options

    class NoKernels:
        class cpu_forward:
            default = staticmethod(lambda *args: None)

        cpu_backward = cpu_forward

    assert cpu.unavailable() is None
    tensors = inputs(B=2, L=4, K=6, dtype=dtype)
    monkeypatch.setattr(torch.ops, "txl_kernels", NoKernels)
    arguments = Inputs(*tensors.values(), None, None), Options(True, -1, -1, 5, 1.0, 0.0)
    out, lse = cpu.forward(*arguments)
    gradients = cpu.backward(out, arguments[0], out, lse, arguments[1])
    for t in (out, lse, *gradients):
        assert t.numel() > 0 and t.isnan().all()

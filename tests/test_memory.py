"""No buffer of order L x K: peak memory of a call in a process of its own, as the system measures it; and of
the GPU backends, which are not measured so, what they allocate."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from helpers import allocations, each_fused, inputs, key_range, python, randn_like, run

from txl_kernels import gpu
from txl_kernels.reference import reference

MB = 10**6

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
# Of a GPU the system knows nothing; an interpreter's memory, or an emulation's, tells nothing.
each_on_cpu = pytest.mark.parametrize("backend", [p for p in each_fused() if p.id == "cpu"])

# Prints the peak of resident memory during the call, less what was resident before it, less the tensors that
# it returned. The first, small call loads libraries and starts threads.
MEASURE = """
import json, sys
import torch
from helpers import BACKENDS, inputs, peak_growth, randn_like, run

job = json.loads(sys.argv[1])
backend = next(b for b in BACKENDS if b.name == job["backend"])
dtype = getattr(torch, job["dtype"])
options = dict(job["options"], **({"dropout_seed": 1} if "dropout_p" in job["options"] else {}))
causal = options.get("causal", True)

def call(**sizes):
    tensors = inputs(**sizes, causal=causal, dtype=dtype)
    dout = randn_like(tensors["q"]) if job["backward"] else None
    peak, results = peak_growth(lambda: run(backend, tensors, dout, **options))
    return peak, sum(t.nbytes for t in results.values())

small = {**job["sizes"], "L": min(40, job["sizes"]["L"]), "K": 90}
small["N"] = min(small["N"], 90) if small.get("N") else None
call(**small)
peak, returned = call(**job["sizes"])
print(peak - returned)
"""


def extra(backend: str, sizes: dict, options=None, dtype="float32", backward=True) -> int:
    job = dict(backend=backend, sizes=sizes, options=options or {}, dtype=dtype, backward=backward)
    return int(python(f"import sys; sys.argv.append({json.dumps(json.dumps(job))})\n" + MEASURE).stdout)


SCORES = 8 * 1900 * 3800 * 4  # what one buffer of all scores would take at the published shape: 220 MiB
PUBLISHED = dict(B=1, H=8, L=1900, K=3800, D=64)


@linux
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
@linux
@each_on_cpu
def test_published_shape(backend, options, backward):
    assert extra(backend.name, PUBLISHED, options, backward=backward) < 40 * MB < SCORES


@pytest.mark.parametrize("dtype, most", [("float64", 48), ("bfloat16", 40)])
@linux
@each_on_cpu
def test_other_dtypes(backend, dtype, most):
    """Of float64 a head's sums take as much as two heads' of float32."""
    assert extra(backend.name, dict(PUBLISHED, H=4), dtype=dtype) < most * MB


@linux
@each_on_cpu
def test_clamp(backend):
    assert extra(backend.name, dict(PUBLISHED, N=1001)) < 40 * MB


@linux
@each_on_cpu
def test_long_sequence(backend):
    """One head, 8,192 keys: scores would take 256 MiB; what is needed grows with the length alone. (Most
    by AMX's tiles: three bfloat16 for a number.)"""
    assert extra(backend.name, dict(B=1, H=1, L=8192, K=8192, D=32)) < 48 * MB


@pytest.mark.parametrize("L", [1, 8])
@linux
@each_on_cpu
def test_decode(backend, L):
    """No copy of the memory: k and v take 61 MiB each."""
    sizes = dict(B=1, H=8, L=L, K=30_000, D=64)
    assert extra(backend.name, sizes, backward=False) < 10 * MB


# ---- What GPU backends allocate ----------------------------------------------------------------------------


LONG = dict(H=1, L=320, K=700, D=16)
PAIRS = LONG["L"] * LONG["K"]


def test_allocations_are_seen():
    """The reference forms all scores, so they must be."""
    assert allocations(lambda: reference(*inputs(**LONG).values()))[-1] >= 4 * PAIRS


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    "backend", [p for p in each_fused() if p.id != "cpu" and p.values[0].device == "cpu"]
)
def test_gpu_backends_allocate_nothing_of_the_size_of_scores(backend, dropout_p, monkeypatch):
    """Where they run on the CPU. A GPU's memory is measured in test_triton_gpu.py."""
    # 64 rows of the gradient of scores, instead of as many as 1 GiB holds
    monkeypatch.setattr(gpu, "SLOPE_BYTES", 0)
    sizes = dict(LONG) if backend.name == "triton" else dict(LONG, L=1300, K=1500)
    tensors = inputs(**sizes, dtype=backend.dtypes[0])
    options = dict(key_range=key_range((7, sizes["K"] - 3)), dropout_p=dropout_p, dropout_seed=1)
    taken = allocations(lambda: run(backend, tensors, randn_like(tensors["q"]), **options))
    assert tensors["q"].nbytes <= taken[-1] < sizes["L"] * sizes["K"]


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
    """With kernels that write nothing, all that Python allocates for them is NaN: what a kernel leaves out is
    seen. (What C++ allocates for forward comes from the same functions of torch.)"""
    from txl_kernels import cpu
    from txl_kernels.registry import Inputs, Options, new_results

    class NoKernels:
        class cpu_backward:
            default = staticmethod(lambda *args: None)

    assert cpu.unavailable() is None
    tensors = inputs(B=2, L=4, K=6, dtype=dtype)
    monkeypatch.setattr(torch.ops, "txl_kernels", NoKernels)
    out, lse = new_results(tensors["q"])
    of, options = Inputs(*tensors.values(), None, None), Options(True, -1, -1, 5, 1.0, 0.0)
    gradients = cpu.backward(out, of, out, lse, (True, True, True), options)
    for t in (out, lse, *gradients):
        assert t.numel() > 0 and t.isnan().all()

"""What the test files share: the backends, inputs, and how results are compared.

Truth is the float64 reference. The yardstick for an error is the error that plain PyTorch makes with the same
formula at the same dtype (`plain`), as in flash-attention's tests.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from interpreter import INTERPRET

import txl_kernels
from txl_kernels import BackendUnavailable, cpu, cuda, philox, rel_attention
from txl_kernels.reference import reference

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

TENSORS = ("q", "k", "v", "r", "bias_u", "bias_v")


# ---- backends ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    name: str
    device: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def marks(self):
        return [pytest.mark.gpu] if self.device == "cuda" else []


# Triton's kernels run on CPU tensors, where the environment says so; the interpreter has no bfloat16. So do
# the CUDA kernels, built by tests/cuda_emulation/build_emulation.py; the variable names the library.
# float16, which takes bfloat16's instructions by other names, is left to test_cuda.py there.
EMULATED = bool(os.environ.get("TXL_CUDA_EMULATION"))

# A new backend joins every test by its row here.
BACKENDS = (
    Backend("reference", "cpu", (f32, f64, bf16)),
    Backend("cpu", "cpu", (f32, f64, bf16)),
    Backend("triton", "cpu", (f32, f16)) if INTERPRET else Backend("triton", "cuda", (f32, bf16, f16)),
    Backend("cuda", "cpu", (f32, bf16)) if EMULATED else Backend("cuda", "cuda", (f32, bf16, f16)),
)
FUSED = tuple(b.name for b in BACKENDS if b.name != "reference")


@functools.cache
def why_not(name: str) -> str | None:
    """None if the backend can run here, else why it cannot."""
    backend = next(b for b in BACKENDS if b.name == name)
    if backend.device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    try:
        t = inputs(L=1, K=1, D=1, dtype=backend.dtypes[0], device=backend.device)
        rel_attention(*(t[name] for name in TENSORS), backend=name)
    except BackendUnavailable as error:
        return str(error)
    except Exception:
        return None  # its own tests fail then and say of what, the other backends' run
    return None


def available() -> list[Backend]:
    return [b for b in BACKENDS if why_not(b.name) is None]


def each_backend(dtype: torch.dtype | None = None):
    """Parameters for `backend`: every available one (that has `dtype`)."""
    return [
        pytest.param(b, id=b.name, marks=b.marks) for b in available() if dtype is None or dtype in b.dtypes
    ]


def each_fused(dtype: torch.dtype | None = None):
    """Parameters for `backend`: the available kernels, without the reference."""
    return [p for p in each_backend(dtype) if p.id in FUSED]


def each_dtype(exact: bool = False, only: tuple[str, ...] | None = None):
    """Parameters for `backend, dtype`; only: of these backends. The reference in float64 is the truth of most
    tests, so it is left out unless the test knows the truth by other means (`exact`)."""
    return [
        pytest.param(b, dtype, id=f"{b.name}-{str(dtype).removeprefix('torch.')}", marks=b.marks)
        for b in available()
        if only is None or b.name in only
        for dtype in b.dtypes
        if exact or (b.name, dtype) != ("reference", f64)
    ]


def cpu_levels() -> list[str]:
    """Vector levels of the cpu backend that are built and that this CPU runs, best last."""
    return torch.ops.txl_kernels.cpu_levels().split(",") if why_not("cpu") is None else []


# ---- inputs ------------------------------------------------------------------------------------------------


def inputs(
    B=1, H=2, L=5, K=9, D=8, N=None, *, causal=True, dtype=f32, device="cpu", bias=True, seed=0, scale=1.0
) -> dict[str, torch.Tensor | None]:
    """Random q [B, H, L, D], k, v [B, H, K, D], r [H, N, D], bias_u, bias_v [H, D] by name.

    Drawn in float64 and rounded, so that every dtype sees the same numbers as nearly as it can.
    """
    if N is None:
        N = K if causal else K + L - 1
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator, dtype=f64) * scale).to(device, dtype)

    return {
        "q": draw(B, H, L, D),
        "k": draw(B, H, K, D),
        "v": draw(B, H, K, D),
        "r": draw(H, N, D),
        "bias_u": draw(H, D) if bias else None,
        "bias_v": draw(H, D) if bias else None,
    }


def randn_like(t: torch.Tensor, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(t.shape, generator=generator, dtype=f64).to(t.device, t.dtype)


def key_range(*pairs, device="cpu") -> torch.Tensor:
    return torch.tensor(pairs, dtype=torch.int32, device=device)


def distances(L: int, K: int) -> torch.Tensor:
    """d(i, j) [L, K]."""
    return torch.arange(L)[:, None] + (K - L) - torch.arange(K)[None, :]


def allowed(B, L, K, *, causal=True, window_size=(-1, -1), key_range=None, **_) -> torch.Tensor:
    """Which key j query i of batch entry b may see [B, 1, L, K]."""
    d = distances(L, K)
    seen = torch.ones(B, 1, L, K, dtype=torch.bool)
    left, right = window_size
    if causal:
        seen &= d >= 0
    if left >= 0:
        seen &= d <= left
    if right >= 0:
        seen &= -d <= right
    if key_range is not None:
        start, end = key_range.cpu().long()[:, :, None, None, None].unbind(1)  # [B, 1, 1, 1]
        j = torch.arange(K)
        seen &= (start <= j) & (j < end)
    return seen


def rows_of_r(L: int, K: int, N: int, r_zero: int) -> torch.Tensor:
    """The row of r that stands for d(i, j) [L, K]."""
    return (r_zero - distances(L, K)).clamp(0, N - 1)


# ---- run, compare ------------------------------------------------------------------------------------------


def no_room(backend: Backend, q: torch.Tensor) -> str | None:
    """Why rows as long as q's, which not all GPUs have room for, cannot be tested here; None if they can."""
    wide = backend.name == "cuda" and q.shape[-1] * q.dtype.itemsize > cuda._WIDE_ROW
    return cuda.unsupported(q.device, q.dtype, q.shape[-1]) if wide else None


def run(attention, tensors: dict, dout: torch.Tensor | None = None, **options) -> dict[str, torch.Tensor]:
    """out and lse of `attention` (a Backend, or a function such as `reference`), and for a `dout` the
    gradient of every input as "dq", ..., "dbias_v"."""
    if isinstance(attention, Backend):
        if reason := no_room(attention, tensors["q"]):
            pytest.skip(reason)
        attention = functools.partial(rel_attention, backend=attention.name)
    leaves = {
        n: None if t is None else t.detach().requires_grad_(dout is not None) for n, t in tensors.items()
    }
    out, lse = attention(*(leaves[n] for n in TENSORS), return_lse=True, **options)
    results = {"out": out.detach(), "lse": lse.detach()}
    if dout is not None:
        out.backward(dout)
        results.update({f"d{n}": t.grad for n, t in leaves.items() if t is not None})
    return results


def upcast(tensors: dict) -> dict:
    return {n: None if t is None else t.detach().double().cpu() for n, t in tensors.items()}


def on_cpu(options: dict) -> dict:
    return {n: o.cpu() if isinstance(o, torch.Tensor) else o for n, o in options.items()}


def truth(tensors: dict, dout=None, **options) -> dict[str, torch.Tensor]:
    """The float64 reference on the same (already rounded) numbers."""
    return run(reference, upcast(tensors), None if dout is None else dout.double().cpu(), **on_cpu(options))


def plain(tensors: dict, dout=None, **options) -> dict[str, torch.Tensor]:
    """The same formula with every step in the dtype of the inputs: what plain PyTorch loses at that dtype."""
    return run(functools.partial(reference, upcast=False), tensors, dout, **options)


# Norm of the error over norm of the result. No formula at that dtype is worse unless terms cancel; then
# plain PyTorch's own error is the yardstick.
RELATIVE = {f64: 1e-13, f32: 5e-6, bf16: 1.5e-2, f16: 2e-3}
# Units in the last place, of the largest value, below which a comparison with plain PyTorch means nothing. In
# float64 plain PyTorch is the truth itself, and this is the whole bound.
FLOOR = {f64: 1000, f32: 16, bf16: 1, f16: 1}


def assert_accurate(got: dict, exact: dict, plain: dict, dtype: torch.dtype, few=False) -> None:
    """At most twice the error of plain PyTorch at the same dtype, by the largest error and by the mean.

    -inf must be where it should, NaN nowhere. With few numbers luck decides, and a search finds the worst:
    `few` takes plain PyTorch's worst relative error of all gradients for each, and floors ten times as high.
    """
    finite = exact["lse"][exact["lse"].isfinite()]
    # exp turns the rounding of a score, and of the lse that backward rebuilds probabilities from, into a
    # relative error: large scores cost every formula digits, though one that is lucky shows it less.
    accumulated = torch.finfo(f64 if dtype == f64 else f32).eps
    relative = 4 * accumulated * (finite.abs().max().item() if len(finite) else 0.0)

    def error(results, name):
        """Largest error, root mean square error and root mean square value, in units of the largest value."""
        e = exact[name].masked_fill(exact[name].isinf(), 0.0)
        size = e.abs().max().item()
        if name == "lse":  # near zero, by its two terms cancelling
            size = max(size, 4.0)
        elif name != "out" and exact["dv"].numel() > 0:
            # Gradients through the scores may cancel (one key, one row of r); dv does not: has their size.
            size = max(size, exact["dv"].abs().max().item())
        difference = results[name].double().cpu().masked_fill(exact[name].isinf(), 0.0) - e
        scaled, values = difference.abs() / (size or 1.0), e / (size or 1.0)
        return scaled.max().item(), scaled.square().mean().sqrt().item(), values.square().mean().sqrt().item()

    names = [n for n in got if got[n].numel() > 0]
    yardsticks = {n: error(plain, n)[:2] for n in names}
    if few:
        gradients = [yardsticks[n] for n in names if n.startswith("d")]
        worst = tuple(map(max, zip(*gradients, strict=True)))
        yardsticks.update({n: worst for n in names if n.startswith("d")})
    for name in names:
        g, e = got[name].double().cpu(), exact[name]
        assert g.shape == e.shape, f"{name}: shape {tuple(g.shape)}, not {tuple(e.shape)}"
        assert torch.equal(g.isinf() & (g == e), e.isinf()), f"{name}: infinities differ"
        assert not g.isnan().any(), f"{name}: {g.isnan().sum()} of {g.numel()} are NaN"
        largest, mean, norm = error(got, name)
        plain_largest, plain_mean = yardsticks[name]
        slack = 10 if few else 1
        floor = slack * FLOOR[dtype] * torch.finfo(dtype).eps
        # dP - dO.out, where a softmax is nearly one-hot, and its sums, which the biases get, cancel: the
        # rounding of out, which backward is given, remains, and that of dS, which GPU kernels keep. Of the
        # biases' gradients the largest error is some 2.5 times the mean.
        sums = torch.finfo(dtype).eps if "bias" in name else 0.0
        assert largest <= 2 * plain_largest + floor + relative + 2 * sums, (
            f"{name}: error of {largest:.3g} of the largest value, plain {dtype} makes {plain_largest:.3g}"
        )
        if name == "lse" and dtype in (bf16, f16):  # which plain PyTorch rounds it to, kernels do not
            assert largest <= torch.finfo(dtype).eps, f"lse: error of {largest:.3g} of the largest value"
        # The mean of a few numbers is as much a matter of luck as the largest of them.
        lucky = norm < 1e-6 or (few and g.numel() < 32)
        rounded = torch.finfo(dtype).eps if few else sums
        cancelled = rounded + (floor if lucky else 4 * slack * accumulated)
        assert mean <= max((slack * RELATIVE[dtype] + relative) * norm + cancelled, 2 * plain_mean), (
            f"{name}: mean error {mean:.3g} where values are {norm:.3g}, plain {dtype} makes {plain_mean:.3g}"
        )


def assert_untouched(got: torch.Tensor, clean: torch.Tensor, dtype: torch.dtype, roundings: int = 0) -> None:
    """What a NaN elsewhere must leave alone: the same bits or, where sums may be in another order, within
    `roundings` eps of the largest. At least two in bfloat16: products of pairs cannot keep NaN apart, so a
    kernel may compute such inputs by another arithmetic, which rounds otherwise."""
    roundings = max(roundings, 2) if dtype == bf16 else roundings
    if not roundings:
        assert torch.equal(got, clean)
    elif clean.numel() > 0:
        largest = clean.abs().masked_fill(clean.isinf(), 0.0).max().item()
        torch.testing.assert_close(got, clean, rtol=0, atol=roundings * torch.finfo(dtype).eps * largest)


def check(backend: Backend, tensors: dict, backward=True, **options) -> dict[str, torch.Tensor]:
    """Run the backend forward (and backward) and hold it to `assert_accurate`. Returns its results."""
    dtype = tensors["q"].dtype
    dout = randn_like(tensors["q"]) if backward else None
    got = run(backend, tensors, dout, **options)
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == (f64 if dtype == f64 else f32)
    assert_accurate(got, truth(tensors, dout, **options), plain(tensors, dout, **options), dtype)
    return got


def assert_value(backend: Backend, got: torch.Tensor, value: torch.Tensor) -> None:
    """A weight of 1 leaves a value as it is; in float32 its first 21 bits, where backend "cuda" multiplies it
    as a sum of two tf32, and on GPUs, where score * scale - base is rounded once: no weight is quite 1."""
    if value.dtype == f32 and (backend.name == "cuda" or backend.device == "cuda"):
        torch.testing.assert_close(got, value, rtol=2**-21, atol=0)
    else:
        assert torch.equal(got, value)


def assert_same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        # torch.equal calls NaN unequal to itself, as it should: results hold none.
        assert torch.equal(a[name], b[name]), f"{name} differs"


def assert_same(backend, a, b):
    """The same bits from a kernel. PyTorch chooses its product routine by layout: the reference may round
    otherwise."""
    if backend.name != "reference":
        assert_same_bits(a, b)
        return
    for name in a:
        eps = torch.finfo(a[name].dtype).eps
        torch.testing.assert_close(a[name], b[name], rtol=8 * eps, atol=64 * eps)


@contextlib.contextmanager
def poison(on: bool = True):
    """Uninitialised tensors hold NaN (integers: their maximum). torch's deterministic mode fills them inside
    the allocating operators, so allocations made by C++ are poisoned like those made by Python."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filling


def peak_growth(call) -> tuple[int, object]:
    """By how many bytes resident memory is larger at its peak during a call than before; and what the call
    returns. In a process of its own, on Linux."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    before = resident("VmRSS")
    with contextlib.suppress(OSError):  # then the peak may be an earlier, higher one: never too low
        Path("/proc/self/clear_refs").write_text("5")  # start the peak again
    result = call()
    return resident("VmHWM") - before, result


def allocations(call) -> list[int]:
    """Bytes of every buffer that torch's allocator for the CPU hands out during a call, least first; what C++
    allocates included."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return sorted(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0)


# ---- in a process of its own -------------------------------------------------------------------------------


def build(folder: Path, **environment: str) -> None:
    """The package again in `folder`, with C++ libraries built under these environment variables."""
    shutil.copytree(
        ROOT / "txl_kernels", folder / "txl_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(folder)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def python(code: str, *, timeout=300, check=True, cwd=TESTS, **environment) -> subprocess.CompletedProcess:
    """Run `code` in a fresh interpreter that can import these helpers; None in `environment` unsets."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment}
    env = {n: v for n, v in env.items() if v is not None}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env
    )
    if check and done.returncode != 0:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done


# One call of every kind: sizes around tiles, masks, clamps, dropout, decode. What runs under sanitizers and
# at each vector level.
BROAD = [
    (dict(B=1, H=1, L=1, K=1, D=1), {}),
    (dict(B=2, H=2, L=3, K=7, D=41), {}),
    (dict(B=1, H=2, L=113, K=203, D=64), {}),
    (dict(B=1, H=1, L=239, K=239, D=33), dict(dropout_p=0.3, dropout_seed=7)),
    (dict(B=2, H=1, L=128, K=217, D=31, N=50), {}),
    (dict(B=1, H=1, L=65, K=300, D=16, N=20), dict(r_zero=7)),
    (dict(B=1, H=2, L=70, K=140, D=100, causal=False), {}),
    (
        dict(B=1, H=1, L=70, K=140, D=3, causal=False),
        dict(window_size=(9, 30), dropout_p=0.5, dropout_seed=-1),
    ),
    (dict(B=1, H=2, L=90, K=400, D=80), dict(window_size=(17, 0))),
    (dict(B=3, H=1, L=40, K=150, D=64), dict(key_range=((100, 150), (149, 3), (-5, 120)))),
    (dict(B=1, H=1, L=5, K=333, D=256), dict(scale=0.02)),
    (dict(B=1, H=2, L=1, K=1023, D=64), {}),
    (dict(B=1, H=1, L=1, K=300, D=8, N=5), dict(r_zero=2**62 - 1)),
    (dict(B=2, H=1, L=4, K=517, D=255, N=100), dict(key_range=((3, 517), (400, 401)))),
    (dict(B=1, H=1, L=40, K=64, D=17, bias=False), dict(r_zero=-9, causal=False)),
    (dict(B=0, H=2, L=4, K=5, D=8), {}),
]


def roundings_by_tiles(backend: Backend, dtype: torch.dtype) -> int:
    """float32 by AMX's tiles, as the sum of three bfloat16, cannot keep NaN apart: such a call is computed by
    vectors then, and every number of it is rounded otherwise."""
    return 16 if backend.name == "cpu" and dtype == f32 and cpu.details()["level"] == "amx_bf16" else 0


def check_not_finite(backend: Backend, dtype: torch.dtype) -> None:
    """One NaN among many keys: forward and backward finish, and the other head does not notice."""
    tensors = inputs(B=1, H=2, L=70, K=3000, D=16, dtype=dtype, device=backend.device, scale=0.3)
    dout = randn_like(tensors["q"])
    clean = run(backend, tensors, dout)
    for name in ("q", "k", "v", "r"):
        spoilt = dict(tensors, **{name: tensors[name].clone()})
        spoilt[name].flatten(0, -3)[0, 30] = math.nan
        got = run(backend, spoilt, dout)
        for result in got:
            other, expected = (results[result].flatten().chunk(2)[1] for results in (got, clean))
            assert_untouched(other, expected, dtype, roundings=roundings_by_tiles(backend, dtype))


def check_broadly(name: str, dtypes: tuple[torch.dtype, ...] | None = None) -> int:
    """Every case of BROAD, contiguous and then as slices of larger tensors; returns how many ran."""
    backend = next(b for b in BACKENDS if b.name == name)
    count = 0
    with poison():
        for dtype in dtypes or backend.dtypes:
            for sizes, options in BROAD:
                sizes = {"causal": options.get("causal", True), **sizes}
                options = {"causal": sizes["causal"], **options}
                if "key_range" in options:
                    options["key_range"] = key_range(*options["key_range"], device=backend.device)
                tensors = inputs(**sizes, dtype=dtype, device=backend.device)
                contiguous = check(backend, tensors, **options)
                sliced = run(
                    backend,
                    {n: None if t is None else inside_larger(t) for n, t in tensors.items()},
                    inside_larger(randn_like(tensors["q"])),
                    **options,
                )
                assert_same_bits(contiguous, sliced)
                count += 2
            if name == "cpu":
                check_not_finite(backend, dtype)
                check_linear(3, 131, 513, dtype)
                check_dropout((3, 41, 67), 0.3, dtype)
                check_layers(dtype, norm_first=False)
                check_layers(dtype, norm_first=True)
                count += 5
    return count


def check_linear(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> None:
    """`txl_kernels.linear` against float64, with and without bias, between neighbours that are NaN."""
    eps = torch.finfo(dtype).eps
    x, weight = (inside_larger(torch.randn(n, depth).to(dtype)) for n in (rows, outputs))
    bias = torch.randn(outputs).to(dtype)
    for b in (bias, None):
        with torch.no_grad():
            got = txl_kernels.linear(x, weight, b)
        exact, size = (
            f(x.double()) @ f(weight.double()).T + (0 if b is None else f(b.double()))
            for f in (lambda t: t, torch.abs)
        )
        assert got.dtype == dtype
        # Sums are in float32 or better; the result is rounded once.
        assert ((got.double() - exact).abs() <= eps * exact.abs() + 1e-6 * size).all()


def check_dropout(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    """`txl_kernels.dropout` and its gradient drop what the definition says, alone and after ReLU."""
    x, dy = (inside_larger(torch.randn(shape).to(dtype)) for _ in range(2))
    for relu in (False, True):
        torch.manual_seed(5)
        leaf = x.detach().requires_grad_()
        y = txl_kernels.dropout(leaf, p, relu)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        torch.manual_seed(5)
        seed = philox.seed_tensor(None, torch.device("cpu"))
        keep = philox.keep_mask(seed, p, 1, 1, 1, x.numel(), "cpu").view(shape)
        if relu:
            keep &= x > 0
        for got, of in ((y, x), (dx, dy)):
            wanted = torch.where(keep, of.double() / (1 - p), 0.0)
            assert got.dtype == dtype and not got[~keep].any()
            torch.testing.assert_close(got.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=0)


def layer_inputs(B=2, L=2, H=2, D=17, width=37, d_inner=70, n_layer=2, memory=40, N=30) -> dict[str, Any]:
    """Arguments of `cpu.layers` in float64: h, and of each layer what it remembers, its r and its weights."""

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5

    shapes = [(H, D), (H, D), (3 * H * D, width), (width, H * D), (width,), (width,)]
    shapes += [(d_inner, width), (d_inner,), (width, d_inner), (width,), (width,), (width,)]
    return {
        "h": torch.randn(B, L, width, dtype=torch.float64),
        "keys_values": [some(2, B, H, memory + L + 5, D) for _ in range(n_layer)],
        "begin": 3,
        "end": 3 + memory + L,
        "r": [some(H, N, D) for _ in range(n_layer)],
        "weights": [some(*shape) for _ in range(n_layer) for shape in shapes],
        "key_range": key_range((2, memory + L), (0, 30 + L))[:B] if B > 1 else None,
        "window_left": 33,
        "scale": 1.3,
        "eps": 1e-5,
        "norm_first": False,
    }


def cast_layers(x: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy of `layer_inputs` in this dtype."""
    cast = {n: [t.to(dtype, copy=True) for t in x[n]] for n in ("keys_values", "r", "weights")}
    return {**x, "h": x["h"].to(dtype, copy=True), **cast}


def plain_layers(h, keys_values, begin, end, r, weights, key_range, window_left, scale, eps, norm_first):
    """`cpu.layers` in PyTorch."""
    linear, norm = torch.nn.functional.linear, torch.nn.functional.layer_norm
    L, width = h.shape[1], h.shape[2:]
    for i, (kv, positions) in enumerate(zip(keys_values, r, strict=True)):
        u, v, qkv, o, gain_1, shift_1, *halves, gain_2, shift_2 = weights[12 * i : 12 * i + 12]
        inner, inner_bias, outer, outer_bias = halves
        x = norm(h, width, gain_1, shift_1, eps) if norm_first else h
        heads = linear(x, qkv).unflatten(-1, (3, *u.shape)).permute(2, 0, 3, 1, 4)  # [3, B, H, L, D]
        kv[:, :, :, end - L : end] = heads[1:]
        keys, values = kv[:, :, :, begin:end]
        options = dict(window_size=(window_left, -1), key_range=key_range, scale=scale)
        seen = reference(heads[0], keys, values, positions, u, v, **options)
        h = h + linear(seen.transpose(1, 2).flatten(2), o)
        h = h if norm_first else norm(h, width, gain_1, shift_1, eps)
        x = norm(h, width, gain_2, shift_2, eps) if norm_first else h
        h = h + linear(linear(x, inner, inner_bias).relu(), outer, outer_bias)
        h = h if norm_first else norm(h, width, gain_2, shift_2, eps)
    return h


def check_layers(dtype: torch.dtype, norm_first: bool, **sizes: int) -> None:
    """`cpu.layers` against float64: its result, and the keys and values it writes, and only those."""
    exact = layer_inputs(**sizes) | {"norm_first": norm_first}
    given, plain = cast_layers(exact, dtype), cast_layers(exact, dtype)
    begin, end, L = exact["begin"], exact["end"], exact["h"].shape[1]
    for kv in given["keys_values"]:  # what nobody may read
        for outside in (kv[:, :, :, :begin], kv[:, :, :, end - L :]):
            outside.fill_(math.nan)
    with torch.no_grad():
        got, of_torch, want = cpu.layers(**given), plain_layers(**plain), plain_layers(**exact)
    assert got.dtype == dtype

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        return (x.double() - y).norm().item()

    room = 4 * torch.finfo(dtype).eps
    assert error(got, want) <= 2 * error(of_torch, want) + room * want.norm()
    for kvs in zip(*(x["keys_values"] for x in (given, plain, exact)), strict=True):
        mine, theirs, wanted = (kv[:, :, :, begin:end] for kv in kvs)
        assert error(mine, wanted) <= 2 * error(theirs, wanted) + room * wanted.norm()
        assert kvs[0][:, :, :, :begin].isnan().all() and kvs[0][:, :, :, end:].isnan().all()


def inside_larger(t: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger tensor of NaN: every stride but the last is odd, and the first
    element is not aligned. A kernel that takes a stride for a size reads NaN."""
    larger = torch.full([n + 3 for n in t.shape], math.nan, dtype=t.dtype, device=t.device)
    view = larger[tuple(slice(1, 1 + n) for n in t.shape)]
    view.copy_(t)
    return view

"""Backend "cuda" without a GPU: its kernels, built for the CPU on top of tests/cuda_emulation/.

The contract's own tests run on it too:

    TXL_CUDA_EMULATION=$(python tests/cuda_emulation/build_emulation.py) pytest -k cuda

Without that variable this file builds the library and runs itself that way, in a process of its own.
"""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from helpers import (
    BACKENDS,
    EMULATED,
    ROOT,
    TESTS,
    assert_accurate,
    assert_same_bits,
    bf16,
    check,
    f16,
    f32,
    inputs,
    key_range,
    plain,
    randn_like,
    run,
    truth,
)

from txl_kernels import BackendUnavailable, cuda, gpu, registry, rel_attention
from txl_kernels.registry import Inputs

sys.path.insert(0, str(TESTS / "cuda_emulation"))
import build_emulation

sys.path.insert(0, str(ROOT / "csrc"))
import cuda_build

emulated = pytest.mark.skipif(not EMULATED, reason="needs TXL_CUDA_EMULATION")
CUDA = next(b for b in BACKENDS if b.name == "cuda")


@pytest.mark.skipif(EMULATED, reason="needs TXL_CUDA_EMULATION unset")
def test_the_kernels_in_the_emulation():
    environment = {**os.environ, "TXL_CUDA_EMULATION": str(build_emulation.build())}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# A head dimension of every class, one at its end and one that 16 bytes do not divide.
CASES = [
    dict(D=64, L=70, K=130),
    dict(D=41, L=70, K=200, N=90),
    dict(D=20, L=130, K=260, causal=False),
    dict(D=96, L=65, K=129, window_size=(40, -1)),
    dict(D=128, L=40, K=200, N=70, causal=False, r_zero=30),
    dict(D=200, L=20, K=90),
    dict(D=256, L=17, K=60, dropout_p=0.3, dropout_seed=7),
    dict(D=64, L=70, K=150, dropout_p=0.5, dropout_seed=7),
    dict(D=64, L=1, K=900, N=300),
    dict(D=128, L=16, K=700, window_size=(500, -1)),
    dict(D=64, L=64, K=128, B=2, key_range=((3, 100), (128, 128))),
    dict(D=64, L=30, K=70, scale=-0.3, bias=False),
    # Several blocks, far tiles between others; a block whose second half has one query; dropout across both.
    dict(D=64, L=300, K=700, N=250),
    dict(D=64, L=400, K=900, window_size=(300, -1)),
    dict(D=48, L=250, K=300, N=100, causal=False, r_zero=30, window_size=(120, 70)),
    dict(D=64, L=200, K=560, N=120, B=2, key_range=((40, 500), (0, 300))),
    dict(D=128, L=193, K=500, N=600, causal=False, r_zero=200, window_size=(150, 60)),
    # Between a warpgroup's first whole tile of queries and tiles of the last row of r there are masked ones.
    dict(D=64, L=256, K=256, N=65, causal=False, r_zero=64, window_size=(-1, 196)),
    dict(D=128, L=450, K=450, N=129, causal=False, r_zero=64, window_size=(256, 256)),
    dict(D=100, L=130, K=450, dropout_p=0.3, dropout_seed=7),
    dict(D=128, L=200, K=600),
    # Less than a tile.
    dict(D=72, L=20, K=40, N=20),
    dict(D=8, L=17, K=30),
    # The workspace ends behind its last queries.
    dict(D=64, L=1, K=1),
    dict(D=128, L=1, K=3),
]


def check_case(case, dtype, **options):
    case = dict(case)
    sizes = {n: case.pop(n) for n in ("B", "L", "K", "N", "D", "bias") if n in case}
    if "key_range" in case:
        case["key_range"] = key_range(*case["key_range"])
    check(CUDA, inputs(**sizes, causal=case.get("causal", True), dtype=dtype), **case, **options)


def name_of(case):
    return ", ".join(f"{n} {v}" for n, v in case.items())


@emulated
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_against_the_reference(case, dtype):
    check_case(case, dtype)


@emulated
@pytest.mark.parametrize("dtype", [bf16, f16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", [c for c in CASES if c["D"] <= 128], ids=name_of)
def test_by_warpgroups(case, dtype, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "WARPGROUPS", True)
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    D, forward = case["D"], case["L"] > 16
    backward = 32 < D <= 64 or 96 < D <= 128
    check_case(case, dtype, backward=backward)
    ran = (tmp_path / "trace").read_text().splitlines()
    blocks = [line for line in ran if "ForwardKernel" in line or "DkDvKernel" in line]
    assert sum("WarpgroupQueryBlock" in line for line in blocks) == forward
    assert sum("WarpgroupKeyBlock" in line for line in blocks) == backward
    for block in ("WarpgroupSlopeBlock", "WarpgroupRowBlock"):
        assert sum(block in line for line in ran) == backward
    assert len(blocks) == 1 + backward
    assert (boxes(ran) > 0) == (forward or backward)


@emulated
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(N=90, window_size=(150, 20), causal=False, r_zero=60),
        dict(N=40, key_range=((0, 230), (60, 61), (5, 5)), dropout_p=0.3, dropout_seed=3),
    ],
    ids=["plain", "clamped", "dropped"],
)
@pytest.mark.parametrize(
    "dtype, D, warpgroups",
    [(bf16, 64, False), (f16, 200, False), (f32, 50, False), (bf16, 64, True), (f16, 128, True)],
    ids=["bfloat16", "float16", "float32", "bfloat16 by warpgroups", "float16 by warpgroups"],
)
def test_the_gradient_of_scores_in_parts(monkeypatch, tmp_path, options, dtype, D, warpgroups):
    if warpgroups and not options:
        pytest.skip("the other options have all of it")
    monkeypatch.setattr(cuda, "WARPGROUPS", warpgroups)
    options = dict(options)
    if "key_range" in options:
        options["key_range"] = key_range(*options["key_range"])
    tensors = inputs(B=3, H=2, L=150, K=230, D=D, N=options.pop("N", None), dtype=dtype)
    dout = randn_like(tensors["q"])
    whole, *exact = (of(tensors, dout, **options) for of in (functools.partial(run, CUDA), truth, plain))
    # Rows of dS, of which a head has 192 here, and how many launches they make of three entries by two heads.
    for rows, launches in [(6 * 192, 1), (4 * 192, 2), (2 * 192, 4), (128, 12), (0, 18)]:
        monkeypatch.setattr(gpu, "SLOPE_BYTES", rows * 256 * dtype.itemsize)
        trace = tmp_path / str(rows)
        monkeypatch.setenv("TXL_EMULATION_TRACE", str(trace))
        parts = run(CUDA, tensors, dout, **options)
        assert sum("DkDvKernel" in line for line in trace.read_text().splitlines()) == launches
        # dk and dv go on where the chunk before has left them; the other sums begin anew.
        assert_same_bits(*({n: of[n] for n in ("dq", "dk", "dv")} for of in (whole, parts)))
        assert_accurate(parts, *exact, dtype)


def boxes(trace):
    """How many the copy engine has copied."""
    return sum(int(line.split("|")[1]) for line in trace)


def of_batch(change, x):
    """r has none."""
    return change(x) if x.dim() == 4 else change(x[None])[0]


def with_rows_of(x, elements, first=0):
    longer = x.new_zeros(*x.shape[:3], elements)[..., first : first + x.shape[3]]
    return longer.copy_(x)


@emulated
@pytest.mark.parametrize(
    "change, copies",
    [
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),  # heads lie between rows
        (lambda x: with_rows_of(x, 80), True),
        # Of these the kernels are given a copy.
        (lambda x: with_rows_of(x, 81), True),
        (lambda x: with_rows_of(x, 80, first=1), True),
        (lambda x: x[:, :1].expand_as(x), False),
    ],
    ids=["heads in turns", "longer rows", "odd rows", "begins in between", "one head for all"],
)
@pytest.mark.parametrize("name", ["k", "v", "r"])
def test_the_copy_engine_copies_a_tensor(name, change, copies, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "WARPGROUPS", True)
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    tensors = inputs(B=2, L=70, K=150, D=48, N=130, dtype=bf16)
    tensors[name] = of_batch(change, tensors[name])
    check(CUDA, tensors, backward=False)
    assert (boxes((tmp_path / "trace").read_text().splitlines()) > 0) == copies


@emulated
@pytest.mark.parametrize("name", ["k", "v", "r"])
def test_backward_is_by_warpgroups_where_the_copy_engine_copies(name, monkeypatch, tmp_path):
    """Values it does not copy."""
    monkeypatch.setattr(cuda, "WARPGROUPS", True)
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    tensors = inputs(B=2, L=70, K=150, D=48, N=130, dtype=bf16)
    tensors[name] = of_batch(lambda x: x[:, :1].expand_as(x), tensors[name])
    check(CUDA, tensors)
    assert ("WarpgroupKeyBlock" in (tmp_path / "trace").read_text()) == (name == "v")


@emulated
@pytest.mark.parametrize("N, of_r", [(128, 2), (100, 1)])
def test_rows_of_r_that_are_not_repeated_come_as_boxes(N, of_r, monkeypatch, tmp_path):
    """A block's two tiles of keys, of values, and of the three of r those that lie within."""
    monkeypatch.setattr(cuda, "WARPGROUPS", True)
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    check(CUDA, inputs(H=3, L=64, K=128, D=64, N=N, dtype=bf16), backward=False)
    assert boxes((tmp_path / "trace").read_text().splitlines()) == 3 * (2 + 2 + of_r)


@emulated
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, torch.finfo(bf16).max])
def test_boxes_bring_keys_that_do_not_exist(D, garbage, monkeypatch):
    monkeypatch.setattr(cuda, "WARPGROUPS", True)
    tensors = inputs(B=2, L=70, K=200, D=D, dtype=bf16)
    options = dict(key_range=key_range((37, 150), (0, 200)))
    expected = run(CUDA, tensors, None, **options)
    for name in ("k", "v"):
        tensors[name][0, :, :37] = tensors[name][0, :, 150:] = garbage
    assert_same_bits(run(CUDA, tensors, None, **options), expected)


@pytest.mark.parametrize(
    "asked, targets",
    [
        ("", "sm_80 sm_90 sm_100 compute_80 sm_90a"),
        ("8.0 9.0+PTX", "sm_80 sm_90 compute_80 sm_90a"),
        ("7.5;9.0a", "sm_90 sm_90a"),
        ("10.0", "sm_100"),
    ],
)
def test_what_is_compiled_for(monkeypatch, asked, targets):
    monkeypatch.setattr(cuda_build, "output_of", lambda command: "sm_75 sm_80 sm_86 sm_90 sm_100")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert cuda_build.Toolkit([], "13.0", cuda_build.find_codes([])).targets == targets.split()


@emulated
@pytest.mark.parametrize(
    "L, splits, dropout_p, block",
    [
        (1, 7, 0, "ForwardBlock<txl::cuda::bf16, 64, 1, true>"),
        (16, 3, 0, "ForwardBlock<txl::cuda::bf16, 64, 1, true>"),
        (16, 4, 0, "ForwardBlock<txl::cuda::bf16, 64, 1, false>"),
        (16, 3, 0.2, "ForwardBlock<txl::cuda::bf16, 64, 4, false>"),
        (70, 2, 0.2, "ForwardBlock<txl::cuda::bf16, 64, 4, false>"),
        (16, 3, 0.2, "WarpgroupQueryBlock"),
        (70, 2, 0.2, "WarpgroupQueryBlock"),
    ],
)
def test_keys_shared_out(monkeypatch, tmp_path, L, splits, dropout_p, block):
    """Few queries on a GPU with many multiprocessors: splits of the keys, one of which no query sees. The
    kernel that joins them is launched early unless blocks come in several rounds."""
    monkeypatch.setattr(cuda, "WARPGROUPS", "64, 4" not in block)
    monkeypatch.setattr(gpu, "processors", lambda device: 1 if splits == 4 else 132)
    monkeypatch.setenv("TXL_EMULATION_TRACE", str(tmp_path / "trace"))
    monkeypatch.setattr(gpu, "key_splits", lambda *_: splits)
    tensors = inputs(L=L, K=900, D=64, N=400, dtype=bf16)
    dropout = dict(dropout_p=dropout_p, dropout_seed=1)
    check(CUDA, tensors, backward=False, **dropout)
    check(CUDA, tensors, backward=False, window_size=(100, -1), **dropout)
    check(CUDA, tensors, backward=False, key_range=key_range((800, 800)), **dropout)
    ran = (tmp_path / "trace").read_text().splitlines()
    assert {block in line or "MergeKernel" in line for line in ran} == {True}
    assert sum("MergeKernel" in line for line in ran) == 3


@emulated
@pytest.mark.parametrize("warpgroups", ["0", "1"])
def test_bits_do_not_depend_on_the_order_of_threads(tmp_path, warpgroups):
    """A race that a barrier hides from the emulation would show; so would a sum whose order is not fixed."""
    script = f"""
import sys; sys.path.insert(0, {str(TESTS)!r})
from helpers import *
got = {{}}
for D in (41, 128):
    t = inputs(B=2, L=70, K=150, D=D, N=100, dtype=bf16)
    cuda = next(b for b in BACKENDS if b.name == "cuda")
    of_one = run(cuda, t, randn_like(t["q"]), dropout_p=0.2, dropout_seed=3)
    got.update((f"{{name}} {{D}}", x) for name, x in of_one.items())
torch.save(got, sys.argv[1])
"""

    def bits(**environment):
        path = tmp_path / "-".join(("bits", *environment.values()))
        subprocess.run(
            [sys.executable, "-c", script, path],
            env={
                **os.environ,
                "TXL_CUDA_WARPGROUPS": warpgroups,
                **environment,
            },
            cwd=ROOT,
            check=True,
        )
        return torch.load(path, weights_only=True)

    assert_same_bits(bits(), bits(TXL_EMULATION_REVERSE="1"))


@emulated
def test_memory_beyond_the_tensors_is_not_touched():
    """The emulation allows a call's tensors only, to their last element; here they are parts of others."""
    t = inputs(L=33, K=65, D=40, dtype=bf16)
    inside = {n: None if x is None else torch.cat([x, x], -1)[..., : x.shape[-1]] for n, x in t.items()}
    dout = randn_like(t["q"])
    assert_same_bits(run(CUDA, t, dout), run(CUDA, inside, dout))


@emulated
def test_a_head_too_long_for_float32():
    q = torch.randn(1, 1, 2, 129, dtype=f32)
    with pytest.raises(
        BackendUnavailable, match=r"needs D <= 128 in float32, q has 129; backend='triton' may serve"
    ):
        rel_attention(q, q, q, q[0], backend="cuda")


@emulated
@pytest.mark.parametrize("dtype, widest", [(bf16, 128), (f32, 64)], ids=["bfloat16", "float32"])
def test_a_head_that_needs_more_shared_memory_than_the_gpu_has(monkeypatch, dtype, widest):
    """sm_86, sm_89 and sm_120 have 99 KiB in a block: enough for rows of 256 bytes."""
    monkeypatch.setattr(cuda, "_shared_bytes", lambda device: 99 * 1024)
    wide, narrow = (torch.randn(1, 1, 2, D, dtype=dtype) for D in (widest + 1, widest))
    with pytest.raises(
        BackendUnavailable,
        match=rf"D = {widest + 1} > {widest} in {dtype} needs up to 163 KiB .* has 99 KiB; backend='triton'",
    ):
        rel_attention(wide, wide, wide, wide[0], backend="cuda")
    rel_attention(narrow, narrow, narrow, narrow[0], backend="cuda")


@emulated
def test_backend_none_takes_one_that_has_room(monkeypatch):
    monkeypatch.setattr(cuda, "_shared_bytes", lambda device: 99 * 1024)
    monkeypatch.setattr(registry, "_preferred", lambda device: ("cuda", "cpu"))
    device = torch.device("cpu")
    assert registry.choose(None, device, bf16, 128).NAME == "cuda"
    assert registry.choose(None, device, bf16, 129).NAME == "cpu"
    assert registry.choose(None, device, f32, 64).NAME == "cuda"
    assert registry.choose(None, device, f32, 65).NAME == "cpu"


@pytest.mark.parametrize(
    "targets, capability, works",
    [
        ("sm_80 sm_90 sm_100 compute_80 sm_90a", (12, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90 sm_90a compute_90", (8, 0), False),
        ("sm_90 sm_90a compute_90", (10, 3), True),
        ("sm_100", (10, 3), True),
        ("sm_90a", (9, 0), False),
    ],
)
def test_a_library_that_was_compiled_for_other_gpus(monkeypatch, targets, capability, works):
    """Its kernels by warpgroups alone are not all that a call needs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(cuda, "details", lambda: {"targets": targets})
    problem = cuda._not_for.__wrapped__(torch.device("cuda"))
    if works:
        assert problem is None
    else:
        asked = "{}.{}".format(*capability)
        assert f"compiled for {targets}, A GPU is sm_" in problem and f"LIST={asked}" in problem


def test_more_blocks_than_a_grid_has():
    q = torch.empty(1, 1, 1, 1).expand(2**16, 2**10, 2**9, 1)
    with pytest.raises(
        ValueError, match=r"q: got 67108864 heads of 512 queries; .* fewer than 2\*\*31 blocks"
    ):
        gpu.check_sizes("cuda", Inputs(q, q, q, q[0], None, None, None, None))


@pytest.mark.parametrize("capability, first", [((8, 0), "triton"), ((9, 0), "cuda"), ((10, 0), "triton")])
def test_which_backend_serves_a_gpu(monkeypatch, capability, first):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert registry._preferred(torch.device("cuda"))[0] == first


@emulated
@pytest.mark.parametrize(
    "element, D", [(element, D) for element in ("bf16", "f32") for D in cuda_build.CLASSES[element]]
)
def test_kernels_keep_within_the_shared_memory_that_is_asked_for(tmp_path, element, D):
    dtype = {"bf16": bf16, "f32": f32}[element]
    trace = tmp_path / "trace"
    script = f"""
import torch, txl_kernels
k = torch.ones(1, 1, 66, {D}, dtype={dtype}, requires_grad=True)
for L in (1, 17, 66):
    out = txl_kernels.rel_attention(k[:, :, :L], k, k, k[0], backend="cuda")
    out.sum().backward()
"""
    # Those by warpgroups take more: GPUs that have them have more.
    environment = {**os.environ, "TXL_EMULATION_TRACE": str(trace), "TXL_CUDA_WARPGROUPS": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, check=True)
    most = max(int(line.rsplit("|", 1)[1]) for line in trace.read_text().splitlines())
    wide = D * dtype.itemsize > cuda._WIDE_ROW
    assert most <= (cuda._WIDE_SHARED_BYTES if wide else 99 * 1024)  # which every GPU has


@emulated
def test_too_many_keys_for_32_bits():
    k = torch.empty(1, 1, 1, 1, dtype=bf16).expand(1, 1, 2**28, 1)
    with pytest.raises(ValueError, match=r"k: got 268435456 rows.*2\*\*28"):
        rel_attention(k[:, :, :1], k, k, k[0, :, :1], backend="cuda")


def expanded(*shape: int) -> torch.Tensor:
    return torch.empty(1, 1, 1, 1).expand(*shape, 1)


def test_as_many_blocks_as_a_grid_has() -> None:
    """Of 16 queries each, the last one of each head included; one head fewer is served."""
    for L, heads in ((512, 2**26), (16, 2**31), (17, 2**30)):
        q, fewer = expanded(1, heads, L), expanded(1, heads - 1, L)
        gpu.check_sizes("cuda", Inputs(fewer, fewer, fewer, fewer[0], None, None, None, None))
        with pytest.raises(ValueError, match=rf"q: got {heads} heads of {L} queries"):
            gpu.check_sizes("cuda", Inputs(q, q, q, q[0], None, None, None, None))


@pytest.mark.parametrize("name", ["k", "r"])
def test_more_rows_than_32_bits_count(name: str) -> None:
    few, most, more = (expanded(1, 1, rows) for rows in (1, 2**28 - 1, 2**28))
    for x in (most, more):
        k, r = (x, few) if name == "k" else (few, x)
        inputs = Inputs(few, k, k, r[0], None, None, None, None)
        if x is most:
            gpu.check_sizes("triton", inputs)
            continue
        with pytest.raises(ValueError, match=rf"{name}: got 268435456 rows; backend 'triton' .* 2\*\*28"):
            gpu.check_sizes("triton", inputs)


@pytest.mark.parametrize("memory, share", [(2**40, 2**30), (2**35, 2**30), (2**34, 2**29)])
def test_the_gradient_of_scores_may_take_a_share_of_the_memory(monkeypatch, memory: int, share: int) -> None:
    """1 GiB, or a 32nd of a smaller GPU."""
    monkeypatch.delenv("TXL_SLOPE_MIB", raising=False)
    monkeypatch.setattr(gpu, "_memory", lambda device: memory)
    assert gpu.slope_bytes(torch.device("cuda")) == share


def test_amds_gpus_are_no_hoppers(monkeypatch) -> None:
    """gfx90a calls itself 9.0 as well."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert registry._preferred(torch.device("cuda"))[0] == "triton"

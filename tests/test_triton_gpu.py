"""What only a GPU can show: published sizes in every dtype, every tile the tuner may choose, races, streams,
CUDA graphs, tensors of more than 2^31 elements, memory that grows with L + K.

    pytest -m gpu tests/test_triton_gpu.py

Truth is the float64 reference on the GPU, a head and a block of queries at a time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    RELATIVE,
    TENSORS,
    assert_same_bits,
    available,
    bf16,
    f16,
    f32,
    inputs,
    key_range,
    randn_like,
    run,
)

from txl_kernels import gpu, rel_attention
from txl_kernels.reference import reference

pytestmark = pytest.mark.gpu

GPU = [b for b in available() if b.device == "cuda"]
each_backend = pytest.mark.parametrize("backend", GPU, ids=lambda b: b.name)
triton_only = pytest.mark.parametrize("backend", [b for b in GPU if b.name == "triton"], ids=lambda b: b.name)


def each_of(*dtypes: torch.dtype):
    return pytest.mark.parametrize("dtype", dtypes, ids=[str(t).removeprefix("torch.") for t in dtypes])


# ---- Compared with float64 -------------------------------------------------------------------------------

QUERIES = 256  # of the reference at a time: it forms their scores


def truth_by_blocks(tensors: dict, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of a causal call in float64, on the GPU."""
    H, L, K, N = *tensors["q"].shape[1:3], tensors["k"].shape[2], tensors["r"].shape[1]
    heads = []
    for h in range(H):
        leaves = {n: of_head(n, t, h).double().requires_grad_() for n, t in tensors.items()}
        q, k, v, *positions = leaves.values()
        blocks = []
        for first in range(0, L, QUERIES):
            rows = slice(first, min(first + QUERIES, L))
            keys = K - L + rows.stop  # those after the block's last query are hidden
            arguments = q[:, :, rows], k[:, :, :keys], v[:, :, :keys], *positions
            out, lse = reference(*arguments, r_zero=N - 1, return_lse=True)
            out.backward(of_head("dout", dout, h)[:, :, rows].double())
            blocks.append((out.detach(), lse))
        out, lse = (torch.cat(parts, 2) for parts in zip(*blocks, strict=True))
        heads.append({"out": out, "lse": lse, **{f"d{n}": t.grad for n, t in leaves.items()}})
    return {n: torch.cat([head[n] for head in heads], dim_of_heads(n)) for n in heads[0]}


def dim_of_heads(name: str) -> int:
    return 0 if name.removeprefix("d") in ("r", "bias_u", "bias_v") else 1


def of_head(name: str, t: torch.Tensor, h: int) -> torch.Tensor:
    """Head h alone, the dimension kept."""
    return t.narrow(dim_of_heads(name), h, 1)


def assert_near(got: dict, exact: dict, dtype: torch.dtype) -> None:
    """Small errors in every head, and in every row of one: a tile that went wrong would be lost in a mean."""
    assert got.keys() == exact.keys()
    for name, e in exact.items():
        if name == "lse":
            torch.testing.assert_close(got[name].double(), e, rtol=0, atol=4 * RELATIVE[dtype])
            continue
        error, size = (got[name].double() - e).norm(dim=-1), e.norm(dim=-1)  # by row
        in_head = (error.norm(dim=-1) / size.norm(dim=-1)).max()
        assert in_head <= 2 * RELATIVE[dtype], f"{name}: relative error {in_head:.2g} in a head"
        in_row = (error / size.clamp(min=size.square().mean().sqrt())).max()
        assert in_row <= 16 * RELATIVE[dtype], f"{name}: relative error {in_row:.2g} in a row"


SIZES = {
    "wt103-base": dict(B=4, H=10, L=150, K=300, D=41),
    "enwik8": dict(B=2, H=8, L=512, K=1024, D=64),
    "headline": dict(B=1, H=8, L=1900, K=3800, D=64),
    "clamped": dict(B=1, H=8, L=1900, K=3800, D=64, N=1001),
    "64-heads": dict(B=4, H=16, L=2048, K=4096, D=64),
    "64-heads-128": dict(B=4, H=16, L=2048, K=4096, D=128),
    "256": dict(B=1, H=4, L=700, K=1500, D=256),
    "decode": dict(B=16, H=16, L=1, K=3800, D=64),
    "decode-128": dict(B=1, H=16, L=1, K=3800, D=128),
    "decode-few": dict(B=3, H=5, L=7, K=3801, D=80, N=500),
}


@pytest.mark.parametrize("sizes", SIZES)
@each_of(bf16, f16, f32)
@each_backend
def test_published_sizes(backend, dtype, sizes):
    tensors = inputs(**SIZES[sizes], dtype=dtype, device="cuda")
    dout = randn_like(tensors["q"])
    assert_near(run(backend, tensors, dout), truth_by_blocks(tensors, dout), dtype)


# ---- Tiles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("D", [48, 96, 200])  # sizes of no other test, so nothing has been tuned for them
@pytest.mark.parametrize("kernel", ["forward", "decode", "dq", "dk_dv", "dr"])
@each_of(bf16, f32)
@triton_only
def test_every_tile_the_tuner_may_choose(backend, dtype, kernel, D, monkeypatch):
    import triton

    from txl_kernels.triton import configs

    all_candidates = configs.candidates
    arch = triton.runtime.driver.active.get_current_target().arch
    tensors = inputs(B=2, H=2, L=3 if kernel == "decode" else 333, K=777, D=D, dtype=dtype, device="cuda")
    dout = randn_like(tensors["q"])
    exact = truth_by_blocks(tensors, dout)
    for tile in all_candidates(kernel, D, dtype.itemsize, arch):

        def candidates(name, *arguments, tile=tile):
            return [tile] if name == kernel else all_candidates(name, *arguments)

        monkeypatch.setattr(configs, "candidates", candidates)
        assert_near(run(backend, tensors, dout), exact, dtype)


@triton_only
def test_tuned_and_not(backend, monkeypatch):
    """A call that is large enough to be tuned, without and with: other tiles perhaps, the same numbers."""
    tensors = inputs(B=1, H=16, L=1024, K=4096, D=56, dtype=bf16, device="cuda")
    dout = randn_like(tensors["q"])
    exact = truth_by_blocks(tensors, dout)
    for switch in ("0", "1"):
        monkeypatch.setenv("TXL_TRITON_AUTOTUNE", switch)
        assert_near(run(backend, tensors, dout), exact, bf16)


# ---- Races -----------------------------------------------------------------------------------------------

RACES = {
    "odd": (dict(B=2, H=3, L=113, K=203, D=64), {}),
    "wide": (dict(B=1, H=5, L=239, K=1023, D=128), {}),
    "dropout": (dict(B=2, H=2, L=333, K=777, D=41), dict(dropout_p=0.3, dropout_seed=9)),
    "clamp": (dict(B=3, H=2, L=257, K=900, D=64, N=100), dict(window_size=(600, 0))),
    "both-directions": (dict(B=1, H=2, L=300, K=400, D=64, causal=False), dict(causal=False)),
    "decode": (dict(B=2, H=2, L=1, K=3801, D=64), {}),
    "decode-dropout": (dict(B=1, H=3, L=5, K=2999, D=128), dict(dropout_p=0.5, dropout_seed=3)),
}


@pytest.mark.parametrize("case", RACES)
@each_of(bf16, f32)
@each_backend
def test_fifty_runs_in_company(backend, dtype, case):
    """The same bits, while another stream keeps the GPU busy in other ways each time."""
    sizes, options = RACES[case]
    tensors = inputs(**sizes, dtype=dtype, device="cuda")
    dout = randn_like(tensors["q"])
    first = run(backend, tensors, dout, **options)
    company, noise = torch.cuda.Stream(), torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    for n in range(50):
        with torch.cuda.stream(company):
            for _ in range(n % 8):
                noise @ noise
        assert_same_bits(run(backend, tensors, dout, **options), first)


# ---- Streams and devices ---------------------------------------------------------------------------------


@each_backend
def test_streams(backend):
    """Calls on streams of their own, side by side: each reads what its stream wrote, when it has."""
    cases = [
        inputs(B=1, H=4, L=500, K=1000, D=64, dtype=bf16, device="cuda", seed=0),
        inputs(B=1, H=4, L=500, K=1000, D=64, dtype=bf16, device="cuda", seed=1),
        inputs(B=2, H=4, L=1, K=3000, D=64, dtype=bf16, device="cuda", seed=2),
    ]
    douts = [randn_like(tensors["q"]) for tensors in cases]
    expected = [run(backend, *arguments) for arguments in zip(cases, douts, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, tensors, dout in zip(streams, cases, douts, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)  # a kernel on another stream would run before the copies
                late = {n: t.clone() for n, t in tensors.items()}
                got.append(run(backend, late, dout.clone()))
        torch.cuda.synchronize()
        for results, truth in zip(got, expected, strict=True):
            assert_same_bits(results, truth)


@each_backend
def test_a_thread_that_has_used_no_gpu_before(backend):
    """It has no CUDA context yet, and torch's allocator, which has memory to give, makes it none."""
    tensors = inputs(B=1, H=2, L=100, K=200, D=64, dtype=bf16, device="cuda")
    expected = run(backend, tensors)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(max_workers=1) as thread:
        got = thread.submit(run, backend, tensors).result()
    assert_same_bits(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_backend
def test_device_that_is_not_the_current_one(backend):
    tensors = inputs(B=1, H=2, L=100, K=200, D=64, dtype=bf16, device="cuda:0")
    dout = randn_like(tensors["q"])
    expected = run(backend, tensors, dout)
    got = run(backend, {n: t.to("cuda:1") for n, t in tensors.items()}, dout.to("cuda:1"))
    assert all(t.device.index == 1 for t in got.values())
    assert_same_bits({n: t.to("cuda:0") for n, t in got.items()}, expected)


@pytest.mark.skipif(not GPU, reason="no backend for GPUs can run here")
def test_a_backend_is_chosen():
    tensors = inputs(B=1, H=2, L=100, K=200, D=64, dtype=bf16, device="cuda")
    out = rel_attention(**tensors)
    assert any(torch.equal(out, run(backend, tensors)["out"]) for backend in GPU)


# ---- CUDA graphs -----------------------------------------------------------------------------------------


def captured(function):
    """(graph, results) of `function()` as a CUDA graph, after two ordinary runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def put(tensors: dict, into: dict) -> None:
    for name, tensor in tensors.items():
        into[name].copy_(tensor)


@pytest.mark.parametrize("L", [1, 4])
@each_backend
def test_decode_in_a_graph(backend, L):
    """Replayed with other inputs in the same place, and with a memory that fills up."""
    sizes = dict(B=3, H=4, L=L, K=777, D=64, dtype=bf16, device="cuda")
    static, ranges = inputs(**sizes), key_range((777, 777), (770, 777), (5, 777), device="cuda")
    graph, results = captured(lambda: run(backend, static, key_range=ranges))
    for seed in range(1, 5):
        tensors = inputs(**sizes, seed=seed)
        put(tensors, into=static)
        ranges[:, 0] = 777 - 150 * seed
        graph.replay()
        assert_same_bits(results, run(backend, tensors, key_range=ranges))


@pytest.mark.parametrize("L", [130, 7])
@each_backend
def test_training_step_in_a_graph(backend, L):
    """Forward and backward as one graph; in both the mask follows the seed tensor."""
    sizes = dict(B=2, H=2, L=L, K=300, D=64, dtype=bf16, device="cuda")
    static, seed = inputs(**sizes), torch.zeros(1, dtype=torch.int64, device="cuda")
    dout = randn_like(static["q"])
    graph, results = captured(lambda: run(backend, static, dout, dropout_p=0.4, dropout_seed=seed))
    for number in (1, 2**40, 1):
        tensors = inputs(**sizes, seed=number % 7)
        put(tensors, into=static)
        seed.fill_(number)
        graph.replay()
        assert_same_bits(results, run(backend, tensors, dout, dropout_p=0.4, dropout_seed=number))
    before = results["out"].clone()
    seed.fill_(2)
    graph.replay()
    assert not torch.equal(results["out"], before)


@each_backend
def test_seed_drawn_in_a_graph(backend):
    """Without a seed every replay draws its own, as torch.manual_seed will have it."""
    tensors = inputs(B=1, H=2, L=100, K=200, D=64, dtype=bf16, device="cuda")
    graph, results = captured(lambda: run(backend, tensors, dropout_p=0.5))

    def replay() -> torch.Tensor:
        graph.replay()
        return results["out"].clone()

    torch.manual_seed(3)
    first, second = replay(), replay()
    torch.manual_seed(3)
    assert torch.equal(replay(), first)
    assert not torch.equal(first, second)


# ---- autocast --------------------------------------------------------------------------------------------


@each_backend
def test_autocast_to_float16(backend):
    tensors = inputs(B=2, L=20, K=33, D=16, device="cuda")
    dout = randn_like(tensors["q"]).to(f16)
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    with torch.autocast("cuda", f16):
        out = rel_attention(**leaves, backend=backend.name)
    out.backward(dout)
    expected = run(backend, {n: t.to(f16) for n, t in tensors.items()}, dout)
    assert out.dtype == f16 and torch.equal(out, expected["out"])
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == f32 and torch.equal(leaf.grad, expected[f"d{name}"].float())


# ---- Large: one test at a time ---------------------------------------------------------------------------


@each_backend
def test_large_training_step(backend):
    """k, v, r and their gradients of more than 2^31 elements each, every one of them used."""
    H, L, K, D = 130, 64, 2**18, 64
    assert H * K * D > 2**31
    if torch.cuda.mem_get_info()[0] < 45 * 2**30:
        pytest.skip("needs 45 GiB of free GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=bf16, device="cuda", generator=generator)

    shapes = ((1, H, L, D), (1, H, K, D), (1, H, K, D), (H, K, D), (H, D), (H, D))
    tensors = {name: draw(*shape) for name, shape in zip(TENSORS, shapes, strict=True)}
    dout = draw(1, H, L, D)
    results = run(backend, tensors, dout)
    for h in (0, H // 2, H - 1):
        alone = {n: of_head(n, t, h) for n, t in tensors.items()}
        exact = truth_by_blocks(alone, of_head("dout", dout, h))
        assert_near({n: of_head(n, t, h) for n, t in results.items()}, exact, bf16)


def peak(backend, L: int, K: int) -> tuple[int, int]:
    """Bytes that a training step takes beyond its inputs, results included; bytes of the inputs."""
    tensors = inputs(B=1, H=2, L=L, K=K, D=64, dtype=bf16, device="cuda")
    dout = randn_like(tensors["q"])
    run(backend, tensors, dout)  # may measure tiles, which takes memory
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(backend, tensors, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, sum(t.nbytes for t in tensors.values())


@each_backend
def test_large_training_memory(backend):
    """32,768 queries, 65,536 keys: a tensor of scores would take 8 GiB, the inputs take 56 MiB."""
    taken, given = peak(backend, 32768, 65536)
    assert taken < 4 * given + gpu.slope_bytes(torch.device("cuda"))
    half, _ = peak(backend, 16384, 32768)
    assert taken < 2.2 * half

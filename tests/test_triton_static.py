"""The Triton kernels compile for GPUs that are not here, and into what they should: tensor cores, wide loads,
shared memory within the part's limit, no spilled registers where the work is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from helpers import INTERPRET, ROOT, bf16, f16, f32

pytest.importorskip("triton")
if INTERPRET:
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)

import torch
import triton
import triton_static as static
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from triton_static import SHARED_LIMIT, Case, Report, cases, document, reports, tiles_in

from txl_kernels import gpu
from txl_kernels import triton as backend
from txl_kernels.registry import Inputs, Options
from txl_kernels.triton import configs

PAGE = ROOT / "docs" / "triton_kernels.md"
OUT_OF_DATE = (
    "docs/triton_kernels.md is out of date: python tests/triton_static.py --write docs/triton_kernels.md"
)


def elements_loaded(case: Case) -> list[int]:
    """By the tensors that a step of the near loop loads, but dr's dS, whose rows begin anywhere."""
    BM, BN = case.tile.BM, case.tile.BN
    BD = configs.block_of_head(case.D)
    return {
        "forward": [BN * BD] * 3,  # k, v, r
        "decode": [BN * BD] * 3,
        "dq": [BM * BN] + [BN * BD] * 2,  # dS; k, r
        "dk_dv": [BM * BD] * 3 + [BN * BD] * 2,  # q + u, q + v, dO; two tiles of r
        "dr": [BM * BD],  # q + v
    }[case.kernel]


def wide_loads(case: Case) -> int:
    """Loads of 16 bytes by which a thread does its part of them. A tile of which a thread has less is loaded
    by all threads, in smaller pieces."""
    threads = case.tile.num_warps * (32 if isinstance(case.arch, int) else 64)
    return sum(n * case.dtype.itemsize // (16 * threads) for n in elements_loaded(case))


def assert_sound(case: Case, result: Report | str) -> None:
    assert not isinstance(result, str), f"{case}: {result}"
    for arch in case.archs:
        assert result.shared <= SHARED_LIMIT[arch] * 1024, f"{case}: {result.shared} bytes of shared memory"
    assert result.tensor_memory <= static.TENSOR_MEMORY_COLUMNS, str(case)
    near, names = result.loops["near"], result.loops[""].names
    if case.dtype != f32:
        assert near.tensor > 0, f"{case}: no tensor-core instruction in the near loop"
    elif isinstance(case.arch, int):  # IEEE: tensor cores would round to tf32
        assert result.loops[""].tensor == 0, str(case)
    else:  # AMD's multiply in float32
        products = [name for name in names if name.startswith("v_mfma")]
        assert products and all(name.endswith("_f32") and "xf32" not in name for name in products), str(case)
    if case.D % 8 == 0:  # all of them, not some
        assert near.wide >= wide_loads(case), f"{case}: {near.wide} loads of 16 bytes, {near.loads} in all"


def defaults(arch, D=64, dtype=bf16, full=False) -> list[Case]:
    return [
        Case(kernel, dtype, D, arch, configs.candidates(kernel, D, dtype.itemsize, arch)[0], full=full)
        for kernel in configs.KERNELS
    ]


# ---- Launching ---------------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch):
    """What a call asks Triton to compile: a set of (kernel, types and properties of its arguments). Nothing
    is launched."""
    compiled = set()
    compiler = make_backend(GPUTarget("cuda", 90, 32))

    class Recorder:
        def __init__(self, kernel):
            self.name = kernel.fn.__name__
            self.bind = create_function_from_signature(kernel.signature, kernel.params, compiler)

        def __getitem__(self, grid):
            return self

        def __call__(self, *args, **constants):
            _, specialisation, options = self.bind(*args, **constants)
            compiled.add((self.name, str(specialisation), str(options)))

    for name, kernel in backend.KERNELS.items():
        monkeypatch.setitem(backend.KERNELS, name, Recorder(kernel))
    for name in ("merge_kernel", "add_biases_kernel", "delta_kernel"):
        monkeypatch.setattr(backend, name, Recorder(getattr(backend, name)))
    monkeypatch.setattr(backend, "_arch", lambda device: 90)
    monkeypatch.setattr(gpu, "processors", lambda device: 132)
    return compiled


@pytest.mark.parametrize("L", [1, 100])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_sizes_compile_nothing_anew(launches, L, p):
    """Nor do other numbers: not one that is 1, nor a multiple of 16, both of which Triton would note."""
    found = []
    for B, H, K, scale, dropout_p in [
        (2, 3, 1000, 0.3, p),
        (1, 1, 1008, 1.0, p),
        (16, 16, 1001, 16.0, p and 2**-32),  # a threshold of 1
        (3, 8, 3 * 1024, 0.125, p and 0.75),  # beyond 31 bits
    ]:
        q, k, r = torch.zeros(B, H, L, 64), torch.zeros(B, H, K, 64), torch.zeros(H, K, 64)
        bias = torch.zeros(H, 64)
        inputs = Inputs(q, k, k, r, bias, bias, None, torch.zeros(1, dtype=torch.int64))
        options = Options(True, -1, -1, K - 1, scale, dropout_p)
        out, lse = backend.forward(inputs, options)
        backend.backward(out, inputs, out, lse, (True, True, True), options)
        # The merge of splits is compiled for their number, up to a power of two.
        found.append({launch for launch in launches if launch[0] != "merge_kernel"})
        launches.clear()
    assert len(found[0]) == 6
    assert all(other == found[0] for other in found)


# ---- Reading code ------------------------------------------------------------------------------------------

SASS = """
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDGSTS.E.BYPASS.LTC128B.128 [R2], desc[UR4][R4.64] ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_1:
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/                   MUFU.EX2 R6, R6 ;
        /*0060*/              @P1  BRA `(.L_x_0) ;
.L_x_2:
        /*0070*/                   LDG.E R7, desc[UR4][R4.64] ;
        /*0080*/                   STL [R1+0x8], R7 ;
        /*0090*/                   @!P2 MUFU.EX2 R7, R7 ;
        /*00a0*/                   BRA.U UP0, `(.L_x_2) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R3 ;
        /*00d0*/              @!P0 BRA `(.L_x_3) ;
        /*00e0*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00f0*/                   BRA `(.L_x_4);
"""

AMDGCN = """
kernel:                                 ; @kernel
	s_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:                                ; Loop Header: Depth=1
	s_mov_b32 s4, 0
.LBB0_2:                                ; Parent Loop BB0_1 Depth=1
	global_load_dwordx4 v[0:3], v[4:5], off
	v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
	v_exp_f32_e32 v6, v6
	s_cbranch_scc1 .LBB0_2
; %bb.3:
	scratch_load_dword v7, off, off
	s_cbranch_vccnz .LBB0_1
	s_endpgm
"""


def test_loops_of_sass():
    """The wait for a barrier, out of line, belongs to the loop that it returns to, and is none over tiles."""
    whole, first, second = static._loops(static.NVIDIA, SASS)
    assert whole.instructions == 16
    assert (first.instructions, first.tensor, first.wide, first.loads, first.local) == (9, 1, 1, 1, 0)
    assert (second.instructions, second.tensor, second.wide, second.loads, second.local) == (4, 0, 0, 1, 1)


def test_loops_of_amdgcn():
    whole, inner = static._loops(static.AMD, AMDGCN)
    assert (whole.instructions, whole.local) == (9, 1)
    assert (inner.instructions, inner.tensor, inner.wide, inner.local) == (4, 1, 1, 0)


# ---- Defaults ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default_reports():
    return reports([*defaults(90), *defaults(80)])


def test_defaults_are_sound(default_reports):
    for case, result in default_reports.items():
        assert_sound(case, result)


def test_defaults_multiply_64_rows_at_a_time_on_hopper(default_reports):
    for case, result in default_reports.items():
        names = result.loops["near"].names
        wide = case.arch == 90 and case.tile.BM == 64
        assert any(name.startswith("HGMMA") for name in names) == wide, str(case)


def test_near_loops_of_the_defaults_hardly_touch_local_memory(default_reports):
    """Forward and decode in less than 2 % of it, backward in less than a quarter: see configs.py."""
    for case, result in default_reports.items():
        near = result.loops["near"]
        share = near.local / near.instructions
        assert share < 0.02 if case.kernel in ("forward", "decode") else share < 0.25, f"{case}: {near.local}"


def test_no_exponent_is_the_result_of_a_fused_multiply_add():
    """It would keep the rounding error of a huge base, and a probability could be anything."""
    for case in defaults(90):
        made_by, exponents = {}, set()
        for line in static.compiled(case).asm["ptx"].splitlines():
            if found := re.match(r"\s+(\S+)\s+(%\w+), (%\w+)", line):
                name, result, operand = found.groups()
                if name.startswith("ex2."):
                    exponents.add(made_by[operand])
                made_by[result] = name
        expected = {"forward": {"mul.f32"}, "decode": {"mul.f32"}, "dk_dv": {"min.NaN.f32"}}
        assert exponents == expected.get(case.kernel, set()), str(case)  # dq and dr take dS from memory


@pytest.mark.parametrize("D, splits", [(64, 30), (64, 528), (128, 264), (256, 132)])
def test_merge_spills_nothing(D, splits):
    result = static.merge_report(bf16, D, splits, 90)
    assert result.spills == 0 and result.registers <= 64


def test_a_head_dimension_that_8_and_not_16_divides():
    for case, result in reports(defaults(90, D=40)).items():
        assert_sound(case, result)


def test_a_head_dimension_that_16_bytes_do_not_divide():
    (case,) = (c for c in defaults(90, D=41) if c.kernel == "forward")
    assert_sound(case, static.report(case))


def test_the_page_lists_the_tiles_in_use():
    """The figures, which depend on Triton's version, are compared where all is compiled."""
    expected = document({case: "not compiled" for case in cases()})
    assert tiles_in(PAGE.read_text()) == tiles_in(expected), OUT_OF_DATE


# ---- Everything --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_everything_that_may_be_chosen_is_sound():
    found = reports(cases())
    for case, result in found.items():
        assert_sound(case, result)
    page = PAGE.read_text()
    if f"Triton {triton.__version__} " in page:
        assert document(found) == page, OUT_OF_DATE
    for case, result in found.items():
        near = result.loops["near"]
        if near.local == 0 or static.reason(case) != static.FEWER:
            continue
        assert near.local / near.instructions < 0.25, f"{case}: {near.local} of {near.instructions}"
        for other, its in found.items():
            if other.tile.num_stages != case.tile.num_stages:  # what loads ahead are worth, GPUs can tell
                continue
            if replace(other, tile=case.tile) == case and its.loops["near"].local == 0:
                fewer = static.per_pair(case, result) < static.per_pair(other, its)
                assert fewer, f"{case} spills and issues no fewer instructions than {other}"


# Each kind of tensor core, and NVIDIA's and AMD's parts of least shared memory. In float32 NVIDIA's have the
# same tiles, of less than half of that, and without tensor cores all but the same code: one stands for all.
# Of D = 64, whose tiles come closest to AMD's limit: 128 and 256 would take twice as long again.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, dtype",
    [(90, bf16), (90, f32), (86, bf16), (100, bf16), ("gfx942", bf16), ("gfx942", f32)],
    ids=lambda x: static.TYPES.get(x) or static.arch_name(x),
)
def test_all_options_at_once(arch, dtype):
    """Dropout, clamped distances and a key range, which is most code and most registers."""
    for case, result in reports(defaults(arch, dtype=dtype, full=True)).items():
        assert_sound(case, result)
        near = result.loops["near"]
        assert near.local / near.instructions < 0.25, f"{case}: {near.local} of {near.instructions}"


@pytest.mark.slow
def test_what_stands_for_what():
    """One compilation speaks for another where the page says so."""
    one, other = (static.report(case) for case in (defaults(80)[0], defaults(86)[0]))
    assert (one.shared, one.registers) == (other.shared, other.registers)
    one, other = (static.report(case) for case in (defaults(90, dtype=f32)[0], defaults(100, dtype=f32)[0]))
    assert one.shared == other.shared
    one, other = (static.report(case) for case in (defaults(90)[0], defaults(90, dtype=f16)[0]))
    assert (one.shared, one.loops["near"].tensor) == (other.shared, other.loops["near"].tensor)

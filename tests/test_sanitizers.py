"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from helpers import build, cpu_levels, python

build_info = pytest.importorskip("txl_kernels._build_info")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instrumented(tmp_path_factory):
    """(folder that holds the instrumented package, the sanitizer's library)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++: another compiler keeps its sanitizer's library elsewhere")
    runtime = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(runtime):
        pytest.skip("g++ has no libasan.so")
    folder = tmp_path_factory.mktemp("sanitized")
    build(folder, CXX=compiler, TXL_SANITIZE="address,undefined")
    return folder, runtime


def sanitized(instrumented, code, check=True, **environment):
    folder, runtime = instrumented
    return python(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n" + code,
        timeout=3000,
        check=check,
        LD_PRELOAD=runtime,
        # Python frees nothing at exit, and torch's allocations are not ours to judge.
        ASAN_OPTIONS="detect_leaks=0:halt_on_error=1:abort_on_error=0",
        UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1",
        **environment,
    )


def levels() -> list[str]:
    """Those that run here, and that of AMX, whose tiles are memory in the instrumented build."""
    built, runs = build_info.cpu_levels.split(","), cpu_levels()
    return [level for level in built if level in runs or (level == "amx_bf16" and "avx512_bf16" in runs)]


@pytest.mark.parametrize("level", levels())
def test_every_kind_of_call(instrumented, level):
    done = sanitized(
        instrumented,
        "import helpers\nprint(helpers.check_broadly('cpu'))",
        TXL_CPU_LEVEL=level,
        OMP_NUM_THREADS="2",
    )
    assert int(done.stdout.split()[-1]) > 80
    assert "runtime error" not in done.stderr, done.stderr
    assert "AddressSanitizer" not in done.stderr, done.stderr


@pytest.mark.skipif(
    "amx_bf16" not in levels(), reason="needs the level of AMX, and a CPU that has AVX512_BF16"
)
def test_what_tiles_alone_could_get_wrong(instrumented):
    """Blocks whose size depends on the threads, and sums of three bfloat16 near the largest float32."""
    done = sanitized(
        instrumented,
        "import pytest\n"
        "names = 'few_heads_on_one_and_more_threads or largest_value'\n"
        "files = ['test_determinism.py', 'test_masks.py']\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', f'({names}) and float32', *files]))",
        TXL_CPU_LEVEL="amx_bf16",
    )
    assert "11 passed" in done.stdout, done.stdout


def test_the_sanitizer_watches(instrumented):
    """An lse whose memory is too short, past every check: without this the test above proves nothing."""
    done = sanitized(
        instrumented,
        "import torch, txl_kernels.cpu as cpu\n"
        "assert cpu.unavailable() is None\n"
        "q = torch.ones(1, 1, 64, 8)\n"
        "lse = torch.empty(1, 1, 64)\n"
        "lse.untyped_storage().resize_(4 * 60)\n"
        "options = (True, -1, -1, 63, 1.0, 0.0)\n"
        "inputs = (q, q, q, q[0], None, None, None, None)\n"
        "gradients = (*(torch.empty_like(x) for x in inputs[:4]), None, None)\n"
        "torch.ops.txl_kernels.cpu_backward(q, *inputs, q, lse, *options, *gradients)\n",
        check=False,
    )
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr

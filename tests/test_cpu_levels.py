"""Every vector level that was built and that this CPU runs, forced by TXL_CPU_LEVEL, each in its process."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, TESTS, build, cpu_levels, python, why_not

sys.path.insert(0, str(ROOT / "csrc"))
import ninja_build


@pytest.mark.parametrize("level", cpu_levels())
def test_every_level(level):
    done = python(
        "import helpers, torch\n"
        "helpers.why_not('cpu')\n"
        "print(torch.ops.txl_kernels.cpu_level(), helpers.check_broadly('cpu'))",
        TXL_CPU_LEVEL=level,
    )
    name, count = done.stdout.split()
    assert name == level
    assert int(count) > 80


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
def test_the_highest_level_is_chosen():
    done = python(
        "import helpers, torch\nhelpers.why_not('cpu')\nprint(torch.ops.txl_kernels.cpu_level())",
        TXL_CPU_LEVEL=None,
    )
    assert done.stdout.split() == cpu_levels()[-1:]
    assert cpu_levels()[0] == "baseline"


@pytest.mark.skipif("amx_bf16" not in cpu_levels(), reason="no AMX here")
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_are_shared_with_torch(threads):
    """Both configure AMX's registers on the same threads; neither may rely on what the other left."""
    python(
        "import torch\n"
        "from txl_kernels import rel_attention\n"
        f"torch.set_num_threads({threads})\n"
        "x, linear = torch.randn(96, 80).bfloat16(), torch.nn.Linear(80, 70).bfloat16()\n"
        "q, k, r = (torch.randn(*s).bfloat16() for s in ((1, 2, 70, 64), (1, 2, 100, 64), (2, 100, 64)))\n"
        "def both():\n"
        "    return x @ x.T, rel_attention(q, k, k, r), linear(x), rel_attention(q, k, k, r)\n"
        "first = both()\n"
        "assert torch.equal(first[1], first[3])\n"
        "for _ in range(5):\n"
        "    assert all(map(torch.equal, first, both()))\n"
    )


@pytest.mark.skipif("amx_bf16" not in cpu_levels(), reason="no AMX here")
@pytest.mark.parametrize("file", ["test_masks.py", "test_key_range.py", "test_clamp.py"])
def test_nan_and_masks_by_tiles(file):
    """Most of these tests are too small for float32 to be done by tiles, unless their level is named."""
    done = python(
        "import pytest, sys\n"
        "options = ['-q', '-p', 'no:cacheprovider', '-k', 'cpu and float32']\n"
        f"sys.exit(pytest.main([*options, {str(TESTS / file)!r}]))",
        TXL_CPU_LEVEL="amx_bf16",
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and " skipped" not in done.stdout


@pytest.mark.skipif("amx_bf16" not in cpu_levels(), reason="no AMX here")
def test_tiles_where_they_suit():
    """float32 of few queries, or of a head dimension that fills no tile, is done by plain vectors."""
    code = (
        "import torch\n"
        "from txl_kernels import rel_attention\n"
        "torch.manual_seed(0)\n"
        "for L, D in ((40, 64), (80, 40), (80, 64)):\n"
        "    q, k, r = torch.randn(1, 1, L, D), torch.randn(1, 1, 90, D), torch.randn(1, 90, D)\n"
        "    print(rel_attention(q, k, k, r).double().sum().item())\n"
    )
    chosen, plain = (python(code, TXL_CPU_LEVEL=level).stdout.split() for level in (None, "avx512"))
    assert chosen[:2] == plain[:2]
    assert chosen[2] != plain[2]
    assert abs(float(chosen[2]) - float(plain[2])) < 1e-3


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
@pytest.mark.parametrize("level", ["avx1024", "AVX2"])
def test_unknown_level_is_refused(level):
    """A misspelt level does not silently measure another one."""
    done = python(
        "import torch\n"
        "from txl_kernels import rel_attention\n"
        "q = torch.ones(1, 1, 1, 1)\n"
        "rel_attention(q, q, q, q[0])",
        TXL_CPU_LEVEL=level,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "TXL_CPU_LEVEL" in done.stderr and level in done.stderr and "baseline" in done.stderr
    # The report, which is meant to find such things, says so and goes on.
    done = python(
        "from txl_kernels import _report\nprint(_report.render(_report.collect()))", TXL_CPU_LEVEL=level
    )
    assert re.search(rf"cpu +no: .*TXL_CPU_LEVEL.*{level}", done.stdout), done.stdout
    assert "triton" in done.stdout


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
def test_memory_of_the_c_library_is_not_taken_for_zero():
    """Workspaces come from malloc, which torch's poison does not reach. glibc fills them with 0x7f: 3e38."""
    python(
        "import helpers\nassert helpers.check_broadly('cpu') > 80", MALLOC_PERTURB_="128", TXL_CPU_KEPT_MB="0"
    )


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
@pytest.mark.parametrize("value", ["lots", "-1", "64MB"])
def test_kept_memory_must_be_a_number(value):
    done = python(
        "import torch, txl_kernels\n"
        "info = txl_kernels.backends()['cpu']\n"
        "assert not info.available and 'TXL_CPU_KEPT_MB' in info.reason, info\n"
        "q = torch.ones(1, 1, 20, 8)\n"
        "txl_kernels.rel_attention(q, q, q, q[0])",
        TXL_CPU_KEPT_MB=value,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "TXL_CPU_KEPT_MB" in done.stderr and f"'{value}'" in done.stderr and "megabytes" in done.stderr


def test_a_number_of_compilers_that_is_none(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "two")
    with pytest.raises(ninja_build.PlatformError, match="MAX_JOBS is 'two', needs the number of compilers"):
        ninja_build.find_jobs()


@pytest.fixture
def older(tmp_path):
    """A compiler that knows no AVX-512."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    older = tmp_path / "older"
    older.write_text(
        '#!/bin/sh\ncase "$*" in *-mavx512*) echo "unrecognized option" >&2; exit 1;; esac\n'
        f'exec {compiler} "$@"\n'
    )
    older.chmod(0o755)
    return str(older)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one level")
def test_a_compiler_that_lacks_avx512(older, capsys):
    assert list(ninja_build.find_levels([older])) == ["baseline", "avx2"]
    assert "without level avx512, which the compiler cannot build:\nunrecognized" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one level")
def test_what_a_compiler_that_lacks_avx512_builds(older, tmp_path):
    build(tmp_path, CXX=older, TXL_BUILD_DIR=str(tmp_path / "build"))
    done = python(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import helpers\n"
        "from txl_kernels import _build_info as info\n"
        "helpers.why_not('cpu')\n"
        "print(info.__file__, info.cpu_levels, helpers.check_broadly('cpu'))",
        TXL_CPU_LEVEL=None,
    )
    file, levels, count = done.stdout.split()
    assert file.startswith(str(tmp_path))
    assert levels == "baseline,avx2"
    assert int(count) > 80


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels of x86")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_level_is_what_its_own_flags_say(dtype):
    """With CXXFLAGS=-march=native on a CPU that has all of them, the compiler's macros are set for each."""
    cxx = ninja_build.find_compiler()
    levels = ninja_build.find_levels(cxx)
    native = [flag for flags, _ in levels.values() for flag in flags if flag.startswith("-m")]
    found = {}
    for level, (flags, dtypes) in levels.items():
        if dtype in dtypes:
            defines = [f"-DTXL_LEVEL={level}", f"-DTXL_DTYPE={dtype}"]
            command = [*cxx, *ninja_build.COMMON_FLAGS, *native, *defines, *flags, "-E", "cpu/kernels.cpp"]
            done = subprocess.run(command, cwd=ROOT / "csrc", capture_output=True, text=True, check=True)
            body = done.stdout.split(f"struct {dtype}{'_' * (dtype == 'bf16')} {{")[1]
            found[level] = re.search(r"using Compute = (\w+);", body).group(1)
            # Registers of tiles are touched by their own level alone.
            scope = done.stdout.split("struct TileScope {")[1].partition("\n};")[0]
            assert ("ldtilecfg" in scope) == (level == "amx_bf16")
    higher = {"avx512_bf16": "Bf16Pair", "amx_bf16": "SplitTiles" if dtype == "f32" else "Bf16Tiles"}
    assert found == {level: higher.get(level, "Single") for level in found} and "baseline" in found


@pytest.mark.parametrize("name", [" ", "no-such-compiler"])
def test_a_compiler_that_is_not_there(monkeypatch, name):
    monkeypatch.setenv("CXX", name)
    if name == " ":  # as if it were not set
        assert shutil.which(ninja_build.find_compiler()[0])
    else:
        with pytest.raises(ninja_build.PlatformError, match="CXX='no-such-compiler' was not found"):
            ninja_build.find_compiler()

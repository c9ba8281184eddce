"""Whether the build makes the CUDA kernels, with what, and what it says otherwise. No CUDA is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
import cuda_build
import ninja_build


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def torch(tmp_path):
    """A folder that looks like a torch with CUDA."""
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    return tmp_path


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """One that answers what the build asks of it."""
    nvcc = script(
        tmp_path / "nvcc",
        'case "$1" in --version) echo "Cuda compilation tools, release 13.0, V13.0.88";;\n'
        "--list-gpu-code) echo sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_103 sm_120 sm_121;; esac",
    )
    monkeypatch.setenv("CUDACXX", nvcc)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return nvcc


@pytest.mark.parametrize("build", ["auto", "1"])
@pytest.mark.parametrize("named", ["/no/nvcc", " ", "false", "true"])
def test_something_else_named_as_nvcc(monkeypatch, torch, build, named):
    monkeypatch.setenv("TXL_BUILD_CUDA", build)
    monkeypatch.setenv("CUDACXX", named)
    with pytest.raises(cuda_build.PlatformError, match=f"CUDACXX='{named}' is not nvcc"):
        cuda_build.find_toolkit(torch)


def test_an_nvcc_that_does_not_run(monkeypatch, torch, tmp_path):
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(cuda_build.shutil, "which", lambda name: str(tmp_path / "nvcc"))
    script(tmp_path / "nvcc", "exit 1")
    monkeypatch.setenv("TXL_BUILD_CUDA", "auto")
    assert cuda_build.find_toolkit(torch) == (None, "not built: no nvcc that runs was found")
    monkeypatch.setenv("TXL_BUILD_CUDA", "1")
    with pytest.raises(cuda_build.PlatformError, match=r"no nvcc that runs was found: .* set CUDACXX"):
        cuda_build.find_toolkit(torch)


@pytest.mark.parametrize(
    "archs, why",
    [
        ("7.5", "TORCH_CUDA_ARCH_LIST='7.5' has nothing from sm_80 on"),
        ("Turing", "TORCH_CUDA_ARCH_LIST='Turing' has nothing from sm_80 on"),
        ("8.0;Common", "TORCH_CUDA_ARCH_LIST: 'Common' is not of the form 9.0, 9.0+PTX or Hopper"),
        ("8.0 13.0", "TORCH_CUDA_ARCH_LIST has 13.0, which {nvcc} does not know"),
    ],
)
def test_gpus_that_there_are_no_kernels_for(monkeypatch, torch, nvcc, archs, why):
    why = why.format(nvcc=nvcc)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    monkeypatch.delenv("TXL_BUILD_CUDA", raising=False)
    assert cuda_build.find_toolkit(torch) == (None, f"not built: {why}")
    monkeypatch.setenv("TXL_BUILD_CUDA", "1")
    with pytest.raises(cuda_build.PlatformError, match=re.escape(why)):
        cuda_build.find_toolkit(torch)


@pytest.mark.parametrize(
    "archs, targets",
    [
        ("Hopper", "sm_90 compute_80 sm_90a"),
        ("Turing;Ampere Ada", "sm_80 sm_86 compute_80 sm_89"),
        ("8.0 Blackwell", "sm_80 sm_100 sm_103 sm_120 sm_121 compute_80"),
    ],
)
def test_gpus_by_name(monkeypatch, torch, nvcc, archs, targets):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", archs)
    monkeypatch.setenv("TXL_BUILD_CUDA", "1")
    assert cuda_build.find_toolkit(torch)[1] == f"{targets} (nvcc 13.0)"


@pytest.mark.parametrize(
    "cxx, compiler",
    [
        ("g++", "g++"),
        ("clang++ -m64", "clang++"),
        ("ccache g++", "g++"),
        ("/usr/bin/ccache CCACHE_DIR=/tmp/cache distcc /usr/bin/g++-12 -m64", "/usr/bin/g++-12"),
        ("env -i LANG=C g++", "g++"),
        ("/usr/lib/ccache/g++", "/usr/lib/ccache/g++"),
    ],
)
def test_nvcc_is_told_the_compiler_and_not_its_launcher(tmp_path, cxx, compiler):
    file = ninja_build.NinjaFile(tmp_path, cxx.split(), [], [])
    file.add_nvcc(cuda_build.Toolkit(["nvcc"], "13.0", ("sm_80",)))
    assert set(re.findall(r"nvcc -ccbin (\S+)", file.text)) == {compiler}
    assert f"command = {cxx} $flags" in file.text


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_a_sanitized_build_reports_no_cuda_kernels(monkeypatch, nvcc, tmp_path):
    monkeypatch.setenv("TXL_BUILD_CUDA", "1")
    monkeypatch.setenv("TXL_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(ninja_build, "find_levels", lambda cxx: {"baseline": ([], ninja_build.DTYPES)})
    monkeypatch.setattr(ninja_build, "run_ninja", lambda *arguments: None)

    def build(folder):
        names = [path.name for path in ninja_build.build_native(False)]
        facts = (tmp_path / "native" / folder / "generated" / "build_facts.h").read_text()
        return "libtxl_cuda.so" in names, re.search(r'CUDA_KERNELS "(.*)"', facts)[1]

    monkeypatch.setenv("TXL_SANITIZE", "")
    assert build("") == (True, "sm_80 sm_90 sm_100 compute_80 sm_90a (nvcc 13.0)")
    monkeypatch.setenv("TXL_SANITIZE", "address")
    assert build("address") == (False, "not built: TXL_SANITIZE")


@pytest.mark.parametrize("where", [["--inplace"], ["--build-lib", "."]])
def test_a_build_without_cuda_leaves_no_cuda_library(tmp_path, where):
    """setup.py with a build that makes the libraries it is told to."""
    (tmp_path / "csrc").mkdir()
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "csrc" / "ninja_build.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "def build_native(verbose):\n"
        "    paths = [Path('csrc', name) for name in os.environ['LIBRARIES'].split()]\n"
        "    return [path for path in paths if path.write_text('library')]\n"
    )
    for libraries in (["libtxl_cpu.so", "libtxl_cuda.so"], ["libtxl_cpu.so"]):
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", *where],
            cwd=tmp_path,
            env={**os.environ, "LIBRARIES": " ".join(libraries)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in (tmp_path / "txl_kernels").iterdir()) == libraries

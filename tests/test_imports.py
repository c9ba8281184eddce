"""What is optional may be missing; what is missing is said, with the original error."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import EMULATED, INTERPRET, ROOT, python, why_not

import txl_kernels
from txl_kernels import gpu

PACKAGE = Path(txl_kernels.__file__).parent

CALL = """
import torch
from txl_kernels import rel_attention
q = torch.ones(1, 1, 2, 4)
"""


def test_the_cpu_kernels_are_built():
    """All other tests take the backends that they find; this one fails where the kernels are missing."""
    assert why_not("cpu") is None


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_the_backend_asked_for_runs(name):
    """Where the environment asks for its kernels on the CPU."""
    if not {"triton": INTERPRET, "cuda": EMULATED}[name]:
        pytest.skip("needs TRITON_INTERPRET=1, or TXL_CUDA_EMULATION")
    assert why_not(name) is None


OPTIONAL = ("triton", "matplotlib", "tqdm", "numpy", "transformers", "pybind11", "ninja", "hypothesis")


@pytest.mark.parametrize("names", [OPTIONAL, ("txl_kernels._build_info",)], ids=["others", "own"])
def test_without_optional_parts(names):
    """A module that is None in sys.modules raises ImportError when it is imported."""
    done = python(
        f"import sys\nsys.modules.update(dict.fromkeys({names!r}))\n{CALL}"
        "print(rel_attention(q, q, q, q[0]).shape)\n"
        "assert set(__import__('txl_kernels').backends()) >= {'reference', 'cpu'}\n"
        "import txl_kernels.__main__\n"
        "sys.argv = ['txl_kernels']\n"
        "txl_kernels.__main__.main()\n"
    )
    assert "[1, 1, 2, 4]" in done.stdout
    built = importlib.util.find_spec("txl_kernels._build_info")  # where Python's headers are
    assert ("missing" in done.stdout) == (not built or "txl_kernels._build_info" in names)


def test_example_without_the_extra():
    """As where safetensors is not installed: a line that says what to install, as of `txl` itself."""
    done = python(
        "import runpy, sys\n"
        "sys.modules['safetensors'] = None\n"
        f"example = {str(ROOT / 'examples' / 'train_bytes.py')!r}\n"
        "for arguments in ['--help'], []:\n"
        "    sys.argv = [example, *arguments]\n"
        "    try: runpy.run_path(example, run_name='__main__')\n"
        "    except SystemExit as stop: print('status', stop.code)\n"
    )
    assert "usage:" in done.stdout and re.findall(r"status (\d)", done.stdout) == ["0", "1"]
    assert done.stderr.endswith(": pip install 'txl-kernels[train]'\n") and "Traceback" not in done.stderr


def test_import_is_light():
    """Nothing optional, and nothing of torch's compiler, which takes as long to import as torch itself."""
    done = python(
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import txl_kernels\n"
        "print(*(set(sys.modules) - before))\n"
    )
    heavy = {"triton", "matplotlib", "tqdm", "transformers", "txl_model", "sympy", "torch._dynamo"}
    assert heavy.isdisjoint(done.stdout.split())


@pytest.fixture
def copy(tmp_path):
    """The package without its libraries; returns (its folder, what to put on PYTHONPATH)."""
    target = tmp_path / "txl_kernels"
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return target


REPORT = """
import txl_kernels
from txl_kernels import BackendUnavailable, backends
for backend in ("cpu", None):
    try:
        rel_attention(q, q, q, q[0], backend=backend)
    except BackendUnavailable as error:
        print("ERROR", backend, error)
print("REFERENCE", rel_attention(q, q, q, q[0], backend="reference").shape)
print("AVAILABLE", backends()["cpu"].available, backends()["reference"].available)
print("REASON", backends()["cpu"].reason)
print("FROM", txl_kernels.__file__)
"""


def complain(folder: Path) -> dict[str, str]:
    """What the package in `folder` says when the cpu backend is asked for."""
    # -c puts the current folder first on the path, before any installed copy.
    done = python(
        CALL.replace("import torch", f"import sys; sys.path.insert(0, {str(folder.parent)!r})\nimport torch")
        + REPORT
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if not line.startswith("ERROR"))
    assert Path(said["FROM"]).parent == folder
    errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
    assert [line.split()[1] for line in errors] == ["cpu", "None"], done.stdout  # never a silent fallback
    assert said["AVAILABLE"] == "False True"
    assert "[1, 1, 2, 4]" in said["REFERENCE"]
    return {**said, "ERRORS": "\n".join(errors)}


def test_library_that_was_not_built(copy):
    said = complain(copy)
    for text in (said["ERRORS"], said["REASON"]):
        assert "libtxl_cpu.so" in text and "does not exist" in text
        assert "pip install" in text


def test_library_that_does_not_load(copy):
    """The loader's own words are in the message."""
    (copy / "libtxl_cpu.so").write_bytes(b"\x7fELF no more than this")
    said = complain(copy)
    for text in (said["ERRORS"], said["REASON"]):
        assert "libtxl_cpu.so" in text and "file too short" in text
        assert "pip install" in text


def test_library_of_another_torch(copy):
    """An undefined symbol, the field's commonest complaint, is named."""
    compiler = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = copy.parent / "other.cpp"
    source.write_text("extern int symbol_of_another_torch();\nint x = symbol_of_another_torch();\n")
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", copy / "libtxl_cpu.so"], check=True)
    said = complain(copy)
    for text in (said["ERRORS"], said["REASON"]):
        assert "undefined symbol" in text and "symbol_of_another_torch" in text


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_named_backend_never_falls_back(name):
    import torch

    if why_not(name) is None and (INTERPRET or EMULATED):
        pytest.skip("TRITON_INTERPRET or TXL_CUDA_EMULATION: it runs on the CPU")
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(txl_kernels.BackendUnavailable, match=name):
        txl_kernels.rel_attention(q, q, q, q[0], backend=name)


def test_report_on_the_command_line():
    done = subprocess.run([sys.executable, "-m", "txl_kernels"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    import torch

    for text in ("cpu", "reference", "triton", "cuda", torch.__version__, txl_kernels.__version__):
        assert text in done.stdout, f"{text} is missing in\n{done.stdout}"
    why_not("cpu")  # loads its library
    assert torch.ops.txl_kernels.cpu_level() in done.stdout


def test_every_environment_variable_is_documented():
    read = re.compile(r"""(?:(?:environ\.get|environ|getenv)[(\[]"|\$\{)(TXL_\w+)[":]""")
    folders = ("txl_kernels", "txl_model", "csrc", "benchmarks")
    sources = [p for folder in folders for p in (ROOT / folder).rglob("*.*")]
    text = "".join(p.read_text() for p in sources if p.suffix in (".py", ".cpp", ".h", ".cu", ".sh"))
    documented = re.findall(r"^\| `(TXL_\w+)` ", (ROOT / "docs" / "environment.md").read_text(), re.M)
    assert sorted(documented) == sorted(set(read.findall(text)))


def test_a_bound_of_the_environment(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("TXL_SLOPE_MIB", "256")
    assert gpu.slope_bytes(cpu) == 2**28
    monkeypatch.setenv("TXL_SLOPE_MIB", "")
    assert gpu.slope_bytes(cpu) == 2**30
    for wrong in ("256M", "-1", "8796093022208"):
        monkeypatch.setenv("TXL_SLOPE_MIB", wrong)
        with pytest.raises(ValueError, match=f"TXL_SLOPE_MIB: got '{wrong}', needs a number of MiB"):
            gpu.slope_bytes(cpu)
    monkeypatch.setattr(gpu, "SLOPE_BYTES", 5)
    assert gpu.slope_bytes(cpu) == 5


def test_report_whose_reader_has_gone():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "txl_kernels"], stdout=write, stderr=subprocess.PIPE, timeout=120
    )
    os.close(write)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_report_without_libraries(copy):
    done = subprocess.run(
        [sys.executable, "-m", "txl_kernels"], capture_output=True, text=True, timeout=120, cwd=copy.parent
    )
    assert done.returncode == 0, done.stderr
    assert "does not exist" in done.stdout and "reference" in done.stdout


def test_backends_reports_every_name():
    report = txl_kernels.backends()
    assert list(report) == ["reference", "cpu", "triton", "cuda"]
    for name, info in report.items():
        assert info.name == name
        assert (info.reason is None) == info.available
    assert report["reference"].available


def test_layers_without_libraries(copy) -> None:
    """`linear` and `dropout` are torch's then."""
    done = python(f"""
import sys; sys.path.insert(0, {str(copy.parent)!r})
import torch
from txl_kernels import dropout, linear
x, weight = torch.ones(2, 8), torch.ones(3, 8)
with torch.no_grad():
    print(linear(x, weight).tolist() == [[8.0] * 3] * 2)
print(linear(x, weight.requires_grad_()).sum().item() == 48, dropout(x, 0.5).sum().item() % 2 == 0)
""")
    assert done.stdout.split() == ["True"] * 3, done.stderr

"""Shared set-up: poisoned memory, fixed seeds, threads put back, the list of backends in the header."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile

import interpreter
import pytest

# Workers (pytest -n) share the cores: threads of one that spin while they wait take them from the other, and
# all of it takes more than twice as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if interpreter.INTERPRET:
    interpreter.choose_products()

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS says that it is not deterministic

# torch's compiler keeps its code in a folder that outlives a run, and takes it on another CPU too: made where
# vectors are long, it computes wrong numbers where they are short (torch 2.13, ATEN_CPU_CAPABILITY=avx2). So
# each run has a folder of its own, which its workers and the processes it starts inherit.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="txl-tests-compiled-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import helpers
import torch

from txl_kernels import registry


def pytest_configure(config):
    # A shell's background jobs ignore Ctrl-C. The tests send it, to themselves and to commands they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "unpoisoned: leave torch.empty alone (poison would touch every page)")
    if interpreter.INTERPRET:  # NumPy's remarks on NaN and infinity, which Triton's interpreter computes with
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:numpy")
        interpreter.quicken()


def pytest_report_header(config):
    lines = [f"torch {torch.__version__}, {torch.get_num_threads()} threads"]
    for backend in helpers.BACKENDS:
        lines.append(f"backend {backend.name}: {helpers.why_not(backend.name) or 'available'}")
    return lines


@pytest.fixture(autouse=True)
def poisoned_memory(request):
    """Every tensor that torch allocates and does not fill, in Python or in C++, starts as NaN."""
    with helpers.poison(request.node.get_closest_marker("unpoisoned") is None):
        yield


@pytest.fixture(autouse=True)
def fresh_choice():
    """What a test pretends about backends is forgotten with it."""
    registry.choose.cache_clear()
    yield
    registry.choose.cache_clear()


@pytest.fixture(autouse=True)
def fixed_seed():
    """A test's numbers depend neither on the tests before it nor on the clock."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes 4 ms where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def gpu_still_works(request):
    """Ends the process if the test has broken the GPU (reading where nothing is, say): every later test would
    fail there. pytest-xdist goes on in a new one."""
    yield
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = f"{request.node.nodeid} broke the GPU: {error}"
        if not hasattr(request.config, "workerinput"):
            pytest.exit(message, returncode=3)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(message, file=sys.stderr, flush=True)
        os._exit(3)


@pytest.fixture
def threads():
    """torch.set_num_threads, put back after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

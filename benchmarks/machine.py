"""Where and with what the figures were taken."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from measure import MIB, last_cache_bytes

from txl_kernels import backends


def describe(device: str) -> dict[str, Any]:
    """The machine, and what our backends say of themselves."""
    about: dict[str, Any] = {
        "cpu": cpu_model(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "last_cache_mib": last_cache_bytes("cpu") // MIB,
        "gpu": torch.cuda.get_device_name(device) if device != "cpu" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if device != "cpu":
        about |= gpu(device)
    about["backends"] = {name: info.details for name, info in backends().items() if info.available}
    return about


def gpu(device: str) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_mib": properties.total_memory // MIB,
        "l2_cache_mib": properties.L2_cache_size // MIB,
        "driver": nvidia_driver(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def tiles() -> list[str]:
    """What the Triton backend measured and chose in this process. Other calls ran with the defaults."""
    if not backends()["triton"].available:
        return []
    from txl_kernels import triton

    return triton.tuned()


def nvidia_driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:  # in a container or a virtual machine, perhaps
        command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return None


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def commit() -> str | None:
    """The source's commit, with `+changes` where the tree differs from it, or what TXL_COMMIT says; None
    outside a git checkout."""
    if given := os.environ.get("TXL_COMMIT"):
        return given
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+changes" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None

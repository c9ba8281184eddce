"""What is installed, built and usable here: the text a bug report begins with."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import txl_kernels

Section = dict[str, str]


def collect() -> dict[str, Section]:
    """The report by section. Everything is a string; nothing that is missing is an error."""
    return {"versions": _versions(), "machine": _machine(), "build": _build(), "backends": _backends()}


def render(report: dict[str, Section]) -> str:
    width = max(len(name) for section in report.values() for name in section)
    lines = []
    for title, section in report.items():
        lines.append(title)
        lines += [f"  {name:<{width}}  {value}" for name, value in section.items()]
    return "\n".join(lines)


def _versions() -> Section:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "txl_kernels": f"{txl_kernels.__version__} in {Path(__file__).parent}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "triton": triton,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
    }


def _machine() -> Section:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _matters(name)]
    return {
        "platform": platform.platform(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()}",
        "gpu": ", ".join(gpus) or "none that torch can use",
        "environment": " ".join(variables) or "nothing set that matters here",
    }


def _matters(variable: str) -> bool:
    return variable.startswith(("TXL_", "OMP_")) or variable in (
        "CUDA_VISIBLE_DEVICES",
        "MKL_NUM_THREADS",
        "TRITON_INTERPRET",
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _build() -> Section:
    try:
        info = importlib.import_module("txl_kernels._build_info")
    except ImportError as error:
        return {"report": f"missing, so what was built is unknown ({error})"}
    facts = ((name, value) for name, value in vars(info).items() if not name.startswith("_"))
    return {name.replace("_", " "): value for name, value in facts if value}


def _backends() -> Section:
    section = {}
    for name, info in txl_kernels.backends().items():
        details = "; ".join(f"{key} {value}" for key, value in info.details.items())
        section[name] = (
            ", ".join(filter(None, ["available", details])) if info.available else f"no: {info.reason}"
        )
    return section

"""What of the build concerns the CUDA kernels: whether to build them, with which nvcc, for which GPUs.

Environment variables:
    TXL_BUILD_CUDA        auto (default): where nvcc is found and torch is a CUDA build; 0: no; 1: or fail
    TORCH_CUDA_ARCH_LIST  as torch's own builds have it: "8.0;9.0+PTX", "Ampere;Hopper" (default: 8.0, 9.0 and
                          10.0, as far as nvcc knows them, and PTX for the others and for parts to come); with
                          9.0, sm_90a too
    CUDACXX, CUDA_HOME    where nvcc is, if not on the PATH
"""

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from setuptools.errors import PlatformError

# Classes of head dimensions by element; a translation unit for each pair. Rows of float32 are twice as long:
# of more than 128 channels no block has room for them.
HEADS = (32, 64, 96, 128, 256)
CLASSES = {"bf16": HEADS, "f16": HEADS, "f32": (64, 128)}

# The kernels by warpgroups, for sm_90a alone: built wherever sm_90 is asked for.
WARPGROUP_CLASSES = {"bf16": (64, 128), "f16": (64, 128)}
WARPGROUP_ARCH = "90a"
WARPGROUP_FLAGS = ["-gencode", f"arch=compute_{WARPGROUP_ARCH},code=sm_{WARPGROUP_ARCH}"]

DEFAULT_ARCHS = ("8.0", "9.0", "10.0")
# As torch.utils.cpp_extension has them.
NAMED_ARCHS = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell+Tegra": "5.3",
    "Maxwell": "5.0 5.2+PTX",
    "Pascal": "6.0 6.1+PTX",
    "Volta+Tegra": "7.2",
    "Volta": "7.0+PTX",
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0 8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
}
OLDEST = 80  # cp.async, mma of bfloat16
# One PTX serves every part, as none of the other kernels has instructions that only later ones know: a third
# less to compile.
PTX = f"compute_{OLDEST}"
FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]


def units(classes: dict[str, tuple[int, ...]] = CLASSES) -> list[tuple[str, int]]:
    """Element and class of every translation unit, the longest to compile first."""
    pairs = [(element, head) for element, heads in classes.items() for head in heads]
    return sorted(pairs, key=lambda pair: -pair[1] * (2 if pair[0] == "f32" else 1))


@dataclass(frozen=True)
class Toolkit:
    nvcc: list[str]
    version: str  # "13.0"
    codes: tuple[str, ...]  # "sm_80", ..., PTX

    @property
    def warpgroups(self) -> bool:
        return "sm_90" in self.codes

    @property
    def targets(self) -> list[str]:
        return [*self.codes, *([f"sm_{WARPGROUP_ARCH}"] if self.warpgroups else [])]

    @property
    def flags(self) -> list[str]:
        return ["-gencode", f"arch={PTX},code=[{','.join(self.codes)}]"]


def find_nvcc() -> list[str] | None:
    """None if there is none; an error if CUDACXX names something else."""
    if asked := os.environ.get("CUDACXX"):
        nvcc = shlex.split(asked)
        if not version_of(nvcc):
            raise PlatformError(f"CUDACXX={asked!r} is not nvcc, or nvcc does not run.")
        return nvcc
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in ([f"{home}/bin/nvcc"] if home else []) + ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        if (found := shutil.which(candidate)) and version_of([found]):
            return [found]
    return None


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def version_of(nvcc: list[str]) -> str:
    """Empty if this is not nvcc, or does not run."""
    try:
        match = re.search(r"release ([\d.]+)", output_of([*nvcc, "--version"]))
    except (OSError, subprocess.CalledProcessError):
        return ""
    return match[1] if match else ""


def find_codes(nvcc: list[str]) -> tuple[str, ...]:
    known = set(output_of([*nvcc, "--list-gpu-code"]).split())
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    codes = []
    for arch in " ".join(NAMED_ARCHS.get(arch, arch) for arch in asked).split():
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
        if not match:
            raise PlatformError(f"TORCH_CUDA_ARCH_LIST: {arch!r} is not of the form 9.0, 9.0+PTX or Hopper")
        number = f"{match[1]}{match[2]}"
        if int(number) < OLDEST:
            print(f"txl-kernels: without sm_{number}: the CUDA kernels need sm_{OLDEST} or later")
        elif f"sm_{number}" not in known:
            raise PlatformError(f"TORCH_CUDA_ARCH_LIST has {arch}, which {nvcc[0]} does not know")
        else:
            codes += [f"sm_{number}"] + [PTX] * bool(match[4])
    if not asked:
        codes = [code for arch in DEFAULT_ARCHS if (code := f"sm_{arch.replace('.', '')}") in known]
        codes.append(PTX)
    if not codes:
        raise PlatformError(f"TORCH_CUDA_ARCH_LIST={' '.join(asked)!r} has nothing from sm_{OLDEST} on")
    return tuple(dict.fromkeys(codes))


def find_toolkit(torch: Path) -> tuple[Toolkit | None, str]:
    """nvcc and its targets, or None; and what the report says of it."""
    asked = os.environ.get("TXL_BUILD_CUDA") or "auto"
    if asked not in ("auto", "0", "1"):
        raise PlatformError(f"TXL_BUILD_CUDA is {asked!r}; it must be auto, 0 or 1.")
    if asked == "0":
        return None, "not built: TXL_BUILD_CUDA=0"
    # torch is not imported: that takes seconds. Whether there is a GPU now says nothing about later.
    cuda_torch = re.search(r"^cuda.*=\s*['\"]", (torch / "version.py").read_text(), re.MULTILINE)
    if asked == "auto" and not cuda_torch:
        return None, "not built: this torch has no CUDA (TXL_BUILD_CUDA=1 builds them all the same)"
    nvcc = find_nvcc()
    if nvcc is None:
        if asked == "1":
            raise PlatformError(
                "TXL_BUILD_CUDA=1, but no nvcc that runs was found: put it on the PATH or set CUDACXX."
            )
        return None, "not built: no nvcc that runs was found"
    try:
        codes = find_codes(nvcc)
    except PlatformError as error:
        # The list may be meant for other builds; the CPU's kernels do not need it.
        if asked == "1":
            raise
        return None, f"not built: {error}"
    toolkit = Toolkit(nvcc, version_of(nvcc), codes)
    return toolkit, f"{' '.join(toolkit.targets)} (nvcc {toolkit.version})"

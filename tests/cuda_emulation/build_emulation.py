"""Builds the CUDA kernels for the CPU, on top of emulation.h, and prints where the library is.

TXL_CUDA_EMULATION=$(python tests/cuda_emulation/build_emulation.py) pytest -k cuda
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "csrc"))
import ninja_build  # noqa: E402


def build() -> Path:
    return ninja_build.build_emulation(ROOT / "build" / "emulation")


if __name__ == "__main__":
    print(build())

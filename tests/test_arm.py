"""The C++ kernels compile for ARM, and there a product's sums stay in registers. Needs a cross compiler
(Debian: g++-aarch64-linux-gnu), not an ARM machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

sys.path.insert(0, str(ROOT / "csrc"))
import ninja_build

TARGET = "aarch64-linux-gnu-"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(f"{TARGET}g++") is None, reason=f"needs {TARGET}g++"),
]


def loops(disassembly: str):
    """(function, instructions) of the loops without jumps, and with many multiply-adds: those of products."""
    function, body = "", {}
    for line in disassembly.splitlines():
        if start := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            function, body = start[1], {}
        elif found := re.match(r" +([0-9a-f]+):\t(\S+)\s*(.*)", line):
            at, name, operands = int(found[1], 16), found[2], found[3]
            body[at] = f"{name} {operands}"
            back = re.search(r"\b([0-9a-f]+) <", operands) if name.startswith("b.") else None
            if back and int(back[1], 16) in body:
                inside = [body[x] for x in range(int(back[1], 16), at, 4)]
                if sum(i.startswith("fmla") for i in inside) >= 8 and not any(
                    i.startswith(("b", "ret", "cb", "tb")) for i in inside
                ):
                    yield function, inside


@pytest.mark.parametrize("dtype", ninja_build.DTYPES)
def test_sums_stay_in_registers(dtype, tmp_path):
    out = tmp_path / "kernels.o"
    flags = [*ninja_build.COMMON_FLAGS, *ninja_build.OPTIMISED_FLAGS, *ninja_build.ARM_FLAGS, "-Werror"]
    defines = ["-DTXL_LEVEL=baseline", f"-DTXL_DTYPE={dtype}"]
    source = ROOT / "csrc/cpu/kernels.cpp"
    subprocess.run([f"{TARGET}g++", *flags, *defines, "-c", source, "-o", out], check=True)
    disassembly = subprocess.run(
        [f"{TARGET}objdump", "-d", "--no-show-raw-insn", out], check=True, capture_output=True, text=True
    ).stdout
    products = [(f, body) for f, body in loops(disassembly) if "panel_tile" in f or "add_tile" in f]
    # A whole register tile is 24 multiply-adds.
    assert sum(i.startswith("fmla") for _, body in products for i in body) >= 24
    assert any(sum(i.startswith("fmla") for i in body) == 24 for _, body in products)
    for function, body in products:
        assert not [i for i in body if "[sp" in i], (function, body)

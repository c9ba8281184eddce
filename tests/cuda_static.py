"""What nvcc makes of the CUDA kernels, without a GPU: registers, spills, shared memory, how many blocks fit
into a multiprocessor, and instructions of the loops over tiles.

    python tests/cuda_static.py --write docs/cuda_kernels.md
    python tests/cuda_static.py --element f32 --head 64 --arch 90

Reads the objects of libtxl_cuda.so, which it builds where they are not up to date. Needs nvcc, and the
disassembler that comes with Triton.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import unittest.mock
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm
from triton_static import NVIDIA, Counts, _loops, _tool

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cuda_emulation"))
import build_emulation  # noqa: E402

sys.path.insert(0, str(ROOT / "csrc"))
import cuda_build  # noqa: E402
import ninja_build  # noqa: E402

ARCHS = (80, 90, 100)
# float16's kernels are bfloat16's with other names of instructions.
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# Of a multiprocessor: KiB of shared memory, of which a block costs one more than it asks for; registers;
# threads.
SHARED = {80: 164, 90: 228, 100: 228}
THREADS = 2048
# Of sm_86's and sm_89's, which run sm_80's code.
SMALL_SHARED, SMALL_THREADS = 100, 1536
REGISTERS = 65536
# The largest D whose kernels every GPU has shared memory for.
NARROW = {"bf16": 128, "f32": 64}
# By the kernel of dk and dv, which holds keys, values and sums: an H200 was faster with some, and larger
# tiles or addresses known beforehand.
SPILLS = {64: 24, 128: 24, 256: 32}


def may_spill(kernel: str) -> int:
    """Bytes per thread, none of them in near loops."""
    if kernel.startswith("DqKernel<SlopeBlock<float, 64,"):
        return 8  # 168 registers, so that a third block fits
    match = re.match(r"DkDvKernel<\w+<(?:b?f16|float), (\d+)[,>]", kernel)
    return SPILLS.get(int(match[1]), 0) if match else 0


@dataclass(frozen=True)
class Report:
    kernel: str  # "ForwardKernel<ForwardBlock<bf16, 64, 4, false>, false>"
    element: str
    head: int
    arch: int
    registers: int
    stack: int  # bytes per thread: spilled registers, arrays that are indexed at run time
    shared: int  # bytes per block
    threads: int
    loops: tuple[Counts, ...]  # those over tiles
    # Accesses to global memory before it has waited for the kernel that was launched before it
    # (griddepcontrol.wait); None if it does not wait.
    early: int | None

    @property
    def blocks(self) -> int:
        """That fit into a multiprocessor."""
        return self._blocks_in(SHARED[self.arch], THREADS)

    @property
    def small_blocks(self) -> int:
        """That fit into a multiprocessor of sm_86 or sm_89."""
        return self._blocks_in(SMALL_SHARED, SMALL_THREADS)

    def _blocks_in(self, shared: int, threads: int) -> int:
        of_registers = REGISTERS // (-(-self.registers // 8) * 8 * self.threads)
        return min(of_registers, shared * 1024 // (self.shared + 1024), threads // self.threads)

    @property
    def local(self) -> int:
        """Loads and stores of local memory in the loops."""
        return sum(loop.local for loop in self.loops)

    @property
    def tensor(self) -> int:
        return sum(loop.tensor for loop in self.loops)


def short(kernel: str) -> str:
    return re.sub("> (?=>)", ">", kernel.replace("txl::cuda::", "").replace("::txl::cuda::", ""))


@functools.cache
def launches(element: str, head: int) -> dict[str, tuple[int, int]]:
    """Threads and shared memory of the kernels of a class, which only the launching code knows: it is run."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        environment = {
            **os.environ,
            "TXL_CUDA_EMULATION": str(build_emulation.build()),
            "TXL_EMULATION_TRACE": str(trace),
            "PYTHONPATH": str(ROOT),
        }
        script = f"""
import torch, txl_kernels
from txl_kernels import cuda, gpu
gpu.SLOPE_BYTES = 0  # so that dr is summed from parts
u = torch.ones(1, {head}, dtype=torch.{DTYPES[element]}, requires_grad=True)
k = torch.ones(1, 1, 600, {head}, dtype=torch.{DTYPES[element]})
r = torch.ones(1, 99, {head}, dtype=torch.{DTYPES[element]}, requires_grad=True)
for L in (1, 20, 70):
    for p in (0.0, 0.5):
        out = txl_kernels.rel_attention(
            k[:, :, :L], k, k, r, u, u, backend="cuda", dropout_p=p, dropout_seed=1
        )
        out.sum().backward()
cuda.WARPGROUPS = True
gpu.key_splits = lambda *_: 2
for p in (0.0, 0.5):
    txl_kernels.rel_attention(k[:, :, :1], k, k, k[0], u, u, backend="cuda", dropout_p=p, dropout_seed=1)
    out = txl_kernels.rel_attention(
        k[:, :, :20], k[:, :, :99], k[:, :, :99], r, u, u, backend="cuda", dropout_p=p, dropout_seed=1
    )
    out.sum().backward()
"""
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        lines = [line.split("|") for line in trace.read_text().splitlines()]
    # The most that a kernel asks for comes last.
    lines.sort(key=lambda line: int(line[3]))
    return {short(kernel): (int(threads), int(shared)) for kernel, _boxes, threads, shared in lines}


def objects(element: str, head: int) -> list[str]:
    """Of libtxl_cuda.so: those of a class."""
    names = [ninja_build.object_of("cuda/kernels.cu", element, str(head))]
    if head in cuda_build.WARPGROUP_CLASSES.get(element, ()):
        names.append(ninja_build.object_of("cuda/warpgroup_kernels.cu", element, str(head)))
    return names


def build(classes: list[tuple[str, int]]) -> dict[tuple[str, int], list[Path]]:
    """Brings the objects of these classes up to date, for the default list of parts; where they are."""
    names = [name for one in classes for name in objects(*one)]
    default = {"TXL_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "", "TXL_SANITIZE": ""}
    with unittest.mock.patch.dict(os.environ, default), contextlib.redirect_stdout(sys.stderr):
        paths = dict(zip(names, ninja_build.build_native(False, names), strict=True))
    return {one: [paths[name] for name in objects(*one)] for one in classes}


def read_class(element: str, head: int, archs: tuple[int, ...], built: list[Path]) -> list[Report]:
    with tempfile.TemporaryDirectory() as folder:
        for path in built:
            _tool("cuobjdump", "--extract-elf", "all", str(path), cwd=folder)
        return [
            report
            for arch in archs
            for cubin in sorted(Path(folder).glob(f"*.sm_{arch}*.cubin"))
            for report in read_cubin(cubin, element, head, arch)
        ]


def read_cubin(cubin: Path, element: str, head: int, arch: int) -> list[Report]:
    usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
    code = _tool("nvdisasm", "--print-code", str(cubin))
    reports = []
    for name, registers, stack in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage):
        readable = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
        match = re.search(r"entry<(.*)>\(", short(readable))
        if match is None:
            raise ValueError(f"{readable} is no kernel of ours")
        kernel = match[1].strip()
        known = launches(element, head).get(kernel)
        if known is None:
            raise ValueError(f"{kernel} is compiled and never launched")
        threads, shared = known
        section = code[code.index(f".section\t.text.{name},") :]
        instructions = section.split("\t.section\t", 1)[0]
        _, *loops = _loops(NVIDIA, instructions)
        sizes = (int(registers), int(stack), shared, threads)
        before, waits, _ = instructions.partition("ACQBULK")
        early = len(re.findall(r"\s(?:LD|ST|ATOM|RED|UTMA)G?\w*\.E\b", before)) if waits else None
        reports.append(Report(kernel, element, head, arch, *sizes, tuple(loops), early))
    return sorted(reports, key=lambda report: report.kernel)


def reports(elements=tuple(DTYPES), heads=cuda_build.HEADS, archs=ARCHS, jobs: int = 2) -> list[Report]:
    classes = [(e, head) for e in elements for head in cuda_build.CLASSES[e] if head in heads]
    built = build(classes)
    for element, head in classes:
        launches(element, head)  # builds the emulation, once
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda pair: read_class(*pair, archs, built[pair]), classes)
        return [report for part in tqdm(done, total=len(classes), unit="class") for report in part]


PREAMBLE = """# The CUDA kernels as compiled

By `python tests/cuda_static.py --write docs/cuda_kernels.md`, nvcc {version}, without a GPU.
float16's kernels are bfloat16's with other names of instructions.

* **registers** and **stack** (bytes) per thread, **shared**: KiB per block, **blocks** of a kernel that fit
  into a multiprocessor, in brackets into one of sm_86 or sm_89, which run sm_80's code.
* Of the loops over tiles, all their branches together: **instructions**, **tensor**: products by tensor
  cores, **local**: loads and stores of spilled registers.
* A kernel's parameters: element, class of head dimensions, then its tile; the last says whether it drops.
  Forward's are its block of queries and that: `ForwardBlock` (warps, and whether the next kernel may begin
  early) or, for sm_90a, `WarpgroupQueryBlock`, whose products have 64 rows, not 16. So are dk and dv's:
  `KeyBlock` (keys, queries, warps, whether keys are held) or `WarpgroupKeyBlock`; dq's: `SlopeBlock` (keys)
  or `WarpgroupSlopeBlock`; and dr's: `RowBlock` (queries) or `WarpgroupRowBlock`.
"""
COLUMNS = ("kernel", "registers", "stack", "shared", "blocks", "instructions", "tensor", "local")


def nvcc_version() -> str:
    version = re.search(r"\bV([\d.]+)", cuda_build.output_of([*(cuda_build.find_nvcc() or []), "--version"]))
    return version[1] if version else "unknown"


def document(found: list[Report]) -> str:
    lines = [PREAMBLE.format(version=nvcc_version())]
    for element, head, arch in dict.fromkeys((r.element, r.head, r.arch) for r in found):
        lines += [
            f"\n## {DTYPES[element]}, D up to {head}, sm_{arch}\n",
            f"| {' | '.join(COLUMNS)} |",
            "|---" * len(COLUMNS) + "|",
        ]
        for r in found:
            if (r.element, r.head, r.arch) == (element, head, arch):
                blocks = f"{r.blocks} ({r.small_blocks})" if arch == 80 else r.blocks
                cells = [r.kernel, r.registers, r.stack, f"{r.shared / 1024:.0f}", blocks]
                cells += [sum(loop.instructions for loop in r.loops), r.tensor, r.local]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--element", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--head", type=int, choices=cuda_build.HEADS, nargs="+", default=cuda_build.HEADS)
    parser.add_argument("--arch", type=int, choices=ARCHS, nargs="+", default=ARCHS)
    parser.add_argument("--jobs", type=int, default=2, help="classes disassembled at once (default: 2)")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the page there (default: print it)")
    arguments = parser.parse_args()
    page = document(reports(arguments.element, arguments.head, arguments.arch, arguments.jobs))
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()

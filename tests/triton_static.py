"""Compiles the Triton kernels ahead of time for GPUs that need not be there, and reads what came out:
registers, spills, shared memory, and the instructions of each loop.

    every tile in the lists, minutes:   python tests/triton_static.py --write docs/triton_kernels.md
    a part of the table, printed:       python tests/triton_static.py --kernel dq --arch sm_90 --head-dim 64
    a tile that is in no list:          the same with --tile 32,64,4,2

Needs Triton and no GPU. Triton keeps what it compiled in its own cache (TRITON_CACHE_DIR).
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import itertools
import multiprocessing
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import networkx
import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from txl_kernels.triton import KERNELS, configs
from txl_kernels.triton._forward import merge_kernel
from txl_kernels.triton.configs import Tile
from txl_kernels.triton.tiles import View

Arch = int | str  # as Triton writes it: 90, "gfx942"

# KiB of shared memory that one block may ask for.
SHARED_LIMIT: dict[Arch, int] = {80: 163, 86: 99, 90: 227, 100: 227, "gfx942": 64}
TENSOR_MEMORY_COLUMNS = 512  # sm_100

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
HEAD_DIMS = (64, 128, 256)
ODD_HEAD_DIM = 41  # rows begin anywhere: nothing wider than an element can be loaded


def arch_name(arch: Arch) -> str:
    return f"sm_{arch}" if isinstance(arch, int) else arch


def code_of(arch: Arch, dtype: torch.dtype) -> Arch:
    """The part whose code stands for that of `arch`: it is the same, or all but the same where no tensor core
    is used. Compiled once, and held against the limits of both."""
    if arch == 86:
        return 80
    return 90 if (arch, dtype) == (100, torch.float32) else arch


# ---- What to compile ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kernel as some call would have it compiled."""

    kernel: str
    dtype: torch.dtype
    D: int
    arch: Arch
    tile: Tile
    full: bool = False  # with dropout, clamped distances and a key range
    limits: tuple[Arch, ...] = ()  # the parts that may be given this tile, if not `arch` alone

    @property
    def archs(self) -> tuple[Arch, ...]:
        return self.limits or (self.arch,)

    @property
    def lines(self) -> tuple[str, ...]:
        """The loops over tiles, in the order of the source."""
        full = self.full and self.kernel != "dr"
        if self.kernel == "dk_dv":  # the queries in their order
            return ("first", "far first", "near", "far last", "edge") if full else ("first", "near", "edge")
        return ("far", "near", "edge") if full else ("near", "edge")

    def __str__(self) -> str:
        BM, BN, num_warps, num_stages, again = self.tile
        return (
            f"{self.kernel}{' again' * again} {TYPES[self.dtype]} D={self.D} {arch_name(self.arch)} "
            f"{BM}x{BN} {num_warps} warps {num_stages} stages{' all options' if self.full else ''}"
        )


def cases(
    kernels: Iterable[str] = configs.KERNELS,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    head_dims: Iterable[int] = (*HEAD_DIMS, ODD_HEAD_DIM),
    archs: Iterable[Arch] = tuple(SHARED_LIMIT),
) -> list[Case]:
    """Every tile that may be chosen, for each kind of code it becomes.

    float16 differs from bfloat16 in the names of instructions, and is here once. D = 41 takes the list of
    D = 64, and is here with its default.
    """
    found: dict[Case, list[Arch]] = {}
    for dtype, D, arch, kernel in itertools.product(dtypes, head_dims, archs, kernels):
        if dtype == torch.float16 and (kernel, D, arch) != ("forward", 64, 90):
            continue
        if D == ODD_HEAD_DIM and dtype != torch.bfloat16:
            continue
        tiles = configs.candidates(kernel, D, dtype.itemsize, arch)
        if D == ODD_HEAD_DIM or dtype == torch.float16:
            tiles = tiles[:1]
        for tile in tiles:
            code = code_of(arch, dtype)
            if code != arch and Case(kernel, dtype, D, code, tile) not in found:
                code = arch
            found.setdefault(Case(kernel, dtype, D, code, tile), []).append(arch)
    return [
        Case(case.kernel, case.dtype, case.D, case.arch, case.tile, limits=tuple(archs))
        for case, archs in found.items()
    ]


# ---- Compiling ---------------------------------------------------------------------------------------------


def _source(kernel: Any, dtype: torch.dtype, constants: dict[str, Any], part: bool) -> ASTSource:
    """The kernel, specialised as Triton would for contiguous tensors. part: out is a split's, in float32."""
    element = f"*{TYPES[dtype]}"
    D = constants["D"]
    aligned = [["tt.divisibility", 16]]
    options = {
        "bias_u": (element, constants.get("HAS_U")),
        "bias_v": (element, constants.get("HAS_V")),
        "key_range": ("*i32", constants.get("HAS_RANGE")),
        "seed": ("*i64", constants.get("DROPOUT")),
    }
    signature: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    for n, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(n,)] = "constexpr", constants[name]
        elif name in options:
            pointer, given = options[name]
            signature[name] = pointer if given else "constexpr"
            (attributes if given else values)[(n,)] = aligned if given else None
        elif name in ("q_u", "q_v", "k", "v", "r", "part", "out", "dout", "dq", "dk", "dv", "dr"):
            signature[name] = View(
                "*fp32" if name == "part" or (part and name == "out") else element, "i32", "i32", "i32"
            )
            # Triton notes of a stride whether 16 divides it.
            attributes.update({(n, m): aligned for m in range(4 if D % 16 == 0 else 1)})
        elif name in ("scale", "dropout_scale"):
            signature[name] = "fp32"
        elif name in ("lse", "largest_and_total", "delta", "parts", "sums", "slopes"):
            signature[name] = element if name == "slopes" else "*fp32"
            attributes[(n,)] = aligned
        else:
            signature[name] = "i32"
    return ASTSource(kernel, signature, values, attributes)


def _compile(source: ASTSource, arch: Arch, options: dict[str, int]) -> Any:
    target = GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)
    # Said outright: from 3.9 on Triton warns that its default will change.
    return triton.compile(source, target=target, options={**options, "enable_fp_fusion": True})


# ---- Reading -----------------------------------------------------------------------------------------------


class Instruction(NamedTuple):
    name: str  # "LDG.E.128", "v_mfma_f32_32x32x8_bf16"
    operands: str
    guarded: bool  # by a predicate


@dataclass(frozen=True)
class Vendor:
    label: re.Pattern[str]  # group 1: a label, as branches name it
    instruction: re.Pattern[str]  # groups: guard, name, operands
    branch: re.Pattern[str]  # matches the name of a branch
    always: Callable[[Instruction], bool]  # of a branch: whether what follows is not reached from it
    end: re.Pattern[str]
    kinds: dict[str, re.Pattern[str]]


NVIDIA = Vendor(
    label=re.compile(r"(\.L_x_\d+):"),
    instruction=re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)"),
    # For sm_80 a far branch that is guarded is written as a call, of a label within the function.
    branch=re.compile(r"(BRA|CALL\.REL\.NOINC)\b"),
    always=lambda i: i.name == "BRA" and not i.guarded and i.operands.lstrip().startswith("`("),
    end=re.compile(r"(EXIT|RET)\b"),
    kinds={
        "tensor": re.compile(r"HMMA|HGMMA|UTC\w*MMA"),
        "plain": re.compile(r"FFMA"),
        "exponential": re.compile(r"MUFU\.EX2"),
        "shuffle": re.compile(r"SHFL"),
        "shared": re.compile(r"LDS\b|STS\b|LDSM|STSM"),
        "loads": re.compile(r"LDG\b|LDGSTS"),
        "wide": re.compile(r"LDG(STS)?\.(.*\.)?128\b"),
        "local": re.compile(r"LDL|STL"),
    },
)
AMD = Vendor(
    label=re.compile(r"(\.LBB\d+_\d+):"),
    instruction=re.compile(r"\s+()([a-z][a-z0-9_]+)(?:\s+([^;]*))?"),
    branch=re.compile(r"s_c?branch"),
    always=lambda i: i.name == "s_branch",
    end=re.compile(r"s_endpgm"),
    kinds={
        "tensor": re.compile(r"v_mfma"),
        "plain": re.compile(r"v_(pk_)?fmac?_f32"),
        "exponential": re.compile(r"v_exp_f32"),
        "shuffle": re.compile(r"ds_(b?permute|swizzle)|v_permlane|.*_dpp"),
        "shared": re.compile(r"ds_(read|write)"),
        "loads": re.compile(r"(global|buffer|flat)_load"),
        "wide": re.compile(r"(global|buffer|flat)_load_dwordx4"),
        "local": re.compile(r"scratch_(load|store)"),
    },
)


@dataclass(frozen=True)
class Counts:
    """Instructions of a part of the code. Each warp executes those of a loop once per tile."""

    instructions: int
    names: collections.Counter[str]  # of those of a kind below
    kinds: dict[str, int]

    def __getattr__(self, kind: str) -> int:
        try:
            return self.__dict__["kinds"][kind]
        except KeyError:
            raise AttributeError(kind) from None


@dataclass(frozen=True)
class Report:
    registers: int  # per thread
    spills: int  # bytes per thread
    shared: int  # bytes per block
    tensor_memory: int  # columns per block
    loops: dict[str, Counts] = field(repr=False)  # and under "" the whole kernel


def _count(vendor: Vendor, instructions: Iterable[Instruction]) -> Counts:
    names = collections.Counter(i.name for i in instructions)
    kinds = {
        kind: sum(n for name, n in names.items() if pattern.match(name))
        for kind, pattern in vendor.kinds.items()
    }
    return Counts(names.total(), names, kinds)


def _blocks(vendor: Vendor, code: str) -> tuple[list[list[Instruction]], networkx.DiGraph]:
    """Basic blocks, and which may follow which."""
    blocks: list[list[Instruction]] = [[]]
    named: dict[str, int] = {}
    for line in code.splitlines():
        if label := vendor.label.match(line):
            blocks.append([])
            named[label[1]] = len(blocks) - 1
        elif found := vendor.instruction.match(line):
            instruction = Instruction(found[2], found[3] or "", bool(found[1]))
            blocks[-1].append(instruction)
            if vendor.branch.match(instruction.name) or vendor.end.match(instruction.name):
                blocks.append([])
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(blocks)))
    for n, block in enumerate(blocks):
        last = block[-1] if block else Instruction("", "", False)
        falls_through = not (vendor.end.match(last.name) and not last.guarded)
        if vendor.branch.match(last.name):
            label = re.search(r"\.L\w+", last.operands)
            if label and label[0] in named:
                graph.add_edge(n, named[label[0]])
            falls_through = not vendor.always(last)
        if falls_through and n + 1 < len(blocks):
            graph.add_edge(n, n + 1)
    return blocks, graph


def _loops(vendor: Vendor, code: str) -> Iterator[Counts]:
    """The whole kernel, then its innermost loops over tiles, in the order of the code.

    A loop over tiles is one that takes exponentials or, where none does, one with products: tensor cores' or,
    in float32, plain ones. Others wait for a barrier, or go over batch entries.
    """
    blocks, graph = _blocks(vendor, code)
    yield _count(vendor, itertools.chain(*blocks))
    graph = graph.subgraph({0} | networkx.descendants(graph, 0))
    dominators = networkx.immediate_dominators(graph, 0)
    bodies: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        # Natural loops: an edge back to a block that lies on every way to where it comes from.
        block = tail
        while block not in (head, 0):
            block = dominators[block]
        if block == head:
            body = bodies.setdefault(head, {head})
            if tail != head:
                body |= {tail} | networkx.ancestors(networkx.restricted_view(graph, [head], []), tail)

    def with_any(kind: str) -> dict[int, set[int]]:
        names = vendor.kinds[kind]
        return {
            head: body
            for head, body in bodies.items()
            if any(names.match(i.name) for n in body for i in blocks[n])
        }

    over_tiles = with_any("exponential") or with_any("tensor") or with_any("plain")
    for head, body in sorted(over_tiles.items()):
        if not any(other != head and others < body for other, others in over_tiles.items()):
            yield _count(vendor, itertools.chain(*(blocks[n] for n in body)))


def _tool(name: str, *arguments: str, cwd: str | None = None) -> str:
    """What one of the CUDA tools that come with Triton prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True, cwd=cwd).stdout


def _read(compiled: Any, lines: tuple[str, ...]) -> Report:
    if "amdgcn" in compiled.asm:
        vendor, code = AMD, compiled.asm["amdgcn"]
        registers, spills = (
            int(re.search(rf"\.{name}:\s*(\d+)", code)[1])
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        vendor = NVIDIA
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
            code = _tool("nvdisasm", "--print-code", file.name)
        registers, spills = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    loops = dict(zip(("", *lines), _loops(vendor, code), strict=True))
    tensor_memory = getattr(compiled.metadata, "tmem_size", 0) or 0
    return Report(registers, spills, compiled.metadata.shared, tensor_memory, loops)


def compiled(case: Case) -> Any:
    """As Triton keeps it: code at every stage, and metadata."""
    decode = case.kernel == "decode"
    constants = dict(
        D=case.D,
        BD=configs.block_of_head(case.D),
        HAS_U=decode,
        HAS_V=decode,
        HAS_RANGE=case.full,
        CLAMP=case.full,
        NEGATIVE=False,
        DROPOUT=case.full,
        BM=case.tile.BM,
        BN=case.tile.BN,
        AGAIN=case.tile.again,
    )
    kernel = KERNELS[case.kernel]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = _source(kernel, case.dtype, constants, part=decode)
    return _compile(source, case.arch, case.tile.options(case.arch))


def report(case: Case) -> Report:
    """Compiles a case and reads it."""
    return _read(compiled(case), case.lines)


def merge_report(dtype: torch.dtype, D: int, splits: int, arch: Arch) -> Report:
    """The kernel that joins the splits of a decode call."""
    constants = dict(D=D, BD=configs.block_of_head(D), **configs.merged(D, splits))
    return _read(_compile(_source(merge_kernel, dtype, constants, part=False), arch, {}), ("splits",))


def _attempt(case: Case) -> Report | str:
    try:
        return report(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def reports(todo: list[Case], jobs: int = 2) -> dict[Case, Report | str]:
    """Every case's report, or what went wrong."""
    # Not forked: torch has threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        results = pool.map(_attempt, todo)
        return dict(zip(todo, tqdm(results, total=len(todo), unit="kernel"), strict=True))


# ---- The document ------------------------------------------------------------------------------------------

PREAMBLE = """# The Triton kernels as compiled

Every tile in `txl_kernels/triton/configs.py`, compiled without a GPU by Triton {version} (`python
tests/triton_static.py --write docs/triton_kernels.md`), without dropout, clamped distances or a key
range; of D = 41 and of float16 only some defaults. The first row of a kernel is its default; autotuning
measures the others beside it.

* **registers** per thread, **stack**: spilled bytes per thread, **shared**: KiB per block, of what the
  part allows.
* **loop**: instructions that a warp issues for a tile in the near loop, where nearly all the work is.
  **per pair**: those of all warps over the score pairs of the tile, the figure the lists are chosen by.
  On Hopper the tensor cores work on forward's three products for as long as it takes to issue 0.36
  instructions per pair at D = 64, 0.72 at D = 128.
* **tensor**: tensor-core instructions of that loop. **shuffles**. **smem**: its loads and stores of
  shared memory. **16 bytes**: its loads of 16 bytes, of all its loads from global memory; the others are
  numbers per query, dr's of the gradient of scores, whose rows begin anywhere, and at D = 41 all but dq's of
  that.
* **local**: its loads and stores of spilled registers / those of the edge loop.

The edge loop has masks, clamped rows and NaN to see to; a few tiles per block of queries or keys go
through it, and it may spill. Where the near loop does, the last column has the share of its instructions
that this takes, and why the tile is in the list all the same.
"""


FEWER = "fewer instructions per pair than tiles of as many stages without"


def per_pair(case: Case, result: Report) -> float:
    """Instructions that the warps issue in the near loop, over the pairs of a tile."""
    return result.loops["near"].instructions * case.tile.num_warps / (case.tile.BM * case.tile.BN)


def reason(case: Case) -> str:
    """Why a tile is in the list though its near loop spills."""
    BM, BN, num_warps = case.tile[:3]
    lanes = num_warps * (32 if isinstance(case.arch, int) else 64)
    rows = {"forward": BM, "decode": BM, "dq": 2 * BM, "dk_dv": 2 * BN, "dr": BN}[case.kernel]
    accumulators = max(1, rows * configs.block_of_head(case.D) // lanes)
    if case.D % 8:
        return "an address for every element"
    if case.dtype == torch.float32:
        return f"operands in registers beside accumulators ({accumulators})"
    if case.D > 128:
        return f"D = {case.D}: {accumulators} registers of accumulators"
    return FEWER


def _row(case: Case, result: Report | str) -> str:
    BM, BN, num_warps, num_stages, again = case.tile
    name = f"{case.kernel}{' again' * again} | {BM} x {BN} | {num_warps} | {num_stages}"
    if isinstance(result, str):
        return f"| {name} | does not compile: {result.splitlines()[0][:80]} |"
    near, edge = result.loops["near"], result.loops["edge"]
    limits = "/".join(str(SHARED_LIMIT[arch]) for arch in case.archs)
    cells = [
        result.registers,
        result.spills,
        f"{result.shared / 1024:.0f} of {limits}",
        near.instructions,
        f"{per_pair(case, result):.2f}",
        near.tensor,
        near.shuffle,
        near.shared,
        f"{near.wide} of {near.loads}",
        f"{near.local} / {edge.local}",
        f"{near.local / near.instructions:.0%}: {reason(case)}" if near.local else "",
    ]
    return f"| {name} | " + " | ".join(map(str, cells)) + " |"


COLUMNS = (
    *("kernel", "tile", "warps", "stages", "registers", "stack", "shared"),
    *("loop", "per pair", "tensor", "shuffles", "smem", "16 bytes", "local", "the near loop spills"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def document(results: dict[Case, Report | str]) -> str:
    """The page, a table per GPU, dtype and head dimension."""
    lines = [PREAMBLE.format(version=triton.__version__)]
    groups = itertools.groupby(
        sorted(results, key=lambda c: (str(c.archs), TYPES[c.dtype], c.D)), lambda c: (c.archs, c.dtype, c.D)
    )
    for (archs, dtype, D), cases_of_group in groups:
        names = ", ".join(map(arch_name, archs))
        lines += [f"\n## {names}, {str(dtype).removeprefix('torch.')}, D = {D}\n", HEADER]
        lines += [_row(case, results[case]) for case in cases_of_group]
    return "\n".join(lines) + "\n"


def tiles_in(page: str) -> list[tuple[str, ...]]:
    """(heading, kernel, tile, warps, stages) of every row."""
    found, heading = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|") and not line.startswith(("| kernel", "|---")):
            found.append((heading, *(cell.strip() for cell in line.split("|")[1:5])))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {arch_name(arch): arch for arch in SHARED_LIMIT}
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in TYPES}
    parser.add_argument("--kernel", choices=configs.KERNELS, nargs="+", default=configs.KERNELS)
    parser.add_argument("--arch", choices=names, nargs="+", default=list(names))
    parser.add_argument("--dtype", choices=dtypes, nargs="+", default=list(dtypes))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[*HEAD_DIMS, ODD_HEAD_DIM])
    parser.add_argument("--tile", help="BM,BN,warps,stages: this tile instead of those in the lists")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default: 2)")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the page there (default: print it)")
    arguments = parser.parse_args()

    todo = cases(
        arguments.kernel,
        [dtypes[name] for name in arguments.dtype],
        arguments.head_dim,
        [names[name] for name in arguments.arch],
    )
    if arguments.tile:
        tile = Tile(*map(int, arguments.tile.split(",")))
        todo = list(dict.fromkeys(replace(case, tile=tile) for case in todo))
    page = document(reports(todo, arguments.jobs))
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()

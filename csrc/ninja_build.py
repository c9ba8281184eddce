"""Builds the C++ of this folder: finds what the machine offers, writes one build.ninja, runs it.

Up to three libraries come out:
    libtxl_cpu.so               the CPU kernels and their torch ops (LibTorch stable ABI, no Python)
    libtxl_cuda.so              the CUDA kernels and theirs, where nvcc and torch allow it (cuda_build.py)
    _build_info.<abi tag>.so    what was built, and with what (pybind11, no torch)
The last is left out, with a note, where Python's headers are missing: system Pythons often come without.

Environment variables: CXX, CXXFLAGS, LDFLAGS, MAX_JOBS, those of cuda_build.py,
    TXL_BUILD_DIR   where objects are kept between builds (default: build)
    TXL_SANITIZE    e.g. address,undefined: an instrumented build, its objects kept apart
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import cuda_build
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).resolve().parent.parent

# The oldest torch this build runs on. Every unit must see the same target (2.10 is 0x02 0x0a), or two units
# of one library disagree about the stable ABI's types.
TORCH_AT_LEAST = (2, 10)
TORCH_TARGET_VERSION = f"0x{TORCH_AT_LEAST[0]:02x}{TORCH_AT_LEAST[1]:02x}000000000000"

COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
COMMON_FLAGS += [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
OPTIMISED_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-DNDEBUG"]
# TXL_SANITIZED: AMX's tiles are memory, for no sanitizer sees what AMX reads and writes (and any CPU that has
# AVX512_BF16 will do); and memory is not kept from call to call.
SANITIZED_FLAGS = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=all",
    "-DTXL_SANITIZED",
]

DTYPES = ["f32", "f64", "bf16"]
AVX2_FLAGS = ["-mavx2", "-mfma"]
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
# GCC's AVX-512 headers read values they leave undefined (GCC bug 105593). Clang knows the first option only.
AVX512_FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
# Vector levels above the baseline: name, flags, the dtypes that gain anything from it, and an expression that
# only a compiler and an assembler that really know the level can build.
X86_LEVELS = [
    ("avx2", AVX2_FLAGS, DTYPES, "_mm256_fmadd_ps(__m256(), __m256(), __m256())"),
    ("avx512", AVX512_FLAGS, DTYPES, "_mm512_fmadd_ps(__m512(), __m512(), __m512())"),
    (
        "avx512_bf16",
        [*AVX512_FLAGS, "-mavx512bf16", "-DTXL_PAIRS"],
        ["bf16"],
        "_mm512_dpbf16_ps(__m512(), __m512bh(), __m512bh())",
    ),
    (
        "amx_bf16",
        [*AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-DTXL_TILES"],
        ["f32", "bf16"],
        "[] { _tile_dpbf16ps(0, 1, 2); return 0; }()",
    ),
]

# GCC for ARM, in contrast to GCC for x86, reorders before it hands out registers; a register tile then needs
# more of them than there are, and sums are stored and loaded again in every step.
ARM_FLAGS = ["-fno-schedule-insns"]

# What CXX may have before the compiler.
LAUNCHERS = {"ccache", "sccache", "buildcache", "distcc", "icecc", "env"}


# ---- What the machine offers ----


def find_compiler() -> list[str]:
    asked = os.environ.get("CXX", "").strip()
    for command in [shlex.split(asked)] if asked else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    missing = f"CXX={asked!r} was not found." if asked else "No C++ compiler was found (g++, clang++, c++)."
    raise PlatformError(
        f"{missing} txl-kernels builds C++ sources. Install a compiler (Debian, Ubuntu: apt-get install g++; "
        "Fedora: dnf install gcc-c++; conda: conda install -c conda-forge cxx-compiler), or set CXX."
    )


def host_compiler(cxx: list[str]) -> str:
    """The compiler alone, as nvcc's -ccbin takes it: of "ccache g++" or "env LANG=C g++", g++."""
    names = (word for word in cxx if Path(word).name not in LAUNCHERS and not re.match(r"-|\w+=", word))
    return next(names, cxx[0])


def find_ninja() -> str:
    try:
        import ninja

        packaged = shutil.which("ninja", path=ninja.BIN_DIR)
    except ImportError:
        packaged = None
    if found := packaged or shutil.which("ninja"):
        return found
    raise PlatformError("ninja was not found, and a build without isolation needs it: pip install ninja")


def find_package(name: str) -> Path:
    """Folder of an installed package. Not imported: torch takes seconds, and may lack a library it loads."""
    spec = importlib.util.find_spec(name)
    if spec and spec.origin:
        return Path(spec.origin).parent
    raise PlatformError(
        f"{name} is not installed for {sys.executable}, and a build without isolation needs it. Either "
        "pip install 'torch>=2.10' ninja pybind11 'setuptools>=77', or drop --no-build-isolation."
    )


def find_torch() -> tuple[Path, str]:
    folder, version = find_package("torch"), importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < TORCH_AT_LEAST:
        raise PlatformError(f"torch {version} is too old: the build needs torch>=2.10.")
    return folder, version


def compiler_version(cxx: list[str]) -> str:
    result = subprocess.run([*cxx, "--version"], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()[0]


def find_levels(cxx: list[str]) -> dict[str, tuple[list[str], list[str]]]:
    """{level: (flags, dtypes)}: the baseline and what the compiler can build above it.

    The CPU is not asked: the kernels choose at run time, perhaps on another machine.
    """
    baseline = ARM_FLAGS if platform.machine() == "aarch64" else []
    levels: dict[str, tuple[list[str], list[str]]] = {"baseline": (baseline, DTYPES)}
    if platform.machine() not in ("x86_64", "AMD64"):
        return levels
    for name, flags, dtypes, expression in X86_LEVELS:
        source = f"#include <immintrin.h>\nauto probe() {{ return {expression}; }}\n"
        command = [*cxx, "-std=c++17", *flags, "-x", "c++", "-", "-c", "-o", os.devnull]
        probe = subprocess.run(command, input=source, capture_output=True, text=True)
        if probe.returncode == 0:
            levels[name] = (flags, dtypes)
        else:
            print(f"txl-kernels: without level {name}, which the compiler cannot build:\n{probe.stderr}")
    return levels


def free_memory() -> int:
    """Bytes a build may use: what is free, or less where a container limits it."""

    def number_in(path: str, name: str) -> int:
        lines = Path(path).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    free = number_in("/proc/meminfo", "MemAvailable:") * 1024
    group = "/sys/fs/cgroup/memory"
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        limit, used = (int(Path(f"{group}.{name}").read_text()) for name in ("max", "current"))
        # Files read long ago leave when room is wanted.
        free = min(free, limit - used + number_in(f"{group}.stat", "inactive_file "))
    return free


def find_jobs() -> int:
    if asked := os.environ.get("MAX_JOBS"):
        if not asked.isdecimal():
            raise PlatformError(f"MAX_JOBS is {asked!r}, needs the number of compilers to run at once")
        return max(1, int(asked))
    return max(1, min(len(os.sched_getaffinity(0)), int(free_memory() / 1.5e9)))


# ---- build.ninja ----


def from_root(path: Path) -> str:
    """As commands that run in ROOT name it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def object_of(source: str, *variant: str) -> str:
    return ".".join(["obj/" + source, *variant, "o"])


class NinjaFile:
    """Collects the statements of a build.ninja. Commands run in ROOT, so that messages name csrc/..."""

    def __init__(self, build_dir: Path, cxx: list[str], flags: list[str], link_flags: list[str]):
        self.build_dir, self.cxx, self.flags, self.link_flags = build_dir, cxx, flags, link_flags
        self.text = f"""\
builddir = {self.path(build_dir)}
rule cxx
  command = {self.command(cxx)} $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $name
rule link
  command = {self.command(cxx)} -shared $in -o $out $flags
  description = link $name
"""

    @staticmethod
    def path(path: Path) -> str:
        return from_root(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    @staticmethod
    def command(words: list[str]) -> str:
        return shlex.join(words).replace("$", "$$")

    def build(self, rule: str, out: str, inputs: list[Path], flags: list[str], name: str) -> Path:
        path = self.build_dir / out
        self.text += f"build {self.path(path)}: {rule} {' '.join(map(self.path, inputs))}\n"
        self.text += f"  flags = {self.command(flags)}\n  name = {name}\n"
        return path

    def compile(self, source: str, flags: list[str], *variant: str, rule: str = "cxx") -> Path:
        name, every = " ".join([source, *variant]), self.flags if rule == "cxx" else []
        return self.build(rule, object_of(source, *variant), [Path("csrc") / source], [*every, *flags], name)

    def link(self, out: str, objects: list[Path], flags: list[str], rule: str = "link") -> Path:
        every = self.link_flags if rule == "link" else []
        return self.build(rule, out, objects, [*every, *flags], out)

    def add_nvcc(self, toolkit: cuda_build.Toolkit) -> None:
        nvcc = self.command([*toolkit.nvcc, "-ccbin", host_compiler(self.cxx)])
        self.text += f"""\
rule nvcc
  command = {nvcc} $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $name
rule nvcc_link
  command = {nvcc} -shared -cudart static $in -o $out $flags
  description = link $name
"""


def write_if_changed(path: Path, text: str) -> None:
    """ninja rebuilds what is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def build_native(verbose: bool, objects: Sequence[str] = ()) -> list[Path]:
    """Brings the libraries up to date, or these objects in place of them; where they were built."""
    if sys.platform != "linux":
        raise PlatformError(f"txl-kernels builds on Linux; this is {sys.platform}.")
    cxx, ninja = find_compiler(), find_ninja()
    (torch, torch_version), pybind11 = find_torch(), find_package("pybind11")
    (toolkit, cuda), levels, jobs = cuda_build.find_toolkit(torch), find_levels(cxx), find_jobs()

    build_dir = ROOT / (os.environ.get("TXL_BUILD_DIR") or "build") / "native"
    flags, link_flags = list(COMMON_FLAGS), shlex.split(os.environ.get("LDFLAGS", ""))
    if sanitize := os.environ.get("TXL_SANITIZE", ""):
        build_dir = build_dir / sanitize.replace(",", "-")
        flags += [*SANITIZED_FLAGS, f"-fsanitize={sanitize}"]
        link_flags += [f"-fsanitize={sanitize}"]
        if toolkit:  # no sanitizer sees what runs on a GPU
            toolkit, cuda = None, "not built: TXL_SANITIZE"
    else:
        flags += OPTIMISED_FLAGS
    flags += shlex.split(os.environ.get("CXXFLAGS", ""))

    # The versions are in the command: others in the same place build anew, or the report would not be true.
    compiler = compiler_version(cxx)
    versions = f"-DTXL_BUILT_WITH={compiler}, torch {torch_version}"
    file = NinjaFile(build_dir, cxx, [*flags, versions], link_flags)
    kernels = []
    for level, (level_flags, dtypes) in levels.items():
        for dtype in dtypes:
            defines = [f"-DTXL_LEVEL={level}", f"-DTXL_DTYPE={dtype}"]
            kernels.append(file.compile("cpu/kernels.cpp", [*defines, *level_flags], level, dtype))
    memory = file.compile("cpu/memory.cpp", [])
    dispatch = file.compile("cpu/dispatch.cpp", [f"-DTXL_HAVE_{name.upper()}=1" for name in levels])
    binding = file.compile("torch_binding_cpu.cpp", ["-isystem", str(torch / "include")])
    # No run path: torch is imported before the library is loaded, so the loader has libtorch_cpu.so already.
    torch_flags = [f"-L{torch / 'lib'}", "-ltorch_cpu"]
    if not sanitize:  # whose symbols come from the executable
        torch_flags += ["-Wl,--no-undefined"]  # a missing symbol fails here, not on the user's machine
    libraries = [file.link("libtxl_cpu.so", [*kernels, dispatch, memory, binding], torch_flags)]
    if toolkit:
        file.add_nvcc(toolkit)
        libraries.append(add_cuda(file, toolkit, torch))

    facts = {
        "COMPILER": compiler,
        "FLAGS": shlex.join(flags),
        "SANITIZE": sanitize,
        "CPU_LEVELS": ",".join(levels),
        "CUDA_KERNELS": cuda,
        "TORCH_HEADERS": torch_version,
        "TORCH_AT_LEAST": ".".join(map(str, TORCH_AT_LEAST)),
        "PYTHON_HEADERS": platform.python_version(),
    }
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in facts.items()}
    generated = build_dir / "generated"
    write_if_changed(
        generated / "build_facts.h",
        "".join(f'#define TXL_BUILD_{name} "{value}"\n' for name, value in quoted.items()),
    )
    python = Path(sysconfig.get_path("include"))
    if (python / "Python.h").exists():
        includes = [f"-I{generated}", "-isystem", str(pybind11 / "include"), "-isystem", str(python)]
        info = file.compile("build_info.cpp", includes)
        libraries.append(file.link(f"_build_info{sysconfig.get_config_var('EXT_SUFFIX')}", [info], []))
    else:
        print(f"txl-kernels: without the build report, no Python.h in {python} (Debian: python3-dev)")

    summary = f"{facts['COMPILER']}; {jobs} jobs; levels {', '.join(levels)}; CUDA kernels {cuda}"
    print(f"txl-kernels: {summary}", flush=True)
    built = [build_dir / name for name in objects] or libraries
    run_ninja(file, ninja, jobs, *(["-v"] if verbose else []), *map(from_root, built))
    return built


def add_cuda(file: NinjaFile, toolkit: cuda_build.Toolkit | None, torch: Path) -> Path:
    """libtxl_cuda.so; without a toolkit the same sources for the CPU, on top of the tests' emulation."""
    if toolkit:
        # nvcc knows where CUDA's headers are, for C++ too.
        kernels, cxx, rule = [*cuda_build.FLAGS, *toolkit.flags], [], "nvcc"
        warpgroups = [*cuda_build.FLAGS, *cuda_build.WARPGROUP_FLAGS] if toolkit.warpgroups else []
        host = cuda_build.FLAGS
        defines = [f'-DTXL_CUDA_TARGETS="{" ".join(toolkit.targets)}"']
        out, link_rule, link = "libtxl_cuda.so", "nvcc_link", ["-Xlinker", "--no-undefined"]
    else:
        cxx = ["-DTXL_CUDA_EMULATION", f"-I{ROOT / 'tests' / 'cuda_emulation'}", "-pthread"]
        kernels, host, rule = [*cxx, "-x", "c++"], cxx, "cxx"
        warpgroups = list(kernels)
        defines = ['-DTXL_CUDA_TARGETS="emulation"']
        out, link_rule, link = "libtxl_cuda_emulation.so", "link", ["-pthread", "-ldl", "-Wl,--no-undefined"]
    if warpgroups:
        kernels.append("-DTXL_WARPGROUPS")
    objects = [
        file.compile(
            f"cuda/{source}", [*flags, f"-DTXL_ELEMENT={e}", f"-DTXL_HEAD={h}"], e, str(h), rule=rule
        )
        for source, flags, classes in (
            ("kernels.cu", kernels, cuda_build.CLASSES),
            ("warpgroup_kernels.cu", warpgroups, cuda_build.WARPGROUP_CLASSES),
        )
        if flags
        for e, h in cuda_build.units(classes)
    ]
    objects.append(file.compile("cuda/dispatch.cpp", [*host, *defines], rule=rule))
    objects.append(file.compile("torch_binding_cuda.cpp", [*cxx, "-isystem", str(torch / "include")]))
    return file.link(out, objects, [f"-L{torch / 'lib'}", "-ltorch_cpu", *link], rule=link_rule)


def build_emulation(build_dir: Path) -> Path:
    """The CUDA kernels as a library for the CPU, for the tests."""
    torch, _ = find_torch()
    file = NinjaFile(build_dir, find_compiler(), [*COMMON_FLAGS, "-O1"], [])
    library = add_cuda(file, None, torch)
    run_ninja(file, find_ninja(), find_jobs(), "--quiet")
    return library


def run_ninja(file: NinjaFile, ninja: str, jobs: int, *options: str) -> None:
    path = file.build_dir / "build.ninja"
    command = [ninja, "-f", str(path), f"-j{jobs}", *options]
    file.build_dir.mkdir(parents=True, exist_ok=True)
    with open(file.build_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ninja itself does not mind another one in the same folder
        write_if_changed(path, file.text)
        # It reports on standard error (2): standard output is the caller's.
        done = subprocess.run(command, cwd=ROOT, stdout=2)
    if done.returncode:
        raise CompileError(f"{shlex.join(command)} failed; the compiler's own message is above.")

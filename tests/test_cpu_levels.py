"""Every vector level that was built and that this CPU runs, forced by TXL_CPU_LEVEL, each in its process."""

from __future__ import annotations

import pytest
from helpers import cpu_levels, python, why_not


@pytest.mark.parametrize("level", cpu_levels())
def test_every_level(level):
    done = python(
        "import helpers, torch\n"
        "helpers.why_not('cpu')\n"
        "print(torch.ops.txl_kernels.cpu_level(), helpers.check_broadly('cpu'))",
        TXL_CPU_LEVEL=level,
    )
    name, count = done.stdout.split()
    assert name == level
    assert int(count) > 80


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
def test_the_highest_level_is_chosen():
    done = python(
        "import helpers, torch\nhelpers.why_not('cpu')\nprint(torch.ops.txl_kernels.cpu_level())",
        TXL_CPU_LEVEL=None,
    )
    assert done.stdout.split() == cpu_levels()[-1:]
    assert cpu_levels()[0] == "baseline"


@pytest.mark.skipif("amx_bf16" not in cpu_levels(), reason="no AMX here")
@pytest.mark.parametrize("threads", [1, 2])
def test_tiles_are_shared_with_torch(threads):
    """Both configure AMX's registers on the same threads; neither may rely on what the other left."""
    python(
        "import torch\n"
        "from txl_kernels import rel_attention\n"
        f"torch.set_num_threads({threads})\n"
        "x, linear = torch.randn(96, 80).bfloat16(), torch.nn.Linear(80, 70).bfloat16()\n"
        "q, k, r = (torch.randn(*s).bfloat16() for s in ((1, 2, 70, 64), (1, 2, 100, 64), (2, 100, 64)))\n"
        "def both():\n"
        "    return x @ x.T, rel_attention(q, k, k, r), linear(x), rel_attention(q, k, k, r)\n"
        "first = both()\n"
        "assert torch.equal(first[1], first[3])\n"
        "for _ in range(5):\n"
        "    assert all(map(torch.equal, first, both()))\n"
    )


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
@pytest.mark.parametrize("level", ["avx1024", "AVX2"])
def test_unknown_level_is_refused(level):
    """A misspelt level does not silently measure another one."""
    done = python(
        "import torch\n"
        "from txl_kernels import rel_attention\n"
        "q = torch.ones(1, 1, 1, 1)\n"
        "rel_attention(q, q, q, q[0])",
        TXL_CPU_LEVEL=level,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "TXL_CPU_LEVEL" in done.stderr and level in done.stderr and "baseline" in done.stderr


@pytest.mark.skipif(why_not("cpu") is not None, reason="the cpu backend is not available")
def test_memory_of_the_c_library_is_not_taken_for_zero():
    """Workspaces come from malloc, which torch's poison does not reach. glibc fills them with 0x7f: 3e38."""
    python("import helpers\nassert helpers.check_broadly('cpu') > 80", MALLOC_PERTURB_="128")

"""A few small calls on a GPU, forward, backward and decode, for compute-sanitizer to watch:

    compute-sanitizer --tool memcheck python tests/sanitize_gpu.py
    compute-sanitizer --tool racecheck python tests/sanitize_gpu.py cuda

Of all backends for GPUs, or of those named. Few kernels and small sizes, for each is some hundred times
slower there. Numbers are compared as well: exit status 1 if they are wrong, 2 if no such backend can run.
"""

from __future__ import annotations

import sys

import torch
from helpers import (
    BACKENDS,
    RELATIVE,
    Backend,
    available,
    bf16,
    f32,
    inputs,
    key_range,
    randn_like,
    run,
    truth,
)

from txl_kernels import cuda

# Sizes that no tile divides, tiles of every kind (whole, cut by a mask, clamped), few queries.
CASES = [
    (dict(B=1, H=2, L=150, K=331, D=64, dtype=bf16), {}),
    (dict(B=2, H=1, L=150, K=331, D=41, N=70, dtype=bf16), dict(window_size=(300, 0))),
    (
        dict(B=2, H=1, L=77, K=200, D=64, dtype=f32),
        dict(dropout_p=0.3, dropout_seed=1, key_range=((3, 199), (100, 200))),
    ),
    (dict(B=2, H=2, L=1, K=1023, D=64, dtype=bf16), {}),
]


def wrong(backend: Backend, sizes: dict, options: dict) -> bool:
    """Runs a case and says on standard output how large its errors are."""
    if "key_range" in options:
        options = {**options, "key_range": key_range(*options["key_range"], device=backend.device)}
    if sizes["dtype"] not in backend.dtypes:
        sizes = {**sizes, "dtype": backend.dtypes[0]}
    tensors = inputs(**sizes, device=backend.device)
    dout = None if sizes["L"] == 1 else randn_like(tensors["q"])
    got, exact = run(backend, tensors, dout, **options), truth(tensors, dout, **options)
    errors = {n: ((got[n].double().cpu() - exact[n]).norm() / exact[n].norm()).item() for n in got}
    right = all(error <= 4 * RELATIVE[sizes["dtype"]] for error in errors.values())
    figures = ", ".join(f"{n} {error:.0e}" for n, error in errors.items())
    print(f"{backend.name} {sizes} {options}: {'ok' if right else 'WRONG'}: {figures}", flush=True)
    return not right


def main() -> int:
    wanted = sys.argv[1:] or [b.name for b in BACKENDS]
    backends = [b for b in available() if b.device == "cuda" and b.name in wanted]
    if not backends:
        print(f"none of {', '.join(wanted)} can run on a GPU here", file=sys.stderr)
        return 2
    cuda.WARPGROUPS = False
    failed = [wrong(backend, *case) for backend in backends for case in CASES]
    if any(b.name == "cuda" for b in backends) and cuda.has_warpgroups(torch.device("cuda")):
        cuda.WARPGROUPS = True
        print("by warpgroups:")
        wide = dict(B=1, H=1, L=150, K=331, D=128, dtype=bf16), dict(dropout_p=0.3, dropout_seed=1)
        failed += [wrong(b, *case) for b in backends if b.name == "cuda" for case in (*CASES[:2], wide)]
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())

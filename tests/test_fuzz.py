"""Hypothesis over the whole contract: any sizes, masks, rows of r, layouts, against the float64 reference."""

from __future__ import annotations

import os

import pytest
import torch
from helpers import (
    FUSED,
    INTERPRET,
    allowed,
    assert_accurate,
    each_dtype,
    inputs,
    inside_larger,
    key_range,
    no_room,
    plain,
    randn_like,
    run,
    truth,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st


@st.composite
def problems(draw):
    """(sizes, options, layout) of a valid call."""
    size = st.integers
    L = draw(st.one_of(size(1, 9), size(1, 80)))
    K = L + draw(st.one_of(st.just(0), size(0, 40), size(0, 200)))
    B, H = draw(size(1, 3)), draw(size(1, 2))
    D = draw(st.one_of(size(1, 40), size(1, 256), st.sampled_from([16, 32, 64, 128])))
    causal = draw(st.booleans())
    window = (draw(st.one_of(st.just(-1), size(0, K + 2))), draw(st.one_of(st.just(-1), size(0, L + 2))))
    N, r_zero = None, None
    if draw(st.booleans()):
        N = draw(size(1, K + L + 20))
        r_zero = draw(size(-K, N + K))
    options = dict(causal=causal, window_size=window, r_zero=r_zero)
    if draw(st.booleans()):
        bound = size(-5, K + 5)
        options["key_range"] = key_range(*[(draw(bound), draw(bound)) for _ in range(B)])
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.floats(0.01, 0.95))
        options["dropout_seed"] = draw(size(-(2**63), 2**63 - 1))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.1, 3.0)) * D**-0.5
    sizes = dict(
        B=B, H=H, L=L, K=K, D=D, N=N, causal=causal, bias=draw(st.booleans()), seed=draw(size(0, 99))
    )
    return sizes, options, draw(st.booleans())


def matches(backend, dtype, problem):
    sizes, options, sliced = problem
    tensors = inputs(**sizes, dtype=dtype, device=backend.device)
    assume(not no_room(backend, tensors["q"]))  # `run` would skip the test, the examples to come with it
    options = {n: o.to(backend.device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    dout = randn_like(tensors["q"])
    given_tensors = {n: inside_larger(t) if sliced and t is not None else t for n, t in tensors.items()}
    got = run(backend, given_tensors, inside_larger(dout) if sliced else dout, **options)
    assert_accurate(got, truth(tensors, dout, **options), plain(tensors, dout, **options), dtype, few=True)
    empty = ~allowed(sizes["B"], sizes["L"], sizes["K"], **options).any(-1).expand(got["lse"].shape)
    assert torch.equal(got["lse"].cpu() == -torch.inf, empty)


EXAMPLES = 24 if INTERPRET else 120  # Triton's interpreter is slow

# The same examples on every machine; no shrinking limit by the clock.
SETTINGS = dict(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("backend, dtype", each_dtype())
@settings(max_examples=EXAMPLES, **SETTINGS)
@given(problem=problems())
def test_any_valid_call(backend, dtype, problem):
    matches(backend, dtype, problem)


@pytest.mark.slow
@pytest.mark.parametrize("backend, dtype", each_dtype(only=FUSED))
@settings(max_examples=2500, **{**SETTINGS, "derandomize": "CI" in os.environ, "print_blob": True})
@given(problem=problems())
def test_any_valid_call_at_length(backend, dtype, problem):
    """Other examples every time (hypothesis prints the one that fails), but not in CI: it is no lottery."""
    matches(backend, dtype, problem)

"""Generation on a CPU: all layers in one call of C++ give what the modules give one by one."""

from __future__ import annotations

import copy
import pickle

import helpers
import pytest
import torch
from model_helpers import VOCAB, in_segments, small_model, tokens

from txl_kernels import cpu
from txl_model import few_tokens
from txl_model.layers import Dropout, Linear

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C++ kernels are not built")

SEGMENTS = [5, 1, 1, 2, 1, 7, *[1] * 8, 2, 1]  # of two rows, 2 tokens are few and 5 are not
FEW = len([n for n in SEGMENTS if n <= 2])


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch):
    """The calls of the kernel."""
    made, layers = [], cpu.layers

    def counted(*args):
        made.append(args)
        return layers(*args)

    monkeypatch.setattr(cpu, "layers", counted)
    return made


def reader(backend=None, **fields):
    return small_model(backend, **{"dtype": torch.float32, **fields}).eval()


# ---- the kernel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(B=1, L=1, H=1, D=1, width=1, d_inner=1, memory=1, N=1),
        dict(B=1, L=1, H=3, D=64, width=128, d_inner=513, memory=700, N=701),
        dict(B=2, L=2),
        dict(B=2, L=8, memory=300, N=20),
        dict(B=1, L=3, H=1, D=256, width=16, memory=0, N=3),
        dict(n_layer=1),
    ],
    ids=str,
)
def test_equals_float64(sizes, dtype, norm_first):
    helpers.check_layers(dtype, norm_first, **sizes)


def test_repeats_to_the_bit_on_any_number_of_threads(threads):
    given = helpers.cast_layers(
        helpers.layer_inputs(H=4, D=64, width=256, d_inner=999, memory=900), torch.float32
    )
    results = []
    for n in (1, 2, 3, 2):
        threads(n)
        results.append(cpu.layers(**given))
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_nan_stays_in_its_row():
    given = helpers.cast_layers(helpers.layer_inputs(), torch.float32) | {"key_range": None}
    clean = cpu.layers(**given)
    given["h"][1, 1, 3] = float("nan")
    got = cpu.layers(**given)
    assert got[1, 1].isnan().all() and torch.equal(got[0], clean[0]) and torch.equal(got[1, 0], clean[1, 0])


@pytest.mark.parametrize("field, n_tensors", [("keys_values", 1), ("r", 1), ("weights", 12)])
def test_tensors_that_do_not_go_together(field, n_tensors):
    """Each of a layer's tensors, cut short, of another dtype, or not contiguous."""
    for which in range(n_tensors):
        for spoil in (
            lambda t: t[..., :-1].clone(),
            lambda t: t.double(),
            lambda t: torch.stack([t, t], dim=-1)[..., 0],
        ):
            given = helpers.cast_layers(helpers.layer_inputs(), torch.float32)
            given[field][n_tensors + which] = spoil(given[field][n_tensors + which])
            with pytest.raises(RuntimeError, match="does not go with h and the other tensors of its layer"):
                cpu.layers(**given)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"begin": -1}, "no room for h"),
        ({"end": 48 + 1}, "no room for h"),
        ({"begin": 44}, "no room for h"),
        ({"r": []}, "one r and 12 weights"),
        ({"r": [torch.zeros(2, 0, 17)] * 2}, "r has no rows"),
        ({"weights": []}, "one r and 12 weights"),
        ({"key_range": torch.zeros(3, 2, dtype=torch.int32)}, "key_range must be int32"),
        ({"key_range": torch.zeros(2, 2, dtype=torch.int64)}, "key_range must be int32"),
        ({"h": torch.zeros(2, 9, 37)}, "of few tokens"),
        ({"h": torch.zeros(2, 37, 2).mT}, "must be contiguous"),
    ],
    ids=str,
)
def test_what_cannot_be(change, words):
    given = helpers.cast_layers(helpers.layer_inputs(), torch.float32)
    with pytest.raises(RuntimeError, match=words):
        cpu.layers(**{**given, **change})


# ---- in the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", cpu.DTYPES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pre_lnorm": True, "untie_r": True},
        {"clamp_len": 4},
        {"clamp_len": 0, "pre_lnorm": True},
        {"same_length": True},
        {"same_length": True, "same_length_extra": 1, "clamp_len": 3},
        {"mem_len": 0},
        {"mem_len": 17, "n_head": 3, "d_head": 5, "d_inner": 7},
        {"zero_memory": True},
        {"cutoffs": (4, 6, 8), "div_val": 2},
    ],
    ids=str,
)
def test_numbers_of_the_modules(fields, dtype, calls):
    text, outs = tokens(sum(SEGMENTS)), []
    for backend in ("cpu", "reference"):
        model = reader(backend, dtype=dtype, **fields)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        memory = model.new_memory(2)
        parts = text.split(SEGMENTS, dim=1)
        out = [in_segments(model, parts[0], [SEGMENTS[0]], memory)]
        memory = model(parts[0], memory).memory
        for i, part in enumerate(parts[1:]):
            if i == 3:
                memory = memory.reset([0])
            if i == 6 and not model.config.zero_memory:
                memory = memory.reset([1], skip=2)
            result = model(part, memory)
            memory = result.memory
            out.append(result.logits)
        outs.append(torch.cat(out, dim=1))
    assert len(calls) == FEW
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=40 * eps * outs[1].abs().max().item())


def first_steps(model, memory=None):
    """Logits of 2 rows after a prompt that the modules read, and of 3 tokens more."""
    return in_segments(model, tokens(8), [5, 1, 1, 1], memory)


def test_who_it_is_for(calls):
    """The rest is read by the modules."""
    first_steps(reader())
    assert len(calls) == 3
    calls.clear()
    first_steps(reader("reference"))
    first_steps(reader(attn_type=1))
    with torch.autocast("cpu", torch.bfloat16):
        first_steps(reader())
    model = reader()
    first_steps(model, model.new_memory(2, kind="hidden"))
    in_segments(model, tokens(8), [5, 3])
    model.blocks[1].ff.train()
    first_steps(model)
    model.eval()
    model.blocks[0].attn.layer_norm.eps = 1e-3
    first_steps(model)
    assert not calls


def test_a_memory_is_continued_twice_from_the_same_place(calls):
    model, text = reader(), tokens(8)
    memory = model(text[:, :5]).memory
    memory = model(text[:, 5:6], memory).memory
    first = model(text[:, 6:7], memory).logits
    model(text[:, 7:8], memory)
    assert torch.equal(model(text[:, 6:7], memory).logits, first)
    assert len(calls) == 4


def test_weights_that_change_in_place_count(calls):
    model, text = reader(), tokens(7)
    memory = model(text[:, :5]).memory
    memory = model(text[:, 5:6], memory).memory
    before = model(text[:, 6:7], memory).logits
    model.blocks[1].ff.net[2].weight.mul_(2.0)
    after = model(text[:, 6:7], memory).logits
    assert len(calls) == 3 and not torch.allclose(before, after)


def test_another_model_reads_with_its_own_weights(calls, monkeypatch):
    one, other, text = reader(), reader(), tokens(8)
    for parameter in other.blocks.parameters():
        parameter.mul_(0.7)
    memory = one(text[:, :5]).memory
    memory = one(text[:, 5:6], memory).memory
    got = [model(text[:, 6:7], memory).logits for model in (other, one, other)]
    assert len(calls) == 4 and torch.equal(got[0], got[2]) and not torch.allclose(got[0], got[1])
    monkeypatch.setattr(few_tokens, "read", lambda *_: None)
    torch.testing.assert_close(got[0], other(text[:, 6:7], memory).logits, rtol=1e-5, atol=1e-5)


def bias_of_its_own(block):
    block.attn.o_net.bias = torch.nn.Parameter(torch.ones(12))


def no_relu(block):
    block.ff.net[1] = Dropout(0.0)


def norms_in_different_places(block):
    block.attn.pre_lnorm = True


def another_layer(block):
    block.ff.net.append(Linear(12, 12))


def a_forward_of_its_own(block):
    forward = block.ff.net[2].forward
    block.ff.net[2].forward = lambda x: 2.0 * forward(x)


def norm_without_bias(block):
    block.ff.layer_norm = torch.nn.LayerNorm(12, bias=False)


def no_bias(block):
    block.ff.net[0] = Linear(12, 16, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        bias_of_its_own,
        no_relu,
        norms_in_different_places,
        another_layer,
        a_forward_of_its_own,
        norm_without_bias,
        no_bias,
    ],
)
def test_layers_that_were_changed(calls, change):
    """In a way that their classes know nothing of: as with hidden states, which the modules read."""
    model = reader()
    change(model.blocks[1])
    model.eval()
    got = first_steps(model)
    assert not calls
    want = first_steps(model, model.new_memory(2, kind="hidden"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_no_rows(calls):
    model = reader()
    memory = model(tokens(5, batch=0)).memory
    assert model(tokens(1, batch=0), memory).logits.shape == (0, 1, VOCAB)
    assert not calls


def test_a_memory_takes_no_model_along():
    """When it is pickled."""
    model, text = reader(), tokens(6)
    memory = model(text[:, :5]).memory
    size = len(pickle.dumps(memory))
    memory = model(text[:, 5:6], memory).memory
    assert memory.store.weights[1]
    assert len(pickle.dumps(memory)) < 1.1 * size
    copied = copy.deepcopy(memory)
    assert torch.equal(model(text[:, :1], copied).logits, model(text[:, :1], memory).logits)


class Adapted(Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def test_parts_that_were_replaced_or_are_watched(calls):
    """An adapter is asked and a hook is called, whatever the number of tokens."""
    model = reader()
    plain = first_steps(model)
    calls.clear()

    seen = []
    handle = model.blocks[1].ff.net[0].register_forward_hook(lambda *_: seen.append(1))
    first_steps(model)
    assert len(seen) == 4
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append(1))
    first_steps(model)
    handle.remove()
    assert len(seen) > 20

    adapted, old = Adapted(16, 12), model.blocks[0].ff.net[2]
    adapted.load_state_dict(old.state_dict())
    model.blocks[0].ff.net[2] = adapted.eval()
    got = first_steps(model)
    assert not calls and not torch.allclose(got, plain)
    for parameter in old.parameters():
        parameter.mul_(2.0)
    model.blocks[0].ff.net[2] = old
    torch.testing.assert_close(got, first_steps(model), rtol=1e-5, atol=1e-5)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "part", ["drop", "blocks.1", "blocks.0.attn", "blocks.1.ff.net.1", "blocks.0.ff.net.4"]
)
def test_who_begins_to_watch_while_a_memory_is_in_use(calls, part):
    model, text, seen = reader(dropout=0.5), tokens(11), []
    module, parts = model.get_submodule(part), text.split([5, 1, 1, 1, 1, 1, 1], dim=1)
    want = in_segments(model, text, [5, 1, 1, 1, 1, 1, 1], model.new_memory(2, kind="hidden"))[:, 5:]
    memory = model(parts[0]).memory

    def step(i):
        nonlocal memory
        out = model(parts[i], memory)
        memory = out.memory
        return torch.allclose(out.logits, want[:, i - 1, None], rtol=1e-4, atol=1e-4)

    assert step(1) and len(calls) == 1
    for i, register in enumerate((module.register_forward_hook, module.register_forward_pre_hook), start=2):
        handle = register(lambda *_: seen.append(1))
        assert step(i) and seen and len(calls) == 1
        handle.remove()
        seen.clear()
    forward = module.forward
    module.forward = lambda *args: (seen.append(1), forward(*args))[1]
    assert step(4) and seen and len(calls) == 1
    del module.forward
    assert step(5) and len(calls) == 2
    module.train()
    assert not step(6) and len(calls) == 2


def test_weights_that_the_kernel_cannot_take(calls):
    """The modules take them in any order of strides."""
    model = reader()
    want = first_steps(model)
    calls.clear()
    weight = model.blocks[1].attn.o_net.weight
    weight.data = weight.data.T.contiguous().T
    torch.testing.assert_close(first_steps(model), want, rtol=1e-5, atol=1e-5)
    assert not calls


def test_token_by_token_from_the_first(calls):
    """No prompt: the first token finds nothing prepared."""
    model, text = reader(), tokens(12)
    got = in_segments(model, text, [1] * 12)
    assert len(calls) == 11 and got.shape[-1] == VOCAB
    torch.testing.assert_close(got, in_segments(reader("reference"), text, [1] * 12), rtol=1e-5, atol=1e-5)

"""The model's memory: keys and values give the numbers of hidden states, and what is remembered, forgotten,
branched from, moved and saved is what its documentation says."""

from __future__ import annotations

import json

import model_helpers
import pytest
import torch
from model_helpers import VOCAB, B, in_segments, small_model, tokens
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode

from txl_model.memory import HiddenMemory, KeyValueMemory, Memory

KINDS = ["hidden", "kv"]
READINGS = [
    {},
    {"pre_lnorm": True, "untie_r": True},
    {"clamp_len": 4},
    {"clamp_len": 0},
    {"same_length": True},
    {"same_length": True, "same_length_extra": 1, "clamp_len": 3, "pre_lnorm": True},
    {"mem_len": 0},
    {"mem_len": 3},
    {"mem_len": 17, "tgt_len": 40},
    {"zero_memory": True},
    {"zero_memory": True, "pre_lnorm": True, "same_length": True},
    {"zero_memory": True, "mem_len": 0},
]


def each(readings, attn_types=(0, 1)):
    """Parameters for `fields`."""
    return [
        pytest.param({"attn_type": n, **fields}, id="-".join([f"type{n}", *map(str, fields)]))
        for n in attn_types
        for fields in readings
    ]


# What may be remembered of each attention, and a few ways to read it.
EVERY = [
    *(
        pytest.param(*p.values, kind, id=f"{p.id}-{kind}")
        for p in each([{}, {"clamp_len": 3}])
        for kind in KINDS
    ),
    *(pytest.param(*p.values, "hidden", id=f"{p.id}-hidden") for p in each([{}, {"clamp_len": 3}], (2, 3))),
]


def reader(**fields):
    return small_model(**fields).eval()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# --------------------------------------------------------------------------- keys and values as hidden states


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("fields", each(READINGS))
def test_keys_and_values_give_the_numbers_of_hidden_states(fields, dtype, tolerance):
    model, text = reader(dtype=dtype, **fields), tokens(60, batch=3)
    if dtype == torch.float32:  # of a size that float32 has 1e-5 of
        for parameter in model.parameters():
            parameter.mul_(0.5)
    hidden, kv = (model.new_memory(3, kind=kind) for kind in KINDS)
    resets = {3: dict(rows=[1]), 8: dict(rows=torch.tensor([True, False, True])), 12: dict(rows=[0, 2])}
    if not model.config.zero_memory:
        resets |= {5: dict(rows=[2], skip=4), 10: dict(rows=[0, 1], skip=torch.tensor([3, 8]))}
    begin = 0
    for step, length in enumerate([4, 1, 9, 3, 1, 1, 1, 1, 2, 5, 1, 1, 1, 2, 7, 1, 12, 1, 1, 1]):
        if step in resets:
            hidden, kv = hidden.reset(**resets[step]), kv.reset(**resets[step])
        ext_len = {2: 3, 4: 1, 9: 2, 14: 7}.get(step, 0)
        want, got = (model(text[:, begin : begin + length], m, ext_len=ext_len) for m in (hidden, kv))
        torch.testing.assert_close(got.logits, want.logits, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.hidden, want.hidden, rtol=tolerance, atol=tolerance)
        hidden, kv = want.memory, got.memory
        assert isinstance(hidden, HiddenMemory) and isinstance(kv, KeyValueMemory)
        assert kv.length == hidden.length
        begin += length - ext_len


def test_which_kind_and_how_it_reads():
    model = small_model(clamp_len=3, same_length=True)
    with torch.enable_grad():
        assert isinstance(model.new_memory(B), HiddenMemory)
        assert isinstance(model.eval().new_memory(B), HiddenMemory)
    assert isinstance(model.new_memory(B), KeyValueMemory)
    assert isinstance(model(tokens(3)).memory, KeyValueMemory)
    assert isinstance(model.train().new_memory(B), HiddenMemory)
    assert isinstance(reader(attn_type=2).new_memory(B), HiddenMemory)
    own, other = model.new_memory(B), model.new_memory(B, 9, -1, False)
    assert (own.mem_len, own.reading.clamp_len, own.reading.same_length) == (6, 3, True)
    assert (other.mem_len, other.reading.clamp_len, other.reading.same_length) == (9, -1, False)
    assert (other.length, other.batch_size, other.device) == (0, B, torch.device("cpu"))
    # How the text is read goes with its memory, whatever the config says.
    text, lengths = tokens(20), [7, 9, 4]
    for reading in (
        dict(mem_len=20, clamp_len=-1, same_length=False),
        dict(mem_len=9, clamp_len=2, same_length=True),
    ):
        so_configured = reader(**reading)
        want = in_segments(so_configured, text, lengths)
        for kind in KINDS:
            memory = model.eval().new_memory(B, **reading, kind=kind)
            torch.testing.assert_close(in_segments(model, text, lengths, memory), want)


# --------------------------------------------------------------------------------------- what is remembered


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mem_len", [0, 2, 6, 30])
def test_the_intended_update(mem_len, kind):
    """cat[beg:end] with end = m + max(0, q - ext_len), beg = max(0, end - mem_len). The inputs of the first
    layer are embeddings, which say what token they are of."""
    model = reader()
    rows = torch.stack([model_helpers.embedding(model, token) for token in range(VOCAB)]) * 12**0.5
    first_inputs = rows if kind == "hidden" else model.blocks[0].attn.project(rows[None])[1][0][0]
    memory, remembered = model.new_memory(B, mem_len, kind=kind), torch.zeros(B, 0, dtype=torch.int64)
    text, begin = tokens(60), 0
    for length, ext_len in [(4, 0), (5, 2), (1, 1), (3, 0), (9, 4), (4, 4), (12, 1), (2, 0)]:
        segment = text[:, begin : begin + length]
        end = remembered.shape[1] + max(0, length - ext_len)
        remembered = torch.cat([remembered, segment], dim=1)[:, max(0, end - mem_len) : end]
        memory = model(segment, memory, ext_len=ext_len).memory
        assert memory.length == remembered.shape[1]
        state = memory.tensors()["layer.0"]
        if kind == "hidden":
            torch.testing.assert_close(state, first_inputs[remembered])
        else:
            torch.testing.assert_close(state[0], first_inputs[:, remembered].transpose(0, 1))
        begin += length - ext_len


@pytest.mark.parametrize("fields", each([{}, {"clamp_len": 4}, {"same_length": True, "clamp_len": 3}]))
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_read_again_give_the_same_numbers(kind, fields):
    """ext_len: each segment is read with the last tokens of the one before, which memory left out."""
    model, text, ext_len = reader(**{**fields, "mem_len": 30}), tokens(25), 3
    whole = model(text, model.new_memory(B, kind="hidden")).logits
    memory, begin = model.new_memory(B, kind=kind), 0
    for length in (3, 7, 4, 8, 3):
        out = model(text[:, max(0, begin - ext_len) : begin + length], memory, ext_len=ext_len)
        memory = out.memory
        torch.testing.assert_close(out.logits[:, -length:], whole[:, begin : begin + length])
        begin += length


def test_memory_is_detached_and_projected_by_the_weights_of_the_moment():
    model = small_model(tie_weight=False)
    with torch.enable_grad():
        first = model(torch.full((B, 4), 3))
        assert not any(x.requires_grad for x in first.memory.tensors().values())
        model(torch.full((B, 4), 5), first.memory, torch.full((B, 4), 7)).loss.backward()
    touched = model.word_emb.tables[0].grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [5], "only this segment's tokens get a gradient"
    before = model(tokens(4), first.memory).logits
    model.blocks[0].attn.qkv_net.weight[12:] *= 1.5  # keys and values
    change = model(tokens(4), first.memory).logits - before
    assert (change[:, 0] != 0).any()
    zeros = small_model(zero_memory=True).requires_grad_()
    with torch.enable_grad():
        memory = zeros.eval().new_memory(B, kind="kv").reset([0])
    assert not any(x.requires_grad for x in memory.tensors().values())


@pytest.mark.parametrize("fields, kind", EVERY)
def test_branches(fields, kind):
    """Two continuations of one memory, in turns, with a store that is left behind on the way: each is what
    it would be alone, and the memory of before is what it was."""
    model, text = reader(**fields), tokens(60)
    start, one, other = text[:, :8], text[:, 8:34], text[:, 34:]
    lengths = [1, 3, 9, 1, 1, 2, 8, 1]

    def alone(rest, lengths=lengths):
        memory = model(start, model.new_memory(B, kind=kind)).memory
        return in_segments(model, rest, lengths, memory)

    branched = model(start, model.new_memory(B, kind=kind)).memory
    before = {name: x.clone() for name, x in branched.tensors().items()}
    memories, logits = [branched, branched], [[], []]
    for pieces in zip(one.split(lengths, 1), other.split(lengths, 1), strict=True):
        for n, piece in enumerate(pieces):
            out = model(piece, memories[n])
            memories[n] = out.memory
            logits[n].append(out.logits)
            model(piece.flip(0), memories[n])  # and a third that is dropped
    for n, rest in enumerate((one, other)):
        torch.testing.assert_close(torch.cat(logits[n], dim=1), alone(rest))
    for name, x in branched.tensors().items():
        assert torch.equal(x, before[name])
    torch.testing.assert_close(in_segments(model, other, [2] * 13, branched), alone(other, [2] * 13))


# ------------------------------------------------------------------------------------------ reset and padding


@pytest.mark.parametrize("as_mask", [False, True], ids=["indices", "mask"])
@pytest.mark.parametrize(
    "fields, kind", [*EVERY, ({"zero_memory": True}, "hidden"), ({"zero_memory": True}, "kv")]
)
def test_reset_is_a_new_text_for_these_rows_only(fields, kind, as_mask):
    model, text = reader(**fields), tokens(40, batch=3)
    lengths = [3, 1, 9, 2, 4, 1]
    memory = model(text[:, :5], model.new_memory(3, kind=kind)).memory
    memory = model(text[:, 5:20], memory).memory
    untouched = in_segments(model, text[:, 20:], lengths, memory)
    rows = torch.tensor([True, False, True]) if as_mask else [2, 0]
    begun = memory.reset(rows)
    got = in_segments(model, text[:, 20:], lengths, begun)
    torch.testing.assert_close(got[1], untouched[1])
    for row in (0, 2):
        fresh = model.new_memory(1, kind=kind)
        torch.testing.assert_close(
            got[row : row + 1], in_segments(model, text[row : row + 1, 20:], lengths, fresh)
        )
    again = in_segments(model, text[:, 20:], lengths, memory)
    torch.testing.assert_close(again, untouched, msg="the memory that was reset is another")
    begun.reset([1])
    torch.testing.assert_close(in_segments(model, text[:, 20:], lengths, begun), got)
    for none in ([], torch.zeros(3, dtype=torch.bool)):
        torch.testing.assert_close(in_segments(model, text[:, 20:], lengths, memory.reset(none)), untouched)


@pytest.mark.parametrize("fields, kind", EVERY)
@pytest.mark.parametrize("lengths", [[14, 6], [2, 3, 4, 1, 1, 1, 1, 7]], ids=str)
def test_left_padding_is_not_there(lengths, fields, kind):
    """Rows that begin 0, 3 and 11 tokens late, one of them after several segments: each is as if it were
    alone, cut into segments at the same places, whatever the padding holds."""
    model, text, pads = reader(**fields), tokens(20, batch=3), torch.tensor([0, 3, 11])
    memory = model.new_memory(3, kind=kind).reset(range(3), skip=pads)
    got = in_segments(model, text, lengths, memory)
    assert got.isfinite().all()
    other = torch.where(torch.arange(20) < pads[:, None], (text + 1) % VOCAB, text)
    changed = in_segments(model, other, lengths, memory)
    ends = torch.tensor(lengths).cumsum(0)
    for row, pad in enumerate(pads.tolist()):
        torch.testing.assert_close(changed[row, pad:], got[row, pad:])
        own = (ends - pad).clamp(min=0).diff(prepend=torch.tensor([0]))
        alone = in_segments(
            model, text[row : row + 1, pad:], own[own > 0].tolist(), model.new_memory(1, kind=kind)
        )
        torch.testing.assert_close(got[row : row + 1, pad:], alone)
    same = model.new_memory(3, kind=kind).reset([1], skip=3).reset([2], skip=11)
    torch.testing.assert_close(in_segments(model, text, lengths, same), got)


# --------------------------------------------------------------------------------- elsewhere, saved, restored


MOVED = [
    pytest.param({"attn_type": n, "zero_memory": zero}, kind, id=f"type{n}-{kind}{'-zeros' * zero}")
    for n, kind in [(0, "hidden"), (0, "kv"), (1, "hidden"), (1, "kv"), (3, "hidden")]
    for zero in (False, True)
]


@pytest.mark.parametrize("n_read", [0, 4, 15])
@pytest.mark.parametrize("fields, kind", MOVED)
def test_saved_and_restored(n_read, fields, kind):
    model, text = reader(**fields), tokens(40)
    memory = model.new_memory(B, kind=kind)
    if n_read:
        memory = model(text[:, :n_read], memory).memory
    if not fields["zero_memory"]:
        memory = memory.reset([1], skip=2)
    settings = json.loads(json.dumps(memory.settings()))
    restored = Memory.restore(load(save(memory.tensors())), settings)
    assert type(restored) is type(memory) and restored.length == memory.length
    assert restored.settings() == memory.settings()
    for m in (memory, restored):
        assert m.batch_size == B and m.mem_len == 6
    lengths = [3, 8, 1, 1, 12]
    want, got = (in_segments(model, text[:, 15:], lengths, m) for m in (memory, restored))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    want, got = (in_segments(model, text[:, 15:], lengths, m.reset([0])) for m in (memory, restored))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("fields, kind", MOVED)
def test_to_another_dtype(fields, kind):
    model, text = reader(**fields), tokens(30)
    low = reader(dtype=torch.float32, **fields)
    for n_read in (0, 9):
        memory = model.new_memory(B, kind=kind)
        if n_read:
            memory = model(text[:, :n_read], memory).memory
        if not fields["zero_memory"]:
            memory = memory.reset([1], skip=2)
        moved = memory.to(torch.float32).to("cpu")
        assert n_read == 0 or moved.tensors()["layer.0"].dtype == torch.float32
        lengths = [3, 8, 1, 1, 8]
        for rows in ([], [0]):
            want = in_segments(model, text[:, 9:], lengths, memory.reset(rows))
            got = in_segments(low, text[:, 9:], lengths, moved.reset(rows))
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


def test_restoring_something_else():
    model = reader()
    memory = model(tokens(4)).memory.reset([0])
    tensors, settings = memory.tensors(), memory.settings()
    without = {name: x for name, x in tensors.items() if name != "layer.1"}
    for bad_tensors, bad_settings in [
        ({}, settings),
        (without, settings),
        (None, settings),
        (tensors, None),
        (tensors, {}),
        (tensors, {**settings, "kind": "Memory"}),
        (tensors, {**settings, "kind": "HiddenMemory"}),
        (tensors, {**settings, "batch_size": 3}),
        (tensors, {**settings, "batch_size": "two"}),
        (tensors, {**settings, "reading": {}}),
        (tensors, {**settings, "reading": {**settings["reading"], "mem_len": 3}}),
        (tensors, {**settings, "reading": {**settings["reading"], "n_layer": 0}}),
        (tensors, {**settings, "reading": {**settings["reading"], "n_head": 4}}),
        ({**tensors, "layer.0": torch.zeros(3)}, settings),
        ({**tensors, "layer.0": 3}, settings),
        ({**tensors, "start": torch.zeros(3, dtype=torch.int64)}, settings),
    ]:
        with pytest.raises(ValueError):
            Memory.restore(bad_tensors, bad_settings)
    with pytest.raises(ValueError, match="these are not the tensors and settings of a memory: KeyError"):
        Memory.restore(without, settings)


# ------------------------------------------------------------------------------------------------------ costs


class Allocations(TorchDispatchMode):
    """Names of the operators called, and the bytes of the largest storage that one of them made."""

    def __init__(self, model, memory):
        super().__init__()
        own = [*model.parameters(), *memory.store.keys_values, *memory.store.rows]
        self.known = {x.untyped_storage().data_ptr() for x in own}
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("attn_type", [0, 1])
def test_a_step_neither_allocates_nor_copies_memory(attn_type):
    mem_len = 400
    model = small_model("cpu", torch.float32, attn_type=attn_type, mem_len=mem_len, tgt_len=100).eval()
    memory = model.new_memory(B)
    for segment in tokens(2 * mem_len).split(100, dim=1):
        memory = model(segment, memory).memory
    moved, stores = 0, {id(memory.store)}
    for token in tokens(2 * mem_len).split(1, dim=1):
        fits = memory.end < memory.store.capacity
        with Allocations(model, memory) as made:
            out = model(token, memory)
        if fits:
            assert made.largest < 4 * mem_len, "less than a number for each key"
            assert "cat" not in made.names
            assert out.memory.store is memory.store
        else:
            moved += 1
        memory = out.memory
        stores.add(id(memory.store))
    assert memory.length == mem_len and moved <= 4, "half of memory is read between two moves"
    # Attention kernels see keys and values where they are.
    past = memory.open(1)[0]
    k, _ = past.append(torch.zeros(2, B, 2, 1, memory.reading.d_key))
    assert k.shape[2] == mem_len + 1
    assert k.untyped_storage().data_ptr() == past.store.keys_values[0].untyped_storage().data_ptr()


def test_positions_are_projected_once():
    model, calls = reader(mem_len=10), []
    for block in model.blocks:
        block.attn.r_net.register_forward_hook(lambda module, args, out: calls.append(args[0].shape[0]))
    memory, text = model.new_memory(B), tokens(60)
    for segment in text[:, :48].split([4] + [1] * 40 + [4], dim=1):
        memory = model(segment, memory).memory
    assert calls == [14, 14], "for each layer, of as many distances as there will be"
    memory = model(text[:, 48:55], memory).memory
    assert calls[2:] == [17, 17], "a longer segment has further ones"
    model(text[:, 55:58], memory)
    model(text[:, 55:60], memory.reset([0]))
    assert len(calls) == 4


def test_an_interrupted_pass_leaves_memory_as_it_was():
    """Ctrl-C between two layers: what the first ones have written already is written again."""
    model, text = reader(mem_len=20), tokens(50)
    for lengths in ([25, 24], [1, 48]):
        # One token leaves room in the store for a segment that needs more positions than were projected.
        memory = model(text[:, :1]).memory
        want = in_segments(model, text[:, 1:], lengths, model(text[:, :1]).memory)

        def interrupt(module, args, out):
            raise KeyboardInterrupt

        for module in (model.blocks[0], model.blocks[1].attn.o_net):
            hook = module.register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(text[:, 1:26].flip(0), memory)
            hook.remove()
            torch.testing.assert_close(in_segments(model, text[:, 1:], lengths, memory), want)


def test_sixteen_bits():
    """Keys and values in bfloat16 over more distances than it can count."""
    model, text = small_model(dtype=torch.bfloat16, mem_len=300).eval(), tokens(400)
    exact = small_model(mem_len=300).eval()
    for a, b in zip(model.parameters(), exact.parameters(), strict=True):
        b.copy_(a.mul_(0.5))
    want, hidden, kv = (
        in_segments(m, text, [250, 100, 50], m.new_memory(B, kind=kind)).double()
        for m, kind in [(exact, "hidden"), (model, "hidden"), (model, "kv")]
    )
    torch.testing.assert_close(kv, want, rtol=0.1, atol=0.1)
    assert (kv - want).square().mean() < 2 * (hidden - want).square().mean()


def test_autocast_reads_what_autocast_wrote():
    """Keys and values in bfloat16, hidden states in float32; outside it the first are of another dtype."""
    model = reader(dtype=torch.float32)
    for kind in KINDS:
        memory = model.new_memory(B, kind=kind)
        for enabled in (False, True, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                memory = model(tokens(4), memory).memory
    with torch.autocast("cpu", torch.bfloat16):
        memory = model(tokens(4), model.new_memory(B, kind="kv")).memory
        with pytest.raises(
            ValueError, match=r"float64, this model reads torch\.bfloat16 or torch\.float32: "
        ):
            model(tokens(4), memory.to(torch.float64))
    with pytest.raises(ValueError, match=r"memory is of torch\.bfloat16, this model reads torch\.float32: "):
        model(tokens(4), memory)
    model(tokens(4), memory.to(torch.float32))


def test_padding_as_long_as_can_be():
    """It is attended by nothing, however long: attention has 32 bits for where it ends."""
    model = reader()
    for kind in KINDS:
        memory = model(tokens(4), model.new_memory(B, kind=kind)).memory.reset([1], skip=2**30)
        first = memory.key_range(4)[1, 0]
        assert first == 2**30 + 4
        want, got = (model(tokens(4), m).logits for m in (memory, memory.reset([1], skip=100)))
        torch.testing.assert_close(got, want)


# -------------------------------------------------------------------------------------------------- bad input


def test_bad_input():
    model, x = reader(), tokens(4)
    kv, hidden = model(x).memory, model(x, model.new_memory(B, kind="hidden")).memory
    absolute, training = reader(attn_type=2), small_model()
    grad = torch.enable_grad()
    for call, message in [
        (lambda: model(x, model.new_memory(3)), r"and batch 3; .* and batch 2"),
        (lambda: model(x, reader(n_layer=3).new_memory(B)), r"= \(3, 12, 2, 6\) .* need \(2, 12, 2, 6\)"),
        (lambda: model(x, reader(attn_type=1)(x).memory), r"= \(2, 12, 2, 7\)"),
        (lambda: absolute(x, kv), "memory is of a model with relative positions"),
        *(
            (
                lambda m=m: model(x, m.to(torch.float32)),
                r"is of torch\.float32, this model reads torch\.float64: ",
            )
            for m in (hidden, kv)
        ),
        *(
            (lambda m=m: model(x, m.to("meta")), r"memory is on meta and the model on cpu: memory\.to\(")
            for m in (hidden, kv, model.new_memory(B))
        ),
        (
            lambda: model(x, [hidden]),
            r"memory must be what new_memory or a forward pass gave \(out.memory\), got list; labels are",
        ),
        (lambda: training(x, kv), r"call model.eval\(\) and use torch.no_grad\(\), or .* kind='hidden'"),
        (lambda: grad(model.__call__)(x, kv), "a memory of keys and values is for reading"),
        (lambda: absolute.new_memory(B, kind="kv"), "attn_type 2 has absolute positions, which need"),
        (lambda: model.new_memory(B, kind="keys"), "kind must be 'hidden', 'kv' or None, got 'keys'"),
        (lambda: model.new_memory(-1), "batch_size must not be negative, got -1"),
        (lambda: model.new_memory(2.0), "batch_size must be a whole number, got 2.0"),
        (lambda: model.new_memory(B, 2.5), "mem_len must be a whole number, got 2.5"),
        (lambda: model.new_memory(B, clamp_len="3"), "clamp_len must be a whole number, got '3'"),
        (lambda: model.new_memory(B, -1), "mem_len must not be negative, got -1"),
        (lambda: model.new_memory(B, clamp_len=-2), "clamp_len must be -1 .* or a distance, got -2"),
        (lambda: model.new_memory(B, 0, same_length=True), "same_length needs mem_len >= 1"),
        (lambda: kv.reset([2]), r"rows must be indices into a batch of 2, got \[2\]"),
        (lambda: kv.reset([-1]), r"rows must be indices into a batch of 2, got \[-1\]"),
        (lambda: kv.reset([0.5]), "rows must be whole numbers"),
        (lambda: kv.reset(torch.ones(3, dtype=torch.bool)), r"rows must be bool \[2\], got shape \[3\]"),
        (lambda: hidden.reset([0], skip=-1), "skip must not be negative, got -1"),
        (lambda: hidden.reset([0], skip=2**31), "skip must be at most 1,073,741,824, got 2147483648"),
        (
            lambda: hidden.reset([0], skip=2**64),
            r"skip must be whole numbers \(int64\), got 18446744073709551616",
        ),
        (lambda: hidden.reset([0], skip=None), "skip must be whole numbers .*, got None"),
        (lambda: kv.reset(None), "rows must be whole numbers .*, got None"),
        (lambda: hidden.reset([0], skip=1.5), "skip must be whole numbers, got 1.5"),
        (
            lambda: hidden.reset([0], skip=torch.tensor([1, 2])),
            "skip must be one number or one per row, got 2",
        ),
        (lambda: reader(zero_memory=True).new_memory(B).reset([0], skip=1), "cannot begin after padding"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_no_rows_with_a_skip_for_each() -> None:
    model = small_model().eval()
    with torch.no_grad():
        memory = model(tokens(5)).memory
        same = memory.reset([], skip=torch.zeros(0, dtype=torch.int64))
        assert torch.equal(model(tokens(3), same).logits, model(tokens(3), memory).logits)
    assert same.length == memory.length and same.batch_size == B


@pytest.mark.parametrize("kind", KINDS)
def test_two_passes_at_once_continue_the_same_memory(kind):
    """As threads may: one begins while the other is between two layers."""
    model, text = reader(mem_len=20), tokens(40)
    memory = model(text[:, :9], model.new_memory(B, kind=kind)).memory
    first, second = text[:, 9:14], text[:, 20:24]
    want = [in_segments(model, x, [x.shape[1] - 1, 1], memory) for x in (first, second)]
    memory, got = model(text[:, :9], model.new_memory(B, kind=kind)).memory, []

    def meanwhile(module, args, out):
        hook.remove()
        got.append(in_segments(model, second, [3, 1], memory))

    hook = model.blocks[0].register_forward_hook(meanwhile)
    got.insert(0, in_segments(model, first, [4, 1], memory))
    torch.testing.assert_close(got, want)


def test_a_huge_mem_len_costs_what_is_remembered():
    model, text = reader(mem_len=12), tokens(24)
    huge = model(text[:, :12], model.new_memory(B, mem_len=10**12)).memory
    buffer = huge.store.keys_values[0]
    assert huge.store.capacity == buffer.shape[3] == 8192 == len(huge.store.rows[0][0])
    want = model(text[:, 12:], model(text[:, :12]).memory).logits
    torch.testing.assert_close(model(text[:, 12:], huge).logits, want)
    long = model(tokens(5000), model.new_memory(B, mem_len=10**12)).memory
    assert long.store.capacity == 10_000


@pytest.mark.parametrize("length", [1, 5])
def test_what_inference_mode_remembers_is_continued_outside_of_it(length):
    model, text = reader(), tokens(20)
    want = in_segments(model, text, [10, length, 20 - 10 - length])
    with torch.inference_mode():
        memory = model(text[:, :10]).memory
    got = in_segments(model, text[:, 10:], [length, 10 - length], memory)
    torch.testing.assert_close(got, want[:, 10:])
    memory = memory.reset([0])
    model(text[:, :length], memory)

"""Evaluation: every token once, whatever the batch and the segments; the published loops, written out."""

from __future__ import annotations

import math
import time
import warnings

import helpers
import model_helpers
import numpy as np
import pytest
import torch

from txl_model import TransformerXL
from txl_model.evaluate import Evaluation, evaluate, evaluate_lengths

VOCAB = 64
KINDS = [pytest.param(dict(attn_type=n), id=f"attn_type-{n}") for n in range(4)]
RELATIVE = [
    pytest.param({}, id="sinusoid"),
    pytest.param(dict(clamp_len=3, pre_lnorm=True, untie_r=True), id="sinusoid-clamp"),
    pytest.param(dict(attn_type=1), id="learned"),
    pytest.param(dict(same_length_extra=1), id="one-key-more"),
    pytest.param(dict(cutoffs=(10, 40), div_val=2), id="adaptive"),
]

# With mem_len zeros to begin with, which tokens push out one by one: no one long segment.
ZEROS = pytest.param(dict(zero_memory=True), id="zeros")


def small_model(backend="reference", dtype=torch.float64, **fields) -> TransformerXL:
    return model_helpers.small_model(backend, dtype, **{"vocab_size": VOCAB, "tgt_len": 8, **fields}).eval()


def text(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(2))


def same(got: float, want: float) -> bool:
    return math.isclose(got, want, rel_tol=1e-9)


# -------------------------------------------------------------------------------------------- what is scored


@pytest.mark.parametrize(
    "options",
    [
        dict(tgt_len=7),
        dict(tgt_len=100),
        dict(tgt_len=1),
        dict(tgt_len=8, batch_size=4),
        dict(tgt_len=8, batch_size=4, warm_up=3),
        dict(tgt_len=5, batch_size=7, warm_up=1000),
        dict(tgt_len=5, batch_size=49),  # rows of two, so that fewer rows are enough
        dict(tgt_len=5, batch_size=1000, warm_up=4),
        dict(tgt_len=5, batch_size=3, max_tokens=20),
        dict(tgt_len=5, max_tokens=1000),
        dict(tgt_len=8, stride=3),
        dict(tgt_len=8, stride=8, batch_size=5),
        dict(tgt_len=1, stride=1, batch_size=5),
        dict(tgt_len=9, stride=2, batch_size=3, max_tokens=31),
        dict(tgt_len=100, stride=4),
        dict(tgt_len=100, stride=100, batch_size=2),
    ],
    ids=str,
)
def test_every_token_but_the_first_is_scored_once(options):
    """Tokens that are all different name their places: input and label are neighbours in the text."""
    length = 60
    tokens = torch.randperm(VOCAB)[:length]
    following = dict(zip(tokens.tolist(), tokens[1:].tolist(), strict=False))
    model, scored, counted = small_model(), [], []

    def look(module, args):
        input_ids, _, labels = args
        if labels is not None:
            for token, label in zip(input_ids.flatten().tolist(), labels.flatten().tolist(), strict=True):
                if label != -100:
                    assert following[token] == label
                    scored.append(label)

    model.register_forward_pre_hook(look)
    result = evaluate(model, tokens, **options, progress=counted.append)
    want = tokens[1 : 1 + options.get("max_tokens", length)].tolist()
    assert sorted(scored) == sorted(want)
    assert result.tokens == sum(counted) == len(want)


@pytest.mark.parametrize("tgt_len", [1, 7, 49, 200])
@pytest.mark.parametrize("fields", RELATIVE)
def test_memory_of_everything_is_one_long_segment(fields, tgt_len):
    model, tokens = small_model(**{**fields, "mem_len": 50}), text(50)
    want = model(tokens[None, :-1], labels=tokens[None, 1:]).loss.item()
    assert same(evaluate(model, tokens, tgt_len=tgt_len, mem_len=50).loss, want)


# ---------------------------------------------------------------------- independent of how the text is cut


@pytest.fixture(params=["hidden", "kv"])
def each_memory(request, monkeypatch):
    """Every memory of one kind, which evaluation leaves to the model."""
    made, new_memory = [], TransformerXL.new_memory

    def of_one_kind(self, *args, **options):
        made.append(new_memory(self, *args, **{**options, "kind": request.param}))
        return made[-1]

    monkeypatch.setattr(TransformerXL, "new_memory", of_one_kind)
    yield
    assert {type(memory).__name__ for memory in made} == {
        {"hidden": "HiddenMemory", "kv": "KeyValueMemory"}[request.param]
    }


@pytest.mark.parametrize("fields", [*RELATIVE, ZEROS])
def test_same_length_does_not_depend_on_batch_and_segments(fields, each_memory):
    model, tokens = small_model(**fields), text(90)
    reach = model.config.n_layer * 6
    settings = dict(mem_len=6, same_length=True)
    want = evaluate(model, tokens, tgt_len=89, **settings).loss
    for batch_size, tgt_len, warm_up in [
        (1, 1, 0),
        (1, 13, 0),
        (2, 8, reach),
        (4, 5, reach),
        (7, 32, reach + 3),
        (8, 1, 60),  # rows of 4: what comes before most of them is in several other rows
        (8, 7, 200),  # more than there is
        (89, 4, reach),
    ]:
        got = evaluate(model, tokens, tgt_len=tgt_len, batch_size=batch_size, warm_up=warm_up, **settings)
        assert same(got.loss, want), (batch_size, tgt_len, warm_up)
    for warm_up in (0, 5):  # the rows' first tokens see less: what the loop above would miss otherwise
        cold = evaluate(model, tokens, tgt_len=5, batch_size=4, warm_up=warm_up, **settings).loss
        assert not math.isclose(cold, want, rel_tol=1e-6)


@pytest.mark.parametrize("backend", helpers.each_fused(torch.float32))
def test_same_in_float32(backend, each_memory):
    """The promise to users: 1e-5 in the precision that they evaluate in."""
    model = small_model(backend.name, torch.float32, clamp_len=10, n_head=1).to(backend.device)
    tokens, settings = text(150), dict(mem_len=20, same_length=True)
    want = evaluate(small_model(clamp_len=10, n_head=1), tokens, tgt_len=150, **settings).loss
    for batch_size, tgt_len in [(1, 150), (1, 70), (5, 33)]:
        got = evaluate(model, tokens, tgt_len=tgt_len, batch_size=batch_size, warm_up=40, **settings).loss
        assert math.isclose(got, want, rel_tol=1e-5)


@pytest.mark.parametrize("fields", [*RELATIVE, ZEROS])
def test_warm_up_gives_rows_the_memory_of_one_row(fields, each_memory):
    """Without same_length, where the segments of all rows begin at the same places of the text."""
    model, tokens = small_model(**fields), text(65)
    settings = dict(tgt_len=8, mem_len=6)
    want = evaluate(model, tokens, **settings).loss
    assert same(evaluate(model, tokens, batch_size=3, warm_up=16, **settings).loss, want)
    assert same(evaluate(model, tokens, batch_size=5, warm_up=24, **settings).loss, want)
    assert not same(evaluate(model, tokens, batch_size=8, **settings).loss, want)


# ------------------------------------------------------------------------------------- the published loops


def as_published(model, tokens, bptt, ext_len, mem_len, batch_size=1) -> float:
    """The authors' LMOrderedIterator and evaluation loop: segments after ext_len tokens of what was read."""
    n_step = len(tokens) // batch_size
    data = tokens[: n_step * batch_size].view(batch_size, n_step)
    memory, total, count = model.new_memory(batch_size, mem_len), 0.0, 0
    for i in range(0, n_step - 1, bptt):
        seq_len = min(bptt, n_step - 1 - i)
        begin = max(0, i - ext_len)
        out = model(data[:, begin : i + seq_len], memory)
        log_p = out.logits.log_softmax(-1)[:, -seq_len:]
        loss = -log_p.gather(2, data[:, i + 1 : i + 1 + seq_len, None]).mean().item()
        total, count = total + seq_len * loss, count + seq_len
        memory = out.memory if mem_len else memory
    return total / count


@pytest.mark.parametrize("fields", KINDS)
@pytest.mark.parametrize("bptt, mem_len", [(8, 6), (5, 20), (64, 6)])
def test_with_memory_as_published(fields, bptt, mem_len):
    model, tokens = small_model(**fields), text(50)
    want = as_published(model, tokens, bptt, 0, mem_len)
    assert same(evaluate(model, tokens, tgt_len=bptt, mem_len=mem_len).loss, want)


def test_rows_as_published():
    """The published iterator scores all but the first token of each row: one row's text at a time."""
    model, tokens = small_model(), text(51)
    want = as_published(model, tokens, 8, 0, 6, batch_size=3)
    rows = [evaluate(model, part, tgt_len=8, mem_len=6).loss for part in tokens.view(3, 17)]
    assert same(sum(rows) / 3, want)


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("tgt_len, stride", [(11, 3), (6, 6), (7, 1), (80, 9)])
@pytest.mark.parametrize("fields", KINDS)
def test_windows_as_published(fields, tgt_len, stride, batch_size):
    model, tokens = small_model(**{**fields, "mem_len": 0, "tgt_len": 20}), text(50)
    want = as_published(model, tokens, stride, tgt_len - stride, 0)
    assert same(evaluate(model, tokens, tgt_len=tgt_len, stride=stride, batch_size=batch_size).loss, want)


@pytest.mark.parametrize("zero_memory", [False, True])
def test_windows_carry_nothing_on(zero_memory):
    """A model trained with memory, read as one without it: neither mem_len nor zeros in it matter."""
    model, tokens = small_model(zero_memory=zero_memory), text(50)
    without = as_published(model, tokens, 3, 8, 0)
    for mem_len in (None, 0, 30):
        assert same(evaluate(model, tokens, tgt_len=11, stride=3, mem_len=mem_len).loss, without)


def test_windows_of_same_length():
    model, tokens = small_model(), text(50)
    without = as_published(model, tokens, 3, 8, 0)
    limited = [evaluate(model, tokens, tgt_len=11, stride=3, mem_len=m, same_length=True) for m in (2, 11)]
    assert same(limited[1].loss, without) and not same(limited[0].loss, without)


@pytest.mark.parametrize("tgt_len, mem_len", [(3, 11), (8, 6), (14, 0), (40, 0)])
def test_segment_and_memory_are_as_long_as_in_training(tgt_len, mem_len):
    model, tokens = small_model(), text(50)
    got = evaluate(model, tokens, tgt_len=tgt_len)
    assert got.settings["mem_len"] == mem_len
    assert same(got.loss, evaluate(model, tokens, tgt_len=tgt_len, mem_len=mem_len).loss)
    assert evaluate(small_model(mem_len=0), tokens, tgt_len=tgt_len).settings["mem_len"] == 0


def test_settings_reach_the_model():
    tokens = text(50)
    model, other = small_model(), small_model(clamp_len=2, same_length=True, mem_len=5)
    other.load_state_dict(model.state_dict())
    want = evaluate(other, tokens, tgt_len=4, mem_len=5)
    got = evaluate(model, tokens, tgt_len=4, mem_len=5, clamp_len=2, same_length=True)
    assert got.loss == want.loss and got.settings == want.settings
    assert got.settings == dict(
        tgt_len=4,
        mem_len=5,
        clamp_len=2,
        same_length=True,
        batch_size=1,
        stride=None,
        warm_up=0,
        max_tokens=None,
        dtype=None,
    )
    undone = evaluate(other, tokens, tgt_len=4, mem_len=5, clamp_len=-1, same_length=False)
    assert undone.loss == evaluate(model, tokens, tgt_len=4, mem_len=5).loss != got.loss


# ----------------------------------------------------------------------------------------- several memories


def test_lengths():
    model, tokens = small_model(), text(70)
    options = dict(tgt_len=8, batch_size=3, same_length=True, max_tokens=60)
    results = list(evaluate_lengths(model, tokens, [1, 4, 20], **options))
    assert [r.settings["mem_len"] for r in results] == [1, 4, 20]
    assert len({r.loss for r in results}) == 3
    for r in results:
        assert r.settings["warm_up"] == 20 and r.tokens == 60
        alone = evaluate(model, tokens, mem_len=r.settings["mem_len"], warm_up=20, **options)
        assert r.loss == alone.loss
    (cold,) = evaluate_lengths(model, tokens, [4], warm_up=0, **options)
    assert cold.loss == evaluate(model, tokens, mem_len=4, **options).loss != results[1].loss


def test_lengths_come_one_by_one():
    counted = []
    results = evaluate_lengths(small_model(), text(20), [2, 3], tgt_len=8, progress=counted.append)
    assert not counted
    next(results)
    assert sum(counted) == 19
    with pytest.raises(ValueError, match="mem_lens is empty"):
        evaluate_lengths(small_model(), text(20), [], tgt_len=8)
    with pytest.raises(ValueError, match="mem_len must be at least 0, got -1"):
        evaluate_lengths(small_model(), text(20), [3, -1], tgt_len=8)


# ------------------------------------------------------------------------------------ the model, the numbers


def test_leaves_the_model_as_it_was():
    model, tokens = small_model(dropout=0.5, dropatt=0.5), text(30)
    want = evaluate(model, tokens, tgt_len=8).loss
    model.train()
    model.blocks[0].eval()  # frozen, say
    before = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert evaluate(model, tokens, tgt_len=8).loss == want
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())

    def interrupt(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tokens, tgt_len=8, progress=interrupt)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("backend", helpers.each_fused(torch.bfloat16))
def test_autocast(backend):
    exact = small_model()
    model, tokens = small_model(backend.name, torch.float32).to(backend.device), text(60)
    dtypes = []
    model.blocks[0].ff.net[0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    for options in (dict(tgt_len=8), dict(tgt_len=8, stride=3)):
        want = evaluate(exact, tokens, **options).loss
        got = evaluate(model, tokens, **options, dtype=torch.bfloat16)
        assert set(dtypes) == {torch.bfloat16} and got.settings["dtype"] == "bfloat16"
        assert 1e-7 < abs(got.loss / want - 1) < 0.02
        with torch.autocast(backend.device, torch.bfloat16):
            assert evaluate(model, tokens, **options).loss == got.loss


def test_sums_in_float64():
    """4,000 losses of the size that float32 cannot add without error."""
    model, tokens = small_model(dtype=torch.float32, n_layer=1), text(4001)
    losses = []

    def keep(module, args, out):
        losses.append(out.token_losses.double())

    model.register_forward_hook(keep)
    got = evaluate(model, tokens, tgt_len=500)
    assert math.isclose(got.loss, torch.cat(losses, 1).mean().item(), rel_tol=1e-13)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32"])
def test_memory_mapped_text(dtype, tmp_path):
    model, tokens = small_model(), text(40)
    file = np.memmap(tmp_path / "text.bin", dtype=dtype, mode="w+", shape=40)
    file[:] = tokens.numpy()
    for options in (dict(batch_size=3, warm_up=4), dict(stride=3)):
        got = evaluate(model, torch.from_numpy(file), tgt_len=8, **options).loss
        assert got == evaluate(model, tokens, tgt_len=8, **options).loss


def test_units():
    result = Evaluation(loss=math.log(8), tokens=5, seconds=1.0, settings={})
    assert math.isclose(result.ppl, 8) and math.isclose(result.bpc, 3)
    assert Evaluation(1e4, 5, 1.0, {}).ppl == math.inf
    model, tokens = small_model(), text(20)
    for parameter in (model.word_emb.tables[0], model.softmax.biases[0]):  # tied: every logit is 0
        torch.nn.init.zeros_(parameter)
    result = evaluate(model, tokens, tgt_len=8)
    assert math.isclose(result.ppl, VOCAB) and math.isclose(result.bpc, 6) and result.seconds > 0


@pytest.mark.gpu
def test_gpu_is_not_waited_for():
    """The one synchronisation is the end's: twice the segments, no more waiting."""
    model, tokens = small_model("triton", torch.float32).cuda(), text(200)
    want = evaluate(small_model(dtype=torch.float32), tokens, tgt_len=8, mem_len=6)
    evaluate(model, tokens, tgt_len=8, mem_len=6)  # compiles
    waits = []
    for tgt_len in (8, 4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                got = evaluate(model, tokens, tgt_len=tgt_len, mem_len=6)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(w.message) for w in caught))
        if tgt_len == 8:
            assert math.isclose(got.loss, want.loss, rel_tol=1e-5)
    assert waits[0] == waits[1]


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_input():
    model, tokens = small_model(), text(20)
    too_large = tokens.clone()
    too_large[15] = VOCAB
    for options, message in [
        (dict(tgt_len=0), "tgt_len must be at least 1, got 0"),
        (dict(tgt_len=8, batch_size=0), "batch_size must be at least 1"),
        (dict(tgt_len=8, mem_len=-1), "mem_len must be at least 0, got -1"),
        (dict(tgt_len=8, clamp_len=-2), "clamp_len must be -1"),
        (dict(tgt_len=8, mem_len=0, same_length=True), "same_length needs mem_len >= 1"),
        (dict(tgt_len=8, warm_up=-1), "warm_up must be at least 0"),
        (dict(tgt_len=8, max_tokens=0), "max_tokens must be at least 1"),
        (dict(tgt_len=8, stride=0), "stride must be at least 1"),
        (dict(tgt_len=8, stride=9), "stride must not exceed tgt_len, a window's 8 tokens, got 9"),
        (dict(tgt_len=8, stride=2, warm_up=4), "windows .* have none"),
        (dict(tokens=tokens[:1]), "needs 2 tokens, one to read and one to predict, got 1"),
        (dict(tokens=tokens[:0]), "needs 2 tokens, .* got 0"),
        (dict(tokens=tokens.view(2, 10)), r"1-D integers, got torch.int64 \[2, 10\]"),
        (dict(tokens=tokens.float()), "1-D integers, got torch.float32"),
        *(
            (
                dict(tokens=x, max_tokens=5),
                rf"tokens must be a tensor of 1-D integers, got {type(x).__name__}: ",
            )
            for x in (tokens.tolist(), tokens.numpy())
        ),
        *(
            (dict(dtype=x), rf"dtype must be torch\.bfloat16, torch\.float16 or None, got {x!r}")
            for x in (torch.float64, torch.float32, "bfloat16")
        ),
        (dict(tokens=too_large), r"token 64 is not in the model's vocabulary, \[0, 64\): is this the corpus"),
        (dict(tokens=-tokens), r"token -\d+ is not in the model's vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            evaluate(model, **{"tokens": tokens, "tgt_len": 8, **options})
    assert evaluate(model, too_large, tgt_len=8, max_tokens=14).tokens == 14, "what is not read is no matter"


def test_seconds_are_those_of_reading() -> None:
    began = time.perf_counter()
    result = evaluate(small_model(), model_helpers.tokens(30, batch=1)[0], tgt_len=8)
    assert 0 < result.seconds <= time.perf_counter() - began


def test_windows_remember_nothing_and_say_so() -> None:
    """same_length lets a token see mem_len keys there, too."""
    read, stride = (small_model(), model_helpers.tokens(30, batch=1)[0]), dict(tgt_len=8, stride=3, mem_len=5)
    for same_length, said in [(False, 0), (True, 5)]:
        settings = evaluate(*read, **stride, same_length=same_length).settings
        assert (settings["stride"], settings["mem_len"]) == (3, said)


def test_lengths_are_read_as_one_would_be() -> None:
    """Every argument goes on to `evaluate`."""
    model, text, scored = small_model(dtype=torch.float32), model_helpers.tokens(60, batch=1)[0], []
    options = dict(
        tgt_len=8, clamp_len=2, batch_size=3, same_length=True, max_tokens=40, dtype=torch.bfloat16
    )
    for result in evaluate_lengths(model, text, [3, 9], warm_up=5, progress=scored.append, **options):
        alone = evaluate(model, text, mem_len=result.settings["mem_len"], warm_up=5, **options)
        assert (result.loss, result.settings) == (alone.loss, alone.settings)
    assert sum(scored) == 2 * 40


@pytest.mark.parametrize("stride", [None, 2])
def test_another_default_device(stride):
    model, text = model_helpers.small_model().eval(), model_helpers.tokens(40)[0]
    want = evaluate(model, text, tgt_len=4, stride=stride).loss
    with torch.device("meta"):
        assert evaluate(model, text, tgt_len=4, stride=stride).loss == want

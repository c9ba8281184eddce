"""Generation: against reading everything again for each token, and every row against its prompt alone."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import weakref

import helpers
import pytest
import torch

from txl_model import TransformerXL, TransformerXLConfig
from txl_model.data.vocabulary import Vocabulary
from txl_model.generate import FINISHED, collect, generate, sample, stream_text

VOCAB = 40
PROMPTS = [[5, 1, 9, 30, 2, 2, 7, 18, 33, 4, 0], [3], [8, 8, 21, 6], [39] * 7]
RELATIVE = [
    pytest.param({}, id="sinusoid"),
    pytest.param(dict(clamp_len=3, pre_lnorm=True, untie_r=True), id="sinusoid-clamp"),
    pytest.param(dict(attn_type=1), id="learned"),
    pytest.param(dict(cutoffs=(10, 25), div_val=2), id="adaptive"),
]
KINDS = [
    *RELATIVE,
    pytest.param(dict(same_length=True), id="same-length"),
    pytest.param(dict(attn_type=2), id="absolute"),
    pytest.param(dict(attn_type=3), id="absolute-learned"),
]


def small_model(backend="reference", dtype=torch.float64, **fields) -> TransformerXL:
    """A model whose text varies: with the published initial values, or with biases, one token repeats."""
    sizes = dict(n_layer=2, n_head=2, d_model=12, d_head=6, d_inner=16, tgt_len=8, mem_len=6)
    config = dict(vocab_size=VOCAB, dropout=0.0, tie_weight=False, **sizes)
    torch.manual_seed(1)
    model = TransformerXL(TransformerXLConfig(**{**config, **fields}), backend)
    for name, parameter in model.named_parameters():
        if "layer_norm" not in name and "softmax.bias" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


# ------------------------------------------------------------------------------------------ what is predicted


@pytest.mark.parametrize("segment_len", [1, 4, 512])
@pytest.mark.parametrize("fields", RELATIVE)
def test_greedy_is_the_likeliest_token_after_everything_before(fields, segment_len):
    """With a memory of everything: the text read again from its beginning for each token."""
    model, text = small_model(**fields), list(PROMPTS[0])
    for _ in range(12):
        text.append(model(torch.tensor([text])).logits[0, -1].argmax().item())
    got = generate(model, PROMPTS[:1], 12, temperature=0, mem_len=100, segment_len=segment_len)
    assert PROMPTS[0] + collect(got)[0] == text


@pytest.mark.parametrize(
    "options", [dict(temperature=0), dict(seed=3), dict(seed=3, top_k=0, top_p=0.9)], ids=str
)
@pytest.mark.parametrize("segment_len", [3, 512])
@pytest.mark.parametrize("fields", KINDS)
def test_every_row_is_its_prompt_alone(fields, segment_len, options):
    model = small_model(**fields)
    rows = collect(generate(model, PROMPTS, 12, segment_len=segment_len, **options))
    assert len({tuple(row) for row in rows}) > 2
    for b, prompt in enumerate(PROMPTS):
        alone = {**options, "seed": options["seed"] + b} if "seed" in options else options
        assert collect(generate(model, [prompt], 12, segment_len=segment_len, **alone)) == [rows[b]]


@pytest.mark.parametrize("prompts", [PROMPTS, [row[:1] for row in PROMPTS]], ids=["unequal", "equal"])
@pytest.mark.parametrize("options", [dict(temperature=0), dict(seed=3, top_k=5)], ids=str)
def test_prompts_after_a_memory_of_zeros(options, prompts):
    model = small_model(zero_memory=True)
    free = collect(generate(model, prompts, 12, **options))
    options = {**options, "stop_tokens": [free[0][3]]}
    steps = list(generate(model, prompts, 12, **options))
    assert all(step.dtype == torch.int64 and step.shape == (4,) for step in steps)
    for b, prompt in enumerate(prompts):
        alone = {**options, "seed": options["seed"] + b} if "seed" in options else options
        assert collect(generate(model, [prompt], 12, **alone)) == [collect(steps)[b]]
    assert len({len(row) for row in collect(steps)}) > 1, "rows that end at different steps"


@pytest.mark.parametrize("backend", helpers.each_fused(torch.float32))
def test_fused_kernels_give_the_same_text(backend):
    settings = dict(max_new_tokens=15, temperature=0, mem_len=20)
    want = collect(generate(small_model(), PROMPTS, **settings))
    model = small_model(backend.name, torch.float32).to(backend.device)
    assert collect(generate(model, PROMPTS, **settings)) == want


def test_settings_of_the_memory():
    model, other = small_model(), small_model(mem_len=4, clamp_len=1, same_length=True)
    other.load_state_dict(model.state_dict())
    settings = dict(mem_len=4, clamp_len=1, same_length=True)
    want = collect(generate(other, PROMPTS, 20, temperature=0))
    assert collect(generate(model, PROMPTS, 20, temperature=0, **settings)) == want
    for name in settings:  # each of them counts
        others = {n: v for n, v in settings.items() if n != name}
        assert collect(generate(model, PROMPTS, 20, temperature=0, **others)) != want


# --------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.8), (4, 0.6), (100, 1e-9), (1, 1.0)])
def test_distribution(temperature, top_k, top_p):
    """Equally spaced numbers instead of random ones: each token as often as its probability says."""
    logits = torch.tensor([0.3, 2.0, -1.0, 1.2, 1.1, -math.inf])
    p = (logits.double() / temperature).softmax(0)
    order = p.argsort(descending=True).tolist()
    order = order[: top_k or None]
    p = p / p[order].sum()
    kept, reached = [], 0.0
    for token in order:
        if reached < top_p:
            kept.append(token)
        reached += p[token].item()
    n = 10_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    got = sample(logits.expand(n, -1), uniform, temperature, top_k, top_p).bincount(minlength=6) / n
    want = torch.zeros(6, dtype=torch.float64)
    want[kept] = p[kept] / p[kept].sum()
    torch.testing.assert_close(got.double(), want, atol=1.01 / n, rtol=0)


def test_ends_of_the_unit_interval():
    largest = 1 - 2**-53
    logits = torch.randn(500, 300)
    for u in (0.0, largest):
        chosen = sample(logits, torch.full((500,), u, dtype=torch.float64), 1.0, 7, 0.9)
        rank = (logits > logits.gather(1, chosen[:, None])).sum(1)
        assert rank.max() < 7
        assert (rank == 0).all() if u == 0 else (rank > 0).all()


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_temperatures(temperature, dtype):
    logits = torch.randn(100, 50).to(dtype)
    chosen = sample(logits, torch.rand(100, dtype=torch.float64), temperature, 0, 1.0)
    if temperature < 1:
        assert (logits.gather(1, chosen[:, None])[:, 0] == logits.amax(1)).all()
    else:
        assert len(chosen.unique()) > 20


def test_seed():
    model, repeated = small_model(), PROMPTS[:1] * 3
    state = torch.get_rng_state()
    text = collect(generate(model, repeated, 30, seed=7))
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(row) for row in text}) == 3, "the same prompt goes on differently in each row"
    torch.manual_seed(123)
    assert collect(generate(model, repeated, 30, seed=7)) == text
    assert collect(generate(model, repeated, 30, seed=8))[:2] == text[1:]
    unseeded = [collect(generate(model, repeated, 30)) for _ in range(2)]
    assert unseeded[0] != unseeded[1] and text not in unseeded
    for seed in (-1, 2**64 - 1):
        collect(generate(model, repeated, 1, seed=seed))


def test_top_k_of_the_paper_is_the_default():
    model = small_model(vocab_size=300)
    options = dict(seed=1, temperature=20.0)  # nearly uniform: every allowed token comes
    prompts = [[b % 300] for b in range(300)]
    assert collect(generate(model, prompts, 2, **options)) == collect(
        generate(model, prompts, 2, top_k=40, **options)
    )
    likeliest = model(torch.tensor(prompts)).logits[:, -1].topk(40).indices
    first = next(generate(model, prompts, 1, **options))
    assert (likeliest == first[:, None]).any(1).all()
    rank = (likeliest == first[:, None]).int().argmax(1)
    assert len(rank.unique()) > 35


@pytest.mark.parametrize("fields", RELATIVE)
def test_tokens_beyond_the_symbols_are_not_drawn(fields):
    model = small_model(**fields)
    for options in (dict(temperature=0), dict(temperature=1e9, top_k=0, seed=1)):
        assert max(max(row) for row in collect(generate(model, PROMPTS, 40, **options))) >= 5
        few = collect(generate(model, PROMPTS, 40, n_symbols=5, **options))
        assert max(max(row) for row in few) < 5
    prompt = torch.tensor(PROMPTS[:1])
    first = next(generate(model, PROMPTS[:1], 1, temperature=0, n_symbols=5))
    assert first.item() == model(prompt).logits[0, -1, :5].argmax().item()


# ----------------------------------------------------------------------------------------- one step at a time


@pytest.mark.parametrize("attn_type", [0, 1, 2, 3])
def test_a_model_trained_without_memory(attn_type):
    """A token sees as many as in training: with one layer, the text of windows of tgt_len."""
    model, text = small_model(n_layer=1, mem_len=0, attn_type=attn_type), list(PROMPTS[0])
    for _ in range(12):
        text.append(model(torch.tensor([text[-8:]])).logits[0, -1].argmax().item())
    got = collect(generate(model, PROMPTS[:1], 12, temperature=0))
    assert PROMPTS[0] + got[0] == text
    assert got == collect(generate(model, PROMPTS[:1], 12, temperature=0, segment_len=1, mem_len=7))
    assert got != collect(generate(model, PROMPTS[:1], 12, temperature=0, segment_len=1, mem_len=0))


@pytest.mark.parametrize("tgt_len, lengths", [(4, [3, 4, 4]), (700, [11]), (1, [1] * 11)])
def test_prompts_are_read_in_segments_as_in_training(tgt_len, lengths):
    model, read = small_model(tgt_len=tgt_len), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    next(generate(model, PROMPTS[:1], 1))
    assert read == lengths
    read.clear()
    next(generate(model, [PROMPTS[0] * 100], 1))
    assert max(read) == min(tgt_len, 512) and sum(read) == 1100


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(temperature, value):
    model = small_model()
    with torch.no_grad():
        model.softmax.biases[0][3] = value
    with pytest.raises(FloatingPointError, match="logits of row 0 are NaN or infinite"):
        collect(generate(model, PROMPTS[:2], 3, temperature=temperature))


def test_steps_and_stop_tokens():
    model = small_model()
    free = collect(generate(model, PROMPTS, 30, temperature=0))
    stop = [free[0][4], free[2][9]]
    steps = list(generate(model, PROMPTS, 30, temperature=0, stop_tokens=stop))
    ends = []
    for b, row in enumerate(free):
        end = next((i + 1 for i, token in enumerate(row) if token in stop), 30)
        ends.append(end)
        got = [step[b].item() for step in steps]
        assert got == (row[:end] + [FINISHED] * 30)[: len(steps)]
    assert len(steps) == max(ends)
    assert min(ends) < max(ends), "rows that end at different steps, or the test is empty"
    assert all(step.dtype == torch.int64 and step.shape == (4,) for step in steps)
    assert collect(steps) == [row[:end] for row, end in zip(free, ends, strict=True)]
    (only,) = generate(model, PROMPTS, 30, temperature=0, stop_tokens=range(VOCAB))
    assert only.tolist() == [row[0] for row in free]


def test_nothing_is_read_ahead():
    """The prompt before the first token, then one token for each further one, and none after the last."""
    model, read = small_model(), []
    model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    steps = generate(model, PROMPTS, 3, segment_len=4)
    assert not read
    next(steps)
    assert read == [(4, 3), (4, 4), (4, 4)]
    next(steps)
    assert read[3:] == [(4, 1)]
    assert len(list(steps)) == 1 and read[4:] == [(4, 1)]


def test_leaves_nothing_behind():
    model = small_model(dropout=0.5, dropatt=0.5)
    want = collect(generate(model, PROMPTS, 5, temperature=0))
    model.train()
    model.blocks[0].eval()  # frozen, say
    before, memories = [module.training for module in model.modules()], []
    model.register_forward_hook(lambda module, args, out: memories.append(weakref.ref(out.memory)))
    steps = generate(model, PROMPTS, 5, temperature=0, segment_len=512)
    for i, step in enumerate(itertools.islice(steps, 3)):
        assert step.tolist() == [row[i] for row in want]
        assert torch.is_grad_enabled() and not step.is_inference()
        assert [module.training for module in model.modules()] == before
    steps.close()
    gc.collect()
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled() and all(p.grad is None for p in model.parameters())
    assert len(memories) == 3 and not any(memory() for memory in memories)
    model(torch.tensor(PROMPTS[:1]), labels=torch.tensor(PROMPTS[:1])).loss.backward()


# -------------------------------------------------------------------------------------------- to the terminal


def one_by_one(tokens: list[int]) -> list[torch.Tensor]:
    return [torch.tensor([7, token]) for token in tokens]


@pytest.mark.parametrize("text", ["naïve, 日本語 \N{GRINNING FACE}\n", "", "plain"])
def test_text_comes_in_whole_characters(text):
    vocabulary = Vocabulary.of_bytes()
    pieces = list(stream_text(one_by_one(vocabulary.encode(text)), vocabulary, row=1))
    assert pieces == list(text)


def test_text_that_is_not_whole_characters():
    vocabulary = Vocabulary.of_bytes()
    tokens = [0x61, 0xE6, 0x97, 0x62, 0xFF, 0xE6, 0x97]  # a, half a character, b, what never is one, half
    pieces = list(stream_text(one_by_one(tokens), vocabulary, row=1))
    assert "".join(pieces) == bytes(tokens).decode(errors="replace") == "a\ufffdb\ufffd\ufffd"


def test_words_and_the_end_of_a_row():
    vocabulary = Vocabulary("word", ("<eos>", "a", "b"), line_end="<eos>")
    steps = one_by_one([1, 2, 0, 2, FINISHED, FINISHED])
    assert list(stream_text(steps, vocabulary, row=1)) == ["a ", "b ", "\n", "b "]


def test_text_streams():
    """Each piece before the next token is made."""
    vocabulary = Vocabulary("char", tuple(chr(ord("A") + i) for i in range(VOCAB)))
    model, read = small_model(), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    pieces = stream_text(generate(model, PROMPTS[1:2], 9, seed=1), vocabulary)
    assert not read
    for i, piece in enumerate(pieces):
        assert len(piece) == 1 and len(read) == i + 1
    assert i == 8


# -------------------------------------------------------------------------------------------------- bad input


def test_bad_input():
    model = small_model()
    for prompts in ([1, 2, 3], "abc", ["abc"], [[1], None]):
        with pytest.raises(TypeError, match=r"prompts must be lists of tokens, one for each row, such as \["):
            generate(model, prompts, 5)
    for options, message in [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), "prompt 1 is empty: a model needs a token"),
        (dict(prompts=[[1], [2, VOCAB]]), r"prompt 1: token 40 is not in the model's vocabulary, \[0, 40\)"),
        (dict(prompts=[[-1]]), "prompt 0: token -1 is not"),
        (dict(stop_tokens=[3, 99]), "stop_tokens: token 99 is not"),
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(segment_len=0), "segment_len must be at least 1"),
        (dict(n_symbols=0), "n_symbols must be at least 1, got 0"),
        (dict(top_k=-1), "top_k must be at least 0, got -1"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(top_p=math.nan), "top_p must be in"),
        (dict(temperature=-0.1), r"temperature must be 0 \(greedy\) or a positive number, got -0.1"),
        (dict(temperature=math.nan), "temperature must be 0"),
        (dict(temperature=math.inf), "temperature must be 0"),
        (dict(mem_len=-1), "mem_len must be at least 0, got -1"),
        (dict(clamp_len=-2), "clamp_len must be -1"),
        (dict(mem_len=0, same_length=True), "same_length needs mem_len >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):  # at the call: no step is asked for
            generate(model, **{"prompts": [[1]], "max_new_tokens": 1, **options})


# ----------------------------------------------------------------------------------------------------- memory


def test_what_is_measured():
    assert helpers.allocations(lambda: torch.cat([torch.ones(300), torch.ones(200)]))[-1] >= 4 * 500


@pytest.mark.parametrize("fields", RELATIVE)
@pytest.mark.parametrize("backend", helpers.each_fused(torch.float32))
def test_a_step_allocates_nothing_that_grows_with_the_memory(backend, fields):
    """No concatenation, no projection of what is remembered: the buffers were made with the prompt."""
    if backend.device != "cpu" or helpers.INTERPRET or helpers.EMULATED:
        pytest.skip("measured in torch's allocator for CPUs")
    by_length = []
    for mem_len in (250, 1000):
        model = small_model(backend.name, torch.float32, **fields)
        steps = generate(model, [list(range(40)) * 30], 5, mem_len=mem_len, seed=1)
        next(steps)
        next(steps)
        by_length.append(helpers.allocations(functools.partial(next, steps)))
    smallest_memory = 250 * model.config.n_head * model.config.d_head * 4
    assert max(by_length[1]) < smallest_memory
    assert by_length[0] == by_length[1]


def test_top_p_takes_the_fewest_tokens() -> None:
    """Two of four equal ones have a probability of 1 / 2 exactly: a third is one too many."""
    uniform = torch.tensor([0.0, 0.3, 0.6, 0.999], dtype=torch.float64)
    chosen = sample(torch.zeros(4, 4), uniform, 1.0, 0, 0.5)
    assert len(chosen.unique()) == 2


def test_another_default_device():
    """What is documented as on the CPU is there."""
    model, prompts = small_model().eval(), [[1, 2], [3]]
    want = list(generate(model, prompts, 4, seed=3))
    with torch.device("meta"):
        got = list(generate(model, prompts, 4, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

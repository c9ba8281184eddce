"""The Transformer-XL model: against the published computation written out, and what its memory promises."""

from __future__ import annotations

import functools
import importlib.util
import json
import math

import helpers
import pytest
import torch
import torch.nn.functional as F

from txl_model import TransformerXL, TransformerXLConfig
from txl_model.model import position_embedding

B, VOCAB = 2, 11
LIMITED = [
    pytest.param({"same_length": True}, id="same-length"),
    pytest.param({"same_length": True, "clamp_len": 3, "pre_lnorm": True}, id="same-length-clamp"),
]
UNLIMITED = [
    pytest.param({}, id="post-LN"),
    pytest.param({"pre_lnorm": True}, id="pre-LN"),
    pytest.param({"untie_r": True, "tie_weight": False}, id="untied"),
    pytest.param({"clamp_len": 5}, id="clamp"),
    pytest.param({"clamp_len": 0}, id="clamp-0"),
]
VARIANTS = UNLIMITED + LIMITED


def small_model(backend="reference", dtype=torch.float64, **fields) -> TransformerXL:
    sizes = dict(n_layer=3, n_head=2, d_model=12, d_head=5, d_inner=16, mem_len=6)
    torch.manual_seed(1)
    config = TransformerXLConfig(**{"vocab_size": VOCAB, "dropout": 0.0, **sizes, **fields})
    model = TransformerXL(config, backend)
    for parameter in model.parameters():  # the published initial values are too small for a mistake to show
        torch.nn.init.normal_(parameter, std=0.4)
    return model.to(dtype)


def tokens(length: int, batch: int = B) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def in_segments(model, input_ids, lengths, mem_len=None) -> torch.Tensor:
    """Logits [B, T, VOCAB] of input_ids read in segments of these lengths."""
    memory, logits = model.new_memory(len(input_ids), mem_len), []
    for segment in input_ids.split(lengths, dim=1):
        out = model(segment, memory)
        memory = out.memory
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def as_published(model, input_ids, memory, mem_len) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and new memory by the authors' steps: one qkv product over memory and segment, K position
    embeddings from clamped descending distances, pad-and-view shift, mask of what may not be seen."""
    c, p = model.config, dict(model.named_parameters())
    T, K = input_ids.shape[1], memory[0].shape[1] + input_ids.shape[1]

    def layer_norm(x, name):
        return F.layer_norm(x, (c.d_model,), p[f"{name}.layer_norm.weight"], p[f"{name}.layer_norm.bias"])

    def heads(x):
        return x.view(x.shape[0], x.shape[1], c.n_head, c.d_head).transpose(1, 2)

    distance = torch.arange(K - 1, -1, -1.0)
    if c.clamp_len >= 0:
        distance = distance.clamp(max=c.clamp_len)
    angle = torch.outer(distance, 1 / 10000 ** (torch.arange(0, c.d_model, 2.0) / c.d_model))
    pos_emb = torch.cat([angle.sin(), angle.cos()], dim=-1).to(memory[0].dtype)[None]  # [1, K, d_model]
    i, j = torch.arange(T)[:, None], torch.arange(K)[None, :]
    hidden_from = j > i + K - T
    if c.same_length:
        hidden_from |= j <= i + K - T - mem_len

    h, inputs = p["word_emb.tables.0"][input_ids] * c.d_model**0.5, []
    for n in range(c.n_layer):
        inputs.append(h)
        attn, ff = f"blocks.{n}.attn", f"blocks.{n}.ff"
        both = torch.cat([memory[n], h], dim=1)
        if c.pre_lnorm:
            both = layer_norm(both, attn)
        q, k, v = (heads(x) for x in (both @ p[f"{attn}.qkv_net.weight"].T).chunk(3, dim=-1))
        q, r = q[:, :, -T:], heads(pos_emb @ p[f"{attn}.r_net.weight"].T)
        u, v_bias = (p[name][n if c.untie_r else 0][:, None] for name in ("bias_u", "bias_v"))
        position = F.pad((q + v_bias) @ r.mT, (1, 0))
        position = position.view(B, c.n_head, K + 1, T)[:, :, 1:].reshape(B, c.n_head, T, K)
        score = ((q + u) @ k.mT + position) * c.d_head**-0.5
        probability = score.masked_fill(hidden_from, -math.inf).softmax(-1)
        attended = (probability @ v).transpose(1, 2).flatten(2)
        h = h + attended @ p[f"{attn}.o_net.weight"].T
        h = h if c.pre_lnorm else layer_norm(h, attn)
        x = layer_norm(h, ff) if c.pre_lnorm else h
        x = (x @ p[f"{ff}.net.0.weight"].T + p[f"{ff}.net.0.bias"]).relu()
        h = h + x @ p[f"{ff}.net.3.weight"].T + p[f"{ff}.net.3.bias"]
        h = h if c.pre_lnorm else layer_norm(h, ff)
    head = p["word_emb.tables.0"] if c.tie_weight else p["softmax.tables.0"]
    seen = [torch.cat(pair, dim=1) for pair in zip(memory, inputs, strict=True)]
    new_memory = [x[:, max(0, K - mem_len) :] for x in seen]
    return h @ head.T + p["softmax.biases.0"], new_memory


@pytest.mark.parametrize("backend", helpers.each_backend(torch.float32))
@pytest.mark.parametrize("fields", VARIANTS)
def test_equals_the_published_computation(fields, backend):
    model = small_model(backend.name, torch.float32, **fields).to(backend.device)
    exact = small_model(**fields)
    memory, published = None, [torch.zeros(B, 0, 12, dtype=torch.float64)] * 3
    for input_ids in tokens(17).split([4, 1, 9, 3], dim=1):
        out = model(input_ids.to(backend.device), memory)
        memory = out.memory
        logits, published = as_published(exact, input_ids, published, mem_len=6)
        torch.testing.assert_close(out.logits.cpu().double(), logits, rtol=1e-4, atol=1e-4)
        for got, want in zip(memory.hidden, published, strict=True):
            torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("fields", UNLIMITED)
def test_memory_of_everything_is_one_long_segment(fields):
    model, input_ids = small_model(**fields), tokens(20)
    whole = model(input_ids).logits
    torch.testing.assert_close(in_segments(model, input_ids, [7, 1, 4, 8], mem_len=20), whole)


@pytest.mark.parametrize("lengths", [[20], [1] * 20, [7, 1, 4, 8], [5, 15]])
def test_same_length_does_not_depend_on_the_segments(lengths):
    model, input_ids = small_model(same_length=True, clamp_len=4), tokens(20)
    whole = model(input_ids).logits
    torch.testing.assert_close(in_segments(model, input_ids, lengths), whole)


def test_same_length_sees_mem_len_keys():
    model, input_ids = small_model(same_length=True, n_layer=1), tokens(20)
    changed = input_ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCAB
    differs = (model(input_ids).logits != model(changed).logits).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == list(range(8, 8 + 6))


def test_one_layer_sees_memory_and_segment():
    model, input_ids = small_model(n_layer=1), tokens(20)
    logits = in_segments(model, input_ids, [4] * 5)
    for start in range(0, 20, 4):
        alone = model(input_ids[:, max(0, start - 6) : start + 4]).logits[:, -4:]
        torch.testing.assert_close(logits[:, start : start + 4], alone)


def test_memory_reaches_further_with_every_layer():
    """Three layers, memory 6, segments of 2: a segment's first token is reached by 3 * 6 further tokens."""
    model, input_ids = small_model(), tokens(40)
    changed = input_ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    before, after = (in_segments(model, x, [2] * 20) for x in (input_ids, changed))
    differs = (before != after).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == list(range(0, 2 + 3 * 6))


def test_memory_keeps_the_newest_and_is_not_changed():
    model, input_ids = small_model(), tokens(15)
    first = model(input_ids[:, :4])
    assert first.memory.length == 4
    before = [h.clone() for h in first.memory.hidden]
    second = model(input_ids[:, 4:7], first.memory)
    assert second.memory.length == 6
    assert torch.equal(second.memory.hidden[0][:, :3], before[0][:, 1:])
    for now, then in zip(first.memory.hidden, before, strict=True):
        assert torch.equal(now, then)
    long = model(input_ids[:, 4:], first.memory)
    assert [tuple(h.shape) for h in long.memory.hidden] == [(B, 6, 12)] * 3
    assert model(input_ids, model.new_memory(B, mem_len=0)).memory.length == 0


def test_memory_is_detached():
    model = small_model(tie_weight=False)
    first = model(torch.full((B, 4), 3))
    assert not any(h.requires_grad for h in first.memory.hidden)
    model(torch.full((B, 4), 5), first.memory, torch.full((B, 4), 7)).loss.backward()
    touched = model.word_emb.tables[0].grad.abs().sum(-1).nonzero().flatten().tolist()
    assert touched == [5], "only this segment's tokens get a gradient"


# ---------------------------------------------------------------------------------- causality, gradient, loss


@pytest.mark.parametrize("fields", VARIANTS)
def test_causal(fields):
    model, input_ids = small_model(**fields), tokens(16)
    memory = model(input_ids[:, :6]).memory
    changed = input_ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCAB
    before, after = (model(x[:, 6:], memory).logits for x in (input_ids, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


@pytest.mark.parametrize("backend", helpers.each_backend(torch.float32))
@pytest.mark.parametrize("fields", VARIANTS)
def test_gradient_reaches_every_parameter(fields, backend):
    model = small_model(backend.name, torch.float32, **fields).to(backend.device)
    input_ids = tokens(25).to(backend.device)
    memory = model(input_ids[:, :8]).memory
    model(input_ids[:, 8:-1], memory, input_ids[:, 9:]).loss.backward()
    exact = small_model(**fields)
    memory = exact(tokens(25)[:, :8]).memory
    exact(tokens(25)[:, 8:-1], memory, tokens(25)[:, 9:]).loss.backward()
    for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        # With one row of r for all distances, the position term shifts all scores alike: softmax ignores it.
        if model.config.clamp_len != 0 or not name.endswith(("bias_v", "r_net.weight")):
            assert want.grad.abs().max() > 1e-6, f"{name} gets no gradient"
        torch.testing.assert_close(got.grad.cpu().double(), want.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_loss():
    model, input_ids = small_model(), tokens(9)
    labels = input_ids[:, 1:].clone()
    labels[0, :3] = -100
    out = model(input_ids[:, :-1], labels=labels)
    log_p = out.logits.log_softmax(-1)
    want = -torch.gather(log_p, 2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    torch.testing.assert_close(out.token_losses, want)
    torch.testing.assert_close(out.loss, want.sum() / 13)
    assert model(input_ids).loss is None


def test_tied_weights_and_initial_values():
    model = TransformerXL(TransformerXLConfig(n_layer=2, d_model=64, d_inner=64, n_head=2, d_head=32))
    assert not len(model.softmax.tables)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm.weight"):
            assert abs(parameter.mean() - 1) < 0.01 and 0.01 < parameter.std() < 0.03, name
        elif "bias" in name and not name.startswith("bias_"):
            assert not parameter.any(), name
        else:
            assert abs(parameter.mean()) < 0.01 and 0.01 < parameter.std() < 0.03, name


# -------------------------------------------------------------------------------------------------- positions


def test_position_embedding():
    """Furthest distance first; sines in the first half, cosines in the second."""
    E = position_embedding(7, 6)
    assert E.dtype == torch.float32 and E.shape == (7, 6)
    for row in range(7):
        for t in range(3):
            angle = (6 - row) * 10000 ** (-2 * t / 6)
            assert math.isclose(E[row, t], math.sin(angle), abs_tol=1e-6)
            assert math.isclose(E[row, 3 + t], math.cos(angle), abs_tol=1e-6)


def test_far_distances_stay_apart_in_bfloat16():
    """The positions are rounded after the sines are taken: distances 257 and 256 differ."""
    rows = position_embedding(400, 8).bfloat16()
    assert not torch.equal(rows[399 - 257], rows[399 - 256])
    model = small_model(dtype=torch.bfloat16, mem_len=400)
    assert torch.isfinite(in_segments(model, tokens(300), [150, 150])).all()


# ------------------------------------------------------------------------------------------------ convergence


@functools.cache
def overfit(backend: str, device: str, dtype: torch.dtype) -> list[float]:
    """Losses of a tiny model that learns two segments by heart, with both kinds of dropout."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, n_layer=2, n_head=2, d_model=32, d_head=16, d_inner=64, mem_len=12)
    config = TransformerXLConfig(**sizes, pre_lnorm=True, dropout=0.05, dropatt=0.1)
    model = TransformerXL(config, backend).to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    text, losses = tokens(25).to(device), []
    for _ in range(30):
        memory = None
        for start in (0, 12):
            piece = text[:, start : start + 13]
            out = model(piece[:, :-1], memory, piece[:, 1:])
            memory = out.memory
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            losses.append(out.loss.item())
    return losses


# 16-bit training would need float32 weights beside the model's.
FULL_PRECISION = [p for p in helpers.each_dtype(exact=True) if p.values[1] in (torch.float32, torch.float64)]


@pytest.mark.parametrize("backend, dtype", FULL_PRECISION)
def test_converges_as_with_the_reference(backend, dtype):
    losses = overfit(backend.name, backend.device, dtype)
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    if backend.device == "cpu":  # another device draws other dropout masks
        # Training multiplies rounding errors. In float64 they stay out of sight, in float32 for a while.
        steps, rtol = (60, 1e-9) if dtype == torch.float64 else (20, 1e-4)
        want = overfit("reference", "cpu", dtype)
        torch.testing.assert_close(losses[:steps], want[:steps], rtol=rtol, atol=0.0)


# -------------------------------------------------------------------------------------------------- bad input


def test_bad_input():
    model, input_ids = small_model(), tokens(4)
    no_memory = model.new_memory(B, mem_len=0)
    other_batch, other_model = small_model().new_memory(B + 1), small_model(n_layer=2).new_memory(B)
    for call, message in [
        (lambda: model(input_ids[0]), r"input_ids must be \[B, T\]"),
        (lambda: model(input_ids[:, :0]), r"input_ids must be \[B, T\] with T >= 1, got shape \[2, 0\]"),
        (lambda: model(input_ids, labels=input_ids[:, 1:]), r"labels must be \[2, 4\]"),
        (lambda: model(input_ids, other_batch), r"and batch 3; .* and batch 2"),
        (lambda: model(input_ids, other_model), r"= \(2, 12, 2, 5\) .* need \(3, 12, 2, 5\)"),
        (lambda: small_model(same_length=True)(input_ids, no_memory), "same_length needs mem_len"),
        (lambda: model.new_memory(B, -1), "mem_len must not be negative, got -1"),
        (lambda: TransformerXLConfig(n_layer=0), "n_layer must be at least 1, got 0"),
        (lambda: TransformerXLConfig(dropatt=1.0), r"dropatt must be in \[0, 1\), got 1.0"),
        (lambda: TransformerXLConfig(d_model=7), "d_model must be even"),
        (lambda: TransformerXLConfig(mem_len=-1), "mem_len must not be negative"),
        (lambda: TransformerXLConfig(clamp_len=-2), "clamp_len must be -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# ------------------------------------------------------------------------------------------------ the example


@pytest.fixture(scope="module")
def train_bytes():
    pytest.importorskip("tqdm")
    path = helpers.ROOT / "examples" / "train_bytes.py"
    spec = importlib.util.spec_from_file_location("train_bytes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_memory_length_is_scored_on_the_same_bytes(train_bytes):
    model, text = small_model(), tokens(60)
    with torch.no_grad():
        whole = model(text[:, :-1], labels=text[:, 1:]).token_losses[:, 20:].mean() / math.log(2)
    for segment in (7, 16, 59):
        got = train_bytes.bits_per_byte(model, text, mem_len=60, segment=segment, warm_up=20)
        assert math.isclose(got, whole, rel_tol=1e-9)


def test_example(train_bytes, tmp_path, capsys):
    small = "--layers 1 --d-model 16 --heads 2 --batch 2 --segment 16 --mem 16 --eval-mem 0 8 --eval-bytes 64"
    train_bytes.main([*small.split(), "--steps", "4", "--json", str(tmp_path / "results.json")])
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["training"]["steps"] == 4
    for length, bits in results["held_out_bits_per_byte"].items():
        assert 7 < bits < 9
        assert f"{length}   {bits:.3f}" in printed

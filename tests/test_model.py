"""The Transformer-XL model: against the published computation written out, and what it promises of loss,
dropout and precision. Its memory: test_model_memory.py."""

from __future__ import annotations

import functools
import math

import helpers
import model_helpers
import pytest
import torch
import torch.nn.functional as F
from model_helpers import ADAPTIVE, VOCAB, B, in_segments, small_model, tokens
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from txl_kernels import rel_attention
from txl_model import Memory, TransformerXL, TransformerXLConfig, attention
from txl_model.generate import generate
from txl_model.layers import Dropout, ReluDropout
from txl_model.positions import last_rows, position_embedding

LIMITED = [
    pytest.param({"same_length": True}, id="same-length"),
    pytest.param({"same_length": True, "clamp_len": 3, "pre_lnorm": True}, id="same-length-clamp"),
    pytest.param({"same_length": True, "same_length_extra": 1, "attn_type": 1}, id="same-length-more"),
]
UNLIMITED = [
    pytest.param({}, id="post-LN"),
    pytest.param({"pre_lnorm": True}, id="pre-LN"),
    pytest.param({"untie_r": True, "tie_weight": False}, id="untied"),
    pytest.param({"clamp_len": 5}, id="clamp"),
    pytest.param({"clamp_len": 0}, id="clamp-0"),
    pytest.param({"attn_type": 1}, id="learned"),
    pytest.param({"attn_type": 1, "clamp_len": 3, "pre_lnorm": True, "d_head": 5}, id="learned-clamp"),
]
ABSOLUTE = [
    pytest.param({"attn_type": 2}, id="absolute"),
    pytest.param({"attn_type": 2, "clamp_len": 4, "pre_lnorm": True, "d_head": 5}, id="absolute-clamp"),
    pytest.param({"attn_type": 3}, id="absolute-learned"),
    pytest.param(
        {"attn_type": 3, "clamp_len": 3, "pre_lnorm": True, "same_length": True}, id="learned-limited"
    ),
]
NO_RECURRENCE = [pytest.param({"attn_type": n, "mem_len": 0}, id=f"no-memory-{n}") for n in range(4)]
EMBEDDINGS = [
    pytest.param({"d_embed": 8, "tie_projs": (True,)}, id="narrow-embedding"),
    pytest.param(ADAPTIVE, id="adaptive"),
    pytest.param({**ADAPTIVE, "d_embed": 8, "tie_projs": (False, True, True, False)}, id="adaptive-narrow"),
    pytest.param({**ADAPTIVE, "div_val": 2, "tie_projs": (False, True, True, True)}, id="adaptive-div"),
    pytest.param({**ADAPTIVE, "div_val": 2, "d_embed": 9, "tie_weight": False}, id="adaptive-div-untied"),
]
VARIANTS = UNLIMITED + LIMITED + ABSOLUTE + NO_RECURRENCE


def as_published(model, input_ids, memory) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and new memory by the authors' steps: one qkv product over memory and segment, K position
    embeddings from clamped descending distances, pad-and-view shift, mask of what may not be seen.

    Two of their mistakes are left out: absolute positions stay in memory, to which the next ones are added,
    and absolute attention takes its queries from before the LayerNorm of pre-LN.
    """
    c, p = model.config, dict(model.named_parameters())
    T, K = input_ids.shape[1], memory[0].shape[1] + input_ids.shape[1]

    def layer_norm(x, name):
        return F.layer_norm(x, (c.d_model,), p[f"{name}.layer_norm.weight"], p[f"{name}.layer_norm.bias"])

    def heads(x):
        return x.view(x.shape[0], x.shape[1], c.n_head, c.d_head).transpose(1, 2)

    def shifted(x):  # [B, H, T, K]: column j, of distance K - 1 - j, to where the query has that distance
        return F.pad(x, (1, 0)).view(*x.shape[:2], K + 1, T)[:, :, 1:].reshape(x.shape)

    distance = torch.arange(K - 1, -1, -1.0)
    if c.clamp_len >= 0:
        distance = distance.clamp(max=c.clamp_len)
    angle = torch.outer(distance, 1 / 10000 ** (torch.arange(0, c.d_model, 2.0) / c.d_model))
    pos_emb = torch.cat([angle.sin(), angle.cos()], dim=-1).to(memory[0].dtype)  # [K, d_model]
    row = (c.tgt_len + c.mem_len - 1 - distance.long()).clamp(min=0)  # of the learned tables
    i, j = torch.arange(T)[:, None], torch.arange(K)[None, :]
    hidden_from = j > i + K - T
    if c.same_length:
        hidden_from |= j <= i + K - T - c.mem_len - c.same_length_extra

    h = torch.stack([model_helpers.embedding(model, token) for token in input_ids.flatten().tolist()])
    h, inputs = h.view(B, T, c.d_model) * c.d_model**0.5, []
    for n in range(c.n_layer):
        inputs.append(h)
        attn, ff = f"blocks.{n}.attn", f"blocks.{n}.ff"
        both = torch.cat([memory[n], h], dim=1)
        if c.attn_type == 2 and n == 0:
            both = both + pos_emb
        if c.attn_type == 3:
            both = both + p["r_emb"][n][row].flatten(1)
        h = both[:, -T:]
        if c.pre_lnorm:
            both = layer_norm(both, attn)
        q, k, v = (heads(x) for x in (both @ p[f"{attn}.qkv_net.weight"].T).chunk(3, dim=-1))
        q = q[:, :, -T:]
        score = q @ k.mT
        if c.attn_type == 0:
            r = heads(pos_emb[None] @ p[f"{attn}.r_net.weight"].T)
            u, v_bias = (p[name][n if c.untie_r else 0][:, None] for name in ("bias_u", "bias_v"))
            score = (q + u) @ k.mT + shifted((q + v_bias) @ r.mT)
        if c.attn_type == 1:
            r_emb, r_bias = p["r_emb"][n][row].permute(1, 2, 0), p["r_bias"][n][row].T  # [H, D, K], [H, K]
            score = (q + p["bias_u"][n][:, None]) @ k.mT + shifted(q @ r_emb + r_bias[:, None])
        probability = (score * c.d_head**-0.5).masked_fill(hidden_from, -math.inf).softmax(-1)
        attended = (probability @ v).transpose(1, 2).flatten(2)
        h = h + attended @ p[f"{attn}.o_net.weight"].T
        h = h if c.pre_lnorm else layer_norm(h, attn)
        x = layer_norm(h, ff) if c.pre_lnorm else h
        x = (x @ p[f"{ff}.net.0.weight"].T + p[f"{ff}.net.0.bias"]).relu()
        h = h + x @ p[f"{ff}.net.3.weight"].T + p[f"{ff}.net.3.bias"]
        h = h if c.pre_lnorm else layer_norm(h, ff)
    seen = [torch.cat(pair, dim=1).detach() for pair in zip(memory, inputs, strict=True)]
    return model_helpers.logits(model, h), [x[:, max(0, K - c.mem_len) :] for x in seen]


@pytest.mark.parametrize("backend", helpers.each_backend(torch.float32))
@pytest.mark.parametrize("fields", VARIANTS)
def test_equals_the_published_computation(fields, backend):
    check_published(small_model(backend.name, torch.float32, **fields).to(backend.device), fields)


@pytest.mark.parametrize("fields", EMBEDDINGS)
def test_embeddings_equal_the_published_ones(fields):
    check_published(small_model(None, torch.float32, **fields), fields)


def check_published(model, fields):
    """Logits and memory over several segments, and the gradient of every parameter."""
    exact, device = small_model(**fields), model.softmax.biases[0].device
    config, memory = exact.config, None
    published = [torch.zeros(B, 0, 12, dtype=torch.float64)] * config.n_layer
    text = tokens(18)
    # The longer ones see further back than the learned tables reach.
    for segment in torch.stack([text[:, :-1], text[:, 1:]]).split([4, 1, 9, 3], dim=2):
        input_ids, labels = segment
        out = model(input_ids.to(device), memory, labels.to(device))
        memory = out.memory
        logits, published = as_published(exact, input_ids, published)
        torch.testing.assert_close(out.logits.cpu().double(), logits, rtol=1e-4, atol=1e-4)
        for got, want in zip(memory.hidden, published, strict=True):
            torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.testing.assert_close(out.loss.item(), loss.item(), rtol=1e-4, atol=1e-5)
        out.loss.backward()
        loss.backward()
    for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
        # With one row of r for all distances, the position term shifts all scores alike: softmax ignores it.
        if config.clamp_len != 0 or not name.endswith(("bias_v", "r_net.weight")):
            assert want.grad.abs().max() > 1e-5, f"{name} gets no gradient"
        torch.testing.assert_close(got.grad.cpu().double(), want.grad, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("fields", UNLIMITED)
def test_memory_of_everything_is_one_long_segment(fields):
    model, input_ids = small_model(**fields), tokens(20)
    whole = model(input_ids).logits
    memory = model.new_memory(B, mem_len=20)
    torch.testing.assert_close(in_segments(model, input_ids, [7, 1, 4, 8], memory), whole)


@pytest.mark.parametrize("lengths", [[20], [1] * 20, [7, 1, 4, 8], [5, 15]])
def test_same_length_does_not_depend_on_the_segments(lengths):
    model, input_ids = small_model(same_length=True, clamp_len=4), tokens(20)
    whole = model(input_ids).logits
    torch.testing.assert_close(in_segments(model, input_ids, lengths), whole)


@pytest.mark.parametrize("extra", [0, 1])
def test_same_length_sees_mem_len_keys(extra):
    """And NVIDIA's one more."""
    model, input_ids = small_model(same_length=True, same_length_extra=extra, n_layer=1), tokens(20)
    changed = input_ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCAB
    differs = (model(input_ids).logits != model(changed).logits).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == list(range(8, 8 + 6 + extra))


def test_one_layer_sees_memory_and_segment():
    model, input_ids = small_model(n_layer=1), tokens(20)
    logits = in_segments(model, input_ids, [4] * 5)
    for start in range(0, 20, 4):
        alone = model(input_ids[:, max(0, start - 6) : start + 4]).logits[:, -4:]
        torch.testing.assert_close(logits[:, start : start + 4], alone)


def test_memory_reaches_further_with_every_layer():
    """Three layers, memory 6, segments of 2: a segment's first token is reached by 3 * 6 further tokens."""
    model, input_ids = small_model(n_layer=3), tokens(40)
    changed = input_ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    before, after = (in_segments(model, x, [2] * 20) for x in (input_ids, changed))
    differs = (before != after).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == list(range(0, 2 + 3 * 6))


@pytest.mark.parametrize("fields", VARIANTS)
def test_causal(fields):
    model, input_ids = small_model(**fields), tokens(16)
    memory = model(input_ids[:, :6]).memory
    changed = input_ids.clone()
    changed[:, 10] = (changed[:, 10] + 1) % VOCAB
    before, after = (model(x[:, 6:], memory).logits for x in (input_ids, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


# ------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("fields", [{}, {**ADAPTIVE, "div_val": 2}], ids=["plain", "adaptive"])
def test_loss_is_the_mean_over_labelled_tokens(fields):
    model, input_ids = small_model(**fields), tokens(9)
    labels = input_ids[:, 1:].clone()
    labels[0, :3] = -100
    out = model(input_ids[:, :-1], labels=labels)
    log_p = out.logits.log_softmax(-1)
    want = -torch.gather(log_p, 2, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    torch.testing.assert_close(out.token_losses, want)
    torch.testing.assert_close(out.loss, want.sum() / 13)
    torch.testing.assert_close(out.last_logits(), out.logits[:, -1])
    assert model(input_ids).loss is None


@pytest.mark.parametrize("fields", [{}, {**ADAPTIVE, "div_val": 2}], ids=["plain", "adaptive"])
def test_logits_are_those_of_the_forward_pass(fields):
    """Or refused: by weights that have changed since they would be others."""
    model, text = small_model(**fields), tokens(9)
    want, old = model(text).logits, {n: x.detach().clone() for n, x in model.named_parameters()}
    before, asked = model(text), model(text, logits=True)
    torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: before.hidden.sum().backward())
    for late in (lambda: before.logits, before.last_logits):
        with pytest.raises(RuntimeError, match=r"weights have changed.*logits=True"):
            late()
    torch.testing.assert_close(asked.logits, want)
    other = torch.func.functional_call(model, old, (text,))
    with pytest.raises(RuntimeError, match="functional_call"):
        other.logits  # noqa: B018
    asked = torch.func.functional_call(model, old, (text,), dict(logits=True))
    torch.testing.assert_close(asked.logits, want)


def test_logits_have_gradients_if_the_forward_pass_had():
    model, text = small_model().eval(), tokens(9)
    out = model(text)
    with torch.no_grad():
        assert out.logits.requires_grad
        out = model(text)
    assert not out.logits.requires_grad
    with torch.inference_mode():
        out = model(text)
    assert out.logits.shape == (*text.shape, VOCAB)


def test_the_whole_model_is_one_graph():
    model, text = small_model(), tokens(9)
    want = model(text[:, :-1], labels=text[:, 1:])

    def loss_and_logits(input_ids, labels):
        out = model(input_ids, labels=labels)
        now = model(input_ids, logits=True)
        return out.loss, out.last_logits(), out.logits, now.logits

    got = torch.compile(loss_and_logits, fullgraph=True, backend="eager")(text[:, :-1], text[:, 1:])
    torch.testing.assert_close(got, (want.loss, want.last_logits(), want.logits, want.logits))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(text)).logits.shape == (*text.shape, VOCAB)


class Quantised(torch.Tensor):
    """A weight that a linear layer alone can read, as torchao's."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.weight = weight

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].weight, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].weight)
        raise NotImplementedError(func)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["hidden", "kv"])
def test_quantised_weights(kind, compiled):
    model, text = small_model().eval(), tokens(9)
    with torch.no_grad():
        want = in_segments(model, text, [4, 1, 4], model.new_memory(B, kind=kind))
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(Quantised(layer.weight.detach()), requires_grad=False)
        reader = torch.compile(model, backend="eager") if compiled else model
        got = in_segments(reader, text, [4, 1, 4], model.new_memory(B, kind=kind))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_batch_and_length(strict):
    """As long as memory at most: a longer segment is cut another way."""

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = small_model(mem_len=20).eval()

        def forward(self, input_ids):
            return self.model(input_ids).logits

    model, sizes = Logits(), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with torch.no_grad():
        graph = torch.export.export(model, (tokens(9),), dynamic_shapes=sizes, strict=strict).module()
        text = tokens(17)[:1]
        torch.testing.assert_close(graph(text), model(text))
        with pytest.raises((AssertionError, RuntimeError)):  # as torch says it
            graph(tokens(21))


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("backend", ["reference", None])
def test_gradients_of_each_text_by_vmap(backend):
    model, text = small_model(backend), tokens(9)
    weights = {n: x.detach() for n, x in model.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None, :-1],), dict(labels=row[None, 1:])).loss

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, text)
    for n, row in enumerate(text):
        want = torch.autograd.grad(model(row[None, :-1], labels=row[None, 1:]).loss, [*model.parameters()])
        for name, gradient in zip(weights, want, strict=True):
            torch.testing.assert_close(got[name][n], gradient)


@pytest.mark.parametrize("fields", [{}, {**ADAPTIVE, "div_val": 2}], ids=["plain", "adaptive"])
def test_half_loss(fields):
    """The paper's: the second half of a segment is scored, with the first as its context."""
    model, text = small_model(**fields), tokens(13)
    input_ids, labels = text[:, :-1], text[:, 1:].clone()
    full = model(input_ids, labels=text[:, 1:]).token_losses[:, 6:].mean()
    labels[:, :6] = -100
    half = model(input_ids, labels=labels).loss
    torch.testing.assert_close(half, full)
    for parameter in model.parameters():
        pair = [torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (half, full)]
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("fields", [{}, {**ADAPTIVE, "div_val": 2}], ids=["plain", "adaptive"])
def test_nothing_to_score(fields):
    model, input_ids = small_model(**fields), tokens(5)
    out = model(input_ids, labels=torch.full_like(input_ids, -100))
    assert out.loss == 0 and not out.token_losses.any()
    out.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("variational", [False, True])
def test_relu_and_dropout_keep_their_result_only(variational):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ReluDropout(0.3, variational)(torch.randn(3, 40, 31, requires_grad=True))
    large = [t for t in kept if t.numel() > 3 * 31]  # the variational mask is one time step
    assert [t.data_ptr() for t in large] == [y.data_ptr()]


@pytest.mark.parametrize("kind", [Dropout, ReluDropout])
def test_dropout_is_for_training(kind):
    drop, x = kind(0.3), torch.rand(3, 40, 31)
    dropped = drop(x)
    lost = dropped == 0
    assert abs(lost.float().mean() - 0.3) < 0.05
    torch.testing.assert_close(dropped[~lost], x[~lost] / 0.7)
    assert torch.equal(drop.eval()(x), x)
    assert torch.equal(drop(-x), -x if kind is Dropout else torch.zeros_like(x))


def test_variational_dropout_drops_the_same_units_at_every_step():
    drop, x = Dropout(0.3, variational=True), torch.randn(50, 7, 200)
    dropped = drop(x) / x
    assert torch.allclose(dropped, dropped[:, :1].expand_as(x)), "one mask for all time steps"
    assert not torch.equal(dropped[0], dropped[1]), "and for each text its own"
    assert abs((dropped == 0).float().mean() - 0.3) < 0.02 and abs(dropped.mean() - 1) < 0.03
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize(
    "dropped, without",
    [
        ("attn.drop", ["attn.o_net.weight"]),
        ("ff.net.1", ["ff.net.3.weight"]),
        ("ff.net.4", ["ff.net.3.weight", "ff.net.3.bias"]),
    ],
)
def test_what_is_dropped_in_the_layers(dropped, without):
    """To drop everything there is to have no such weights."""
    all_dropped, zeros = small_model(), small_model()
    all_dropped.get_submodule(f"blocks.1.{dropped}").p = 1.0
    for name in without:
        torch.nn.init.zeros_(zeros.get_parameter(f"blocks.1.{name}"))
    torch.testing.assert_close(all_dropped(tokens(9)).hidden, zeros(tokens(9)).hidden)
    assert not torch.equal(zeros(tokens(9)).hidden, small_model()(tokens(9)).hidden)


@pytest.mark.parametrize("attn_type", range(4))
def test_what_is_dropped_outside_the_layers(attn_type):
    """Embeddings, with absolute positions if they have them, and the last layer's output."""
    model, seen = small_model(dropout=0.5, attn_type=attn_type), []
    model.drop.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    out = model(tokens(9))
    want = model.word_emb(tokens(9)) * 12**0.5
    if attn_type == 2:
        want = want + position_embedding(9, 12)
    dropped = [pair for pair in seen if pair[0].shape[1]]  # nothing is remembered yet
    assert len(dropped) == 2 and dropped[1][1] is out.hidden
    torch.testing.assert_close(dropped[0][0], want)
    if attn_type == 2:  # what is remembered gets its positions, and its dropout, now
        seen.clear()
        model(tokens(3), out.memory)
        remembered = model.word_emb(tokens(9)[:, 3:]) * 12**0.5
        torch.testing.assert_close(seen[0][0], remembered + position_embedding(9, 12)[:6])


@pytest.mark.parametrize("variational", [False, True])
def test_every_dropout_of_the_model_is_of_that_kind(variational):
    """Two time steps of one text with the same token and no attention see the same units, or do not."""
    model = small_model(dropout=0.5, variational=variational, d_model=64, n_layer=1)
    torch.nn.init.zeros_(model.blocks[0].attn.o_net.weight)
    hidden = model(torch.full((B, 2), 3)).hidden
    assert torch.equal(hidden[:, 0], hidden[:, 1]) == variational
    assert not torch.equal(hidden[0], hidden[1])


class Adapter(torch.nn.Module):
    """Adds to a layer what learns beside it, as peft's do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.change = torch.nn.Parameter(0.3 * torch.randn_like(layer.weight))

    @property
    def weight(self):
        return self.layer.weight

    def forward(self, x):
        return self.layer(x) + torch.nn.functional.linear(x, self.change)


@pytest.mark.parametrize("fields", [{}, {"pre_lnorm": True}, {"attn_type": 1}], ids=str)
def test_adapters_and_hooks(fields):
    """They are asked in training as in reading."""
    model, text = small_model(**fields), tokens(9)
    for block in model.blocks:
        block.attn.qkv_net, block.attn.o_net = Adapter(block.attn.qkv_net), Adapter(block.attn.o_net)
    hidden = in_segments(model, text, [4, 4, 1])
    hidden.sum().backward()
    assert all((p.grad != 0).any() for name, p in model.named_parameters() if "change" in name)
    with torch.no_grad():
        torch.testing.assert_close(in_segments(model.eval(), text, [4, 4, 1]), hidden)

    model, called = small_model(**fields), []
    plain = in_segments(model, text, [4, 5])
    model.blocks[0].attn.qkv_net.register_forward_hook(lambda *_: called.append(1))
    torch.testing.assert_close(in_segments(model, text, [4, 5]), plain)
    assert len(called) == 2


def test_layers_share_the_dropout_of_positions():
    model, seen = small_model(dropout=0.5, n_layer=3, d_model=64, mem_len=40), []
    for block in model.blocks:
        block.attn.r_net.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    model(tokens(30))
    assert len(seen) == 3 and all(torch.equal(x, seen[0]) for x in seen)
    zero, want = seen[0] == 0, 2 * position_embedding(30, 64).double()
    assert 0.4 < zero[:, 32:].double().mean() < 0.6  # cosines are hardly ever 0 themselves
    torch.testing.assert_close(seen[0], want.masked_fill(zero, 0.0))
    model.eval()(tokens(30))
    torch.testing.assert_close(seen[-1], want / 2)


@pytest.mark.parametrize(
    "fields", [{"dropout": 0.2}, {"dropatt": 0.2}, {"dropout": 0.2, "variational": True}]
)
@pytest.mark.parametrize("attn_type", range(4))
def test_dropout_depends_on_the_seed_alone_and_only_in_training(attn_type, fields):
    model, input_ids = small_model(None, torch.float32, attn_type=attn_type, **fields), tokens(8)

    def losses(seed):
        torch.manual_seed(seed)
        first = model(input_ids, labels=input_ids)
        return torch.cat([first.token_losses, model(input_ids, first.memory, input_ids).token_losses])

    assert torch.equal(losses(5), losses(5))
    assert not torch.equal(losses(5), losses(6))
    model.eval()
    assert torch.equal(losses(5), losses(6))
    without = small_model(None, torch.float32, attn_type=attn_type)
    assert torch.equal(model(input_ids).logits, without(input_ids).logits)


# -------------------------------------------------------------------------------------- positions, precision


def test_position_embedding():
    """Furthest distance first; sines in the first half, cosines in the second; as exact as float32 can be."""
    E = position_embedding(4001, 6)
    assert E.dtype == torch.float32 and E.shape == (4001, 6)
    for distance in (0, 1, 2, 5, 257, 1023, 4000):
        for t in range(3):
            angle = distance * 10000 ** (-2 * t / 6)
            assert math.isclose(E[4000 - distance, t], math.sin(angle), abs_tol=1e-6 + 1e-7 * angle)
            assert math.isclose(E[4000 - distance, 3 + t], math.cos(angle), abs_tol=1e-6 + 1e-7 * angle)


def test_last_rows():
    table = torch.arange(8.0).view(4, 2)
    assert last_rows(table, 0).shape == (0, 2)
    assert last_rows(table, 3)[:, 0].tolist() == [2, 4, 6]
    assert last_rows(table, 6)[:, 0].tolist() == [0, 0, 0, 2, 4, 6]


def test_far_distances_stay_apart_in_bfloat16():
    """The positions are rounded after the sines are taken: distances 257 and 256 differ."""
    rows = position_embedding(400, 8).bfloat16()
    assert not torch.equal(rows[399 - 257], rows[399 - 256])
    model, seen = small_model(dtype=torch.bfloat16, mem_len=400), []
    model.blocks[0].attn.r_net.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    assert torch.isfinite(in_segments(model, tokens(300), [150, 150])).all()
    assert torch.equal(seen[1], position_embedding(300, 12).bfloat16())


@pytest.mark.parametrize("fields", UNLIMITED + ABSOLUTE + EMBEDDINGS)
def test_autocast(fields):
    """bfloat16 products; the states that layers add to, the losses and the gradients stay in float32."""
    model, text = small_model(None, torch.float32, **fields), tokens(17)
    input_ids, labels = text[:, :-1].split(8, dim=1), text[:, 1:].split(8, dim=1)

    def read():
        memory, outs = None, []
        for segment, targets in zip(input_ids, labels, strict=True):
            outs.append(model(segment, memory, targets))
            memory = outs[-1].memory
        return outs

    for grad in (True, False):
        model.train(grad)
        with torch.set_grad_enabled(grad):
            want = read()
            with torch.autocast("cpu", torch.bfloat16):
                got = read()
                if grad:
                    got[1].loss.backward()
        for a, b in zip(got, want, strict=True):
            assert a.hidden.dtype == a.token_losses.dtype == torch.float32
            assert not torch.equal(a.hidden, b.hidden), "nothing was computed in bfloat16"
            torch.testing.assert_close(a.loss, b.loss, rtol=0.1, atol=0.1)
            assert a.logits.isfinite().all(), "asked for when autocast is over"
    assert all(
        p.grad is None or (p.grad.isfinite().all() and p.grad.dtype == torch.float32)
        for p in model.parameters()
    )


# ---------------------------------------------------------------------------------------------------- compile


@pytest.fixture
def compiler_gives_up_aloud():
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


LEARNED = {"attn_type": 1, "pre_lnorm": True}


@pytest.mark.parametrize(
    "fields, compiler",
    [
        pytest.param({}, "eager", id="sinusoid-eager"),
        pytest.param({}, "inductor", marks=pytest.mark.slow, id="sinusoid-inductor"),
        pytest.param(LEARNED, "inductor", marks=pytest.mark.slow, id="learned-inductor"),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("compiler_gives_up_aloud")
def test_compiled_blocks(fields, compiler):
    """Training, and reading with keys and values, give the same numbers; layers and steps share the code."""
    plain, compiled = (small_model(None, torch.float32, n_layer=5, **fields) for _ in range(2))
    for block in compiled.blocks:
        block.compile(backend=compiler)
    text, results = tokens(40), []
    settled = 2 if Version(torch.__version__) >= Version("2.12") else 4  # 2.10 compiles more
    for model in (plain, compiled):
        memory, losses = None, []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for start in range(0, 30, 6):
            with torch.compiler.set_stance("fail_on_recompile" if start >= 18 else "default"):
                out = model(text[:, start : start + 6], memory, text[:, start + 1 : start + 7])
            memory = out.memory
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            losses.append(out.loss.detach())
        model.eval()
        with torch.no_grad():
            memory = model.new_memory(B, mem_len=9)
            for n, segment in enumerate(text.split(4, dim=1)):
                with torch.compiler.set_stance("fail_on_recompile" if n >= settled else "default"):
                    out = model(segment, memory)
                memory = out.memory
        results.append((torch.stack(losses), out.logits))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_compiled_model_generates_with_the_code_it_has():
    """Token by token, with keys and values: how far these go is no number of the code's."""
    torch.compiler.reset()
    model, graphs = small_model(None, torch.float32, n_layer=2).eval(), []
    compiled, stats = torch.compile(model, backend="eager"), torch._dynamo.utils.counters["stats"]
    for _ in generate(compiled, [[1, 2, 3]], 12, temperature=0):
        graphs.append(stats["unique_graphs"])
    assert graphs[6] == graphs[-1] > 0, graphs
    expected, got = (list(generate(one, [[1, 2, 3]], 12, temperature=0)) for one in (model, compiled))
    assert torch.equal(torch.stack(got), torch.stack(expected))


def segments(backend, dtype: torch.dtype, **options) -> dict[str, torch.Tensor]:
    """Losses of six segments, each with the memory of those before, and the sums of their gradients.

    With options for the compiler, of the compiled model; with a dtype of 16 bits, under autocast."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, n_layer=2, n_head=2, d_model=64, d_head=32, d_inner=128, mem_len=64)
    model = TransformerXL(TransformerXLConfig(**sizes, dropout=0.0), backend.name).to(backend.device)
    forward = torch.compile(model, **options) if options else model
    text = torch.randint(50, (4, 6 * 64 + 1), generator=torch.Generator().manual_seed(1)).to(backend.device)
    memory, results = model.new_memory(4), {}
    for start in range(0, 6 * 64, 64):  # compiled, recorded, replayed
        stop = start + 64
        with torch.autocast(backend.device, dtype, enabled=dtype != torch.float32):
            out = forward(text[:, start:stop], memory, text[:, start + 1 : stop + 1])
        out.loss.backward()
        # Copies: CUDA graphs that are replayed write where their last results are.
        results[f"loss {start}"] = out.loss.detach().clone()
        for name, parameter in model.named_parameters():
            results[name] = results.get(name, 0) + parameter.grad
            parameter.grad = None
        copied = {name: t.clone() for name, t in out.memory.tensors().items()}
        memory = Memory.restore(copied, out.memory.settings())
    return results


MODES = [
    pytest.param(b, mode, id=f"{b.name}-{mode}", marks=b.marks or pytest.mark.slow)
    for b in helpers.available()
    # CUDA graphs. On a CPU it is compiled as by default.
    for mode in (("default", "reduce-overhead") if b.device == "cuda" else ("default",))
]


@pytest.mark.parametrize("backend, mode", MODES)
@pytest.mark.filterwarnings("ignore")  # the compiler's own: that products could be in tf32, for one
@pytest.mark.usefixtures("compiler_gives_up_aloud")
def test_compiled_model(backend, mode, monkeypatch):
    """Without a graph break, where nobody looks at the tokens' values: on a GPU the model does not."""
    expected = segments(backend, torch.float32)
    if backend.device == "cpu":
        monkeypatch.setattr(TransformerXL, "_check", lambda *arguments: None)
    got = segments(backend, torch.float32, mode=mode, fullgraph=True)
    for name, truth in expected.items():
        torch.testing.assert_close(got[name], truth, rtol=1e-3, atol=1e-5, msg=f"{name} differs")


@pytest.mark.parametrize("backend", helpers.each_backend(torch.bfloat16))
def test_autocast_gradients(backend):
    expected, got = segments(backend, torch.float32), segments(backend, torch.bfloat16)
    for name, truth in expected.items():
        # A ReLU whose input rounds to the other side of zero is most of it.
        assert 0 < (got[name] - truth).norm() <= 0.1 * truth.norm(), name


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
    for _ in range(10 if helpers.INTERPRET else 30):  # Triton's interpreter is slow
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
    assert sum(losses[-2:]) < (0.9 if helpers.INTERPRET else 0.5) * sum(losses[:2])
    if backend.device == "cpu":  # another device draws other dropout masks
        # Training multiplies rounding errors. In float64 they stay out of sight, in float32 for a while.
        steps, rtol = (60, 1e-9) if dtype == torch.float64 else (20, 1e-4)
        want = overfit("reference", "cpu", dtype)
        torch.testing.assert_close(losses[:steps], want[:steps], rtol=rtol, atol=0.0)


# -------------------------------------------------------------------------------------------------- bad input


def test_bad_input():
    """That of memory and of the configuration: test_model_memory.py, test_model_config.py."""
    model, x = small_model(), tokens(4)
    labels = x.clone()
    labels[0, 1] = VOCAB
    for call, message in [
        (lambda: model(x[0]), r"input_ids must be \[B, T\]"),
        (lambda: model(x[:, :0]), r"input_ids must be \[B, T\] with T >= 1, got shape \[2, 0\]"),
        (lambda: model(x.int()), "input_ids must be int64, got torch.int32"),
        (lambda: model(x.double()), "input_ids must be int64, got torch.float64"),
        (lambda: model(x.clone().fill_(VOCAB)), "input_ids must be tokens 0 to 10, got 11"),
        (lambda: model(x.clone().fill_(-100)), "input_ids must be tokens 0 to 10, got -100"),
        (lambda: model(x, labels=x[:, 1:]), r"labels must be \[2, 4\]"),
        (lambda: model(x, labels=x.int()), "labels must be int64"),
        (lambda: model(x, labels=labels), "labels must be tokens 0 to 10, got 11"),
        (lambda: model(x, labels=x.clone().fill_(-1)), "labels must be tokens 0 to 10, got -1"),
        (lambda: model(x, ext_len=-1), "ext_len must be between 0 and T = 4, got -1"),
        (lambda: model(x, ext_len=5), "ext_len must be between 0 and T = 4, got 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("config", ["enwik8-base", {"n_layer": 2}, None])
def test_what_is_no_configuration(config):
    with pytest.raises(TypeError, match=r"config must be a TransformerXLConfig, got .*preset\("):
        TransformerXL(config)


@pytest.mark.parametrize("fields", [{}, {"pre_lnorm": True}, {"attn_type": 1}], ids=str)
def test_a_bias_that_the_projection_was_given(fields: dict) -> None:
    """The published one has none. In training and in reading, it counts for queries, keys and values."""
    model, text = small_model(**fields).eval(), tokens(9)
    plain = in_segments(model, text, [4, 4, 1])
    for block in model.blocks:
        block.attn.qkv_net.bias = torch.nn.Parameter(torch.randn(36, dtype=torch.float64))
    hidden = in_segments(model, text, [4, 4, 1])
    assert not torch.allclose(hidden, plain)
    with torch.no_grad():
        torch.testing.assert_close(in_segments(model, text, [4, 4, 1], model.new_memory(B)), hidden)


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_attention_is_asked_of_the_backend_that_was_named(backend: str | None, monkeypatch) -> None:
    asked = []

    def attend(*args, **options):
        asked.append(options.get("backend"))
        return rel_attention(*args, **options)

    monkeypatch.setattr(attention, "rel_attention", attend)
    in_segments(small_model(backend), tokens(8), [5, 3])
    assert asked == [backend] * 4

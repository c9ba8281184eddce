"""Adaptive input and softmax: against one token at a time; rare tokens cost nothing unless they occur."""

from __future__ import annotations

import itertools

import model_helpers
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from txl_model import TransformerXLConfig, adaptive
from txl_model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax

VOCAB, CUTOFFS, N = 57, (10, 19, 36), 50
WIDTHS = [(8, 12), (12, 12), (16, 12)]  # d_embed, d_model
VARIANTS = [
    pytest.param(
        dict(div_val=div_val, d_embed=d_embed, d_model=d_model, tie_weight=tie_weight, tie_projs=tie_projs),
        id=f"div{div_val}-{d_embed}to{d_model}-{'tied' if tie_weight else 'own'}-{n_tied}tied",
    )
    for div_val, (d_embed, d_model), (tie_weight, n_tied, tie_projs) in itertools.product(
        (1, 2),
        WIDTHS,
        [(True, 3, (False, True, True, True)), (False, 0, ()), (True, 2, (True, False, True, False))],
    )
]


class Adaptive(torch.nn.Module):
    """Both, with the parameter names that they have in the model."""

    def __init__(self, dtype=torch.float64, **fields):
        super().__init__()
        torch.manual_seed(1)
        sizes = dict(vocab_size=VOCAB, cutoffs=CUTOFFS, n_layer=1, n_head=1)
        self.config = TransformerXLConfig(**{**sizes, **fields})
        self.word_emb, self.softmax = AdaptiveEmbedding(self.config), AdaptiveSoftmax(self.config)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter)
        self.to(dtype)

    def losses(self, hidden, labels):
        return self.softmax.token_losses(hidden, labels, self.word_emb)

    def log_probabilities(self, hidden):
        return self.softmax.logits(hidden, self.word_emb)


def hidden_and_labels(d_model, first=0, end=VOCAB):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(N, d_model, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randint(first, end, (N,), generator=generator)


@pytest.mark.parametrize("fields", VARIANTS)
def test_embedding_is_that_of_each_token(fields):
    model = Adaptive(**fields)
    tokens = torch.randperm(VOCAB).view(3, -1)
    want = torch.stack([model_helpers.embedding(model, token) for token in tokens.flatten().tolist()])
    torch.testing.assert_close(model.word_emb(tokens), want.view(*tokens.shape, -1))
    for few in (tokens[:, :1], torch.full((3, 2), 56), torch.full((1, 4), 0), tokens[:, :0]):
        assert model.word_emb(few).shape == (*few.shape, fields["d_model"])


@pytest.mark.parametrize("fields", VARIANTS)
def test_losses_are_those_of_the_full_distribution_in_token_order(fields):
    model = Adaptive(**fields)
    hidden, labels = hidden_and_labels(fields["d_model"])
    labels[::7] = -100
    want = model_helpers.logits(model, hidden)
    got = model.log_probabilities(hidden)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(N, dtype=torch.float64))
    losses = model.losses(hidden, labels)
    scored = labels != -100
    full = -want[scored, labels[scored]]
    torch.testing.assert_close(losses[scored], full)
    assert not losses[~scored].any()
    upon = [hidden, *model.softmax.parameters()]
    for (a, b), parameter in zip(
        zip(*(torch.autograd.grad(x.sum(), upon) for x in (losses, full)), strict=True), upon, strict=True
    ):
        torch.testing.assert_close(a, b, msg=f"gradient of {list(parameter.shape)}")


@pytest.mark.parametrize("fields", [dict(d_model=12, div_val=2), dict(d_model=12, cutoffs=())], ids=str)
@pytest.mark.parametrize("n_scored", [0, 1, N // 2, N - 2, N])
def test_rows_that_are_not_scored_have_no_scores(monkeypatch, fields, n_scored):
    """Where they are many, and nobody traces."""
    model = Adaptive(**fields)
    hidden, labels = hidden_and_labels(12)
    labels[torch.randperm(N, generator=torch.Generator().manual_seed(3))[n_scored:]] = -100
    upon, rows, results = [hidden, *model.parameters()], [], []
    scores = adaptive._scores
    for traced in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(adaptive.registry, "is_traced", lambda traced=traced: traced)
            patch.setattr(adaptive, "_scores", lambda h, *layer: (rows.append(len(h)), scores(h, *layer))[1])
            losses = model.losses(hidden, labels)
        grads = torch.autograd.grad(losses.sin().sum(), upon, allow_unused=True)
        results.append([losses, *(torch.zeros(0) if grad is None else grad for grad in grads)])
    n_products = len(rows) // 2
    assert rows[0] == (n_scored if n_scored <= 0.75 * N else N) and rows[n_products] == N
    torch.testing.assert_close(results[0], results[1])
    if n_scored == N:
        assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_rows_that_are_not_scored_under_a_compiler_and_vmap():
    model = Adaptive(d_model=12, cutoffs=())
    hidden, labels = hidden_and_labels(12)
    labels[5:] = -100
    want = model.losses(hidden, labels)
    compiled = torch.compile(model.losses, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(hidden, labels), want)
    by_row = torch.func.vmap(lambda h, label: model.losses(h[None], label[None])[0])
    torch.testing.assert_close(by_row(hidden, labels), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model.losses(mode.from_tensor(hidden), mode.from_tensor(labels)).shape == (N,)


def test_clusters_use_the_columns_after_the_shortlist_in_order():
    model = Adaptive(d_model=12, div_val=2)
    hidden, _ = hidden_and_labels(12)
    for i, tokens in enumerate(model_helpers.clusters(model.config)[1:]):
        with torch.no_grad():
            model.softmax.cluster_bias.copy_(200.0 * torch.nn.functional.one_hot(torch.tensor(i), 3))
        p = model.log_probabilities(hidden).exp()[:, tokens.start : tokens.stop].sum(-1)
        torch.testing.assert_close(p, torch.ones_like(p))


@pytest.mark.parametrize("fields", VARIANTS[::4] + VARIANTS[1::4])
@pytest.mark.parametrize("cluster", range(4))
def test_labels_of_one_cluster(cluster, fields):
    """The others are empty: no NaN, and no gradient for their tables."""
    model = Adaptive(**fields)
    tokens = model_helpers.clusters(model.config)
    hidden, labels = hidden_and_labels(fields["d_model"], tokens[cluster].start, tokens[cluster].stop)
    model.losses(hidden, labels).sum().backward()
    p, config = dict(model.named_parameters()), model.config
    owner = "word_emb" if config.tie_weight else "softmax"
    for i, rows in enumerate(tokens):
        names = (f"{owner}.tables", "softmax.biases")
        if config.div_val == 1:
            grads = [p[f"{name}.0"].grad[rows.start : rows.stop] for name in names]
        else:
            grads = [p[f"{name}.{i}"].grad for name in names]
        for grad in grads:
            assert grad is None or bool(grad.any()) == (i in (0, cluster))
    assert all(x.grad is None or x.grad.isfinite().all() for x in [hidden, *p.values()])


def test_nothing_to_score():
    model = Adaptive(d_model=12, div_val=2)
    hidden, _ = hidden_and_labels(12)
    losses = model.losses(hidden, torch.full((N,), -100))
    assert losses.shape == (N,) and not losses.any()
    losses.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in [hidden, *model.parameters()])
    assert model.losses(hidden[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)


class Products(TorchDispatchMode):
    """The shapes [rows, columns] of all matrix products, and the sizes of all tensors made."""

    def __init__(self):
        super().__init__()
        self.shapes, self.sizes = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                self.shapes.append(tuple(out.shape))
            if not func.is_view:
                self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("fields", VARIANTS)
def test_rare_tokens_meet_only_the_states_that_have_them_as_labels(fields):
    model = Adaptive(**fields)
    hidden, labels = hidden_and_labels(fields["d_model"])
    config, want = model.config, []
    for i, tokens in enumerate(model_helpers.clusters(config)):
        rows = N if i == 0 else ((labels >= tokens.start) & (labels < tokens.stop)).sum().item()
        if config.div_val > 1 or config.d_embed != config.d_model:
            want.append((rows, config.d_embed // config.div_val**i))
        want.append((rows, len(tokens) + (3 if i == 0 else 0)))
    with Products() as products:
        losses = model.losses(hidden, labels)
    assert products.shapes == want
    tallest = N * max(13, config.d_model, config.d_embed)
    assert max(products.sizes) <= tallest < N * VOCAB
    with Products() as products:
        losses.sum().backward()
    assert max(products.sizes) < N * VOCAB
    if config.div_val == 1:
        assert products.sizes.count(VOCAB * config.d_embed) == 1, (
            "one gradient of the table, not one a cluster"
        )


def test_sixteen_bits_lose_no_sums():
    """Losses and log-probabilities are taken in float32 of the 16-bit scores."""
    exact, model = Adaptive(d_model=12, div_val=2), Adaptive(torch.bfloat16, d_model=12, div_val=2)
    hidden, labels = hidden_and_labels(12)
    hidden = hidden.detach() / 4
    losses = model.losses(hidden.bfloat16(), labels)
    assert losses.dtype == model.log_probabilities(hidden.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(losses.double(), exact.losses(hidden, labels), rtol=0.05, atol=0.1)
    p = model.log_probabilities(hidden.bfloat16()).exp().sum(-1)
    torch.testing.assert_close(p, torch.ones(N), rtol=1e-5, atol=1e-5)


def test_without_cutoffs_it_is_the_plain_thing():
    model = Adaptive(cutoffs=(), d_model=12)
    hidden, labels = hidden_and_labels(12)
    logits = hidden @ model.word_emb.tables[0].T + model.softmax.biases[0]
    torch.testing.assert_close(model.log_probabilities(hidden), logits)
    want = -logits.log_softmax(-1)[torch.arange(N), labels]
    torch.testing.assert_close(model.losses(hidden, labels), want)
    assert [n for n, _ in model.named_parameters()] == ["word_emb.tables.0", "softmax.biases.0"]

"""docs/usage.md: its code runs, and its layers compute the attention that they say, pair by pair."""

import re

import helpers
import pytest
import torch

from txl_kernels import rel_attention


@pytest.fixture(scope="module")
def document():
    """The names that the document's examples define."""
    names: dict = {}
    examples = re.findall(
        r"^```python\n(.*?)^```$", (helpers.ROOT / "docs/usage.md").read_text(), re.M | re.S
    )
    assert len(examples) == 6
    for example in examples:
        exec(compile(example, "docs/usage.md", "exec"), names)
    return names


def by_pairs(document, layer, queries, keys, first, sees):
    """The layer's attention of queries, the first of them at position `first` of the keys."""
    D = keys.shape[-1] // layer.n_head
    q = layer.heads(layer.qkv(queries).chunk(3, -1)[0])
    _, k, v = map(layer.heads, layer.qkv(keys).chunk(3, -1))
    scores = torch.full((len(keys), layer.n_head, queries.shape[1], keys.shape[1]), -torch.inf)
    for i in range(queries.shape[1]):
        for j in range(keys.shape[1]):
            distance = first + i - j
            r = layer.heads(layer.pos(document["sinusoids"](distance, distance, keys)))[:, 0]
            content = ((q[:, :, i] + layer.bias_u) * k[:, :, j]).sum(-1)
            position = ((q[:, :, i] + layer.bias_v) * r).sum(-1)
            for b in range(len(keys)):
                if sees(b, distance, j):
                    scores[b, :, i, j] = (content[b] + position[b]) / D**0.5
    return layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def layer_of(document, name):
    torch.manual_seed(0)
    layer = document[name](d_model=24, n_head=2)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


@torch.no_grad()
def test_causal_with_memory(document):
    layer = layer_of(document, "RelativeAttention")
    memory, segment = torch.randn(2, 5, 24), torch.randn(2, 4, 24)
    keys = torch.cat([memory, segment], 1)
    expected = by_pairs(document, layer, segment, keys, 5, lambda b, distance, j: distance >= 0)
    torch.testing.assert_close(layer(segment, memory), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_conformer_with_padding(document):
    layer, h, lengths = layer_of(document, "ConformerAttention"), torch.randn(2, 7, 24), torch.tensor([7, 4])
    expected = by_pairs(document, layer, h, h, 0, lambda b, distance, j: j < lengths[b])
    torch.testing.assert_close(layer(h, lengths), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_in_other_dtypes(document, dtype):
    layer = layer_of(document, "ConformerAttention").to(dtype)
    assert layer(torch.randn(2, 7, 24, dtype=dtype), torch.tensor([7, 4])).dtype is dtype


def test_a_conformer_drops_probabilities_in_training(document):
    layer, h, lengths = layer_of(document, "ConformerAttention"), torch.randn(2, 7, 24), torch.tensor([7, 4])
    layer.dropatt = 0.5
    assert not torch.equal(layer(h, lengths), layer(h, lengths))
    layer.eval()
    assert torch.equal(layer(h, lengths), layer(h, lengths))


def tensors(B, L, K, N):
    torch.manual_seed(0)
    shapes = (B, 2, L, 8), (B, 2, K, 8), (B, 2, K, 8), (2, N, 8), (2, 8), (2, 8)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def test_resets(document):
    """No step sees anything of an episode that is not its own."""
    q, k, v, r, u, w = tensors(3, 6, 10, 10)
    begins = torch.tensor([[0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    remembered = torch.tensor([3, 0, 4])
    out = document["attention_with_resets"](q, k, v, r, u, w, begins, remembered)
    for b in range(3):
        for i in range(6):
            first = 4 - int(remembered[b])
            for step in range(i + 1):
                first = 4 + step if begins[b, step] else first
            own_q, own_k, own_v = q[b : b + 1, :, i : i + 1], k[b : b + 1], v[b : b + 1]
            own_k, own_v = (x[:, :, first : 4 + i + 1] for x in (own_k, own_v))
            alone = rel_attention(own_q, own_k, own_v, r, u, w)
            torch.testing.assert_close(out[b, :, i], alone[0, :, 0])


def test_embeddings_of_shaw():
    """Clipped at 2 on both sides."""
    q, k, v, *_ = tensors(2, 7, 7, 1)
    rows = torch.randn(5, 8, dtype=torch.float64)  # of distances 2, 1, 0, -1, -2
    out = rel_attention(q, k, v, rows.expand(2, 5, 8), causal=False, r_zero=2)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rows[2 - distance.clamp(-2, 2)])
    torch.testing.assert_close(out, (scores / 8**0.5).softmax(-1) @ v)


def test_embeddings_of_music_transformer():
    q, k, v, r, *_ = tensors(2, 7, 7, 7)
    distance = torch.arange(7)[:, None] - torch.arange(7)
    scores = q @ k.mT + torch.einsum("bhid,hijd->bhij", q, r[:, (6 - distance).clamp(0, 6)])
    expected = (scores / 8**0.5).masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(rel_attention(q, k, v, r), expected)


def test_a_bias_for_each_distance():
    q, k, v, *_ = tensors(2, 7, 7, 1)
    bias = torch.randn(2, 13, dtype=torch.float64)  # of distances 6, ..., -6

    def channel(x, value):
        return torch.cat([x, torch.full_like(x[..., :1], value)], -1)

    nothing = torch.zeros(2, 13, 8, dtype=torch.float64)
    out = rel_attention(
        *(channel(x, 0.0) for x in (q, k, v)),
        torch.cat([nothing, bias[..., None] * 8**0.5], -1),
        None,
        channel(nothing[:, 0], 1.0),
        causal=False,
        scale=8**-0.5,
    )
    distance = torch.arange(7)[:, None] - torch.arange(7)
    scores = q @ k.mT / 8**0.5 + bias[:, 6 - distance]
    torch.testing.assert_close(out[..., :8], scores.softmax(-1) @ v)

"""docs/usage.md: its code runs, and its layers compute the attention that they say, pair by pair."""

import re

import helpers
import pytest
import torch


@pytest.fixture(scope="module")
def document():
    """The names that the document's examples define."""
    names: dict = {}
    examples = re.findall(
        r"^```python\n(.*?)^```$", (helpers.ROOT / "docs/usage.md").read_text(), re.M | re.S
    )
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, "docs/usage.md", "exec"), names)
    return names


def by_pairs(document, layer, queries, keys, first, sees):
    """The layer's attention of queries, the first of them at position `first` of the keys."""
    d_model, D = keys.shape[-1], keys.shape[-1] // layer.n_head
    q = layer.heads(layer.qkv(queries).chunk(3, -1)[0])
    _, k, v = map(layer.heads, layer.qkv(keys).chunk(3, -1))
    scores = torch.full((len(keys), layer.n_head, queries.shape[1], keys.shape[1]), -torch.inf)
    for i in range(queries.shape[1]):
        for j in range(keys.shape[1]):
            distance = first + i - j
            r = layer.heads(layer.pos(document["sinusoids"](distance, distance, d_model)))[:, 0]
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

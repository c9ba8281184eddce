"""`use_rel_attention`: layers of ESPnet, NeMo and SpeechBrain give the same numbers by our attention as by
their own.

In an environment of its own, or that of test_huggingface.py:

    pip install . pytest numpy && pip install --no-deps -r tests/parity/requirements-speech.txt
    pytest tests/parity/test_speech.py
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from txl_kernels.integrations import use_rel_attention

B, T, C, H = 3, 23, 32, 4
LENGTHS = torch.tensor([23, 9, 16])
EXIST = torch.arange(T) < LENGTHS[:, None]  # padding behind


def load(name: str) -> types.ModuleType:
    """A library's module by itself: what its packages import, all of the library, is not there."""
    library, *inner = name.split(".")
    if library not in sys.modules:
        spec = importlib.util.find_spec(library)
        if spec is None:
            pytest.skip(f"needs {library}")
        (folder,) = spec.submodule_search_locations
        bare_package(library, folder)
    for i in range(1, len(inner)):
        bare_package(".".join([library, *inner[:i]]), Path(sys.modules[library].__path__[0], *inner[:i]))
    return importlib.import_module(name)


def bare_package(name: str, folder: str | Path) -> None:
    if name not in sys.modules:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations.append(str(folder))
        sys.modules[name] = importlib.util.module_from_spec(spec)


def espnet():
    return load("espnet.nets.pytorch_backend.transformer.attention")


def nemo():
    context = load("nemo.utils.cast_utils").avoid_float16_autocast_context
    sys.modules["nemo.utils"].avoid_float16_autocast_context = context
    return load("nemo.collections.asr.parts.submodules.multi_head_attention")


def speechbrain():
    # What attention.py imports beside torch and numpy, with the libraries that these need.
    for name, attribute in (("dataio.dataio", "length_to_mask"), ("utils.logger", "get_logger")):
        module = types.ModuleType(f"speechbrain.{name}")
        setattr(module, attribute, lambda *_: None)
        sys.modules.setdefault(module.__name__, module)
    return load("speechbrain.nnet.attention")


def frames(rows=T, seed=1):
    return torch.randn(B, rows, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positions(keys=T):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, 2 * keys - 1, C, generator=generator, dtype=torch.float64)


# Each builds a layer and a function that calls it, with padding or without.


def espnet_layer():
    def call(layer, padding):
        x = frames()
        return layer(x, x, x, positions(), EXIST[:, None] if padding else None)

    return espnet().RelPositionMultiHeadedAttention(H, C, 0.0), call


def espnet_layer_with_new_frames():
    """Its encoders in streaming: the last frames ask, all are keys."""

    def call(layer, padding):
        x = frames()
        return layer(x[:, -5:], x, x, positions(), EXIST[:, None] if padding else None)

    return espnet().RelPositionMultiHeadedAttention(H, C, 0.0), call


def nemo_layer(**options):
    hidden = ~(EXIST[:, :, None] & EXIST[:, None])  # as its encoder makes it

    def call(layer, padding):
        x = frames()
        return layer(x, x, x, hidden if padding else None, positions())

    return nemo().RelPositionMultiHeadAttention(H, C, 0.0, None, None, **options), call


def nemo_layer_by_sdpa():
    return nemo_layer(use_pytorch_sdpa=True)


def nemo_layer_with_cache():
    """The cache is filled from its end: sequences have 7, 2 and 0 frames in it."""
    rows, exist = 7 + T, torch.arange(7 + T) >= torch.tensor([0, 5, 7])[:, None]

    def call(layer, padding):
        x = frames()
        layer.cache_drop_size = T - 4  # 4 frames go into the cache
        hidden = ~exist[:, None].expand(B, T, rows)
        out, cache = layer(x, x, x, hidden if padding else None, positions(rows), frames(7, seed=3))
        assert cache.shape == (B, 7, C)
        return torch.cat([out, cache], 1)

    return nemo().RelPositionMultiHeadAttention(H, C, 0.0, None, None), call


def speechbrain_layer(**options):
    """Its softmax is float32's, and so is the rest."""

    def call(layer, padding):
        x = frames().float()
        out, _ = layer(x, x, x, positions().float(), key_padding_mask=~EXIST if padding else None)
        return out

    return speechbrain().RelPosMHAXL(C, H, **options), call


def speechbrain_layer_with_vbias():
    return speechbrain_layer(vbias=True)


LAYERS = [
    espnet_layer,
    espnet_layer_with_new_frames,
    nemo_layer,
    nemo_layer_by_sdpa,
    nemo_layer_with_cache,
    speechbrain_layer,
    speechbrain_layer_with_vbias,
]


def prepared(build):
    """The layer, its weights large enough for scores to matter, and how to call it."""
    torch.manual_seed(0)
    layer, call = build()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
    return (layer if build.__name__.startswith("speechbrain") else layer.double()).eval(), call


def run(layer, call, padding):
    """Outputs but those of padding, and the gradients of all weights."""
    layer.zero_grad()
    out = call(layer, padding)
    if padding and out.shape[1] == T:
        out = out[EXIST]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (out * weight).sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in layer.named_parameters()}


def assert_same(layer, call, padding):
    ours = copy.deepcopy(layer)
    expected, expected_grads = run(layer, call, padding)
    assert use_rel_attention(ours) == 1
    ours.rel_shift = None  # theirs
    out, grads = run(ours, call, padding)
    tolerance = 1e-5 if expected.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padding"])
@pytest.mark.parametrize("build", LAYERS, ids=lambda build: build.__name__)
def test_same_numbers_as_their_own(build, padding):
    assert_same(*prepared(build), padding)


@pytest.mark.parametrize("build", [espnet_layer, nemo_layer, speechbrain_layer], ids=lambda b: b.__name__)
def test_dropout_while_training(build):
    layer, call = prepared(build)
    use_rel_attention(layer)
    whole = call(layer, True)
    for name in ("dropout", "dropout_att"):
        if isinstance(getattr(layer, name, None), nn.Dropout):
            getattr(layer, name).p = 0.5
    assert torch.equal(call(layer, True), whole)
    layer.train()
    outs = torch.stack([call(layer, True)[EXIST] for _ in range(600)]).detach()
    spread = outs.std(0)
    assert (spread > 0).float().mean() > 0.9
    assert ((outs.mean(0) - whole[EXIST]).abs() < 6 * spread / 600**0.5).float().mean() > 0.99


@pytest.mark.parametrize("build", [espnet_layer, nemo_layer, speechbrain_layer], ids=lambda b: b.__name__)
def test_dropout_goes_by_its_own_mode(build):
    """Not the layer's: Monte Carlo dropout is on in a model that is evaluated."""
    layer, call = prepared(build)
    name = "dropout_att" if hasattr(layer, "dropout_att") else "dropout"
    setattr(layer, name, nn.Dropout(0.5))  # in training
    assert not torch.equal(call(layer, False), call(layer, False))  # theirs
    use_rel_attention(layer)
    assert not torch.equal(call(layer, False), call(layer, False))
    layer.train()
    getattr(layer, name).eval()
    assert torch.equal(call(layer, False), call(layer, False))


def test_dropout_of_sdpa_goes_by_the_layers_mode():
    layer, call = prepared(nemo_layer_by_sdpa)
    layer.dropout_rate = 0.5
    layer.dropout.train()
    assert torch.equal(call(layer, False), call(layer, False))  # theirs
    use_rel_attention(layer)
    assert torch.equal(call(layer, False), call(layer, False))
    layer.train()
    assert not torch.equal(call(layer, False), call(layer, False))


def test_espnet_of_another_package(monkeypatch):
    """Where it is from release 202609 on."""
    layer, call = prepared(espnet_layer)
    expected = call(layer, True)
    monkeypatch.setattr(
        type(layer), "__module__", "espnet2.legacy.nets.pytorch_backend.transformer.attention"
    )
    assert use_rel_attention(layer) == 1
    torch.testing.assert_close(call(layer, True)[EXIST], expected[EXIST])


def context(style, left, right):
    """The mask over all pairs of NeMo's encoder with that att_context_style and att_context_size."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    if style == "regular":
        return (i - j <= left if left >= 0 else j >= 0) & (j - i <= right if right >= 0 else j >= 0)
    behind = i // (right + 1) - j // (right + 1)
    return (behind >= 0) & (behind <= left // (right + 1) if left >= 0 else behind >= 0)


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padding"])
@pytest.mark.parametrize(
    "style, left, right",
    [
        ("regular", 6, 2),
        ("regular", -1, 0),
        ("regular", 3, -1),
        ("chunked_limited", 8, 3),
        ("chunked_limited", 0, 4),
        ("chunked_limited", 5, 0),
        ("chunked_limited", -1, 3),
        ("chunked_limited", 40, 3),
    ],
)
def test_limited_context_and_chunks(style, left, right, padding):
    pairs = EXIST[:, :, None] & EXIST[:, None] if padding else torch.ones(B, T, T, dtype=torch.bool)
    visible = pairs & context(style, left, right)

    def nemos(layer, padding):
        x = frames()
        return layer(x, x, x, ~visible, positions())

    def espnets(layer, padding):
        x = frames()
        return layer(x, x, x, positions(), visible)

    assert_same(prepared(nemo_layer)[0], nemos, padding)
    assert_same(prepared(espnet_layer)[0], espnets, padding)


def test_other_masks_are_refused():
    x, ones = frames(), torch.ones(B, T, T, dtype=torch.bool)
    hole = ones.clone()
    hole[:, :, 5] = False
    one_pair_less = ones & context("chunked_limited", 8, 3)
    one_pair_less[1, 9, 4] = False
    some = torch.rand(B, T, T, generator=torch.Generator().manual_seed(0)) > 0.5
    two_windows = ones & context("regular", 6, 2)
    two_windows[1] = context("regular", 5, 2)
    layer, _ = prepared(nemo_layer)
    use_rel_attention(layer)
    for mask in (hole, one_pair_less, some, two_windows):
        with pytest.raises(ValueError, match=r"attention_mask: .* padding"):
            layer(x, x, x, ~mask, positions())
    layer.cache_drop_size = 0
    with pytest.raises(ValueError, match=r"attention_mask: .* padding"):  # two chunks of new frames at once
        hidden = torch.ones(B, T, 2 * T, dtype=torch.bool).triu(T + 4)
        layer(x, x, x, hidden, positions(2 * T), frames(seed=3))


def test_options_that_are_refused():
    x, x32 = frames(), frames().float()
    layer = espnet().RelPositionMultiHeadedAttention(H, C, 0.0, zero_triu=True).double()
    use_rel_attention(layer)
    with pytest.raises(ValueError, match="zero_triu: got True"):
        layer(x, x, x, positions(), None)
    with pytest.raises(ValueError, match="no layer that is served"):
        use_rel_attention(espnet().LegacyRelPositionMultiHeadedAttention(H, C, 0.0))

    layer, _ = prepared(nemo_layer)
    use_rel_attention(layer)
    for where in (positions().expand(B, -1, -1), positions(T + 1), positions(T - 1), positions()[0], None):
        with pytest.raises(ValueError, match=r"positions' embeddings: got .*, needs \[1, 45, channels\]"):
            layer(x, x, x, None, where)
    local = nemo().RelPositionMultiHeadAttentionLongformer(H, C, 0.0, None, None, att_context_size=[4, 4])
    with pytest.raises(ValueError, match="no layer that is served"):
        use_rel_attention(local)

    layer, _ = prepared(speechbrain_layer)
    use_rel_attention(layer)
    with pytest.raises(ValueError, match="attn_mask: "):
        layer(x32, x32, x32, positions().float(), attn_mask=torch.zeros(T, T))
    with pytest.raises(ValueError, match=r"key, value: .* self-attention"):
        layer(x32, x32 + 1, x32 + 1, positions().float())
    with pytest.raises(ValueError, match=r"positions' embeddings: got \[1, 47, 32\]"):
        layer(x32, x32, x32, positions(T + 1).float())
    out = layer(x32, x32.clone(), x32.clone(), positions().float(), return_attn_weights=False)
    assert torch.equal(out, layer(x32, x32, x32, positions().float())[0])
    layer, _ = prepared(lambda: speechbrain_layer(mask_pos_future=True))
    use_rel_attention(layer)
    with pytest.raises(ValueError, match="mask_pos_future: got True"):
        layer(x32, x32, x32, positions().float())


@pytest.mark.parametrize(
    "build, given",
    [
        (espnet_layer, lambda: (positions(), EXIST[:, None])),
        (nemo_layer, lambda: (~EXIST[:, None].expand(B, T, T), positions())),
    ],
    ids=["espnet", "nemo"],
)
def test_compiled_as_one_graph(build, given):
    layer, call = prepared(build)
    expected = call(layer, True)[EXIST]
    use_rel_attention(layer)
    x = frames()
    out = torch.compile(layer, fullgraph=True)(x, x, x, *given())[EXIST]
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_masks_of_other_sizes_are_refused():
    """Some of which their own code would spread over all keys."""
    x = frames()
    layer, _ = prepared(espnet_layer)
    use_rel_attention(layer)
    for shape in ((B, 1, 1), (B, T, 1), (B, 1, T - 1), (2, 1, T)):
        with pytest.raises(ValueError, match=r"attention_mask: got .* needs a column for each key"):
            layer(x, x, x, positions(), torch.ones(shape))
    for shape in ((B, T), (B, 1, 1, T)):
        with pytest.raises(ValueError, match=r"attention_mask: got .* needs \[batch, queries or 1, keys\]"):
            layer(x, x, x, positions(), torch.ones(shape))
    layer, _ = prepared(speechbrain_layer)
    use_rel_attention(layer)
    x = x.float()
    with pytest.raises(ValueError, match=r"attention_mask: got .* needs a column for each key"):
        layer(x, x, x, positions().float(), key_padding_mask=torch.zeros(B, T - 1, dtype=torch.bool))


def test_masks_of_bytes():
    layer, call = prepared(nemo_layer)
    use_rel_attention(layer)
    x, hidden = frames(), ~EXIST[:, None].expand(B, T, T)
    torch.testing.assert_close(layer(x, x, x, hidden.byte(), positions())[EXIST], call(layer, True)[EXIST])


def test_one_mask_for_layers_that_read_it_in_their_own_ways():
    espnets, nemos = prepared(espnet_layer)[0], prepared(nemo_layer)[0]
    x, mask = frames(), torch.ones(B, T, T, dtype=torch.bool)
    mask[..., -3:] = False  # hidden to ESPnet, all that is visible to NeMo
    use_rel_attention(nemos)
    expected = nemos(x, x, x, mask, positions())
    use_rel_attention(nn.ModuleList([espnets, nemos]))
    espnets(x, x, x, positions(), mask)
    assert torch.equal(nemos(x, x, x, mask, positions()), expected)


def test_float16_of_autocast_is_what_their_own_makes_of_it(monkeypatch):
    layer, _ = prepared(nemo_layer)
    use_rel_attention(layer)
    seen = []
    module = sys.modules[type(layer).__module__]
    monkeypatch.setattr(
        module, "avoid_float16_autocast_context", lambda: torch.autocast("cpu", torch.bfloat16)
    )
    layer.linear_out.register_forward_hook(lambda *given: seen.append(given[2].dtype))
    x = frames().float()
    layer.float()(x, x, x, None, positions().float())
    assert seen == [torch.bfloat16]


def test_attention_that_espnet_kept_is_forgotten():
    layer, call = prepared(espnet_layer)
    call(layer, False)
    assert layer.attn is not None
    use_rel_attention(layer)
    assert layer.attn is None

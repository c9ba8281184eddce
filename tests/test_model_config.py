"""Configurations: the published ones, their sizes and initial values, names of parameters, bad input."""

from __future__ import annotations

import json

import numpy
import pytest
import torch
from model_helpers import small_model

from txl_model import TransformerXL, TransformerXLConfig
from txl_model.presets import PRESETS, preset

WT103, LM1B = (267735, (20000, 40000, 200000)), (793471, (60000, 100000, 640000))
# n_layer, d_model, n_head, d_head, d_inner, dropout, dropatt, warmup_step, max_step, tgt_len and mem_len,
# batch_size, div_val, (vocab_size, cutoffs), (tgt_len, mem_len, clamp_len) of evaluation
PUBLISHED = {
    "wt103-base": (16, 410, 10, 41, 2100, 0.1, 0, 0, 200_000, 150, 60, 1, WT103, (64, 640, 400)),
    "wt103-large": (
        18,
        1024,
        16,
        64,
        4096,
        0.2,
        0.2,
        16_000,
        4_000_000,
        384,
        128,
        4,
        WT103,
        (128, 1600, 1000),
    ),
    "enwik8-base": (12, 512, 8, 64, 2048, 0.1, 0, 0, 400_000, 512, 22, 1, (204, ()), (80, 2100, 820)),
    "enwik8-large": (
        24,
        1024,
        8,
        128,
        3072,
        0.15,
        0.15,
        4_000,
        400_000,
        768,
        64,
        1,
        (204, ()),
        (128, 3800, 1000),
    ),
    "text8-base": (12, 512, 8, 64, 2048, 0.1, 0, 0, 400_000, 512, 22, 1, (27, ()), (80, 2100, 820)),
    "text8-large": (24, 1024, 8, 128, 3072, 0.15, 0.15, 0, 400_000, 768, 64, 1, (27, ()), (128, 3800, 1000)),
    "lm1b-base": (18, 1024, 8, 128, 4096, 0, 0, 20_000, 500_000, 32, 224, 4, LM1B, (32, 128, None)),
    "lm1b-large": (24, 1280, 16, 80, 8192, 0.05, 0.05, 30_000, 1_200_000, 32, 512, 4, LM1B, (32, 128, None)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    c, train, read = TransformerXLConfig.preset(name), preset(name, "train"), preset(name, "eval")
    warmup_step = train.get("warmup_step", 0)
    assert PUBLISHED[name] == (
        *(c.n_layer, c.d_model, c.n_head, c.d_head, c.d_inner, c.dropout, c.dropatt, warmup_step),
        *(train["max_step"], c.tgt_len, train["batch_size"], c.div_val, (c.vocab_size, c.cutoffs)),
        (read["tgt_len"], read["mem_len"], read.get("clamp_len")),
    )
    assert (c.mem_len, c.d_embed) == (c.tgt_len, c.d_model) and read["same_length"]
    assert (c.attn_type, c.clamp_len, c.same_length, c.pre_lnorm, c.untie_r, c.tie_weight) == (
        *(0, -1, False, False, False, True),
    )
    assert (c.init_std, c.proj_init_std, c.same_length_extra, c.zero_memory) == (0.02, 0.01, 0, False)
    wt103 = name.startswith("wt103")
    assert c.tie_projs == ((False, True, True, True) if wt103 else (False,) * (len(c.cutoffs) + 1))


NVIDIA = dict(d_model=512, n_head=8, d_head=64, d_inner=2048, tgt_len=192, mem_len=192)
NVIDIA["cutoffs"] = (19997, 39997, 199997)


@pytest.mark.parametrize(
    "name, overrides, n_parameters",
    [
        ("wt103-base", {}, 151_107_538),
        ("wt103-large", {}, 285_170_506),
        ("enwik8-base", {}, 41_055_436),
        ("enwik8-large", {}, 277_231_820),
        ("text8-large", {}, 277_050_395),
        ("wt103-base", NVIDIA, 191_950_298),
        (
            "wt103-base",
            {"attn_type": 1},
            151_107_538 - 16 * 410 * 410 + 16 * 410 - 820 + 300 * 16 * (410 + 10),
        ),
    ],
    ids=["wt103-base", "wt103-large", "enwik8-base", "enwik8-large", "text8-large", "nvidia-base", "learned"],
)
def test_published_numbers_of_parameters(name, overrides, n_parameters):
    with torch.device("meta"):
        model = TransformerXL(TransformerXLConfig.preset(name, **overrides))
    assert sum(p.numel() for p in model.parameters()) == n_parameters


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in PUBLISHED])
def test_small_presets_run(name):
    config = TransformerXLConfig.preset(name)
    x = torch.randint(config.vocab_size, (1, 9))
    assert TransformerXL(config)(x, labels=x).loss.isfinite()


ADAPTIVE = dict(vocab_size=3000, cutoffs=(1000, 2000), d_embed=64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attn_type": 1},
        {"attn_type": 3, "tie_weight": False, "init_std": 0.05},
        {**ADAPTIVE, "tie_weight": False},
        {**ADAPTIVE, "div_val": 2, "tie_projs": (False, True, True), "untie_r": True, "proj_init_std": 0.3},
    ],
    ids=["plain", "learned", "absolute", "adaptive", "adaptive-div"],
)
def test_initial_values(fields):
    """All weights N(0, init_std), but biases 0, LayerNorm N(1, init_std), projections N(0, proj_init_std)."""
    sizes = dict(
        vocab_size=500, n_layer=2, n_head=4, d_model=128, d_head=32, d_inner=256, tgt_len=50, mem_len=50
    )
    config = TransformerXLConfig(**{**sizes, **fields})
    for name, p in TransformerXL(config).named_parameters():
        assert p.dtype == torch.float32
        mean, std = 0.0, config.init_std
        if "projs" in name:
            std = config.proj_init_std
        elif name.endswith("layer_norm.weight"):
            mean = 1.0
        elif name == "r_bias" or "biases" in name or name.endswith((".bias", "cluster_bias")):
            std = 0.0
        n = p.numel()
        assert abs(p.mean().item() - mean) <= 5 * std / n**0.5, name
        assert abs(p.std().item() - std) <= 5 * std / (2 * n) ** 0.5, name


BLOCK = [
    *(f"attn.{name}.weight" for name in ("qkv_net", "o_net", "r_net", "layer_norm")),
    *("attn.layer_norm.bias", "ff.layer_norm.weight", "ff.layer_norm.bias"),
    *(f"ff.net.{i}.{name}" for i in (0, 3) for name in ("weight", "bias")),
]


@pytest.mark.parametrize(
    "fields, outside",
    [
        (
            dict(tie_weight=False),
            {
                **{"word_emb.tables.0": [11, 12], "softmax.tables.0": [11, 12], "softmax.biases.0": [11]},
                **{"bias_u": [1, 2, 6], "bias_v": [1, 2, 6]},
            },
        ),
        (
            dict(attn_type=1, d_embed=8, tie_projs=(True,)),
            {
                **{"word_emb.tables.0": [11, 8], "word_emb.projs.0": [12, 8], "softmax.biases.0": [11]},
                **{"bias_u": [2, 2, 6], "r_emb": [2, 10, 2, 6], "r_bias": [2, 10, 2]},
            },
        ),
        (
            dict(attn_type=3, d_embed=8, cutoffs=(4, 8), tie_projs=(False, True, False)),
            {
                **{"word_emb.tables.0": [11, 8], "word_emb.projs.0": [12, 8], "softmax.biases.0": [11]},
                **{"softmax.projs.0": [12, 8], "softmax.projs.2": [12, 8]},
                **{"softmax.cluster_weight": [2, 8], "softmax.cluster_bias": [2], "r_emb": [2, 10, 2, 6]},
            },
        ),
        (
            dict(untie_r=True, cutoffs=(4, 8), div_val=2, tie_projs=(True, True, False)),
            {
                **{"word_emb.tables.0": [4, 12], "word_emb.tables.1": [4, 6], "word_emb.tables.2": [3, 3]},
                **{"word_emb.projs.0": [12, 12], "word_emb.projs.1": [12, 6], "word_emb.projs.2": [12, 3]},
                **{"softmax.biases.0": [4], "softmax.biases.1": [4], "softmax.biases.2": [3]},
                **{
                    "softmax.projs.2": [12, 3],
                    "softmax.cluster_weight": [2, 12],
                    "softmax.cluster_bias": [2],
                },
                **{"bias_u": [2, 2, 6], "bias_v": [2, 2, 6]},
            },
        ),
    ],
    ids=["plain", "learned", "absolute-adaptive", "adaptive-div"],
)
def test_names_and_shapes_of_parameters(fields, outside):
    """Files of weights have them: a name that changes here makes files unreadable."""
    state = small_model(**fields).state_dict()
    assert {n: list(x.shape) for n, x in state.items() if not n.startswith("blocks")} == outside
    block = [n for n in BLOCK if "r_net" not in n or fields.get("attn_type", 0) == 0]
    want = {f"blocks.{i}.{name}" for i in range(2) for name in block}
    assert {n for n in state if n.startswith("blocks")} == want


def test_to_and_from_json():
    config = TransformerXLConfig.preset("wt103-large", dropout=0.25, n_layer=3)
    assert (config.dropout, config.n_layer, config.n_head) == (0.25, 3, 16)
    assert TransformerXLConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert TransformerXLConfig.from_dict({}) == TransformerXLConfig()
    config = TransformerXLConfig(d_model=64, d_head=8)
    assert config.d_embed == 64
    # What follows other fields goes on to do so where a saved configuration is changed.
    again = TransformerXLConfig.from_dict({**config.to_dict(), "d_model": 32, "cutoffs": [5]})
    assert (again.d_embed, again.tie_projs) == (32, (False, False))
    assert TransformerXLConfig.from_dict(config.to_dict()) == config
    assert TransformerXLConfig(cutoffs=(5, 9), tie_projs=[0, 1, True]).tie_projs == (False, True, True)
    assert TransformerXLConfig(same_length=True, mem_len=0, same_length_extra=1).same_length
    numpy_values = TransformerXLConfig(same_length=numpy.bool_(True), cutoffs=numpy.array([5, 9]))
    assert numpy_values.same_length is True and numpy_values.cutoffs == (5, 9)
    preset("tiny", "model")["n_layer"] = 99
    assert TransformerXLConfig.preset("tiny").n_layer != 99, "a preset is given as a copy"


def test_bad_input():
    for fields, message in [
        *(
            (dict([(name, 0)]), f"{name} must be at least 1, got 0")
            for name in ("n_layer", "d_embed", "tgt_len")
        ),
        (dict(vocab_size=-3), "vocab_size must be at least 1, got -3"),
        (dict(dropatt=1.0), r"dropatt must be in \[0, 1\), got 1.0"),
        (dict(dropout=float("nan")), r"dropout must be in \[0, 1\), got nan"),
        *(
            (dict([(name, value)]), f"{name} must be a finite number, not negative, got {value}")
            for name in ("init_std", "proj_init_std")
            for value in (-1.0, float("nan"), float("inf"))
        ),
        (dict(d_model=7), "d_model must be even"),
        (dict(mem_len=-1), "mem_len must not be negative, got -1"),
        (dict(same_length_extra=-1), "same_length_extra must not be negative, got -1"),
        (dict(clamp_len=-2), "clamp_len must be -1 .off. or a distance, got -2"),
        (dict(attn_type=4), "attn_type must be 0, 1, 2 or 3, got 4"),
        (dict(d_head=257), "d_head must be at most 256 with attn_type 0, got 257"),
        (dict(d_head=256, attn_type=1), "d_head must be at most 255 with attn_type 1, got 256"),
        (dict(attn_type=3, d_head=32), "adds n_head . d_head = 256 position values to d_model = 512"),
        *(
            (dict(cutoffs=cutoffs), "cutoffs must rise strictly between 0 and vocab_size = 256")
            for cutoffs in [(0,), (256,), (300,), (5, 5), (9, 5), (-1,)]
        ),
        (dict(cutoffs=(5,), tie_projs=(0, 2)), "tie_projs must be of type bool, got 2"),
        (dict(same_length=True, mem_len=0), "same_length needs mem_len >= 1"),
        (dict(cutoffs=(5, 9), tie_projs=(True,)), "tie_projs must have one entry per cluster, 3, got"),
        (dict(tie_projs=(True, False)), "tie_projs must have one entry per cluster, 1, got"),
        (dict(cutoffs=(5, 9), div_val=23), "div_val = 23 leaves nothing of d_embed = 512 for cluster 2"),
        (dict(n_layer=1.5), "n_layer must be of type int, got 1.5"),
        (dict(n_layer="3"), "n_layer must be of type int, got '3'"),
        (dict(mem_len=None), "mem_len must be of type int, got None"),
        (dict(dropout="much"), "dropout must be of type float, got 'much'"),
        (dict(dropout=10**400), "dropout must be of type float, got 1000"),
        (dict(cutoffs=5), "cutoffs must be of type tuple.*, got 5"),
        (dict(cutoffs=("a",)), "cutoffs must be of type .*, got 'a'"),
    ]:
        with pytest.raises(ValueError, match=message):
            TransformerXLConfig(**fields)
    with pytest.raises(ValueError, match="TransformerXLConfig has no field layers, n_heads"):
        TransformerXLConfig.from_dict({"n_heads": 3, "layers": 1})
    with pytest.raises(ValueError, match="TransformerXLConfig has no field 3, None, layers"):
        TransformerXLConfig.from_dict({"layers": 1, 3: 4, None: 5})
    with pytest.raises(ValueError, match="TransformerXLConfig has no field n_heads"):
        TransformerXLConfig.preset("tiny", n_heads=3)
    with pytest.raises(
        ValueError, match=r"there is no preset 'enwik9'; there are wt103-base, .*, tiny, small"
    ):
        TransformerXLConfig.preset("enwik9")

"""`txl_model.convert`: published weights and settings, made up here by the published names and shapes.

Against the published code itself: tests/parity.
"""

from __future__ import annotations

import argparse
import json
import sys
import types

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from txl_model import cli
from txl_model.checkpoint import load_model
from txl_model.convert import (
    add_convert_arguments,
    from_authors,
    from_huggingface,
    from_nvidia,
    load_authors,
    load_huggingface,
    load_nvidia,
    run_convert,
)
from txl_model.data.vocabulary import Vocabulary

V, L, H, D, D_MODEL, D_INNER, TGT, MEM = 30, 2, 2, 4, 8, 12, 5, 6
CUTOFFS = (10, 15, 25)
ADAPTIVE = [
    pytest.param({"cutoffs": CUTOFFS}, id="div1"),
    pytest.param({"cutoffs": CUTOFFS, "d_embed": 6}, id="div1-projected"),
    pytest.param({"cutoffs": CUTOFFS, "div_val": 2}, id="div2"),
    pytest.param({"cutoffs": CUTOFFS, "div_val": 2, "tie_projs": (False, True, True, True)}, id="div2-tied"),
    pytest.param(
        {"cutoffs": CUTOFFS, "d_embed": 6, "tie_projs": (False, False, True, True)}, id="div1-some-tied"
    ),
    pytest.param({"cutoffs": CUTOFFS, "div_val": 2, "tied": False}, id="div2-untied-tables"),
]


def authors_state(
    attn_type=0, cutoffs=(), div_val=1, d_embed=D_MODEL, tied=True, tie_projs=None, ext_len=0
) -> dict[str, torch.Tensor]:
    """A random state dict as `MemTransformerLM.state_dict()` of the authors' mem_transformer.py names it."""
    random = torch.Generator().manual_seed(7)

    def new(*shape):
        return torch.randn(*shape, generator=random)

    ends = (*cutoffs, V)
    rows = [V] if div_val == 1 else [end - first for first, end in zip((0, *cutoffs), ends, strict=True)]
    state = {}
    for i, n in enumerate(rows):
        width = d_embed // div_val**i
        state[f"word_emb.emb_layers.{i}.weight"] = new(n, width)
        if div_val > 1 or d_embed != D_MODEL:
            state[f"word_emb.emb_projs.{i}"] = new(D_MODEL, width)
        state[f"crit.out_layers.{i}.weight"] = (
            state[f"word_emb.emb_layers.{i}.weight"] if tied else new(n, width)
        )
        state[f"crit.out_layers.{i}.bias"] = new(n)
    if "word_emb.emb_projs.0" in state:
        for i in range(len(ends)):
            original = state[f"word_emb.emb_projs.{0 if div_val == 1 else i}"]
            state[f"crit.out_projs.{i}"] = original if tie_projs and tie_projs[i] else new(*original.shape)
    if cutoffs:
        state["crit.cluster_weight"], state["crit.cluster_bias"] = (
            new(len(cutoffs), d_embed),
            new(len(cutoffs)),
        )
    for i in range(L):
        attn, ff = f"layers.{i}.dec_attn", f"layers.{i}.pos_ff"
        if attn_type in (0, 1):
            state[f"{attn}.qkv_net.weight"] = new(3 * H * D, D_MODEL)
        else:
            state[f"{attn}.q_net.weight"] = new(H * D, D_MODEL)
            state[f"{attn}.kv_net.weight"] = new(2 * H * D, D_MODEL)
        if attn_type == 0:
            state[f"{attn}.r_net.weight"] = new(H * D, D_MODEL)
        state[f"{attn}.o_net.weight"] = new(D_MODEL, H * D)
        state[f"{ff}.CoreNet.0.weight"], state[f"{ff}.CoreNet.0.bias"] = new(D_INNER, D_MODEL), new(D_INNER)
        state[f"{ff}.CoreNet.3.weight"], state[f"{ff}.CoreNet.3.bias"] = new(D_MODEL, D_INNER), new(D_MODEL)
        for part in (attn, ff):
            state[f"{part}.layer_norm.weight"], state[f"{part}.layer_norm.bias"] = new(D_MODEL), new(D_MODEL)
    max_klen = TGT + ext_len + MEM
    if attn_type == 0:
        state["r_w_bias"], state["r_r_bias"] = new(H, D), new(H, D)
    elif attn_type == 1:
        state["r_w_bias"], state["r_bias"] = new(L, H, D), new(L, max_klen, H)
    if attn_type in (1, 3):
        state["r_emb"] = new(L, max_klen, H, D)
    if attn_type in (0, 2):
        state["pos_emb.inv_freq"] = 1 / (10000 ** (torch.arange(0.0, D_MODEL, 2.0) / D_MODEL))
    return state


def authors_args(**changed) -> dict:
    """What their train.py would have been told."""
    args = {"n_layer": L, "n_head": H, "d_head": D, "d_model": D_MODEL, "d_inner": D_INNER, "d_embed": -1}
    args |= {"tgt_len": TGT, "mem_len": MEM, "ext_len": 0, "clamp_len": -1, "dropout": 0.1, "dropatt": 0.0}
    args |= {"same_length": False, "pre_lnorm": False, "lr": 0.00025, "data": "../data/enwik8/"}
    return {**args, **changed}


def nvidia_state(state, tie_projs) -> dict[str, torch.Tensor]:
    """The same as NVIDIA's second release names it: what is tied is stored once, or under another name."""
    new = {}
    for name, x in state.items():
        if name.startswith("crit.out_layers.") and name.endswith("weight"):
            if x is not state[name.replace("crit.out_layers", "word_emb.emb_layers")]:
                new[f"crit.out_layers_weights.{name.split('.')[2]}"] = x
        elif name.startswith("crit.out_layers."):
            new[f"crit.out_layers_biases.{name.split('.')[2]}"] = x
        elif not (name.startswith("crit.out_projs.") and tie_projs[int(name.split(".")[2])]):
            new[name] = x
        if name.startswith("word_emb.emb_projs."):
            new[name.replace("word_emb.emb_projs", "crit.shared_out_projs")] = x
    return new


def nvidia_config(**changed) -> dict:
    config = {"n_token": V, "n_layer": L, "n_head": H, "d_model": D_MODEL, "d_head": D, "d_inner": D_INNER}
    config |= {
        "dropout": 0.1,
        "dropatt": 0.0,
        "dtype": None,
        "tie_weight": True,
        "d_embed": D_MODEL,
        "div_val": 1,
    }
    config |= {"tie_projs": [False], "pre_lnorm": False, "tgt_len": TGT, "ext_len": 0, "mem_len": MEM}
    config |= {"cutoffs": [], "same_length": False, "attn_type": 0, "clamp_len": -1, "sample_softmax": -1}
    return {**config, **changed}


def huggingface_state(state, untie_r=False) -> dict[str, torch.Tensor]:
    """The same as Hugging Face names it; with untie_r, biases of layer 1 are those of layer 0 and 1."""
    new = {name if name.startswith("crit.") else f"transformer.{name}": x for name, x in state.items()}
    for bias in ("r_w_bias", "r_r_bias"):
        for i in range(L):
            new[f"transformer.layers.{i}.dec_attn.{bias}"] = state[bias] + i if untie_r else state[bias]
        if untie_r:
            del new[f"transformer.{bias}"]
    for name in ("crit.cluster_weight", "crit.cluster_bias"):  # in the order of the clusters
        if name in new:
            new[name] = new[name].flip(0)
    return new


def huggingface_config(**changed) -> dict:
    config = {
        "model_type": "transfo-xl",
        "vocab_size": V,
        "n_layer": L,
        "n_head": H,
        "d_head": D,
        "attn_type": 0,
    }
    config |= {"d_model": D_MODEL, "d_embed": D_MODEL, "d_inner": D_INNER, "div_val": 1, "cutoffs": []}
    config |= {"pre_lnorm": False, "mem_len": MEM, "clamp_len": -1, "same_length": False, "untie_r": False}
    config |= {"dropout": 0.1, "dropatt": 0.0, "layer_norm_epsilon": 1e-5, "tie_projs": [False]}
    return {**config, **changed}


def published_log_prob(state, hidden, cutoffs, div_val) -> torch.Tensor:
    """[N, V] log-probabilities as the authors' proj_adaptive_softmax.py: cluster i at column -i."""

    def logits(i, weight, bias):
        proj = state.get(f"crit.out_projs.{i}")
        return F.linear(hidden if proj is None else hidden @ proj, weight, bias)

    def rows(i):
        if div_val > 1:
            return state[f"crit.out_layers.{i}.weight"], state[f"crit.out_layers.{i}.bias"]
        part = slice((0, *cutoffs, V)[i], (0, *cutoffs, V)[i + 1])
        return state["crit.out_layers.0.weight"][part], state["crit.out_layers.0.bias"][part]

    weight, bias = rows(0)
    weight = torch.cat([weight, state["crit.cluster_weight"]])
    bias = torch.cat([bias, state["crit.cluster_bias"]])
    head = logits(0, weight, bias).log_softmax(-1)
    tails = [head[:, -i, None] + logits(i, *rows(i)).log_softmax(-1) for i in range(1, len(cutoffs) + 1)]
    return torch.cat([head[:, : cutoffs[0]], *tails], dim=1)


def published_embedding(state, tokens, cutoffs, div_val) -> torch.Tensor:
    """[N, d_model] as the authors' AdaptiveEmbedding makes them, before they are scaled."""
    ends = (0, *cutoffs, V) if div_val > 1 else (0, V)
    embedded = []
    for token in tokens.tolist():
        i = next(i for i in range(len(ends)) if token < ends[i + 1])
        row, proj = (
            state[f"word_emb.emb_layers.{i}.weight"][token - ends[i]],
            state.get(f"word_emb.emb_projs.{i}"),
        )
        embedded.append(row if proj is None else proj @ row)
    return torch.stack(embedded)


# ---- Tensors. ----


@pytest.mark.parametrize("attn_type", range(4))
def test_every_tensor_finds_its_place(attn_type):
    state = authors_state(attn_type)
    converted = from_authors(state, authors_args())
    config, ours = converted.config, converted.model().state_dict()
    assert (config.vocab_size, config.n_layer, config.n_head, config.d_head) == (V, L, H, D)
    assert (config.d_model, config.d_inner, config.attn_type) == (D_MODEL, D_INNER, attn_type)
    assert (config.tgt_len, config.mem_len, config.clamp_len) == (TGT, MEM, -1)
    assert (config.dropout, config.zero_memory, config.same_length_extra, config.untie_r) == (
        0.1,
        False,
        0,
        False,
    )
    expected = {
        "word_emb.tables.0": state["word_emb.emb_layers.0.weight"],
        "softmax.biases.0": state["crit.out_layers.0.bias"],
    }
    for i in range(L):
        theirs, attn = f"layers.{i}.dec_attn", f"blocks.{i}.attn"
        qkv = ("qkv_net",) if attn_type in (0, 1) else ("q_net", "kv_net")
        expected[f"{attn}.qkv_net.weight"] = torch.cat([state[f"{theirs}.{x}.weight"] for x in qkv])
        expected[f"{attn}.o_net.weight"] = state[f"{theirs}.o_net.weight"]
        if attn_type == 0:
            expected[f"{attn}.r_net.weight"] = state[f"{theirs}.r_net.weight"]
        for x in ("weight", "bias"):
            expected[f"{attn}.layer_norm.{x}"] = state[f"{theirs}.layer_norm.{x}"]
            expected[f"blocks.{i}.ff.layer_norm.{x}"] = state[f"layers.{i}.pos_ff.layer_norm.{x}"]
            for k in (0, 3):
                expected[f"blocks.{i}.ff.net.{k}.{x}"] = state[f"layers.{i}.pos_ff.CoreNet.{k}.{x}"]
    if attn_type == 0:
        expected |= {"bias_u": state["r_w_bias"][None], "bias_v": state["r_r_bias"][None]}
    if attn_type == 1:
        expected |= {"bias_u": state["r_w_bias"], "r_bias": state["r_bias"]}
    if attn_type in (1, 3):
        expected["r_emb"] = state["r_emb"]
    assert ours.keys() == expected.keys()
    for name, x in ours.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("sizes", ADAPTIVE)
def test_the_adaptive_softmax_gives_the_published_probabilities(sizes):
    sizes = {"div_val": 1, "d_embed": D_MODEL, "tied": True, "tie_projs": (False,) * 4, **sizes}
    state = authors_state(**sizes)
    model = from_authors(state, authors_args(cutoffs=CUTOFFS, d_embed=sizes["d_embed"])).model()
    assert model.config.cutoffs == CUTOFFS and model.config.div_val == sizes["div_val"]
    assert model.config.tie_weight == sizes["tied"] and model.config.tie_projs == sizes["tie_projs"]
    hidden, tokens = torch.randn(V, D_MODEL), torch.arange(V)
    log_prob = published_log_prob(state, hidden, CUTOFFS, sizes["div_val"])
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones(V))
    torch.testing.assert_close(model.softmax.logits(hidden, model.word_emb), log_prob)
    losses = model.softmax.token_losses(hidden, tokens, model.word_emb)
    torch.testing.assert_close(losses, -log_prob.diagonal())
    embedded = published_embedding(state, tokens, CUTOFFS, sizes["div_val"])
    torch.testing.assert_close(model.word_emb(tokens[None])[0], embedded)


@pytest.mark.parametrize("release", [1, 2])
@pytest.mark.parametrize("sizes", ADAPTIVE)
def test_nvidia_s_names_are_the_same_model(sizes, release):
    tie_projs = sizes.get("tie_projs", (False,) * 4)
    state = authors_state(**sizes)
    expected = from_authors(state, authors_args(cutoffs=CUTOFFS, d_embed=sizes.get("d_embed", -1)))
    config = nvidia_config(
        cutoffs=list(CUTOFFS), d_embed=sizes.get("d_embed", D_MODEL), tie_projs=list(tie_projs)
    )
    config |= {"div_val": sizes.get("div_val", 1), "tie_weight": sizes.get("tied", True)}
    converted = from_nvidia(state if release == 1 else nvidia_state(state, tie_projs), config)
    assert converted.config.same_length_extra == release - 1
    converted.config.same_length_extra = 0
    assert converted.config == expected.config
    assert converted.tensors.keys() == expected.tensors.keys()
    for name, x in converted.tensors.items():
        assert torch.equal(x, expected.tensors[name]), name


def test_nvidia_s_absolute_learned_positions_have_no_heads():
    state = authors_state(attn_type=3)
    expected = from_authors(state, authors_args()).tensors["r_emb"]
    state = nvidia_state({**state, "r_emb": state["r_emb"].flatten(2)}, [False])
    assert torch.equal(from_nvidia(state, nvidia_config(attn_type=3)).tensors["r_emb"], expected)


@pytest.mark.parametrize("sizes", ADAPTIVE)
def test_hugging_face_s_names_are_the_same_model(sizes):
    state = authors_state(**sizes)
    expected = from_authors(state, authors_args(cutoffs=CUTOFFS, d_embed=sizes.get("d_embed", -1)))
    config = huggingface_config(cutoffs=list(CUTOFFS), tie_projs=list(sizes.get("tie_projs", (False,) * 4)))
    config |= {"d_embed": sizes.get("d_embed", D_MODEL), "div_val": sizes.get("div_val", 1)}
    config |= {"tie_word_embeddings": sizes.get("tied", True), "tgt_len": TGT}
    converted = from_huggingface(huggingface_state(state), config)
    assert converted.config.zero_memory
    converted.config.zero_memory = False
    assert converted.config == expected.config
    assert converted.tensors.keys() == expected.tensors.keys()
    for name, x in converted.tensors.items():
        assert torch.equal(x, expected.tensors[name]), name


def test_hugging_face_s_biases_may_be_those_of_the_layers():
    state = authors_state()
    converted = from_huggingface(huggingface_state(state, untie_r=True), huggingface_config(untie_r=True))
    assert converted.config.untie_r
    for ours, theirs in (("bias_u", "r_w_bias"), ("bias_v", "r_r_bias")):
        assert torch.equal(converted.tensors[ours], torch.stack([state[theirs], state[theirs] + 1]))


@pytest.mark.parametrize("kept", ["transformer.r_w_bias", "transformer.layers.1.dec_attn.r_w_bias"])
def test_what_safetensors_stores_once_is_enough(kept):
    state = huggingface_state(authors_state())
    for name in [name for name in state if name.endswith("r_w_bias") and name != kept]:
        del state[name]
    del state["crit.out_layers.0.weight"]
    converted = from_huggingface(state, huggingface_config())
    assert converted.config.tie_weight
    assert torch.equal(converted.tensors["bias_u"], authors_state()["r_w_bias"][None])


def test_without_a_word_about_ties_the_values_decide():
    settings = authors_args()
    assert from_authors(authors_state(), settings).config.tie_weight
    assert not from_authors(authors_state(), {**settings, "tied": False}).config.tie_weight
    assert not from_authors(authors_state(tied=False), settings).config.tie_weight


@pytest.mark.parametrize(
    ("attn_type", "published", "ours"),
    [(0, 4, 4), (1, 4, 3), (2, 4, 4), (3, 4, -1), (0, 0, -1), (1, 0, -1), (1, -1, -1)],
)
def test_clamp_len_of_each_attention_kind(attn_type, published, ours):
    args = authors_args(clamp_len=published)
    assert from_authors(authors_state(attn_type), args).config.clamp_len == ours


def test_ext_len_has_rows_of_the_learned_tables():
    args = authors_args(ext_len=3)
    assert from_authors(authors_state(attn_type=1, ext_len=3), args).config.max_klen == TGT + 3 + MEM
    with pytest.raises(ValueError, match=r"tgt_len is 5 in the configuration, 8 by the weights"):
        from_authors(authors_state(attn_type=1, ext_len=3), authors_args())


def test_the_dtype_stays_and_the_model_is_at_least_float32():
    for dtype, model_dtype in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        state = {name: x.to(dtype) for name, x in authors_state().items()}
        converted = from_authors(state, authors_args())
        assert {x.dtype for x in converted.tensors.values()} == {dtype}
        assert {x.dtype for x in converted.model().parameters()} == {model_dtype}


# ---- What does not fit. ----


def without(*names):
    return lambda state: [state.pop(name) for name in names]


def replaced(name, *shape):
    return lambda state: state.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (without("layers.1.pos_ff.CoreNet.3.bias"), {}, r"layers\.1\.pos_ff\.CoreNet\.3\.bias is missing"),
        (without("layers.1.dec_attn.r_net.weight"), {}, r"layers\.1\.dec_attn\.r_net\.weight is missing"),
        (without("r_r_bias"), {}, "r_r_bias is missing"),
        (without("word_emb.emb_layers.0.weight"), {}, r"no word_emb\.emb_layers\.0\.weight"),
        (lambda state: state.clear(), {}, r"no layers\.0\.dec_attn\.o_net\.weight"),
        (replaced("out_layer.weight", 2, 2), {}, r"out_layer\.weight is unexpected"),
        (
            replaced("layers.1.dec_attn.o_net.weight", 8, 9),
            {},
            r"layers\.1\.dec_attn\.o_net\.weight has shape \[8, 9\] instead of \[8, 8\]",
        ),
        (replaced("r_w_bias", 8), {}, r"r_w_bias has shape \[8\] instead of 2 dimensions"),
        (lambda state: state.update(epoch=3), {}, "epoch is no tensor"),
        (without(), {"n_layer": 3}, "n_layer is 3 in the configuration, 2 by the weights"),
        (without(), {"attn_type": 1}, "attn_type is 1 in the configuration, 0 by the weights"),
        (without(), {"n_head": 4}, "n_head is 4 in the configuration, 2 by the weights"),
        (without(), {"d_embed": 6}, "d_embed is 6 in the configuration, 8 by the weights"),
        (without(), {"cutoffs": [10]}, r"cutoffs is \(10,\) in the configuration, \(\) by the weights"),
        (without(), {"cutoffs": 10}, "cutoffs should be a list"),
        (without(), {"mem_len": "long"}, "mem_len should be a number"),
        (without(), {"mem_len": None, "same_length": None}, "lacks mem_len, same_length, which the weights"),
        (without(), {"tgt_len": None}, "lacks tgt_len"),
        (
            replaced("crit.out_layers.0.weight", V, D_MODEL),
            {"tied": True},
            r"ties crit\.out_layers\.0\.weight to word_emb\.emb_layers\.0\.weight, but their values differ",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, settings, message):
    state = authors_state()
    change(state)
    with pytest.raises(ValueError, match=message):
        from_authors(state, authors_args(**settings))


def test_what_the_weights_do_not_show_is_asked_for():
    one_table = authors_state(cutoffs=CUTOFFS)
    with pytest.raises(ValueError, match="lacks cutoffs"):
        from_authors(one_table, authors_args())
    with pytest.raises(ValueError, match="cutoffs must rise strictly"):  # those of WikiText-103 are too many
        from_authors(one_table, authors_args(adaptive=True, dataset="wt103"))
    with pytest.raises(ValueError, match=r"crit\.cluster_weight has shape \[3, 8\] instead of \[2, 8\]"):
        from_authors(one_table, authors_args(cutoffs=[10, 20]))
    with pytest.raises(ValueError, match="lacks n_head"):
        from_authors(authors_state(attn_type=2), authors_args(n_head=None, d_head=None))
    with pytest.raises(ValueError, match="d_head is 4 in the configuration, 2 by the weights"):
        from_authors(authors_state(attn_type=2), authors_args(n_head=4))


@pytest.mark.parametrize("attn_type", [2, 3])
def test_pre_lnorm_of_absolute_positions_is_another_model(attn_type):
    with pytest.raises(ValueError, match=f"attn_type {attn_type} with pre_lnorm"):
        from_authors(authors_state(attn_type), authors_args(pre_lnorm=True))


def test_what_does_not_fit_of_the_others():
    state = authors_state()
    with pytest.raises(ValueError, match="model_config lacks tie_weight"):
        from_nvidia(state, {k: v for k, v in nvidia_config().items() if k != "tie_weight"})
    with pytest.raises(ValueError, match=r"config\.json lacks untie_r"):
        from_huggingface(
            huggingface_state(state), {k: v for k, v in huggingface_config().items() if k != "untie_r"}
        )
    with pytest.raises(ValueError, match="layer_norm_epsilon is 1e-12"):
        from_huggingface(huggingface_state(state), huggingface_config(layer_norm_epsilon=1e-12))
    with pytest.raises(ValueError, match=r"untie_r needs a r_w_bias in each of 2 layers, found: none"):
        shared = {k: v for k, v in huggingface_state(state).items() if "dec_attn.r_" not in k or "r_net" in k}
        from_huggingface(shared, huggingface_config(untie_r=True))
    with pytest.raises(ValueError, match=r"ties transformer\.layers\.1\.dec_attn\.r_w_bias"):
        from_huggingface(huggingface_state(state, untie_r=True), huggingface_config())
    projected = authors_state(d_embed=6, tie_projs=(True,))
    config = nvidia_config(d_embed=6, tie_projs=[True])
    changed = nvidia_state(projected, [True]) | {"crit.shared_out_projs.0": torch.zeros(D_MODEL, 6)}
    with pytest.raises(ValueError, match=r"crit\.shared_out_projs\.0 to word_emb\.emb_projs\.0"):
        from_nvidia(changed, config)
    with pytest.raises(ValueError, match=r"transformer\.r_r_bias is missing, score\.weight is unexpected"):
        classifier = huggingface_state(state) | {"score.weight": torch.zeros(2, D_MODEL)}
        from_huggingface({k: v for k, v in classifier.items() if "r_r_bias" not in k}, huggingface_config())


# ---- Files. ----


@pytest.fixture
def vocabulary_module(monkeypatch):
    """Stands for NVIDIA's utils.vocabulary while an object of its Vocab is saved."""

    class Vocab:
        pass

    Vocab.__module__, Vocab.__qualname__ = "utils.vocabulary", "Vocab"
    module = types.ModuleType("utils.vocabulary")
    module.Vocab = Vocab
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "utils", types.ModuleType("utils"))
        patch.setitem(sys.modules, "utils.vocabulary", module)
        yield module


def nvidia_checkpoint(vocab) -> dict:
    return {
        "args": argparse.Namespace(lr=0.01, vocab="word"),
        "model_config": nvidia_config(),
        "model_state": nvidia_state(authors_state(), [False]),
        "optimizer_state": {
            "state": {0: {"step": 3, "exp_avg": torch.zeros(2)}},
            "param_groups": [{"lr": 0.01}],
        },
        "vocab": vocab,
        "amp_state": None,
        "train_step": 4,
    }


def convert(*arguments) -> None:
    """`txl convert` with these arguments."""
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    run_convert(parser.parse_args([str(argument) for argument in arguments]))


def assert_same_model(folder, converted) -> None:
    loaded = load_model(folder)
    assert loaded.config == converted.config
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, converted.model().state_dict()[name]), name


def test_nvidia_s_checkpoint(tmp_path, vocabulary_module, capsys):
    vocab = vocabulary_module.Vocab()
    vocab.idx2sym, vocab.lower_case = ["<eos>", "the", "\N{LATIN SMALL LETTER E WITH ACUTE}t\u00e9"], False
    torch.save(nvidia_checkpoint(vocab), tmp_path / "checkpoint_best.pt")
    vars(vocabulary_module).clear()
    convert("nvidia", tmp_path / "checkpoint_best.pt", tmp_path / "out")
    words = Vocabulary("word", ("<eos>", "the", "\u00e9t\u00e9"), line_end="<eos>")
    assert Vocabulary.load(tmp_path / "out" / "vocabulary.json") == words
    out = capsys.readouterr().out
    assert "same_length_extra" in out and f"the vocabulary has 3 symbols, the model {V}" in out
    expected = from_authors(authors_state(), authors_args())
    expected.config.same_length_extra = 1
    assert_same_model(tmp_path / "out", expected)


def test_another_object_in_nvidia_s_checkpoint_is_refused(tmp_path, vocabulary_module):
    vocabulary_module.Vocab.__qualname__ = "OpenAIVocab"
    vocabulary_module.OpenAIVocab = vocabulary_module.Vocab
    torch.save(nvidia_checkpoint(vocabulary_module.Vocab()), tmp_path / "checkpoint_best.pt")
    with pytest.raises(ValueError, match=r"holds a utils\.vocabulary\.OpenAIVocab.*torch\.save\(\{k: c\[k\]"):
        load_nvidia(tmp_path / "checkpoint_best.pt")
    torch.save({"model_state": authors_state()}, tmp_path / "plain.pt")
    with pytest.raises(ValueError, match="has no model_config"):
        load_nvidia(tmp_path / "plain.pt")


LOG = """\
====================================================================================================
    - data : ../data/enwik8/
    - n_layer : 2
    - d_embed : 8
    - dropout : 0.1
    - tgt_len : 5
    - mem_len : 6
    - clamp_len : -1
    - same_length : False
    - pre_lnorm : False
    - restart_dir :
    - tied : True
    - n_all_param : 1234
====================================================================================================
#params = 1234
| epoch   1 step      200 | batches    200 | lr 0.00025 | ms/batch 510.12 | loss  2.42 | bpc   3.48672
"""
OPTIONS = [
    *("--tgt-len", "5", "--mem-len", "6", "--clamp-len", "-1"),
    *("--no-same-length", "--no-pre-lnorm", "--dropout", "0.1"),
]


@pytest.mark.parametrize("source", ["log.txt", "args.json", "args.yaml", "options", "log.txt and options"])
@pytest.mark.parametrize("legacy", [False, True])
def test_the_authors_state_dict(tmp_path, source, legacy):
    state = tmp_path / "state.pt"
    torch.save(authors_state(), state, _use_new_zipfile_serialization=not legacy)
    (tmp_path / "log.txt").write_text(LOG)
    (tmp_path / "args.json").write_text(json.dumps(authors_args()))
    (tmp_path / "args.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in authors_args().items()))
    args, expected = (
        authors_args(),
        OPTIONS if source == "options" else ["--config", tmp_path / source.split()[0]],
    )
    if source == "log.txt and options":
        expected = [*expected, "--mem-len", "9", "--same-length"]
        args |= {"mem_len": 9, "same_length": True}
    convert("authors", state, tmp_path / "out", *expected)
    assert_same_model(tmp_path / "out", from_authors(authors_state(), args))


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_hugging_face_s_folder(tmp_path, weights, capsys):
    state, source = huggingface_state(authors_state(), untie_r=True), tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(huggingface_config(untie_r=True)))
    if weights == "pytorch_model.bin":
        torch.save(state, source / weights)
    else:
        del state["crit.out_layers.0.weight"]
        safetensors.torch.save_file(state, source / weights)
    words = ("<eos>", "<unk>", *(f"word{i}" for i in range(V - 2)))
    (source / "vocab.txt").write_text("\n".join(words) + "\n")
    (source / "vocab.pkl").write_bytes(b"anything")
    convert("huggingface", source, tmp_path / "out")
    saved = Vocabulary.load(tmp_path / "out" / "vocabulary.json")
    assert saved == Vocabulary("word", words, line_end="<eos>", unknown="<unk>")
    assert (
        cli.main(["generate", str(tmp_path / "out"), "--prompt", "word1 other", "--max-new-tokens", "2"]) == 0
    )
    assert not (tmp_path / "out" / "vocab.pkl").exists()
    out = capsys.readouterr().out
    assert "vocab.pkl is a pickle" in out and "zero_memory" in out and "tgt_len" in out
    expected = from_huggingface(
        huggingface_state(authors_state(), untie_r=True), huggingface_config(untie_r=True)
    )
    assert expected.config.zero_memory
    assert_same_model(tmp_path / "out", expected)


@pytest.mark.parametrize(
    "symbols, lower_case, expected",
    [
        (("<eos>", "The", "7"), False, Vocabulary("word", ("<eos>", "The", "7"), line_end="<eos>")),
        (("<S>", "<UNK>", "a"), True, Vocabulary("word", ("<S>", "<UNK>", "a"), True, "<S>", "<UNK>")),
        (("32", "101", "255"), False, Vocabulary("byte", (32, 101, 255), line_end="")),
        (("32", "256"), False, Vocabulary("word", ("32", "256"))),
        (("_", "e", "a"), False, Vocabulary("char", (" ", "e", "a"), lower_case=True, line_end="")),
    ],
)
def test_what_the_symbols_are(symbols, lower_case, expected):
    converted = from_authors(authors_state(), authors_args())
    converted.take_vocabulary(symbols, lower_case)
    assert converted.vocabulary == expected


ran = []


class Module(torch.nn.Module):
    """Stands for the authors' MemTransformerLM, pickled whole. Loaded the unsafe way it runs __setstate__."""

    def __setstate__(self, state):
        ran.append(state)


def test_a_pickled_module_is_refused_and_not_run(tmp_path):
    torch.save(Module(), tmp_path / "model.pt")
    with pytest.raises(
        ValueError, match=r"holds a \S*Module, .*model\.pt is a pickled module.*state_dict\(\)"
    ):
        load_authors(tmp_path / "model.pt", authors_args())
    assert not ran


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "text"])
@pytest.mark.parametrize("name", ["state.pt", "legacy.pt", "state.safetensors"])
def test_damaged_files(tmp_path, name, damage):
    path = tmp_path / name
    if name == "state.safetensors":
        state = {name: x.clone() for name, x in authors_state().items()}
        safetensors.torch.save_file(state, path)
    else:
        torch.save(authors_state(), path, _use_new_zipfile_serialization=name == "state.pt")
    whole = path.read_bytes()
    contents = {"empty": b"", "truncated": whole[: len(whole) // 2], "garbage": bytes(range(256)) * 9}
    path.write_bytes(contents.get(damage, b"<html>404 Not Found</html>"))
    with pytest.raises(ValueError, match=rf"{name} cannot be read"):
        load_authors(path, authors_args())


def test_only_a_converted_model_is_replaced(tmp_path):
    train = {"batch_size": 4}
    for name, content in {
        "run": {"config.json": {"model": {}, "train": train}, "log.jsonl": {}},
        "best": {"config.json": {"model": {}, "train": train}, "model.safetensors": {}},
        "corpus": {"corpus.json": {}, "train.bin": {}},
        "huggingface": {"config.json": huggingface_config(), "model.safetensors": {}},
        "other": {"notes.txt": {}},
    }.items():
        (tmp_path / name).mkdir()
        for file, values in content.items():
            (tmp_path / name / file).write_text(json.dumps(values))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    first, second = (from_authors(authors_state(), authors_args(mem_len=m)) for m in (6, 9))
    for folder in sorted(tmp_path.iterdir()):
        with pytest.raises(
            ValueError, match=r"is not empty and holds no converted model: there is \S+ in it"
        ):
            first.save(folder)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before

    first.vocabulary = Vocabulary("byte", tuple(range(V)), line_end="")  # which the second has not
    (tmp_path / "new" / ".saving").mkdir(parents=True)  # as a kill leaves it
    for converted in (first, second):
        converted.save(tmp_path / "new")
        assert_same_model(tmp_path / "new", converted)
        assert (tmp_path / "new" / "vocabulary.json").exists() == (converted is first)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*state\.pt"):
        load_authors(tmp_path / "state.pt", authors_args())
    with pytest.raises(FileNotFoundError, match=r"no file .*config\.json"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config()))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        load_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json holds a list"):
        load_huggingface(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list"):
        load_authors(tmp_path / "list.pt", authors_args())


@pytest.mark.parametrize("flag", [True, False])
def test_every_option_for_the_authors_models(flag: bool) -> None:
    """What the weights do not show can be said; what is not said is left to --config."""
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    needed = ["authors", "state.pt", "out"]
    numbers = dict(tgt_len=3, mem_len=4, clamp_len=-1, n_head=2, cutoffs=(5, 7), dropout=0.25, dropatt=0.5)
    flags = dict(same_length=flag, pre_lnorm=flag)
    said = [f"--{'' if flag else 'no-'}{name.replace('_', '-')}" for name in flags]
    for name, value in numbers.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        said.append(f"--{name.replace('_', '-')}={text}")
    args, without = (vars(parser.parse_args(needed + more)) for more in (said, []))
    for name, value in (numbers | flags).items():
        assert args[name] == value and without[name] is None


@pytest.mark.parametrize("name", ["n_token", "vocab_size"])
def test_a_vocabulary_of_another_size_is_named(name: str) -> None:
    message = f"vocab_size is {V + 1} in the configuration, {V} by the weights"
    with pytest.raises(ValueError, match=message):
        from_authors(authors_state(), authors_args(**{name: V + 1}))


@pytest.mark.parametrize("missing", ["q", "kv"])
def test_queries_without_keys_are_named(missing: str) -> None:
    state = authors_state(attn_type=2)
    del state[f"layers.1.dec_attn.{missing}_net.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.dec_attn\.qkv_net\.weight is missing"):
        from_authors(state, authors_args())


def test_a_copy_without_its_original_is_named() -> None:
    state = authors_state(cutoffs=CUTOFFS, div_val=2)
    del state["word_emb.emb_projs.1"]
    with pytest.raises(ValueError, match=r"word_emb\.emb_projs\.1 is missing"):
        from_authors(state, authors_args(cutoffs=CUTOFFS, div_val=2))

"""The numbers of Hugging Face's TransfoXLLMHeadModel: random weights, five segments, memory between them.

In an environment of its own, for what transformers 4.37.2 needs:

    python3.11 -m venv parity
    parity/bin/pip install torch
    parity/bin/pip install '.[train]' -r tests/parity/requirements.txt
    parity/bin/pytest tests/parity
"""

from __future__ import annotations

import argparse
import json
import warnings

import helpers
import pytest
import torch

ORACLE = "4.37.2"
transformers = pytest.importorskip("transformers", reason=f"needs transformers=={ORACLE} (tests/parity)")
if transformers.__version__ != ORACLE:
    pytest.skip(f"needs transformers=={ORACLE}, here is {transformers.__version__}", allow_module_level=True)
transformers.logging.set_verbosity_error()

import txl_model.model  # noqa: E402
from txl_model.checkpoint import load_model  # noqa: E402
from txl_model.convert import add_convert_arguments, from_huggingface, run_convert  # noqa: E402

B, V, MEM = 2, 50, 8
SEGMENTS = [6, 9, 2, 12, 11]  # shorter and longer than the memory; it fills in the second
ADAPTIVE = {"cutoffs": [10, 20, 30], "d_embed": 64}
VARIANTS = [
    pytest.param({}, id="char"),
    pytest.param({**ADAPTIVE, "div_val": 1}, id="adaptive-div1"),
    pytest.param({**ADAPTIVE, "div_val": 4}, id="adaptive-div4"),
    pytest.param(
        {**ADAPTIVE, "div_val": 4, "proj_share_all_but_first": False}, id="adaptive-untied-projections"
    ),
    pytest.param({"same_length": True, "clamp_len": 5}, id="same-length-clamp"),
    pytest.param({"pre_lnorm": True}, id="pre-LN"),
    pytest.param({"untie_r": False}, id="shared-biases"),
    pytest.param({"tie_word_embeddings": False}, id="untied-tables"),
    pytest.param(
        {**ADAPTIVE, "div_val": 4, "same_length": True, "clamp_len": 5, "pre_lnorm": True}, id="everything"
    ),
]


def oracle(dtype=torch.float32, **changed):
    """Their model in eval mode, its weights ten times the initial ones, so that a mistake shows."""
    sizes = dict(vocab_size=V, n_layer=3, n_head=2, d_head=6, d_model=16, d_embed=16, d_inner=24, mem_len=MEM)
    usual = dict(
        cutoffs=[], div_val=1, clamp_len=-1, same_length=False, untie_r=True, dropout=0.0, dropatt=0.0
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # its output is to change in v5, which has no such model
        config = transformers.TransfoXLConfig(**{**sizes, **usual, **changed})
        model = transformers.TransfoXLLMHeadModel(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()


def converted(theirs, backend: str | None = "reference"):
    """Their model as ours, by what they would have saved."""
    config = json.loads(theirs.config.to_json_string(use_diff=False))
    return from_huggingface(theirs.state_dict(), config).model(backend).eval()


def text() -> torch.Tensor:
    return torch.randint(V, (B, sum(SEGMENTS) + 1), generator=torch.Generator().manual_seed(2))


def their_log_probabilities(theirs) -> torch.Tensor:
    out, mems = [], None
    with torch.no_grad():
        for segment in text()[:, :-1].split(SEGMENTS, dim=1):
            result = theirs(segment, mems=mems)
            mems = result.mems
            out.append(result.prediction_scores)
    return torch.cat(out, dim=1)


def our_log_probabilities(ours, memory) -> torch.Tensor:
    out = []
    with torch.no_grad():
        for segment in text()[:, :-1].split(SEGMENTS, dim=1):
            result = ours(segment, memory)
            memory = result.memory
            out.append(result.logits.log_softmax(-1))
    return torch.cat(out, dim=1)


@pytest.fixture
def all_in_float64(monkeypatch):
    """Theirs rounds scores to float32 to mask them, ours computes sinusoids in float32. Here neither does."""

    def use(theirs):
        monkeypatch.setattr(torch.Tensor, "float", lambda self: self)

        def sinusoids(n_rows, d_model, device=None):
            return theirs.transformer.pos_emb(torch.arange(n_rows - 1.0, -1.0, -1.0, dtype=torch.float64))[
                :, 0
            ]

        monkeypatch.setattr(txl_model.model, "position_embedding", sinusoids)

    return use


@pytest.mark.parametrize("backend", helpers.each_backend(torch.float32))
@pytest.mark.parametrize("kind", ["hidden", "kv"])
@pytest.mark.parametrize("changed", VARIANTS)
def test_log_probabilities(changed, kind, backend):
    theirs = oracle(**changed)
    ours = converted(theirs, backend.name).to(backend.device)
    got = our_log_probabilities(ours, ours.new_memory(B, kind=kind)).cpu()
    torch.testing.assert_close(got, their_log_probabilities(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["hidden", "kv"])
@pytest.mark.parametrize("changed", VARIANTS)
def test_log_probabilities_in_float64(changed, kind, all_in_float64):
    theirs = oracle(torch.float64, **changed)
    ours = converted(theirs)
    all_in_float64(theirs)
    got = our_log_probabilities(ours, ours.new_memory(B, kind=kind))
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, their_log_probabilities(theirs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["hidden", "kv"])
def test_read_with_more_memory_than_in_training(kind):
    theirs = oracle()
    ours = converted(theirs)
    theirs.reset_memory_length(20)
    theirs.transformer.same_length, theirs.transformer.clamp_len = True, 7
    memory = ours.new_memory(B, mem_len=20, clamp_len=7, same_length=True, kind=kind)
    got = our_log_probabilities(ours, memory)
    torch.testing.assert_close(got, their_log_probabilities(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("changed", VARIANTS)
def test_losses(changed):
    theirs = oracle(**changed)
    theirs.crit.keep_order = True  # otherwise theirs come grouped by cluster
    ours = converted(theirs)
    mems = memory = None
    with torch.no_grad():
        for segment in text()[:, :-1].split(SEGMENTS, dim=1):
            labels = torch.full_like(segment, -100)
            labels[:, :-1] = segment[:, 1:]  # they shift labels themselves, and so leave the last token out
            expected = theirs(segment, labels=segment, mems=mems)
            got = ours(segment, memory, labels)
            mems, memory = expected.mems, got.memory
            torch.testing.assert_close(got.token_losses[:, :-1], expected.losses, rtol=0, atol=1e-5)
            torch.testing.assert_close(got.loss, expected.loss, rtol=0, atol=1e-5)


@pytest.mark.parametrize("changed", VARIANTS)
def test_gradients_in_float64(changed, all_in_float64):
    theirs = oracle(torch.float64, **changed)
    ours = converted(theirs)
    all_in_float64(theirs)
    mems = memory = None
    for segment in text()[:, :-1].split(SEGMENTS, dim=1):
        labels = torch.full_like(segment, -100)
        labels[:, :-1] = segment[:, 1:]
        expected = theirs(segment, labels=segment, mems=mems)
        got = ours(segment, memory, labels)
        mems, memory = expected.mems, got.memory
        expected.loss.backward()
        got.loss.backward()
    # Gradients go by the names of their weights, so that the converter names them as ours.
    gradients = {name: x.grad for name, x in theirs.state_dict(keep_vars=True).items() if x.requires_grad}
    expected = from_huggingface(gradients, theirs.config.to_dict()).tensors
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert expected[name].abs().max() > 1e-6, name
        error = (parameter.grad - expected[name]).abs().max().item()
        assert error < 1e-10, f"{name}: {error}"


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize("changed", VARIANTS)
def test_what_they_save_is_what_we_load(changed, safe, tmp_path):
    theirs = oracle(**changed)
    theirs.save_pretrained(tmp_path / "theirs", safe_serialization=safe)
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    run_convert(parser.parse_args(["huggingface", str(tmp_path / "theirs"), str(tmp_path / "ours")]))
    ours = load_model(tmp_path / "ours", backend="reference")
    got = our_log_probabilities(ours, None)
    torch.testing.assert_close(got, their_log_probabilities(theirs), rtol=0, atol=1e-5)

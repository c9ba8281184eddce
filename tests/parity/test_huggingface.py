"""`use_rel_attention`: models of transformers 5 give the same numbers by our attention as by their own.

In an environment of its own:

    python3 -m venv parity5
    parity5/bin/pip install torch
    parity5/bin/pip install . pytest -r tests/parity/requirements-5.txt
    parity5/bin/pytest tests/parity/test_huggingface.py
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")
transformers.logging.set_verbosity_error()

from txl_kernels.integrations import use_rel_attention  # noqa: E402

B, T, C = 3, 23, 32
LENGTHS = (23, 9, 16)
CONFORMER = dict(
    hidden_size=C,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    position_embeddings_type="relative",
    layerdrop=0.0,
)


def speech(length=T, width=C, seed=1):
    return torch.randn(B, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padded(length=T, dtype=torch.long):
    """1 for each step that exists; padding behind."""
    lengths = torch.tensor(LENGTHS) * length // T
    return (torch.arange(length) < lengths[:, None]).to(dtype)


# Each builds a model and a function that calls it, with padding or without, and returns its outputs but those
# of padding.


def parakeet(**changed):
    config = transformers.ParakeetEncoderConfig(
        **{**CONFORMER, "subsampling_conv_channels": 8, "num_mel_bins": 16, **changed}
    )
    steps = 8 * T

    def call(model, padding):
        mask = padded(steps) if padding else None
        out = model(speech(steps, 16), attention_mask=mask)
        kept = torch.ones(out.last_hidden_state.shape[:2]) if mask is None else out.attention_mask
        return out.last_hidden_state[kept.bool()]

    return transformers.ParakeetEncoder(config), call


def nemotron(**changed):
    """In chunks of 3 frames that see 6 before: the mask is made for all frames at once."""
    if not hasattr(transformers, "NemotronAsrStreamingEncoder"):
        pytest.skip("this version of transformers has no Nemotron")
    config = transformers.NemotronAsrStreamingEncoderConfig(
        **{
            **CONFORMER,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
            "sliding_window": 7,
            "default_num_lookahead_tokens": 2,
            "attn_implementation": "sdpa",
            **changed,
        }
    )
    steps = 8 * T

    def call(model, padding):
        out = model(speech(steps, 16), attention_mask=padded(steps) if padding else None)
        kept = torch.ones(out.last_hidden_state.shape[:2]) if not padding else out.attention_mask
        return out.last_hidden_state[kept.bool()]

    return transformers.NemotronAsrStreamingEncoder(config), call


def of_encoder(encoder):
    """An encoder over hidden states, taken out of a model that begins with convolutions."""
    encoder.config._attn_implementation = "sdpa"  # a whole model sets it; without, no mask is made

    def call(model, padding):
        mask = padded(dtype=torch.bool) if padding else None
        out = model(speech(), attention_mask=mask)
        out = getattr(out, "last_hidden_state", out)  # SeamlessM4T's is the output itself
        return out[mask] if padding else out

    return encoder, call


def wav2vec2_conformer(**changed):
    from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as modeling

    config = transformers.Wav2Vec2ConformerConfig(**{**CONFORMER, **changed})
    return of_encoder(modeling.Wav2Vec2ConformerEncoder(config))


def wav2vec2_bert(**changed):
    from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as modeling

    return of_encoder(
        modeling.Wav2Vec2BertEncoder(transformers.Wav2Vec2BertConfig(**{**CONFORMER, **changed}))
    )


def seamless_m4t(**changed):
    from transformers.models.seamless_m4t import modeling_seamless_m4t as modeling

    config = transformers.SeamlessM4TConfig(
        hidden_size=C,
        speech_encoder_layers=2,
        speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=40,
        position_embeddings_type="relative",
        speech_encoder_layerdrop=0.0,
        **changed,
    )
    return of_encoder(modeling.SeamlessM4TConformerEncoder(config))


def fastspeech2():
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as modeling

    config = transformers.FastSpeech2ConformerConfig(
        hidden_size=C, encoder_layers=2, encoder_num_attention_heads=4, encoder_linear_units=40, vocab_size=30
    )

    def call(model, padding):
        tokens = torch.randint(1, 30, (B, T), generator=torch.Generator().manual_seed(1))
        mask = padded() if padding else torch.ones(B, T)
        return model(tokens, attention_mask=mask[:, None], return_dict=True).last_hidden_state[mask.bool()]

    encoder = modeling.FastSpeech2ConformerEncoder(
        config, config.encoder_config, use_encoder_input_layer=True
    )
    return encoder, call


def xlnet_model(**changed):
    config = transformers.XLNetConfig(
        vocab_size=50, d_model=C, n_layer=2, n_head=4, d_inner=40, **{"mem_len": 30, **changed}
    )
    return transformers.XLNetModel(config)


def tokens(seed=1):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


def xlnet(**changed):
    def call(model, padding):
        mask = padded(dtype=torch.float64).flip(1) if padding else None
        out = model(tokens(), attention_mask=mask, use_mems=False).last_hidden_state
        return out[mask.bool()] if padding else out

    return xlnet_model(**changed), call


def xlnet_with_memory():
    def call(model, padding):
        mems = model(tokens(), use_mems=True).mems
        # Behind: before the segment it would be a gap between memory and segment.
        mask = padded(dtype=torch.float64) if padding else None
        out = model(tokens(2), mems=mems, attention_mask=mask, use_mems=True).last_hidden_state
        return out[mask.bool()] if padding else out

    return xlnet_model(clamp_len=12), call


MODELS = (
    parakeet,
    nemotron,
    wav2vec2_conformer,
    wav2vec2_bert,
    seamless_m4t,
    fastspeech2,
    xlnet,
    xlnet_with_memory,
)


def prepared(build):
    """The model in float64, its weights large enough for scores to matter, and how to call it."""
    torch.manual_seed(0)
    model, call = build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn_like(weight))
    return model.double().eval(), call


def run(model, call, padding):
    """Outputs, and the gradients of all weights, by name."""
    model.zero_grad()
    out = call(model, padding)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * weight).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), grads


@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padding"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_same_numbers_as_their_own(build, padding):
    model, call = prepared(build)
    expected, expected_grads = run(model, call, padding)
    ours = copy.deepcopy(model)
    assert use_rel_attention(ours) == 2
    out, grads = run(ours, call, padding)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    assert grads.keys() == expected_grads.keys()
    largest = max(grad.abs().max() for grad in expected_grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-8, atol=1e-10 * largest, msg=name)
    assert ours.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("build", [wav2vec2_conformer, wav2vec2_bert, seamless_m4t], ids=lambda b: b.__name__)
def test_masks_of_eager_attention(build):
    """Which are added to scores, where those of SDPA are bool."""
    model, call = prepared(build)
    assert not torch.equal(call(model, True), call(model, False)[padded().bool()])  # there is a mask
    model.config._attn_implementation = "eager"
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    torch.testing.assert_close(call(ours, True), call(model, True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [fastspeech2, xlnet], ids=lambda build: build.__name__)
def test_dropout_goes_by_its_own_mode(build):
    """Not the layer's: Monte Carlo dropout is on in a model that is evaluated."""
    model, call = prepared(build)
    use_rel_attention(model)
    kept = call(model, False)
    layers = [layer for layer in model.modules() if hasattr(layer, "_txl_masks")]
    for layer in layers:
        layer.dropout = torch.nn.Dropout(0.5)  # in training
    assert not torch.equal(call(model, False), kept)
    for layer in layers:
        layer.train()
        layer.dropout.eval()
    torch.testing.assert_close(call(model, False), kept)
    for layer in layers:
        layer.dropout = torch.nn.Identity()
    torch.testing.assert_close(call(model, False), kept)


def test_projections_that_are_wrapped():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    model, call = prepared(parakeet)
    use_rel_attention(model)
    expected = call(model, False)
    for layer in model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj)
    assert torch.equal(call(model, False), expected)


@pytest.mark.filterwarnings("ignore")  # of what is fixed
def test_traced():
    model, _ = prepared(parakeet)
    use_rel_attention(model)
    model.requires_grad_(False)

    def call(x):
        return model(x)[0]

    traced = torch.jit.trace(call, speech(80, 16), check_trace=False)
    other = speech(80, 16, seed=3)
    torch.testing.assert_close(traced(other), call(other))


def test_a_parametrized_layer_is_not_pickled():
    """As torch has it: what comes back would have no such weight."""
    model = xlnet_model()
    use_rel_attention(model)
    layer = model.layer[0].rel_attn
    torch.nn.utils.parametrize.register_parametrization(layer, "q", torch.nn.Identity())
    with pytest.raises(RuntimeError, match="parametrized modules"):
        pickle.dumps(model)


def test_nemotron_in_streaming():
    """Chunk by chunk, with what it remembers of frames and of convolutions."""
    model, _ = prepared(nemotron)
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    frames, results = speech(8 * 3 * 7, 16), []
    for one in (model, ours):
        given, outs = {"use_cache": True}, []
        for chunk in frames.split(8 * 3, 1):
            out = one(chunk, **given)
            given |= {"cache": out.cache, "padding_cache": out.padding_cache}
            outs.append(out.last_hidden_state)
        results.append(torch.cat(outs, 1))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_nemotrons_eager_mask_is_read_as_it_was_made():
    model, call = prepared(nemotron)
    eager = copy.deepcopy(model)
    eager.config._attn_implementation = "eager"
    use_rel_attention(eager)
    torch.testing.assert_close(call(eager, True), call(model, True), rtol=1e-9, atol=1e-9)


def test_their_attention_is_not_called(monkeypatch):
    from transformers.models.parakeet import modeling_parakeet as modeling

    model, call = prepared(parakeet)
    use_rel_attention(model)
    monkeypatch.delattr(modeling.ParakeetEncoderAttention, "_rel_shift")
    call(model, True)
    untouched, call = prepared(parakeet)
    with pytest.raises(AttributeError, match="_rel_shift"):
        call(untouched, True)


def test_another_mask_in_the_next_call():
    model, call = prepared(parakeet)
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    for padding in (True, False, True):
        torch.testing.assert_close(call(ours, padding), call(model, padding), rtol=1e-9, atol=1e-9)


def test_a_copy_computes_with_its_own_weights():
    model, call = prepared(wav2vec2_conformer)
    use_rel_attention(model)
    before = call(model, True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    assert not torch.allclose(call(other, True), before)
    assert torch.equal(call(model, True), before)


@pytest.mark.parametrize("build", [parakeet, wav2vec2_conformer], ids=lambda build: build.__name__)
def test_training_drops_probabilities(build):
    """If probabilities alone are dropped, two calls differ, and their mean is the output without dropout."""
    torch.manual_seed(0)
    none = {name: 0.0 for name in ("dropout", "activation_dropout", "hidden_dropout", "final_dropout")}
    if build is parakeet:
        none = {name: none[name] for name in ("dropout", "activation_dropout")}
    model, call = build(attention_dropout=0.5, num_hidden_layers=1, **none)
    model.double().eval()
    use_rel_attention(model)
    exact = call(model, True)
    for layer in model.modules():  # but not the batch norms
        if type(layer).__name__.endswith("Attention"):
            layer.train()
    outs = torch.stack([call(model, True).detach() for _ in range(400)])
    assert not torch.equal(outs[0], outs[1])
    error = (outs.mean(0) - exact).norm() / exact.norm()
    spread = (outs - outs.mean(0)).norm(dim=tuple(range(1, outs.dim()))).mean() / exact.norm()
    assert error < 0.2 * spread + 0.02


def test_says_what_it_cannot_do():
    with pytest.raises(
        ValueError, match=r"model: Linear has no layer that is served; .*ParakeetEncoderAttention"
    ):
        use_rel_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no layer that is served"):
        use_rel_attention(wav2vec2_conformer(position_embeddings_type="rotary")[0])
    with pytest.raises(ValueError, match="attn_type='uni'"):
        use_rel_attention(xlnet_model(attn_type="uni"))
    with pytest.raises(ValueError, match="bi_data=True"):
        use_rel_attention(xlnet_model(bi_data=True))


def test_refuses_masks_that_are_no_padding():
    model, _ = prepared(wav2vec2_conformer)
    use_rel_attention(model)
    layer, positions = model.layers[0].self_attn, model.embed_positions(speech())
    visible = torch.ones(B, 1, T, T, dtype=torch.bool)
    chunks = visible.tril(4)
    hole = visible.clone()
    hole[1, :, :, 5:7] = False
    for mask in (chunks, hole):
        with pytest.raises(ValueError, match=r"attention_mask: .* padding"):
            layer(speech(), mask, positions)
    before = visible.clone()
    before[1, :, :, :7] = False
    out, _ = layer(speech(), before, positions)
    alone, _ = layer(speech()[1:2, 7:], None, positions[:, 7 : 2 * T - 1 - 7])
    torch.testing.assert_close(out[1, 7:], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float64])
def test_parakeets_layer_reads_1_as_visible(dtype):
    model, _ = prepared(parakeet)
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    frames, positions = speech(), model.encode_positions(speech())
    mask = padded(dtype=dtype)[:, None, None].expand(B, 1, T, T)
    expected, got = (m.layers[0].self_attn(frames, positions, mask)[0] for m in (model, ours))
    torch.testing.assert_close(got[padded().bool()], expected[padded().bool()], rtol=1e-9, atol=1e-9)
    with pytest.raises(
        ValueError, match=r"attention_mask: got \[3, 4, 23, 23\], needs \[batch, 1, queries or 1"
    ):
        ours.layers[0].self_attn(frames, positions, mask.expand(B, 4, T, T))


def test_a_whole_model_compiled_as_one_graph():
    model, call = prepared(parakeet)
    use_rel_attention(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(call(compiled, True), call(model, True), rtol=1e-12, atol=1e-12)


def test_xlnets_second_stream_with_padding():
    """There a query does not see its own key, which at padding is no mask but padding's."""
    model = prepared(xlnet)[0].float()  # in float64 theirs stops at its own float32 tensors
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    asked = torch.zeros(B, 2, T)
    asked[:, 0, T - 1] = asked[:, 1, T - 3] = 1
    for mask in (padded().flip(1), padded()):
        given = {"attention_mask": mask, "target_mapping": asked}
        expected, got = (m(tokens(), **given).last_hidden_state for m in (model, ours))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"attention_mask: .* padding"):
        ours(tokens(), target_mapping=asked, perm_mask=torch.eye(T).expand(B, T, T))


def test_xlnet_generates():
    """Its last token is a dummy that perm_mask hides from all, and target_mapping asks for."""
    torch.manual_seed(0)
    model = transformers.XLNetLMHeadModel(prepared(xlnet)[0].config).eval()
    ours = copy.deepcopy(model)
    use_rel_attention(ours)
    expected, got = (m.generate(tokens()[:, :5], max_new_tokens=4, do_sample=False) for m in (model, ours))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"token_type_ids": torch.zeros(B, T, dtype=torch.long)}, "token_type_ids"),
        ({"output_attentions": True}, "output_attentions"),
        ({"perm_mask": torch.ones(B, T, T, dtype=torch.float64).triu()}, "perm_mask: .* target_mapping"),
        ({"perm_mask": torch.eye(T)[-1].expand(B, T, T)}, "perm_mask: .* target_mapping"),
        (
            {
                "perm_mask": (torch.eye(T)[-1] - torch.diag(torch.eye(T)[-1])).expand(B, T, T),
                "target_mapping": torch.eye(T)[-1:].expand(B, 1, T),
            },
            "perm_mask: .* hidden from itself",
        ),
        (
            {"attention_mask": padded(dtype=torch.float64).flip(1), "mems": [speech().transpose(0, 1)] * 2},
            "attention_mask: .* padding",
        ),
    ],
    ids=[
        "segments",
        "attention weights",
        "permutation",
        "last token",
        "seen by itself",
        "padding behind memory",
    ],
)
def test_xlnet_refuses(given, message):
    model, _ = prepared(xlnet)
    use_rel_attention(model)
    with pytest.raises(ValueError, match=message):
        model(tokens(), use_mems=True, **given)

"""`use_rel_attention` on a layer like FastSpeech2-Conformer's, without transformers: masks that change,
copies, files. Beside other libraries' own numbers: tests/parity/test_huggingface.py, test_speech.py."""

from __future__ import annotations

import copy
import io
import threading
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from txl_kernels import cpu
from txl_kernels.integrations import use_rel_attention
from txl_kernels.integrations.masks import Seen, padding, seen

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason="the C++ kernels are not built")

T, C = 23, 16
POSITIONS = torch.randn(1, 2 * T - 1, C, generator=torch.Generator().manual_seed(0))


class FastSpeech2ConformerAttention(nn.Module):
    """By its name taken for transformers' class, whose attributes it has."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(C, C) for _ in range(4))
        self.linear_pos = nn.Linear(C, C, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.randn(2, C // 2)) for _ in range(2))
        self.dropout = nn.Dropout(0.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FastSpeech2ConformerAttention() for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask, POSITIONS)[0]
        return x


class XLNetModel(nn.Module):
    config = types.SimpleNamespace(attn_type="bi", bi_data=True)


def masked(*lengths):
    return (torch.arange(T) < torch.tensor(lengths)[:, None])[:, None]


@pytest.fixture
def model():
    model = Model().eval()
    assert use_rel_attention(model) == 2
    return model


@pytest.mark.parametrize("model", ["xlnet", FastSpeech2ConformerAttention])
def test_what_is_no_model(model):
    with pytest.raises(TypeError, match=r"model: got .* of type (str|type), needs a torch.nn.Module"):
        use_rel_attention(model)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fill", [Tensor.copy_, lambda x, y: np.copyto(x.numpy(), y.numpy())])
def test_a_mask_filled_anew_is_read_anew(model, fill, inference):
    x = torch.randn(3, T, C)
    with torch.inference_mode(inference):
        buffer = masked(T, T, T)
        model(x, buffer)
        fill(buffer, masked(10, 9, T))
        torch.testing.assert_close(model(x, buffer), model(x, masked(10, 9, T)), rtol=0, atol=0)


def test_a_mask_filled_anew_while_the_first_layer_is_skipped(model):
    """As LayerDrop does it in training."""
    x, buffer = torch.randn(3, T, C), masked(T, T, T)
    model(x, buffer)
    np.copyto(buffer.numpy(), masked(10, 9, T).numpy())
    got, expected = (model.layers[1](x, mask, POSITIONS)[0] for mask in (buffer, masked(10, 9, T)))
    assert torch.equal(got, expected)


def test_two_encoders_and_a_mask_filled_anew_in_between():
    model, x = nn.ModuleDict({"speech": Model(), "text": Model()}), torch.randn(3, T, C)
    assert use_rel_attention(model.eval()) == 4
    speech, text = (model[name].layers for name in ("speech", "text"))
    assert speech[0]._txl_masks is speech[1]._txl_masks is not text[0]._txl_masks
    with torch.inference_mode():
        buffer = masked(T, T, T)
        model["speech"](x, buffer)
        buffer.copy_(masked(10, 9, T))
        assert torch.equal(model["text"](x, buffer), model["text"](x, masked(10, 9, T)))


def test_training_after_inference_with_the_same_mask(model):
    x, mask = torch.randn(3, T, C), masked(T, 9, 16)
    with torch.inference_mode():
        expected = model(x, mask)
    out = model(x, mask)
    out.sum().backward()
    assert torch.equal(out.detach(), expected.clone())


def test_one_mask_for_the_whole_batch(model):
    x = torch.randn(3, T, C)
    assert torch.equal(model(x, masked(9)), model(x, masked(9, 9, 9)))


def test_threads_share_a_model(model):
    """Each is given the key range of its own mask, whatever the other has asked between its two looks."""
    masks, found = (masked(T, 9, 16), masked(5, T, 12)), []
    known = model.layers[0]._txl_masks

    @padding
    def read(mask):
        if threading.current_thread() is threading.main_thread():  # the other comes in between
            thread = threading.Thread(target=ask, args=(1,))
            thread.start()
            thread.join()
        return mask[:, 0], mask.new_ones(())

    def ask(i):
        found.append((i, known.of(model.layers[0], masks[i], 3, T, read)))

    ask(0)
    ask(1)
    for i, key_range in found:
        assert key_range.tolist() == [[0, n] for n in masks[i].sum((1, 2)).tolist()]


def test_copies_and_files_compute_with_their_own_weights(model):
    x, mask = torch.randn(3, T, C), masked(T, 9, 16)
    expected, file = model(x, mask), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x, mask), expected)
    replica = model.layers[0]._replicate_for_data_parallel()
    replica._parameters.update(model.layers[0]._parameters)  # as DataParallel does
    for copied in (loaded.layers[0], copy.deepcopy(model.layers[0]), copy.copy(model.layers[0]), replica):
        copied.linear_out = nn.Linear(C, 3)
        assert copied(x, mask, POSITIONS)[0].shape == (3, T, 3)
        assert isinstance(copied, FastSpeech2ConformerAttention)
        copied.linear_out = model.layers[0].linear_out


def test_twice_is_once(model):
    x, mask = torch.randn(3, T, C), masked(T, 9, 16)
    expected = model(x, mask)
    assert use_rel_attention(model) == 2
    assert torch.equal(model(x, mask), expected)


def test_a_method_that_was_replaced_is_refused():
    model = Model()
    model.layers[1].forward = lambda *args: None
    with pytest.raises(ValueError, match="the forward of a FastSpeech2ConformerAttention has been replaced"):
        use_rel_attention(model)


def test_a_layer_whose_class_was_changed_is_refused():
    """parametrize and fully_shard make a class of another name: not to be left out in silence."""
    model = Model()
    nn.utils.parametrize.register_parametrization(model.layers[1], "pos_bias_u", nn.Tanh())
    with pytest.raises(ValueError, match="layer is ParametrizedFastSpeech2ConformerAttention, made of one"):
        use_rel_attention(model)


def test_options_of_a_model_within_another():
    model = Model()
    model.layers[0].config = types.SimpleNamespace(attn_type="flash")  # of something else
    assert use_rel_attention(model) == 2
    model.other = XLNetModel()
    with pytest.raises(ValueError, match="XLNet with attn_type='bi', bi_data=True; needs 'bi', False"):
        use_rel_attention(model)


def test_padding_before_the_keys(model) -> None:
    """On the left, on both sides, none: each row is what it is alone."""
    x, rows = torch.randn(3, T, C), [(7, T), (4, 19), (0, T)]
    mask = torch.zeros(3, 1, T, dtype=torch.bool)
    for row, (start, end) in enumerate(rows):
        mask[row, :, start:end] = True
    layer = model.layers[0]
    got = layer(x, mask, POSITIONS)[0]
    for row, (start, end) in enumerate(rows):
        cut = T - (end - start)
        alone = layer(x[row : row + 1, start:end], None, POSITIONS[:, cut : 2 * T - 1 - cut])[0]
        torch.testing.assert_close(got[row : row + 1, start:end], alone)


def test_a_mask_with_a_hole_is_refused(model) -> None:
    mask = torch.ones(3, 1, T, dtype=torch.bool)
    mask[1, 0, 9] = False
    with pytest.raises(ValueError, match=r"attention_mask: .* this mask hides other keys"):
        model(torch.randn(3, T, C), mask)


def test_a_mask_of_flex_attention_is_refused(model) -> None:
    block_mask = create_block_mask(lambda b, h, i, j: j < 9, None, None, T, T, device="cpu")
    with pytest.raises(
        ValueError, match="attention_mask: got a BlockMask, needs a tensor: load the model with"
    ):
        model(torch.randn(3, T, C), block_mask)


@pytest.mark.parametrize("lengths", [(T, 9, 16), (9,)], ids=["each", "one"])
def test_compiled_as_one_graph(model, lengths) -> None:
    x, mask = torch.randn(3, T, C), masked(*lengths)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, mask), model(x, mask))
    mask[0, 0, 4] = False
    with pytest.raises(RuntimeError, match=r"attention_mask: .* this mask hides other keys"):
        compiled(x, mask)


def test_exported_with_a_mask(model) -> None:
    x, mask = torch.randn(3, T, C), masked(T, 9, 16)
    exported = torch.export.export(model, (x, mask)).module()
    other = masked(4, T, 11)
    torch.testing.assert_close(exported(x, other), model(x, other))


class RelPositionMultiHeadedAttention(nn.Module):
    """ESPnet's by its name, but of another library, as WeNet's, which does not shift."""


class OfAnotherForward(FastSpeech2ConformerAttention):
    def forward(self, x):
        return x


@pytest.mark.parametrize("kind", [RelPositionMultiHeadedAttention, OfAnotherForward])
def test_layers_that_compute_something_else_are_left_alone(kind, model):
    with pytest.raises(ValueError, match="has no layer that is served"):
        use_rel_attention(kind())
    model.other = kind()
    assert use_rel_attention(model) == 2
    assert type(model.other) is kind


# ---- What is found in a mask -----------------------------------------------------------------------


def visible(sees, length=9, T=9):
    """[1, T, T] of a function of query and key, padding from `length` on hidden from all."""
    i, j = torch.arange(T)[:, None], torch.arange(T)
    return (sees(i, j) & (j < length))[None]


@pytest.mark.parametrize("padding_sees", [False, True])
@pytest.mark.parametrize("length", [9, 7])
@pytest.mark.parametrize(
    "sees, expected",
    [
        (lambda i, j: (i - j <= 3) & (j - i <= 1), dict(window=(3, 1))),
        (lambda i, j: (i - j <= 3) & (j <= i), dict(window=(3, 0))),
        (lambda i, j: (j >= i // 3 * 3 - 2) & (j < i // 3 * 3 + 3), dict(chunk=3, left=2)),
        (lambda i, j: (j >= i // 2 * 2) & (j < i // 2 * 2 + 2), dict(chunk=2, left=0)),
    ],
    ids=["context", "causal context", "chunks", "chunks alone"],
)
def test_context_and_chunks_are_found(sees, expected, length, padding_sees):
    """NeMo's padding sees nothing, Nemotron's what there is in its chunk and before."""
    mask = visible(sees, length)
    if not padding_sees:
        mask[:, length:] = False
    found = seen(mask, 1, 9)
    assert found.key_range.tolist() == [[0, length]]
    assert found == Seen(found.key_range, **expected)


@pytest.mark.parametrize(
    "sees",
    [
        lambda i, j: j < i,  # no query sees itself
        lambda i, j: (i - j <= 2) & (j <= i) & (j != 4),
        lambda i, j: (j <= i) & (i != 4),
        lambda i, j: (i - j) % 2 == 0,
        lambda i, j: (j <= i + 1) & ((i < 5) | (j > 1)),
    ],
    ids=["strictly causal", "hole among keys", "hole among queries", "every other", "two windows"],
)
def test_other_patterns_are_refused(sees):
    with pytest.raises(ValueError, match=r"attention_mask: .* this mask hides other keys"):
        seen(visible(sees), 1, 9)

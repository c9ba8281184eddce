"""Weights of the published implementations, made into ours: `txl convert`.

Where the authors' PyTorch code, NVIDIA's and Hugging Face's TransfoXL differ from one another:

| | authors | NVIDIA | Hugging Face | ours |
|---|---|---|---|---|
| softmax: column of cluster c of n, after the shortlist | n - c | n - c | c - 1 | c - 1 |
| biases u, v | one pair | one pair | one, or one per layer | `untie_r` |
| memory of a new text | empty | empty | mem_len zeros, attended | `zero_memory` |
| keys seen under `same_length` | mem_len | mem_len + 1 | mem_len | `same_length_extra` |
| tied tables, projections | stored twice | once, twice | twice; in safetensors once | once |

Of the other attention kinds (authors, NVIDIA): attn_type 1 has clamp_len distances with a row of their own,
not clamp_len + 1 as attn_type 0; attn_type 3 has no clamp_len; attn_type 2 and 3 keep queries apart from keys
and values, and under pre_lnorm make them of what was not normalised, which ours do not. NVIDIA's first
release (2019) is as the authors' in all this.

Sources: kimiyoung/transformer-xl, `pytorch/mem_transformer.py` and `pytorch/utils/proj_adaptive_softmax.py`;
NVIDIA/DeepLearningExamples, the same files in `PyTorch/LanguageModeling/Transformer-XL/pytorch`;
transformers 4.37.2, `models/deprecated/transfo_xl`.

Files are read by safetensors, or by torch with weights_only=True: what would run code is refused.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from torch import Tensor

from txl_model.checkpoint import CONFIG, read_json, refuse_other_files, save_model
from txl_model.config import TransformerXLConfig
from txl_model.data.corpus import VOCABULARY
from txl_model.data.vocabulary import BORDER, EOS, UNKNOWN, Vocabulary
from txl_model.model import TransformerXL

Tensors = Mapping[str, Tensor]
_Global = Callable[..., Any] | tuple[Callable[..., Any], str]  # what a pickle may name, and under which name

# Our names, as regular expressions, and what they are called there. The rest is called alike.
_AUTHORS = {
    r"word_emb\.tables\.(\d+)": r"word_emb.emb_layers.\1.weight",
    r"word_emb\.projs\.(\d+)": r"word_emb.emb_projs.\1",
    r"softmax\.tables\.(\d+)": r"crit.out_layers.\1.weight",
    r"softmax\.biases\.(\d+)": r"crit.out_layers.\1.bias",
    r"softmax\.projs\.(\d+)": r"crit.out_projs.\1",
    r"softmax\.(cluster_weight|cluster_bias)": r"crit.\1",
    r"blocks\.(\d+)\.attn\.(.*)": r"layers.\1.dec_attn.\2",
    r"blocks\.(\d+)\.ff\.net\.(.*)": r"layers.\1.pos_ff.CoreNet.\2",
    r"blocks\.(\d+)\.ff\.layer_norm\.(.*)": r"layers.\1.pos_ff.layer_norm.\2",
    r"bias_u": "r_w_bias",
    r"bias_v": "r_r_bias",
}
_NVIDIA = {
    **_AUTHORS,
    r"softmax\.tables\.(\d+)": r"crit.out_layers_weights.\1",
    r"softmax\.biases\.(\d+)": r"crit.out_layers_biases.\1",
}
_HUGGINGFACE = {
    ours: theirs if theirs.startswith("crit.") else f"transformer.{theirs}"
    for ours, theirs in _AUTHORS.items()
}
# The frequencies of the sinusoids, which are a formula of d_model.
_COMPUTED = re.compile(r"(transformer\.)?pos_emb\.inv_freq")

# Called alike in all three.
_SETTINGS = (
    *("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val", "attn_type"),
    *("tgt_len", "ext_len", "mem_len", "clamp_len", "same_length", "pre_lnorm"),
    *("dropout", "dropatt", "init_std", "proj_init_std"),
)
# Shown by no tensor, and results depend on them.
_NEEDED = ("mem_len", "clamp_len", "same_length", "pre_lnorm")

# What the authors' train.py fixes by the name of the corpus, and takes where its command line says nothing.
_AUTHORS_CUTOFFS = {"wt103": (20000, 40000, 200000), "lm1b": (60000, 100000, 640000)}
_AUTHORS_DEFAULTS = {"dropout": 0.0, "dropatt": 0.0, "init_std": 0.02, "proj_init_std": 0.01}

_RESAVE_AUTHORS = (
    'python -c "import torch; '
    "torch.save(torch.load('model.pt', map_location='cpu').state_dict(), 'state.pt')\""
)
_RESAVE_NVIDIA = (
    "python -c \"import torch; c = torch.load('checkpoint_best.pt', map_location='cpu'); "
    "torch.save({k: c[k] for k in ('model_config', 'model_state')}, 'plain.pt')\""
)


@dataclass
class Converted:
    """A published model in our terms."""

    config: TransformerXLConfig
    tensors: dict[str, Tensor]  # as `TransformerXL.state_dict()`, in the dtype they came in
    notes: list[str] = field(default_factory=list)  # what was changed, assumed or left behind, for people
    vocabulary: Vocabulary | None = None  # where it came along

    def model(self, backend: str | None = None) -> TransformerXL:
        """The model itself, in float32, or wider where the tensors are."""
        model = TransformerXL(self.config, backend)
        dtype = next(iter(self.tensors.values())).dtype
        model.to(torch.promote_types(dtype, torch.float32))
        model.load_state_dict(self.tensors)
        return model

    def save(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and, where there is a vocabulary, vocabulary.json.

        The folder is made if it is not there; a model that was converted into it before is replaced. Raises
        ValueError if it holds anything else, which would be mixed with the model or lose its config.json.
        """
        _check_folder(Path(folder))
        save_model(self.model(), folder)
        if self.vocabulary is not None:
            self.vocabulary.save(Path(folder) / VOCABULARY)
        else:  # that of the model before
            (Path(folder) / VOCABULARY).unlink(missing_ok=True)

    def take_vocabulary(self, symbols: Sequence[str], lower_case: bool = False) -> None:
        """The symbols that came along, in the order of their numbers: words; or what the published scripts
        spell as words, enwik8's bytes (as numbers) and text8's characters (its blank as `_`)."""
        if all(re.fullmatch("[0-9]+", symbol) and int(symbol) < 256 for symbol in symbols):
            self.vocabulary = Vocabulary("byte", tuple(map(int, symbols)), line_end="")
        elif all(len(symbol) == 1 for symbol in symbols):
            spelled = tuple(" " if symbol == "_" else symbol for symbol in symbols)
            self.vocabulary = Vocabulary("char", spelled, lower_case=True, line_end="")
        else:
            line_end, unknown = (
                next((symbol for symbol in candidates if symbol in symbols), None)
                for candidates in ((EOS, BORDER), (UNKNOWN, UNKNOWN.upper()))
            )
            self.vocabulary = Vocabulary("word", tuple(symbols), lower_case, line_end, unknown)
        if len(symbols) != self.config.vocab_size:
            self.notes.append(
                f"the vocabulary has {len(symbols):,} symbols, the model {self.config.vocab_size:,}"
            )


def _check_folder(folder: Path) -> None:
    """Raises ValueError where a converted model would mix with what is there, or take its place."""
    if not folder.is_dir():
        return
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    if "model" not in config or "train" in config:  # a run, its checkpoints and its best model have both
        refuse_other_files(folder, "converted model")


def from_authors(tensors: Tensors, args: Mapping[str, Any]) -> Converted:
    """The authors' model, of any attn_type.

    Args:
        tensors: `model.state_dict()`.
        args: the arguments of their train.py by name; those that do not shape the model are passed over.
            What the tensors show may be left out, and must agree if it is there. They do not show mem_len,
            clamp_len, same_length, pre_lnorm; tgt_len (attn_type 0 and 2); n_head (2); and where the
            clusters of one table begin (an adaptive softmax with div_val 1): `cutoffs`, or `adaptive` and
            `dataset`.

    Raises:
        ValueError: naming what is missing, unexpected, of a wrong shape or in disagreement.
    """
    stated = {**_AUTHORS_DEFAULTS, **_settings(args), "untie_r": False, "zero_memory": False}
    if "tied" in args:
        stated["tie_weight"] = args["tied"]
    if args.get("adaptive") and args.get("dataset") in _AUTHORS_CUTOFFS:
        stated.setdefault("cutoffs", _AUTHORS_CUTOFFS[args["dataset"]])
    return _convert(_Source(tensors, _AUTHORS), stated, clusters_reversed=True)


def from_nvidia(tensors: Tensors, model_config: Mapping[str, Any]) -> Converted:
    """NVIDIA's model, of any attn_type: `model_state` and `model_config` of a checkpoint.

    Raises:
        ValueError: naming what is missing, unexpected, of a wrong shape or in disagreement.
    """
    # The first release names the softmax as the authors do, and has their same_length.
    first = any(name.startswith("crit.out_layers.") for name in tensors)
    stated = {**_settings(model_config), "untie_r": False, "zero_memory": False}
    stated["same_length_extra"] = 0 if first else 1
    stated |= _required(model_config, "model_config", "tie_weight")
    _required(stated, "model_config", "tie_projs", "cutoffs")
    source = _Source(tensors, _AUTHORS if first else _NVIDIA)
    for name in [name for name in tensors if name.startswith("crit.shared_out_projs.")]:
        source.drop_copy(name, name.replace("crit.shared_out_projs.", "word_emb.emb_projs."), stated=True)
    return _convert(source, stated, clusters_reversed=True)


def from_huggingface(tensors: Tensors, config: Mapping[str, Any]) -> Converted:
    """Hugging Face's `TransfoXLLMHeadModel`: its state dict and its config.json.

    Raises:
        ValueError: naming what is missing, unexpected, of a wrong shape or in disagreement.
    """
    epsilon = config.get("layer_norm_epsilon", 1e-5)
    if epsilon != 1e-5:
        raise ValueError(f"layer_norm_epsilon is {epsilon}; our LayerNorm has the published 1e-5")
    stated = {**_settings(config), **_required(config, "config.json", "untie_r"), "zero_memory": True}
    _required(stated, "config.json", "cutoffs")
    # The library's own switch, and what its first releases called it.
    stated["tie_weight"] = config.get("tie_word_embeddings", config.get("tie_weight", True))
    stated.setdefault("tie_projs", (False,) + (True,) * len(stated["cutoffs"]))
    notes = []
    if "tgt_len" not in stated:
        stated["tgt_len"] = 128
        notes.append("config.json has no tgt_len, which only training uses: 128, once their default")

    source = _Source(tensors, _HUGGINGFACE)
    _join_layer_biases(source, config["untie_r"])
    converted = _convert(source, stated, clusters_reversed=False)
    converted.notes += notes
    return converted


def _join_layer_biases(source: _Source, untie_r: bool) -> None:
    """Hugging Face registers u and v with every layer: the layer's own, or the shared ones again."""
    n_layer = source.count("blocks.{}.attn.o_net.weight")
    for bias in ("r_w_bias", "r_r_bias"):
        shared = f"transformer.{bias}"
        of_layers = [f"transformer.layers.{i}.dec_attn.{bias}" for i in range(n_layer)]
        there = {name: source.tensors[name] for name in of_layers if name in source.tensors}
        if untie_r:
            if len(there) != n_layer or len({x.shape for x in there.values()}) > 1:
                found = ", ".join(f"{name} {list(x.shape)}" for name, x in there.items())
                raise ValueError(
                    f"untie_r needs a {bias} in each of {n_layer} layers, found: {found or 'none'}"
                )
            source.tensors[shared] = torch.stack([source.tensors.pop(name) for name in of_layers])
        elif there:
            source.tensors.setdefault(shared, next(iter(there.values())))  # safetensors keeps one of them all
            for name in there:
                source.drop_copy(name, shared, stated=True)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is called alike there and here, as fields of our config."""
    stated = {name: values[name] for name in _SETTINGS if values.get(name) is not None}
    for name in ("n_token", "vocab_size"):
        if values.get(name) is not None:
            stated["vocab_size"] = values[name]
    for name, value in stated.items():
        if not isinstance(value, (int, float)):
            raise ValueError(f"{name} should be a number, got {value!r}")
    for name in ("cutoffs", "tie_projs"):
        value = values.get(name)
        if value is not None:
            if not isinstance(value, (list, tuple)) or not all(isinstance(x, int) for x in value):
                raise ValueError(f"{name} should be a list of numbers, got {value!r}")
            stated[name] = tuple(value)
    if stated.get("d_embed") == -1:
        del stated["d_embed"]  # d_model, as the tables show
    _required(stated, "the configuration", *_NEEDED)
    if stated["clamp_len"] <= 0:  # 0 is off there, too
        stated["clamp_len"] = -1
    return stated


def _required(values: Mapping[str, Any], where: str, *names: str) -> dict[str, Any]:
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}, which the weights do not show")
    return {name: values[name] for name in names}


class _Source:
    """Published tensors, asked for by our names. Each is taken once; all that is wrong is told at once."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        strangers = [name for name, x in tensors.items() if not isinstance(x, Tensor)]
        if strangers:
            raise ValueError(f"this is not a state dict: {_some(strangers)} is no tensor")
        self.tensors = {name: x for name, x in tensors.items() if not _COMPUTED.fullmatch(name)}
        self.names = names
        self.problems: list[str] = []

    def name(self, ours: str) -> str:
        """What it is called there."""
        for pattern, replacement in self.names.items():
            if match := re.fullmatch(pattern, ours):
                return match.expand(replacement)
        return ours

    def __contains__(self, ours: str) -> bool:
        return self.name(ours) in self.tensors

    def count(self, ours: str) -> int:
        """How many there are of a numbered tensor, `{}` for the number."""
        n = 0
        while ours.format(n) in self:
            n += 1
        return n

    def shape(self, ours: str, n_dim: int) -> torch.Size:
        """The shape of a tensor that every model has."""
        name = self.name(ours)
        if name not in self.tensors:
            raise ValueError(f"there is no {name}; the first names are {_some(list(self.tensors))}")
        shape = self.tensors[name].shape
        if len(shape) != n_dim:
            raise ValueError(f"{name} has shape {list(shape)} instead of {n_dim} dimensions")
        return shape

    def drop_copy(self, copy: str, original: str, stated: bool | None) -> bool:
        """Whether `copy` is only `original` again (names of theirs); then it is dropped.

        `stated` is what the configuration says, if anything; ValueError if the tensors say otherwise.
        """
        if copy not in self.tensors:
            return stated is not False
        if stated is False or original not in self.tensors:
            return False
        same = torch.equal(self.tensors[copy], self.tensors[original])
        if stated and not same:
            raise ValueError(f"the configuration ties {copy} to {original}, but their values differ")
        if same:
            del self.tensors[copy]
        return same

    def take(self, ours: str, shape: torch.Size) -> Tensor:
        """The tensor, which leaves. What is wrong with it is for `finish` to say."""
        name = self.name(ours)
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            self.problems.append(f"{name} is missing")
        elif tensor.shape != shape:
            self.problems.append(f"{name} has shape {list(tensor.shape)} instead of {list(shape)}")
        else:
            return tensor
        return torch.empty(shape, device="meta")

    def finish(self) -> None:
        """Raise ValueError for all that was wrong and all that was not taken."""
        problems = self.problems + [f"{name} is unexpected" for name in self.tensors]
        if problems:
            raise ValueError(f"the weights do not fit the configuration: {_some(problems)}")


def _some(items: list[str]) -> str:
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")


def _convert(source: _Source, stated: dict[str, Any], clusters_reversed: bool) -> Converted:
    """What is the same for all three: sizes, ties, names, order of clusters."""
    settings = {**stated, **_sizes(source, stated)}
    settings.pop("ext_len", None)  # here it is no part of the model
    attn_type, clamp_len = settings["attn_type"], settings["clamp_len"]
    if attn_type in (2, 3) and settings["pre_lnorm"]:
        raise ValueError(
            f"attn_type {attn_type} with pre_lnorm: there queries are made of what LayerNorm has not seen, "
            "here they are not, so these weights would make another model"
        )
    if attn_type == 3 or (attn_type == 1 and clamp_len > 0):
        settings["clamp_len"] = clamp_len - 1 if attn_type == 1 else -1
    settings |= _ties(source, stated, n_cluster=len(settings["cutoffs"]), div_val=settings["div_val"])
    config = TransformerXLConfig.from_dict(settings)

    _reshape(source, config)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in TransformerXL(config).state_dict().items()}
    tensors = {name: source.take(name, shape) for name, shape in shapes.items()}
    source.finish()

    notes = []
    if clusters_reversed and config.cutoffs:
        for name in ("softmax.cluster_weight", "softmax.cluster_bias"):
            tensors[name] = tensors[name].flip(0)
        notes.append("the clusters of the softmax, reversed there, were put in order")
    if config.clamp_len != clamp_len:
        notes.append(f"clamp_len {clamp_len} of this attention is {config.clamp_len} here")
    if config.zero_memory:
        notes.append("zero_memory: the memory of a new text is mem_len zeros that are attended, as there")
    if config.same_length_extra:
        notes.append("same_length_extra 1: with same_length a query sees mem_len + 1 keys, as there")
    return Converted(config, tensors, notes)


def _sizes(source: _Source, stated: dict[str, Any]) -> dict[str, Any]:
    """The fields that shapes show. ValueError where the configuration says otherwise, or lacks the rest."""
    d_model, d_attn = source.shape("blocks.0.attn.o_net.weight", 2)
    n_table = max(1, source.count("word_emb.tables.{}"))
    tables = [source.shape(f"word_emb.tables.{i}", 2) for i in range(n_table)]
    shown: dict[str, Any] = {
        "vocab_size": sum(rows for rows, _ in tables),
        "n_layer": source.count("blocks.{}.attn.o_net.weight"),
        "d_model": d_model,
        "d_inner": source.shape("blocks.0.ff.net.0.weight", 2)[0],
        "d_embed": tables[0][1],
        "div_val": tables[0][1] // max(1, tables[1][1]) if n_table > 1 else stated.get("div_val", 1),
    }

    if n_table > 1:
        shown["cutoffs"] = tuple(sum(rows for rows, _ in tables[:i]) for i in range(1, n_table))
    elif "softmax.cluster_weight" in source:
        shown |= _required(stated, "the configuration", "cutoffs")
    else:
        shown["cutoffs"] = ()

    if "blocks.0.attn.r_net.weight" in source:
        shown["attn_type"] = 0
    elif "r_emb" in source:
        shown["attn_type"] = 1 if "r_bias" in source else 3
    else:
        shown["attn_type"] = 2

    r_emb: tuple[int, ...] = ()
    if "r_emb" in source:
        r_emb = source.shape("r_emb", 3 if source.tensors["r_emb"].dim() == 3 else 4)
    if "bias_u" in source:
        per_layer = shown["attn_type"] == 1 or stated["untie_r"]
        shown["n_head"], shown["d_head"] = source.shape("bias_u", 3 if per_layer else 2)[-2:]
    elif len(r_emb) == 4:
        shown["n_head"], shown["d_head"] = r_emb[-2:]
    else:
        n_head = _required(stated, "the configuration", "n_head")["n_head"]
        shown["d_head"] = d_attn // max(1, n_head)

    if r_emb:
        # There is a row for each of tgt_len + ext_len + mem_len distances, here of tgt_len + mem_len.
        shown["tgt_len"] = r_emb[1] - stated["mem_len"]
        if "tgt_len" in stated:
            stated = {**stated, "tgt_len": stated["tgt_len"] + stated.get("ext_len", 0)}
    else:
        _required(stated, "the configuration", "tgt_len")

    for name, value in shown.items():
        if stated.get(name, value) != value:
            raise ValueError(f"{name} is {stated[name]} in the configuration, {value} by the weights")
    return shown


def _ties(source: _Source, stated: dict[str, Any], n_cluster: int, div_val: int) -> dict[str, Any]:
    """tie_weight and tie_projs: as the configuration says and the values confirm, or as the values say."""

    def tied(ours: str, original: str, said: bool | None) -> bool:
        return source.drop_copy(source.name(ours), source.name(original), said)

    n_table = source.count("word_emb.tables.{}")
    said = stated.get("tie_weight")
    ties: dict[str, Any] = {
        "tie_weight": all([tied(f"softmax.tables.{i}", f"word_emb.tables.{i}", said) for i in range(n_table)])
    }
    if "word_emb.projs.0" in source:
        said_projs = stated.get("tie_projs", [None] * (n_cluster + 1))
        ties["tie_projs"] = [
            tied(f"softmax.projs.{i}", f"word_emb.projs.{0 if div_val == 1 else i}", said)
            for i, said in enumerate(said_projs)
        ]
    return ties


def _reshape(source: _Source, config: TransformerXLConfig) -> None:
    """Bring to our shapes what differs in more than its name."""
    tensors = source.tensors
    if config.attn_type in (2, 3):
        for i in range(config.n_layer):
            q, kv, qkv = (source.name(f"blocks.{i}.attn.{x}_net.weight") for x in ("q", "kv", "qkv"))
            if q in tensors and kv in tensors and tensors[q].shape[1:] == tensors[kv].shape[1:]:
                tensors[qkv] = torch.cat([tensors.pop(q), tensors.pop(kv)])
    if config.attn_type == 0 and not config.untie_r:
        for name in (source.name("bias_u"), source.name("bias_v")):
            if name in tensors:
                tensors[name] = tensors[name][None]
    if config.attn_type == 3 and tensors["r_emb"].shape[2:] == (config.d_model,):  # NVIDIA: without heads
        tensors["r_emb"] = tensors["r_emb"].unflatten(-1, (config.n_head, config.d_head))


# ---- Files. ----


def load_authors(path: str | Path, args: Mapping[str, Any]) -> Converted:
    """`from_authors` of a state dict in a file. ValueError or OSError if it cannot be read."""
    advice = (
        "Their model.pt is a pickled module, which runs code when it is loaded. Where it was trained, in the "
        f"folder of their mem_transformer.py, save its weights alone, and convert those: {_RESAVE_AUTHORS}"
    )
    return from_authors(_read(Path(path), advice), args)


class _Vocabulary:
    """What NVIDIA's `Vocab` held when it was saved, as data: none of its code, nor any other, runs."""


def load_nvidia(path: str | Path) -> Converted:
    """`from_nvidia` of a checkpoint file, and its vocabulary. ValueError or OSError if it cannot be read."""
    advice = f"Save what is needed of it, where it was trained, and convert that: {_RESAVE_NVIDIA}"
    as_data: list[_Global] = [argparse.Namespace, (_Vocabulary, "utils.vocabulary.Vocab")]
    checkpoint = _read(Path(path), advice, as_data)
    for name in ("model_config", "model_state"):
        if not isinstance(checkpoint.get(name), dict):
            raise ValueError(f"{path} is no checkpoint of NVIDIA's: it has no {name}")
    converted = from_nvidia(checkpoint["model_state"], checkpoint["model_config"])
    vocabulary = checkpoint.get("vocab")
    symbols = getattr(vocabulary, "idx2sym", None)
    if isinstance(symbols, list) and symbols and all(isinstance(symbol, str) for symbol in symbols):
        converted.take_vocabulary(symbols, bool(getattr(vocabulary, "lower_case", False)))
    return converted


def load_huggingface(folder: str | Path) -> Converted:
    """`from_huggingface` of what `save_pretrained` wrote. ValueError or OSError if it cannot be read."""
    folder = Path(folder)
    config = _read_settings(folder / "config.json")
    weights = folder / "model.safetensors"
    if not weights.is_file():
        weights = folder / "pytorch_model.bin"
    if not weights.is_file():
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    advice = "Save it without pickle: model.save_pretrained(folder, safe_serialization=True)"
    converted = from_huggingface(_read(weights, advice), config)
    for name in ("vocab.pkl", "vocab.bin"):
        if (folder / name).is_file():
            converted.notes.append(f"{name} is a pickle, which runs code when it is loaded: left behind")
    if (folder / "vocab.txt").is_file():
        symbols = (folder / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        converted.take_vocabulary(symbols)
    return converted


def _read(path: Path, advice: str, as_data: list[_Global] | None = None) -> dict[str, Any]:
    """A dict of tensors from a file. ValueError, with the advice, if loading it would run code."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals(as_data or []):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # a damaged file may fail in any way, OSError (invalid argument) among them
        refused = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        if refused:
            raise ValueError(f"{path} holds a {refused[1]}, and so is not loaded. {advice}") from error
        raise ValueError(f"{path} cannot be read: it is damaged, or no file of tensors") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__} instead of a dict of tensors")
    return loaded


def _read_settings(path: Path) -> dict[str, Any]:
    """Names and values from JSON, from YAML, or from the log.txt where the authors' train.py lists them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".txt":
            return {name: _literal(value) for name, value in re.findall(r"(?m)^ {4}- (\w+) : (.*)$", text)}
        settings = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__} instead of names and values")
    return settings


def _literal(text: str) -> Any:
    """The value that Python printed so; a string is printed bare."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# ---- The command line. ----


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `txl convert`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="huggingface|authors|nvidia")
    huggingface = kinds.add_parser("huggingface", help="a TransfoXL folder")
    huggingface.add_argument("source", type=Path, help="folder with config.json and the weights")
    nvidia = kinds.add_parser("nvidia", help="a checkpoint of NVIDIA's DeepLearningExamples")
    nvidia.add_argument("source", type=Path, help="checkpoint_best.pt or another")
    authors = kinds.add_parser(
        "authors",
        help="a state dict of the authors' PyTorch code",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # a command is not to be wrapped
        epilog=f"model.pt is a pickled module, and not loaded. Make state.pt of it:\n\n  {_RESAVE_AUTHORS}",
    )
    authors.add_argument("source", type=Path, help="state.pt")
    authors.add_argument("--config", type=Path, help="the arguments of train.py: log.txt, JSON or YAML")
    group = authors.add_argument_group("in place of --config, or to change it: what the weights do not show")
    group.add_argument("--tgt-len", type=int, help="tokens of a training segment")
    group.add_argument("--mem-len", type=int, help="tokens of memory")
    group.add_argument("--clamp-len", type=int, help="the furthest distance told apart; -1: none")
    flag = argparse.BooleanOptionalAction
    group.add_argument("--same-length", action=flag, help="every query sees mem_len keys")
    group.add_argument("--pre-lnorm", action=flag, help="LayerNorm before each sub-layer")
    group.add_argument("--n-head", type=int, help="heads; only for attn_type 2")
    group.add_argument("--cutoffs", type=_integers, help="only for an adaptive softmax with div_val 1")
    group.add_argument("--dropout", type=float, help="for further training (0)")
    group.add_argument("--dropatt", type=float, help="for further training (0)")
    for kind in (huggingface, nvidia, authors):
        kind.add_argument("out", type=Path, help="folder to write")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run_convert(args: argparse.Namespace) -> None:
    """`txl convert`. Raises ValueError or OSError saying what is wrong."""
    if args.kind == "huggingface":
        converted = load_huggingface(args.source)
    elif args.kind == "nvidia":
        converted = load_nvidia(args.source)
    else:
        settings = _read_settings(args.config) if args.config else {}
        options = {name: value for name, value in vars(args).items() if name in (*_SETTINGS, "cutoffs")}
        settings |= {name: value for name, value in options.items() if value is not None}
        converted = load_authors(args.source, settings)
    converted.save(args.out)
    n = sum(x.numel() for x in converted.tensors.values())
    print(f"{args.out}: {n:,} parameters")
    for note in converted.notes:
        print(f"  {note}")

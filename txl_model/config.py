"""The shape of a model, with the field names of the published configurations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from txl_kernels.api import MAX_HEAD_DIM
from txl_model.fields import Fields, check_at_least, option
from txl_model.presets import preset

NOT_SCORED = -100  # the label of a prediction that does not count, as torch's cross_entropy has it


@dataclass
class TransformerXLConfig(Fields):
    """Everything that fixes a model. The defaults are those of the published enwik8 model, for bytes.

    `txl train --help` says what each field is. Raises ValueError, naming the field, for a value that makes
    no model.
    """

    vocab_size: int = option(256, "number of different tokens")
    n_layer: int = option(12, "layers")
    n_head: int = option(8, "attention heads of a layer")
    d_model: int = option(512, "width of the hidden states")
    d_head: int = option(64, "width of a head")
    d_inner: int = option(2048, "width inside the feed-forward part")
    d_embed: int = option(-1, "width of the (first) embedding table; -1: d_model")
    dropout: float = option(0.1, "dropout of activations and position embeddings")
    dropatt: float = option(0.0, "dropout of attention probabilities")
    tgt_len: int = option(512, "tokens of a training segment")
    mem_len: int = option(512, "tokens each layer remembers from before the segment")
    clamp_len: int = option(-1, "further distances share this one's position embedding; -1: each has its own")
    same_length: bool = option(False, "every query sees itself and the mem_len - 1 tokens before it, no more")
    same_length_extra: int = option(0, "keys seen beyond that: 0 as the authors' code, 1 as NVIDIA's")
    attn_type: int = option(
        0,
        "0 relative sinusoid (Dai), 1 learned relative (Shaw), "
        "2 absolute sinusoid (Vaswani), 3 absolute learned (Al-Rfou)",
    )
    pre_lnorm: bool = option(False, "LayerNorm before each sub-layer instead of after it")
    untie_r: bool = option(False, "each layer has its own biases u and v")
    tie_weight: bool = option(True, "the output tables are the embedding tables")
    cutoffs: tuple[int, ...] = option((), "adaptive softmax: first token of each cluster after the shortlist")
    div_val: int = option(1, "adaptive softmax: each cluster's embedding is this many times narrower")
    tie_projs: tuple[bool, ...] = option(
        (), "per cluster, 1: the output projection is the embedding's; not given: none is"
    )
    zero_memory: bool = option(False, "memory starts as mem_len zeros that are attended (Hugging Face, TF)")
    variational: bool = option(False, "dropout drops the same units at every time step of a segment")
    init_std: float = option(0.02, "standard deviation of the initial weights")
    proj_init_std: float = option(0.01, "the same of the embedding and output projections")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tie_projs = self.tie_projs or (False,) * (len(self.cutoffs) + 1)
        if self.d_embed == -1:
            self.d_embed = self.d_model
        for name in (
            "vocab_size",
            "n_layer",
            "n_head",
            "d_model",
            "d_head",
            "d_inner",
            "d_embed",
            "div_val",
            "tgt_len",
        ):
            check_at_least(1, **{name: getattr(self, name)})
        for name in ("dropout", "dropatt"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("init_std", "proj_init_std"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number, not negative, got {getattr(self, name)}")
        for name in ("mem_len", "same_length_extra"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.same_length and self.mem_len + self.same_length_extra == 0:
            raise ValueError(
                "same_length needs mem_len >= 1: with 0 no query may see even itself. Leave same_length out, "
                "or name a mem_len"
            )
        if self.clamp_len < -1:
            raise ValueError(f"clamp_len must be -1 (off) or a distance, got {self.clamp_len}")
        if self.attn_type not in (0, 1, 2, 3):
            raise ValueError(f"attn_type must be 0, 1, 2 or 3, got {self.attn_type}")
        if self.attn_type in (0, 2) and self.d_model % 2:
            raise ValueError(f"d_model must be even (half sines, half cosines), got {self.d_model}")
        widest = MAX_HEAD_DIM - (self.attn_type == 1)  # whose bias takes one more
        if self.d_head > widest:
            raise ValueError(
                f"d_head must be at most {widest} with attn_type {self.attn_type}, got {self.d_head}"
            )
        if self.attn_type == 3 and self.n_head * self.d_head != self.d_model:
            raise ValueError(
                f"attn_type 3 adds n_head * d_head = {self.n_head * self.d_head} position values to "
                f"d_model = {self.d_model} hidden ones: they must be as many"
            )
        bounds = (0, *self.cutoffs, self.vocab_size)
        if any(left >= right for left, right in pairwise(bounds)):
            raise ValueError(
                f"cutoffs must rise strictly between 0 and vocab_size = {self.vocab_size}, got {self.cutoffs}"
            )
        if len(self.tie_projs) != len(self.cutoffs) + 1:
            raise ValueError(
                f"tie_projs must have one entry per cluster, {len(self.cutoffs) + 1}, got {self.tie_projs}"
            )
        if self.div_val > 1 and self.d_embed // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(
                f"div_val = {self.div_val} leaves nothing of d_embed = {self.d_embed} "
                f"for cluster {len(self.cutoffs)}"
            )

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes this configuration of again; JSON can hold it. Fields that follow others
        are left to do so, also where those are changed."""
        values = super().to_dict()
        if self.d_embed == self.d_model:
            values["d_embed"] = -1
        if not any(self.tie_projs):
            values["tie_projs"] = []
        return values

    @property
    def max_klen(self) -> int:
        """Distances that the learned tables (attn_type 1 and 3) have rows for."""
        return self.tgt_len + self.mem_len

    @property
    def relative(self) -> bool:
        """Whether attention knows distances; otherwise positions are added to the hidden states."""
        return self.attn_type in (0, 1)

    @property
    def d_key(self) -> int:
        """Width of a head's keys and values: attn_type 1 has one more for its bias."""
        return self.d_head + (self.attn_type == 1)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TransformerXLConfig:
        """A published configuration ("enwik8-base", ...: `txl_model.presets`), with some fields changed."""
        return cls.from_dict({**preset(name, "model"), **overrides})

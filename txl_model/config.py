"""The shape of a model, with the field names of the published configurations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

from txl_model.presets import preset


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class TransformerXLConfig:
    """Everything that fixes a model. The defaults are those of the published enwik8 model, for bytes.

    Raises ValueError, naming the field, for a value that makes no model.
    """

    vocab_size: int = _field(256, "number of different tokens")
    n_layer: int = _field(12, "layers")
    n_head: int = _field(8, "attention heads of a layer")
    d_model: int = _field(512, "width of the hidden states")
    d_head: int = _field(64, "width of a head")
    d_inner: int = _field(2048, "width inside the feed-forward part")
    d_embed: int = _field(-1, "width of the (first) embedding table; -1: d_model")
    dropout: float = _field(0.1, "dropout of activations and position embeddings")
    dropatt: float = _field(0.0, "dropout of attention probabilities")
    tgt_len: int = _field(512, "tokens of a training segment")
    mem_len: int = _field(512, "tokens each layer remembers from before the segment")
    clamp_len: int = _field(-1, "further distances share this one's position embedding; -1: each has its own")
    same_length: bool = _field(False, "every query sees itself and the mem_len - 1 tokens before it, no more")
    same_length_extra: int = _field(0, "keys seen beyond that: 0 as the authors' code, 1 as NVIDIA's")
    attn_type: int = _field(
        0,
        "0 relative sinusoid (Dai), 1 learned relative (Shaw), "
        "2 absolute sinusoid (Vaswani), 3 absolute learned (Al-Rfou)",
    )
    pre_lnorm: bool = _field(False, "LayerNorm before each sub-layer instead of after it")
    untie_r: bool = _field(False, "each layer has its own biases u and v")
    tie_weight: bool = _field(True, "the output tables are the embedding tables")
    cutoffs: tuple[int, ...] = _field((), "adaptive softmax: first token of each cluster after the shortlist")
    div_val: int = _field(1, "adaptive softmax: each cluster's embedding is this many times narrower")
    tie_projs: tuple[bool, ...] = _field(
        (), "per cluster: the output projection is the embedding's; (): none is"
    )
    zero_memory: bool = _field(False, "memory starts as mem_len zeros that are attended (Hugging Face, TF)")
    variational: bool = _field(False, "dropout drops the same units at every time step of a segment")
    init_std: float = _field(0.02, "standard deviation of the initial weights")
    proj_init_std: float = _field(0.01, "the same of the embedding and output projections")

    def __post_init__(self) -> None:
        self.cutoffs = tuple(self.cutoffs)
        self.tie_projs = tuple(self.tie_projs) or (False,) * (len(self.cutoffs) + 1)
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
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "dropatt"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        for name in ("mem_len", "same_length_extra"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.clamp_len < -1:
            raise ValueError(f"clamp_len must be -1 (off) or a distance, got {self.clamp_len}")
        if self.attn_type not in (0, 1, 2, 3):
            raise ValueError(f"attn_type must be 0, 1, 2 or 3, got {self.attn_type}")
        if self.attn_type in (0, 2) and self.d_model % 2:
            raise ValueError(f"d_model must be even (half sines, half cosines), got {self.d_model}")
        if self.attn_type == 1 and self.d_head > 255:
            raise ValueError(f"attn_type 1 needs d_head <= 255 (its bias takes one more), got {self.d_head}")
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

    @property
    def max_klen(self) -> int:
        """Distances that the learned tables (attn_type 1 and 3) have rows for."""
        return self.tgt_len + self.mem_len

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> TransformerXLConfig:
        """A published configuration ("enwik8-base", ...: `txl_model.presets`), with some fields changed."""
        return cls.from_dict({**preset(name, "model"), **overrides})

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` makes this config of again; JSON can hold it."""
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TransformerXLConfig:
        """Raises ValueError for a field there is none of."""
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"TransformerXLConfig has no field {', '.join(sorted(unknown))}")
        return cls(**values)

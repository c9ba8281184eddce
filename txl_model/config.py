"""The shape of a model, with the field names of the published configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TransformerXLConfig:
    """Everything that fixes a model. The defaults are those of the published enwik8 base model."""

    vocab_size: int = 256
    n_layer: int = 12
    n_head: int = 8
    d_model: int = 512
    d_head: int = 64
    d_inner: int = 2048
    dropout: float = 0.1
    dropatt: float = 0.0  # dropout of the attention probabilities
    mem_len: int = 512  # hidden states each layer remembers; evaluation may ask for another length
    clamp_len: int = -1  # further distances share this one's position embedding; -1: each has its own
    same_length: bool = False  # every query sees itself and the mem_len - 1 tokens before it, no more
    pre_lnorm: bool = False  # LayerNorm before each sub-layer instead of after it
    untie_r: bool = False  # each layer has its own u and v
    tie_weight: bool = True  # the head's table is the embedding's
    init_std: float = 0.02  # of the initial weights

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layer", "n_head", "d_model", "d_head", "d_inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("dropout", "dropatt"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even (half sines, half cosines), got {self.d_model}")
        if self.mem_len < 0:
            raise ValueError(f"mem_len must not be negative, got {self.mem_len}")
        if self.clamp_len < -1:
            raise ValueError(f"clamp_len must be -1 (off) or a distance, got {self.clamp_len}")

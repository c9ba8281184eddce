"""Transformer-XL on top of `txl_kernels.rel_attention`."""

from txl_model.config import TransformerXLConfig
from txl_model.memory import Memory
from txl_model.model import TransformerXL, TransformerXLOutput

__all__ = ["Memory", "TransformerXL", "TransformerXLConfig", "TransformerXLOutput"]

"""Transformer-XL's relative attention with memory, as fused kernels for PyTorch.

`rel_attention` is the operation, `backends` says what can compute it here. `linear` and `dropout` are layers
for models on CPUs. `txl_kernels.integrations` switches other libraries' models to `rel_attention`.
"""

from importlib.metadata import PackageNotFoundError, version

from txl_kernels.api import backends, rel_attention
from txl_kernels.dropout import dropout
from txl_kernels.linear import linear
from txl_kernels.registry import BackendUnavailable

__all__ = ["BackendUnavailable", "__version__", "backends", "dropout", "linear", "rel_attention"]

try:
    __version__ = version("txl-kernels")
except PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "0+unknown"

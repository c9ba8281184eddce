"""Layers that attention and feed-forward share."""

from __future__ import annotations

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from txl_kernels import dropout, linear


class Linear(nn.Linear):
    """torch's, and as fast as memory where a few tokens are read at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def is_plain(module: nn.Module) -> bool:
    """Whether a call of it is its class's `forward` on plain weights and nothing else: no hook, no `forward`
    of its own, no quantised weight, of which torch's own layer alone may know what to do."""
    hooks = (
        nn.modules.module._has_any_global_hook(),
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    if any(hooks) or "forward" in vars(module):
        return False
    weight = module._parameters.get("weight")
    return type(weight) in (Tensor, nn.Parameter, FakeTensor, type(None))


class Dropout(nn.Module):
    """Dropout of [B, T, d]; `variational`: the same units at every time step (Gal and Ghahramani, 2016)."""

    def __init__(self, p: float, variational: bool = False) -> None:
        super().__init__()
        self.p, self.variational = p, variational

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        return x * self._mask(x) if self.variational else dropout(x, self.p)

    def _mask(self, x: Tensor) -> Tensor:
        return F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (", variational" if self.variational else "")


class ReluDropout(Dropout):
    """ReLU, then dropout. Its result alone says what backward needs: no mask and no input is kept."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x.relu()
        # No factor is negative: the order does not matter, and this one keeps nothing but the result.
        return (x * self._mask(x)).relu() if self.variational else dropout(x, self.p, relu=True)

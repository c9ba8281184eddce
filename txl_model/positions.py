"""Sinusoids of distances (Dai et al. section 3.3, Vaswani et al. section 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor


def position_embedding(n_rows: int, d_model: int, device: torch.device | None = None) -> Tensor:
    """Sinusoids of the distances n_rows - 1, ..., 1, 0: [n_rows, d_model], sines first, then cosines.

    Always float32: bfloat16 has no 257 and float16 no 2049, so far distances would fall together.
    """
    distance = torch.arange(n_rows - 1, -1, -1, device=device, dtype=torch.float32)
    inv_freq = 10000 ** (-torch.arange(0, d_model, 2, device=device, dtype=torch.float32) / d_model)
    angle = torch.outer(distance, inv_freq)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def last_rows(table: Tensor, n_rows: int) -> Tensor:
    """The rows of the n_rows nearest distances, furthest first; row 0 again where the table is too short."""
    missing = n_rows - len(table)
    if missing > 0:
        table = torch.cat([table[:1].expand(missing, *table.shape[1:]), table])
    return table[len(table) - n_rows :]

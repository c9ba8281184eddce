"""Attention in chunks, as streaming Conformers have it, by one call of `rel_attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from txl_kernels.api import rel_attention


def attention_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    bias_u: Tensor | None = None,
    bias_v: Tensor | None = None,
    *,
    chunk: int,
    left: int,
    r_zero: int | None = None,
    key_range: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """`rel_attention` of frames that see all of their own chunk and `left` frames before it.

    Each chunk is a short sequence with a memory of its own, and all of them are the batch of one call. That
    takes a copy of k and v of 1 + left / chunk times their size.

    Args:
        q, k, v: [B, H, T, D].
        r: [H, N, D], row r_zero for distance 0, rows before it for keys that are further back.
        bias_u, bias_v, scale, dropout_p, backend: as in `rel_attention`.
        chunk: frames of a chunk, 1 or more; the last one may be shorter.
        left: frames seen before the chunk, 0 or more.
        r_zero: None: left + chunk - 1, so that N = left + 2 chunk - 1 rows hold all distances.
        key_range: [B, 2] int32, the frames that exist. None: all.

    Returns:
        [B, H, T, D]. 0 where nothing that a frame would see exists.

    Raises:
        ValueError: chunk or left is out of range, or q, k and v have not the same length.
        What `rel_attention` raises.
    """
    if chunk < 1 or left < 0:
        raise ValueError(f"chunk, left: got {chunk}, {left}, needs at least 1 and 0")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        given = ", ".join(str(x.shape[2]) for x in (q, k, v))
        raise ValueError(f"q, k, v: got {given} frames, needs the same number in all")
    B, T = q.shape[0], q.shape[2]
    n = max(-(-T // chunk), 1)
    behind = n * chunk - T

    def of_chunks(x: Tensor) -> Tensor:
        """[B n, H, left + chunk, D]"""
        x = F.pad(x, (0, 0, left, behind)).unfold(2, left + chunk, chunk)
        return x.permute(0, 2, 1, 4, 3).flatten(0, 1)

    start = left - chunk * torch.arange(n, device=q.device)  # where frame 0 is among the keys of a chunk
    if key_range is None:  # [0, T], made where q is
        key_range = T * torch.arange(2, device=q.device)[None]
    exist = (start[:, None] + key_range[:, None]).clamp(0, left + chunk)  # [B or 1, n, 2]
    out = rel_attention(
        F.pad(q, (0, 0, 0, behind)).unflatten(2, (n, chunk)).transpose(1, 2).flatten(0, 1),
        of_chunks(k),
        of_chunks(v),
        r,
        bias_u,
        bias_v,
        causal=False,
        r_zero=left + chunk - 1 if r_zero is None else r_zero,
        key_range=exist.expand(B, n, 2).flatten(0, 1).int(),
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )
    return out.unflatten(0, (B, n)).transpose(1, 2).flatten(2, 3)[:, :, :T]

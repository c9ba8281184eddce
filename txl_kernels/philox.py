"""Dropout's keep mask: a pure function of (seed, b, h, i, j), the same on every backend.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), in exact int64
arithmetic. csrc/philox.h holds the same definition for the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64-bit product, by halves of the constant: nothing overflows int64."""
    upper, lower = (constant >> 16) * x, (constant & 0xFFFF) * x  # < 2^48
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words from a counter of four and a key of two: int64 tensors that hold uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def threshold(p: float) -> int:
    """A word below this is dropped."""
    return min(_MASK, round(p * 2**32))


def keep_mask(seed: Tensor, p: float, B: int, H: int, L: int, K: int, device: torch.device | str) -> Tensor:
    """True where dropout keeps a probability: bool [B, H, L, K].

    64 neighbouring keys share 16 calls, 16 neighbouring keys the word they take from theirs.
    """
    i, h, b = (torch.arange(n, device=device) for n in (L, H, B))
    j = torch.arange(K, device=device)
    calls = torch.arange((K + 63) // 64 * 16, device=device)
    seed = seed.reshape(())
    words = philox4x32(
        (calls, i[:, None], h[:, None, None], b[:, None, None, None]),
        (seed & _MASK, (seed >> 32) & _MASK),
    )
    keep = torch.cat([word >= threshold(p) for word in words], dim=-1)  # [B, H, L, 4 * calls]
    call, word_of_call = (j >> 6) * 16 + (j & 15), (j >> 4) & 3
    return keep[..., word_of_call * calls.shape[0] + call]


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed as an int64 tensor of one element; None draws it from torch's default generator."""
    if isinstance(seed, Tensor):
        return seed
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    # The same 64 bits as a signed number.
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)

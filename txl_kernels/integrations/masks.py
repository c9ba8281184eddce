"""`key_range` from the masks that other libraries give their layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Of a mask: which keys exist, [B or 1, K], and whether that is all the mask says, [].
Read = Callable[[Tensor], tuple[Tensor, Tensor]]


class _Found(NamedTuple):
    mask: Callable[[], Tensor | None]
    state: tuple[int | None, bool, int, Read]
    by: int  # the layer that asked
    key_range: Tensor


class KeyRanges:
    """`key_range` of the mask that all layers are given one after the other, found once, for the first."""

    def __init__(self) -> None:
        self._found: _Found | None = None  # read and replaced as a whole: threads may share the model

    def of(
        self,
        layer: nn.Module,
        mask: Tensor | None,
        batch: int,
        keys: int,
        read: Read,
    ) -> Tensor | None:
        """[B, 2], or None without a mask. ValueError if the mask says more, or is of other sizes."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"attention_mask: got a {type(mask).__name__}, needs a tensor: load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        if torch.compiler.is_compiling():  # layers that compute the same: the compiler sees that itself
            key_range, is_padding = _key_range(mask, batch, keys, read)
            torch._assert_async(is_padding, _OTHER_MASK)
            return key_range.expand(batch, 2)
        # A mask may be filled anew; in inference mode nothing counts that, but the same layer asks again. And
        # what is made there cannot be used where gradients are wanted.
        version = None if mask.is_inference() else mask._version
        state = (version, torch.is_inference_mode_enabled(), keys, read)
        found = self._found
        known = found is not None and found.mask() is mask and found.state == state
        if found is None or not known or (version is None and found.by == id(layer)):
            key_range, is_padding = _key_range(mask, batch, keys, read)
            if not is_padding:
                raise ValueError(_OTHER_MASK)
            found = self._found = _Found(weakref.ref(mask), state, id(layer), key_range)
        return found.key_range if len(found.key_range) == batch else found.key_range.expand(batch, 2)

    def __reduce__(self) -> tuple[type[KeyRanges], tuple[()]]:
        return KeyRanges, ()  # a copy of the model begins anew


_OTHER_MASK = (
    "attention_mask: the fused attention knows padding before and behind a sequence's keys (memory "
    "included), the same for all queries; this mask hides other keys (so do most perm_masks of XLNet)"
)


def _key_range(mask: Tensor, batch: int, keys: int, read: Read) -> tuple[Tensor, Tensor]:
    """The keys that exist, [B or 1, 2], and whether that is all the mask says, []."""
    exist, is_all = read(mask)
    if exist.shape[1] != keys or exist.shape[0] not in (1, batch):
        given = f"{list(mask.shape)} with {keys} keys of {batch} sequences"
        raise ValueError(f"attention_mask: got {given}, needs a column for each key")
    start, count = exist.int().argmax(1), exist.sum(1)
    j = torch.arange(keys, device=mask.device) - start[:, None]
    is_run = (exist == ((j >= 0) & (j < count[:, None]))).all()
    return torch.stack([start, start + count], 1).int(), is_all & is_run


def read_conformer_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: true or, if it is to be added to scores, 0 where a query may see a key, [B, 1, L or 1, K].

    Queries of padding may see no key.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"attention_mask: got {list(mask.shape)}, needs [batch, 1, queries or 1, keys]")
    visible = mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0
    keys = visible.any(1)
    return keys, (visible == (visible.any(2, keepdim=True) & keys[:, None])).all()

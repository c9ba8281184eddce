"""What the masks say that other libraries give their layers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class _Found(NamedTuple):
    mask: Callable[[], Tensor | None]
    state: tuple[Any, ...]
    by: set[int]  # the layers that have asked
    result: Any


class Masks:
    """What the mask says that all layers of a stack are given one after the other, found once, for the first.

    A mask may be filled anew, which torch does not always count (not in inference mode, not through NumPy):
    so it is read anew as soon as a layer asks again.
    """

    def __init__(self) -> None:
        self._found: _Found | None = None  # read and replaced as a whole: threads may share the model

    def of(
        self,
        layer: nn.Module,
        mask: Tensor | None,
        batch: int,
        keys: int,
        read: Callable[[Tensor, int, int], T],
    ) -> T | None:
        """read(mask, batch, keys), or None without a mask."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"attention_mask: got a {type(mask).__name__}, needs a tensor: load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        if torch.compiler.is_compiling():  # layers that compute the same: the compiler sees that itself
            return read(mask, batch, keys)
        version = None if mask.is_inference() else mask._version
        # What is made in inference mode cannot be used where gradients are wanted.
        state = (version, torch.is_inference_mode_enabled(), batch, keys, read)
        found = self._found
        if found is None or found.mask() is not mask or found.state != state or id(layer) in found.by:
            found = self._found = _Found(weakref.ref(mask), state, set(), read(mask, batch, keys))
        found.by.add(id(layer))
        return found.result

    def __reduce__(self) -> tuple[type[Masks], tuple[()]]:
        return Masks, ()  # a copy of the model begins anew


_OTHER_MASK = (
    "attention_mask: the fused attention knows padding before and behind a sequence's keys (memory "
    "included), the same for all queries, and of ESPnet, NeMo and Nemotron, not compiled, limited context "
    "and chunks; this mask hides other keys (so do most perm_masks of XLNet)"
)


def padding(read: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, int, int], Tensor]:
    """Makes `key_range`, [B, 2], of a mask, from a function that tells which keys exist, [B or 1, K], and
    whether that is all the mask says, []. ValueError if it says more, or is of other sizes.
    """

    @functools.wraps(read)
    def key_range(mask: Tensor, batch: int, keys: int) -> Tensor:
        found, is_padding = _key_range(mask, batch, keys, *read(mask))
        check(is_padding, _OTHER_MASK)
        return found

    return key_range


def check(right: Tensor, message: str) -> None:
    """Raises ValueError, or in a compiled model RuntimeError, if `right`, [], is not true."""
    if torch.compiler.is_compiling():
        torch._assert_async(right, message)
    elif not right:
        raise ValueError(message)


def _key_range(mask: Tensor, batch: int, keys: int, exist: Tensor, is_all: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 2], and whether that is all the mask says, []."""
    if exist.shape[1] != keys or exist.shape[0] not in (1, batch):
        given = f"{list(mask.shape)} with {keys} keys of {batch} sequences"
        raise ValueError(f"attention_mask: got {given}, needs a column for each key")
    start, count = exist.int().argmax(1), exist.sum(1)
    j = torch.arange(keys, device=mask.device) - start[:, None]
    is_run = (exist == ((j >= 0) & (j < count[:, None]))).all()
    return torch.stack([start, start + count], 1).int().expand(batch, 2), is_all & is_run


def read_conformer_mask(mask: Tensor) -> tuple[Tensor, Tensor]:
    """mask: true or, if it is to be added to scores, 0 where a query may see a key, [B, 1, L or 1, K].

    Queries of padding may see no key.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"attention_mask: got {list(mask.shape)}, needs [batch, 1, queries or 1, keys]")
    return _read_visible(mask[:, 0] if mask.dtype is torch.bool else mask[:, 0] == 0)


def _read_visible(visible: Tensor) -> tuple[Tensor, Tensor]:
    """visible: true where a query may see a key, [B, L or 1, K]."""
    keys = visible.any(1)
    return keys, (visible == (visible.any(2, keepdim=True) & keys[:, None])).all()


class Seen(NamedTuple):
    """The keys that exist, and of these the ones in a window around the query or in chunks."""

    key_range: Tensor | None = None  # [B, 2]
    window: tuple[int, int] = (-1, -1)
    chunk: int = 0  # frames of a chunk; 0: no chunks
    left: int = 0  # frames seen before the query's chunk


_padding_alone = padding(_read_visible)


def seen(visible: Tensor, batch: int, keys: int) -> Seen:
    """visible: true where a query may see a key, [B, L or 1, K]; limited context and chunks (as NeMo makes
    them) are found where queries and keys are the same frames, and nothing is compiled.
    """
    if visible.dim() != 3:
        raise ValueError(f"attention_mask: got {list(visible.shape)}, needs [batch, queries or 1, keys]")
    if torch.compiler.is_compiling() or visible.shape[1] != keys:
        return Seen(_padding_alone(visible, batch, keys))
    # Padding is what nobody sees; what it sees means nothing. All others see themselves.
    exist, all_see_the_same = _read_visible(visible)
    key_range, is_padding = _key_range(visible, batch, keys, exist, all_see_the_same)
    if is_padding:
        return Seen(key_range)
    see_themselves = (visible.diagonal(dim1=1, dim2=2) == exist).all()
    key_range, is_run = _key_range(visible, batch, keys, exist, see_themselves)
    keys_exist, at_padding = exist[:, None], ~exist[:, :, None]
    shown = visible.any(0)
    j = torch.arange(keys, device=visible.device)
    i = j[:, None]
    behind = (i - j)[shown]
    left, right = int(behind.max()), -int(behind.min())
    in_window = visible == (keys_exist & (i - j <= left) & (j - i <= right))
    if is_run and (in_window | at_padding).all():
        return Seen(key_range, (left, right))
    chunk = int(shown[0].sum())
    if is_run and chunk:
        first = i // chunk * chunk
        left = int((first - j)[shown].max())
        in_chunks = visible == (keys_exist & (j >= first - left) & (j < first + chunk))
        if (in_chunks | at_padding).all():
            return Seen(key_range, chunk=chunk, left=left)
    raise ValueError(_OTHER_MASK)

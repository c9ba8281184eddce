"""Text from a model: one token at a time, each with the memory of all before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from txl_model.data.vocabulary import Vocabulary
from txl_model.evaluate import eval_mode
from txl_model.fields import check_at_least
from txl_model.memory import Memory
from txl_model.model import TransformerXL

FINISHED = -1  # what a row gives after its stop token
_NO_TOKEN = -2  # where logits are NaN


def generate(
    model: TransformerXL,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 40,
    top_p: float = 1.0,
    seed: int | None = None,
    stop_tokens: Iterable[int] = (),
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    segment_len: int | None = None,
    n_symbols: int | None = None,
) -> Iterator[Tensor]:
    """Continue prompts, step by step.

    Every row is what its prompt alone would give. Prompts of unequal length are padded on the left with what
    no token sees, and all end together with a segment; after a memory of zeros (zero_memory), which knows no
    padding, each is continued by itself. Row b draws from a generator of its own, seeded
    seed + b, so `generate(model, [prompts[b]], n, seed=seed + b)` gives the row again; torch's global
    generators are neither read nor moved.

    The defaults sample as the paper did, among the 40 likeliest tokens. Between steps the model is in the
    mode it was in: a generator that is not read to its end leaves nothing behind.

    Args:
        model: on any device.
        prompts: lists of tokens, one token each at least.
        max_new_tokens: steps at most.
        temperature: divides the logits. 0: always the likeliest token, whatever top_k, top_p and seed.
        top_k: draw among this many likeliest tokens. 0: among all.
        top_p: draw among the fewest likeliest of these that together have this probability (nucleus
            sampling, Holtzman et al., 2020). 1: among all of them.
        seed: the same seed gives the same text. None: another text every time.
        stop_tokens: the first of these that a row gives ends it; the iterator ends when all rows have.
        mem_len, clamp_len, same_length: of the memory. None: the model's; but of a model that was trained
            without memory, mem_len is tgt_len - 1, and of a prompt only the last tgt_len tokens are read:
            a token sees as many as it saw then at most.
        segment_len: tokens of the prompts read at once. None: as in training, tgt_len, but 512 at most.
        n_symbols: draw tokens below this number only. For a model with more of them than its vocabulary has
            symbols: the others stand for nothing. None: all.

    Yields:
        int64 [B], on the CPU: each row's next token, its stop token included; after that `FINISHED`.

    Raises:
        TypeError: prompts are not lists of tokens.
        ValueError: an argument out of range. Both at the call, not at the first step.
        FloatingPointError: logits that are NaN or infinite.
    """
    vocab_size = model.config.vocab_size
    rows = [_as_row(prompt) for prompt in prompts]
    stop = frozenset(stop_tokens)
    if not rows:
        raise ValueError("prompts is empty: give at least one")
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {b} is empty: a model needs a token to predict the next one from")
        _check_tokens(f"prompt {b}", row, vocab_size)
    _check_tokens("stop_tokens", stop, vocab_size)
    check_at_least(1, max_new_tokens=max_new_tokens, segment_len=segment_len, n_symbols=n_symbols)
    check_at_least(0, top_k=top_k, mem_len=mem_len)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")

    if segment_len is None:
        segment_len = min(512, model.config.tgt_len)
    if mem_len is None:
        mem_len = model.config.mem_len
        if not mem_len:
            mem_len = model.config.tgt_len - 1
            rows = [row[-model.config.tgt_len :] for row in rows]
    if seed is None:
        seed = torch.Generator().seed()
    draws = [torch.Generator().manual_seed((seed + b) % 2**64) for b in range(len(rows))]

    def choose(draws: list[torch.Generator], logits: Tensor) -> Tensor:
        logits = logits[:, :n_symbols]
        likeliest = logits.max(-1)
        tokens = likeliest.indices
        if temperature > 0:
            uniform = torch.cat(
                [torch.rand(1, generator=draw, dtype=torch.float64, device="cpu") for draw in draws]
            )
            tokens = sample(logits, uniform.to(logits.device), temperature, top_k, top_p)
        return tokens.where(likeliest.values.isfinite(), _NO_TOKEN)

    def continued(rows: list[list[int]], draws: list[torch.Generator]) -> Iterator[Tensor]:
        longest = max(len(row) for row in rows)
        padding = [longest - len(row) for row in rows]
        input_ids = torch.tensor([[0] * n + row for n, row in zip(padding, rows, strict=True)], device="cpu")
        with torch.no_grad(), eval_mode(model):
            memory = model.new_memory(len(rows), mem_len, clamp_len, same_length)
        if any(padding):
            memory = memory.reset(range(len(rows)), skip=torch.tensor(padding, device=memory.device))
        # Segments end where the prompts do: each row has its segments as if it had no padding.
        first = (longest - 1) % segment_len + 1
        segments = input_ids.split([first] + [segment_len] * ((longest - first) // segment_len), dim=1)
        return _steps(model, memory, segments, partial(choose, draws), max_new_tokens, stop)

    if model.config.zero_memory and len({len(row) for row in rows}) > 1:
        alone = [continued([row], [draw]) for row, draw in zip(rows, draws, strict=True)]
        return map(torch.cat, zip_longest(*alone, fillvalue=torch.tensor([FINISHED], device="cpu")))
    return continued(rows, draws)


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The tokens that `uniform` points at, where each, the likeliest first, takes a share of [0, 1) as large
    as its probability after temperature, then top_k, then top_p.

    Args:
        logits: [B, V]; log-probabilities serve as well.
        uniform: float64 [B] in [0, 1).
        temperature, top_k, top_p: `generate`'s; temperature > 0.

    Returns:
        int64 [B].
    """
    vocab_size = logits.shape[-1]
    logits, tokens = logits.topk(min(top_k or vocab_size, vocab_size))
    logits = logits.double()
    # The largest is taken off first: no temperature is so low that it overflows.
    p = ((logits - logits[:, :1]) / temperature).softmax(-1)
    reached = p.cumsum(-1)
    kept = reached - p < top_p
    total = (p * kept).sum(-1)
    index = (reached <= (uniform * total)[:, None]).sum(-1)
    # Rounding may point at the end of the last share; of NaN none is kept.
    index = index.minimum(kept.sum(-1) - 1).clamp(min=0)
    return tokens.gather(-1, index[:, None])[:, 0]


def collect(steps: Iterable[Tensor]) -> list[list[int]]:
    """The new tokens of each row, its stop token included: `collect(generate(...))`."""
    return [
        [token for token in row if token != FINISHED]
        for row in zip(*(s.tolist() for s in steps), strict=True)
    ]


def stream_text(steps: Iterable[Tensor], vocabulary: Vocabulary, row: int = 0) -> Iterator[str]:
    """The text of one row of `generate`'s steps as it comes, in pieces that are whole characters: to be
    printed one after the other, flushed."""
    decode = vocabulary.decoder()
    for step in steps:
        token = int(step[row])
        if token == FINISHED:
            break
        if piece := decode([token]):
            yield piece
    if piece := decode([], True):  # the text ends within a character
        yield piece


@torch.no_grad()
def _steps(
    model: TransformerXL,
    memory: Memory,
    segments: Iterable[Tensor],
    choose: Callable[[Tensor], Tensor],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
) -> Iterator[Tensor]:
    """`generate`'s steps. segments: of the prompts, [B, T]; choose: from logits [B, V] to tokens [B]."""
    for segment in segments:
        with eval_mode(model):
            out = model(segment.to(memory.device), memory)
        memory = out.memory
    finished = [False] * memory.batch_size
    for step in range(1, max_new_tokens + 1):
        chosen = choose(out.last_logits())
        tokens = chosen.tolist()
        if _NO_TOKEN in tokens:
            raise FloatingPointError(
                f"the logits of row {tokens.index(_NO_TOKEN)} are NaN or infinite: are the model's weights?"
            )
        row = [FINISHED if done else t for done, t in zip(finished, tokens, strict=True)]
        yield torch.tensor(row, device="cpu")
        finished = [done or token in stop_tokens for done, token in zip(finished, tokens, strict=True)]
        if all(finished) or step == max_new_tokens:
            return
        with eval_mode(model):
            out = model(chosen[:, None], out.memory)


def _as_row(prompt: Iterable[int]) -> list[int]:
    try:
        return [int(token) for token in prompt]
    except (TypeError, ValueError):
        raise TypeError(
            "prompts must be lists of tokens, one for each row, such as [vocabulary.encode(text)]; got "
            f"{prompt!r} for a row"
        ) from None


def _check_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token {token} is not in the model's vocabulary, [0, {vocab_size})")

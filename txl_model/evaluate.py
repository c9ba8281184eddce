"""How well a model predicts a text: perplexity, bits per character.

There are two ways of reading. Both score every token but the first, each exactly once.

With memory, as Transformer-XL is evaluated: the text is cut into rows that are read side by side, in
segments of `tgt_len` tokens, which attend to the memory of what their row read before.

In windows (`stride`), as models without recurrence are evaluated: for every `stride` tokens to score,
`tgt_len` tokens are read from scratch. Stride 1 is what the paper's Table 9 compares with.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from txl_model.config import NOT_SCORED, TransformerXLConfig
from txl_model.fields import check_at_least
from txl_model.model import TransformerXL

if TYPE_CHECKING:
    from txl_model.data import Corpus
    from txl_model.train_config import TrainConfig

# Given a model, and a function to call now and then with the number of tokens scored: nats per token.
Evaluator = Callable[[TransformerXL, Callable[[int], object]], float]


@dataclass(frozen=True)
class Evaluation:
    """What predicting a text cost.

    Attributes:
        loss: nats per token, the mean of -ln p.
        tokens: how many were scored.
        seconds: the time that took.
        settings: how the text was read: `evaluate`'s arguments, defaults filled in, fit for JSON.
    """

    loss: float
    tokens: int
    seconds: float
    settings: dict[str, Any]

    @property
    def ppl(self) -> float:
        """Perplexity: per word where tokens are words."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bpc(self) -> float:
        """Bits per token: per character or byte where tokens are these."""
        return self.loss / math.log(2)


def as_many_keys(config: TransformerXLConfig, tgt_len: int, trained_len: int | None = None) -> int:
    """The mem_len with which memory and a segment of tgt_len tokens are together as long as in training, of
    trained_len tokens (None: the model's tgt_len); 0 if the segment alone is, or training had no memory."""
    trained_len = config.tgt_len if trained_len is None else trained_len
    return max(0, config.mem_len + trained_len - tgt_len) if config.mem_len else 0


@torch.no_grad()
def evaluate(
    model: TransformerXL,
    tokens: Tensor,
    *,
    tgt_len: int,
    mem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 1,
    stride: int | None = None,
    warm_up: int = 0,
    max_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Let the model predict every token of a text but the first, in order.

    As the authors' eval.py, whose iterator, given several rows, also leaves out each row's first token and
    what does not divide into rows; here nothing is left out. With one row the scored tokens are the same.

    What a token sees depends on its place in its segment, unless same_length gives every token mem_len keys
    in each layer: then, with relative attention, the result does not depend on tgt_len. Given a warm_up of
    n_layer * mem_len tokens, which is as far back as anything reaches, it does not depend on batch_size.

    For a model trained without memory, the published evaluation is its training length as tgt_len and the
    script's eval_tgt_len as stride.

    Args:
        model: on any device; its mode is put back.
        tokens: the text, 1-D integers on the CPU, memory-mapped or not. Segments move to the model's device.
        tgt_len: tokens of a segment, or of a window.
        mem_len: tokens remembered. None: so many that memory and segment are together as long as in
            training (the authors' train.py); none where training had none. In windows, where nothing is
            remembered: the keys that same_length lets a token see.
        clamp_len, same_length: None: the model's.
        batch_size: rows, or windows, read side by side.
        stride: read in windows, and score this many tokens with each: its last.
        warm_up: tokens of the text before each row but the first that are read with it and not scored, so
            that it does not begin without memory.
        max_tokens: score so many tokens, the first, and no more.
        dtype: of autocast, torch.bfloat16 or torch.float16. None: autocast stays as it is.
        progress: called after each segment with the number of tokens scored in it; a tqdm bar's `update`.

    Raises:
        ValueError: a setting out of range, or tokens that are no text in the model's vocabulary.
    """
    config = model.config
    _check_tensor(tokens)
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or None, got {dtype!r}")
    check_at_least(1, tgt_len=tgt_len, batch_size=batch_size, stride=stride, max_tokens=max_tokens)
    check_at_least(0, mem_len=mem_len, warm_up=warm_up)
    if stride is not None and stride > tgt_len:
        raise ValueError(f"stride must not exceed tgt_len, a window's {tgt_len} tokens, got {stride}")
    if stride is not None and warm_up:
        raise ValueError("warm_up fills memory, and windows (stride) have none: leave out one of the two")
    if max_tokens is not None:
        tokens = tokens[: max_tokens + 1]
    _check_text(tokens, config.vocab_size)
    inputs, labels = tokens[:-1], tokens[1:]
    if mem_len is None:
        mem_len = config.mem_len if stride is not None else as_many_keys(config, tgt_len)
    clamp_len = config.clamp_len if clamp_len is None else clamp_len
    same_length = config.same_length if same_length is None else same_length

    device = next(model.parameters()).device
    autocast = contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)
    n_token = len(inputs)
    total = torch.zeros((), dtype=torch.float64, device=device)
    began = time.perf_counter()
    with eval_mode(model), autocast:
        if stride is None:
            # All rows are equally long, and the first has no need of a warm-up: it scores that much more.
            warm_up = min(warm_up, n_token - 1)
            row_len = math.ceil((n_token - warm_up) / batch_size)
            rows = torch.arange(0, n_token - warm_up, row_len, device="cpu")
            memory = model.new_memory(len(rows), mem_len, clamp_len, same_length)
            pieces = _segments(n_token, rows, row_len, tgt_len, warm_up)
        else:
            pieces = _windows(n_token, stride, tgt_len, batch_size)
        for place, scored in pieces:
            if stride is not None:
                # Nothing is carried on: hidden states, which need no buffers beforehand.
                visible = mem_len if same_length else 0
                memory = model.new_memory(len(place), visible, clamp_len, same_length, kind="hidden")
            # The losses stay on the device until the end: waiting for each would leave it idle.
            input_ids = inputs[place].long().to(device, non_blocking=True)
            targets = None
            if scored.any():
                targets = labels[place].long().where(scored, NOT_SCORED).to(device, non_blocking=True)
            out = model(input_ids, memory, targets)
            if targets is not None:
                total += out.token_losses.sum(dtype=torch.float64)
            memory = out.memory
            if progress is not None:
                progress(int(scored.sum()))
        loss = total.item() / n_token
    settings = {
        "tgt_len": tgt_len,
        "mem_len": mem_len if stride is None or same_length else 0,
        "clamp_len": clamp_len,
        "same_length": same_length,
        "batch_size": batch_size,
        "stride": stride,
        "warm_up": warm_up,
        "max_tokens": max_tokens,
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }
    return Evaluation(loss, n_token, time.perf_counter() - began, settings)


def evaluate_lengths(
    model: TransformerXL,
    tokens: Tensor,
    mem_lens: Sequence[int],
    *,
    tgt_len: int,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    batch_size: int = 1,
    warm_up: int | None = None,
    max_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Evaluation]:
    """`evaluate` with each of `mem_lens` in turn, over exactly the same tokens.

    warm_up None: as long as the longest memory, for all of them; rows that begin without memory would make
    long memories look worse than they are. The other arguments are `evaluate`'s.
    """
    if not mem_lens:
        raise ValueError("mem_lens is empty: name the memory lengths to evaluate with")
    for mem_len in mem_lens:
        check_at_least(0, mem_len=mem_len)
    return (
        evaluate(
            model,
            tokens,
            tgt_len=tgt_len,
            mem_len=mem_len,
            clamp_len=clamp_len,
            same_length=same_length,
            batch_size=batch_size,
            warm_up=max(mem_lens) if warm_up is None else warm_up,
            max_tokens=max_tokens,
            dtype=dtype,
            progress=progress,
        )
        for mem_len in mem_lens
    )


def validation(corpus: Corpus, model_config: TransformerXLConfig, config: TrainConfig) -> Evaluator | None:
    """Reads the validation text of a training, if there is one, with as many keys as its segments at most.

    Without memory it reads in windows, which score as many tokens as a training segment does.
    """
    if "valid" not in corpus.splits:
        if config.scheduler == "dev_perf":
            raise ValueError(
                f"scheduler dev_perf follows the validation loss, and {corpus.name} has no split valid"
            )
        return None
    scored, ext_len = config.segment_lengths(model_config)
    tgt_len, stride = config.eval_tgt_len or scored, None
    klen = model_config.mem_len + scored + ext_len
    if tgt_len > klen:
        raise ValueError(
            f"eval_tgt_len must be at most {klen}, a training segment and its memory, got {tgt_len}"
        )
    mem_len: int | None = klen - tgt_len
    if model_config.mem_len == 0:
        tgt_len, stride, mem_len = max(scored + ext_len, tgt_len), tgt_len, None
    elif mem_len == 0 and model_config.same_length and not model_config.same_length_extra:
        raise ValueError(
            f"eval_tgt_len must be less than {klen} with same_length: {klen} would leave no key of a memory"
        )

    def loss(model: TransformerXL, progress: Callable[[int], object]) -> float:
        return evaluate(
            model,
            corpus.tokens("valid"),
            tgt_len=tgt_len,
            mem_len=mem_len,
            stride=stride,
            batch_size=config.eval_batch_size,
            max_tokens=config.eval_max_tokens,
            dtype=torch.bfloat16 if config.bf16 else None,
            progress=progress,
        ).loss

    return loss


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout for a while; afterwards every module is in the mode it was in."""
    in_training = [module for module in model.modules() if module.training]
    if in_training:  # generation asks at every token
        model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def _segments(
    n_token: int, rows: Tensor, row_len: int, tgt_len: int, warm_up: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows that begin at the places rows [B] of the text: warm_up tokens, then row_len of their own."""
    own = rows + warm_up
    own[0] = 0
    for read in range(0, warm_up + row_len, tgt_len):
        length = min(tgt_len, warm_up + row_len - read)
        yield _piece(n_token, rows + read, length, own, rows + warm_up + row_len)


def _windows(n_token: int, stride: int, tgt_len: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows that end with the tokens they score. The first ones have less text to begin with and the last
    one less to score: windows of one length are read together."""
    begin = torch.arange(0, n_token, stride, device="cpu")
    end = (begin + stride).clamp(max=n_token)
    first = (begin + stride - tgt_len).clamp(min=0)
    lengths, counts = (end - first).unique_consecutive(return_counts=True)
    for length, alike in zip(
        lengths.tolist(), torch.arange(len(begin), device="cpu").split(counts.tolist()), strict=True
    ):
        for i in alike.split(batch_size):
            yield _piece(n_token, first[i], length, begin[i], end[i])


def _piece(
    n_token: int, first: Tensor, length: int, score_from: Tensor, score_to: Tensor
) -> tuple[Tensor, Tensor]:
    """The `length` places of the text from first [B] on, and which of them are scored: score_from [B] <=
    place < score_to [B]. int64 and bool [B, length]. Beyond its end the last place repeats, unscored."""
    place = first[:, None] + torch.arange(length, device="cpu")
    scored = (place >= score_from[:, None]) & (place < score_to[:, None].clamp(max=n_token))
    return place.clamp(max=n_token - 1), scored


def _check_tensor(tokens: Tensor) -> None:
    if not isinstance(tokens, Tensor):
        raise ValueError(
            f"tokens must be a tensor of 1-D integers, got {type(tokens).__name__}: torch.as_tensor makes one"
        )
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens must be 1-D integers, got {tokens.dtype} {list(tokens.shape)}")


def _check_text(tokens: Tensor, vocab_size: int) -> None:
    if len(tokens) < 2:
        raise ValueError(f"a text needs 2 tokens, one to read and one to predict, got {len(tokens)}")
    for part in tokens.split(2**20):  # the text may be larger than memory
        low, high = (int(x) for x in part.long().aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token {low if low < 0 else high} is not in the model's vocabulary, [0, {vocab_size}): "
                "is this the corpus that the model was trained on?"
            )

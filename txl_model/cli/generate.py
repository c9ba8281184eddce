"""`txl generate`."""

from __future__ import annotations

import argparse
import sys
from codecs import BOM_UTF8
from pathlib import Path

from tqdm import tqdm

from txl_model.checkpoint import load_model
from txl_model.cli.options import (
    add_machine_arguments,
    check_vocabulary,
    chosen_device,
    to_stderr,
    vocabulary_of,
)
from txl_model.data import Corpus, Vocabulary
from txl_model.data.corpus import VOCABULARY
from txl_model.data.vocabulary import BORDER
from txl_model.generate import collect, generate, stream_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, help="a run, a checkpoint or a converted model")
    add("--prompt", action="append", metavar="TEXT", help="text to continue; several times: a batch")
    add("--prompt-file", type=Path, metavar="FILE", help="file with a text to continue; -: standard input")
    add("--corpus", type=Path, help="folder with the vocabulary, where the model has none beside it")
    add("--max-new-tokens", type=int, default=500, metavar="N", help="(default: 500)")
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="0: always the likeliest token (default: 1)",
    )
    add("--top-k", type=int, default=40, metavar="N", help="draw among the N likeliest; 0: all (default: 40)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="draw among the likeliest that together have this probability (default: 1)",
    )
    add("--seed", type=int, help="the same seed gives the same text")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="SYMBOL",
        help="end where this token comes; may be repeated",
    )
    add(
        "--mem-len",
        type=int,
        metavar="N",
        help="tokens remembered (default: the model's; if it was trained with none, tgt_len - 1, and of a "
        "prompt the last tgt_len tokens are read)",
    )
    add("--clamp-len", type=int, metavar="N", help="distances beyond share a position embedding; -1: none do")
    add("--same-length", action=argparse.BooleanOptionalAction, help="every token sees mem_len keys")
    add("--bf16", action="store_true", help="weights and memory in bfloat16: half as much to read")
    add_machine_arguments(parser)


def run(args: argparse.Namespace) -> None:
    given = _prompts(args)
    if not given:
        raise ValueError("nothing to continue: give --prompt TEXT or --prompt-file FILE")
    model = load_model(args.model, args.backend, to_stderr).to(chosen_device(args))
    if args.bf16:
        model = model.bfloat16()
    path = vocabulary_of(args.model)
    if args.corpus:
        corpus = Corpus.open(args.corpus)
        check_vocabulary(args.model, corpus)
        vocabulary = corpus.vocabulary
    elif path:
        vocabulary = Vocabulary.load(path)
    else:
        raise ValueError(f"{args.model} has no {VOCABULARY} beside it: name a corpus with --corpus")
    stop = {_stop_token(vocabulary, symbol) for symbol in args.stop}
    tokens = [_encode(vocabulary, name, prompt) for name, prompt in given]
    unknown = list(dict.fromkeys(symbol for _, prompt in given for symbol in vocabulary.unknown_in(prompt)))
    if unknown:
        named = ", ".join(map(repr, unknown[:10])) + (", ..." if len(unknown) > 10 else "")
        to_stderr(f"not in the vocabulary, read as {vocabulary.unknown}: {named}")
    steps = generate(
        model,
        tokens,
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop_tokens=stop,
        mem_len=args.mem_len,
        clamp_len=args.clamp_len,
        same_length=args.same_length,
        n_symbols=len(vocabulary),  # --vocab-size may have given the model more tokens
    )
    space = " " if vocabulary.unit == "word" else ""  # words have one between them
    prompts = [prompt.decode(errors="replace") + space for _, prompt in given]
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for text in stream_text(steps, vocabulary):
            print(text, end="", flush=True)
        print()
        return
    bar = tqdm(steps, total=args.max_new_tokens, unit="token", disable=args.quiet or None)
    for prompt, row in zip(prompts, collect(bar), strict=True):
        print(f"{prompt}{vocabulary.decode(row)}\n{'-' * 20}")


def _prompts(args: argparse.Namespace) -> list[tuple[str, bytes]]:
    """Where each prompt is from, and its bytes: `prepare` reads bytes, too, and keeps every line end."""
    # What of an argument is not UTF-8 Python has turned into surrogates.
    prompts = [(f"--prompt {text!r}", text.encode("utf-8", "surrogateescape")) for text in args.prompt or []]
    if args.prompt_file is None:
        return prompts
    if str(args.prompt_file) == "-":
        return [*prompts, ("standard input", sys.stdin.buffer.read())]
    return [*prompts, (str(args.prompt_file), args.prompt_file.read_bytes())]


def _encode(vocabulary: Vocabulary, name: str, prompt: bytes) -> list[int]:
    if vocabulary.unit != "byte":  # as `prepare`
        prompt = prompt.removeprefix(BOM_UTF8)
    try:
        return vocabulary.encode(prompt)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text ({error.reason}), of which the model reads {vocabulary.unit}s: "
            "convert it, for instance with iconv -f LATIN1 -t UTF-8"
        ) from error


def _stop_token(vocabulary: Vocabulary, symbol: str) -> int:
    r"""The number of a stop symbol; \n may be written so."""
    symbol = symbol.replace("\\n", "\n")
    if vocabulary.unknown_in(symbol):
        raise ValueError(f"--stop {symbol!r} is not in the vocabulary: the text would never stop there")
    tokens = vocabulary.encode(symbol)
    if vocabulary.line_end == BORDER:
        del tokens[0]  # which stands before every text
    if len(tokens) != 1:
        raise ValueError(f"--stop {symbol!r} is {len(tokens)} tokens; it must be one")
    return tokens[0]

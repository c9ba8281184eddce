"""Train a small Transformer-XL on the source code of Python's own standard library, read as bytes.

    python examples/train_bytes.py                                    # two minutes on a CPU
    python examples/train_bytes.py --minutes 10 --json results.json

Prints held-out bits per byte before, during and after training, then once more at several memory lengths: a
longer memory lets the same weights read further back, and the same bytes become easier to predict.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from txl_model import TransformerXL, TransformerXLConfig

# Tests are not installed everywhere; encodings and pydoc_data are tables, not programs.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT_EVERY = 20  # of the files in sorted order, this one is held out, whole


def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes to train on and the held-out bytes, uint8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts)]
    if len(files) < HELD_OUT_EVERY:
        raise SystemExit(f"{root} has only {len(files)} Python source files to train on")
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = sorted(set(files) - set(held_out))
    train_bytes, held_out_bytes = (
        torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in part)), dtype=torch.uint8)
        for part in (train, held_out)
    )
    print(
        f"{root}: {len(train)} files, {len(train_bytes):,} bytes to train on; "
        f"{len(held_out)} files, {len(held_out_bytes):,} bytes held out"
    )
    return train_bytes, held_out_bytes


def side_by_side(text: Tensor, batch: int) -> Tensor:
    """Cut a text into equal pieces that are read side by side: int64 [batch, length]."""
    return text[: len(text) // batch * batch].view(batch, -1).long()


@torch.no_grad()
def bits_per_byte(model: TransformerXL, text: Tensor, mem_len: int, segment: int, warm_up: int) -> float:
    """What a byte of text [B, length] costs on average with a memory of mem_len.

    The first warm_up bytes of each row only fill the memory. They are never scored, so that all memory
    lengths predict exactly the same bytes.
    """
    was_training = model.training
    model.eval()
    memory, nats, scored = model.new_memory(len(text), mem_len), 0.0, 0
    for start in range(0, text.shape[1] - 1, segment):
        piece = text[:, start : start + segment + 1]
        out = model(piece[:, :-1], memory, labels=piece[:, 1:])
        memory = out.memory
        losses = out.token_losses[:, max(0, warm_up - start) :]
        nats += losses.sum().item()
        scored += losses.numel()
    model.train(was_training)
    return nats / scored / math.log(2)


def train(model: TransformerXL, text: Tensor, held_out: Tensor, args: argparse.Namespace) -> dict:
    """Train on text [batch, length] until the minutes (or steps) are used up, evaluating after each quarter.

    Evaluation does not count as training time.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    memory, position, step, seconds, progress, loss = None, 0, 0, 0.0, 0.0, math.nan
    history: list[dict] = []

    def evaluate() -> None:
        bits = bits_per_byte(model, held_out, args.mem, args.segment, max(args.eval_mem))
        history.append({"seconds": seconds, "step": step, "held_out_bits_per_byte": bits})
        tqdm.write(f"{seconds:5.0f} s, step {step:5d}: {bits:.3f} held-out bits per byte")

    bar = tqdm(total=100, bar_format="{percentage:3.0f}% |{bar}| {desc}")
    evaluate()
    while progress < 1:
        began = time.perf_counter()
        # Linear warm-up over the first twentieth, then a cosine that ends at 0 with the budget.
        rate = min(1.0, progress / 0.05 + 0.02) * (1 + math.cos(math.pi * progress)) / 2
        optimizer.param_groups[0]["lr"] = args.lr * rate
        if position + args.segment >= text.shape[1]:
            memory, position = None, 0
        piece = text[:, position : position + args.segment + 1]
        out = model(piece[:, :-1], memory, labels=piece[:, 1:])
        memory, position = out.memory, position + args.segment
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        step += 1
        loss = out.loss.item() if step == 1 else 0.95 * loss + 0.05 * out.loss.item()
        seconds += time.perf_counter() - began

        quarter = int(4 * progress)
        progress = min(1.0, step / args.steps if args.steps else seconds / (60 * args.minutes))
        speed = step * args.batch * args.segment / seconds
        bar.set_description_str(
            f"loss {loss:.3f}, {loss / math.log(2):.3f} bits/byte, {speed:,.0f} tokens/s", refresh=False
        )
        bar.update(100 * progress - bar.n)
        if int(4 * progress) > quarter:
            evaluate()
    bar.close()
    return {"steps": step, "seconds": seconds, "tokens_per_second": speed, "history": history}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="time to train for, evaluation not counted")
    add(
        "--steps",
        type=int,
        metavar="N",
        help="train for N steps instead: repeats exactly, whatever the speed",
    )
    add("--seed", type=int, default=1111, help="of the initial weights")
    add("--backend", help="attention kernel (reference, cpu, ...); None is the best that can run")
    add("--json", type=Path, metavar="PATH", help="save the results there")
    add("--layers", type=int, default=3, help="number of layers")
    add("--d-model", type=int, default=128, help="width of the model")
    add("--heads", type=int, default=8, help="attention heads per layer")
    add("--batch", type=int, default=8, help="pieces of the text read side by side")
    add("--segment", type=int, default=128, help="bytes of each piece per step")
    add("--mem", type=int, default=384, help="memory length in training")
    add(
        "--clamp-len",
        type=int,
        default=128,
        help="distances beyond share one position embedding; -1: none do",
    )
    add("--lr", type=float, default=5e-3, help="highest learning rate")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add(
        "--eval-mem",
        type=int,
        nargs="+",
        default=[0, 64, 128, 256, 512, 1024],
        help="memory lengths to evaluate",
    )
    add("--eval-bytes", type=int, default=65536, help="held-out bytes to score")
    args = parser.parse_args(argv)
    if args.d_model % args.heads:
        parser.error(f"--d-model {args.d_model} is not a multiple of --heads {args.heads}")
    if args.minutes <= 0:
        parser.error(f"--minutes must be positive, not {args.minutes}")
    if min(args.eval_mem) < 0:
        parser.error(f"--eval-mem must not be negative, got {min(args.eval_mem)}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    config = TransformerXLConfig(
        vocab_size=256,
        n_layer=args.layers,
        n_head=args.heads,
        d_model=args.d_model,
        d_head=args.d_model // args.heads,
        d_inner=4 * args.d_model,
        dropout=0.0,  # minutes of training read every byte once at most: nothing to overfit
        mem_len=args.mem,
        clamp_len=args.clamp_len,  # a memory longer than in training then brings no distance never seen
        pre_lnorm=True,  # bears the high learning rate that a short training needs
        init_std=0.05,  # the published 0.02, made for wider models, loses a narrow one its first minute
    )
    model = TransformerXL(config, backend=args.backend)
    n_param = sum(p.numel() for p in model.parameters())
    print(
        f"{args.layers} layers of {args.d_model}, {n_param:,} parameters; {torch.get_num_threads()} threads"
    )
    train_bytes, held_out_bytes = standard_library()
    held_out = side_by_side(held_out_bytes, args.batch)
    warm_up = max(args.eval_mem)
    needed = warm_up + math.ceil(args.eval_bytes / args.batch) + 1
    if held_out.shape[1] < needed:
        raise SystemExit(
            f"the held-out text gives {args.batch} pieces of {held_out.shape[1]:,} bytes, not {needed:,}"
        )
    held_out = held_out[:, :needed]

    training = train(model, side_by_side(train_bytes, args.batch), held_out, args)

    print("\nmemory at evaluation   held-out bits per byte")
    by_memory = {}
    for mem_len in args.eval_mem:
        by_memory[mem_len] = bits_per_byte(model, held_out, mem_len, args.segment, warm_up)
        print(f"{mem_len:20d}   {by_memory[mem_len]:.3f}", flush=True)
    if args.json:
        results = {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
            "config": asdict(config),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            "training": training,
            "held_out_bits_per_byte": by_memory,
        }
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

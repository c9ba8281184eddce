"""The paper's Table 9 (section 4.5) on this code: how much longer the vanilla model takes per token.

    python benchmarks/bench_eval.py

The vanilla model has no memory. It makes one prediction per window: for every token it reads the
window of `attention length` tokens before it from scratch. Ours reads each token once, in segments,
and remembers keys and values. benchmarks/README.md says what exactly is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace

import cli
import model_figures
import torch
import torch.nn.functional as F
from cli import Progress, positive
from measure import Task
from model_figures import Figure
from model_work import Ours, Work, fill, task, tokens
from torch import Tensor

from txl_kernels import linear
from txl_model import TransformerXL
from txl_model.attention import Attention
from txl_model.positions import position_embedding

# Attention length, and how many times longer the vanilla model takes in the paper.
TABLE_9 = {800: 363.0, 1800: 773.0, 2800: 1409.0, 3800: 1874.0}


class Vanilla:
    """A model with absolute positions and no memory (attn_type 2), of ours in its weights only.

    As fast as plain PyTorch has it: fused causal attention, and in the last layer nothing but the
    keys and values is computed of positions that predict nothing.
    """

    def __init__(self, model: TransformerXL, window: int) -> None:
        self.model = model
        self.positions = position_embedding(window, model.config.d_model)

    @torch.no_grad()
    def predict(self, input_ids: Tensor) -> Tensor:
        """Log-probabilities [V] of the token after a window [1, A]."""
        model = self.model
        h = model.word_emb(input_ids) * math.sqrt(model.config.d_model) + self.positions
        *blocks, last = model.blocks
        for block in blocks:
            q, kv = block.attn.project(h)
            h = block.ff(self._attended(block.attn, h, q, *kv))
        attn = last.attn
        w_q, w_kv = attn.qkv_net.weight.tensor_split([attn.n_head * attn.d_head])
        q = attn._heads(linear(h[:, -1:], w_q))
        k, v = (attn._heads(x) for x in linear(h, w_kv).chunk(2, dim=-1))
        h = last.ff(self._attended(attn, h[:, -1:], q, k, v))
        return model.softmax.logits(h[0, 0], model.word_emb).log_softmax(-1)

    def _attended(self, attn: Attention, h: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape == k.shape)
        return attn.layer_norm(h + attn.o_net(out.transpose(1, 2).flatten(2)))


class Bench:
    """Both models, at one attention length after another."""

    def __init__(self, args: argparse.Namespace, progress: Progress) -> None:
        self.args, self.progress = args, progress
        self.ours = Ours(TransformerXL(model_figures.config(args)))
        absolute = model_figures.config(args, attn_type=2, mem_len=0)
        self.vanilla = TransformerXL(absolute).eval()

    def run(self) -> list[Figure]:
        return [self.time(length) for length in self.args.lengths]

    def time(self, length: int) -> Figure:
        on_target = model_figures.published_sizes(self.args)
        figure = Figure(f"attention length {length:,}", "ms", TABLE_9.get(length) if on_target else None)
        length = max(2, length // self.args.shorten)
        # Of `length` keys, with itself, every token has the nearest clamp_len ones told apart.
        work = Work("evaluation", self.args.segment, length, self.args.clamp_len, same_length=True)
        vanilla = Vanilla(self.vanilla, length)
        self.progress.expect(2)
        self.progress.step(f"{figure.name}: comparing")
        worst = max(self._error_of(vanilla, length), self._error_of_ours(work))
        figure.errors = {"log-probabilities": worst}
        if figure.wrong:
            return figure

        self.progress.step(f"{figure.name}: filling memory")
        reading = task(self.ours, work, fill(self.ours, work), work.segments)
        window = tokens(self.ours, length, seed=1)
        tasks = {
            "vanilla": Task(lambda _: vanilla.predict(window)),
            "ours": replace(reading, passes=work.segments * work.n_token),
        }
        figure.fill(self.progress.sample(tasks, self.args.repeat, self.args.budget, figure.name))
        return figure

    def _error_of(self, vanilla: Vanilla, length: int) -> float:
        """Against the same weights in our model without memory, which computes every position in full."""
        window = tokens(self.ours, length, seed=2)
        with torch.no_grad():
            truth = self.vanilla(window).last_logits()[0].log_softmax(-1)
        return float((vanilla.predict(window) - truth).abs().max())

    def _error_of_ours(self, work: Work) -> float:
        """Two segments with memory between them, against one of both: each token sees the same."""
        both = tokens(self.ours, 2 * work.n_token, seed=2)
        memory = fill(self.ours, work)
        with torch.no_grad():
            truth, _ = self.ours.read(both, memory)
            first, memory = self.ours.read(both[:, : work.n_token], memory)
            second, _ = self.ours.read(both[:, work.n_token :], memory)
        return float((torch.cat([first, second], dim=1) - truth).abs().max())


def main(argv: list[str] | None = None) -> int:
    parser = model_figures.parser(
        "Time evaluation by the vanilla model, which reads a whole window for each token, and by ours."
    )
    whole = positive(int)
    parser.add_argument(
        "--lengths", nargs="+", type=whole, default=list(TABLE_9), help="attention lengths (the paper's)"
    )
    parser.add_argument("--segment", type=whole, default=128, help="tokens that ours reads at a time (128)")
    parser.add_argument(
        "--clamp-len", type=int, default=1000, help="of ours; -1: every distance told apart (1000)"
    )
    args = model_figures.parse(parser, argv)
    print("Time per token.")
    return model_figures.report(args, lambda progress: Bench(args, progress).run(), ("ours", "vanilla"))


if __name__ == "__main__":
    sys.exit(cli.run(main))

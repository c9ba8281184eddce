"""What the tests of the model share: a small one, text for it, and parts of the published computation."""

from __future__ import annotations

from itertools import pairwise

import torch

from txl_model import TransformerXL, TransformerXLConfig

B, VOCAB = 2, 11
ADAPTIVE = {"cutoffs": (4, 6, 8)}


def small_model(backend="reference", dtype=torch.float64, **fields) -> TransformerXL:
    sizes = dict(n_layer=2, n_head=2, d_model=12, d_head=6, d_inner=16, tgt_len=4, mem_len=6)
    torch.manual_seed(1)
    config = TransformerXLConfig(**{"vocab_size": VOCAB, "dropout": 0.0, **sizes, **fields})
    model = TransformerXL(config, backend)
    for parameter in model.parameters():  # the published initial values are too small for a mistake to show
        torch.nn.init.normal_(parameter, std=0.4)
    return model.to(dtype)


def tokens(length: int, batch: int = B) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(2))


def in_segments(model, input_ids, lengths, memory=None) -> torch.Tensor:
    """Logits [B, T, VOCAB] of input_ids read in segments of these lengths."""
    logits = []
    for segment in input_ids.split(lengths, dim=1):
        out = model(segment, memory)
        memory = out.memory
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def clusters(config) -> list[range]:
    """The tokens of the shortlist and of each cluster."""
    return [range(*bounds) for bounds in pairwise((0, *config.cutoffs, config.vocab_size))]


def embedding(model, token: int) -> torch.Tensor:
    """[d_model] of one token."""
    c, p = model.config, dict(model.named_parameters())
    if c.div_val == 1:
        row, proj = p["word_emb.tables.0"][token], p.get("word_emb.projs.0")
        return row if proj is None else proj @ row
    i, tokens = next((i, tokens) for i, tokens in enumerate(clusters(c)) if token in tokens)
    return p[f"word_emb.projs.{i}"] @ p[f"word_emb.tables.{i}"][token - tokens[0]]


def logits(model, hidden) -> torch.Tensor:
    """[..., d_model] -> [..., vocab_size]; with cutoffs log-probabilities."""
    c, p = model.config, dict(model.named_parameters())
    owner, parts = "word_emb" if c.tie_weight else "softmax", []
    for i, tokens in enumerate(clusters(c)):
        rows, table = (tokens, 0) if c.div_val == 1 else (range(len(tokens)), i)
        weight = p[f"{owner}.tables.{table}"][rows.start : rows.stop]
        bias = p[f"softmax.biases.{table}"][rows.start : rows.stop]
        if c.cutoffs and i == 0:
            weight = torch.cat([weight, p["softmax.cluster_weight"]])
            bias = torch.cat([bias, p["softmax.cluster_bias"]])
        x = hidden
        if c.div_val > 1 or c.d_embed != c.d_model:
            x = x @ p[f"word_emb.projs.{table}" if c.tie_projs[i] else f"softmax.projs.{i}"]
        parts.append(x @ weight.T + bias)
    if not c.cutoffs:
        return parts[0]
    head, *tails = (x.log_softmax(-1) for x in parts)
    shortlist = c.cutoffs[0]
    within = [head[..., shortlist + n : shortlist + n + 1] + tail for n, tail in enumerate(tails)]
    return torch.cat([head[..., :shortlist], *within], dim=-1)

"""Adaptive input (Baevski and Auli, 2019) and adaptive softmax (Grave et al., 2017), as
Transformer-XL has them.

The vocabulary, sorted by frequency, is cut into a shortlist and clusters. Rare tokens may have
narrower embeddings (`div_val`), and the softmax asks first for the shortlist or a cluster, then
within the cluster: a token of the shortlist costs no product with the rare ones. Without cutoffs
both are the plain thing.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from txl_model.config import TransformerXLConfig


def _bounds(config: TransformerXLConfig) -> list[tuple[int, int]]:
    """First token and end of the shortlist and of each cluster."""
    ends = (*config.cutoffs, config.vocab_size)
    return list(zip((0, *config.cutoffs), ends, strict=True))


def _table_shapes(config: TransformerXLConfig) -> list[tuple[int, int]]:
    """[rows, width] of each embedding table: one for all where all are equally wide."""
    if config.div_val == 1:
        return [(config.vocab_size, config.d_embed)]
    return [
        (end - first, config.d_embed // config.div_val**i) for i, (first, end) in enumerate(_bounds(config))
    ]


def _normal(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * std)


class AdaptiveEmbedding(nn.Module):
    """Token to vector; clusters of rare tokens have narrow tables and a projection each."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.bounds = _bounds(config)
        self.d_model = config.d_model
        shapes = _table_shapes(config)
        self.tables = nn.ParameterList(_normal(*shape, std=config.init_std) for shape in shapes)
        # As published, div_val > 1 projects the shortlist too, though it may be d_model wide already.
        projected = config.div_val > 1 or config.d_embed != config.d_model
        self.projs = nn.ParameterList(
            _normal(config.d_model, width, std=config.proj_init_std) for _, width in shapes if projected
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, d_model]."""
        if len(self.tables) == 1:
            embedded = F.embedding(input_ids, self.tables[0])
            return F.linear(embedded, self.projs[0]) if len(self.projs) else embedded
        flat = input_ids.flatten()
        out = None
        for table, proj, (first, end) in zip(self.tables, self.projs, self.bounds, strict=True):
            index = ((flat >= first) & (flat < end)).nonzero().squeeze(1)
            part = F.linear(F.embedding(flat[index] - first, table), proj)
            if out is None:
                out = part.new_zeros(len(flat), self.d_model)
            out = out.index_copy(0, index, part)
        assert out is not None
        return out.view(*input_ids.shape, self.d_model)


class AdaptiveSoftmax(nn.Module):
    """Hidden state to the log-probability of a token, or of all of them.

    `embedding` lends its tables and projections where they are tied, so that they are parameters once.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.bounds = _bounds(config)
        self.tie_weight = config.tie_weight
        self.one_table = config.div_val == 1
        shapes = _table_shapes(config)
        own = [] if config.tie_weight else shapes
        self.tables = nn.ParameterList(_normal(*shape, std=config.init_std) for shape in own)
        self.biases = nn.ParameterList(torch.zeros(rows) for rows, _ in shapes)
        # As published: a projection for each cluster even where one table serves them all.
        projected = config.div_val > 1 or config.d_embed != config.d_model
        widths = [config.d_embed // config.div_val**i for i in range(len(self.bounds))]
        self.projs = nn.ParameterDict(
            {
                str(i): _normal(config.d_model, width, std=config.proj_init_std)
                for i, (width, tied) in enumerate(zip(widths, config.tie_projs, strict=True))
                if projected and not tied
            }
        )
        self.projected = projected
        n_cluster = len(config.cutoffs)
        if n_cluster:
            self.cluster_weight = _normal(n_cluster, config.d_embed, std=config.init_std)
            self.cluster_bias = nn.Parameter(torch.zeros(n_cluster))

    def token_losses(self, hidden: Tensor, labels: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """-log p of each label in nats, 0 where it is -100: hidden [N, d_model], labels int64 [N] -> [N].

        Rows whose label is in a cluster, and no others, meet that cluster's table.
        """
        if len(self.bounds) == 1:
            return F.cross_entropy(_float(self._scores(hidden, embedding, 0)), labels, reduction="none")
        # Each label as the head knows it: itself in the shortlist, the column of its cluster otherwise.
        shortlist, head_labels = self.bounds[0][1], labels
        for i, (first, end) in enumerate(self.bounds[1:]):
            inside = (labels >= first) & (labels < end)
            head_labels = torch.where(inside, shortlist + i, head_labels)
        losses = F.cross_entropy(_float(self._scores(hidden, embedding, 0)), head_labels, reduction="none")
        for i, (first, end) in enumerate(self.bounds[1:], start=1):
            index = ((labels >= first) & (labels < end)).nonzero().squeeze(1)
            scores = _float(self._scores(hidden[index], embedding, i))
            losses = losses.index_add(
                0, index, F.cross_entropy(scores, labels[index] - first, reduction="none")
            )
        return losses

    def logits(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """[..., d_model] -> [..., vocab_size]; with clusters log-probabilities, in float32 at least."""
        scores = self._scores(hidden, embedding, 0)
        if len(self.bounds) == 1:
            return scores
        shortlist = self.bounds[0][1]
        head = _float(scores).log_softmax(-1)
        parts = [head[..., :shortlist]]
        for i in range(1, len(self.bounds)):
            within = _float(self._scores(hidden, embedding, i)).log_softmax(-1)
            parts.append(head[..., shortlist + i - 1, None] + within)
        return torch.cat(parts, dim=-1)

    def _scores(self, hidden: Tensor, embedding: AdaptiveEmbedding, i: int) -> Tensor:
        """Logits within cluster i; those of the head (i = 0) end in one column per cluster, in order."""
        tables = embedding.tables if self.tie_weight else self.tables
        weight, bias = (tables[0], self.biases[0]) if self.one_table else (tables[i], self.biases[i])
        if self.one_table and len(self.bounds) > 1:
            first, end = self.bounds[i]
            weight, bias = weight[first:end], bias[first:end]
        if i == 0 and len(self.bounds) > 1:
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        if self.projected:
            # Tied to the embedding's where there is none of its own: [d_model, width], so no transpose.
            proj = self.projs[str(i)] if str(i) in self.projs else embedding.projs[0 if self.one_table else i]
            hidden = hidden @ proj
        return F.linear(hidden, weight, bias)


def _float(x: Tensor) -> Tensor:
    """At least float32: sums over a vocabulary lose too much in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

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

from txl_kernels import linear, registry
from txl_model.config import NOT_SCORED, TransformerXLConfig

# Up to this share of scored rows, to copy them costs less than the others' scores.
_FEW_SCORED = 0.75


def _bounds(config: TransformerXLConfig) -> list[tuple[int, int]]:
    """First token and end of the shortlist and of each cluster."""
    ends = (*config.cutoffs, config.vocab_size)
    return list(zip((0, *config.cutoffs), ends, strict=True))


def _widths(config: TransformerXLConfig) -> list[int]:
    """Width of the embeddings of the shortlist and of each cluster."""
    return [config.d_embed // config.div_val**i for i in range(len(config.cutoffs) + 1)]


def _projected(config: TransformerXLConfig) -> bool:
    """As published, div_val > 1 projects the shortlist too, though it may be d_model wide already."""
    return config.div_val > 1 or config.d_embed != config.d_model


def _table_shapes(config: TransformerXLConfig) -> list[tuple[int, int]]:
    """[rows, width] of each embedding table: one for all where all are equally wide."""
    if config.div_val == 1:
        return [(config.vocab_size, config.d_embed)]
    return [
        (end - first, width) for (first, end), width in zip(_bounds(config), _widths(config), strict=True)
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
        projected = _projected(config)
        self.projs = nn.ParameterList(
            _normal(config.d_model, width, std=config.proj_init_std) for _, width in shapes if projected
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, d_model]."""
        # Under autocast, too, the states that layers add to keep the weights' dtype.
        dtype = self.tables[0].dtype
        if len(self.tables) == 1:
            embedded = F.embedding(input_ids, self.tables[0])
            return linear(embedded, self.projs[0]).to(dtype) if len(self.projs) else embedded
        flat = input_ids.flatten()
        out = None
        for table, proj, (first, end) in zip(self.tables, self.projs, self.bounds, strict=True):
            index = ((flat >= first) & (flat < end)).nonzero().squeeze(1)
            part = linear(F.embedding(flat[index] - first, table), proj).to(dtype)
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
        self.projected = _projected(config)
        # As published: a projection for each cluster even where one table serves them all.
        self.projs = nn.ParameterDict(
            {
                str(i): _normal(config.d_model, width, std=config.proj_init_std)
                for i, (width, tied) in enumerate(zip(_widths(config), config.tie_projs, strict=True))
                if self.projected and not tied
            }
        )
        n_cluster = len(config.cutoffs)
        if n_cluster:
            self.cluster_weight = _normal(n_cluster, config.d_embed, std=config.init_std)
            self.cluster_bias = nn.Parameter(torch.zeros(n_cluster))

    def token_losses(self, hidden: Tensor, labels: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """-log p of each label in nats, 0 where it is -100: hidden [N, d_model], labels int64 [N] -> [N].

        Rows whose label is in a cluster, and no others, meet that cluster's table. On CPUs rows that are not
        scored meet none, where that saves something; elsewhere their number would have to be waited for.
        """
        if labels.device.type == "cpu" and not registry.is_traced():
            scored = (labels != NOT_SCORED).nonzero().squeeze(1)
            if len(scored) <= _FEW_SCORED * len(labels):
                losses = self._token_losses(hidden[scored], labels[scored], embedding)
                return losses.new_zeros(len(labels)).index_copy(0, scored, losses)
        return self._token_losses(hidden, labels, embedding)

    def _token_losses(self, hidden: Tensor, labels: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        (proj, weight, bias), *tails = self._layers(embedding)
        if tails:  # the head's last rows are the clusters, in order
            weight = torch.cat([weight, self.cluster_weight])
            bias = torch.cat([bias, self.cluster_bias])
        # Each label as the head knows it: itself in the shortlist, the column of its cluster otherwise.
        shortlist, head_labels = self.bounds[0][1], labels
        for i, (first, end) in enumerate(self.bounds[1:]):
            inside = (labels >= first) & (labels < end)
            head_labels = torch.where(inside, shortlist + i, head_labels)
        head = _float(_scores(hidden, proj, weight, bias))
        losses = F.cross_entropy(head, head_labels, reduction="none")
        for (first, end), tail in zip(self.bounds[1:], tails, strict=True):
            index = ((labels >= first) & (labels < end)).nonzero().squeeze(1)
            scores = _float(_scores(hidden[index], *tail))
            within = F.cross_entropy(scores, labels[index] - first, reduction="none")
            losses = losses.index_add(0, index, within)
        return losses

    def logits(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """[..., d_model] -> [..., vocab_size]; with clusters log-probabilities, in float32 at least."""
        layers = self._layers(embedding)
        scores, *others = (_scores(hidden, *layer) for layer in layers)
        if not others:
            return scores
        # The clusters' scores by themselves: of one token, to join the weights would take as long as these.
        clusters = _scores(hidden, layers[0][0], self.cluster_weight, self.cluster_bias)
        head = _float(torch.cat([scores, clusters], dim=-1)).log_softmax(-1)
        tails = (_float(x).log_softmax(-1) for x in others)
        shortlist = self.bounds[0][1]
        parts = [head[..., shortlist + i, None] + tail for i, tail in enumerate(tails)]
        return torch.cat([head[..., :shortlist], *parts], dim=-1)

    def _layers(self, embedding: AdaptiveEmbedding) -> list[tuple[Tensor | None, Tensor, Tensor]]:
        """Projection [d_model, width], weight [rows, width] and bias [rows] of the shortlist and of each
        cluster."""
        weights = list(embedding.tables if self.tie_weight else self.tables)
        biases = list(self.biases)
        if self.one_table:
            # Split at once: the gradient of each slice by itself would be as large as the table.
            sizes = [end - first for first, end in self.bounds]
            weights, biases = list(weights[0].split(sizes)), list(biases[0].split(sizes))
        projs: list[Tensor | None] = [None] * len(self.bounds)
        if self.projected:
            # The embedding's where there is none of its own.
            tied = [embedding.projs[0 if self.one_table else i] for i in range(len(self.bounds))]
            projs = [self.projs.get(str(i), proj) for i, proj in enumerate(tied)]
        return list(zip(projs, weights, biases, strict=True))


def _scores(hidden: Tensor, proj: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
    """[..., d_model] -> [..., rows]."""
    return linear(hidden if proj is None else hidden @ proj, weight, bias)


def _float(x: Tensor) -> Tensor:
    """At least float32: sums over a vocabulary lose too much in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

"""Corpora: made by `prepare_corpus` and `prepare_text`, opened by `Corpus`, dealt out by the batches."""

from txl_model.data.batches import OrderedBatches, Segment, ShuffledBatches
from txl_model.data.corpus import Corpus
from txl_model.data.prepare import add_prepare_arguments, prepare_corpus, prepare_text, run_prepare
from txl_model.data.vocabulary import Vocabulary

__all__ = [
    "Corpus",
    "OrderedBatches",
    "Segment",
    "ShuffledBatches",
    "Vocabulary",
    "add_prepare_arguments",
    "prepare_corpus",
    "prepare_text",
    "run_prepare",
]

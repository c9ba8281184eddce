"""The six corpora of the paper: where their text is in an archive, and what the published scripts make of it.

Facts from kimiyoung/transformer-xl (getdata.sh, prep_text8.py, pytorch/data_utils.py) and
salesforce/awd-lstm-lm (data/enwik8/prep_enwik8.py). Sizes as the published loader counts: a line end is a
token, of One Billion Word a `<S>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from txl_model.data.vocabulary import BORDER, EOS, UNKNOWN

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Published:
    """One corpus."""

    title: str
    archive: str  # the file its page offers
    page: str
    unit: str
    # Of each split, the files in the archive (the end of their path, `*` for several); "all": one file, cut
    # by `sizes`.
    members: Mapping[str, str]
    sizes: Mapping[str, int]  # of each split: bytes where the unit is not the word, else words and line ends
    vocab_size: int
    cutoffs: tuple[int, ...] = ()  # of the published models' adaptive softmax
    counted: tuple[str, ...] = SPLITS  # the splits that make the vocabulary
    special: tuple[str, ...] = ()
    lower_case: bool = False
    line_end: str = ""
    unknown: str | None = None  # stands for words that the vocabulary lacks
    vocab_file: str = ""  # a list of words that takes the place of counting
    vocab_page: str = ""
    stripped: int = 0  # the white space at both ends of a split is no part of it: so many bytes at most
    tolerance: float = 0.0  # of sizes and vocab_size, relative

    def how_to_get(self) -> str:
        """A sentence for who lacks a file."""
        text = f"Get {self.archive} from {self.page}"
        if self.vocab_file:
            text += f", and {self.vocab_file} from {self.vocab_page}"
        return f"{text}; nothing is downloaded for you."


_CHARACTERS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
_MAHONEY = "http://mattmahoney.net/dc/textdata.html"
_WIKITEXT = "https://www.salesforce.com/blog/the-wikitext-long-term-dependency-language-modeling-dataset/"
_WIKITEXT_FILES = {split: f"wiki.{split}.tokens" for split in SPLITS}

PUBLISHED = {
    # Line ends are not tokens: the published script writes a line end as a line end, and the loader drops
    # it. So 204 symbols, where the file has 205 different bytes.
    "enwik8": Published(
        title="enwik8",
        archive="enwik8.zip",
        page=_MAHONEY,
        unit="byte",
        members={"all": "enwik8"},
        sizes=_CHARACTERS,
        vocab_size=204,
    ),
    "text8": Published(
        title="text8",
        archive="text8.zip",
        page=_MAHONEY,
        unit="char",
        members={"all": "text8"},
        sizes=_CHARACTERS,
        vocab_size=27,
        lower_case=True,
        stripped=2,
    ),
    "wt103": Published(
        title="WikiText-103",
        archive="wikitext-103-v1.zip",
        page=_WIKITEXT,
        unit="word",
        members=_WIKITEXT_FILES,
        sizes={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        vocab_size=267_735,
        cutoffs=(20_000, 40_000, 200_000),
        counted=("train",),
        special=(EOS,),
        line_end=EOS,
        unknown=UNKNOWN,
    ),
    "wt2": Published(
        title="WikiText-2",
        archive="wikitext-2-v1.zip",
        page=_WIKITEXT,
        unit="word",
        members=_WIKITEXT_FILES,
        sizes={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        vocab_size=33_278,
        special=(EOS,),
        line_end=EOS,
        unknown=UNKNOWN,
    ),
    "ptb": Published(
        title="Penn Treebank",
        archive="simple-examples.tgz",
        page="http://www.fit.vutbr.cz/~imikolov/rnnlm/",
        unit="word",
        members={split: f"ptb.{split}.txt" for split in SPLITS},
        sizes={"train": 929_589, "valid": 73_760, "test": 82_430},
        vocab_size=10_000,
        special=(EOS,),
        lower_case=True,
        line_end=EOS,
        unknown=UNKNOWN,
    ),
    # 768,648,884 words in 30,301,028 sentences; 153,583 in 6,075. Counts differ in the sixth digit with
    # what is taken for white space, and the list of words is counted as 793,470 too. As published, valid
    # and test are one text.
    "lm1b": Published(
        title="One Billion Word",
        archive="1-billion-word-language-modeling-benchmark-r13output.tar.gz",
        page="https://www.statmt.org/lm-benchmark/",
        unit="word",
        members={
            "train": "training-monolingual.tokenized.shuffled/news.en-*",
            "valid": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
            "test": "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050",
        },
        sizes={"train": 798_949_912, "valid": 159_658, "test": 159_658},
        vocab_size=793_471,
        cutoffs=(60_000, 100_000, 640_000),
        line_end=BORDER,
        unknown="<UNK>",
        vocab_file="1b_word_vocab.txt",
        vocab_page="https://github.com/rafaljozefowicz/lm",
        tolerance=1e-5,
    ),
}

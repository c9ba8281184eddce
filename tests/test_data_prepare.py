"""Prepared corpora: what the published scripts and loader make of the same archives, and any text.

The published scripts (prep_enwik8.py, prep_text8.py, getdata.sh), vocabulary and loader
(kimiyoung/transformer-xl) are stated again here. The archives have the form of the real ones, with a little
made-up text in them.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import random
import resource
import signal
import sys
import tarfile
import tempfile
import time
import types
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import python
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_model.data import (
    Corpus,
    OrderedBatches,
    ShuffledBatches,
    Vocabulary,
    add_prepare_arguments,
    prepare,
    prepare_corpus,
    prepare_text,
    run_prepare,
    sources,
    vocabulary,
)
from txl_model.data.corpus import token_dtype
from txl_model.data.published import PUBLISHED, SPLITS
from txl_model.data.vocabulary import read_symbols

# ----------------------------------------------------------------------------- the published code, once more


def prep_enwik8(data, sizes):
    """The three files: bytes as numbers with a blank between, but a line end as a line end."""
    for part in cut(data, sizes):
        yield " ".join("\n" if byte == 10 else str(byte) for byte in part).encode()


def prep_text8(data, sizes):
    for part in cut(data, sizes):
        yield " ".join("_" if c == " " else c for c in part.decode().strip()).encode()


def cut(data, sizes):
    valid, test = sizes["valid"], sizes["test"]
    return data[: -valid - test], data[-valid - test : -test], data[-test:]


def published_symbols(path, kind):
    """Line by line, as Vocab.tokenize."""
    for line in path.read_text(encoding="utf-8").splitlines():
        yield (line.strip().lower() if kind in ("ptb", "enwik8", "text8") else line.strip()).split()


def published_loader(folder, kind):
    """Symbols in the order of their numbers, and of each split a list of numbers per line."""
    if kind == "lm1b":
        symbols = [line.split()[0] for line in (folder / "1b_word_vocab.txt").read_text().splitlines()]
        shards = folder.glob("*/training-monolingual.tokenized.shuffled/news.en-*")
        files = {"train": sorted(shards), "valid": [folder / "valid.txt"], "test": [folder / "test.txt"]}
    else:
        files = {split: [folder / f"{split}.txt"] for split in SPLITS}
        counts = Counter()
        for split in ["train"] if kind == "wt103" else SPLITS:
            for line in published_symbols(*files[split], kind):
                counts.update(line)
        symbols = [] if kind in ("enwik8", "text8") else ["<eos>"]
        symbols += [symbol for symbol, _ in counts.most_common() if symbol not in symbols]
    number = {symbol: i for i, symbol in enumerate(symbols)}
    before, after = {"enwik8": ([], []), "text8": ([], []), "lm1b": (["<S>"], ["<S>"])}.get(
        kind, ([], ["<eos>"])
    )
    lines = {
        split: [
            [number.get(symbol, number.get("<UNK>")) for symbol in [*before, *line, *after]]
            for path in paths
            for line in published_symbols(path, kind)
        ]
        for split, paths in files.items()
    }
    return symbols, lines


# ------------------------------------------------------------------------------------------- made-up archives

KINDS = tuple(PUBLISHED)
SIZES = {"train": 900, "valid": 70, "test": 80}
LM1B = "1-billion-word-language-modeling-benchmark-r13output"
WORDS = [
    "The",
    "the",
    "of",
    "and",
    "N",
    "<unk>",
    "dog",
    "Dog",
    "cat",
    "Ünïted",
    "naïve",
    "中国",
    "@-@",
    ",",
    ".",
    "=",
    "U.S.",
    "zebra",
    "yacht",
    "x-ray",
    "Quiz",
]


def made_up_lines(n, seed, words=WORDS):
    """Lines as WikiText's: some empty, a blank at both ends."""
    rng = random.Random(seed)
    weights = [1 / (i + 1) for i in range(len(words))]
    for _ in range(n):
        line = rng.choices(words, weights, k=rng.choice([0, 1, 3, 8, 20]))
        yield f" {' '.join(line)} \n" if line else " \n"


def made_up_bytes(n, seed):
    rng = random.Random(seed)
    some = [*b"\n\n  eeeetttaaoin<>[]&;0123\r\t", 0xC3, 0xA9, 0xE4, 0xB8, 0xAD]
    return bytes(rng.choices(some, k=n))


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def make_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def make_tar(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_source(kind, folder):
    """The archive as its page offers it, and the folder that the published scripts make of it."""
    laid_out = folder / "published"
    archive = folder / PUBLISHED[kind].archive
    text = {
        split: "".join(made_up_lines(n, split)).encode()
        for split, n in [("train", 90), ("valid", 9), ("test", 8)]
    }
    if kind in ("enwik8", "text8"):
        data = made_up_bytes(sum(SIZES.values()), kind)
        if kind == "text8":
            data = b" " + bytes(random.Random(8).choices(b"  etaoinshrdlu", k=len(data) - 2)) + b" "
        make_zip(archive, {kind: data})
        prep = prep_enwik8 if kind == "enwik8" else prep_text8
        for split, part in zip(SPLITS, prep(data, SIZES), strict=True):
            write(laid_out / f"{split}.txt", part)
    elif kind == "lm1b":
        train = [
            f"{LM1B}/training-monolingual.tokenized.shuffled/news.en-0000{i}-of-00100" for i in (3, 1, 2)
        ]
        held_out = f"{LM1B}/heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{{}}-of-00050"
        members = {name: "".join(made_up_lines(30, name)).encode() for name in train}
        members[held_out.format(0)], members[held_out.format(1)] = text["valid"], text["test"]
        make_tar(archive, {f"{LM1B}/README": b"not this", **members})
        for name, data in members.items():
            write(laid_out / name, data)
        for split in ("valid", "test"):
            write(laid_out / f"{split}.txt", text["valid"])
        # Not all of the words, and not in the order of their counts.
        listed = [f"{word} {i}\n" for i, word in enumerate(["<S>", "</S>", "<UNK>", *sorted(WORDS[:-3])])]
        for path in (laid_out, folder):
            write(path / "1b_word_vocab.txt", "".join(listed))
    else:
        for split in SPLITS:
            write(laid_out / f"{split}.txt", text[split])
        if kind == "ptb":
            members = {f"./simple-examples/data/ptb.{split}.txt": text[split] for split in SPLITS}
            make_tar(archive, {"./simple-examples/data/ptb.char.train.txt": b"n o t t h i s", **members})
        else:
            folder_name = "wikitext-103" if kind == "wt103" else "wikitext-2"
            make_zip(archive, {f"{folder_name}/wiki.{split}.tokens": text[split] for split in SPLITS})
    return archive, laid_out


@pytest.fixture
def published(monkeypatch, tmp_path):
    """A function: archive, laid-out folder, and what the published loader makes of that; these sizes are
    expected."""

    def make(kind):
        archive, laid_out = make_source(kind, tmp_path)
        symbols, lines = published_loader(laid_out, kind)
        sizes = SIZES
        if PUBLISHED[kind].unit == "word":
            sizes = {split: sum(len(line) - (kind == "lm1b") for line in lines[split]) for split in SPLITS}
        expected = replace(PUBLISHED[kind], sizes=sizes, vocab_size=len(symbols))
        monkeypatch.setitem(PUBLISHED, kind, expected)
        return archive, laid_out, symbols, lines

    return make


def spelled(corpus):
    """The symbols as the published vocabulary has them."""
    symbols = corpus.vocabulary.symbols
    if corpus.unit == "byte":
        return [str(symbol) for symbol in symbols]
    return ["_" if symbol == " " else symbol for symbol in symbols]


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------ the published corpora


@pytest.mark.parametrize("kind", KINDS)
def test_published_corpus(kind, published, tmp_path):
    archive, laid_out, symbols, lines = published(kind)
    corpus = prepare_corpus(kind, archive, tmp_path / "out" / kind)
    assert spelled(corpus) == symbols
    assert corpus.name == kind
    assert (corpus.vocab_size, corpus.unit) == (len(symbols), PUBLISHED[kind].unit)
    assert corpus.cutoffs == PUBLISHED[kind].cutoffs
    assert corpus.splits == SPLITS
    for split in SPLITS:
        tokens = corpus.tokens(split).tolist()
        if kind == "lm1b":  # the border between two sentences is one token, and belongs to both
            places = corpus.sentences(split).tolist()
            got = [tokens[first : last + 1] for first, last in itertools.pairwise(places)]
            assert got == lines[split]
        else:
            assert tokens == [token for line in lines[split] for token in line]
            assert corpus.sentences(split) is None
        digest = hashlib.sha256((corpus.folder / f"{split}.bin").read_bytes()).hexdigest()
        assert corpus.identity["sha256"][split] == digest
        assert digest in corpus.summary()
    source = corpus.description["source"]
    assert source["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert (source["name"], source["bytes"]) == (archive.name, archive.stat().st_size)
    corpus.verify()
    # The same from whatever else is found: what the published scripts leave, a folder with the archive.
    other = prepare_corpus(kind, laid_out, tmp_path / "out2")
    assert other.identity == corpus.identity
    assert other.vocabulary == corpus.vocabulary
    if kind != "lm1b":
        for path in laid_out.iterdir():
            path.unlink()
        archive.rename(laid_out / archive.name)
        assert prepare_corpus(kind, laid_out, tmp_path / "out3").identity == corpus.identity


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_archive(kind, published, tmp_path):
    archive, _, symbols, _ = published(kind)
    unpacked = tmp_path / "unpacked"
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(unpacked)
    else:
        with tarfile.open(archive) as packed:
            # Python 3.14 wants to be told; before 3.10.12 and 3.11.4 there is nothing to tell.
            packed.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    if kind == "lm1b":
        (tmp_path / "1b_word_vocab.txt").rename(unpacked / "1b_word_vocab.txt")
    corpus = prepare_corpus(kind, unpacked, tmp_path / "out")
    assert spelled(corpus) == symbols
    if kind in ("enwik8", "text8"):
        assert prepare_corpus(kind, unpacked / kind, tmp_path / "out2").identity == corpus.identity


def test_one_billion_word_is_read_by_sentences_and_the_others_in_order(published, tmp_path):
    archive, *_, lines = published("lm1b")
    corpus = prepare_corpus("lm1b", archive, tmp_path / "out", vocab_file=tmp_path / "1b_word_vocab.txt")
    assert corpus.description["splits"]["train"]["files"] == [30, 60, 90]
    train, valid = corpus.batches("train", 2, 8, seed=3), corpus.batches("valid", 2, 8)
    assert isinstance(train, ShuffledBatches)
    assert train.shuffle
    assert train.files == [30, 60, 90]
    assert not valid.shuffle
    for segment in train.one_epoch():  # each label is the token after its own, by whatever sentence it is in
        pairs = {pair for line in lines["train"] for pair in itertools.pairwise(line)}
        got = zip(segment.input_ids.flatten().tolist(), segment.labels.flatten().tolist(), strict=True)
        assert set(got) <= pairs
    with pytest.raises(ValueError, match="varlen is for running text"):
        corpus.batches("train", 2, 8, varlen=True)


def test_batches_of_running_text(published, tmp_path):
    archive, *_, lines = published("ptb")
    corpus = prepare_corpus("ptb", archive, tmp_path / "out")
    batches = corpus.batches("valid", 1, 7, ext_len=2, varlen=True, seed=5, rows=range(1))
    assert isinstance(batches, OrderedBatches)
    assert (batches.ext_len, batches.varlen, batches.seed) == (2, True, 5)
    labels = torch.cat([segment.labels[0] for segment in corpus.batches("valid", 1, 7).one_epoch()])
    assert labels.tolist() == [token for line in lines["valid"] for token in line][1:]


def test_facts_of_the_published_corpora():
    from txl_model.presets import PRESETS

    for preset in PRESETS:
        kind = preset.split("-")[0]
        if kind in PUBLISHED:
            model = PRESETS[preset]["model"]
            assert model["vocab_size"] == PUBLISHED[kind].vocab_size
            assert tuple(model.get("cutoffs", ())) == PUBLISHED[kind].cutoffs
    for kind in ("enwik8", "text8"):
        assert sum(PUBLISHED[kind].sizes.values()) == 100_000_000
    assert PUBLISHED["lm1b"].sizes["train"] == 768_648_884 + 30_301_028


# ----------------------------------------------------------------------- what is missing, damaged or
# another text


@pytest.mark.parametrize("kind", KINDS)
def test_missing_source_says_what_and_how_to_get_it(kind, tmp_path):
    how = f"Get {PUBLISHED[kind].archive} from http"
    with pytest.raises(FileNotFoundError, match=rf"nowhere does not exist. {how}"):
        prepare_corpus(kind, tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"neither {PUBLISHED[kind].archive} nor .*{how}"):
        prepare_corpus(kind, tmp_path / "empty", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("kind", KINDS)
def test_missing_split(kind, published, tmp_path):
    _, laid_out, *_ = published(kind)
    (laid_out / "valid.txt").unlink()
    for path in laid_out.glob("*/heldout*/*00000*"):
        path.unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"train.* text, but not .*{PUBLISHED[kind].members.get('valid', '')}"
    ):
        prepare_corpus(kind, laid_out, tmp_path / "out")


def test_missing_list_of_words(published, tmp_path):
    archive, laid_out, *_ = published("lm1b")
    (tmp_path / "1b_word_vocab.txt").unlink()
    for source, options in [(archive, {}), (laid_out, {"vocab_file": tmp_path / "words.txt"})]:
        with pytest.raises(
            FileNotFoundError, match=r"list of words, is missing.*1b_word_vocab.txt from http"
        ):
            prepare_corpus("lm1b", source, tmp_path / "out", **options)
    for content, message in [
        ("<S> 1\n\nword 1\n", "line 2 is empty"),
        ("<S> 1\nword 1\n", "does not list <UNK>"),
        ("<UNK> 1\nword 1\n", "does not list <S>"),
        (b"<S>\n\xff\xfe\n", "not UTF-8"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare_corpus("lm1b", laid_out, tmp_path / "out", vocab_file=write(tmp_path / "v", content))


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_than_published(kind, published, monkeypatch, tmp_path):
    archive, *_ = published(kind)
    expected = PUBLISHED[kind]
    for split in SPLITS:
        sizes = {**expected.sizes, split: expected.sizes[split] + 1 + expected.stripped}
        monkeypatch.setitem(PUBLISHED, kind, replace(expected, sizes=sizes))
        with pytest.raises(
            ValueError, match=rf"{expected.title} (as published: .* of {split} text|has [\d,]*\.)"
        ):
            prepare_corpus(kind, archive, tmp_path / "out")
    monkeypatch.setitem(PUBLISHED, kind, replace(expected, vocab_size=expected.vocab_size + 1))
    with pytest.raises(ValueError, match=f"{expected.vocab_size:,} symbols instead of"):
        prepare_corpus(kind, archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_real_sizes_are_expected(tmp_path):
    archive, laid_out = make_source("enwik8", tmp_path)
    with pytest.raises(ValueError, match="enwik8 has 1,050 bytes, enwik8 has 100,000,000"):
        prepare_corpus("enwik8", archive, tmp_path / "out")
    with pytest.raises(ValueError, match="900 bytes of train text instead of 90,000,000"):
        prepare_corpus("enwik8", laid_out, tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_archive(kind, published, tmp_path):
    archive, *_ = published(kind)
    whole = archive.read_bytes()
    flipped = bytearray(whole)
    for i in range(len(whole) // 3, len(whole) // 3 + 40):
        flipped[i] ^= 0xFF
    for data in (whole[: len(whole) // 2], whole[:30], bytes(flipped)):
        archive.write_bytes(data)
        with pytest.raises(ValueError, match=r"is damaged or incomplete .* Get .* from http"):
            prepare_corpus(kind, archive, tmp_path / "out")
    archive.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match=r"is no archive|has 17 bytes"):
        prepare_corpus(kind, archive, tmp_path / "out")
    archive.write_bytes(b"")
    with pytest.raises(ValueError, match=r"is no archive|has 0 bytes"):
        prepare_corpus(kind, archive, tmp_path / "out")
    (make_zip if archive.suffix == ".zip" else make_tar)(archive, {"another/file.txt": b"text"})
    with pytest.raises(ValueError, match=r"has no .*Get"):
        prepare_corpus(kind, archive, tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def test_numbers_that_are_none(published, tmp_path):
    _, laid_out, *_ = published("enwik8")
    for text in ("60 109 x", "60 256"):
        write(laid_out / "train.txt", text)
        with pytest.raises(ValueError, match=r"train.txt is not what prep_enwik8.py writes"):
            prepare_corpus("enwik8", laid_out, tmp_path / "out")


def test_two_corpora_below_one_folder(published, tmp_path):
    archive, *_ = published("wt2")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "both/a")
        packed.extractall(tmp_path / "both/b")
    with pytest.raises(ValueError, match=r"wiki.train.tokens more than once"):
        prepare_corpus("wt2", tmp_path / "both", tmp_path / "out")


def test_archive_that_points_outside(published, tmp_path):
    archive, *_ = published("enwik8")
    with zipfile.ZipFile(archive) as packed:
        data = packed.read("enwik8")
    inside = tmp_path / "a/b/c"
    inside.mkdir(parents=True)
    make_zip(archive, {"../../enwik8": data})
    assert prepare_corpus("enwik8", archive, inside / "out").vocab_size > 20
    assert [path.name for path in (tmp_path / "a").rglob("enwik8")] == []


def test_unknown_kind(tmp_path):
    with pytest.raises(ValueError, match=r"one of enwik8, .*, got 'enwik9'"):
        prepare_corpus("enwik9", tmp_path, tmp_path / "out")


# ----------------------------------------------------------------------------------------------- any text


def folder_of(tmp_path, files):
    for name, data in files.items():
        write(tmp_path / name, data)
    return tmp_path


def text_of(corpus, split):
    return corpus.vocabulary.decode(corpus.tokens(split).tolist())


SHARES = st.sampled_from([(0.0, 0.0), (0.2, 0.0), (0.0, 0.3), (0.1, 0.1), (0.3, 0.4), (0.05, 0.9)])
TEXTS = st.lists(st.text(st.sampled_from("ab \n\r\té中😀"), max_size=60), min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(TEXTS, st.sampled_from(["byte", "char", "word"]), SHARES, st.booleans())
def test_splits_hold_all_of_the_text_once(texts, unit, shares, whole_files):
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for i, text in enumerate(texts):
            write(root / f"in/{i}.txt", text)
        data = b"".join(text.encode() for text in texts)
        try:
            corpus = prepare_text(
                root / "in", root / "out", unit=unit, valid=shares[0], test=shares[1], whole_files=whole_files
            )
        except ValueError as error:
            assert any(words in str(error) for words in ("holds no text", "nothing is left", "too little"))
            assert not (root / "out").exists()
            return
        assert corpus.splits == tuple(s for s, n in zip(SPLITS, (1, *shares), strict=True) if n > 0)
        tokens = {split: corpus.tokens(split).tolist() for split in corpus.splits}
        if unit == "byte":
            assert all(len(part) > 1 for part in tokens.values())
            parts = {split: bytes(part) for split, part in tokens.items()}
        elif unit == "char":  # what only a held-out split has is unknown
            known = set(corpus.vocabulary.symbols)
            data = "".join(c if c in known else "?" for c in data.decode())
            parts = {split: text_of(corpus, split).replace("<unk>", "?") for split in tokens}
        else:
            known = set(corpus.vocabulary.symbols)
            data = [w if w in known else "<unk>" for text in texts for w in text.split()]
            parts = {split: [w for w in text_of(corpus, split).split()] for split in tokens}
        if whole_files:
            assert sum(map(len, parts.values())) == len(data)
            assert Counter(itertools.chain(*parts.values())) == Counter(data)
        else:
            assert [x for split in SPLITS for x in parts.get(split, [])] == list(data)
        if unit == "byte" and not whole_files:
            for split, share in zip(("valid", "test"), shares, strict=True):
                assert share == 0 or abs(len(parts[split]) - share * len(data)) <= 1


def test_words_are_counted_in_train_and_lines_end(tmp_path):
    folder_of(tmp_path / "in", {"a.txt": "b a\n\nB b\ta\nc  <eos>\n", "t.txt": "a z b\nlast line"})
    corpus = prepare_text(tmp_path / "in", tmp_path / "out", unit="word", valid=0, test="t*")
    assert corpus.vocabulary.symbols == ("<eos>", "<unk>", "b", "a", "B", "c")
    assert text_of(corpus, "train") == "b a \n\nB b a \nc \n\n"
    assert text_of(corpus, "test") == "a <unk> b \n<unk> <unk> \n"
    lower = prepare_text(
        tmp_path / "in", tmp_path / "lower", unit="word", valid=0, test="t*", lower_case=True
    )
    assert lower.vocabulary.symbols == ("<eos>", "<unk>", "b", "a", "c")
    few = prepare_text(tmp_path / "in", tmp_path / "few", unit="word", valid=0, test="t*", min_freq=2)
    assert few.vocabulary.symbols == ("<eos>", "<unk>", "b", "a")
    assert text_of(few, "train") == "b a \n\n<unk> b a \n<unk> \n\n"
    two = prepare_text(tmp_path / "in", tmp_path / "two", unit="word", valid=0, test="t*", max_size=1)
    assert two.vocabulary.symbols == ("<eos>", "<unk>", "b")
    assert two.description["options"]["max_size"] == 1
    chars = prepare_text(tmp_path / "in", tmp_path / "chars", unit="char", valid=0, test="t*", min_freq=3)
    assert chars.vocabulary.symbols == ("<unk>", " ", "\n")


def test_words_are_cut_at_line_ends(tmp_path):
    lines = [f"line {i} has {i * 7 % 11} words\n" for i in range(100)]
    corpus = prepare_text(
        write(tmp_path / "a.txt", "".join(lines)), tmp_path / "out", unit="word", valid=0.2, test=0.1
    )
    texts = [text_of(corpus, split).replace(" \n", "\n") for split in SPLITS]
    assert [text.count("\n") for text in texts] == [len(text.splitlines()) for text in texts]
    assert all(text.endswith("words\n") and text.startswith("line") for text in texts)
    assert 68 <= texts[0].count("\n") <= 72
    # One endless line: at blanks, then.
    endless = prepare_text(write(tmp_path / "b.txt", "word " * 1000), tmp_path / "out2", unit="word")
    assert endless.vocabulary.symbols == ("<eos>", "<unk>", "word")
    assert [len(endless.tokens(split)) for split in SPLITS] == [901, 51, 51]


def test_which_files(tmp_path):
    root = folder_of(
        tmp_path / "in",
        {
            "b.txt": "bb", "a/z.txt": "zz", "a/empty.txt": "", "a/y.md": "yy", ".hidden": "hh",
            ".git/x.txt": "xx", "c/d/e.txt": "ee",
        },
    )  # fmt: skip
    (root / "loop").symlink_to(root)
    (root / "link.txt").symlink_to(root / "b.txt")
    (root / "broken.txt").symlink_to(root / "nowhere")

    def read(name, **options):
        return text_of(prepare_text(root, tmp_path / name, valid=0, test=0, **options), "train")

    assert read("1") == "yyzzbbee"
    assert read("2", pattern="**/*.txt") == "zzbbee"
    assert read("3", pattern="*.txt") == "bb"
    assert read("4", pattern=".git/*") == "xx"
    held = prepare_text(root, tmp_path / "5", valid="**/*.md", test="c/**/*")
    assert [text_of(held, split) for split in SPLITS] == ["zzbb", "yy", "ee"]
    source = held.description["source"]
    assert (source["files"], source["bytes"], source["name"]) == (4, 8, "in")
    sums = [(root / n).read_bytes() for n in ("a/y.md", "a/z.txt", "b.txt", "c/d/e.txt")]
    names = ("a/y.md", "a/z.txt", "b.txt", "c/d/e.txt")
    listing = "".join(f"{hashlib.sha256(d).hexdigest()}  {n}\n" for d, n in zip(sums, names, strict=True))
    assert source["sha256"] == hashlib.sha256(listing.encode()).hexdigest()


@pytest.mark.parametrize("whole_files", [False, True])
def test_names_that_are_not_utf_8(tmp_path, capsys, whole_files):
    root = tmp_path / os.fsdecode(b"caf\xe9")
    names = [os.fsdecode(name) for name in (b"\xff.txt", b"a\xe9.txt", "\ue000.txt".encode(), b"z.txt")]
    folder_of(root, {name: name[0] * 50 for name in names if "\udcff" not in name} | {names[0]: "y" * 50})
    whole = ("--whole-files",) if whole_files else ()
    out = tmp_path / os.fsdecode(b"out\xff")
    run("text", root, out, "--valid", 0.25, "--test", names[0], *whole)
    assert capsys.readouterr().out.startswith("out\\xff: a vocabulary of 256 bytes")
    corpus = Corpus.open(out)
    assert corpus.name == "out\\xff" and corpus.description["source"]["name"] == "caf\\xe9"
    assert corpus.description["options"]["test"] == names[0]
    digests = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
    listing = b"".join(
        f"{digests[n]}  ".encode() + os.fsencode(n) + b"\n" for n in sorted(names, key=os.fsencode)
    )
    assert corpus.description["source"]["sha256"] == hashlib.sha256(listing).hexdigest()
    assert prepare_text(root / names[0], tmp_path / "one").description["source"]["name"] == "\\xff.txt"


@pytest.mark.parametrize("unit", ["byte", "char", "word"])
def test_byte_order_marks(tmp_path, unit):
    """At the beginning of a file, and nowhere else, they are no text; to bytes they are."""
    mark = "\ufeff"
    folder_of(
        tmp_path / "in", {"1": f"{mark}one {mark}two\n", "2": f"{mark}one two\n", "3": f"{mark}a {mark}b"}
    )
    corpus = prepare_text(tmp_path / "in", tmp_path / "out", unit=unit, valid=0, test="3")
    text = text_of(corpus, "train")
    if unit == "byte":
        assert text == f"{mark}one {mark}two\n{mark}one two\n"
    else:
        assert text.replace(" \n", "\n") == f"one {mark}two\none two\n"
        assert mark not in corpus.vocabulary.symbols or unit == "char"
        assert "one" not in corpus.vocabulary.symbols or unit == "word"
    assert corpus.description["splits"]["train"]["tokens"] == {"byte": 25, "char": 17, "word": 6}[unit]


def test_a_word_longer_than_what_is_read_at_once_is_cut_between_characters(tmp_path, monkeypatch):
    for module in (sources, vocabulary):
        monkeypatch.setattr(module, "CHUNK", 16)
    source = write(tmp_path / "text", "\u4e2d\u6587" * 100)
    for share in range(1, 12):
        corpus = prepare_text(source, tmp_path / f"{share}", unit="word", valid=share / 24, test=0.3)
        assert [len(corpus.tokens(split)) for split in SPLITS] == [2, 2, 2]


def test_whole_files_are_held_out_and_always_the_same(tmp_path):
    root = folder_of(tmp_path / "in", {f"{i:02}.txt": f"{i:02}" * 50 for i in range(40)})
    first = prepare_text(root, tmp_path / "1", valid=0.1, test=0.2, whole_files=True)
    again = prepare_text(root, tmp_path / "2", valid=0.1, test=0.2, whole_files=True)
    assert first.identity["sha256"] == again.identity["sha256"]
    assert contents(tmp_path / "1").keys() == contents(tmp_path / "2").keys()
    held = {
        split: {text_of(first, split)[i : i + 2] for i in range(0, 10**4, 100)} - {""} for split in SPLITS
    }
    assert [len(held[split]) for split in SPLITS] == [28, 4, 8]
    assert len(set.union(*held.values())) == 40
    assert held["test"] != {f"{i:02}" for i in range(32, 40)}


def test_no_text_to_be_had(tmp_path):
    empty = write(tmp_path / "empty.txt", "")
    (tmp_path / "folder").mkdir()
    short = write(tmp_path / "short.txt", "ab")
    latin = write(tmp_path / "latin/x.txt", "caf\xe9 au lait\n".encode("latin-1") * 20)
    line = write(tmp_path / "line.txt", "nineteen characters")
    os.mkfifo(tmp_path / "pipe")
    for source, options, error, message in [
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere does not exist"),
        (tmp_path / "folder", {}, ValueError, r"holds no text: no file in it matches '\*\*/\*'"),
        (tmp_path / "latin", {"pattern": "*.py"}, ValueError, r"no file in it matches '\*.py'"),
        (tmp_path / "latin", {"pattern": "/etc/*"}, ValueError, "must be one of paths below"),
        (empty, {}, ValueError, "empty.txt holds no text: it is empty"),
        (short, {}, ValueError, "nothing is left for the (valid|test) split"),
        (tmp_path / "pipe", {}, ValueError, "is a pipe, a device or, .*: copy it to a file first"),
        (Path("/proc/self/status"), {}, ValueError, "a file that does not tell its size, .*: copy it"),
        (short, {"valid": 0, "test": 0.5}, ValueError, "too little is left for the train split: .* has 1"),
        (line, {}, ValueError, r"the valid split: at least 2 tokens are needed, .* has 1\. .*--valid"),
        (line, {"unit": "word", "valid": 0, "test": 0.5}, ValueError, "nothing is left for the test split"),
        (latin, {"unit": "char"}, ValueError, r"x.txt is not UTF-8 text .*--unit byte"),
        (latin, {"unit": "word"}, ValueError, "x.txt is not UTF-8 text"),
        (tmp_path / "latin", {"valid": "*.md"}, ValueError, r"'\*.md', which is to be the valid text"),
        (tmp_path / "latin", {"valid": "*.txt"}, ValueError, "nothing is left for the train split"),
        (latin, {"valid": 0.5, "test": 0.5}, ValueError, "leave nothing to train on"),
        (latin, {"valid": 1.5}, ValueError, "valid must be a share from 0 to 1, or a pattern, got 1.5"),
        (latin, {"unit": "letter"}, ValueError, "unit must be one of byte, char, word, got 'letter'"),
        (latin, {"min_freq": 2}, ValueError, "are for words and characters"),
        (latin, {"lower_case": True}, ValueError, "are for words and characters"),
        (latin, {"unit": "word", "min_freq": -1}, ValueError, "min_freq must not be negative"),
        (latin, {"unit": "word", "max_size": 0}, ValueError, "max_size at least 1"),
    ]:
        with pytest.raises(error, match=message):
            prepare_text(source, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*")), "nothing unfinished is left"


# ---------------------------------------------------------------------- text in pieces, and larger than
# memory


@settings(deadline=None, max_examples=300)
@given(st.text(st.sampled_from("ab\n\r \t中é\u3000\x85"), max_size=80), st.integers(1, 20))
def test_pieces_of_any_size_are_the_same_symbols(text, chunk):
    def read(unit, **rules):
        return list(read_symbols(io.BytesIO(text.encode()), unit, **rules))

    whole = vocabulary.CHUNK
    try:
        vocabulary.CHUNK = chunk
        assert b"".join(data for data, _ in read("byte")) == text.encode()
        assert "".join(piece for piece, _ in read("char")) == text
        assert "".join(piece for piece, _ in read("char", line_end="")) == text.replace("\n", "")
        words = read("word")
    finally:
        vocabulary.CHUNK = whole
    lines, line = [], []
    for some, ends_line in words:
        line += some
        if ends_line:
            lines.append(line)
            line = []
    assert not line
    assert lines == [line.split() for line in io.StringIO(text, newline=None)]


MEASURE = """
from helpers import peak_growth
from txl_model.data import prepare_text

def peak(text, out, unit):
    return peak_growth(lambda: prepare_text(f"{text}.txt", f"{out}-{unit}", unit=unit))[0]

for unit in ("byte", "char", "word"):
    peak("small", "first", unit)  # with what is imported and kept
    print(peak("small", "small", unit), peak("large", "large", unit))
print(peak_growth(lambda: open("large.txt", "rb").read())[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_does_not_grow_with_the_text(tmp_path):
    lines = "".join(made_up_lines(1000, 1)).encode()
    for name, megabytes in (("small", 2), ("large", 24)):
        write(tmp_path / f"{name}.txt", lines * (megabytes * 2**20 // len(lines)))
    *of_units, of_all_text = map(int, python(MEASURE, cwd=tmp_path).stdout.split())
    for small, large in zip(of_units[::2], of_units[1::2], strict=True):
        assert large - small < 10_000 * 1024 and large < 15_000 * 1024
    assert of_all_text > 15_000 * 1024


def test_a_corpus_larger_than_memory_is_read(tmp_path):
    corpus = prepare_text(write(tmp_path / "a.txt", "ab" * 100), tmp_path / "out", valid=0, test=0)
    n_tokens = 2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A file that is all hole takes no disk.
    os.truncate(corpus.folder / "train.bin", n_tokens)
    corpus.description["splits"]["train"]["tokens"] = n_tokens
    write(corpus.folder / "corpus.json", json.dumps(corpus.description))
    tokens = Corpus.open(corpus.folder).tokens("train")
    assert len(tokens) == n_tokens
    batches = OrderedBatches(tokens, 8, 16)
    segment = next(batches)
    assert segment.input_ids[0].tolist() == [97, 98] * 8
    assert segment.input_ids[1:].sum() == 0
    batches.resume({**batches.state(), "place": batches.row_len - 2})
    assert next(batches).input_ids.tolist() == [[0]] * 8


def test_the_smallest_type_that_fits(tmp_path):
    sizes = {2: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}
    assert {size: token_dtype(size) for size in sizes} == sizes
    for n_words, dtype in [(254, torch.uint8), (255, torch.uint16), (65535, torch.uint32)]:
        words = " ".join(f"w{i}" for i in range(n_words))
        source = write(tmp_path / "words.txt", f"{words}\n")
        corpus = prepare_text(source, tmp_path / str(n_words), unit="word", valid=0, test=0)
        tokens = corpus.tokens("train")
        assert tokens.dtype == dtype
        assert tokens.tolist() == [*range(2, n_words + 2), 0]
        assert (corpus.folder / "train.bin").stat().st_size == len(tokens) * dtype.itemsize


# ------------------------------------------------------------------------- the folder is there whole, or
# not at all


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text.txt", "".join(made_up_lines(200, 1)))


def test_what_exists_is_not_overwritten(text, tmp_path):
    out = tmp_path / "out"
    prepare_text(text, out)
    before = contents(out)
    for destination in (out, text):
        with pytest.raises(FileExistsError, match="exists already: remove it, or name another"):
            prepare_text(text, destination)
    assert contents(out) == before


@pytest.mark.parametrize("interrupted", ["sha256", "_write_split", "_write_description"])
def test_interrupted(interrupted, text, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, interrupted, stop)
        prepare_text(text, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [text.name]
    prepare_text(text, tmp_path / "out")


def test_an_empty_folder_stays_and_is_filled(text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    there = out.stat().st_ino
    (out / ".unfinished-1").mkdir()  # as a kill leaves it
    monkeypatch.chdir(out)
    moved, rename = [], os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (moved.append(Path(b).name), rename(a, b)))
    corpus = prepare_text(text, ".")
    assert Path.cwd() == out and out.stat().st_ino == there
    assert corpus.name == "out" and Corpus.open(out).identity == corpus.identity
    assert moved[-1] == "corpus.json" and sorted(moved) == sorted(path.name for path in out.glob("[!.]*"))
    assert contents(out).keys() == contents(prepare_text(text, tmp_path / "new").folder).keys()


def test_a_folder_that_is_filled_meanwhile_is_left_alone(text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    write = prepare._write_description
    monkeypatch.setattr(
        prepare, "_write_description", lambda *args: (write(*args), (out / "train.bin").write_text("other's"))
    )
    with pytest.raises(FileExistsError, match="exists already"):
        prepare_text(text, out)
    assert [path.name for path in out.iterdir()] == ["train.bin"]
    assert (out / "train.bin").read_text() == "other's"


def in_a_process(work):
    """How a process ended that did this: its exit code, or minus the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work() or 0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("killed_after", ["_write_split", "_write_description"])
def test_killed(killed_after, text, tmp_path):
    def work():
        step = getattr(prepare, killed_after)

        def last_step(*args):
            step(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(prepare, killed_after, last_step)
        prepare_text(text, tmp_path / "out")

    assert in_a_process(work) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match=r"no .*out. `txl prepare` makes a corpus"):
        Corpus.open(tmp_path / "out")
    left = [path for path in tmp_path.iterdir() if path != text]
    assert len(left) == 1
    assert left[0].name.startswith(".out.unfinished")
    prepare_text(text, tmp_path / "out")


def test_disk_full(text, tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))  # a file can grow to this and no further
        try:
            prepare_text(text, tmp_path / "out")
        except OSError as error:
            message = f"cannot write {tmp_path / 'out'}: File too large; what was written is removed"
            return 17 if str(error) == message else 18

    assert in_a_process(work) == 17
    assert [path.name for path in tmp_path.iterdir()] == [text.name]


def test_folder_that_cannot_be_made(text, tmp_path):
    with pytest.raises(OSError, match=r"cannot write .*text.txt/out: Not a directory"):
        prepare_text(text, text / "out")
    with pytest.raises(OSError, match=r"cannot write /proc/nowhere/out: "):
        prepare_text(text, "/proc/nowhere/out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions(text, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o000)
    for call in (
        lambda: prepare_text(closed, tmp_path / "o"),
        lambda: prepare_corpus("ptb", closed, tmp_path / "o"),
    ):
        with pytest.raises(PermissionError, match=r"closed cannot be read: permission denied"):
            call()
    with pytest.raises(OSError, match=r"cannot write .*closed/out: Permission denied"):
        prepare_text(text, closed / "out")


def test_permissions_are_looked_at(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sources.os, "access", lambda path, mode: False)
    for make in (
        lambda: prepare_text(tmp_path, tmp_path / "o"),
        lambda: prepare_corpus("ptb", tmp_path, tmp_path / "o"),
    ):
        with pytest.raises(PermissionError, match="cannot be read: permission denied"):
            make()


# ----------------------------------------------------------------------------------------------- opening


def test_open(text, tmp_path):
    corpus = prepare_text(text, tmp_path / "out", unit="word")
    again = Corpus.open(str(tmp_path / "out"))
    assert again == corpus
    assert again.identity == corpus.identity
    assert json.loads(json.dumps(again.identity)) == again.identity
    with pytest.raises(ValueError, match="out has no split 'dev', only train, valid, test"):
        corpus.tokens("dev")


def test_damaged_folder(text, tmp_path):
    out = tmp_path / "out"
    prepare_text(text, out, unit="word")
    good = contents(out)

    def damage(name, data):
        for other, whole in good.items():
            write(out / other, whole)
        if data is None:
            (out / name).unlink()
        else:
            write(out / name, data)

    description = json.loads(good[Path("corpus.json")])
    for name, data, error, message in [
        ("corpus.json", None, FileNotFoundError, "is no prepared corpus: it has no corpus.json"),
        ("corpus.json", good[Path("corpus.json")][:-9], ValueError, "corpus.json is damaged"),
        ("corpus.json", "[]", ValueError, "corpus.json is damaged"),
        ("corpus.json", '{"format": 1}', ValueError, "corpus.json is damaged .*'cutoffs'"),
        ("corpus.json", json.dumps({**description, "format": 9}), ValueError, "has format 9, .* knows 1"),
        ("corpus.json", json.dumps({**description, "vocab_size": 3}), ValueError, "is not the vocabulary of"),
        ("vocabulary.json", None, FileNotFoundError, "vocabulary.json"),
        ("vocabulary.json", "{", ValueError, "vocabulary.json is damaged"),
        ("vocabulary.json", '{"unit": "nibble", "symbols": []}', ValueError, "vocabulary.json is damaged"),
        ("valid.bin", None, FileNotFoundError, "valid.bin is missing: prepare the corpus again"),
        ("valid.bin", good[Path("valid.bin")][:-1], ValueError, r"valid.bin has [\d,]+ bytes instead of"),
    ]:  # fmt: skip
        damage(name, data)
        with pytest.raises(error, match=message):
            Corpus.open(out)
    damage("test.bin", good[Path("test.bin")][:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"test.bin is damaged"):
        Corpus.open(out).verify()


# --------------------------------------------------------------------------------------------- vocabulary


def test_numbers_of_no_symbol():
    for symbols in (Vocabulary.of_bytes(), Vocabulary("char", ("a",)), Vocabulary("word", ("a",))):
        for number in (-1, 256):
            with pytest.raises(IndexError, match=f"{number} is no symbol's number"):
                symbols.decode([0, number])


def test_a_long_word_takes_time_that_grows_with_its_length(monkeypatch):
    """And not with its square."""
    monkeypatch.setattr(vocabulary, "CHUNK", 64)

    def seconds(n):
        began = time.perf_counter()
        list(read_symbols(io.BytesIO(b"x" * n), "word"))
        return time.perf_counter() - began

    assert min(seconds(2**22) for _ in range(3)) < 24 * min(seconds(2**19) for _ in range(3))


def test_text_to_numbers_and_back():
    words = Vocabulary("word", ("<eos>", "<unk>", "the", "cat"), True, "<eos>", "<unk>")
    assert words.encode("The cat\r\n\n sat  on the ") == [2, 3, 0, 0, 1, 1, 2]
    assert words.decode([2, 3, 0, 0, 1]) == "the cat \n\n<unk> "
    assert words.encode("") == []
    sentences = Vocabulary("word", ("<S>", "<UNK>", "a", "b"), line_end="<S>", unknown="<UNK>")
    assert sentences.encode("a b\nc") == [0, 2, 3, 0, 1]
    assert sentences.encode("") == [0]
    enwik8 = Vocabulary("byte", tuple(b" abc\xc3\xa9"), line_end="")
    assert enwik8.encode("a bé\nc") == [1, 0, 2, 4, 5, 3]
    assert enwik8.decode([1, 4, 5, 4]) == "aé\ufffd"
    text8 = Vocabulary("char", tuple(" abc"), lower_case=True, line_end="")
    assert text8.encode("A cab\n") == [1, 0, 3, 1, 2]
    assert text8.decode([1, 0, 3]) == "a c"
    every = Vocabulary.of_bytes()
    assert every.encode("é\r\n") == [0xC3, 0xA9, 13, 10]
    assert every.encode(b"\xff\r") == [255, 13]
    assert words.encode(b"The cat\r\n") == [2, 3, 0]
    for unit in (words, text8):
        with pytest.raises(UnicodeDecodeError):
            unit.encode(b"caf\xe9")
    assert words.unknown_in("The dog sat on the\ncat; the dog") == ["dog", "sat", "on", "cat;"]
    assert sentences.unknown_in("a b\n") == text8.unknown_in("A cab\n") == every.unknown_in("é") == []
    assert text8.unknown_in("Abz z") == ["z"] and enwik8.unknown_in("abz") == [ord("z")]
    for strange, message in [
        (enwik8, r"byte 122 \(b'z'\) is not in"),
        (text8, "'z' is not in the vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            strange.encode("abz")


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 4)))
def test_a_text_that_comes_in_parts(text, cuts):
    every = Vocabulary.of_bytes()
    numbers, decode, parts = every.encode(text), every.decoder(), []
    for n in cuts:
        parts.append(decode(numbers[:n]))
        numbers = numbers[n:]
    assert "".join([*parts, decode(numbers, True)]) == text == every.decode(every.encode(text))


def test_ties_and_limits_of_counting():
    counts = Counter("bbaaccdde")
    make = lambda **options: Vocabulary.from_counts(counts, "char", **options).symbols  # noqa: E731
    assert make() == ("b", "a", "c", "d", "e")
    assert make(special=["<unk>", "c"]) == ("<unk>", "c", "b", "a", "d", "e")
    assert make(max_size=3) == ("b", "a", "c")
    assert make(min_freq=2) == ("b", "a", "c", "d")


# ---------------------------------------------------------------------------------------- the command line


def run(*args):
    parser = argparse.ArgumentParser(prog="txl prepare")
    add_prepare_arguments(parser)
    run_prepare(parser.parse_args([str(arg) for arg in args]))


def test_command_line(published, tmp_path, capsys):
    root = folder_of(tmp_path / "in", {"a.py": "x = 1\n" * 50, "b.py": "y = 2\n" * 50, "c.txt": "not this"})
    run("text", root, tmp_path / "bytes", "--glob", "*.py", "--valid", "b*", "--test", "0")
    corpus = Corpus.open(tmp_path / "bytes")
    assert (corpus.unit, corpus.splits, text_of(corpus, "valid")) == (
        "byte",
        ("train", "valid"),
        "y = 2\n" * 50,
    )
    printed = capsys.readouterr().out
    assert printed.strip() == corpus.summary()
    assert corpus.identity["sha256"]["train"] in printed
    options = [
        "--unit",
        "word",
        "--min-freq",
        "2",
        "--max-size",
        "4",
        "--lower-case",
        "--valid",
        "0.5",
        "--test",
        "0",
        "--whole-files",
    ]
    run("text", root, tmp_path / "words", *options)
    assert Corpus.open(tmp_path / "words").description["options"] == {
        "pattern": "**/*", "valid": 0.5, "test": 0.0, "whole_files": True, "min_freq": 2, "max_size": 4,
    }  # fmt: skip
    archive, _, symbols, _ = published("lm1b")
    run("lm1b", archive, tmp_path / "lm1b", "--vocab-file", tmp_path / "1b_word_vocab.txt")
    assert Corpus.open(tmp_path / "lm1b").vocab_size == len(symbols)
    for wrong in (["text"], ["enwik9", "a", "b"], ["enwik8", "a", "b", "--unit", "word"], []):
        with pytest.raises(SystemExit):
            run(*wrong)


def test_bars_are_optional(text, tmp_path, monkeypatch):
    class Bar(contextlib.nullcontext):
        seen: list[tuple[str, int, int]] = []  # noqa: RUF012

        def __init__(self, desc, total, **_):
            super().__init__(self)
            self.desc, self.total, self.n = desc, total, 0

        def update(self, n):
            self.n += n

        def __exit__(self, *_):
            self.seen.append((self.desc, self.n, self.total))

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))
    prepare_text(text, tmp_path / "1", unit="word", progress=True)
    assert [desc for desc, *_ in Bar.seen] == ["counting", "sha256", "writing"]
    assert all(n == total > 0 for _, n, total in Bar.seen)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    prepare_text(text, tmp_path / "2", unit="word", progress=True)


def test_a_process_reads_its_rows_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(range(256)) * 8)
    corpus = prepare_text(tmp_path / "in", tmp_path / "out")
    whole, part = (next(corpus.batches("train", 4, 7, rows=rows)) for rows in (None, range(1, 3)))
    assert torch.equal(part.input_ids, whole.input_ids[1:3]) and torch.equal(part.labels, whole.labels[1:3])

"""The iterators: what the published ones give, exact resumption, one batch shared by processes.

The published iterators (kimiyoung/transformer-xl, pytorch/data_utils.py) are stated again here, on lists.
"""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txl_model.data import OrderedBatches, ShuffledBatches


def columns(rows):
    return [list(column) for column in zip(*rows, strict=True)]


def published_ordered(data, bsz, bptt, ext_len, lengths=None):
    """LMOrderedIterator: (data, target) of each batch, as rows. `lengths`: what its varlen form draws."""
    n_step = len(data) // bsz
    text = columns([data[row * n_step : (row + 1) * n_step] for row in range(bsz)])  # [n_step][bsz]

    def batch(i, bptt):
        seq_len = min(bptt, n_step - 1 - i)
        return (
            columns(text[max(0, i - ext_len) : i + seq_len]),
            columns(text[i + 1 : i + 1 + seq_len]),
            seq_len,
        )

    if lengths is None:
        for i in range(0, n_step - 1, bptt):
            yield batch(i, bptt)[:2]
        return
    i = 0
    while True:
        *what, seq_len = batch(i, next(lengths))
        i += seq_len
        yield what
        if i >= n_step - 2:
            return


def published_sentences(sentences, bsz, bptt, ext_len):
    """LMShuffledIterator.stream_iterator: (data, target) of each batch, as rows."""
    stream = iter(sentences)
    rows = [[] for _ in range(bsz)]
    before = [[] for _ in range(bsz)]
    while True:
        data, target = [list(tokens) for tokens in before], [[] for _ in range(bsz)]
        for i in range(bsz):
            while len(target[i]) < bptt:
                if len(rows[i]) <= 1:
                    try:
                        rows[i] = next(stream)
                    except StopIteration:
                        return
                n_new = min(len(rows[i]) - 1, bptt - len(target[i]))
                data[i] += rows[i][:n_new]
                target[i] += rows[i][1 : n_new + 1]
                rows[i] = rows[i][n_new:]
        yield data, target
        before = [tokens[len(tokens) - min(len(tokens), ext_len) :] for tokens in data]


def as_published(segment):
    """A segment in that form: the labels of tokens that are read again left out."""
    data, labels = segment.input_ids.tolist(), segment.labels.tolist()
    n_again = {sum(label == -100 for label in row) for row in labels}
    assert len(n_again) == 1, "as many in each row"
    n_again = n_again.pop()
    assert all(label == -100 for row in labels for label in row[:n_again]), "and before all the others"
    return data, [row[n_again:] for row in labels]


def same(a, b):
    return a.new_text == b.new_text and a.input_ids.equal(b.input_ids) and a.labels.equal(b.labels)


def sentence_corpus(lengths):
    """Tokens 0, 1, 2, ... and where sentences with so many labels begin."""
    sentences = torch.tensor([0, *itertools.accumulate(lengths)])
    return torch.arange(int(sentences[-1]) + 1), sentences


def sentence_lists(lengths):
    ends = list(itertools.accumulate(lengths))
    return [list(range(end - n, end + 1)) for n, end in zip(lengths, ends, strict=True)]


# -------------------------------------------------------------------------------------------- running text


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 90), st.integers(1, 5), st.integers(1, 12), st.integers(0, 15))
def test_ordered_is_the_published_iterator(n, batch_size, tgt_len, ext_len):
    if n // batch_size < 2:
        with pytest.raises(ValueError, match="too few"):
            OrderedBatches(torch.arange(n), batch_size, tgt_len)
        return
    batches = OrderedBatches(torch.arange(n), batch_size, tgt_len, ext_len=ext_len)
    want = list(published_ordered(list(range(n)), batch_size, tgt_len, ext_len))
    got = list(batches.one_epoch())
    assert [as_published(segment) for segment in got] == [(data, target) for data, target in want]
    assert len(batches) == len(want)
    # Every label follows its token, and each token but the first of a row is a label once.
    row_len = n // batch_size
    for row in range(batch_size):
        labels = torch.cat([segment.labels[row][segment.labels[row] != -100] for segment in got])
        assert labels.tolist() == list(range(row * row_len + 1, (row + 1) * row_len))
    for segment in got:
        scored = segment.labels != -100
        assert (segment.labels[scored] == segment.input_ids[scored] + 1).all()


def test_epochs_follow_one_another():
    batches = OrderedBatches(torch.arange(23), 2, 4)
    one = list(batches.one_epoch())
    assert [segment.new_text for segment in one] == [True, False, False]
    assert [segment.input_ids.shape[1] for segment in one] == [4, 4, 2]
    for segment, again in zip(itertools.chain(one, one, one), batches, strict=False):
        assert same(segment, again)
    assert batches.epoch == 2
    for segment in one:
        assert segment.input_ids.dtype == segment.labels.dtype == torch.int64
        assert segment.input_ids.is_contiguous()


@settings(deadline=None, max_examples=50)
@given(st.integers(8, 300), st.integers(1, 3), st.integers(3, 30), st.integers(0, 6), st.integers(0, 5))
def test_varlen_is_the_published_iterator_with_the_lengths_it_draws(n, batch_size, tgt_len, ext_len, seed):
    batches = OrderedBatches(torch.arange(n), batch_size, tgt_len, ext_len=ext_len, varlen=True, seed=seed)
    got = [as_published(segment) for segment in batches.one_epoch()]
    lengths = [len(target[0]) for _, target in got]
    assert all(5 <= length <= tgt_len + 15 for length in lengths[:-1])
    assert sum(lengths) in (n // batch_size - 1, n // batch_size - 2), "to the end, but perhaps for one label"
    want = published_ordered(list(range(n)), batch_size, tgt_len, ext_len, iter(lengths))
    assert got == [(data, target) for data, target in want]


def test_varlen_lengths_are_distributed_as_published():
    batches = OrderedBatches(torch.zeros(1_000_000, dtype=torch.uint8), 1, 100, varlen=True)
    lengths = torch.tensor([segment.labels.shape[1] for segment in batches.one_epoch()][:-1]).double()
    halves = (lengths < 75).double().mean().item()
    full = lengths[lengths >= 75]
    assert 0.035 < halves < 0.065
    assert abs(full.mean().item() - 99.5) < 0.3  # int() cuts half a token off, on average
    assert 4.6 < full.std().item() < 5.2
    assert 46 < lengths[lengths < 75].mean().item() < 53
    assert lengths.max() <= 115


def test_varlen_differs_by_seed_and_epoch_only():
    def lengths(seed):
        batches = OrderedBatches(torch.arange(2000), 2, 50, varlen=True, seed=seed)
        epochs = {}
        while batches.epoch < 3:
            segment = next(batches)
            epochs.setdefault(batches.epoch, []).append(segment.labels.shape[1])
        return epochs

    assert lengths(1) == lengths(1)
    assert lengths(1)[0] != lengths(2)[0]
    assert lengths(1)[0] != lengths(1)[1] != lengths(1)[2]
    with pytest.raises(TypeError, match="no fixed number"):
        len(OrderedBatches(torch.arange(2000), 2, 50, varlen=True))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int64])
def test_dtypes_of_token_files(dtype):
    tokens = torch.tensor([255, 0, 7, 254, 3, 9, 11, 200, 5]).to(dtype)
    if dtype == torch.uint16:
        tokens = torch.tensor([65535, 0, 7, 65534, 3, 9, 11, 200, 5]).to(dtype)
    plain = tokens.to(torch.int64)
    sentences = torch.tensor([0, 3, 8])
    for got, want in [
        (OrderedBatches(tokens, 2, 2), OrderedBatches(plain, 2, 2)),
        (ShuffledBatches(tokens, sentences, 2, 2), ShuffledBatches(plain, sentences, 2, 2)),
    ]:
        assert all(same(a, b) for a, b in zip(got.one_epoch(), want.one_epoch(), strict=True))


# ---------------------------------------------------------------------------------------------- sentences

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 8), st.integers(0, 12))
def test_sentences_in_order_are_the_published_iterator(lengths, batch_size, tgt_len, ext_len):
    tokens, sentences = sentence_corpus(lengths)
    batches = ShuffledBatches(tokens, sentences, batch_size, tgt_len, ext_len=ext_len, shuffle=False)
    want = list(published_sentences(sentence_lists(lengths), batch_size, tgt_len, ext_len))
    if not want:
        for read in (batches.one_epoch(), batches):
            with pytest.raises(ValueError, match="too few to fill a segment"):
                next(read)
        return
    assert [as_published(segment) for segment in batches.one_epoch()] == want
    assert [as_published(segment) for segment, _ in zip(batches, want * 2, strict=False)] == want * 2


def dealt_order(segments, lengths):
    """The sentences, in the order in which the rows took them."""
    first = {sentence[0]: i for i, sentence in enumerate(sentence_lists(lengths))}
    return [
        first[token]
        for segment in segments
        for row, labels in zip(*as_published(segment), strict=True)
        for token in row[len(row) - len(labels) :]
        if token in first
    ]


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 8), st.integers(0, 12), st.integers(0, 3))
def test_shuffled_sentences_are_the_published_iterator_in_some_order(
    lengths, batch_size, tgt_len, ext_len, seed
):
    # Of length 1 and more a first token is read before its sentence's others, so the order can be told from
    # it.
    tokens, sentences = sentence_corpus(lengths)
    batches = ShuffledBatches(tokens, sentences, batch_size, tgt_len, ext_len=ext_len, seed=seed)
    if sum(lengths) < batch_size * tgt_len:
        return
    try:
        got = list(batches.one_epoch())
    except ValueError as error:
        assert "too few" in str(error) and sum(lengths) < batch_size * (tgt_len + max(lengths))
        return
    order = dealt_order(got, lengths)
    assert len(set(order)) == len(order), "no sentence twice"
    rest = [i for i in range(len(lengths)) if i not in order]
    listed = sentence_lists(lengths)
    want = list(published_sentences([listed[i] for i in [*order, *rest]], batch_size, tgt_len, ext_len))
    assert [as_published(segment) for segment in got] == want[: len(got)]
    # What is not read is too little for one more segment: less than a row of it is missing in the last one.
    labels = [label for segment in got for row in as_published(segment)[1] for label in row]
    assert len(set(labels)) == len(labels), "no label twice"
    assert sum(lengths) - len(labels) < batch_size * (tgt_len + max(lengths))


def test_files_are_shuffled_and_so_are_the_sentences_of_each():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6] * 30
    files = [60, 61, 140, 240]
    tokens, sentences = sentence_corpus(lengths)
    batches = ShuffledBatches(tokens, sentences, 2, 4, files=files)
    epochs = {}
    while batches.epoch < 8:
        segment = next(batches)
        epochs.setdefault(batches.epoch, []).append(segment)
    orders = [dealt_order(epochs[epoch], lengths) for epoch in range(8)]
    file_of = [next(f for f, end in enumerate(files) if i < end) for i in range(len(lengths))]
    file_orders = [[f for f, _ in itertools.groupby(file_of[i] for i in order)] for order in orders]
    assert all(len(set(f)) == len(f) for f in file_orders), "one file after the other"
    assert len({tuple(f) for f in file_orders}) > 2, "in another order each epoch"
    within = [[i for i in order if file_of[i] == 3] for order in orders]
    assert len({tuple(order) for order in within}) == len(within), "and so are their sentences"
    assert all(len(order) > 90 for order in within)
    other = ShuffledBatches(tokens, sentences, 2, 4, files=files, seed=5)
    assert not same(next(other), next(ShuffledBatches(tokens, sentences, 2, 4, files=files)))


def test_new_text_is_the_start_of_an_epoch_even_if_its_first_file_fills_nothing():
    tokens, sentences = sentence_corpus([1, 8, 8])
    batches = ShuffledBatches(tokens, sentences, 2, 4, files=[1, 3], shuffle=False)
    assert [segment.new_text for segment, _ in zip(batches, range(4), strict=False)] == [True, False] * 2


# --------------------------------------------------------------------------- resuming, and several processes

TEXT = torch.arange(301)
SENTENCES = sentence_corpus([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 4)
MAKERS = {
    "ordered": lambda rows=None: OrderedBatches(TEXT, 3, 16, rows=rows),
    "ordered, ext_len": lambda rows=None: OrderedBatches(TEXT, 3, 16, ext_len=20, rows=rows),
    "varlen": lambda rows=None: OrderedBatches(TEXT, 3, 16, varlen=True, rows=rows),
    "sentences": lambda rows=None: ShuffledBatches(*SENTENCES, 3, 4, rows=rows),
    "files, ext_len": lambda rows=None: ShuffledBatches(
        *SENTENCES, 3, 4, ext_len=6, files=[9, 12, 48], rows=rows
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_resumes_anywhere(name):
    make, n = MAKERS[name], 40
    reading, states, want = make(), [], []
    for _ in range(n):
        states.append(json.dumps(reading.state()))
        want.append(next(reading))
    assert sum(segment.new_text for segment in want) >= 3, "several epochs"
    for i, state in enumerate(states):
        resumed = make()
        for _ in range(i % 3):  # wherever it was
            next(resumed)
        resumed.resume(json.loads(state))
        assert json.loads(json.dumps(resumed.state())) == json.loads(state)
        for a, b in zip(want[i : i + 15], resumed, strict=False):
            assert same(a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_processes_share_the_rows_of_one_batch(name):
    make = MAKERS[name]
    whole, first, second = make(), make(range(0, 1)), make(range(1, 3))
    for _ in range(30):
        assert whole.state() == first.state() == second.state()
        a, b, c = next(whole), next(first), next(second)
        assert a.new_text == b.new_text == c.new_text
        assert a.input_ids.equal(torch.cat([b.input_ids, c.input_ids]))
        assert a.labels.equal(torch.cat([b.labels, c.labels]))


@pytest.mark.parametrize("name", MAKERS)
def test_one_epoch_leaves_the_place_alone(name):
    batches, undisturbed = MAKERS[name](), MAKERS[name]()
    for _ in range(5):
        assert same(next(batches), next(undisturbed))
    state = copy.deepcopy(batches.state())
    epoch = list(batches.one_epoch())
    assert batches.state() == state
    assert same(next(batches), next(undisturbed))
    assert all(same(a, b) for a, b in zip(epoch, MAKERS[name](), strict=False))


def test_a_place_in_other_data_is_refused():
    state = MAKERS["ordered"]().state()
    for other, message in [
        (OrderedBatches(TEXT, 2, 16), "batch_size is 2 now and was 3"),
        (OrderedBatches(TEXT, 3, 8), "tgt_len is 8 now and was 16"),
        (OrderedBatches(TEXT, 3, 16, seed=5), "seed is 5 now and was 1111"),
        (OrderedBatches(TEXT, 3, 16, varlen=True), "varlen is True now and was False"),
        (OrderedBatches(TEXT[:-1], 3, 16), "tokens is 300 now and was 301"),
        (ShuffledBatches(TEXT, torch.tensor([0, 300]), 3, 16), "sentences is 1 now and was None"),
    ]:
        with pytest.raises(ValueError, match=message):
            other.resume(state)


def test_bad_settings():
    places = torch.tensor([0, 5, 300])
    for call, message in [
        (lambda: OrderedBatches(TEXT.view(7, 43), 2, 4), r"1-D, got shape \[7, 43\]"),
        (lambda: OrderedBatches(TEXT, 0, 4), "batch_size must be at least 1, got 0"),
        (lambda: OrderedBatches(TEXT, 2, 0), "tgt_len must be at least 1, got 0"),
        (lambda: OrderedBatches(TEXT, 2, 4, ext_len=-1), "ext_len must be at least 0, got -1"),
        (lambda: OrderedBatches(TEXT, 2, 4, rows=range(1, 3)), r"some of the 2 rows .* got range\(1, 3\)"),
        (lambda: OrderedBatches(TEXT, 2, 4, rows=range(0)), "some of the 2 rows"),
        (lambda: OrderedBatches(TEXT, 151, 4), "301 tokens are too few for a batch of 151"),
        (lambda: ShuffledBatches(TEXT, places[:1], 2, 4), "2 or more"),
        (lambda: ShuffledBatches(TEXT, places + 1, 2, 4), "places in the 301 tokens"),
        (lambda: ShuffledBatches(TEXT, places, 2, 4, files=[1]), "number of sentences, 2"),
        (lambda: ShuffledBatches(TEXT, places, 2, 4, files=[2, 1, 2]), "must rise"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_one_epoch_of_shuffled_sentences_is_the_first() -> None:
    """Wherever the iterator is; and asking for it moves nothing."""
    tokens, sentences = torch.arange(61), torch.arange(0, 61, 3)
    batches = ShuffledBatches(tokens, sentences, 2, 4, files=[8, 20], seed=3)
    n = len(list(batches.one_epoch()))
    first, second = (list(itertools.islice(batches, n)) for _ in range(2))
    assert (batches.epoch, n > 2) == (1, True)
    assert not all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, second, strict=True))
    again = list(batches.one_epoch())
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, again, strict=True))
    assert batches.epoch == 1

"""The training loop: the published computation, written out here once more, and what surrounds
it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import (  # noqa: F401 (one_thread is used by being here)
    ALONE,
    evaluate,
    fingerprint,
    losses,
    make_trainer,
    model_config,
    one_thread,
    run,
    text,
    train_config,
)

from txl_model import TransformerXL, few_tokens
from txl_model.attention import Attention
from txl_model.checkpoint import load_model, save_model
from txl_model.data import OrderedBatches, ShuffledBatches, prepare_text
from txl_model.evaluate import evaluate as evaluate_text
from txl_model.evaluate import validation
from txl_model.log import Log, plot_log, read_log
from txl_model.optim import learning_rate
from txl_model.running import Stopwatch
from txl_model.train import _check_rows, new_model, train

NO_DROPOUT = {"dropout": 0.0, "dropatt": 0.0}
QUIET = {"eval_interval": 0, "save_interval": 0}


def plain_loop(model_fields=None, average=None, **fields) -> list[float]:
    """Losses of training as train.py of the authors does it, in its order, without anything around
    it.
    """
    sizes, config = model_config(**(model_fields or {})), train_config(**fields)
    model = new_model(sizes, config, ALONE)
    if average is not None:
        average.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay)))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, fused=True)
    tgt_len, ext_len = config.segment_lengths(sizes)
    batches = OrderedBatches(
        text(), config.batch_size, tgt_len, ext_len=ext_len, varlen=config.varlen, seed=config.seed
    )
    memory, got = None, []
    for step, segment in zip(range(config.max_step), batches, strict=False):
        if segment.new_text:
            memory = None
        out = model(
            segment.input_ids, memory, segment.labels, ext_len=min(ext_len, segment.input_ids.shape[1])
        )
        memory = out.memory
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.param_groups[0]["lr"] = learning_rate(config, step)
        optimizer.step()
        if average is not None:
            average[0].update_parameters(model)
        got.append(out.loss.item())
    return got


@pytest.mark.parametrize(
    "model_fields, fields",
    [
        ({}, {}),
        ({}, {"varlen": True, "tgt_len": 10}),
        ({}, {"ext_len": 3}),
        ({}, {"half_loss": True, "tgt_len": 7}),
        ({"mem_len": 0}, {"half_loss": True}),
        ({"attn_type": 1, "variational": True}, {"warmup_step": 4}),
        ({"cutoffs": (4, 7), "div_val": 2, "tie_projs": (False, True, True)}, {}),
    ],
    ids=str,
)
def test_losses_are_those_of_the_plain_loop(tmp_path, model_fields, fields):
    """30 steps: 29 segments are an epoch, after which memory begins anew."""
    fields = {"max_step": 30, **QUIET, **fields}
    result = run(tmp_path, model=model_fields, **fields)
    assert result.step == 30 and result.signal is None
    # To the last bit, but for how the mean is taken: of 24 losses by multiplication or by division.
    torch.testing.assert_close(losses(tmp_path), plain_loop(model_fields, **fields), rtol=2e-5, atol=0.0)


def test_it_learns(tmp_path):
    run(tmp_path, max_step=120, lr=0.02, save_interval=0, eval_interval=60)
    evals = [e["loss"] for e in read_log(tmp_path / "log.jsonl") if e["event"] == "eval"]
    # 0.7 of the tokens are the one before plus one: 1.36 nats at best.
    assert evals[-1] < 1.75 < math.log(11)
    assert evaluate(load_model(tmp_path)) == min(evals)


def test_half_loss_scores_each_token_once_after_half_a_segment(tmp_path):
    trainer = make_trainer(tmp_path, model=NO_DROPOUT | {"mem_len": 6}, half_loss=True, tgt_len=6)
    scored = torch.zeros(text().shape[0] // 4, dtype=torch.int64)
    place = 0
    for segment, _ in zip(trainer.batches, range(len(trainer.batches)), strict=False):
        labels = (segment.labels[0] != -100).nonzero().flatten()
        new = len(labels)
        assert labels.tolist() == list(range(segment.input_ids.shape[1] - new, segment.input_ids.shape[1]))
        assert segment.input_ids.shape[1] == (new if segment.new_text else new + 3)
        scored[place + 1 : place + 1 + new] += 1
        place += new
    assert scored[1:].eq(1).all()


@pytest.mark.parametrize("fields", [{}, {"varlen": True}, {"ext_len": 2}], ids=str)
def test_chunks_have_memories_of_their_own_and_the_same_gradients(tmp_path, fields):
    sums = {}
    for chunk in (1, 2, 4):
        run(tmp_path / str(chunk), model=NO_DROPOUT, max_step=32, batch_chunk=chunk, **QUIET, **fields)
        sums[chunk] = losses(tmp_path / str(chunk))
    torch.testing.assert_close(sums[2], sums[1], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(sums[4], sums[1], rtol=1e-5, atol=0.0)
    trainer = make_trainer(tmp_path / "again", batch_chunk=2, max_step=3)
    trainer.run()
    assert [memory.batch_size for memory in trainer.state.memories] == [2, 2]


def test_bf16(tmp_path):
    run(tmp_path / "32", model=NO_DROPOUT, **QUIET)
    trainer = make_trainer(tmp_path / "16", model=NO_DROPOUT, bf16=True, **QUIET)
    trainer.run()
    want, got = losses(tmp_path / "32"), losses(tmp_path / "16")
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0.0)
    assert got != want
    assert all(p.dtype == torch.float32 for p in trainer.state.model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks(tmp_path):
    run(tmp_path / "eager", model=NO_DROPOUT, **QUIET)
    run(tmp_path / "compiled", model=NO_DROPOUT, compile=True, **QUIET)
    torch.testing.assert_close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), rtol=1e-5, atol=0.0)


def test_averaged_weights_are_evaluated_and_kept(tmp_path):
    average = []
    plain_loop(average=average, ema_decay=0.8)
    run(tmp_path, average="ema", ema_decay=0.8)
    for source in (tmp_path / "checkpoints" / "step-00000012", tmp_path):
        loaded = load_model(source)
        for got, want in zip(loaded.parameters(), average[0].module.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)


def test_evaluation_leaves_training_as_it_was(tmp_path):
    run(tmp_path / "with", eval_interval=1)
    run(tmp_path / "without", eval_interval=0)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_dev_perf(tmp_path):
    values = iter([3.0, 2.0, 2.0, 2.0])
    run(
        tmp_path,
        evaluator=lambda model, progress: next(values),
        scheduler="dev_perf",
        max_step=8,
        eval_interval=2,
        lr=0.01,
    )
    log = read_log(tmp_path / "log.jsonl")
    rates = [e["lr"] for e in log if e["event"] == "train"]
    assert rates == [0.01] * 6 + [0.005] * 2
    assert [e["best"] for e in log if e["event"] == "eval"] == [True, True, False, False]


# ------------------------------------------------------------------------------------------ log and events


def test_log_and_events(tmp_path):
    events = []
    result = run(
        tmp_path, on_event=events.append, max_step=10, log_interval=3, eval_interval=4, save_interval=5
    )
    kinds = [(e["event"], e["step"]) for e in events]
    assert kinds == [
        *(("train", 3), ("eval", 4), ("checkpoint", 5), ("train", 6), ("eval", 8), ("train", 9)),
        *(("train", 10), ("eval", 10), ("checkpoint", 10)),
    ]
    assert read_log(tmp_path / "log.jsonl") == [e for e in events if e["event"] in ("train", "eval")]
    run(tmp_path / "each", max_step=10)
    each = losses(tmp_path / "each")
    assert events[0]["loss"] == pytest.approx(sum(each[:3]) / 3, rel=1e-12)
    assert losses(tmp_path) == pytest.approx(
        [sum(each[:3]) / 3, sum(each[3:6]) / 3, sum(each[6:9]) / 3, each[9]], rel=1e-12
    )
    for event in events:
        if "bpc" in event:
            assert event["bpc"] == pytest.approx(event["loss"] / math.log(2))
    line = events[3]
    assert line["tokens"] == 6 * 24 and line["tokens_per_second"] > 0 and line["seconds_left"] > 0
    assert line["grad_norm"] > 0 and line["lr"] == pytest.approx(learning_rate(train_config(max_step=10), 5))
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000010"
    assert result.best_loss == min(e["loss"] for e in events if e["event"] == "eval")
    assert json.loads((tmp_path / "config.json").read_text())["train"]["max_step"] == 10


def test_words_have_perplexity(tmp_path):
    events = []
    run(tmp_path, corpus={"unit": "word"}, on_event=events.append, max_step=1)
    assert events[0]["ppl"] == pytest.approx(math.exp(events[0]["loss"])) and "bpc" not in events[0]


def test_progress_bar(tmp_path, monkeypatch, capsys):
    run(tmp_path / "no terminal", progress=True, max_step=2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    run(tmp_path / "terminal", progress=True, max_step=2)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "bpc=" in shown and "tokens/s=" in shown
    run(tmp_path / "not wanted", progress=False, max_step=2)
    assert capsys.readouterr().err == ""


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    run(tmp_path, max_step=4)
    plot_log(tmp_path / "log.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"empty.jsonl has no losses yet"):
        plot_log(tmp_path / "empty.jsonl", tmp_path / "empty.png")


def test_reading_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.append({"event": "train", "step": 1, "loss": 2.0})
    path.write_text(path.read_text() + '{"event": "train", "st')
    assert [e["step"] for e in read_log(path)] == [1], "a line being written is not there yet"
    path.write_text("nonsense\n" + path.read_text())
    with pytest.raises(ValueError, match=r"log.jsonl, line 1 is no event of a training log"):
        read_log(path)


# ------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(tmp_path, number):
    run(tmp_path / "whole")

    def at_step_5(event):
        if event["event"] == "train" and event["step"] == 5:
            signal.raise_signal(number)

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    result = run(tmp_path / "stopped", on_event=at_step_5)
    assert result.step == 5 and result.signal == number
    assert result.checkpoint == tmp_path / "stopped" / "checkpoints" / "step-00000005"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert run(tmp_path / "stopped", resume=True).step == 12
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_a_signal_that_is_ignored_stays_so(tmp_path):
    """As in a shell's background jobs, which Ctrl-C must not reach."""

    def interrupt(event):
        if event["step"] == 5:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = run(tmp_path, on_event=interrupt)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.step == 12 and result.signal is None


def test_a_second_ctrl_c_is_not_held_back(tmp_path):
    def twice(event):
        if event["step"] == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_event=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run(tmp_path, resume=True).step == 12


def test_a_signal_interrupts_an_evaluation_which_is_made_up_for(tmp_path):
    run(tmp_path / "whole")
    seen = []

    def long(model, progress):
        seen.append(evaluate(model))
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        progress(50)
        return seen[-1]

    result = run(tmp_path / "stopped", evaluator=long)
    assert result.step == 8 and result.signal == signal.SIGINT
    run(tmp_path / "stopped", evaluator=long, resume=True)
    assert seen[1] == seen[2]
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("whole", "stopped")]
    for key in ("event", "step", "loss"):
        assert [e[key] for e in logs[0]] == [e[key] for e in logs[1]]


def test_a_signal_before_the_first_step_saves_nothing(tmp_path):
    class Interrupting:
        def __iter__(self):
            signal.raise_signal(signal.SIGINT)
            return iter(())

    result = run(tmp_path, batches=Interrupting())
    assert result.step == 0 and result.checkpoint is None and result.signal == signal.SIGINT
    assert not list(tmp_path.glob("checkpoints/*"))


def test_in_another_thread(tmp_path):
    thread = threading.Thread(target=run, args=(tmp_path,))
    thread.start()
    thread.join()
    assert len(losses(tmp_path)) == 12


# ----------------------------------------------------------------------------------------------- bad input


def test_divergence_stops_the_run_and_leaves_the_checkpoints(tmp_path):
    class Poisoned(OrderedBatches):
        """At step 8 the weights are no numbers any more."""

        def __next__(self):
            trainer.state.model.bias_u.data *= math.inf if trainer.state.progress.step == 7 else 1.0
            return super().__next__()

    trainer = make_trainer(tmp_path, batches=Poisoned(text(), 4, 6))
    with pytest.raises(ValueError, match=r"diverged: at step 8 the loss is nan .*step-00000006$"):
        trainer.run()
    assert len(losses(tmp_path)) == 7
    for path in (tmp_path, tmp_path / "checkpoints" / "step-00000006"):
        assert all(torch.isfinite(p).all() for p in load_model(path).parameters())
    assert run(tmp_path, resume=True).step == 12


def test_divergence_without_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"diverged: .* is none"):
        run(tmp_path, lr=1e30, clip=0.0, scheduler="constant", save_interval=0, max_step=20)


def test_a_gradient_that_is_no_number_is_divergence_too(tmp_path):
    """The loss of this step is fine; that of the next would not be, and a checkpoint lies between
    them.
    """
    trainer = make_trainer(tmp_path, save_interval=1)
    trainer.state.model.softmax.biases[0].register_hook(lambda grad: grad * math.inf)
    with pytest.raises(ValueError, match=r"at step 1 the loss is 2.* norm (inf|nan)"):
        trainer.run()
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_run_is_not_overwritten(tmp_path):
    run(tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds a training run already: resume it, or name another folder"):
        run(tmp_path)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    assert run(tmp_path, resume=True).step == 12, "there is nothing left to do"
    assert (tmp_path / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_other_things_is_left_alone(tmp_path, resume):
    save_model(TransformerXL(model_config()), tmp_path / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("mine")
    run(tmp_path / "run")
    for folder, there in [
        (tmp_path / "model", "config.json"),
        (tmp_path / "notes", "notes.txt"),
        (tmp_path / "run" / "best", "config.json"),
    ]:
        before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
        with pytest.raises(ValueError, match=rf"is not empty and holds no training run: there is {there} in"):
            run(folder, resume=resume)
        assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_run_that_ended_before_its_first_checkpoint_may_begin_again(tmp_path):
    (tmp_path / ".saving").mkdir()  # as a kill leaves it
    with pytest.raises(ValueError, match="diverged"):
        run(tmp_path, lr=1e30, clip=0.0, scheduler="constant", save_interval=0, max_step=20)
    (tmp_path / "loss.png").write_text("a plot of it")
    assert run(tmp_path).step == 12


def test_batch_that_does_not_divide(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size 4 does not divide into batch_chunk 3"):
        run(tmp_path, batch_chunk=3)


def test_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write to .*file/run: Not a directory"):
        run(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match=r"cannot write to .*run: Permission denied"):
        run(tmp_path / "run")


# --------------------------------------------------------------------------------------------- on a corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text("the cat sat on the mat. a rat sat on a hat!\n" * 40)
    return prepare_text(folder / "text.txt", folder / "corpus", unit="char", valid=0.1, test=0)


@pytest.mark.parametrize(
    "model, fields",
    [
        ({}, {"varlen": True}),
        ({"mem_len": 0}, {"half_loss": True, "bf16": True}),
        ({"attn_type": 1}, {"eval_tgt_len": 3, "eval_max_tokens": 50, "average": "swa"}),
    ],
    ids=str,
)
def test_train_on_a_corpus(tmp_path, corpus, model, fields):
    config = model_config(vocab_size=corpus.vocab_size, **model)
    fields = {
        "max_step": 30,
        "eval_interval": 15,
        "save_interval": 7,
        "log_interval": 3,
        "lr": 0.01,
        **fields,
    }
    whole = train(config, train_config(**fields), corpus, tmp_path / "whole")
    assert whole.step == 30 and whole.best_loss < math.log(corpus.vocab_size)
    log = read_log(tmp_path / "whole" / "log.jsonl")
    assert log[-1]["event"] == "eval" and log[-1]["bpc"] == pytest.approx(log[-1]["loss"] / math.log(2))

    tgt_len, ext_len = train_config(**fields).segment_lengths(config)
    reading = {"tgt_len": fields.get("eval_tgt_len", tgt_len)}
    if not config.mem_len:
        reading = {"tgt_len": tgt_len + ext_len, "stride": tgt_len}
    again = evaluate_text(
        load_model(tmp_path / "whole"),
        corpus.tokens("valid"),
        **reading,
        batch_size=10,
        max_tokens=fields.get("eval_max_tokens"),
        dtype=torch.bfloat16 if fields.get("bf16") else None,
    )
    assert again.loss == pytest.approx(whole.best_loss, rel=1e-6)

    stopped = []

    def stop(event):
        if event["event"] == "train" and event["step"] == 9 and not stopped:
            stopped.append(signal.raise_signal(signal.SIGTERM))

    result = train(config, train_config(**fields), corpus, tmp_path / "stopped", on_event=stop)
    assert result.step == 9 and result.signal == signal.SIGTERM
    train(config, train_config(**fields), corpus, tmp_path / "stopped", resume=True, on_event=stop)
    assert fingerprint(tmp_path / "stopped") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(
    "model, fields, longest",
    [
        ({"mem_len": 8}, {"tgt_len": 3}, 11),
        ({"mem_len": 2, "tgt_len": 2}, {"tgt_len": 8}, 10),
        ({"mem_len": 8}, {"tgt_len": 3, "ext_len": 2, "eval_tgt_len": 9}, 13),
        ({"mem_len": 8}, {"tgt_len": 8, "half_loss": True}, 16),
        ({"mem_len": 0}, {"tgt_len": 8, "half_loss": True}, 8),
    ],
    ids=str,
)
def test_evaluation_sees_as_many_keys_as_training(monkeypatch, corpus, model, fields, longest):
    config = model_config(vocab_size=corpus.vocab_size, **model)
    evaluator = validation(corpus, config, train_config(**fields))
    seen, attend = [], Attention._attend

    def watched(self, q, k, *rest):
        seen.append(k.shape[2])
        return attend(self, q, k, *rest)

    monkeypatch.setattr(Attention, "_attend", watched)
    monkeypatch.setattr(few_tokens, "read", lambda *_: None)
    assert evaluator is not None
    evaluator(TransformerXL(config), lambda n: None)
    assert max(seen) == longest


@pytest.mark.parametrize(
    "model, fields, message",
    [
        ({"mem_len": 4}, {"tgt_len": 4, "eval_tgt_len": 9}, "eval_tgt_len must be at most 8, a training"),
        ({"mem_len": 4, "same_length": True}, {"tgt_len": 4, "eval_tgt_len": 8}, "must be less than 8 with"),
    ],
)
def test_evaluation_that_could_never_work(tmp_path, corpus, model, fields, message):
    """Said at the start."""
    config = model_config(vocab_size=corpus.vocab_size, **model)
    with pytest.raises(ValueError, match=message):
        train(config, train_config(max_step=2, **fields), corpus, tmp_path / "run")


def test_a_corpus_without_a_validation_text(tmp_path, corpus):
    description = {**corpus.description, "splits": {"train": corpus.description["splits"]["train"]}}
    only_train = dataclasses.replace(corpus, description=description)
    config = model_config(vocab_size=corpus.vocab_size)
    result = train(config, train_config(max_step=4), only_train, tmp_path / "run")
    assert result.best_loss is None
    assert load_model(tmp_path / "run").config == config
    with pytest.raises(ValueError, match=r"dev_perf follows the validation loss, and .* has no split valid"):
        train(config, train_config(scheduler="dev_perf"), only_train, tmp_path / "other")


@pytest.mark.parametrize("fields", [{}, {"varlen": True}, {"half_loss": True}], ids=str)
def test_a_segment_longer_than_a_row(tmp_path, corpus, fields):
    """It would be the whole text in one step."""
    n_token = len(corpus.tokens("train"))
    row = n_token // 4
    config = model_config(vocab_size=corpus.vocab_size, tgt_len=row)
    message = rf"tgt_len {row} is too long .* {n_token:,} tokens are {row} in each of the 4 rows .* {row - 1}"
    with pytest.raises(ValueError, match=message):
        train(config, train_config(**fields), corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(config, train_config(max_step=1, tgt_len=row - 1, **fields), corpus, tmp_path / "run")


def test_another_corpus(tmp_path, corpus):
    config = model_config(vocab_size=corpus.vocab_size)
    train(config, train_config(max_step=4), corpus, tmp_path / "run")
    splits = corpus.description["splits"]
    splits = {**splits, "train": {**splits["train"], "sha256": "0"}}
    other = dataclasses.replace(corpus, description={**corpus.description, "splits": splits})
    with pytest.raises(ValueError, match=r"begun with corpus sha256 = .*, now it is {'train': '0', "):
        train(config, train_config(max_step=8), other, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"corpus has 1\d symbols, the model only vocab_size = 5"):
        train(model_config(vocab_size=5), train_config(), corpus, tmp_path / "small")


CONSTANT = {**QUIET, "scheduler": "constant"}


def test_each_block_is_compiled_where_asked(tmp_path: Path) -> None:
    for wanted in (False, True):
        trainer = make_trainer(tmp_path, compile=wanted, **CONSTANT)
        assert [block._compiled_call_impl is not None for block in trainer.state.model.blocks] == [wanted] * 2


def test_sentences(tmp_path: Path) -> None:
    """They have no rows that could be too short, and are trained on as running text is."""

    def batches() -> ShuffledBatches:
        return ShuffledBatches(text(), torch.arange(0, 700, 5), 4, 6)

    _check_rows(batches(), model_config(), train_config())
    run(tmp_path / "whole", batches=batches(), **CONSTANT)
    run(tmp_path / "parts", batches=batches(), max_step=5, **CONSTANT)
    run(tmp_path / "parts", batches=batches(), resume=True, **CONSTANT)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 12


def test_stopwatch(monkeypatch) -> None:
    """What is paused does not count, and each line of the log begins anew."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    for _ in range(2):
        for tokens in (30, 50):
            now[0] += 2.0
            watch.count(tokens)
        with watch.paused():
            now[0] += 1000.0
        assert (watch.rate(), watch.seconds_per_step()) == (80 / 4.0, 4.0 / 2)
        watch.restart()


def test_the_first_step_is_evaluated_and_no_earlier_one(tmp_path: Path) -> None:
    run(tmp_path, max_step=3, eval_interval=1, save_interval=0)
    evaluated = [event["step"] for event in read_log(tmp_path / "log.jsonl") if event["event"] == "eval"]
    assert evaluated == [1, 2, 3]

"""The `txl` command from end to end on a small text, its options, its messages and exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields

import helpers
import pytest
import torch

pytest.importorskip("safetensors")
pytest.importorskip("tqdm")

import txl_kernels
import txl_model.attention
from txl_kernels import cpu, registry
from txl_model import TransformerXLConfig, __main__, cli
from txl_model.checkpoint import load_model, save_model
from txl_model.data import OrderedBatches, Vocabulary
from txl_model.optim import learning_rate
from txl_model.presets import PRESETS
from txl_model.train_config import TrainConfig

SMALL = [
    *("--preset", "tiny", "--n-layer", "2", "--d-model", "32", "--n-head", "2", "--d-inner", "64"),
    *("--tgt-len", "16", "--mem-len", "24", "--batch-size", "2", "--eval-max-tokens", "200"),
    *("--log-interval", "2", "--eval-interval", "4", "--save-interval", "3", "--quiet"),
]


def txl(*args: object) -> int:
    return cli.main([str(arg) for arg in args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A corpus of a text and a run of six steps over it."""
    folder = tmp_path_factory.mktemp("cli")
    text = "".join(f"line {i} says {i * i} and ends\n" for i in range(2000))
    (folder / "text.txt").write_text(text)
    assert txl("prepare", "text", folder / "text.txt", folder / "corpus", "--unit", "byte") == 0
    assert txl("train", folder / "corpus", folder / "run", *SMALL, "--max-step", 6) == 0
    return folder


# ----------------------------------------------------------------------------------------------- end to end


@pytest.mark.slow
def test_example(tmp_path):
    command = [
        sys.executable,
        helpers.ROOT / "examples" / "train_bytes.py",
        "--steps",
        "200",
        "--keep",
        tmp_path / "new",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    learning = [float(bits) for bits in re.findall(r"valid ([\d.]+) bpc", done.stdout + done.stderr)]
    assert len(learning) == 4 and learning == sorted(learning, reverse=True) and learning[-1] < 4
    rows = [row.split() for row in done.stdout.splitlines()[-5:]]
    assert [int(row[0]) for row in rows] == [0, 64, 128, 256, 512]
    without, *with_memory = (float(row[3]) for row in rows)
    assert max(with_memory) < without
    assert (tmp_path / "new" / "run" / "best").is_dir()


@pytest.mark.parametrize("document", ["README.md", "docs/model.md"])
def test_the_documents_examples(trained, tmp_path, monkeypatch, document):
    for folder, name in (("data", "corpus"), ("runs", "run")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "stdlib").symlink_to(trained / name)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```$", (helpers.ROOT / document).read_text(), re.M | re.S)
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, document, "exec"), {})


def test_train_writes_a_run(trained):
    run = trained / "run"
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["d_model"] == 32 and config["model"]["clamp_len"] == 128, "option over preset"
    assert config["train"]["max_step"] == 6
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == [2, 4, 6]
    assert [e["step"] for e in events if e["event"] == "eval"] == [4, 6]


def test_resume_goes_on_and_a_run_is_not_overwritten(trained, tmp_path, capsys):
    corpus, run = trained / "corpus", tmp_path / "run"
    assert txl("train", corpus, run, *SMALL, "--max-step", 4) == 0
    assert txl("train", corpus, run, *SMALL, "--max-step", 4) == 1
    assert "holds a training run already" in capsys.readouterr().err
    assert (
        txl("train", corpus, run, "--resume", "--quiet", "--max-step", 8, "--plot", tmp_path / "p.png") == 0
    )
    out = capsys.readouterr().out
    assert "step 4: goes on from" in out and f"step 8: done; the model is {run / 'best'}\n" in out
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "train"] == [2, 4, 6, 8]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_resume_with_other_options(trained, tmp_path, capsys):
    run, resume = tmp_path / "run", ("--resume", "--quiet")
    shutil.copytree(trained / "run", run)
    before = (run / "config.json").read_text()
    for option, message in [
        (("--n-layer", 3), "model n_layer = 2, now it is 3"),
        (("--vocab-size", 300), "model vocab_size = 256, now it is 300"),
        (("--seed", 2), "train seed = 1111, now it is 2"),
    ]:
        assert txl("train", trained / "corpus", run, *resume, "--max-step", 8, *option) == cli.ERROR
        assert f"begun with {message}: to resume it, leave that" in capsys.readouterr().err
    assert txl("train", trained / "corpus", run, *resume, "--max-step", 5) == 0
    assert "step 6: nothing left to do" in capsys.readouterr().out
    assert (run / "config.json").read_text() == before
    assert txl("train", trained / "corpus", run, *resume, "--max-step", 7, "--log-interval", 1) == 0
    said = "step 6: from here on max_step is 7 (was 6), log_interval is 1 (was 2)\n"
    assert said in capsys.readouterr().out
    assert json.loads((run / "config.json").read_text())["train"]["max_step"] == 7


def test_a_list_of_yes_and_no_has_no_other_numbers(trained, tmp_path, capsys):
    with pytest.raises(SystemExit):
        txl("train", trained / "corpus", tmp_path / "run", *SMALL, "--tie-projs", "0,2")
    assert "invalid list of numbers value: '0,2'" in capsys.readouterr().err


def test_a_prompt_file_with_a_byte_order_mark():
    vocabulary = Vocabulary("word", ("<eos>", "<unk>", "the", "word"), False, "<eos>", "<unk>")
    for mark in (b"", b"\xef\xbb\xbf"):
        assert cli.generate._encode(vocabulary, "a file", mark + b"the word") == [2, 3]


def test_a_model_of_nan_is_explained(trained, tmp_path, capsys):
    model = load_model(trained / "run")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
    save_model(model, tmp_path / "model")
    arguments = ("--corpus", trained / "corpus", "--prompt", "a", "--max-new-tokens", 2)
    assert txl("generate", tmp_path / "model", *arguments) == cli.ERROR
    assert capsys.readouterr().err.startswith("txl: error: ")


def test_resume_keeps_a_vocabulary_larger_than_the_corpus(trained, tmp_path, capsys):
    args = ("train", trained / "corpus", tmp_path / "run", "--quiet", "--max-step")
    assert txl(*args, 1, *SMALL, "--vocab-size", 300) == 0
    assert txl(*args, 2, "--resume") == 0, capsys.readouterr().err


def test_a_word_preset_for_fewer_words(tmp_path, capsys):
    """Than it has clusters for."""
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 300)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    assert txl("prepare", "text", tmp_path / "text.txt", corpus, "--unit", "word") == 0
    small = (*SMALL[2:], "--max-step", 1, "--d-head", 16)
    for i, (name, options, cutoffs, tie_projs, said) in enumerate(
        [
            ("wt103-base", (), [], [], True),
            ("wt103-large", (), [], [], True),
            ("wt103-base", ("--cutoffs", "3"), [3], [], False),
            ("wt103-base", ("--cutoffs", "3,5,6"), [3, 5, 6], [False, True, True, True], False),
            ("wt103-base", ("--cutoffs", "3", "--tie-projs", "0,1"), [3], [False, True], False),
            ("wt103-base", ("--cutoffs", ""), [], [], False),
            ("tiny", (), [], [], False),
        ]
    ):
        capsys.readouterr()
        args = ("train", corpus, f"{run}{i}", "--preset", name, *small, *options)
        assert txl(*args) == 0
        err = capsys.readouterr().err
        assert (f"txl: {name} cuts a vocabulary of more than the 9 words there are: " in err) == said
        model = json.loads((tmp_path / f"run{i}" / "config.json").read_text())["model"]
        assert (model["cutoffs"], model["tie_projs"]) == (cutoffs, tie_projs)
        assert txl(*args, "--resume") == 0


def test_config_file_between_preset_and_options(trained, tmp_path):
    yaml = tmp_path / "config.yaml"
    yaml.write_text(
        "preset: tiny\n"
        "model: {n_layer: 1, d_model: 16, n_head: 2, d_head: 8, d_inner: 16, tgt_len: 8, mem_len: 8}\n"
        "train: {batch_size: 2, max_step: 1, lr: 1e-3, eval_max_tokens: 50}\n"
    )
    run = tmp_path / "run"
    assert txl("train", trained / "corpus", run, "--config", yaml, "--quiet", "--d-inner", 8) == 0
    config = json.loads((run / "config.json").read_text())
    assert (config["model"]["n_layer"], config["model"]["d_inner"], config["train"]["lr"]) == (1, 8, 1e-3)
    assert config["model"]["pre_lnorm"] is True, "from the preset"
    (tmp_path / "config.json").write_text(json.dumps({"train": {"max_stop": 1}}))
    assert txl("train", trained / "corpus", tmp_path / "other", "--config", tmp_path / "config.json") == 1


def test_the_configuration_of_another_run(trained, tmp_path):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    shutil.copytree(trained / "run", first)
    assert txl("train", trained / "corpus", first, "--resume", "--max-step", 7, "--quiet") == 0  # a change
    config = json.loads((first / "config.json").read_text())
    assert config.pop("changes")
    args = ("--quiet", "--config")
    assert txl("train", trained / "corpus", second, *args, first / "config.json") == 0
    assert json.loads((second / "config.json").read_text()) == config
    assert txl("train", trained / "corpus", third, *args, first / "config.json", "--max-step", 1) == 0
    config["train"]["max_step"] = 1
    assert json.loads((third / "config.json").read_text()) == config


def test_eval_at_several_lengths(trained, tmp_path, capsys):
    out = ("--json", tmp_path / "e.json", "--plot", tmp_path / "e.png")
    args = ("--mem-len", "0,8,24", "--max-tokens", 150, "--quiet")
    assert txl("eval", trained / "run", trained / "corpus", *args, *out) == 0
    printed = capsys.readouterr().out
    lengths = json.loads((tmp_path / "e.json").read_text())["evaluations"]
    assert [r["mem_len"] for r in lengths] == [0, 8, 24]
    for result in lengths:
        assert result["tokens"] == 150
        assert f"{result['bpc']:.4f}" in printed
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")
    # A preset's lengths give way to those named; its own is taken where none is.
    preset = ("--preset", "tiny", "--max-tokens", 150, "--quiet", "--json", tmp_path / "p.json")
    for option, expected in [(("--mem-len", "4,6"), [4, 6]), ((), [512])]:
        assert txl("eval", trained / "run", trained / "corpus", *preset, *option) == 0
        results = json.loads((tmp_path / "p.json").read_text())["evaluations"]
        assert [r["mem_len"] for r in results] == expected
    capsys.readouterr()
    # One of them alone, read as the three were, gives the same number.
    alone = ("--mem-len", 8, "--warm-up", 24, "--max-tokens", 150, "--quiet", "--split", "valid")
    assert txl("eval", trained / "run", trained / "corpus", *alone) == 0
    assert f"{lengths[1]['bpc']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, tgt_len, mem_len, stride",
    [
        (("--half-loss", "--mem-len", 0), 16, 0, 8),
        (("--half-loss", "--tgt-len", 15), 8, 31, None),
        (("--ext-len", 4), 16, 28, None),
        (("--ext-len", 4, "--mem-len", 0), 20, 0, 16),
        (("--mem-len", 0), 16, 0, None),
    ],
    ids=str,
)
def test_eval_reads_as_training_did(trained, tmp_path, options, tgt_len, mem_len, stride):
    run, out = tmp_path / "run", tmp_path / "e.json"
    small = ("--max-step", 4, "--eval-batch-size", 1)
    assert txl("train", trained / "corpus", run, *SMALL, *small, *options) == 0
    read = ("eval", run, trained / "corpus", "--max-tokens", 200, "--quiet", "--json", out)
    assert txl(*read) == 0
    (got,) = json.loads(out.read_text())["evaluations"]
    assert (got["tgt_len"], got["mem_len"], got["stride"]) == (tgt_len, mem_len, stride)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert got["loss"] == pytest.approx(log[-1]["loss"], rel=1e-6)
    for more in ("--tgt-len=8", "--warm-up=8", "--mem-len=8", "--mem-len=4,8", "--preset=tiny"):
        assert txl(*read, more) == 0
        assert all(x["stride"] is None for x in json.loads(out.read_text())["evaluations"])


def test_generate(trained, tmp_path, capsys):
    args = ("generate", trained / "run", "--max-new-tokens", 12, "--seed", 3, "--quiet")
    texts = []
    for _ in range(2):
        assert txl(*args, "--prompt", "line 1") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("line 1") and len(texts[0]) > len("line 1\n")
    (tmp_path / "prompt").write_text("line 1")
    assert txl(*args, "--prompt-file", tmp_path / "prompt") == 0
    assert capsys.readouterr().out == texts[0]
    assert txl(*args, "--prompt", "line 1", "--prompt", "and") == 0
    assert capsys.readouterr().out.startswith(texts[0])
    assert txl(*args, "--prompt", "line 1", "--stop", texts[0][6], "--temperature", 1) == 0
    assert capsys.readouterr().out == texts[0][:7] + "\n"


def test_generate_in_bfloat16(trained, monkeypatch, capsys):
    seen = []
    attend = txl_model.attention.rel_attention

    def recorded(*tensors, **options):
        seen.extend(x.dtype for x in tensors)
        return attend(*tensors, **options)

    monkeypatch.setattr(txl_model.attention, "rel_attention", recorded)
    assert txl("generate", trained / "run", "--prompt", "line 1", "--max-new-tokens", 12, "--bf16") == 0
    assert set(seen) == {torch.bfloat16}
    assert capsys.readouterr().out.startswith("line 1")


def test_info(trained, capsys):
    assert txl("info") == 0
    assert "enwik8-base" in capsys.readouterr().out
    for name in PRESETS:
        assert txl("info", name) == 0
        assert re.match(rf"{name}: [\d,]+ parameters", capsys.readouterr().out)
    assert txl("info", trained / "corpus") == 0
    assert "train" in capsys.readouterr().out
    assert txl("info", trained / "run") == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.match(r".*run: 27,392 parameters, 2 layers of 32", first)
    events = [json.loads(line) for line in (trained / "run" / "log.jsonl").read_text().splitlines()]
    best = min((e for e in events if e["event"] == "eval"), key=lambda e: e["loss"])
    size = sum(p.stat().st_size for p in (trained / "run").rglob("*") if p.is_file())
    assert lines[:4] == [
        "  trained on   corpus",
        f"  step         6 of 6, {events[-2]['tokens']} tokens",
        "  checkpoints  step-00000003, step-00000006",
        f"  best         valid {best['bpc']:.4f} bpc at step {best['step']}",
    ]
    assert re.match(rf"  on disk      {size / 1e6:.1f} MB: best [\d.]+, checkpoints [\d.]+, ", lines[4])
    assert json.loads("\n".join(lines[5:])).keys() == {"model", "train"}
    assert txl("info", trained / "run" / "best") == 0
    assert "27,392 parameters" in capsys.readouterr().out


def test_info_of_a_damaged_corpus(trained, tmp_path, capsys):
    shutil.copytree(trained / "corpus", tmp_path / "corpus")
    file = next((tmp_path / "corpus").glob("train*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    assert txl("info", tmp_path / "corpus") == 1
    assert "is damaged: prepare the corpus again" in capsys.readouterr().err


def test_remarks_without_standard_error(monkeypatch, capsys):
    """Closed by the shell, it is None, and they are no part of the result."""
    monkeypatch.setattr(sys, "stderr", None)
    assert txl("info", "nothing") == 1
    assert capsys.readouterr().out == ""


def test_info_of_a_run_without_a_checkpoint(trained, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copy(trained / "run" / "config.json", tmp_path / "run")
    assert txl("info", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "27,392 parameters" in printed and "no checkpoint yet, of 6 steps" in printed


# -------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("config", [TransformerXLConfig, TrainConfig])
def test_every_field_is_an_option(config, capsys):
    with pytest.raises(SystemExit):
        txl("train", "--help")
    printed = capsys.readouterr().out
    for field in fields(config):
        assert "--" + field.name.replace("_", "-") in printed
    words = " ".join(printed.split())
    assert "number of different tokens (default: the corpus's)" in words
    assert "lr / sqrt(update), so that the warm-up rises to lr / sqrt(warmup_step) (default: cosine)" in words
    config = TrainConfig(scheduler="inv_sqrt", lr=3.0, warmup_step=16)
    assert [learning_rate(config, step) for step in (16, 64)] == [3.0 / 4, 3.0 / 8]


@pytest.mark.parametrize("command", ["prepare", "train", "eval", "generate", "convert", "info"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        txl(command, "--help")
    assert exit.value.code == 0 and f"txl {command}" in capsys.readouterr().out


def test_a_segment_that_leaves_no_memory_is_said(trained, capsys):
    read = ("eval", trained / "run", trained / "corpus", "--max-tokens", 50, "--quiet", "--tgt-len")
    said = "txl: without memory: a segment of 40 tokens has as many keys as there were in training"
    for options, expected in [((40,), True), ((39,), False), ((40, "--mem-len", 0), False)]:
        assert txl(*read, *options) == 0
        assert (said in capsys.readouterr().err) == expected


# ------------------------------------------------------------------------------------------------ bad input


def test_messages(trained, tmp_path, capsys):
    run, corpus = trained / "run", trained / "corpus"
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "words.yaml").write_text("models: {}")
    (tmp_path / "empty.yaml").write_text("model:")
    (tmp_path / "closed").write_text("")
    odd = {}
    for i, (content, message) in enumerate(
        [
            ("preset: [tiny]", r"preset must be the name of one, got \['tiny'\]"),
            ("model: {vocab_size: big}", "vocab_size must be of type int, got 'big'"),
            ("model: {vocab_size: null}", "vocab_size must be of type int, got None"),
            ("model: {3: 4, layers: 5}", "TransformerXLConfig has no field 3, layers"),
            ("train: {null: 4}", "TrainConfig has no field None"),
            (f"train: {{lr: {10**400}}}", "lr must be of type float, got 1000"),
        ]
    ):
        odd[tmp_path / f"odd{i}.yaml"] = message
        (tmp_path / f"odd{i}.yaml").write_text(content)
    for args, message in [
        (("train", tmp_path / "none", tmp_path / "out"), "no .*none"),
        (("train", corpus, tmp_path / "out", "--n-layer", 0), "n_layer must be at least 1, got 0"),
        (("train", corpus, tmp_path / "out", "--vocab-size", 9), "vocab_size 9 is less than the 256"),
        (("train", corpus, tmp_path / "out", "--config", tmp_path / "bad.yaml"), "neither YAML nor JSON"),
        (("train", corpus, tmp_path / "out", "--config", tmp_path / "words.yaml"), "and nothing else"),
        (("train", corpus, tmp_path / "out", "--config", tmp_path / "empty.yaml"), "model must be fields"),
        (("train", corpus, tmp_path / "out", "--config", tmp_path / "none"), "No such file"),
        *((("train", corpus, tmp_path / "out", "--config", path), message) for path, message in odd.items()),
        (("train", corpus, tmp_path / "out", "--plot", tmp_path / "none" / "x.png"), "no folder"),
        (("train", corpus, tmp_path / "out", *SMALL, "--device", "cuda:9"), "cuda"),
        (("train", corpus, tmp_path / "out", *SMALL, "--tgt-len", 30_000), "too long for this text"),
        (
            ("train", corpus, tmp_path / "out", "--plot", tmp_path / "x.pgn"),
            "nothing draws .pgn; name a file",
        ),
        (("eval", tmp_path, corpus, "--plot", tmp_path / "x.txt"), "nothing draws .txt; name a file"),
        (("eval", tmp_path, corpus, "--json", tmp_path), "it is a folder; name a file in it"),
        (("eval", tmp_path, corpus, "--json", run / "config.json" / "x"), "config.json is no folder"),
        (("eval", tmp_path, corpus, "--plot", tmp_path), "it is a folder; name a file in it"),
        (("eval", tmp_path, corpus), "no model|does not exist|config.json"),
        (("eval", run, corpus, "--split", "tset"), "no split 'tset'"),
        (("eval", run, corpus, "--mem-len", "1,2", "--stride", 4), "--stride reads without memory"),
        (("eval", run, corpus, "--tgt-len", 0), "tgt_len must be at least 1"),
        (("generate", run), "nothing to continue"),
        (("generate", run, "--prompt", ""), "prompt 0 is empty"),
        (("generate", run, "--prompt", "a", "--top-p", 0), "top_p must be in"),
        (("generate", run, "--prompt", "a", "--stop", "ab"), "it must be one"),
        (("info", "enwik9-base"), "enwik9-base"),
    ]:
        assert txl(*args) == cli.ERROR, args
        assert re.search(f"txl: error: .*({message})", capsys.readouterr().err), args
    assert not (tmp_path / "out").exists(), "an error that is seen at once leaves nothing behind"
    for args in [
        *(("train", corpus), ("train", corpus, tmp_path / "out", "--n-layer", "two"), ("fly",), ()),
        *(
            (*command, "--backend", "tpu")
            for command in [("generate", run), ("train", corpus, tmp_path / "out")]
        ),
    ]:
        with pytest.raises(SystemExit) as exit:
            txl(*args)
        assert exit.value.code == 2 and not (tmp_path / "out").exists()


def test_a_backend_that_cannot_run_is_refused_before_anything_is_written(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(registry, "_loaded", {})
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    for args in [
        ("train", trained / "corpus", tmp_path / "run", *SMALL, "--backend", "cpu"),
        ("eval", trained / "run", trained / "corpus", "--backend", "cpu"),
        ("generate", trained / "run", "--prompt", "a", "--backend", "cpu"),
    ]:
        assert txl(*args) == cli.ERROR
        assert "txl: error: backend 'cpu' cannot run here: it was not built" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_out_of_memory(trained, tmp_path, monkeypatch, capsys):
    run, corpus = trained / "run", trained / "corpus"
    commands = {
        "train": ("train", corpus, tmp_path / "run", *SMALL),
        "evaluate": ("eval", run, corpus, "--quiet"),
        "generate": ("generate", run, "--prompt", "a"),
    }

    def gpu(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    def kernel(*args, **options):
        raise RuntimeError("std::bad_alloc")

    for failing, size in [
        (lambda *args, **options: torch.empty(2**60), r" \(tried to allocate 4611686018427387904 bytes\)"),
        (gpu, r" \(tried to allocate 20.00 GiB\)"),
        (kernel, ""),
    ]:
        for name, args in commands.items():
            monkeypatch.setattr(getattr(cli, name), name, failing)
            assert txl(*args) == cli.ERROR
            said = rf"txl: error: out of memory{size}: less is needed with a smaller --.*mem-len.*\n"
            assert re.search(f"{said}$", capsys.readouterr().err)
    monkeypatch.setattr(cli.generate, "generate", lambda *args, **options: torch.ones(2) + torch.ones(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        txl(*commands["generate"])


def test_says_which_weights_it_reads(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    read = ("eval", run, trained / "corpus", "--max-tokens", 40, "--quiet")
    assert txl(*read) == 0
    assert f"txl: reads {run / 'best'}\n" in capsys.readouterr().err
    shutil.rmtree(run / "best")
    assert txl(*read) == 0
    assert f"txl: reads {run / 'checkpoints' / 'step-00000006'}\n" in capsys.readouterr().err
    (run / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"")
    assert txl("generate", run, "--prompt", "a", "--max-new-tokens", 1) == 0
    err = capsys.readouterr().err
    assert "step-00000006 is damaged" in err and f"reads {run / 'checkpoints' / 'step-00000003'}\n" in err


def test_one_command_begins_a_run_and_goes_on(trained, tmp_path, capsys):
    run = tmp_path / "run"
    command = ("train", trained / "corpus", run, *SMALL, "--max-step", 4, "--resume")
    assert txl(*command) == 0
    assert f"nothing to resume in {run}: a new run begins there" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert txl(*command) == 0
    assert f"goes on from {run / 'checkpoints' / checkpoints[-1]}" in capsys.readouterr().out
    assert txl("train", trained / "corpus", run, "--preset", "small", "--quiet", "--resume") == cli.ERROR
    assert "was begun with model n_layer = 2" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        txl("--version")
    assert exit.value.code == 0 and capsys.readouterr().out == f"txl-kernels {txl_kernels.__version__}\n"
    assert f"\nversion: {txl_kernels.__version__}\n" in (helpers.ROOT / "CITATION.cff").read_text()


def test_words_have_a_space_between_prompt_and_text(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 300)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    assert txl("prepare", "text", tmp_path / "text.txt", corpus, "--unit", "word") == 0
    assert txl("train", corpus, run, *SMALL, "--max-step", 1) == 0
    capsys.readouterr()
    for prompts in (["one two"], ["one two", "three"]):
        given = [word for prompt in prompts for word in ("--prompt", prompt)]
        assert txl("generate", run, *given, "--max-new-tokens", 1, "--top-k", 1, "--quiet") == 0
        assert re.match(r"one two (\w|\n)", capsys.readouterr().out)


def test_words_that_the_vocabulary_lacks(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 300)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    assert txl("prepare", "text", tmp_path / "text.txt", corpus, "--unit", "word") == 0
    assert txl("train", corpus, run, *SMALL, "--max-step", 1) == 0
    read = ("generate", run, "--max-new-tokens", 1, "--quiet")
    capsys.readouterr()
    assert txl(*read, "--prompt", "one zwei drei\ntwo zwei", "--prompt", "four eight") == 0
    said = "txl: not in the vocabulary, read as <unk>: 'zwei', 'drei', 'eight'\n"
    assert said in capsys.readouterr().err
    assert txl(*read, "--prompt", "one <unk> two", "--stop", "three", "--stop", r"\n", "--stop", "<eos>") == 0
    assert "not in the vocabulary" not in capsys.readouterr().err
    for stop, message in [("eight", "is not in the vocabulary"), ("one two", "is 2 tokens; it must be one")]:
        assert txl(*read, "--prompt", "one", "--stop", stop) == cli.ERROR
        assert f"--stop {stop!r} {message}" in capsys.readouterr().err


@pytest.mark.parametrize("unit", ["byte", "char", "word"])
def test_tokens_that_stand_for_nothing_are_never_drawn(tmp_path, capsys, unit):
    """Nearly all of this untrained model's tokens are beyond the vocabulary."""
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 300)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    assert txl("prepare", "text", tmp_path / "text.txt", corpus, "--unit", unit) == 0
    assert txl("train", corpus, run, *SMALL, "--max-step", 1, "--vocab-size", 3000) == 0
    for prompts in [("--prompt", "one two"), ("--prompt", "one two", "--prompt", "six")]:
        assert txl("generate", run, *prompts, "--max-new-tokens", 8, "--top-k", 0, "--quiet") == 0
    assert capsys.readouterr().out


def test_prompts_are_bytes_as_in_a_file(trained, tmp_path, monkeypatch, capsys):
    given = []

    def recorded(model, prompts, *args, **options):
        given.extend(prompts)
        return iter([])

    monkeypatch.setattr(cli.generate, "generate", recorded)
    data = b"a\r\nb\rc\xff"
    (tmp_path / "prompt").write_bytes(data)
    read = ("generate", trained / "run", "--quiet")
    assert txl(*read, "--prompt-file", tmp_path / "prompt") == 0
    assert capsys.readouterr().out == "a\r\nb\rc\ufffd\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert txl(*read, "--prompt-file", "-") == 0
    assert txl(*read, "--prompt", os.fsdecode(data)) == 0  # as Python takes it from the command line
    assert given == [list(data)] * 3


@pytest.mark.parametrize("unit", ["char", "word"])
def test_prompts_that_are_not_utf_8(tmp_path, monkeypatch, capsys, unit):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 300)
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    assert txl("prepare", "text", tmp_path / "text.txt", corpus, "--unit", unit) == 0
    assert txl("train", corpus, run, *SMALL, "--max-step", 1) == 0
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for prompt, name in [
        (("--prompt-file", tmp_path / "latin"), str(tmp_path / "latin")),
        (("--prompt-file", "-"), "standard input"),
        (("--prompt", "caf\udce9"), r"--prompt 'caf\udce9'"),
    ]:
        assert txl("generate", run, *prompt) == cli.ERROR
        said = (
            f"txl: error: {name} is not UTF-8 text (unexpected end of data), of which the model reads {unit}s"
        )
        assert said in capsys.readouterr().err


def test_windows_have_no_memory(trained, tmp_path, capsys):
    out = tmp_path / "windows.json"
    read = ("eval", trained / "run", trained / "corpus", "--max-tokens", 40, "--quiet")
    assert txl(*read, "--stride", 8, "--json", out) == 0
    assert json.loads(out.read_text())["evaluations"][0]["mem_len"] == 0


def test_a_corpus_numbered_otherwise_is_refused(trained, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words of another text\n" * 300)
    assert txl("prepare", "text", tmp_path / "text.txt", tmp_path / "corpus", "--unit", "char") == 0
    generate = ("generate", trained / "run", "--prompt", "a", "--max-new-tokens", 1, "--corpus")
    assert txl(*generate, trained / "corpus") == 0
    for args in [("eval", trained / "run"), generate]:
        assert txl(*args, tmp_path / "corpus") == cli.ERROR
        assert "numbers its symbols otherwise" in capsys.readouterr().err


def test_ctrl_c_keeps_the_last_checkpoint(trained, tmp_path):
    command = [sys.executable, "-m", "txl_model", "train", trained / "corpus", tmp_path / "run"]
    environment = {**os.environ, "PYTHONPATH": str(helpers.ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*map(str, command), *SMALL, "--max-step", "100000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == cli.INTERRUPTED
    step = int(re.search(r"txl: stopped at step (\d+); ", err)[1])
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    assert (checkpoint / "manifest.json").exists()
    command = f"txl train {trained / 'corpus'} {tmp_path / 'run'} --resume"
    way_on = f"the last checkpoint is {checkpoint}, and this goes on from there: {command}\n"
    assert err.endswith(way_on) and err.count("\n") == 1


def unread(device=None):
    """A stream that nobody reads: a pipe whose reader has gone, or a full device."""
    if device:
        return open(device, "w", buffering=1)
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


@pytest.mark.parametrize(
    "device, reason", [(None, "Broken pipe"), ("/dev/full", "No space left on device")], ids=["pipe", "full"]
)
def test_training_goes_on_when_nobody_reads(trained, tmp_path, monkeypatch, capsys, device, reason):
    train = ("train", trained / "corpus", tmp_path / "run")
    resume = (*train, "--resume", "--quiet", "--max-step")
    with unread(device) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert txl(*train, *SMALL, "--max-step", 4) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
    said = f"txl: standard output takes no more lines ({reason}): training goes on without them; "
    err = capsys.readouterr().err
    assert err.startswith(said) and err.count("\n") == 1
    with unread(device) as stdout, unread(device) as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", stderr)  # 2>&1
        assert txl(*resume, 6) == 0
    monkeypatch.setattr(sys, "stdout", None)  # >&-
    assert txl(*resume, 8) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


def test_output_that_nobody_reads(trained, monkeypatch, capsys):
    """A few lines, which are written when all is done, and a text that comes piece by piece."""
    for args in [("info", "tiny"), ("generate", trained / "run", "--prompt", "line", "--quiet")]:
        with unread() as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert txl(*args) == cli.UNREAD
        assert "rror" not in capsys.readouterr().err
        with unread("/dev/full") as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            assert txl(*args) == cli.ERROR
        assert "txl: error: [Errno 28] No space left on device\n" in capsys.readouterr().err


@pytest.mark.parametrize("interval, kept", [(3, True), (0, False)])
def test_a_second_ctrl_c_says_what_is_kept(trained, tmp_path, monkeypatch, capsys, interval, kept):
    run = tmp_path / "run"

    def twice(event):
        if event["step"] == 4:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli.train, "_report", twice)
    args = ("train", trained / "corpus", run, *SMALL, "--save-interval", interval)
    assert txl(*args) == cli.INTERRUPTED
    checkpoint = run / "checkpoints" / "step-00000003"
    said = f"the last checkpoint is {checkpoint}, and this" if kept else "no checkpoint was saved yet"
    assert f"txl: interrupted; {said}" in capsys.readouterr().err


def test_ctrl_c_before_the_first_step(trained, tmp_path, monkeypatch, capsys):
    def interrupted(batches):
        signal.raise_signal(signal.SIGINT)
        return batches

    monkeypatch.setattr(OrderedBatches, "__iter__", interrupted)
    plot = ("--plot", tmp_path / "loss.png")
    assert txl("train", trained / "corpus", tmp_path / "run", *SMALL, *plot) == cli.INTERRUPTED
    assert capsys.readouterr().err == "txl: stopped at step 0; no checkpoint was saved yet\n"


def test_ctrl_c_before_the_first_line_of_the_log(trained, tmp_path, monkeypatch, capsys):
    segment = OrderedBatches.__next__

    def interrupted(batches):
        signal.raise_signal(signal.SIGINT)
        return segment(batches)

    monkeypatch.setattr(OrderedBatches, "__next__", interrupted)
    plot = ("--plot", tmp_path / "loss.png")
    assert txl("train", trained / "corpus", tmp_path / "run", *SMALL, *plot) == cli.INTERRUPTED
    assert capsys.readouterr().err.startswith("txl: stopped at step 1; the last checkpoint is ")
    assert not (tmp_path / "loss.png").exists()


def test_interrupt_and_missing_package(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.info, "run", interrupted)
    monkeypatch.setattr(cli, "_COMMANDS", [("info", "", cli.info.add_arguments, interrupted)])
    assert txl("info") == cli.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    hidden = [name for name in sys.modules if name.startswith("txl_model.cli")]
    for name in hidden:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("txl_model.cli")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert __main__.main() == 1
    assert "pip install 'txl-kernels[train]'" in capsys.readouterr().err


def test_the_model_needs_torch_only():
    code = (
        "import sys\n"
        "for name in ('safetensors', 'tqdm', 'yaml', 'matplotlib', 'numpy'): sys.modules[name] = None\n"
        "import torch\nfrom txl_model import TransformerXL, TransformerXLConfig\n"
        "m = TransformerXL(TransformerXLConfig(n_layer=1, d_model=16, n_head=2, d_head=8, d_inner=16))\n"
        "m(torch.zeros(1, 4, dtype=torch.int64))"
    )
    environment = {**os.environ, "PYTHONPATH": str(helpers.ROOT)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=environment)

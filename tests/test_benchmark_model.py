"""The benchmarks of the whole model, at sizes that take no time: they compare, time, refuse and explain."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
import torch
from helpers import ROOT

pytest.importorskip("tqdm", reason="the benchmarks need it: pip install -e '.[bench]'")
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_eval
import bench_model
import cli
import measure
import model_figures
import model_work
from model_figures import Figure
from model_work import Ours, Work

from txl_model import TransformerXL, TransformerXLConfig

SIZES = {"n_layer": 2, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "vocab_size": 30}
TINY = [text for name, size in SIZES.items() for text in (f"--{name.replace('_', '-')}", str(size))]
TINY += ["--shorten", "100", "--repeat", "2"]
READING = Work("evaluation", 5, 12, 6, True, 5.0)
TRAINING = Work("training", 5, 5, -1, False, 1.8, training=True)
HAS_RIVAL = bench_model.rival_missing() is None


@pytest.fixture(autouse=True)
def no_minimum(monkeypatch):
    monkeypatch.setattr(measure, "SHORTEST_SAMPLE", 0.0)


@pytest.fixture
def no_rival(monkeypatch):
    """As where transformers is not installed, or is another release."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def model(**changed) -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(TransformerXLConfig(**{**SIZES, "mem_len": 5, "tgt_len": 5, **changed}))


def errors(rival: Ours, work: Work) -> dict[str, float]:
    sides = (Ours(model()), rival)
    return bench_model.errors(sides, [model_work.fill(side, work) for side in sides], work)


def line_of(out: str, name: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(name))


# ---- bench_model ---------------------------------------------------------------------------------


def test_without_the_rival_ours_is_measured_alone(capsys, tmp_path, no_rival):
    path = tmp_path / "figures.json"
    assert bench_model.main([*TINY, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for name in ("evaluation, 1 + 21", "evaluation, 1 + 36", "generation, 1 + 37", "training, 5 + 5"):
        line = line_of(out, name)
        assert " ms " in line and "needs transformers==4.37.2: pip install -r" in line
    assert " MB " in line_of(out, "peak memory of training, 5 + 5")
    content = json.loads(path.read_text())
    assert {"cpu", "threads", "torch", "commit"} <= content["machine"].keys()
    for figure in content["figures"]:
        # So small a model may fit into memory that the process had already.
        least = 0 if figure["name"].startswith("peak memory") else 1e-9
        assert figure["ours"] >= least and figure["rival"] is None and figure["ratio"] is None


def test_another_release_is_no_rival(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", type(sys)("transformers"))
    sys.modules["transformers"].__version__ = "4.38.0"
    assert "needs transformers==4.37.2" in bench_model.rival_missing()
    assert "here is 4.38.0" in bench_model.rival_missing()


@pytest.mark.skipif(not HAS_RIVAL, reason=f"needs transformers=={bench_model.RELEASE}")
@pytest.mark.parametrize("work", [READING, TRAINING], ids=str)
def test_the_rival_has_our_numbers(work):
    theirs = bench_model.their_model(TransformerXLConfig(**SIZES))
    sides = (Ours(bench_model.same_weights(theirs)), bench_model.HuggingFace(theirs))
    memories = [model_work.fill(side, work) for side in sides]
    assert model_figures.wrong(bench_model.errors(sides, memories, work)) is None


@pytest.mark.skipif(not HAS_RIVAL, reason=f"needs transformers=={bench_model.RELEASE}")
def test_against_the_rival(capsys):
    assert bench_model.main([*TINY, "--no-compile"]) == 0
    out = capsys.readouterr().out
    assert out.count("no target at these sizes (eager)") == 5, out


@pytest.mark.parametrize("work", [READING, TRAINING], ids=str)
def test_errors_of_the_same_model(work):
    found = errors(Ours(model()), work)
    assert set(found) == ({"log-probabilities", "gradients"} if work.training else {"log-probabilities"})
    assert model_figures.wrong(found) is None


def other_weights() -> Ours:
    rival = model()
    torch.nn.init.normal_(rival.blocks[1].ff.net[0].weight)
    return Ours(rival)


def not_a_number() -> Ours:
    rival = model()
    with torch.no_grad():
        rival.softmax.biases[0][3] = float("nan")
    return Ours(rival)


def memory_too_short() -> Ours:
    class Forgetful(Ours):
        def begin(self, work):
            return self.model.new_memory(1, work.mem_len - 2, work.clamp_len, work.same_length)

    return Forgetful(model())


@pytest.mark.parametrize("rival", [other_weights, not_a_number, memory_too_short])
def test_errors_of_another(rival):
    assert "log-probabilities differ by" in model_figures.wrong(errors(rival(), READING))


def test_errors_of_wrong_gradients():
    class Doubled(Ours):
        def gradients(self):
            gradients = super().gradients()
            return gradients | {"bias_v": 2 * gradients["bias_v"]}

    assert "gradients differ by" in model_figures.wrong(errors(Doubled(model()), TRAINING))


def test_no_ratio_of_wrong_numbers(capsys, monkeypatch):
    """And our own time all the same."""

    class OtherWeights(Ours):
        def __init__(self, theirs, compiled=False):
            super().__init__(other_weights().model)

    monkeypatch.setattr(bench_model, "rival_missing", lambda: None)
    monkeypatch.setattr(bench_model, "their_model", lambda config: model())
    monkeypatch.setattr(bench_model, "same_weights", lambda theirs: theirs)
    monkeypatch.setattr(bench_model, "HuggingFace", OtherWeights)
    assert bench_model.main([*TINY, "--rows", "evaluation"]) == 1
    line = line_of(capsys.readouterr().out, "evaluation")
    assert "WRONG: log-probabilities differ" in line and "x" not in line.split("WRONG")[0]


def test_training_is_timed_with_dropout_and_without_old_gradients():
    side = Ours(model(dropout=0.5))
    task = model_work.task(side, TRAINING, model_work.fill(side, TRAINING))
    assert side.model.training
    losses = set()
    for _ in range(2):
        task.run()
        losses.add(float(side.model.bias_u.grad.norm()))
    assert side.model.training and len(losses) == 2
    task.setup()
    assert all(parameter.grad is None for parameter in side.parameters())


def test_reading_goes_on_from_where_it_was():
    """Each pass reads with the memory that the one before it left."""
    lengths = []

    class Watched(Ours):
        def read(self, input_ids, memory):
            lengths.append(memory.length)
            return super().read(input_ids, memory)

    side = Watched(model())
    task = model_work.task(side, READING, side.begin(READING), segments=3)
    task.run()
    assert lengths == [0, 5, 10] and task.passes == 3 and not side.model.training


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_measured_memory(capsys, no_rival):
    """At a size that shows: all gradients, and some activations."""
    sizes = ["--n-layer", "2", "--d-model", "256", "--n-head", "4", "--d-head", "64", "--d-inner", "1024"]
    assert bench_model.main([*sizes, "--shorten", "4", "--rows", "memory"]) == 0
    megabytes = float(line_of(capsys.readouterr().out, "peak memory").split()[7])
    config = TransformerXLConfig(n_layer=2, d_model=256, n_head=4, d_head=64, d_inner=1024, vocab_size=204)
    gradients = sum(p.nbytes for p in TransformerXL(config).parameters()) / 1e6
    assert gradients < megabytes < 4 * gradients


# ---- bench_eval ----------------------------------------------------------------------------------


def test_table_9(capsys, tmp_path):
    path = tmp_path / "figures.json"
    assert bench_eval.main([*TINY, "--segment", "4", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for length in ("800", "1,800", "2,800", "3,800"):
        assert "no target at these sizes" in line_of(out, f"attention length {length}")
    for figure in json.loads(path.read_text())["figures"]:
        median = statistics.median(figure["samples"]["ours"]) * 1e3
        assert figure["ours"] == pytest.approx(median)
        assert figure["ratio"] == pytest.approx(figure["rival"] / figure["ours"])
        assert figure["errors"]["log-probabilities"] < 1e-5


def test_time_is_per_token(monkeypatch):
    """A clock that counts seconds by the call: ours reads many tokens in one, the vanilla model one."""
    monkeypatch.setattr(measure.Task, "_seconds_on_cpu", lambda self, calls: float(calls))
    args = model_figures.parse(model_figures.parser(""), TINY)
    args.segment, args.clamp_len = 4, -1
    figure = bench_eval.Bench(args, cli.Progress()).time(1800)  # 18 tokens
    assert figure.rival == 1e3
    assert figure.ours == pytest.approx(1e3 / (4 * 5))  # five segments of four tokens: 18 and a move


def test_the_vanilla_model_is_ours_without_memory():
    """With weights so large that every step shows."""
    full = model(attn_type=2, mem_len=0, n_layer=3, init_std=0.5).eval()
    window = torch.randint(30, (1, 12))
    got = bench_eval.Vanilla(full, 12).predict(window)
    with torch.no_grad():
        truth = full(window).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4)


def test_wrong_vanilla_model(capsys, monkeypatch):
    monkeypatch.setattr(bench_eval.Vanilla, "predict", lambda self, window: torch.zeros(30))
    assert bench_eval.main([*TINY, "--lengths", "800"]) == 1
    assert "WRONG" in line_of(capsys.readouterr().out, "attention length 800")


# ---- Figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rival", "errors", "verdict", "failed"),
    [
        (50.0, {"log-probabilities": 1e-6}, "pass", False),
        (40.0, {"log-probabilities": 1e-6}, "MISSED", True),
        (50.0, {"log-probabilities": 1e-6, "gradients": 0.1}, "WRONG: gradients differ by 1.0e-01", True),
        (50.0, {"log-probabilities": float("nan")}, "WRONG: log-probabilities differ by nan", True),
    ],
)
def test_verdicts(rival, errors, verdict, failed):
    figure = Figure("a figure", "ms", target=5.0, ours=10.0, rival=rival, errors=errors)
    assert figure.verdict.startswith(verdict) and figure.failed == failed
    assert (figure.ratio is None) == verdict.startswith("WRONG")


def test_the_target_is_for_the_rival_as_it_comes():
    figure = Figure("a figure", "ms", target=2.0)
    figure.fill({"eager": [4.0, 5.0, 6.0], "compiled": [3.0, 3.0, 3.0], "ours": [2.0, 2.0, 9.0]})
    assert (figure.ours, figure.rival, figure.rival_is, figure.ratio) == (2e3, 5e3, "eager", 2.5)
    line = model_figures.table([figure], ("ours", "theirs")).splitlines()[1]
    assert "compiled 3,000 ms: 1.5x" in line and "pass" in line


def test_a_rival_too_small_to_be_seen_is_named():
    """The peak memory of a few tokens may be below a page."""
    figure = Figure("a figure", "MB", ours=4.0, rival=0.0, rival_is="eager")
    line = model_figures.table([figure], ("ours", "theirs")).splitlines()[1]
    assert "0.00 MB" in line and "no target at these sizes (eager)" in line


@pytest.mark.parametrize("main", [bench_model.main, bench_eval.main])
def test_help_and_bad_arguments(capsys, main):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0 and "--shorten" in capsys.readouterr().out
    for arguments, message in (
        (["--n-layer", "0"], "argument --n-layer: got 0, needs more than 0"),
        (["--d-head", "300"], "argument --d-head: got 300, needs 1 to 256"),
        (["--d-model", "7"], "error: d_model must be even"),
        (["--json", "/no/such/folder/x.json"], "--json: cannot write to /no/such/folder"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_targets_are_for_the_published_sizes():
    parser = model_figures.parser("")
    assert model_figures.published_sizes(model_figures.parse(parser, []))
    assert not model_figures.published_sizes(model_figures.parse(parser, ["--shorten", "2"]))
    assert not model_figures.published_sizes(model_figures.parse(parser, ["--n-layer", "3"]))

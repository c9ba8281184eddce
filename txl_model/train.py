"""Training as published: segments in order, memory carried along, stopped and resumed at will.

One step is one update of the weights. What belongs to a step (its line in the log, its evaluation,
its checkpoint) is done before the next one begins. A checkpoint lies between two steps; the run
goes on from there as if it had not been stopped, to the last bit.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from txl_model.checkpoint import (
    CONFIG,
    Checkpoints,
    best_model,
    model_of,
    reason,
    refuse_other_files,
    replacing,
    run_config,
    save_model,
    unwrapped,
    write,
)
from txl_model.config import NOT_SCORED, TransformerXLConfig
from txl_model.data.batches import Batches, OrderedBatches
from txl_model.data.corpus import VOCABULARY
from txl_model.distributed import Processes, accumulating, parallelize, whole
from txl_model.evaluate import Evaluator, validation
from txl_model.log import Log, figures
from txl_model.model import TransformerXL
from txl_model.running import Stopped, StopSignal, Stopwatch, alone_in
from txl_model.state import READING, Changes, TrainState
from txl_model.train_config import TrainConfig

if TYPE_CHECKING:
    from txl_model.data import Corpus, Vocabulary

Event = dict[str, Any]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    best_loss: float | None  # of the validation text, nats per token
    checkpoint: Path | None  # the newest
    signal: int | None  # SIGINT or SIGTERM, where that ended it before max_step


def train(
    model_config: TransformerXLConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    out_dir: str | os.PathLike[str],
    *,
    resume: bool = False,
    on_event: Callable[[Event], object] = lambda event: None,
    progress: bool = False,
    backend: str | None = None,
    device: torch.device | str | None = None,
) -> TrainResult:
    """Train a model on a corpus. Under torchrun, call it in every process.

    SIGINT (Ctrl-C) and SIGTERM end the run after the current step, with a checkpoint; a second one
    ends it at once. torchrun passes them on, and gives its processes 30 seconds.

    Args:
        model_config: the model.
        train_config: the training.
        corpus: a `txl_model.data.Corpus`; its "train" text is learned, its "valid" text evaluated.
        out_dir: the run's folder: config.json, vocabulary.json, log.jsonl, checkpoints/, best/. Made
            if it is not there. All processes must see the same folder.
        resume: go on from the newest checkpoint in out_dir that is whole; begin if there is none.
            The model, the text and how it is read must be the same; lengths of the run, intervals,
            learning rates and dropout may differ, which is said, and noted in config.json. With as
            many processes as before the run goes on as if it had not been stopped; with another
            number, memory begins empty and dropout draws other masks. With a checkpoint of max_step
            or later nothing is done.
        on_event: called in the first process with each line of the log ({"event": "train" or
            "eval", "step": ...}), and with {"event": "resume" or "checkpoint", "step", "path"} and
            {"event": "note", "step", "message"}.
        progress: show a progress bar, where stderr is a terminal.
        backend: the attention kernel, as in `TransformerXL`.
        device: None: this process's GPU, or the CPU where there is none.

    Raises:
        ValueError: settings that fit neither one another nor the corpus; out_dir holds a run that
            is not to be resumed, or cannot be, or that another process trains, or files that are no
            run's; the loss is no longer a number. Checkpoints are as they were.
        OSError: out_dir cannot be written to, or the disk is full. Earlier checkpoints are as they
            were.
    """
    if corpus.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"{corpus.name} has {corpus.vocab_size} symbols, the model only vocab_size = "
            f"{model_config.vocab_size}"
        )
    with Processes.joined(device) as processes:
        tgt_len, ext_len = train_config.segment_lengths(model_config)
        batches = corpus.batches(
            "train",
            train_config.batch_size,
            tgt_len,
            ext_len=ext_len,
            varlen=train_config.varlen,
            seed=train_config.seed,
            rows=processes.rows(train_config.batch_size, train_config.batch_chunk),
        )
        _check_rows(batches, model_config, train_config)
        trainer = Trainer(
            new_model(model_config, train_config, processes, backend),
            train_config,
            batches,
            out_dir,
            processes=processes,
            evaluator=validation(corpus, model_config, train_config),
            corpus=corpus.identity,
            vocabulary=corpus.vocabulary,
            on_event=on_event,
            progress=progress,
        )
        return trainer.run(resume)


def new_model(
    model_config: TransformerXLConfig,
    train_config: TrainConfig,
    processes: Processes,
    backend: str | None = None,
) -> TransformerXL:
    """The untrained model, the same in every process.

    What is drawn from then on, the masks of dropout, differs between processes.
    """
    torch.manual_seed(train_config.seed)
    model = TransformerXL(model_config, backend).to(processes.device)
    torch.manual_seed(train_config.seed + 1 + processes.rank)
    return model


def _check_rows(batches: Batches, model_config: TransformerXLConfig, train_config: TrainConfig) -> None:
    """Raises ValueError where no row of a text is as long as a segment: one step would read all of it."""
    tgt_len = train_config.tgt_len or model_config.tgt_len
    if isinstance(batches, OrderedBatches) and tgt_len >= batches.row_len:
        raise ValueError(
            f"tgt_len {tgt_len} is too long for this text: its {len(batches.tokens):,} tokens are "
            f"{batches.row_len:,} in each of the {batches.batch_size} rows of a batch. Choose a tgt_len of "
            f"{batches.row_len - 1} or less, a smaller batch_size, or a longer text"
        )


class Trainer:
    """The training loop, over any source of segments."""

    def __init__(
        self,
        model: TransformerXL,
        config: TrainConfig,
        batches: Batches,
        out_dir: str | os.PathLike[str],
        *,
        processes: Processes,
        evaluator: Evaluator | None = None,
        corpus: dict[str, Any] | None = None,
        vocabulary: Vocabulary | None = None,
        on_event: Callable[[Event], object] = lambda event: None,
        progress: bool = False,
    ) -> None:
        """`corpus`: what identifies the text, for JSON. `vocabulary`: is saved with the run, which can
        then be read without its corpus. The rest as in `train`.
        """
        self.vocabulary = vocabulary
        self.config, self.batches, self.processes, self.evaluator = config, batches, processes, evaluator
        self.out_dir = Path(out_dir)
        self.unit: str = (corpus or {}).get("unit", "word")
        self.on_event, self.progress = on_event, progress
        self.checkpoints = Checkpoints(self.out_dir / "checkpoints", config.keep)
        self.ext_len = config.segment_lengths(model.config)[1]
        model.train()
        if config.compile:
            for block in model.blocks:
                block.compile()
        self.scorer = parallelize(model, config.parallel, processes)
        self.state = TrainState(unwrapped(model), config, batches, processes, {"corpus": corpus or {}})
        # Loss (this process's part) and gradient norm of steps not looked at yet: to look is to
        # wait for the device.
        self._unseen: list[Tensor] = []
        self._grad_norm = math.nan
        self._saved: Path | None = None
        self._replace_best = 0  # from this step on best/ is written whatever the loss; 0: if it is the best
        self._watch = Stopwatch()

    def run(self, resume: bool = False) -> TrainResult:
        """Train until max_step or a signal. Arguments and errors as in `train`."""
        config, processes = self.config, self.processes
        with contextlib.ExitStack() as stack:
            self._prepare(resume, stack)
            progress = self.state.progress
            stop = stack.enter_context(StopSignal())
            self.log = stack.enter_context(
                Log(self.out_dir / "log.jsonl" if processes.first else None, progress.log_bytes)
            )
            shown = self.progress and processes.first
            self.bar = stack.enter_context(
                tqdm(
                    total=config.max_step,
                    initial=progress.step,
                    unit="step",
                    disable=None if shown else True,  # None: unless stderr is a terminal
                )
            )
            segments = iter(self.batches)
            self._watch.restart()
            while True:
                if self.evaluator and self._evaluation_is_due():
                    with self._watch.paused():
                        self._evaluate(self.evaluator, stop)
                ended_by = processes.largest(stop.number or 0)
                finished = progress.step >= config.max_step
                if ended_by or finished or self._due(config.save_interval):
                    with self._watch.paused():
                        self._save()
                if ended_by or finished:
                    break
                self._update(next(segments))
                if processes.device.type == "cpu":
                    self._look()  # nothing to wait for
                if self._due(config.log_interval):
                    self._log_line()
        return TrainResult(
            progress.step, progress.best_loss, self._saved, None if finished else ended_by or None
        )

    def _due(self, interval: int) -> bool:
        step = self.state.progress.step
        return bool(interval and step) and (step % interval == 0 or step == self.config.max_step)

    def _evaluation_is_due(self) -> bool:
        progress = self.state.progress
        due = self._due(self.config.eval_interval) and progress.evaluated < progress.step
        return self.evaluator is not None and due

    def _update(self, segment: Any) -> None:
        """One step: the segment's loss and gradients, chunk by chunk, then the weights."""
        config, state, processes = self.config, self.state, self.processes
        device = processes.device
        if segment.new_text:
            state.memories = [None] * config.batch_chunk
        scored = int(processes.sum((segment.labels != NOT_SCORED).sum()))
        # DDP and FSDP2 make the mean of the processes' gradients; wanted is that of the mean loss
        # of all tokens.
        scale = processes.count / max(scored, 1)
        ext_len = min(self.ext_len, segment.input_ids.shape[1])
        chunks = zip(*(x.chunk(config.batch_chunk) for x in (segment.input_ids, segment.labels)), strict=True)
        loss = torch.zeros((), device=device)
        state.optimizer.zero_grad()
        for i, (input_ids, labels) in enumerate(chunks):
            input_ids, labels = (x.to(device, non_blocking=True) for x in (input_ids, labels))
            with accumulating(self.scorer, more=i + 1 < config.batch_chunk):
                with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                    nats, state.memories[i] = self.scorer(input_ids, state.memories[i], labels, ext_len)
                (nats * scale).backward()
            loss += nats.detach() / max(scored, 1)
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), config.clip or math.inf)
        state.schedule.before_update(state.progress.step)
        state.optimizer.step()
        state.progress.step += 1
        if state.average is not None:
            state.average.after_update(state.progress.step)
        state.progress.tokens += scored
        self._watch.count(scored)
        self._unseen.append(torch.stack([loss, whole(norm)]))
        self.bar.update()

    def _look(self) -> None:
        """Read the losses of the steps since the last look.

        Raises ValueError where one of them is no number.
        """
        if not self._unseen:
            return
        seen, self._unseen = torch.stack(self._unseen).cpu(), []
        losses = self.processes.sum(seen[:, 0].clone()).tolist()
        norms = seen[:, 1].tolist()
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1 - len(losses)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                kept = self.checkpoints.all()
                raise ValueError(
                    f"training has diverged: at step {self.state.progress.step + i} the loss is "
                    f"{loss:.4g} and the gradient's norm {norm:.4g}. A lower lr, a longer warmup_step "
                    "or a smaller clip may help. The last checkpoint, from before that, is "
                    f"{kept[-1] if kept else 'none'}"
                )
        self.state.progress.losses += losses
        self._grad_norm = norms[-1]
        shown = figures(statistics.fmean(self.state.progress.losses), self.unit)
        self.bar.set_postfix(shown | {"tokens/s": round(self._watch.rate())}, refresh=False)

    def _log_line(self) -> None:
        self._look()
        progress, watch = self.state.progress, self._watch
        self._emit(
            {
                "event": "train",
                "step": progress.step,
                **figures(statistics.fmean(progress.losses), self.unit),
                "lr": self.state.schedule.lr,
                "grad_norm": self._grad_norm,
                "tokens": progress.tokens,
                "tokens_per_second": watch.rate(),
                "seconds_left": (self.config.max_step - progress.step) * watch.seconds_per_step(),
            }
        )
        progress.losses = []
        watch.restart()

    def _evaluate(self, evaluator: Evaluator, stop: StopSignal) -> None:
        """The loss of the validation text; the best model so far is kept in best/."""
        self._look()
        state, processes, began = self.state, self.processes, time.perf_counter()
        # Neither sharded nor compiled, and with the averaged weights where there are any; no copies of them.
        model = model_of(state.model.config, state.evaluated_weights(), "training", state.model.backend)
        try:
            # One process may give up at once; several agree first, between steps.
            loss = evaluator(model, stop.check if processes.count == 1 else lambda tokens: None)
        except Stopped:
            return  # evaluated once the run goes on
        # The first one's: another rounding must not lead the processes apart.
        loss = float(processes.sum(torch.tensor(loss if processes.first else 0.0, dtype=torch.float64)))
        step, best_loss = state.progress.step, state.progress.best_loss
        state.schedule.after_evaluation(loss)
        best = best_loss is None or loss < best_loss or 0 < self._replace_best <= step
        best = best and math.isfinite(loss)
        if best:
            with processes.together("saving the best model"):
                if processes.first:
                    metadata = {"step": str(step), "valid_loss": str(loss)}
                    save_model(model, self.out_dir / "best", state.about, metadata)
            state.progress.best_loss, self._replace_best = loss, 0
        state.progress.evaluated = step
        seconds = time.perf_counter() - began
        self._emit(
            {"event": "eval", "step": step, **figures(loss, self.unit), "best": best, "seconds": seconds}
        )

    def _prepare(self, resume: bool, stack: contextlib.ExitStack) -> None:
        """Go on from a checkpoint if there is one; make the run's folder, which is this run's alone until the
        stack is closed."""
        processes, checkpoint, at_end = self.processes, None, False
        changes: Changes = {}
        with processes.together("looking for a checkpoint"):
            if processes.first:
                self._check_folder(resume)  # before a lock is left there
                stack.enter_context(alone_in(self.out_dir))
                self._check_folder(resume)  # another training may have ended meanwhile
                checkpoint = self.checkpoints.newest(self._note) if resume else None
                if resume and not checkpoint:
                    self._note(f"nothing to resume in {self.out_dir}: a new run begins there")
        # The first process decides: it alone has read all the files to see that they are whole.
        step = processes.largest(self.checkpoints.step(checkpoint) if checkpoint else 0)
        with processes.together("resuming the run"):
            if step:
                self._saved = self.checkpoints.path(step)
                changes, missing = self.state.restore(self._saved)
                at_end = step >= self.config.max_step and not self._evaluation_is_due()
                if at_end:
                    self._note(
                        f"nothing left to do: {self._saved} is there already, and max_step is "
                        f"{self.config.max_step:,}. A larger max_step goes on from there"
                    )
                else:
                    self._emit({"event": "resume", "step": step, "path": str(self._saved)})
                    if missing:
                        self._note(missing)
                    if changes:
                        self._note(f"from here on {_in_words(changes)}")
                    if changes.keys() & set(READING) and self.state.progress.best_loss is not None:
                        self.state.progress.best_loss = None
                        self.state.schedule.forget_evaluations()
                        self._note("the next evaluation replaces best/, whose losses are of another reading")
            if processes.first:
                if not at_end:
                    self._write_config(step, changes)
                self.checkpoints.tidy(step)
        # The first one again, which writes best/: all must agree on what is the best.
        self._replace_best = processes.largest(self._other_best() if processes.first else 0)
        if self._replace_best and not at_end:
            self._note(
                "best/ is not of the steps up to here: the next better loss replaces it, at the latest the "
                f"first evaluation from step {self._replace_best:,} on"
            )

    def _other_best(self) -> int:
        """The step from which on best/ is to be replaced, where it is not of the steps so far; else 0.

        best/ is written between checkpoints, too: it may be ahead of the one from which a run goes on. Steps
        that are then repeated to the bit write it again, at that step at the latest: nothing need be done.
        Where they differ (by another lr, say), it is of a branch that was given up: the first evaluation at
        its step or beyond it that finds it there takes its place, whatever the loss. What was the best up to
        the checkpoint is lost either way. Losses are compared, not steps: the branch may have been given up
        some checkpoints ago.
        """
        best_loss = self.state.progress.best_loss
        if best_loss is None:
            return 0  # the next evaluation writes it anyway
        step, loss = best_model(self.out_dir) or (1, None)
        return 0 if loss == best_loss else min(step, self.config.max_step)

    def _write_config(self, step: int, changes: Changes) -> None:
        """config.json of the run: how it is configured now, and the steps at which that was changed."""
        before = (run_config(self.out_dir) or {}).get("changes", [])
        # What was changed at this step or a later one has led to nothing that is kept.
        history = [change for change in before if change["step"] < step]
        if changes:
            history.append({"step": step, "changed": changes})
        try:
            with replacing(self.out_dir) as scratch:
                write(scratch / CONFIG, self.state.about | ({"changes": history} if history else {}))
                if self.vocabulary is not None:
                    self.vocabulary.save(scratch / VOCABULARY)
        except OSError as error:
            raise OSError(f"cannot write to {self.out_dir}: {reason(error)}") from error

    def _check_folder(self, resume: bool) -> None:
        """Raises ValueError where a new run would mix with what out_dir holds, or take its place."""
        if self.checkpoints.all():
            if not resume:
                raise ValueError(
                    f"{self.out_dir} holds a training run already: resume it, or name another folder"
                )
        elif self.out_dir.is_dir() and run_config(self.out_dir) is None:
            refuse_other_files(self.out_dir, "training run")

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one, or nothing to save yet."""
        self._look()
        progress, processes, began = self.state.progress, self.processes, time.perf_counter()
        step = progress.step
        if step == 0 or self._saved == self.checkpoints.path(step):
            return
        progress.log_bytes = self.log.sync()
        self._saved = self.checkpoints.save(
            step, self.state.shared_files(), self.state.own_files(), processes
        )
        seconds = time.perf_counter() - began
        self._emit({"event": "checkpoint", "step": step, "path": str(self._saved), "seconds": seconds})

    def _emit(self, event: Event) -> None:
        if self.processes.first:
            if event["event"] in ("train", "eval"):
                self.log.append(event)
            self.on_event(event)

    def _note(self, message: str) -> None:
        self._emit({"event": "note", "step": self.state.progress.step, "message": message})


def _in_words(changes: Changes) -> str:
    return ", ".join(f"{name} is {now} (was {before})" for name, (before, now) in changes.items())

"""The training loop, written out: epochs, validation, learning rate, early stopping, checkpoints, log.

    for each epoch:   for each batch:  set the learning rate ─▶ engine.step ─▶ add up ─▶ log, checkpoint
                      validate ─▶ log ─▶ stop early?

Every rank runs the same loop and knows the same figures; rank 0 writes them down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice

from quintsched.files.atomic import whole_path
from quintsched.plan import Plan

from ..agreement.records import agree_on_start, agreed_settings
from ..blocks.blocks import undecayed_weights
from ..comm import Transport
from ..comm.clock import now_s
from ..engine import Engine
from ..interpreter.tally import StepResult
from ..models import build_model, tied_weights
from ..parallel.expert.load import expert_figures
from ..saving.checkpoints.checkpoints import OpenCheckpoints, checkpoints_of
from ..settings.job import JobConfig
from ..settings.run_settings import Start
from ..splitting.split import Split
from ..verification.block_facts import ModelFacts
from ..verification.recording import Recording
from .feed import open_feed, parts_of
from .losses import Sums, Window, accuracy_of, figures_in_words, loss_of
from .optimizer import build_optimizer, learning_rate_factor
from .reporter import Record, Reporter, Sink, Sinks, require_sinks
from .resuming import Progress, Scale, StepSamples, go_on_from, load_pretrained_of
from .stage_costs import block_costs
from .trace_window import TracedSteps, traced_steps


class Trainer:
    """Trains a job's model on its data with a plan.

    Args:
        job: the job file.
        plan: the plan; `job.plan_of` makes it from the job.
        transport: this rank's transport (`connect_for`).
        reporter: where figures go; None: nowhere.
        sinks: functions of (figures, step=…) that take them as well, on rank 0, beside those that the job names.
        overrides: settings, or sections of them, that may differ from those of the run that is resumed.
        wants_stop: whether this rank was asked to stop: all then finish the step, save if the job does, and return.

    Raises what loading the data, building the model and the engine raise.
    """

    def __init__(
        self,
        job: JobConfig,
        plan: Plan,
        transport: Transport,
        reporter: Reporter | None = None,
        *,
        sinks: Sequence[Sink] = (),
        wants_stop: Callable[[], bool] = lambda: False,
        overrides: Sequence[str] = (),
    ) -> None:
        self.job, self.plan, self._overrides = job, plan, overrides
        require_sinks(job.log.sinks)
        self._reporter = reporter or Reporter(None, lambda _: None)
        self._publisher = transport.publisher
        if transport.rank == 0:
            self._reporter.sinks = Sinks(job.log.sinks, sinks)
        self._wants_stop = wants_stop
        self.settings = agreed_settings(job, plan, transport)
        self._feed = open_feed(job.data, job.train, plan, transport)
        self.settings |= self._feed.settings
        self.engine = self._build_engine(transport)
        self._checkpoints = checkpoints_of(job.checkpoint, job.runtime.timeout_s)
        self._export_dir = None if job.checkpoint.export is None else whole_path(job.checkpoint.export)
        self._saves: OpenCheckpoints | None = None
        self.progress, self._stop_asked = Progress(self._feed.num_batches), False
        self._samples = StepSamples(self.engine, self._feed, self.settings, tuple(overrides))
        self._scale = Scale(self.engine, job.train.accumulate)

    def _build_engine(self, transport: Transport) -> Engine:
        """Build the job's model, loss and optimizer, and bind the plan to them."""
        job = self.job
        blocks, optimizer = build_model(job.model, self._feed.spec, job.run.seed), job.train.optimizer
        tied = tied_weights(job.model) or (blocks.tied if isinstance(blocks, Split) else {})
        loss_fn = loss_of(job.train.loss, blocks)
        metrics = accuracy_of(loss_fn, self.plan)
        self._figures = ("loss", *metrics)
        undecayed = undecayed_weights(blocks, tied) if optimizer.decay == "matrices" else ()
        return Engine(
            self.plan,
            blocks,
            loss_fn,
            lambda named_parameters: build_optimizer(optimizer, named_parameters, undecayed),
            metrics=metrics,
            block_costs=block_costs(job, self.plan, blocks, self._feed, transport),
            trace_steps=traced_steps(job.runtime),
            wants_stop=self._wants_to_stop,
            spike_dir=job.folder,
            **{**dict(job.run), "tied": tied},
            transport=transport,
        )

    @property
    def total_steps(self) -> int:
        """The steps of all epochs."""
        return self.job.train.epochs * self._feed.num_batches

    def fit(self, start: Start = "new", *, resume: bool = False) -> list[Record]:
        """Train to the end, and return the record of each epoch.

        Where the folder of the checkpoints holds an earlier run, that is refused, unless one says to "resume" from its
        newest checkpoint that is whole (`resume` says the same), or to start "fresh", which moves it away.
        """
        start = "resume" if resume else start
        agree_on_start(start, self._overrides, self.engine.transport)
        with self._reporter as reporter, self._opened(start):
            with self._publisher.phase("load"):
                if not (start == "resume" and self._resume()):
                    load_pretrained_of(self.job.model, self.engine, self._reporter.say)
            for line in (self.engine.tensor_cuts, self.engine.expert_shares, self.engine.zero_split):
                if line is not None:
                    reporter.say(line)
            begun = {"plan": self.plan.title, "step": self.progress.step}
            reporter.record({"event": "start", **begun, "deferred_share": self.engine.deferred_share})
            if self.progress.epoch < self.job.train.epochs and not self.progress.stopped:
                self._train(TracedSteps(self.job.runtime, self.total_steps - self.progress.step))
            if not self._stop_asked:
                self._export()
        return self.progress.history

    @contextmanager
    def _opened(self, start: Start) -> Iterator[None]:
        """A context in which the folder of the checkpoints, if the job has one, is this run's alone."""
        if self._checkpoints is None:
            yield
            return
        with self._checkpoints.opened(self.engine.saves, start, self.settings) as self._saves:
            if self.engine.transport.rank == 0:
                self.engine.transport.begin_run()
            if self._saves.moved:
                self._reporter.say(self._saves.moved)
            yield
            with self._publisher.phase("save"):
                self._saves.finish()

    def record(self, steps: int) -> Recording:
        """Train at most so many steps from the start, and return what each of them makes on this rank."""
        load_pretrained_of(self.job.model, self.engine, self._reporter.say)
        recording = Recording(self.engine.transport.rank, self.plan.mesh.coordinates(self.engine.transport.rank))
        for inputs, targets, extras in islice(self._feed.train(0, start=0), steps):
            self._set_learning_rate()
            self.engine.checks.record_step(recording, inputs, targets, **extras)
            self.progress.step += 1
        return recording

    def inspect(self) -> ModelFacts:
        """Train one step, and return what it has found of blocks, loss and metrics."""
        inputs, targets, extras = next(iter(self._feed.train(0, start=0)))
        return self.engine.inspect(inputs, targets, **extras)

    def _train(self, traced: TracedSteps) -> None:
        while self.progress.epoch < self.job.train.epochs and not (self.progress.stopped or self._stop_asked):
            self._train_epoch(traced)
        traced.finish(self.engine)

    def _train_epoch(self, traced: TracedSteps) -> None:
        progress, reporter = self.progress, self._reporter
        name = f"epoch {progress.epoch + 1}/{self.job.train.epochs}"
        reporter.start_epoch(name, self._feed.num_batches, progress.batch)
        window = Window(self.job.log.every)
        self.engine.clock.read_s()  # what validation computed belongs to no window
        began, first_batch = now_s(), progress.batch
        totals = Sums(progress.totals, lambda: self._scale.of_sums(progress))
        for result in self._steps(traced):
            totals.add(result)
            reporter.advance()
            if result.skipped:
                reporter.say(f"step {progress.step} was skipped: its gradient is not finite")
            if window.add(result):
                reporter.record(self._step_record(window, result))
            if result.stop_asked:
                progress.totals = totals.read()
                self._stop()
                return
            if self._is_due() and progress.batch < self._feed.num_batches:  # else: after the validation
                progress.totals = totals.read()
                self._save()
        steps = progress.batch - first_batch
        seconds = now_s() - began
        progress.epoch, progress.batch, progress.totals = progress.epoch + 1, 0, {}
        self._end_epoch(totals.read(), steps, seconds)

    def _steps(self, traced: TracedSteps) -> Iterator[StepResult]:
        """Yield the result of each batch that is left of the epoch."""
        progress = self.progress
        for inputs, targets, extras in self._publisher.fetching(self._feed.train(progress.epoch, start=progress.batch)):
            self._set_learning_rate()
            self._samples.take((inputs, targets))
            *before, (inputs, targets, extras) = parts_of((inputs, targets, extras), self.job.train.accumulate)
            earlier = [self.engine.step(x, y, last=False, **beside) for x, y, beside in before]
            result = self.engine.step(inputs, targets, **extras).with_earlier(earlier)
            traced.count(self.engine)
            progress.step += 1
            progress.batch += 1
            yield result

    def _set_learning_rate(self) -> None:
        train = self.job.train
        rate = train.optimizer.lr * learning_rate_factor(train.lr_schedule, self.progress.step, self.total_steps)
        for optimizer in self.engine.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def _step_record(self, window: Window, result: StepResult) -> Record:
        """Return the figures of the last steps; collective, for the bubble and the experts."""
        seconds, sums = window.take()
        busy = self.engine.busy_share(seconds)
        norm = result.grad_norm
        return {
            "event": "step",
            "step": self.progress.step,
            "epoch": self.progress.epoch + 1,
            **self._means(sums),
            "grad_norm": math.nan if norm is None else norm.item(),
            "skipped": result.skipped,
            "step_s": seconds / window.every,
            "samples_per_s": window.every * self.job.train.batch_size / seconds,
            "bubble": 1 - busy,
            **expert_figures(self.engine.expert_tokens()),
        }

    def _end_epoch(self, totals: dict[str, float], steps: int, seconds: float) -> None:
        """Validate, write the epoch down, decide whether to go on, and save."""
        progress = self.progress
        validation = self.validate()
        record: Record = {
            "event": "epoch",
            "epoch": progress.epoch,
            "step": progress.step,
            **self._means(totals),
            **{f"validation_{name}": mean for name, mean in validation.items()},
            "samples_per_s": steps * self.job.train.batch_size / seconds,
            "step_s": seconds / max(steps, 1),
        }
        progress.history.append(record)
        self._reporter.record(record)
        self._reporter.say(
            f"epoch {progress.epoch}/{self.job.train.epochs}  {figures_in_words(record)}  "
            f"validation {figures_in_words(validation)}  {record['samples_per_s']:.0f} samples/s"
        )
        self._watch_for_gain(validation["loss"])
        is_last = progress.stopped or progress.epoch == self.job.train.epochs
        if not is_last and self.engine.everyone.add(self._wants_to_stop())[0]:
            self._stop()  # a rank was asked to while it validated
        elif is_last or self._is_due():
            self._save()

    def _wants_to_stop(self) -> bool:
        return self._wants_stop() or (self._saves is not None and self._saves.has_failed)

    def _is_due(self) -> bool:
        """Whether a checkpoint is due after this step, or at this end of an epoch."""
        every, progress = self.job.checkpoint.every, self.progress
        return progress.step % every == 0 if every else progress.batch == 0

    def validate(self) -> dict[str, float]:
        """Return loss and accuracy over all batches of validation, the same on every rank; without such, NaN."""
        totals = Sums({})
        for inputs, targets, extras in self._publisher.fetching(self._feed.validation()):
            totals.add(self.engine.evaluate(inputs, targets, **extras))
        return self._means(totals.read())

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        """Return loss, and accuracy where the loss is one of classes, per what counts; without any, NaN."""
        weight = sums.get("weight", 0.0)
        return {name: sums[name] / weight if weight else math.nan for name in self._figures}

    def _watch_for_gain(self, loss: float) -> None:
        """Stop once the validation loss has not fallen for `patience` epochs; rank 0 decides for all."""
        progress, patience = self.progress, self.job.train.patience
        if math.isfinite(loss) and (progress.best is None or loss < progress.best):
            progress.best, progress.epochs_without_gain = loss, 0
        else:
            progress.epochs_without_gain += 1
        wants_stop = patience is not None and progress.epochs_without_gain >= patience
        if patience is not None and self.engine.everyone.first_says(int(wants_stop)):
            progress.stopped = True
            self._reporter.say(f"no gain in validation loss for {patience} epochs: stopped after {progress.epoch}")

    def _save(self, *, waits: bool = False) -> None:
        """Save the run as it is; in the background, unless one `waits` for it."""
        if self._saves is None:
            return
        with self._publisher.phase("save"):
            self._samples.note_varying()
            state = self.engine.everyone.together(self._feed.state)
            self._saves.save(self.progress.step, asdict(self.progress), state)
            if waits:
                self._saves.finish()

    def _stop(self) -> None:
        """Save the run as it is, since a rank was asked to stop, or could not write the last save."""
        self._stop_asked = True
        self._save(waits=True)
        step, saves = self.progress.step, self._saves is not None
        self._reporter.record({"event": "stop", "step": step, "saved": saves})
        where = (
            f"saved at step {step}" if saves else f"nothing is saved after step {step}: the job has no checkpoint.dir"
        )
        self._reporter.say(f"stopped as asked: {where}")

    def _export(self) -> None:
        """Write the trained weights for others, if the job wants them."""
        if self._export_dir is not None:
            with self._publisher.phase("save"):
                self.engine.save_pretrained(self._export_dir)
            self._reporter.say(f"weights saved in {self.job.checkpoint.export}")

    def _resume(self) -> bool:
        """Go on from the newest checkpoint that is whole; rank 0 says which that is. Return whether there was one."""
        found = None if self._saves is None else self._saves.newest_whole()
        if found is None:
            self._reporter.say("no checkpoint to resume from: starting at the beginning")
            return False
        say, overrides = self._reporter.say, tuple(self._overrides)
        self.progress = go_on_from(found, self.engine, self._feed, self.settings, overrides, say)
        self._samples.expect(found)
        self._scale.take_over(self.progress)
        return True

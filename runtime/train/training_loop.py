"""The training loop: epochs, validations, learning rate, early stopping, checkpoints, log.

    for each epoch:   for each batch:  set the learning rate ─▶ engine.step ─▶ add up ─▶ log, validate, checkpoint
                      validate ─▶ log ─▶ stop early?

Every rank runs the same loop and has the same figures; rank 0 writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial

from quintsched.errors import counted
from quintsched.trace.step_line_format import in_words, step_line

from ..comm.clocks import now_s
from ..engine import Engine
from ..interpreter.step_losses.sum_losses_across_ranks import StepResult
from ..parallel.expert.expert_load import expert_figures
from ..saving.checkpoints.save_and_load_checkpoints import OpenCheckpoints
from ..settings.job_file import JobConfig
from .batch_feed import Feed, parts_of
from .built_in_losses import ResultSums, StepsWindow, figures_in_words
from .due_intervals import Due
from .job_optimizer_and_lr_schedule import learning_rate_factor, set_learning_rate
from .reporter import LogRecord, Reporter
from .resume_training import LossWeighting, StepSamples, TrainingPosition
from .throughput import Throughput
from .trace_window import TracedSteps


class TrainingLoop:
    """Trains an engine on a feed, as the sections `train`, `log`, `checkpoint` and `runtime` of a job say.

    Args:
        job: the settings; what is trained and on what is given by the others.
        engine, feed: what is trained, and on what.
        reporter: where figures go.
        figures: names of the means of a step: "loss" and the metrics.
        shows_perplexity: whether exp(loss) is one.
        samples: how many samples loaders give for a step.
        wants_stop: whether this rank was asked to stop.
        lr: the learning rate that the schedule multiplies, and groups have factors of.

    Attributes:
        progress: how far the training has come.
        saves: the open folder of checkpoints; None: nothing is saved.
        is_stopped: whether it has ended before its time, as it was asked to.
    """

    def __init__(
        self,
        job: JobConfig,
        engine: Engine,
        feed: Feed,
        reporter: Reporter,
        figures: tuple[str, ...],
        samples: StepSamples,
        wants_stop: Callable[[], bool],
        *,
        lr: float,
        shows_perplexity: bool,
    ) -> None:
        self._job, self._engine, self._feed, self._reporter = job, engine, feed, reporter
        self._figures, self._shows_perplexity, self._lr = figures, shows_perplexity, lr
        self._wants_stop, self._publisher = wants_stop, engine.transport.publisher
        self.progress, self.is_stopped = TrainingPosition(feed.num_batches), False
        self.saves: OpenCheckpoints | None = None
        self.samples = samples
        self._scale = LossWeighting(engine, job.train.accumulate)
        precision, peak = job.runtime.precision, job.log.peak_tflops
        self._throughput = Throughput(engine, precision, peak, engine.checks.forward_flops)
        due = partial(Due, everyone=engine.everyone, tokens_per_step=self._throughput.tokens_per_step)
        self._log_is_due = due(job.log.every)
        self._validation_is_due = due(job.train.evaluate_every)
        self._save_is_due = due(job.checkpoint.every)
        self._window = StepsWindow()
        self._idle_s = self._logged_s = 0.0

    @property
    def total_steps(self) -> int:
        """The steps of the whole training."""
        train = self._job.train
        of_epochs = None if train.most_epochs is None else train.most_epochs * self._feed.num_batches
        return min(steps for steps in (of_epochs, train.max_steps) if steps is not None)

    @cached_property
    def planned_bubble(self) -> float:
        """Bubble of the plan under unit costs, without messages."""
        return self._engine.plan.simulate().bubble

    def take_over(self, progress: TrainingPosition) -> None:
        """Go on from where another run had come."""
        self.progress = progress
        self._scale.take_over(progress)

    def is_over(self) -> bool:
        """Return whether all steps are made, or the training has stopped early."""
        return self.progress.stopped or self.is_stopped or self.progress.step >= self.total_steps

    def train_steps(self) -> None:
        """Train to the end."""
        began, first = now_s(), self.progress.step
        if self.is_over():
            has = f"it has {counted(self.total_steps, 'step')}"
            why = "the run had stopped early" if self.progress.stopped else has
            self._reporter.say(f"nothing is left to train: {why}")
            return
        traced = TracedSteps(self._job.runtime, self.total_steps - first)
        while not self.is_over():
            self._train_epoch(traced)
        traced.finish_trace(self._engine)
        if not self.is_stopped:
            self._summarize(self.progress.step - first, now_s() - began)

    def _train_epoch(self, traced: TracedSteps) -> None:
        progress, reporter = self.progress, self._reporter
        reporter.start_epoch(self._name_of_epoch(), self._feed.num_batches, progress.batch)
        self._window = StepsWindow()
        self._engine.clock.read_s()  # what validation computed belongs to no window
        began, first_batch = now_s(), progress.batch
        totals, has_logged = ResultSums(progress.totals, lambda: self._scale.note_in(progress)), False
        if progress.owes_validation:
            progress.owes_validation = False
            self._validate_between(None)
        for result in () if progress.stopped else self._steps(traced):
            totals.add_result(result)
            self._window.add_step(result)
            reporter.advance()
            if result.skipped:
                reporter.say(f"step {progress.step} was skipped: its gradient is not finite")
            ends = progress.batch == self._feed.num_batches or progress.step == self.total_steps
            if self._log_is_due.after(progress.step) or (ends and not has_logged):
                has_logged = True
                self._log(result)
            if result.stop_asked:
                progress.totals = totals.read_sums()
                progress.owes_validation = not ends and self._validation_is_due.after(progress.step)
                self._stop()
                return
            if not ends and self._validation_is_due.after(progress.step):
                self._validate_between(result)
            if not ends and self._save_is_due.after(progress.step):  # at an end: after the validation
                progress.totals = totals.read_sums()
                self._save()
            if progress.stopped or (ends and progress.batch < self._feed.num_batches):
                break  # behind the last batch of an epoch the feed checks its own end
        steps, sums = progress.batch - first_batch, totals.read_sums()
        if progress.batch == self._feed.num_batches:
            progress.epoch, progress.batch, progress.totals = progress.epoch + 1, 0, {}
        else:
            progress.totals = sums
        self._end_epoch(sums, steps, now_s() - began)

    def _name_of_epoch(self) -> str:
        most = self._job.train.most_epochs
        return f"epoch {self.progress.epoch + 1}" + ("" if most is None else f"/{most}")

    def _steps(self, traced: TracedSteps) -> Iterator[StepResult]:
        """Yield the result of each batch that is left of the epoch."""
        progress, accumulate = self.progress, min(self._job.train.accumulate, self._feed.parts)
        for inputs, targets, extras in self._publisher.fetching(self._feed.train(progress.epoch, start=progress.batch)):
            self.set_learning_rate()
            self.samples.count_batch((inputs, targets))
            self._throughput.note_batch(inputs, targets)
            *before, (inputs, targets, extras) = parts_of((inputs, targets, extras), accumulate)
            earlier = [self._engine.step(x, y, last=False, **beside) for x, y, beside in before]
            result = self._engine.step(inputs, targets, **extras).with_earlier(earlier)
            traced.count(self._engine)
            progress.step += 1
            progress.batch += 1
            yield result

    def set_learning_rate(self) -> float:
        """Set the learning rate of the next step, and return it."""
        schedule = self._job.train.lr_schedule
        rate = self._lr * learning_rate_factor(schedule, self.progress.step, self.total_steps)
        set_learning_rate(self._engine.optimizers.values(), rate)
        return rate

    def _log(self, result: StepResult) -> None:
        """Record the figures of the last steps; collective, for the figures of ranks, the rates and the experts."""
        steps, seconds, sums = self._window.read_window()
        self._window = StepsWindow()
        progress, norm = self.progress, result.grad_norm
        groups = [group for optimizer in self._engine.optimizers.values() for group in optimizer.param_groups]
        of_ranks = self._throughput.read_ranks(seconds)
        self._idle_s += of_ranks["bubble"] * seconds
        self._logged_s += seconds
        record: LogRecord = {
            "event": "step",
            "step": progress.step,
            "epoch": progress.epoch + 1,
            **self._means(sums),
            "grad_norm": math.nan if norm is None else norm.item(),
            "lr": groups[0].get("lr", math.nan) if groups else math.nan,
            "skipped": result.skipped,
            "step_s": seconds / steps,
            **of_ranks,
            **self._throughput.read_rates(seconds),
            "left_s": (self.total_steps - progress.step) * seconds / steps,
            **expert_figures(self._engine.expert_tokens()),
        }
        self._reporter.write_record(record)
        self._reporter.show_step(step_line(record, self.total_steps))

    def _end_epoch(self, totals: dict[str, float], steps: int, seconds: float) -> None:
        """Validate, record the epoch, or the part of it that was trained, decide whether to go on, and save."""
        progress, train = self.progress, self._job.train
        is_due = self._validation_is_due.is_at_epochs or self._validation_is_due.after(progress.step)
        validates = (is_due or progress.step == self.total_steps) and not progress.stopped
        validation = self.validate() if validates else {}
        is_whole = not progress.batch
        record: LogRecord = {
            "event": "epoch",
            "epoch": progress.epoch + (not is_whole),
            "step": progress.step,
            **self._means(totals),
            **{f"validation_{name}": mean for name, mean in validation.items()},
            "samples_per_s": steps * self._throughput.samples_per_step / seconds,
            "step_s": seconds / max(steps, 1),
        }
        progress.history.append(record)
        self._reporter.write_record(record)
        most = "" if train.most_epochs is None else f"/{train.most_epochs}"
        where = f"epoch {record['epoch']}{most}" + ("" if is_whole else f", step {progress.step}")
        has_loss = math.isfinite(validation.get("loss", math.nan))
        said = f"  validation {figures_in_words(validation)}" if has_loss else ""
        self._reporter.say(f"{where}  {figures_in_words(record)}{said}  {record['samples_per_s']:.0f} samples/s")
        if validation:
            self.watch_for_gain(validation["loss"], "epochs", str(progress.epoch))
        if not self.is_over() and self._engine.everyone.add_numbers(self.must_stop())[0]:
            self._stop()  # a rank was asked to while it validated
        elif self.is_over() or self._save_is_due.is_at_epochs or self._save_is_due.after(progress.step):
            self._save()

    def _validate_between(self, result: StepResult | None) -> None:
        """Validate within an epoch, and record it; what was trained before is logged first, unless it was before."""
        if result is not None and self._window.steps:
            self._log(result)
        progress, validation = self.progress, self.validate()
        named = {f"validation_{name}": mean for name, mean in validation.items()}
        self._reporter.write_record(
            {"event": "evaluation", "step": progress.step, "epoch": progress.epoch + 1, **named}
        )
        self._reporter.say(f"step {progress.step}  validation {figures_in_words(validation)}")
        self.watch_for_gain(validation["loss"], "validations", f"step {progress.step}")
        self._engine.clock.read_s()
        self._window = StepsWindow()

    def must_stop(self) -> bool:
        """Return whether this rank was asked to stop, or could not write the last checkpoint."""
        return self._wants_stop() or (self.saves is not None and self.saves.has_failed)

    def validate(self) -> dict[str, float]:
        """Return the means over all batches of validation, the same on every rank; without such, NaN."""
        totals = ResultSums({})
        for inputs, targets, extras in self._publisher.fetching(self._feed.validation()):
            totals.add_result(self._engine.evaluate(inputs, targets, **extras))
        return self._means(totals.read_sums())

    def _means(self, sums: dict[str, float]) -> dict[str, float]:
        """Return loss and metrics per loss weight, and the perplexity of token models; without any, NaN."""
        weight = sums.get("weight", 0.0)
        means = {name: sums[name] / weight if weight else math.nan for name in self._figures}
        if self._shows_perplexity and self._throughput.tokens_per_step():
            means["perplexity"] = math.exp(means["loss"]) if means["loss"] < 700 else math.inf
        return means

    def watch_for_gain(self, loss: float, counted: str, now: str) -> None:
        """Stop once the validation loss has not fallen for `patience` validations; rank 0 decides for all."""
        progress, patience = self.progress, self._job.train.patience
        if math.isfinite(loss) and (progress.best is None or loss < progress.best):
            progress.best, progress.epochs_without_gain = loss, 0
        else:
            progress.epochs_without_gain += 1
        wants_stop = patience is not None and progress.epochs_without_gain >= patience
        if patience is not None and self._engine.everyone.first_says(int(wants_stop)):
            progress.stopped = True
            self._reporter.say(f"no gain in validation loss for {patience} {counted}: stopped after {now}")

    def _save(self, *, waits: bool = False) -> None:
        """Save the run as it is; in the background, unless one `waits` for it."""
        if self.saves is None:
            return
        with self._publisher.phase("save"):
            self.samples.note_varying()
            state = self._engine.everyone.together(self._feed.state)
            self.saves.save_step(self.progress.step, asdict(self.progress), state)
            if waits:
                self.saves.finish_save()

    def _stop(self) -> None:
        """Save the run as it is, since a rank was asked to stop, or could not write the last save."""
        self.is_stopped = True
        self._save(waits=True)
        step, saves = self.progress.step, self.saves is not None
        self._reporter.write_record({"event": "stop", "step": step, "saved": saves})
        where = (
            f"saved at step {step}" if saves else f"nothing is saved after step {step}: the job has no checkpoint.dir"
        )
        self._reporter.say(f"stopped as asked: {where}")

    def _summarize(self, steps: int, seconds: float) -> None:
        """Report the whole run in a line."""
        progress, parts = self.progress, [f"{counted(steps, 'step')} in {in_words(seconds)}"]
        if tokens := steps * self._throughput.tokens_per_step():
            parts.append(f"{counted(tokens, 'token', ',')}")
        if progress.best is not None:
            parts.append(f"best validation loss {progress.best:.4f}")
        measured, planned = self._idle_s / self._logged_s if self._logged_s else math.nan, self.planned_bubble
        parts += [f"bubble {measured:.1%} (planned {planned:.1%})"] if self._logged_s else []
        if self.saves is not None:
            parts.append(f"saved in {self._job.checkpoint.dir}")
        figures = {"seconds": seconds, "best": progress.best, "bubble": measured, "planned_bubble": planned}
        self._reporter.write_record({"event": "end", "step": progress.step, **figures})
        self._reporter.say("trained: " + ", ".join(parts))

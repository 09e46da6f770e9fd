"""Trains a model from a job file, or from objects of one's own: model, loaders, loss, optimizer.

    Trainer(model, loader, validation, config).fit()       objects; `config` has the sections of a job file
    Trainer.of_job(job, plan, transport).fit()             all by name, as `quintsched run` does

Both build an engine and a feed; `training_loop` is the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from torch import nn

from quintsched.check_call_arguments import instance, shown, takes
from quintsched.compiler import compile_request
from quintsched.errors import UsageError, suggest
from quintsched.files.atomic import require_folder, whole_path
from quintsched.plan import Plan

from ..agreement.job_fingerprint_between_ranks import agree_on_start, agreed_settings
from ..agreement.refuse_unequal_ranks import Plain
from ..blocks.block_builders import Blocks, undecayed_weights
from ..comm import Transport
from ..comm.choose_transport import connect_for, watch_by
from ..engine import Engine
from ..models import build_model, tied_weights
from ..run_checks.block_facts import ModelFacts
from ..run_checks.record_steps import StepRecording
from ..saving.checkpoints.save_and_load_checkpoints import checkpoints_of
from ..settings.allowed_setting_values import Start
from ..settings.engine_settings import read_settings
from ..settings.job_file import JobConfig, load_job
from ..splitting.split_whole_model import Split, split
from ..stage.build_stages import cuts_of
from .batch_feed import Feed, feed_of, open_feed
from .built_in_losses import accuracy_of, has_perplexity, loss_of, with_z_loss
from .costs_for_stage_cuts import block_costs, measured_costs
from .job_optimizer_and_lr_schedule import build_optimizer, keep_own_rates, require_group_names
from .reporter import LogRecord, Reporter, Sink, Sinks, environment_of, reporter_of, require_sinks
from .resume_training import StepSamples, TrainingPosition, go_on_from, load_pretrained_of
from .trace_window import traced_steps
from .training_loop import TrainingLoop

Config = JobConfig | Mapping[str, Any] | str | Path | None
_CONFIG = instance("a mapping with the sections of a job file, its path, or a JobConfig", Mapping, str, Path, JobConfig)


@dataclass(frozen=True)
class _Parts:
    """The objects that are trained; `instead` are engine settings in place of the job's."""

    blocks: Blocks
    feed: Feed
    tied: Mapping[str, Sequence[str]] | None
    loss_fn: Callable[..., Any]
    optimizer: Any
    metrics: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    block_costs: Sequence[float] | None = None
    instead: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Trains a model with a plan: the loop with validation, log, early stopping and checkpoints.

    Args:
        model: blocks in order, `split(model)`, or a module, which is split.
        train: batches of training: a loader of this replica's samples, `Loaders`, a function (replica, num_replicas)
            that returns one of these, or a map-style data set of torch, which is divided over the replicas.
        validation: batches of validation, likewise; None: nothing is validated.
        config: the sections `parallel`, `train`, `runtime`, `checkpoint` and `log` of a job file, as a mapping, a file
            or a `JobConfig`.
        plan: None compiles that of `config`.
        loss_fn: (output, targets) → a mean, or (sum, weight); None: that of the split model, or cross-entropy.
        optimizer: what `Engine` takes; its own learning rates are multiplied by `train.lr_schedule`. None: that of
            `config`.
        metrics: name → function (output, targets) → a sum, beside accuracy, which cross-entropies have.
        batches: batches of an epoch, for a loader without a length.
        transport: this rank's; None: as `config` says, under torchrun, or this process alone.
        reporter: where figures go; None: standard output and `log.path`, on rank 0.
        sinks: functions of (figures, step=…) that take them as well, on rank 0, beside those that the job names.
        wants_stop: whether this rank was asked to stop: all then finish the step, save if `checkpoint.dir` is given,
            and return.
        overrides: settings, or sections of them, that may differ from those of the run that is resumed.

    Attributes:
        engine: the engine that is trained.
        settings: those of the run, by name, which its checkpoints keep.

    Raises what loading the data, building the model and the engine raise; `UsageError` for what `config` says of model
    and data.
    """

    settings: dict[str, Plain]
    _loop: TrainingLoop
    _blocks: Blocks
    _costs: Sequence[float] | None

    @takes("Trainer(model, train, validation, config)", config=_CONFIG)
    def __init__(
        self,
        model: Blocks | Split | nn.Module,
        train: Any,
        validation: Any = None,
        config: Config = None,
        *,
        plan: Plan | None = None,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: Any = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        batches: int | None = None,
        transport: Transport | None = None,
        reporter: Reporter | None = None,
        sinks: Sequence[Sink] = (),
        wants_stop: Callable[[], bool] = lambda: False,
        overrides: Sequence[str] = (),
    ) -> None:
        given: Any = model
        if isinstance(given, JobConfig):
            raise UsageError("a job file is trained by Trainer.of_job(job, plan, transport, …)")
        job = _config_of(config)
        for key, argument, value in (("optimizer", "optimizer", optimizer), ("loss", "loss_fn", loss_fn)):
            if value is not None and key in job.train.model_fields_set:
                raise UsageError(f"Trainer: {argument} is given, and train.{key} of config too; leave out one of them")
        plan = plan or compile_request(job.parallel.request())
        transport = transport or _connect(job, plan)
        self._begin(
            job, plan, transport, reporter or reporter_of(job.log.path, transport.rank), sinks, wants_stop, overrides
        )
        self.settings = {n: v for n, v in self.settings.items() if not n.startswith(("model.", "data."))}
        blocks = split(model) if isinstance(model, nn.Module) else model
        loss = loss_fn or loss_of(job.train.loss, blocks)
        parts = _Parts(
            blocks,
            feed_of(train, validation, batches, job.train, plan, transport),
            None,
            loss,
            optimizer,
            metrics or {},
            instead={} if "precision" in job.runtime.model_fields_set else {"dtype": None},
        )
        self._build(parts, wants_stop)

    @classmethod
    def of_job(
        cls,
        job: JobConfig,
        plan: Plan,
        transport: Transport,
        reporter: Reporter | None = None,
        *,
        sinks: Sequence[Sink] = (),
        wants_stop: Callable[[], bool] = lambda: False,
        overrides: Sequence[str] = (),
    ) -> Trainer:
        """Return the trainer of a job file: its model, data, loss and optimizer, by name.

        Args:
            job: the job file.
            plan: the plan; `plan_of` makes it from the job.
            transport: this rank's transport (`connect_for`).
            reporter: where figures go; None: nowhere.
            sinks, wants_stop, overrides: as above.
        """
        self = cls.__new__(cls)
        require_sinks(job.log.sinks)
        reporter = reporter or Reporter(None, lambda _: None)
        self._begin(job, plan, transport, reporter, sinks, wants_stop, overrides)
        with reporter.preparing("reading the data") as preparing:
            feed = open_feed(job.data, job.train, plan, transport)
            preparing.now("building the model")
            blocks = build_model(job.model, feed.spec, job.run.seed)
            tied = tied_weights(job.model) or (blocks.tied if isinstance(blocks, Split) else {})
            costs = block_costs(job, plan, blocks, feed, transport)
            self._blocks, self._costs = blocks, costs
            preparing.now("binding the plan")
            self._build(_Parts(blocks, feed, tied, loss_of(job.train.loss, blocks), None, {}, costs), wants_stop)
        return self

    def blocks_of_stages(self) -> list[int]:
        """Return the number of blocks of each stage."""
        return [len(blocks) for blocks in cuts_of(self.plan, self._blocks, self._costs)]

    def measure_blocks(self) -> list[float]:
        """Return what each block costs on one microbatch, as rank 0 measures it (collective)."""
        return measured_costs(self.job, self.plan, self._blocks, self._feed, self._transport)

    def _begin(
        self,
        job: JobConfig,
        plan: Plan,
        transport: Transport,
        reporter: Reporter,
        sinks: Sequence[Sink],
        wants_stop: Callable[[], bool],
        overrides: Sequence[str],
    ) -> None:
        self.job, self.plan, self._overrides, self._reporter = job, plan, overrides, reporter
        self._transport, self._publisher = transport, transport.publisher
        if transport.rank == 0:
            reporter.sinks = Sinks(job.log.sinks, sinks)
        self.settings = agreed_settings(job, plan, transport)
        self._checkpoints = checkpoints_of(job.checkpoint, job.runtime.timeout_s)
        self._export_dir = None if job.checkpoint.export is None else whole_path(job.checkpoint.export)

    def _build(self, parts: _Parts, wants_stop: Callable[[], bool]) -> None:
        """Bind the plan to what is trained."""
        job, blocks, config = self.job, parts.blocks, self.job.train.optimizer
        feed = self._feed = parts.feed
        for name, value in {"patience": job.train.patience, "evaluate_every": job.train.evaluate_every}.items():
            if value and not feed.validates:
                raise UsageError(
                    f"train.{name} is set, but there are no data of validation; give some, or leave it out"
                )
        self.settings |= feed.settings
        loss_fn = with_z_loss(parts.loss_fn, job.train.z_loss)
        metrics = {**accuracy_of(loss_fn, self.plan), **parts.metrics}
        undecayed = undecayed_weights(blocks, parts.tied or {}) if config.decay == "matrices" else ()
        self.engine = Engine(
            self.plan,
            blocks,
            loss_fn,
            (lambda named: build_optimizer(config, named, undecayed)) if parts.optimizer is None else parts.optimizer,
            metrics=metrics,
            block_costs=parts.block_costs,
            trace_steps=traced_steps(job.runtime),
            wants_stop=lambda: self._loop.must_stop(),
            spike_dir=job.folder,
            **{**dict(job.run), "tied": parts.tied, **parts.instead},
            transport=self._transport,
        )
        if parts.optimizer is not None:
            keep_own_rates(self.engine.optimizers.values())
        else:
            require_group_names(config, self.engine)
        samples = StepSamples(self.engine, feed, self.settings, tuple(self._overrides))
        self._loop = TrainingLoop(
            job,
            self.engine,
            feed,
            self._reporter,
            ("loss", *metrics),
            samples,
            wants_stop,
            lr=config.lr if parts.optimizer is None else 1.0,
            shows_perplexity=has_perplexity(loss_fn),
        )

    def __repr__(self) -> str:
        return f"Trainer({self.plan.title}; step {self.progress.step} of {self.total_steps})"

    @property
    def progress(self) -> TrainingPosition:
        """Progress of the training: steps, epochs, the best validation loss, the history."""
        return self._loop.progress

    @property
    def total_steps(self) -> int:
        """The steps of the whole training."""
        return self._loop.total_steps

    def fit(self, start: Start = "new", *, resume: bool = False) -> list[LogRecord]:
        """Train to the end, and return the record of each epoch.

        Where the folder of the checkpoints holds an earlier run, that is refused, unless `start` is "resume", which
        goes on from its newest whole checkpoint (`resume` means the same), or "fresh", which moves it away.
        """
        start = "resume" if resume else start
        if start not in get_args(Start):
            raise UsageError(f"fit: start is {shown(start)}{suggest(str(start), get_args(Start))}")
        agree_on_start(start, self._overrides, self.engine.transport)
        if self._export_dir is not None and self.engine.transport.rank == 0:
            require_folder(self._export_dir.parent, "the weights")  # which are written last
        with self._reporter as reporter, self._opened(start):
            with self._publisher.phase("load"):
                if not (start == "resume" and self._resume()):
                    load_pretrained_of(self.job.model, self.engine, self._reporter.say)
            engine = self.engine
            for line in (self.job.checkpoint.unused, engine.tensor_cuts, engine.expert_shares, engine.zero_split):
                if line is not None:
                    reporter.say(line)
            reporter.write_record(
                {
                    "event": "start",
                    "plan": self.plan.title,
                    "planned_bubble": self._loop.planned_bubble,
                    "step": self.progress.step,
                    "deferred_share": engine.deferred_share,
                    "environment": environment_of(engine.transport),
                }
            )
            self._loop.train_steps()
            if not self._loop.is_stopped:
                self._export()
        return self.progress.history

    def validate(self) -> dict[str, float]:
        """Return the means over all batches of validation, the same on every rank; without such, NaN."""
        return self._loop.validate()

    @contextmanager
    def _opened(self, start: Start) -> Iterator[None]:
        """A context in which the folder of the checkpoints, if there is one, belongs to this run alone."""
        if self._checkpoints is None:
            yield
            return
        with self._checkpoints.opened(self.engine.saves, start, self.settings) as saves:
            self._loop.saves = saves
            if self.engine.transport.rank == 0:
                self.engine.transport.begin_run()
            if saves.moved:
                self._reporter.say(saves.moved)
            yield
            with self._publisher.phase("save"):
                saves.finish_save()

    def record(self, steps: int) -> StepRecording:
        """Train at most so many steps from the start, and return each one's tensors on this rank."""
        load_pretrained_of(self.job.model, self.engine, self._reporter.say)
        recording = StepRecording(self.engine.transport.rank, self.plan.mesh.coordinates(self.engine.transport.rank))
        for inputs, targets, extras in islice(self._feed.train(0, start=0), steps):
            self._loop.set_learning_rate()
            self.engine.checks.record_step(recording, inputs, targets, **extras)
            self.progress.step += 1
        return recording

    def inspect(self) -> ModelFacts:
        """Train one step, and return the engine's findings on blocks, loss and metrics."""
        inputs, targets, extras = next(iter(self._feed.train(0, start=0)))
        return self.engine.inspect(inputs, targets, **extras)

    def _export(self) -> None:
        """Write the trained weights for other programs, if the job asks for them."""
        if self._export_dir is not None:
            with self._publisher.phase("save"):
                self.engine.save_pretrained(self._export_dir)
            self._reporter.say(f"weights saved in {self.job.checkpoint.export}")

    def _resume(self) -> bool:
        """Go on from the newest whole checkpoint, which rank 0 finds. Return whether there was one."""
        saves = self._loop.saves
        found = None if saves is None else saves.newest_whole()
        if found is None:
            where = "" if saves is not None else " (checkpoint.dir is not set)"
            self._reporter.say(f"no checkpoint to resume from{where}: starting at the beginning")
            return False
        say, overrides = self._reporter.say, tuple(self._overrides)
        self._loop.take_over(go_on_from(found, self.engine, self._feed, self.settings, overrides, say))
        self._loop.samples.expect(found)
        return True


def _config_of(config: Config) -> JobConfig:
    """Return the settings of a trainer whose model and data are objects; raises `UsageError`."""
    if isinstance(config, str | Path):
        job = load_job(config)
    elif isinstance(config, JobConfig):
        job = config
    else:
        job = read_settings(JobConfig, config or {}, "Trainer(…, config=…)")
    for section in ("model", "data"):
        if section in job.model_fields_set:
            raise UsageError(
                f"Trainer(…, config=…): {section} is given as an object here; leave the section out, or train the job "
                "with Trainer.of_job(job, plan, transport)"
            )
    if job.parallel.auto is not None or job.parallel.balance == "measured":
        raise UsageError("Trainer(…, config=…): parallel.auto and parallel.balance: measured are for job files")
    return job


def _connect(job: JobConfig, plan: Plan) -> Transport:
    name, watch = job.runtime.transport, watch_by(job.run, job.folder)
    if name == "local":
        raise UsageError(
            "runtime.transport: local has threads as ranks; pass each its own: "
            "run_local(plan.mesh.size, lambda transport: Trainer(…, transport=transport).fit())"
        )
    return connect_for(plan, watch.timeout_s, name, job.runtime.rules, watch)

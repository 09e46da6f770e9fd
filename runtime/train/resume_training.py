"""Resuming of a training from a checkpoint: settings, batches, metrics.

newest whole checkpoint ─▶ settings equal? ─▶ engine, loaders ─▶ progress
first batch             ─▶ as many samples in a step as before?

`TrainingPosition` is the position of a training: all that a checkpoint needs besides the engine's state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from quintsched.errors import InputError, MisfitError, counted
from quintsched.files.strictjson import describe_faults

from ..agreement.job_fingerprint_between_ranks import is_within
from ..agreement.refuse_unequal_ranks import Plain
from ..agreement.settings_on_resume import require_kept
from ..comm.host_collectives import ControlGroup
from ..data.user_loaders import Say
from ..engine import Engine
from ..saving.checkpoints.save_and_load_checkpoints import FoundCheckpoint
from ..saving.engine_methods.engine_saves import WeightState
from ..settings.job_file import ModelConfig
from ..stage.batches.microbatches import most_rows
from .batch_feed import Feed
from .reporter import LogRecord


def _nan_for_null(value: object) -> object:
    """Return NaN for null: JSON has no NaN, so a checkpoint stores a sum that was not finite as null."""
    return math.nan if value is None else value


@pydantic_dataclass(config=ConfigDict(extra="forbid"))
class Weighing:
    """Weighting, in sums, of a loss that has no weight of its own.

    Attributes:
        samples: so many samples weigh 1: those of the largest microbatch of the run's first step.
        microbatches: number of microbatches of a step, over all replicas.
        is_used: whether the loss has no weight of its own.
    """

    samples: int
    microbatches: int
    is_used: bool


@pydantic_dataclass(config=ConfigDict(extra="forbid"))
class TrainingPosition:
    """Position of a training; `epoch_batches` are those of one epoch, `totals` its sums so far, with `weighing`."""

    epoch_batches: int
    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float | None = None
    epochs_without_gain: int = 0
    stopped: bool = False
    owes_validation: bool = False
    totals: dict[str, Annotated[float, BeforeValidator(_nan_for_null)]] = field(default_factory=dict)
    history: list[LogRecord] = field(default_factory=list)
    weighing: Weighing | None = None


_PROGRESS = TypeAdapter(TrainingPosition)


def progress_of(found: FoundCheckpoint, epoch_batches: int) -> TrainingPosition:
    """Return the position of a checkpoint; one of imported weights is at the beginning.

    Raises `InputError` for one without a valid position, `MisfitError` for one whose epochs had other batches.
    """
    try:
        progress = _PROGRESS.validate_python({"epoch_batches": epoch_batches} | found.manifest.progress)
    except ValidationError as error:
        raise InputError(f"{found.where}: the checkpoint's progress: {describe_faults(error)}") from error
    if progress.epoch_batches != epoch_batches:
        raise MisfitError(
            f"{found.where}: the checkpoint's epochs have {counted(progress.epoch_batches, 'batch')}, but here it is "
            f"{epoch_batches}; resume with the data and the batch size that it was made with"
        )
    return progress


def load_pretrained_of(model: ModelConfig, engine: WeightState, say: Say) -> None:
    """Start from the weights that a job names, if it does; say which of the model's they do not have (collective)."""
    if model.pretrained is None:
        return
    loaded = engine.load_pretrained(model.pretrained, fresh=model.fresh, strict=model.strict)
    if loaded.fresh:
        say(f"weights that {model.pretrained} does not have start anew: {', '.join(loaded.fresh)}")


SAMPLES_SETTING = "data.samples_per_step"
"""Setting for the number of samples that loaders yield for a step, over all replicas; None: it varies."""


def require_settings_of(
    found: FoundCheckpoint,
    saved: Mapping[str, Plain],
    now: Mapping[str, Plain],
    overrides: tuple[str, ...],
    everyone: ControlGroup,
    say: Say,
) -> None:
    """Say which newer checkpoints were passed over, and what differs but may (collective).

    Raises `MisfitError` where the `saved` settings of the checkpoint and those of `now` must be the same, and are not.
    """
    for step, fault in found.skipped:
        say(f"the checkpoint of step {step} is not whole, step {found.step} is taken: {fault}")
    where = f"the checkpoint {found.where}"
    for words in everyone.together(lambda: require_kept(saved, now, overrides, where)):
        say(words)


def go_on_from(
    found: FoundCheckpoint,
    engine: Engine,
    feed: Feed,
    settings: Mapping[str, Plain],
    overrides: tuple[str, ...],
    say: Say,
) -> TrainingPosition:
    """Restore engine and feed from a checkpoint (collective), and return its position.

    Raises `MisfitError` where it was written with other settings.
    """
    require_settings_of(found, found.manifest.settings, settings, overrides, engine.everyone, say)
    progress = progress_of(found, feed.num_batches)
    found.load_step()
    _restore(found, engine, feed, progress, say)
    say(f"resumed after step {found.step}")
    return progress


def _restore(found: FoundCheckpoint, engine: Engine, feed: Feed, progress: TrainingPosition, say: Say) -> None:
    """Restore the loaders (collective); messages of all ranks are shared, each printed once."""
    said: list[str] = []

    def note(words: str) -> None:
        said.append(words)
        say(words)

    engine.everyone.together(lambda: feed.restore(found.loader, progress.epoch, progress.batch, note))
    shared = [words for rank in engine.everyone.share_bytes(json.dumps(said).encode()) for words in json.loads(rank)]
    for words in dict.fromkeys(shared):
        if words not in said:
            say(words)


class LossWeighting:
    """Weighting of a loss without its own weight, kept across runs; `parts` are those of a step's batch."""

    def __init__(self, engine: Engine, parts: int) -> None:
        self._engine = engine
        self._microbatches = engine.num_replicas * engine.plan.schedule.microbatches * parts
        self._weighing: Weighing | None = None

    def take_over(self, progress: TrainingPosition) -> None:
        """Restore the weighting of a checkpoint, where the number of microbatches is the same."""
        before = progress.weighing
        if before is not None and before.microbatches == self._microbatches:
            self._engine.usual_samples = before.samples

    def note_in(self, progress: TrainingPosition) -> None:
        """Store the weighting for a checkpoint, after the first step; the first call is collective."""
        if self._weighing is None:
            is_used = self._engine.everyone.add_numbers(self._engine.loss_is_bare)[0] > 0
            self._weighing = Weighing(self._engine.usual_samples, self._microbatches, is_used)
        progress.weighing = self._weighing


class StepSamples:
    """Number of samples that loaders yield for a step; a resumed run must have the same, whatever its replicas.

    Args:
        engine: the engine.
        feed: the source of its batches.
        settings: those of the run, which checkpoints store; the number is written there.
        overrides: the settings that may differ from those of the checkpoint.
    """

    def __init__(self, engine: Engine, feed: Feed, settings: dict[str, Plain], overrides: tuple[str, ...]) -> None:
        self._engine, self._feed, self._settings, self._overrides = engine, feed, settings, overrides
        self._before: Any = None
        self._where = ""
        self._rows: int | None = None
        self.varies = False

    def expect(self, found: FoundCheckpoint) -> None:
        """Expect the number of a checkpoint, if it has one."""
        self._before, self._where = found.manifest.settings.get(SAMPLES_SETTING), f"the checkpoint {found.where}"

    def count_batch(self, batch: Any) -> None:
        """Count a replica's batch before its step; the first one is collective. The last of an epoch may be smaller.

        Raises `MisfitError` for another number than expected.
        """
        if not self._feed.is_of_loaders or self._feed.is_last:
            return
        rows = most_rows(batch) or 0
        if self._rows is None:
            self._rows = rows
            self._settle(rows)
        self.varies = self.varies or rows != self._rows

    def _settle(self, rows: int) -> None:
        engine = self._engine
        samples: dict[int, int] = {}
        mine = rows if engine.needs_inputs or engine.needs_targets else 0
        for said in engine.everyone.share_bytes(f"{engine.replica} {mine}".encode()):
            replica, found = map(int, said.split())
            samples[replica] = max(found, samples.get(replica, 0))
        now = self._settings[SAMPLES_SETTING] = sum(samples.values())
        if self._before in (None, now) or is_within(SAMPLES_SETTING, self._overrides):
            return
        raise MisfitError(
            f"{self._where} was written by a run with {counted(self._before, 'sample')} in a step, but here loaders "
            f"give {now}, {' + '.join(map(str, samples.values()))} of {len(samples)} replica(s); let each give "
            f"{self._before} // num_replicas, or say --override {SAMPLES_SETTING}"
        )

    def note_varying(self) -> None:
        """Record in the settings, before a save, whether the number has varied (collective)."""
        if self._feed.is_of_loaders and self._engine.everyone.add_numbers(self.varies)[0]:
            self._settings[SAMPLES_SETTING] = None

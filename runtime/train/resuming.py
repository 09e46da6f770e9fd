"""How a training goes on from a checkpoint, and what it goes on with: settings, batches, figures.

newest whole checkpoint ─▶ settings alike? ─▶ engine, loaders ─▶ progress
first batch             ─▶ as many samples in a step as before?

How far a training has come: all that a checkpoint needs besides the engine's state.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from quintsched.errors import InputError, MisfitError
from quintsched.files.strictjson import describe_faults

from ..agreement.kept_settings import require_kept
from ..agreement.records import is_within
from ..agreement.sections import Plain
from ..data.loaders import Say
from ..engine import Engine
from ..saving.checkpoints.checkpoints import Found
from ..saving.verbs.engine_saves import WeightState
from ..settings.job import ModelConfig
from ..stage.batches.microbatches import most_rows
from .feed import Feed
from .reporter import Record


def _nan_for_null(value: object) -> object:
    """JSON has no NaN: a sum that was not finite comes back from a checkpoint as null."""
    return math.nan if value is None else value


@pydantic_dataclass(config=ConfigDict(extra="forbid"))
class Weighing:
    """What a loss without a weight of its own weighs in sums.

    Attributes:
        samples: as many samples weigh 1: those of the largest microbatch of the run's first step.
        microbatches: how many a step has, over all replicas.
        is_used: whether the loss has no weight of its own.
    """

    samples: int
    microbatches: int
    is_used: bool

    def rescales(self, before: Weighing | None) -> float:
        """Return by what to multiply sums of before, so that samples weigh as much in them as they do now."""
        if before is None or not (self.is_used and before.is_used):
            return 1.0
        return before.samples / self.samples


@pydantic_dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """How far a training has come; `epoch_batches` are those of one epoch, `totals` its sums, weighed so."""

    epoch_batches: int
    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float | None = None
    epochs_without_gain: int = 0
    stopped: bool = False
    totals: dict[str, Annotated[float, BeforeValidator(_nan_for_null)]] = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)
    weighing: Weighing | None = None


_PROGRESS = TypeAdapter(Progress)


def progress_of(found: Found, epoch_batches: int) -> Progress:
    """Return how far a checkpoint had come; one of imported weights says nothing, and is at the beginning.

    Raises `InputError` for one that does not say so, `MisfitError` for one whose epochs had other batches.
    """
    try:
        progress = _PROGRESS.validate_python({"epoch_batches": epoch_batches} | found.manifest.progress)
    except ValidationError as error:
        raise InputError(f"{found.folder}: the checkpoint's progress: {describe_faults(error)}") from error
    if progress.epoch_batches != epoch_batches:
        raise MisfitError(
            f"{found.folder}: the checkpoint's epochs have {progress.epoch_batches} batches, but here it is "
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


SAMPLES = "data.samples_per_step"
"""The setting that says how many samples loaders give for a step, over all replicas; None: that varies."""


def go_on_from(
    found: Found, engine: Engine, feed: Feed, settings: Mapping[str, Plain], overrides: tuple[str, ...], say: Say
) -> Progress:
    """Let engine and feed be where a checkpoint was (collective), and return how far that is.

    Raises `MisfitError` where it was written with other settings.
    """
    for step, fault in found.skipped:
        say(f"the checkpoint of step {step} is not whole, step {found.step} is taken: {fault}")
    kept, where = found.manifest.settings, f"the checkpoint {found.folder}"
    for words in engine.everyone.together(lambda: require_kept(kept, settings, overrides, where)):
        say(words)
    progress = progress_of(found, feed.num_batches)
    found.load()
    _restore(found, engine, feed, progress, say)
    say(f"resumed after step {found.step}")
    return progress


def _restore(found: Found, engine: Engine, feed: Feed, progress: Progress, say: Say) -> None:
    """Let loaders be where they were (collective); what is said of those of other ranks is said once."""
    said: list[str] = []

    def note(words: str) -> None:
        said.append(words)
        say(words)

    engine.everyone.together(lambda: feed.restore(found.loader, progress.epoch, progress.batch, note))
    shared = [words for rank in engine.everyone.share_bytes(json.dumps(said).encode()) for words in json.loads(rank)]
    for words in dict.fromkeys(shared):
        if words not in said:
            say(words)


class Scale:
    """What a loss weighs that has no weight of its own, also in sums of before; `parts` are those of a step's batch."""

    def __init__(self, engine: Engine, parts: int) -> None:
        self._engine = engine
        self._microbatches = engine.num_replicas * engine.plan.schedule.microbatches * parts
        self._weighing: Weighing | None = None

    def take_over(self, progress: Progress) -> None:
        """Let it weigh as before, where microbatches are what they were."""
        before = progress.weighing
        if before is not None and before.microbatches == self._microbatches:
            self._engine.usual_samples = before.samples

    def of_sums(self, progress: Progress) -> float:
        """Return by what to multiply sums of before, once a step was made; the first call is collective."""
        before = progress.weighing
        if self._weighing is None:
            is_used = self._engine.everyone.add(self._engine.loss_is_bare)[0] > 0
            self._weighing = Weighing(self._engine.usual_samples, self._microbatches, is_used)
        progress.weighing = self._weighing
        return self._weighing.rescales(before)


class StepSamples:
    """How many samples loaders give for a step, which a run that goes on must give too, whatever its replicas.

    Args:
        engine: whose steps they are.
        feed: what gives them.
        settings: those of the run, which checkpoints keep; the number is written there.
        overrides: the settings that may be others than before.
    """

    def __init__(self, engine: Engine, feed: Feed, settings: dict[str, Plain], overrides: tuple[str, ...]) -> None:
        self._engine, self._feed, self._settings, self._overrides = engine, feed, settings, overrides
        self._before: Any = None
        self._where = ""
        self._rows: int | None = None
        self.varies = False

    def expect(self, found: Found) -> None:
        """Expect as many as the checkpoint says, if it does."""
        self._before, self._where = found.manifest.settings.get(SAMPLES), f"the checkpoint {found.folder}"

    def take(self, batch: Any) -> None:
        """Take in a replica's batch before its step; the first one is collective. The last of an epoch may be smaller.

        Raises `MisfitError` where it is another number than expected.
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
        now = self._settings[SAMPLES] = sum(samples.values())
        if self._before in (None, now) or is_within(SAMPLES, self._overrides):
            return
        raise MisfitError(
            f"{self._where} was written by a run with {self._before} samples in a step, but here loaders give {now}, "
            f"{' + '.join(map(str, samples.values()))} of {len(samples)} replica(s); let each give "
            f"{self._before} // num_replicas, or say --override {SAMPLES}"
        )

    def note_varying(self) -> None:
        """Note in the settings, before a save, whether the number was not always the same (collective)."""
        if self._feed.is_of_loaders and self._engine.everyone.add(self.varies)[0]:
            self._settings[SAMPLES] = None

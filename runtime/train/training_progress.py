"""How far a training has come: all that a checkpoint needs besides the engine's state."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from quintsched.errors import InputError, MisfitError
from quintsched.files.strictjson import describe_faults

from ..saving.checkpoints.checkpoints import Found
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

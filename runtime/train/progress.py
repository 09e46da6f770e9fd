"""How far a training has come: all that a checkpoint needs besides the engine's state."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass as pydantic_dataclass

from .reporter import Record


def _nan_for_null(value: object) -> object:
    """JSON has no NaN: a sum that was not finite comes back from a checkpoint as null."""
    return math.nan if value is None else value


@pydantic_dataclass(config=ConfigDict(extra="forbid"))
class Progress:
    """How far a training has come; all that a checkpoint needs besides the engine's state."""

    epoch_batches: int
    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float | None = None
    epochs_without_gain: int = 0
    stopped: bool = False
    totals: dict[str, Annotated[float, BeforeValidator(_nan_for_null)]] = field(default_factory=dict)
    history: list[Record] = field(default_factory=list)


PROGRESS = TypeAdapter(Progress)

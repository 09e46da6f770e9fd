"""Intervals between events of a run, in steps, tokens or time.

    50   "200 steps"   "5M tokens"   "90 s"   "10 min"   "1.5 h"

A job file writes them as numbers (steps) or as words; `Interval.from_text` parses either.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

IntervalUnit = Literal["steps", "tokens", "seconds"]

_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGB]?)\s*([a-z]*)")
_THOUSANDS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
_UNITS: dict[str, tuple[IntervalUnit, float]] = {
    **dict.fromkeys(("", "step", "steps"), ("steps", 1)),
    **dict.fromkeys(("token", "tokens"), ("tokens", 1)),
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1)),
    **dict.fromkeys(("min", "minute", "minutes"), ("seconds", 60)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600)),
}
_HOW = 'is no interval; write 50, "200 steps", "5M tokens", "90 s", "10 min" or "1 h"'


class Interval(NamedTuple):
    """An amount of steps, tokens or seconds; an amount of 0 stands for the end of each epoch."""

    amount: float
    unit: IntervalUnit = "steps"

    @classmethod
    def from_text(cls, written: int | str) -> Interval:
        """Parse an interval as a job file writes it; raises `ValueError`."""
        if isinstance(written, int):
            return cls(written)
        found = _PATTERN.fullmatch(written.strip())
        if found is None or found[3] not in _UNITS:
            raise ValueError(f"{written!r} {_HOW}")
        unit, factor = _UNITS[found[3]]
        amount = float(found[1]) * _THOUSANDS[found[2]] * factor
        if amount <= 0 or (unit != "seconds" and amount != int(amount)):
            raise ValueError(f"{written!r} is no whole number of {unit} above 0")
        return cls(amount, unit)


def _checked(least: int) -> BeforeValidator:
    """Return a check of intervals as a job file writes them, of at least so many steps."""

    def check(written: object) -> object:
        if isinstance(written, str):
            Interval.from_text(written)
        elif isinstance(written, bool) or not isinstance(written, int) or written < least:
            raise ValueError(f"{written!r} {_HOW}")
        return written

    return BeforeValidator(check)


Every = Annotated[Annotated[int, Field(ge=1)] | str, _checked(1)]
"""An interval that is never 0."""
EveryOrEpoch = Annotated[Annotated[int, Field(ge=0)] | str, _checked(0)]
"""An interval, or 0: the end of each epoch."""

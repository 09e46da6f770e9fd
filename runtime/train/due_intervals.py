"""Decides after which steps an interval has passed, on all ranks alike.

steps     every k-th step of the training, counted over all its runs
tokens    the steps in which a multiple of the amount is passed, by the tokens of a step
time      rank 0's clock, from where the run began; ranks agree seldom: after half of what is left, at most
"""

from __future__ import annotations

from collections.abc import Callable

from quintsched.errors import UsageError

from ..comm.clocks import now_s
from ..comm.host_collectives import ControlGroup
from ..settings.intervals import Interval

_MOST_STEPS = 1000
"""Ranks ask rank 0's clock again after at most so many steps."""


class Due:
    """One interval of a run.

    Args:
        written: the interval as a job file writes it.
        everyone: all ranks.
        tokens_per_step: returns the tokens of a step over all replicas; 0 where inputs are no token ids.
    """

    def __init__(self, written: int | str, everyone: ControlGroup, tokens_per_step: Callable[[], int]) -> None:
        self._written, self._interval = written, Interval.from_text(written)
        self._everyone, self._tokens_per_step = everyone, tokens_per_step
        self._began, self._steps, self._next = now_s(), 0, 1

    @property
    def is_at_epochs(self) -> bool:
        """Whether this is the end of each epoch."""
        return self._interval.amount == 0

    def after(self, step: int) -> bool:
        """Return whether the interval has passed after the `step`-th step, from 1 (collective where it is a time)."""
        amount, unit = self._interval
        if not amount:
            return False
        if unit == "steps":
            return step % int(amount) == 0
        if unit == "seconds":
            return self._has_elapsed(amount)
        tokens = self._tokens_per_step()
        if not tokens:
            raise UsageError(
                f"the interval {self._written!r} counts tokens, but the inputs are no token ids (samples, tokens); "
                "write it in steps or as a time"
            )
        return step * tokens // int(amount) > (step - 1) * tokens // int(amount)

    def _has_elapsed(self, seconds: float) -> bool:
        self._steps += 1
        if self._steps < self._next:
            return False
        elapsed = now_s() - self._began
        left = max(int(self._steps * (seconds - elapsed) / max(elapsed, 1e-6)), 1)
        wait = self._everyone.first_says(0 if elapsed >= seconds else min((left + 1) // 2, _MOST_STEPS))
        if wait:
            self._next = self._steps + wait
            return False
        self._began, self._steps, self._next = now_s(), 0, 1
        return True

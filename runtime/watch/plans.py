"""The plans that a run walks, by the numbers that its ranks give them."""

from __future__ import annotations

from quintsched.errors import QuintschedError
from quintsched.plan import Plan

MOST_PLANS = 32


class Plans:
    """The plans that were told of last; `first` is the run's own, where it is known from the beginning."""

    def __init__(self, first: Plan | None = None) -> None:
        self._first = first
        self._plans: dict[int, Plan] = {}

    def add(self, number: int, text: bytes) -> None:
        """Take in a plan file; one that is none is left out: the verdict then goes without."""
        try:
            self._plans[number] = Plan.from_json(text)
        except QuintschedError:
            return
        for old in sorted(self._plans)[:-MOST_PLANS]:
            del self._plans[old]

    def get(self, number: int) -> Plan | None:
        """Return the plan of a number, if it is known."""
        return self._plans.get(number, self._first if number <= 0 else None)

    def modes(self) -> dict[int, str]:
        """Return the mode of each plan by its number."""
        return {number: plan.mode for number, plan in self._plans.items()}

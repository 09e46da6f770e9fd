"""Part of a timeline that is shown: some pipeline ranks, from one time to another.

--ranks 0..7 --time 10..50  ──▶  TimeWindow(ranks=range(0, 8), start=10.0, end=50.0)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintsched.errors import UsageError
from quintsched.simulation.simulator import TimedRun

_RANGE = re.compile(r"(\d+(?:\.\d+)?)(?:\.\.(\d+(?:\.\d+)?))?")


@dataclass(frozen=True)
class TimeWindow:
    """Pipeline ranks and times that are shown."""

    ranks: range
    start: float
    end: float

    @classmethod
    def parse(cls, ranks: str | None, time: str | None, run: TimedRun) -> TimeWindow:
        """Read ranges as users give them, "0..7" or "3"; None: all. Raises `UsageError` for one out of range."""
        num_ranks = run.plan.columns.num_ranks
        first, last = range_ends("--ranks", ranks) if ranks is not None else (0.0, num_ranks - 1.0)
        start, end = range_ends("--time", time) if time is not None else (0.0, run.makespan)
        if first != int(first) or last != int(last) or last >= num_ranks:
            raise UsageError(f"--ranks {ranks}: give pipeline ranks from 0 to {num_ranks - 1}, like 0..{num_ranks - 1}")
        if time is not None and not start < min(end, run.makespan):
            raise UsageError(f"--time {time}: the plan takes {run.makespan:g}; give a part of that, like 0..1")
        return cls(range(int(first), int(last) + 1), start, min(end, run.makespan))

    def is_whole(self, run: TimedRun) -> bool:
        """Whether it shows everything."""
        everything = len(self.ranks) == run.plan.columns.num_ranks
        return everything and self.start == 0 and self.end >= run.makespan

    def words(self, run: TimedRun) -> str:
        """Return what it shows, as text."""
        ranks = f"ranks {self.ranks.start} to {self.ranks.stop - 1} of {run.plan.columns.num_ranks}"
        return f"{ranks}, time {self.start:g} to {self.end:g} of {run.makespan:g}"


def range_ends(option: str, text: str) -> tuple[float, float]:
    """Return both ends of a range as users give it: "0..7", or "3" but for times; raises `UsageError`."""
    found = _RANGE.fullmatch(text.strip())
    if found is None or (found[2] is None and option == "--time"):
        raise UsageError(f"{option} {text}: give a range, like {'0..7' if option == '--ranks' else '10..50'}")
    first, last = float(found[1]), float(found[2] or found[1])
    if first > last:
        raise UsageError(f"{option} {text}: the range ends before it begins")
    return first, last

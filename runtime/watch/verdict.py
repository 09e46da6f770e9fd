"""What the hub says in the end: a message for people, and a report for programs and pictures.

rank 2 (host a, pid 4711) was ended by signal 9 (SIGKILL) in step 17, …
written to stall.json; quintsched render --stall stall.json -o stall.png draws it
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from quintsched.errors import QuintschedError
from quintsched.files.atomic import write_whole
from quintsched.stalls.states import RankState

from .plans import Plans
from .progress import Progress
from .roster import Member

STALL_CODE = 4


@dataclass(frozen=True)
class Verdict:
    """What is said of the end of a run; `culprits` are the ranks whose fault it is, none where that is not known.

    `exit_code` is that of the run: the culprit's own, where its code raised, else 4.
    """

    message: str
    culprits: tuple[int, ...]
    exit_code: int = STALL_CODE


def make_verdict(
    members: Collection[Member], plans: Plans, progress: Progress, report: Path | None, now_s: float
) -> Verdict:
    """Make the verdict on what the members said last, and write the report."""
    states = [member.state(now_s, plans.modes()) for member in members]
    limit = progress.limit_s([member.place for member in members])
    ...

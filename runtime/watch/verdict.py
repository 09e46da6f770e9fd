"""What the hub says in the end: a message for people, and a report for programs and pictures.

rank 2 (host a, pp=2) was killed by SIGKILL in step 17 at instruction 9 of 24: Fwd(stage=2, microbatch=3)
rank 1 waits for its RecvGrad(stage=1, microbatch=0, peer=2) from it since 0.4 s, and rank 0 for rank 1
written to stall.json; a picture: quintsched render --stall stall.json -o stall.png
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quintsched.errors import QuintschedError, StallError
from quintsched.files.atomic import write_whole
from quintsched.plan import Plan
from quintsched.stalls.report import StallReport
from quintsched.stalls.states import Fate, RankState
from quintsched.stalls.verdict import find_culprit

from .progress import WALKS
from .roster import Member

TOGETHER_S = 0.1
"""Processes that end within this time have ended together."""

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
        return self._plans.get(max(number, 0), self._first if number <= 0 else None)

    def modes(self) -> dict[int, str]:
        """Return the mode of each plan by its number."""
        return {number: plan.mode for number, plan in self._plans.items()}


@dataclass(frozen=True)
class Verdict:
    """What is said of the end of a run; `culprits` are the ranks whose fault it is, none where that is not known.

    `exit_code` is that of the run: the culprit's own, where its code raised, else 4. `has_survivors` says whether there
    are ranks that can say it.
    """

    message: str
    culprits: tuple[int, ...]
    has_survivors: bool
    exit_code: int = StallError.exit_code


def make_verdict(
    members: Sequence[Member], plans: Plans, report: Path | None, now_s: float, *, still_s: float
) -> Verdict:
    """Make the verdict on what the members said last, and write the report."""
    modes = plans.modes()
    states = [member.state(now_s, modes, len(members)) for member in members]
    has_survivors = any(member.lives and member.has_come for member in members)
    plan = plans.get(_program(members))
    if plan is None:
        return _without_plan(states, has_survivors=has_survivors)
    found = find_culprit(plan, states, still_s=still_s)
    errors = [state.fate for state in states if state.rank in found.ranks and state.fate and state.fate.kind == "error"]
    code = next((fate.code or 1 for fate in errors), StallError.exit_code)
    message = "\n".join([found.words(), *_write(found, plan, report)])
    return Verdict(message, found.ranks, has_survivors, code)


def _program(members: Sequence[Member]) -> int:
    """Return the number of the plan of the rank that is farthest behind."""
    walking = [member.place for member in members if member.place.phase in WALKS and not member.has_ended]
    return min(walking, key=lambda place: place.run).program if walking else 0


def _write(found: StallReport, plan: Plan, report: Path | None) -> list[str]:
    """Write the report, and return what is to be said of it."""
    if report is None:
        return []
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_whole(report, found.to_json(), "the report")
    except (QuintschedError, OSError) as error:
        return [f"no report could be written: {error}"]
    return [f"written to {report}; a picture: quintsched render --stall {report} -o stall.png"]


def _without_plan(states: Sequence[RankState], *, has_survivors: bool) -> Verdict:
    """Name the ranks whose processes failed first, where nobody has told of a plan; no words where none has."""
    dead = [(state, state.fate) for state in states if state.fate is not None]
    first_s = max((fate.ago_s for _, fate in dead), default=0.0)
    first = [(state, fate) for state, fate in dead if first_s - fate.ago_s < TOGETHER_S]
    lines = [f"rank {state.rank} (host {state.host or 'unknown'}) {_ending(fate)} in set-up" for state, fate in first]
    return Verdict("\n".join(lines), tuple(state.rank for state, _ in first), has_survivors)


def _ending(fate: Fate) -> str:
    if fate.kind == "signal" and fate.code is not None:
        return f"was killed by {signal.Signals(fate.code).name}"
    if fate.kind == "exit":
        return f"ended with exit code {fate.code}"
    return f"raised {fate.text}" if fate.kind == "error" else f"is {fate.kind}"

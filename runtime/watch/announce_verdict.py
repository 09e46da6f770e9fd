"""Verdict on a stalled or failed run: a message for the user, and a report for programs and pictures.

rank 2 (host a, pp=2) was killed by SIGKILL in step 17 at instruction 9 of 24: Fwd(stage=2, microbatch=3)
rank 1 waits for its RecvGrad(stage=1, microbatch=0, peer=2) from it since 0.4 s, and rank 0 for rank 1
written to stall.json; a picture: quintsched render --stall stall.json -o stall.png
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from quintsched.errors import SURE, QuintschedError, StallError, printable
from quintsched.files.atomic import write_plain
from quintsched.plan import Plan
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.stall_before_plan import find_without_plan
from quintsched.stalls.stall_report import StallReport

from .position_in_shared_memory import NOWHERE
from .stall_limits import WALKS
from .verdict_timing import Member

REPORT_S, LATE_REPORT_S = 0.3, 3.0
"""Seconds that the verdict waits for the report, and that its end does."""

MOST_PLANS = 32


class Plans:
    """The latest plans that ranks have sent."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}

    def add_plan(self, number: int, text: bytes) -> None:
        """Add a plan file; an invalid one is ignored: the verdict then goes without."""
        try:
            self._plans[number] = Plan.from_json(text)
        except QuintschedError:
            return
        for old in sorted(self._plans)[:-MOST_PLANS]:
            del self._plans[old]

    def get(self, number: int) -> Plan | None:
        """Return the plan with a number, if it is known."""
        return self._plans.get(max(number, 0))

    def modes(self) -> dict[int, str]:
        """Return the mode of each plan by its number."""
        return {number: plan.mode for number, plan in self._plans.items()}


@dataclass(frozen=True)
class RunVerdict:
    """Message on the end of a run; `culprits` are the ranks at fault, () where these are not known.

    `exit_code` is that of the run: the culprit's own where it raised, else 4. `comes_again`: a further attempt would
    end in the same way, as ranks that had all connected refused it. `has_survivors`: ranks are left that can print it.
    `writing` is the thread that writes the report.
    """

    message: str
    culprits: tuple[int, ...]
    has_survivors: bool
    exit_code: int = StallError.exit_code
    comes_again: bool = False
    writing: Thread | None = None

    def wait_report(self) -> None:
        """Wait until the report is written, or a timeout."""
        if self.writing is not None:
            self.writing.join(LATE_REPORT_S)


def make_verdict(
    members: Sequence[Member], plans: Plans, report: Path | None, now_s: float, *, still_s: float
) -> RunVerdict:
    """Make the verdict from the members' last states, and start to write the report, with a short wait for it."""
    found = _find(members, plans, now_s, still_s)
    if isinstance(found, StallReport):
        words, writing = _write(found, report)
        culprits, message = found.ranks, "\n".join([found.words(), *words])
    else:
        (culprits, message), writing = found, None
    raised = [one for one in members if one.rank in culprits and one.error is not None and not one.complains]
    code = raised[0].error_code if raised else StallError.exit_code  # the first in rank order
    return RunVerdict(
        message,
        culprits,
        has_survivors=any(member.lives and member.has_come for member in members),
        exit_code=code,
        comes_again=code in SURE and all(member.has_come for member in raised),
        writing=writing,
    )


def own_errors(members: Sequence[Member], plans: Plans, now_s: float, *, still_s: float) -> list[Member]:
    """Return the members whose unclear errors are their own: no other rank is at fault, or has ended before."""
    unclear = {member.rank: member for member in members if member.is_unclear}
    others = [member for member in members if member.rank not in unclear]
    if not unclear or any(member.fate is not None and not member.complains for member in others):
        return []
    found = _find(members, plans, now_s, still_s)
    ranks = found.ranks if isinstance(found, StallReport) else found[0]
    return list(unclear.values()) if unclear.keys() >= set(ranks) else []


def _find(
    members: Sequence[Member], plans: Plans, now_s: float, still_s: float
) -> StallReport | tuple[tuple[int, ...], str]:
    """Return the report; before a plan is known, (culprits, message)."""
    modes = plans.modes()
    states = [member.state(now_s, modes, len(members)) for member in members]
    plan = plans.get(_program(members))
    return find_without_plan(states) if plan is None else find_culprit(plan, states, still_s=still_s)


def _program(members: Sequence[Member]) -> int:
    """Return the number of the plan of the rank that is farthest behind; 0 where none has begun one."""
    walking = [member.place for member in members if member.place.phase in WALKS and not member.has_ended]
    begun = [place for place in walking if place.program != NOWHERE]
    return min(begun, key=lambda place: place.run).program if begun else 0


def _write(found: StallReport, report: Path | None) -> tuple[list[str], Thread | None]:
    """Write the report in a thread, as its file system may hang; return what to print about it by now."""
    if report is None:
        return [], None
    said: list[str] = []

    def write() -> None:
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
            write_plain(report, found.to_json(), "the report")
        except (QuintschedError, OSError, ValueError) as error:
            said.append(f"no report could be written: {printable(str(error))}")
        else:
            name = printable(str(report))
            said.append(f"written to {name}; a picture: quintsched render --stall {name} -o stall.png")

    writing = Thread(target=write, name="quintsched stall report", daemon=True)
    writing.start()
    writing.join(REPORT_S)
    return said or [f"the report is still being written, to {printable(str(report))}"], writing

"""Rules for the time of a verdict: after the first symptom, once the messages that explain it have arrived.

a process ended, or is cut off                 0.3 s later: late messages are in, and the first to end is still first
a process ended quietly, in set-up             1.5 s later, if some rank waits
a rank's own code raised                       when its process has ended, so that its traceback comes first
all ranks refuse (a job that does not fit)     never: they print it themselves, in the same words
some refuse                                    4 s later; 8 s while others have not connected, which may refuse too;
                                               0.3 s after another rank's wait for them has failed
a rank's wait for others failed                as soon as the cause is known, at most 2 s later; where user code
                                               waited, and no other rank is at fault, that rank first prints
                                               the error, as its own
no rank moves for longer than the limit        0.3 s later, after new samples, if still no rank has moved
a rank of another machine does not answer      the last two wait until it is known to be cut off, 15 s at most

State of each rank as the hub knows it: position and its time, exit of its process, its messages.

hello ─▶ Member ─▶ place (read or sent) ─▶ …  bye: it has finished     error: what it raised
                                              closed: its process has ended, or is cut off ─▶ fate
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from quintsched.errors import StallError
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, Phase, RankState

from .position_in_shared_memory import NOTHING, NOWHERE, START, WORLD_CODE, CellReader, RankPosition, wait_of
from .process_state import NO_PROCESS, ProcessId
from .stall_limits import PositionTracker

ErrorKind = Literal["own", "refusal", "stall", "unclear"]
"""Kind of an error, as a rank reports it: of its own code; a refusal that all ranks may raise alike; a failed wait for
others; unclear: its code failed in communication, by another rank's fault if there is one, else its own.
"""

COMPLAINTS: tuple[ErrorKind, ...] = ("stall", "unclear")
"""Kinds of errors that may be another rank's fault."""


@dataclass
class Member:
    """State of one rank. Times are on the hub's clock, in seconds."""

    rank: int
    host: str = ""
    process: ProcessId = NO_PROCESS
    launcher: ProcessId = NO_PROCESS
    """The launcher process that it ends with, where that is known."""
    is_here: bool = False
    """Whether it runs on the hub's machine, where process ids are comparable."""
    reader: CellReader | None = None
    place: RankPosition = START
    changed_s: float = 0.0
    heard_s: float = 0.0
    groups: list[tuple[int, ...]] = field(default_factory=list)
    host_waits: bool = True
    """Whether its host blocks in waits for other ranks, not a device."""
    has_come: bool = False
    has_ended: bool = False
    """Whether it has sent a goodbye: it has finished its work."""
    closed_s: float | None = None
    is_cut: bool = False
    """Whether the network closed its connection, not its process."""
    fate: Fate | None = None
    fate_s: float = 0.0
    error: tuple[ErrorKind, str] | None = None
    error_s: float = 0.0
    """Time of its report."""
    error_code: int = 1
    """Exit code for this error, whatever its process ends with."""
    is_stopped: bool = False
    """Whether its process is stopped, as by SIGSTOP; known on the hub's machine only."""
    is_silent: bool = False
    """Whether it has not answered for so long that a cut connection would have been detected."""

    @property
    def lives(self) -> bool:
        """Whether it may still move."""
        return self.fate is None and not self.has_ended

    @property
    def complains(self) -> bool:
        """Whether its error may be another rank's fault."""
        return self.error is not None and self.error[0] in COMPLAINTS

    @property
    def is_unclear(self) -> bool:
        """Whether it is not known yet if its error is its own."""
        return self.error is not None and self.error[0] == "unclear"

    def own_up(self) -> None:
        """Mark its error as its own."""
        assert self.error is not None
        self.error = ("own", self.error[1])

    def move(self, place: RankPosition, now_s: float) -> None:
        """Record its position."""
        self.heard_s = now_s
        if place != self.place:
            self.place, self.changed_s = place, now_s

    def record_end(self, fate: Fate, now_s: float) -> None:
        """Record the exit of its process; a more certain fate replaces a less certain one."""
        if self.fate is None:
            self.fate_s = now_s
        if self.fate is None or self.fate.kind in ("gone", "unreachable"):
            self.fate = fate

    def fail(self, kind: ErrorKind, text: str, code: int, now_s: float) -> None:
        """Record its error; an error of its own replaces an earlier failed wait."""
        if self.error is None or self.complains:
            self.error, self.error_s, self.error_code = (kind, text), now_s, code

    def state(self, now_s: float, modes: Mapping[int, str], num_ranks: int) -> RankState:
        """Return its last state; `modes` are those of the plans by their numbers."""
        place = self.place
        return RankState(
            rank=self.rank,
            host=self.host,
            pid=self.process.pid,
            phase="ended" if self.has_ended else place.phase,
            step=None if place.step == NOWHERE else place.step,
            program=modes.get(place.program, "train"),
            index=None if place.at == NOWHERE else place.at,
            since_s=now_s - self.changed_s,
            heard_s=now_s - self.heard_s,
            fate=self._told_fate(now_s),
            awaits=self._wait(num_ranks),
            run=place.run or None,
            sent=place.sent,
            sent_at=None if place.sent_at == NOWHERE else place.sent_at,
            room=place.room,
            given=place.given,
        )

    def _told_fate(self, now_s: float) -> Fate | None:
        """Return its fate, with an error that it reported before; an exit with 4 without one gets a remark."""
        ago_s, fate = now_s - self.fate_s, self.fate
        if self.error is not None and not self.complains:
            code = fate.code if fate is not None and fate.kind == "exit" else None
            return Fate("error", code, self.error[1], ago_s=now_s - self.error_s)
        if fate is None:
            silent = Fate("silent") if self.is_silent else None
            return Fate("stopped", signal.SIGSTOP) if self.is_stopped else silent
        if fate.kind == "exit" and self.error is not None:
            return Fate("error", fate.code, f"StallError: {self.error[1]}", ago_s=ago_s)
        gave_up = fate.kind == "exit" and fate.code == StallError.exit_code and self.has_come
        return Fate(fate.kind, fate.code, fate.text or "of its own accord" * gave_up, ago_s=ago_s)

    def _wait(self, num_ranks: int) -> BlockingCall | None:
        if not self.host_waits:
            return None
        if self.place.wait == WORLD_CODE:
            return BlockingCall("collective", ranks=tuple(range(num_ranks)))
        return wait_of(self.place.wait, self.groups)


SETTLE_S = 0.3
QUIET_S = 1.5
COMPLAINT_S = 2.0
OWN_ERROR_S = 2.0
REFUSAL_S, LATE_REFUSAL_S = 4.0, 8.0
SILENT_S, CUT_OFF_S = 1.5, 15.0
"""Silence after which a rank of another machine may be cut off, and after which that would have been detected."""
RESTING: tuple[Phase, ...] = ("idle", "ended")
"""Phases in which a rank of a user's own loop may end without a goodbye."""
ASKED_TO_END = {1, signal.SIGTERM, signal.SIGINT}
"""SIGHUP by its number, which has no name on Windows; SIGTERM, SIGINT."""


class Ruling(Enum):
    """Decision of the judge."""

    GO_ON = "go on"
    ASK = "ask ranks of other machines where they are"
    JUDGE = "make a verdict"
    OVER = "all ranks have ended, and there is nothing to be said"


class Judge:
    """Examines all members of a run periodically; times are on the hub's clock, in seconds."""

    def __init__(self, members: Collection[Member], progress: PositionTracker) -> None:
        self._members = members
        self._progress = progress
        self._stalled_s: float | None = None
        self._first_s: dict[str, float] = {}

    def look(self, now_s: float) -> Ruling:
        """Return the decision at this time."""
        living = [member for member in self._members if member.lives]
        places = {member.rank: member.place for member in self._members if member.lives and member.has_come}
        moved = self._progress.look(now_s, places)
        cause_s, complaint_s = self._cause(now_s), self._complaint(now_s)
        if cause_s is not None and now_s >= cause_s:
            nobody_came = not any(member.has_come or member.error is not None for member in self._members)
            return Ruling.OVER if nobody_came or self._was_asked_to_end() else Ruling.JUDGE
        if complaint_s is not None and (now_s >= complaint_s or not living):
            return Ruling.GO_ON if self._may_be_cut_off(now_s, now_s - SILENT_S) else Ruling.JUDGE
        if cause_s is not None or complaint_s is not None:
            return Ruling.GO_ON
        if not living or self._all_refuse():
            return Ruling.OVER
        return self._look_for_stall(now_s, living, moved=moved)

    def _look_for_stall(self, now_s: float, living: list[Member], *, moved: bool) -> Ruling:
        if moved:
            self._stalled_s = None
        any_stopped = any(member.is_stopped for member in living) and not all(member.is_stopped for member in living)
        if not self._progress.is_stalled([member.place for member in living], any_stopped=any_stopped):
            self._stalled_s = None
            return Ruling.GO_ON
        if self._stalled_s is None:
            self._stalled_s = now_s
            return Ruling.ASK
        is_due = now_s >= self._stalled_s + SETTLE_S and not self._may_be_cut_off(now_s, self._stalled_s)
        return Ruling.JUDGE if is_due else Ruling.GO_ON

    def _may_be_cut_off(self, now_s: float, since_s: float) -> bool:
        """Whether a rank of another machine is silent since then, and may yet be detected as cut off."""
        silent = (member for member in self._members if member.heard_s < since_s and _may_be_silent(member))
        return not all(is_silent(member, now_s) for member in silent)

    def _cause(self, now_s: float) -> float | None:
        """Return the time of the verdict on processes that ended, or raised; None: there are none."""
        is_awaited = any(member.lives and member.place.wait != NOTHING for member in self._members)
        ends = (member for member in self._members if is_bad_end(member))
        due = [self._due_of_end(member) for member in ends if is_awaited or not is_quiet(member)]
        raised = (member for member in self._members if member.error is not None and not member.complains)
        due += [self._first_s.setdefault(f"error {one.rank}", now_s) + self._patience(one) for one in raised]
        if due and self._all_refuse():
            return None
        return min(due, default=None)

    def _patience(self, member: Member) -> float:
        """Return the time for others to raise a rank's error too; longer before all have connected."""
        if not _refuses(member):
            return OWN_ERROR_S
        are_here = all(one.has_come or one.error is not None for one in self._members)
        return REFUSAL_S if member.has_come or are_here else LATE_REFUSAL_S

    def _due_of_end(self, member: Member) -> float:
        if _refuses(member):
            return member.fate_s + self._patience(member)
        return member.fate_s + (QUIET_S if is_quiet(member) else SETTLE_S)

    def _complaint(self, now_s: float) -> float | None:
        began = [self._first_s.setdefault(f"complaint {one.rank}", now_s) for one in self._members if one.complains]
        if not began:
            return None
        is_explained = any(not member.lives or _refuses(member) for member in self._members)
        return min(began) + (SETTLE_S if is_explained else COMPLAINT_S)

    def _all_refuse(self) -> bool:
        """Whether all ranks that have not finished have reported refusals of their own."""
        at_work = [member for member in self._members if not member.has_ended]
        return bool(at_work) and all(map(_refuses, at_work))

    def _was_asked_to_end(self) -> bool:
        """Whether all ranks were ended from outside, by signals."""
        codes = {*ASKED_TO_END, *(128 + number for number in ASKED_TO_END)}
        fates = [member.fate for member in self._members]
        return all(fate is not None and fate.kind in ("signal", "exit") and fate.code in codes for fate in fates)


def is_silent(member: Member, now_s: float) -> bool:
    """Whether a rank of another machine is silent for longer than the detection of a cut connection takes."""
    return _may_be_silent(member) and member.heard_s <= now_s - CUT_OFF_S


def _refuses(member: Member) -> bool:
    return member.error is not None and member.error[0] == "refusal"


def _may_be_silent(member: Member) -> bool:
    return member.lives and member.has_come and not member.is_here


def is_bad_end(member: Member) -> bool:
    """Whether a process has ended, or is cut off, without having finished."""
    if member.fate is None or member.has_ended:
        return False
    return not (is_quiet(member) and member.place.phase in RESTING)


def is_quiet(member: Member) -> bool:
    """Whether a process ended without an error, in set-up or between steps, as one without further work does."""
    fate, phase = member.fate, member.place.phase
    if fate is None or member.error is not None:
        return False
    return (phase in RESTING or phase == "setup") and (fate.kind == "gone" or (fate.kind == "exit" and fate.code == 0))

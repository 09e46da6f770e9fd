"""What the hub knows of each rank: where it is, since when, what became of its process, what it said.

hello ─▶ Member ─▶ place (read or sent) ─▶ …  bye: it has done all it should     error: what it raised
                                              closed: its process has ended, or is cut off ─▶ fate
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quintsched.errors import StallError
from quintsched.stalls.states import Fate, RankState, Wait

from .cell import NOWHERE, START, CellReader, Place
from .process import NOBODY, ProcessId
from .waiting import WORLD_CODE, wait_of

ErrorKind = Literal["own", "refusal", "stall", "unclear"]
"""What a rank says of an error: its own code's; one that all ranks may find alike; that a wait for others failed; that
its code failed as it communicated: another rank's fault if there is one, else its own.
"""

COMPLAINTS: tuple[ErrorKind, ...] = ("stall", "unclear")
"""The kinds of errors that may be another rank's fault."""


@dataclass
class Member:
    """One rank. Times are those of the hub's clock, in seconds."""

    rank: int
    host: str = ""
    process: ProcessId = NOBODY
    launcher: ProcessId = NOBODY
    """The process that it ends with, where that is known."""
    is_here: bool = False
    """Whether it runs on the hub's machine, where numbers of processes mean the same."""
    reader: CellReader | None = None
    place: Place = START
    changed_s: float = 0.0
    heard_s: float = 0.0
    groups: list[tuple[int, ...]] = field(default_factory=list)
    host_waits: bool = True
    """Whether its host waits for other ranks itself, and no device in its stead."""
    has_come: bool = False
    has_ended: bool = False
    """Whether it said that it has done all it should."""
    closed_s: float | None = None
    is_cut: bool = False
    """Whether the network closed its connection, and not its process."""
    fate: Fate | None = None
    fate_s: float = 0.0
    error: tuple[ErrorKind, str] | None = None
    error_s: float = 0.0
    """When it told of it."""
    error_code: int = 1
    """The exit code of such an error, whatever its process ends with."""
    is_stopped: bool = False
    """Whether its process lives and does not run, as after a SIGSTOP; known of those on the hub's machine."""
    is_silent: bool = False
    """Whether it has not answered for so long that its machine would have been found cut off."""

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
        """Whether nobody knows yet if its error is its own."""
        return self.error is not None and self.error[0] == "unclear"

    def own_up(self) -> None:
        """Take its error for its own."""
        assert self.error is not None
        self.error = ("own", self.error[1])

    def move(self, place: Place, now_s: float) -> None:
        """Take in where it is."""
        self.heard_s = now_s
        if place != self.place:
            self.place, self.changed_s = place, now_s

    def end(self, fate: Fate, now_s: float) -> None:
        """Take in what became of its process; what is known better replaces what is known worse."""
        if self.fate is None:
            self.fate_s = now_s
        if self.fate is None or self.fate.kind in ("gone", "unreachable"):
            self.fate = fate

    def fail(self, kind: ErrorKind, text: str, code: int, now_s: float) -> None:
        """Take in what it raised; its own error counts for more than a wait that failed before."""
        if self.error is None or self.complains:
            self.error, self.error_s, self.error_code = (kind, text), now_s, code

    def state(self, now_s: float, modes: Mapping[int, str], num_ranks: int) -> RankState:
        """Return what it said last; `modes` are those of the plans by their numbers."""
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
        """Return its fate, with the error that it told before; one that gives up without a complaint has no reason."""
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

    def _wait(self, num_ranks: int) -> Wait | None:
        if not self.host_waits:
            return None
        if self.place.wait == WORLD_CODE:
            return Wait("collective", ranks=tuple(range(num_ranks)))
        return wait_of(self.place.wait, self.groups)

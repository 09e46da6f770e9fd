"""The hub of hang detection: connects to all ranks, reads their cells, makes the verdict. Not a rank, it outlives them.

    quintsched run     a thread of the launcher:  hub = Hub(num_ranks, …); hub.start(); environ |= hub.environment
                                                  hub.ended(rank, code) after each wait; hub.close() at the end
    torchrun           python -m quintsched.runtime.watch.hang_monitor SOCKET NUM_RANKS PID, started by rank 0 (PID); it
                       ends with the last rank, and with that process where none has come; the key is in its
                       environment, and every surviving rank prints the verdict
    several machines   the same; each launcher reports the exits of its machine's ranks (`connect_to_monitor.tell_end`)

It listens on the loopback unless ranks are on several machines, and accepts only peers that know the run's key.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from quintsched.errors import printable
from quintsched.files.terminal import write_error
from quintsched.stalls.last_reported_rank_states import Fate

from .announce_verdict import Plans, RunVerdict, make_verdict, own_errors
from .monitor_sockets import ADDRESS, KEY, Connection, FrameError, Listener
from .position_in_shared_memory import CellReader, place_of
from .process_state import NO_PROCESS, ProcessId, fate_of, fate_of_code, look_at, machine
from .rendezvous.network_addresses import LOOPBACK
from .stall_limits import Patience, PositionTracker
from .torch_free_clock import now_s
from .verdict_timing import SETTLE_S, Judge, Member, Ruling, is_silent

MONITOR_TICK_S = 0.1
HURRY_S = 0.01
"""Seconds between two looks at all ranks; the shorter one while an exit status is awaited."""
ALONE_AT_FIRST_S, ALONE_S = 120.0, 2.0
"""Seconds until a hub that is a separate process ends without any connected rank: at first, and later."""
FATE_S = 0.25
"""Maximum time to wait for an exit status, in seconds."""


class Hub:
    """Watches the ranks of a run, in a thread of its own.

    Args:
        num_ranks: number of ranks.
        tell: is called with the verdict at once, in the hub's thread, and prints it; None: the ranks print it, and the
            hub also ends with the last of them, not only when it is closed.
        key: shared secret that authenticates ranks; None: generated.
        listening: a listening socket; None: one on the loopback.
        starter: process whose end ends the hub too, if no rank is connected then; it holds a pipe that somebody reads.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        tell: Callable[[RunVerdict], None] | None = None,
        key: str | None = None,
        listening: socket.socket | None = None,
        starter: int | None = None,
    ) -> None:
        self.key = key or secrets.token_hex(16)
        self.verdict: RunVerdict | None = None
        self._report: Path | None = None
        self._tell, self._spoken = tell, tell is not None
        self._members = [Member(rank, changed_s=now_s(), heard_s=now_s()) for rank in range(num_ranks)]
        self._progress = PositionTracker(Patience())
        self._judge = Judge(self._members, self._progress)
        self._plans = Plans()
        self._machine = machine()
        self._listener = Listener(self.key, listening or socket.create_server((LOOPBACK, 0)), 2 * num_ranks + 16)
        self._by_rank: dict[int, Connection] = {}
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_closing = False
        self._lonely_s, self._starter = now_s() + ALONE_AT_FIRST_S, starter
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self.watch_ranks, name="quintsched watch hub", daemon=True)

    @property
    def address(self) -> str:
        """Address that it listens at: "host:port"."""
        return self._listener.address

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which ranks find it."""
        return {ADDRESS: self.address, KEY: self.key}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ended(self, rank: int, returncode: int) -> None:
        """Record that a rank's process has ended, with its `subprocess` return code: minus a signal's number."""
        with self._lock:
            self._ended[rank] = returncode
        self._listener.wake()

    def wait_verdict(self, timeout_s: float) -> RunVerdict | None:
        """Return the verdict; None once there is nothing left to judge, or after the timeout."""
        self._is_over.wait(timeout_s)
        return self.verdict

    def stop(self) -> None:
        """Stop judging: whatever happens to ranks from now on is intended."""
        self._is_closing = True
        self._listener.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        """Stop, and close all connections."""
        self.stop()
        if self.verdict is not None:
            self.verdict.wait_report()
        self._listener.close()
        for member in self._members:
            if member.reader is not None:
                member.reader.close()

    def watch_ranks(self) -> None:
        """Watch until the hub is closed, or all ranks have ended and disconnected."""
        try:
            while not self._is_closing:
                self._hear()
                self._look()
                if self._by_rank:
                    self._lonely_s = now_s() + ALONE_S
                elif not self._spoken and (self._is_over.is_set() or now_s() > self._lonely_s):
                    return
                elif self._starter not in (None, os.getppid()):  # its process has ended, and nobody is here
                    self._lonely_s, self._starter = min(self._lonely_s, now_s() + ALONE_S), None
        finally:
            self._is_over.set()

    def _hear(self) -> None:
        seeks = any(member.closed_s is not None and member.fate is None for member in self._members)
        for connection in self._listener.wait_connections(HURRY_S if seeks else MONITOR_TICK_S):
            for message in connection.receive():
                try:
                    self._take(connection, message)
                except (FrameError, KeyError, TypeError, ValueError):
                    self._listener.drop(connection)
            if connection.is_closed:
                self._lose(connection)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        now, rank = now_s(), connection.rank
        if rank is None:
            if "ended" in message:
                self.ended(*map(int, message["ended"]))
            elif "refused" in message:
                self._refused(message, now)
            else:
                self._welcome(connection, message, now)
            return
        member = self._members[rank]
        if "place" in message:
            member.move(place_of([int(number) for number in message["place"]]), now)
        if "group" in message:
            member.groups.append(tuple(map(int, message["group"])))
        if "plan" in message:
            self._plans.add_plan(int(message["plan"]), message["text"])
        if "error" in message:
            member.fail(message["kind"], printable(str(message["error"])), int(message.get("code", 1)), now)
            if self.verdict is not None:
                self._announce(connection)
        if "leaves" in message:
            member.record_end(Fate("exit", int(message["leaves"])), now)
        if "bye" in message:
            self._read(member, now)
            member.has_ended = True

    def _refused(self, message: Mapping[str, Any], now: float) -> None:
        """Record the error of a rank that cannot even connect."""
        rank = int(message["refused"])
        if 0 <= rank < len(self._members) and not self._members[rank].has_come:
            self._members[rank].host = str(message["host"])[:200]
            self._members[rank].fail("refusal", printable(str(message["error"])), int(message["code"]), now)

    def _welcome(self, connection: Connection, message: Mapping[str, Any], now: float) -> None:
        """Register an authenticated rank, and reply whether its cell is read directly."""
        rank = int(message["rank"])
        member = self._members[rank] if 0 <= rank < len(self._members) else None
        if member is None or member.has_come:
            raise FrameError("no such rank, or one more")
        connection.rank, self._by_rank[rank] = rank, connection
        member.has_come, member.host = True, str(message["host"])[:200]
        member.host_waits = bool(message["host_waits"])
        member.process = ProcessId(int(message["pid"]), int(message["started"]))
        member.launcher = ProcessId(*map(int, message.get("launcher", NO_PROCESS)))
        member.changed_s = member.heard_s = now
        member.is_here = bool(self._machine) and message["machine"] == self._machine
        if member.is_here and message["file"] is not None:
            with suppress(OSError):
                member.reader = CellReader(member.process.pid, int(message["file"]), rank)
        if rank == 0 and message.get("timeout_s") is not None:
            after = message.get("stall_after")
            self._progress.patience = Patience(
                float(message["timeout_s"]), None if after is None else float(after), bool(message["compiles"])
            )
            self._report = Path(str(message["report"]))
        connection.send({"seen": member.reader is not None, "speaks": self._spoken})
        if self.verdict is not None:
            self._announce(connection)

    def _lose(self, connection: Connection) -> None:
        if connection.rank is not None and self._by_rank.get(connection.rank) is connection:
            del self._by_rank[connection.rank]
            member = self._members[connection.rank]
            member.closed_s, member.is_cut = now_s(), connection.is_cut

    def _look(self) -> None:
        now = now_s()
        with self._lock:
            ended = dict(self._ended)
        for member in self._members:
            self._read(member, now)
            if member.rank in ended:
                member.record_end(fate_of_code(ended[member.rank]), now)
            elif member.closed_s is not None and member.fate is None:
                self._seek_fate(member, now)
            elif member.is_here and member.has_come and member.lives:
                state = look_at(member.process)
                member.is_stopped = state is not None and state.state == "T"
                if state is None or state.state in "ZX":
                    member.closed_s = now
        if self._is_over.is_set():
            return
        match self._judge.look(now):
            case Ruling.ASK:
                for connection in self._by_rank.values():
                    connection.send({"ask": 1})
            case Ruling.JUDGE:
                self._rule()
            case Ruling.OVER:
                errors = {member.error for member in self._members}
                for connection in self._by_rank.values():
                    connection.send({"over": 1, "alike": len(errors) == 1})
                self._is_over.set()

    def _read(self, member: Member, now: float) -> None:
        if member.reader is not None and not member.has_ended:
            with suppress(ValueError):
                member.move(member.reader.read_position(), now)

    def _seek_fate(self, member: Member, now: float) -> None:
        """Find the exit of a disconnected process; one that still runs after a while stays without connection."""
        assert member.closed_s is not None
        if not member.is_here:
            member.record_end(Fate("unreachable" if member.is_cut else "gone"), now)
            return
        fate = fate_of(look_at(member.process))
        if fate is not None and _went_with_launcher(member, fate):
            fate = replace(fate, text=f"as its launcher, process {member.launcher.pid}, has ended")
        if fate is not None and fate.kind in ("exit", "signal"):
            member.record_end(fate, now)
        elif now > member.closed_s + FATE_S:
            if fate is not None and fate.kind == "gone":
                member.record_end(fate, now)
            elif member.is_cut:
                member.record_end(Fate("unreachable"), now)
            else:
                member.closed_s = None

    def _rule(self) -> None:
        """Make the verdict; but first, ranks whose own code failed are told so, and print their errors."""
        now, still_s = now_s(), max(self._progress.still_s / 2, SETTLE_S)
        for member in self._members:
            member.is_silent = is_silent(member, now)
        own = own_errors(self._members, self._plans, now, still_s=still_s)
        for member in own:
            member.own_up()
            if member.rank in self._by_rank:
                self._by_rank[member.rank].send({"own": 1})
        if not own:
            self._make_verdict(now, still_s)

    def _make_verdict(self, now: float, still_s: float) -> None:
        self.verdict = make_verdict(self._members, self._plans, self._report, now, still_s=still_s)
        for connection in self._by_rank.values():
            self._announce(connection)
        if self._tell is not None:
            self._tell(self.verdict)
        for member in self._members:
            if member.is_stopped and member.lives:
                with suppress(OSError):
                    os.kill(member.process.pid, signal.SIGKILL)  # it would otherwise resume training when continued
        self._is_over.set()

    def _announce(self, connection: Connection) -> None:
        assert self.verdict is not None
        is_culprit = connection.rank in self.verdict.culprits
        connection.send({"verdict": self.verdict.message[:16_000], "spoken": self._spoken, "at_once": is_culprit})


def _went_with_launcher(member: Member, fate: Fate) -> bool:
    """Whether a process was killed, or is gone, because its launcher ended first (parent death signal)."""
    if member.launcher == NO_PROCESS or (fate.kind, fate.code) not in (("signal", signal.SIGKILL), ("gone", None)):
        return False
    state = look_at(member.launcher)
    return state is None or state.state in "ZX"


def main() -> int:
    """Run a hub in a process of its own until all ranks have ended; print the verdict where no rank survives."""
    file, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    os.closerange(3, file)  # its starter's pipes: who reads them waits for their end
    os.closerange(file + 1, os.sysconf("SC_OPEN_MAX"))
    hub = Hub(num_ranks, key=os.environ[KEY], listening=socket.socket(fileno=file), starter=int(sys.argv[3]))
    hub.watch_ranks()
    hub.close()
    if hub.verdict is not None and not hub.verdict.has_survivors:
        write_error(hub.verdict.message)
    return 0


if __name__ == "__main__":
    sys.exit(main())

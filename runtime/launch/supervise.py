"""Supervision of an attempt: waits for its ranks, passes stop requests on to them, and determines how it ended.

all ended with 0           0
one failed                 its exit code; 4 where a signal ended it. The others are killed
another machine failed     its exit code. All ranks are killed
asked to stop              each finishes its step, saves and ends with 0; asked by Ctrl-C again, they are killed

A hub watches beside the ranks: each failure is reported to it, and its verdict is printed before the others are killed.
On several machines rank 0 starts the hub, as under torchrun, each launcher reports to it how its ranks end, and every
remaining rank prints the verdict.

Launchers of several machines exchange the end of an attempt through the run's store.

    machine 0   serves the store    ── failed = 4 ──▶ machine 1 ends its ranks too
    machine 1   a client            ── gone + 1   ──▶ when all machines' ranks are gone, the next attempt may begin

A thread talks to the store, so that a network failure does not block a launcher: it still takes signals, and still sees
its own ranks end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING

from quintsched.errors import SURE
from quintsched.files.terminal import write_error, write_line

from ..watch.connect_to_monitor import tell_end
from ..watch.hang_monitor import Hub
from .start_and_stop_rank_processes import MachineRanks, RankProcesses, Wakes

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ASK_S = 0.2
LAST_LOOKS = 50
"""Number of times machine 0 polls whether the others know of the end, before it shuts the store down."""

DIED = 4
"""Exit code of a run that lost a rank: one that a signal ended has no code of its own."""

FINAL = (0, *SURE)
"""Exit codes after which there is no further attempt: success, or an error that would recur."""


@dataclass(frozen=True)
class Ended:
    """Exit code of an attempt, and whether no other follows, as after one that `was_asked` to end.

    `by_signal`: the launcher was asked to end it, and no rank failed.
    """

    code: int
    is_final: bool
    was_asked: bool = False
    by_signal: bool = False

    def to_text(self) -> str:
        """Return it as text for another launcher."""
        return f"{self.code} {'final' if self.is_final else 'again'}"

    @classmethod
    def from_text(cls, text: str) -> Ended:
        """Return the end that another launcher wrote; any other text is a final end with `DIED`."""
        code, _, rest = text.partition(" ")
        return cls(int(code), rest != "again") if code.isdecimal() and len(code) < 4 else cls(DIED, is_final=True)


class Machines:
    """One launcher's view of an attempt: how it ended elsewhere, and whether its ranks are gone everywhere.

    Args:
        open_store: returns the store of the run, or connects to it.
        number, count: number of this machine, of how many; number 0 serves the store.
        attempt: number of earlier starts of the run.

    Attributes:
        hub: address and secret of the run's watch, once that is known.
        failure: how the first machine that failed ended, this one included; None: no failure is known.
        are_gone: whether the ranks of all machines are.
        is_lost: whether the launcher that serves the store is gone, or out of reach.
    """

    def __init__(self, open_store: Callable[[], Store], number: int, count: int, attempt: int) -> None:
        self._open_store, self._number, self._count = open_store, number, count
        from ..watch.rendezvous.rendezvous_store import (  # torch is imported once the ranks are started
            HUB,
            launchers_keys,
        )

        self._keys = launchers_keys(attempt)
        self._hub_key = f"{self._keys}/{HUB}"
        self._mine: Ended | None = None
        self.failure: Ended | None = None
        self.hub: str | None = None
        self.are_gone = self.is_lost = False
        threading.Thread(target=self._talk, daemon=True).start()

    def tell(self, ended: Ended) -> None:
        """Tell the others how the ranks of this machine, which are gone, ended."""
        self._mine = ended

    def _talk(self) -> None:
        try:
            store = self._open_store()
            while self._mine is None:
                self._look_for_failure(store)
                if self.hub is None and store.check([self._hub_key]):
                    self.hub = store.get(self._hub_key).decode(errors="replace")
                sleep(ASK_S)
            if self._mine.code:
                store.compare_set(f"{self._keys}/failed", "", self._mine.to_text())
            store.add(f"{self._keys}/gone", 1)
            while store.add(f"{self._keys}/gone", 0) < self._count:
                sleep(ASK_S)
            self._look_for_failure(store)
            self._leave(store)
        except RuntimeError:
            self.is_lost = True
            self.failure = self.failure or Ended(DIED, is_final=True)

    def _look_for_failure(self, store: Store) -> None:
        if self.failure is None and store.check([f"{self._keys}/failed"]):
            self.failure = Ended.from_text(store.get(f"{self._keys}/failed").decode(errors="replace"))

    def _leave(self, store: Store) -> None:
        known = store.add(f"{self._keys}/known", 1)
        for _ in range(LAST_LOOKS if self._number == 0 else 0):
            if known == self._count:
                break
            sleep(ASK_S)
            known = store.add(f"{self._keys}/known", 0)
        self.are_gone = True


LOOK_S = 0.5
"""Longest sleep of the launcher; a rank's end or a signal wakes it."""

GOOD_WAITS_S, FAILED_WAITS_S = 1800.0, 15.0
"""Time that it waits for the ranks of other machines to be gone too, after success (they may save) or failure."""
VERDICT_S = 6.0
"""Time that the launcher waits for the verdict when a rank has failed."""
SPEAK_S = 1.5
"""Time that the ranks have to print it themselves."""


def supervise(
    ranks: RankProcesses,
    wakes: Wakes,
    machines: Machines | None = None,
    on_end: Callable[[int, int], None] | None = None,
) -> Ended:
    """Wait until all ranks of this machine have ended or one of any machine has failed, and return how.

    `on_end` is passed each rank's exit code, as of a `Popen`: -n where signal n ended the rank.
    """
    on_end = on_end or say_end
    asked: int | None = None
    while True:
        for number in wakes.wait_signals(LOOK_S):
            if asked is not None and number == signal.SIGINT:
                return Ended(128 + number, is_final=True, was_asked=True, by_signal=True)
            if asked is None:
                ranks.ask_to_stop()
                write_line("stopping after the step in progress (Ctrl-C ends the run at once)")
                asked = number
        ended = ranks.ended()
        failed = sorted((rank for rank, code in ended.items() if code), key=lambda rank: _order(ended[rank]))
        for rank in [*failed, *(rank for rank in ended if rank not in failed)]:
            if asked is None or ended[rank] != -signal.SIGTERM:
                on_end(rank, ended[rank])
        if failed:
            return _failure(ended[failed[0]], asked)
        if machines is not None and machines.failure is not None:
            lost = "the launcher of machine 0 is gone, or out of reach"
            what = lost if machines.is_lost else "another machine's ranks failed"
            write_line(f"error: {what}; the ranks of this one are ended")
            return machines.failure
        if not ranks.pids:
            return Ended(0, is_final=True)


def wait_for_machines(wakes: Wakes, machines: Machines, ended: Ended) -> Ended:
    """Wait until the ranks of all machines are gone, as this one's are, and return how the attempt ended."""
    machines.tell(ended)
    looks = (FAILED_WAITS_S if ended.code else GOOD_WAITS_S) / LOOK_S
    while not machines.are_gone:
        looks -= 1
        if signal.SIGINT in wakes.wait_signals(LOOK_S) or looks < 0 or machines.is_lost:
            return Ended((machines.failure or ended).code or DIED, is_final=True)
    return machines.failure or ended


def _order(code: int) -> int:
    """Return a sort key by likely cause, of ranks found to have ended at once: one that lost a peer failed last."""
    return 2 if code == DIED else int(code > 0)


def _failure(code: int, asked: int | None) -> Ended:
    if asked is not None and code == -signal.SIGTERM:
        # the signal came before it could stop by itself
        return Ended(128 + asked, is_final=True, was_asked=True, by_signal=True)
    code = code if code > 0 else DIED
    return Ended(code, is_final=code in FINAL or asked is not None, was_asked=asked is not None)


def say_end(rank: int, code: int) -> None:
    """Print which signal ended a rank; a rank with an exit code has printed its error itself."""
    if code < 0:
        known = -code in set(signal.Signals)
        write_line(f"error: rank {rank} was ended by {signal.Signals(-code).name if known else f'signal {-code}'}")


@contextmanager
def watching(place: MachineRanks) -> Iterator[Hub | None]:
    """Watch the ranks that are started within a context; they find the hub by environment variables."""
    if place.num_nodes > 1:
        yield None
        return
    hub = Hub(place.num_ranks, tell=lambda verdict: write_error(verdict.message))
    os.environ.update(hub.environment)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()
        for name in hub.environment:
            del os.environ[name]


def note_end(hub: Hub | None, machines: Machines | None, rank: int, code: int) -> None:
    """Report how a rank ended; after a failure, return when the verdict is known, and has been printed."""
    if hub is None:
        if machines is not None and machines.hub is not None:
            tell_end(machines.hub, rank, code)
        say_end(rank, code)
        sleep(SPEAK_S if code else 0.0)
        return
    hub.ended(rank, code)
    if code and hub.wait_verdict(VERDICT_S) is None:
        say_end(rank, code)

"""How an attempt ends, and what the launchers of several machines tell each other of it, through the run's store.

    machine 0   serves the store    ── failed = 4 ──▶ machine 1 ends its ranks too
    machine 1   a client            ── gone + 1   ──▶ when all machines' ranks are gone, the next attempt may begin

A thread talks to the store, so that a network that is down holds up no launcher: it still takes signals, and still sees
its own ranks end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING

from quintsched.errors import SURE

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

ASK_S = 0.2
LAST_LOOKS = 50
"""So often machine 0 looks whether the others know that all is over, before it takes the store away."""

DIED = 4
"""The exit code of a run that lost a rank: one that a signal ended has no code of its own."""

FINAL = (0, *SURE)
"""Exit codes after which there is no further attempt: good, or what would come again."""


@dataclass(frozen=True)
class Ended:
    """The exit code of an attempt, and whether it is not to be followed by another, as after one `was_asked` to end.

    `by_signal`: the launcher was asked to end it, and no rank failed.
    """

    code: int
    is_final: bool
    was_asked: bool = False
    by_signal: bool = False

    def to_text(self) -> str:
        """Return it in words for another launcher."""
        return f"{self.code} {'final' if self.is_final else 'again'}"

    @classmethod
    def from_text(cls, text: str) -> Ended:
        """Return what another launcher said; anything else is a run that ended with `DIED`, for good."""
        code, _, rest = text.partition(" ")
        return cls(int(code), rest != "again") if code.isdecimal() and len(code) < 4 else cls(DIED, is_final=True)


class Machines:
    """One launcher's view of an attempt: how it ended elsewhere, and whether its ranks are gone everywhere.

    Args:
        open_store: returns the store of the run, or connects to it.
        number, count: which of the machines this is; number 0 serves the store.
        attempt: how often the run was started before.

    Attributes:
        hub: where the run's watch listens, and its secret, once that is known.
        failure: how the first machine that failed ended, this one included; None: none has, as far as is known.
        are_gone: whether the ranks of all machines are.
        is_lost: whether the launcher that serves the store is gone, or out of reach.
    """

    def __init__(self, open_store: Callable[[], Store], number: int, count: int, attempt: int) -> None:
        self._open_store, self._number, self._count = open_store, number, count
        from ..watch.rendezvous.store import HUB, launchers_keys  # torch is imported once the ranks are started

        self._keys = launchers_keys(attempt)
        self._hub_key = f"{self._keys}/{HUB}"
        self._mine: Ended | None = None
        self.failure: Ended | None = None
        self.hub: str | None = None
        self.are_gone = self.is_lost = False
        threading.Thread(target=self._talk, daemon=True).start()

    def tell(self, ended: Ended) -> None:
        """Tell the others how the ranks of this machine ended, which are gone."""
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

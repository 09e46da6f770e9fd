"""How the ranks of one attempt meet in a store that still holds what attempts before have left.

    rank r    hello/r = nonce ─────────▶ rank 0 reads, answers     welcome/r/nonce = 3
    rank r    here/r in attempt 3 ─────▶ rank 0 goes on when all are here

A restarted run finds the same store, where the addresses of dead ranks are. So everything lies under the number of the
attempt, which rank 0 draws; the others learn it in answer to a number that nobody has used before. What torchrun counts
as restarts is of no use here: it differs from machine to machine.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from time import sleep

from torch.distributed.distributed_c10d import PrefixStore, Store

from quintsched.errors import StallError, listed_ranks

from .store import has_launchers_store, open_store

ROOM = "quintsched"
POLL_S = 0.01
_BEGUN = f"{ROOM}/begun"


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run.

    Attributes:
        number: 1 is the first with this store.
        store: what its ranks alone use.
        goes_on: whether an attempt before had begun the run, so that this one goes on with it; the same on all ranks.
    """

    number: int
    store: Store
    goes_on: bool
    _run: Store

    def begin(self) -> None:
        """Note that the run has begun: its folder is its own. Attempts after this one go on with it."""
        self._run.set(_BEGUN, "1")


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> Attempt:
    """Return the attempt that this rank is part of, once rank 0 knows of all; every rank calls this.

    Raises `StallError` that says who has not come within the timeout.
    """
    if rank == 0:
        return _gather(store, world_size, timeout_s)
    nonce = secrets.token_hex(16)
    store.set(f"{ROOM}/hello/{rank}", nonce)
    try:
        number = int(store.get(f"{ROOM}/welcome/{rank}/{nonce}"))
    except RuntimeError as error:
        raise StallError(f"waiting {timeout_s:g} s for all ranks to come together: rank 0 did not") from error
    attempt = _attempt(store, number)
    attempt.store.set(f"here/{rank}", "1")
    return attempt


def meet_alone(timeout_s: float) -> Attempt | None:
    """Return the attempt of a run whose ranks are all in this process; None: nothing outlives it to start it again.

    Raises `StallError` where the launcher's store does not answer within the timeout.
    """
    if not has_launchers_store():
        return None
    try:
        return meet(open_store(timeout_s), 0, 1, timeout_s)
    except RuntimeError as error:
        raise StallError(f"waiting {timeout_s:g} s for the launcher's store: {error}") from error


def _gather(store: Store, world_size: int, timeout_s: float) -> Attempt:
    number = store.add(f"{ROOM}/attempts", 1)
    attempt = _attempt(store, number)
    answered: dict[int, bytes] = {}
    missing = [*range(1, world_size)]
    for _ in range(math.ceil(timeout_s / POLL_S)):
        for rank in missing:
            _answer(store, rank, number, answered)
        missing = [rank for rank in missing if not attempt.store.check([f"here/{rank}"])]
        if not missing:
            return attempt
        sleep(POLL_S)
    raise StallError(f"waiting {timeout_s:g} s for all ranks to come together: {listed_ranks(missing)} did not")


def _attempt(store: Store, number: int) -> Attempt:
    return Attempt(number, PrefixStore(f"{ROOM}/{number}", store), store.check([_BEGUN]), store)


def _answer(store: Store, rank: int, number: int, answered: dict[int, bytes]) -> None:
    """Tell a rank the attempt's number, if it has said hello, or once more: what was there may have been another's."""
    if not store.check([f"{ROOM}/hello/{rank}"]):
        return
    nonce = store.get(f"{ROOM}/hello/{rank}")
    if answered.get(rank) != nonce:
        store.set(f"{ROOM}/welcome/{rank}/{nonce.decode()}", str(number))
        answered[rank] = nonce

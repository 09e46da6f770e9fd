"""How ranks end together when they find a fault before they are connected: as one, if all of them find it.

all of them find it     the first that came says it, once                          error: no such data 'x'
some do not             the launcher's hub names them                              error: rank 1 (host a) raised the …
                        each says that it is its own, where there is no hub        error: rank 1: the import failed
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from time import sleep
from typing import TYPE_CHECKING

from quintsched.errors import QuintschedError
from quintsched.files.terminal import write_error
from quintsched.stalls.own_errors import headline

from ..watch.judge import LATE_REFUSAL_S

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

WAIT_S = 5.0
"""How long a rank waits for others to find the same, after the last that did."""
HEARD_WAITS_S = LATE_REFUSAL_S + 2.0
"""How long where the hub has heard of it: longer than it takes to name those who find it, if others do not."""


def leave_together(error: QuintschedError, rank: int) -> int:
    """Say the error, once where all ranks find it, and return its exit code.

    A launcher ends all ranks as soon as one has failed; one that torchrun ends here has the same exit code.
    """
    from ..watch.start import tell_refusal

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    words = error if world_size == 1 else f"rank {rank}: {error}"

    def leave_at_once(*_: object) -> None:
        write_error(words)
        os._exit(error.exit_code)

    signal.signal(signal.SIGTERM, leave_at_once)
    is_heard = world_size > 1 and tell_refusal(rank, headline(error), error.exit_code)
    try:
        store = _open_store()
        number = 0 if store is None else store.add("ranks", 1)
        found_by_all = store is not None and _all_come(store, world_size, HEARD_WAITS_S if is_heard else WAIT_S)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
        if store is not None and found_by_all:
            _say_once(error, store, number)
        elif store is None or not is_heard:  # else the hub has named this rank by now
            write_error(words)
    except RuntimeError:
        write_error(words)
    return error.exit_code


def _say_once(error: QuintschedError, store: Store, number: int) -> None:
    """Say what all ranks find, on the first that came; the others wait until it has."""
    if number == 1:
        write_error(error)
        store.set("said", "so")
    else:
        _until(lambda: store.check(["said"]), WAIT_S)


def _open_store() -> Store | None:
    """Return the launcher's store; None where there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch.distributed.distributed_c10d import PrefixStore

    from ..watch.rendezvous.store import open_store

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"quintsched/leave/{attempt}", open_store(WAIT_S))


def _all_come(store: Store, world_size: int, wait_s: float) -> bool:
    """Wait for all ranks; return whether they came, none more than `wait_s` after the one before."""
    came = 0
    while came < world_size:
        known = came
        if not _until(lambda known=known: store.add("ranks", 0) > known, wait_s):  # type: ignore[misc]
            return False
        came = store.add("ranks", 0)
    return True


def _until(is_so: Callable[[], bool], wait_s: float) -> bool:
    """Wait until something is so; return whether it was in time."""
    from ..comm.clock import now_s

    deadline = now_s() + wait_s
    while not is_so():
        if now_s() > deadline:
            return False
        sleep(0.02)
    return True

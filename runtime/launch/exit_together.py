"""How ranks end together when all of them find the same fault before they are connected."""

from __future__ import annotations

import os
import signal
from time import sleep

from quintsched.errors import QuintschedError
from quintsched.files.terminal import write_error

WAIT_S = 5.0


def leave_together(error: QuintschedError, rank: int) -> int:
    """Say the error once, wait for the other ranks to find it too, and return its exit code.

    A launcher ends all ranks as soon as one has failed; one that torchrun ends here has the same exit code. Rank 0
    speaks; another one only if rank 0 does not come.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(error.exit_code))
    if rank == 0:
        write_error(error)
    if not _meet(rank) and rank != 0:
        write_error(error)
    return error.exit_code


def _meet(rank: int) -> bool:
    """Wait in the launcher's store until all ranks have come; returns whether rank 0 was among them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return rank == 0
    from ..comm.clock import now_s
    from ..rendezvous.store import open_store, within

    world_size, attempt = int(os.environ["WORLD_SIZE"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = within(open_store(WAIT_S), f"quintsched/leave/{attempt}")
        store.set(f"rank{rank}", "here")
        came = store.add("ranks", 1)
        deadline = now_s() + WAIT_S
        while came < world_size and now_s() < deadline:
            sleep(0.02)
            came = store.add("ranks", 0)
        return bool(store.check(["rank0"]))
    except RuntimeError:
        return rank == 0

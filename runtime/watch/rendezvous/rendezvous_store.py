"""Key-value store for the ranks' rendezvous: its server, its address, and the meeting of one attempt's ranks.

    torchrun, quintsched run    the launcher serves it, every rank is a client       TORCHELASTIC_USE_AGENT_STORE=True
    srun, mpirun, by hand       rank 0 serves it at MASTER_ADDR:MASTER_PORT

Torch's own server listens at every address of the machine. Here it listens at one: loopback where all ranks are on this
machine, else that of MASTER_ADDR. The store contains text that no reader evaluates, and torch refuses keys and values
of more than 8 MB.

Meeting of the ranks of one attempt, in a store that still has keys of earlier attempts:

    rank r    hello/r = nonce ─────────▶ rank 0 reads, answers     welcome/r/nonce = 3
    rank r    here/r in attempt 3 ─────▶ rank 0 continues when all are here

A restarted run finds the same store, with the addresses of dead ranks. So all keys are prefixed with the number of the
attempt, which rank 0 draws; the others get it in reply to a nonce. torchrun's restart count cannot be used: it differs
between machines.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta
from time import sleep

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from quintsched.errors import StallError, UsageError, listed_ranks

from .network_addresses import LOOPBACK, is_one_machine, listen, own_address, require_elsewhere

KNOCK_S, ANSWER_S = 0.1, 1.0
"""Seconds between two attempts to connect to the store, and timeout of one attempt."""

HUB = "hub"
"""Key, for launchers, of the address and secret of the run's hub."""
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_addresses() -> None:
    """Raise `UsageError` where environment variables of the rendezvous are missing."""
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise UsageError(f"{', '.join(missing)} not in the environment; start the ranks with torchrun")


def open_store(timeout_s: float) -> Store:
    """Return the store that the environment names; rank 0 serves it unless the launcher does.

    Raises `RuntimeError`, as torch does, where there is no answer within the timeout, `UsageError` for an address that
    cannot be resolved, or is not rank 0's.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if has_launchers_store():
        return connect_to(host, port, timeout_s)
    host, said = (LOOPBACK if is_one_machine() else host), f"MASTER_ADDR={host}"
    if os.environ["RANK"] == "0":
        return serve(_listen(own_address(host, said), port), timeout_s)
    require_elsewhere(host, said)
    return connect_to(host, port, timeout_s)


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listen(address, port)
    except OSError as error:
        raise UsageError(f"MASTER_PORT={port}: cannot listen there: {error.strerror}") from error


def has_launchers_store() -> bool:
    """Whether the launcher serves the store; then it outlives the ranks and their keys."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def serve(listener: socket.socket, timeout_s: float) -> Store:
    """Serve a store on a listening socket, and take ownership of the socket."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=timeout_s),
    )


def launchers_keys(attempt: int | str) -> str:
    """Return the prefix of keys of launchers, and of rank 0 for them, in an attempt, counted by restarts."""
    return f"quintsched/launchers/{attempt}"


def connect_to(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store of another process; raises `RuntimeError` where it does not answer in time."""
    _await_answer(host, port, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _await_answer(host: str, port: int, timeout_s: float) -> None:
    """Wait until a port accepts connections; torch would log its attempts at length meanwhile."""
    left_s, why = timeout_s, "no time was left"
    while left_s > 0:
        try:
            socket.create_connection((host, port), timeout=ANSWER_S).close()
        except TimeoutError:
            left_s, why = left_s - ANSWER_S, "no answer"
        except OSError as error:
            left_s, why = left_s - KNOCK_S, error.strerror or str(error)
            sleep(KNOCK_S)
        else:
            return
    raise RuntimeError(f"nobody listens at {host}, port {port}: {why}")


KEY_PREFIX = "quintsched"
POLL_KEY_S = 0.01
_BEGUN = f"{KEY_PREFIX}/begun"


@dataclass(frozen=True)
class StartAttempt:
    """One start of all ranks of a run.

    Attributes:
        number: 1 is the first with this store.
        store: the store of this attempt's ranks.
        goes_on: whether an earlier attempt had begun the run, so that this one resumes it; the same on all ranks.
    """

    number: int
    store: Store
    goes_on: bool
    _run: Store

    def record_begin(self) -> None:
        """Record that the run has begun: its folder exists. Later attempts resume it."""
        self._run.set(_BEGUN, "1")


def meet(store: Store, rank: int, world_size: int, timeout_s: float) -> StartAttempt:
    """Return the attempt that this rank belongs to, once rank 0 has seen all ranks; every rank calls this.

    Raises `StallError` that names the ranks that have not come within the timeout.
    """
    if rank == 0:
        return _gather(store, world_size, timeout_s)
    nonce = secrets.token_hex(16)
    store.set(f"{KEY_PREFIX}/hello/{rank}", nonce)
    try:
        number = int(store.get(f"{KEY_PREFIX}/welcome/{rank}/{nonce}"))
    except RuntimeError as error:
        raise StallError(f"waiting {timeout_s:g} s for all ranks to come together: rank 0 did not") from error
    attempt = _attempt(store, number)
    attempt.store.set(f"here/{rank}", "1")
    return attempt


def meet_alone(timeout_s: float) -> StartAttempt | None:
    """Return the attempt of a run with all ranks in this process; None: no launcher could restart it.

    Raises `StallError` where the launcher's store does not answer within the timeout.
    """
    if not has_launchers_store():
        return None
    try:
        return meet(open_store(timeout_s), 0, 1, timeout_s)
    except RuntimeError as error:
        raise StallError(f"waiting {timeout_s:g} s for the launcher's store: {error}") from error


def _gather(store: Store, world_size: int, timeout_s: float) -> StartAttempt:
    number = store.add(f"{KEY_PREFIX}/attempts", 1)
    attempt = _attempt(store, number)
    answered: dict[int, bytes] = {}
    missing = [*range(1, world_size)]
    for _ in range(math.ceil(timeout_s / POLL_KEY_S)):
        for rank in missing:
            _answer(store, rank, number, answered)
        missing = [rank for rank in missing if not attempt.store.check([f"here/{rank}"])]
        if not missing:
            return attempt
        sleep(POLL_KEY_S)
    raise StallError(f"waiting {timeout_s:g} s for all ranks to come together: {listed_ranks(missing)} did not")


def _attempt(store: Store, number: int) -> StartAttempt:
    return StartAttempt(number, PrefixStore(f"{KEY_PREFIX}/{number}", store), store.check([_BEGUN]), store)


def _answer(store: Store, rank: int, number: int, answered: dict[int, bytes]) -> None:
    """Reply to a rank's hello with the attempt's number; again for a new nonce: the last may be an old attempt's."""
    if not store.check([f"{KEY_PREFIX}/hello/{rank}"]):
        return
    nonce = store.get(f"{KEY_PREFIX}/hello/{rank}")
    if answered.get(rank) != nonce:
        store.set(f"{KEY_PREFIX}/welcome/{rank}/{nonce.decode()}", str(number))
        answered[rank] = nonce

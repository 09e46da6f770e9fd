"""The key-value store in which ranks find each other: where it is, who serves it, and at which address it listens.

    torchrun, quintsched run    the launcher serves it, every rank is a client       TORCHELASTIC_USE_AGENT_STORE=True
    srun, mpirun, by hand       rank 0 serves it at MASTER_ADDR:MASTER_PORT

Torch's own way of serving it listens at every address of the machine. Here it listens at one: that of the loopback
interface where all ranks are on this machine, else that of MASTER_ADDR. What is in the store
is text that no reader resolves to anything, and torch refuses keys and values of more than 8 MB.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from time import sleep

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from quintsched.errors import UsageError

from .addresses import LOOPBACK, is_one_machine, listen
from .master import own_address, require_elsewhere

KNOCK_S, ANSWER_S = 0.1, 1.0
"""How long who waits for the store sleeps between two looks, and how long an answer may take."""

HUB = "hub"
"""The launchers' key for where the run's watch listens, and its secret."""
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def require_addresses() -> None:
    """Raise `UsageError` where the environment does not say where the other ranks are."""
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise UsageError(f"{', '.join(missing)} not in the environment; start the ranks with torchrun")


def open_store(timeout_s: float) -> Store:
    """Return the store that the environment names; rank 0 serves it unless the launcher does.

    Raises `RuntimeError`, as torch does, where nobody answers within the timeout, `UsageError` for an address that is
    not to be found, or is not rank 0's.
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
    """Whether the launcher serves the store; then it outlives the ranks, and what they leave in it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def serve(listener: socket.socket, timeout_s: float) -> Store:
    """Serve a store to whoever connects to a listening socket, which it takes over."""
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
    """Return how the keys begin that launchers, and rank 0 for them, write in an attempt, counted by restarts."""
    return f"quintsched/launchers/{attempt}"


def connect_to(host: str, port: int, timeout_s: float) -> Store:
    """Connect to the store that another process serves; raises `RuntimeError` where it does not answer in time."""
    _await_answer(host, port, timeout_s)
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _await_answer(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens at a port; torch would say a screen full of what it tries meanwhile."""
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

"""Connection of a rank to the hub: the launcher's, named in the environment, or one that rank 0 starts.

quintsched run     QUINTSCHED_WATCH=127.0.0.1:41233  QUINTSCHED_WATCH_KEY=…          the launcher's hub
torchrun           rank 0: a socket ─▶ a process that inherits it ─▶ the run's store ─▶ the other ranks
several machines   the same; the launchers find it there too, and report the exits of their ranks to it
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from quintsched.stalls.own_error_or_lost_peer import came_from_handler

from .monitor_sockets import ADDRESS, KEY, FrameError
from .position_in_shared_memory import PositionCell
from .position_publisher import Publisher
from .process_state import HeldTerm
from .rendezvous.network_addresses import LOOPBACK, address_towards, is_one_machine, listen
from .stall_limits import Patience
from .watch_thread import HubCall, Watcher

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_logger = logging.getLogger("quintsched.runtime")

HUB_S = 2.0
"""Timeout of a hub's answer to a launcher, in seconds."""

MOST_WORDS, HOST_LETTERS = 600, 64
"""Maximum length of an error, and of a host name, in the one frame that an unregistered rank may send."""


@dataclass(frozen=True)
class WatchOptions(Patience):
    """Options of a run's watch: stall limits, and the file of the verdict's report."""

    report: str = "stall.json"


def find_watch(rank: int, num_ranks: int, options: WatchOptions, *, host_waits: bool) -> Publisher | None:
    """Return this rank's publisher, connected to the launcher's hub; None where the environment names none."""
    if num_ranks == 1 or ADDRESS not in os.environ:
        return None
    return _publisher(os.environ[ADDRESS], os.environ.get(KEY, ""), rank, options, None, host_waits=host_waits)


def start_watch(
    rank: int,
    num_ranks: int,
    store: Store,
    options: WatchOptions,
    *,
    host_waits: bool,
    tell: Callable[[str], object] = lambda hub: None,
) -> Publisher:
    """Return this rank's publisher, connected to a hub that rank 0 starts; unconnected where that is unreachable.

    All ranks call this. `store` is theirs, and may outlive a connection: its keys contain a count of connections.
    `tell` is called with the hub's address and key on rank 0.
    """
    if num_ranks == 1:
        return Publisher()
    key_in_store = f"hub {(store.add('ranks', 1) - 1) // num_ranks}"
    if rank == 0:
        address, key = _start_hub(num_ranks)
        store.set(key_in_store, f"{address} {key}")
        tell(f"{address} {key}")
    else:
        address, _, key = store.get(key_in_store).decode().partition(" ")
    return _publisher(address, key, rank, options, HeldTerm(), host_waits=host_waits)


def tell_end(hub: str, rank: int, code: int) -> bool:
    """Report a rank's exit, as a `subprocess` return code, to the hub at "host:port key"; return whether it arrived."""
    address, _, key = hub.partition(" ")
    return _tell(address, key, ended=[rank, code])


def tell_refusal(rank: int, words: str, code: int) -> bool:
    """Report to the launcher's hub, if there is one, that a rank cannot even connect; return whether it arrived."""
    while len(json.dumps(words)) > MOST_WORDS:
        words = words[: len(words) * 3 // 4]
    refused = {"refused": rank, "error": words, "code": code, "host": socket.gethostname()[:HOST_LETTERS]}
    return ADDRESS in os.environ and _tell(os.environ[ADDRESS], os.environ.get(KEY, ""), **refused)


def _tell(address: str, key: str, **words: Any) -> bool:
    with suppress(OSError, ValueError, FrameError):
        HubCall(address, key, HUB_S, **words).socket.close()
        return True
    return False


def _publisher(
    address: str, key: str, rank: int, options: WatchOptions, held: HeldTerm | None, *, host_waits: bool
) -> Publisher:
    cell = PositionCell(rank, shared=True)
    try:
        return Publisher(cell, Watcher(address, key, rank, cell, held, host_waits=host_waits, **asdict(options)))
    except (OSError, FrameError) as error:
        if came_from_handler(error):
            raise
        if held is not None:
            held.release()
        _logger.warning(
            "rank %d is not watched, so that a hang is not explained: no hub at %s (%s)", rank, address, error
        )
        return Publisher(cell)


def _start_hub(num_ranks: int) -> tuple[str, str]:
    """Start a hub in a process of its own, and return its address and key."""
    key = secrets.token_hex(16)
    with listen(_own_host()) as listening:
        host, port = listening.getsockname()[:2]
        listening.set_inheritable(True)
        command = [
            sys.executable,
            "-m",
            "quintsched.runtime.watch.hang_monitor",
            str(listening.fileno()),
            str(num_ranks),
            str(os.getpid()),
        ]
        os.posix_spawn(sys.executable, command, os.environ | {KEY: key}, setsid=True)
    return f"{host}:{port}", key


def _own_host() -> str:
    """Return the address at which ranks reach this one: loopback on a single machine, else the store's interface."""
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    if is_one_machine() or master == "localhost" or master.startswith("127."):
        return LOOPBACK
    return address_towards(master) or LOOPBACK

"""Rank processes of one attempt on this machine: started, waited for, asked to stop, killed.

    launcher ── fork server ──▶ rank 0, rank 1, …     each an OS process group of its own, with its children
        ▲ a rank's end, a signal: the launcher wakes
        └── all ended with 0 │ one failed: the others are killed │ asked to stop: the ranks are asked

Ranks get the environment variables that torchrun sets, so that nothing in them depends on the launcher.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quintsched.errors import counted
from quintsched.files.terminal_progress import progress

from ..watch.rendezvous.fork_server import ForkedRank, ForkServer
from .stop_signals import STOPPING, handled

REAP_S = 10.0
"""Time that a killed process may take to end: the kernel may still write for it."""


@dataclass(frozen=True)
class MachineRanks:
    """Place of this machine's ranks among those of the run.

    Attributes:
        host, port: the store of the run.
        num_ranks: number of ranks of this machine; the same on every one.
        node, num_nodes: number of this machine, and how many there are.
    """

    host: str
    port: int
    num_ranks: int
    node: int = 0
    num_nodes: int = 1

    def environment(self, local_rank: int, attempt: int, restarts: int) -> dict[str, str]:
        """Return the environment variables of a rank's process, by torchrun's names."""
        rank, world_size = self.node * self.num_ranks + local_rank, self.num_nodes * self.num_ranks
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": f"{self.host}:{self.port}",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


class RankProcesses:
    """Processes of one attempt; a context manager, after which none is left.

    Args:
        place: where they are in the run.
        server: what forks them.
        arguments: those of the module that each of them runs.
        attempt, restarts: number of earlier starts of the run, and of allowed restarts.
    """

    def __init__(
        self, place: MachineRanks, server: ForkServer, arguments: Sequence[str], attempt: int = 0, restarts: int = 0
    ) -> None:
        self._place, self._server, self._arguments = place, server, arguments
        self._attempt, self._restarts = attempt, restarts
        self._running: dict[int, ForkedRank] = {}

    def __enter__(self) -> RankProcesses:
        try:
            with progress(f"starting {counted(self._place.num_ranks, 'rank')}"):
                for local_rank in range(self._place.num_ranks):
                    self._start(local_rank)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _start(self, local_rank: int) -> None:
        said = self._place.environment(local_rank, self._attempt, self._restarts)
        self._running[int(said["RANK"])] = self._server.start_rank(said, self._arguments)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that run, by rank."""
        return {rank: process.pid for rank, process in self._running.items()}

    def ended(self) -> dict[int, int]:
        """Return the exit codes, by rank, of those that have ended since the last call; -n: by signal n."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        found = {rank: code for rank, code in codes.items() if code is not None}
        for rank in found:
            _kill_group(self._running.pop(rank))
        return found

    def ask_to_stop(self) -> None:
        """Ask all ranks to stop after the step in progress."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all ranks at once, with their children; also those suspended by a signal."""
        for process in self._running.values():
            _kill_group(process)
        for process in self._running.values():
            process.wait(REAP_S)
        self._running.clear()


def _kill_group(process: ForkedRank) -> None:
    for kill in (os.killpg, os.kill):  # a rank that was just forked may have no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process.pid, signal.SIGKILL)


class Wakes:
    """Wake-up events of the launcher: signals that ask for a stop, and ends of ranks. For the main thread."""

    def __init__(self, reader: socket.socket, server: ForkServer) -> None:
        self._reader, self._server = reader, server

    def wait_signals(self, timeout_s: float) -> list[int]:
        """Wait for the next signal, at most so long; return the signals that ask for a stop, in their order."""
        select.select([self._reader.fileno(), self._server.fileno()], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(4096) if number in STOPPING]
        return []


@contextlib.contextmanager
def taking_signals(server: ForkServer) -> Iterator[Wakes]:
    """Handle signals within a context."""
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            with handled(lambda *_: None):  # the number is in the socket
                yield Wakes(reader, server)
        finally:
            signal.set_wakeup_fd(fd)

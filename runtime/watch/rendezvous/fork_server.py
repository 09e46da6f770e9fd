"""Fork server: a process that has imported the runtime once, and forks this machine's ranks from itself.

    launcher ── {"environment": …, "arguments": […]} ──▶ fork server ──fork──▶ rank 0, rank 1, …
        ◀── {"pid": 4711}, {"pid": 4711, "code": -9} ──

Imports of torch and of the runtime take longer than all else at the start of a small run. Ranks that are forked have
them at once, in memory that they share. The server has one thread, uses no device and runs none of the user's code.

It ends with the launcher, and ranks end with it, whatever ends them (`end_with_parent`).
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ..torch_free_clock import now_s
from .end_with_parent import command_of, end_with

DEFAULTS: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a library that asks for a GPU as it is imported must not open the driver
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
"""Environment variables of ranks and of their server, unless the user has set them.

A process that has opened CUDA's driver cannot hand it on to those that it forks.
"""

LOST = -9
"""Exit code of ranks whose server is gone: the kernel kills them."""


class ForkedRank:
    """A rank's process, with the methods of `Popen` that a launcher needs."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid

    def poll(self) -> int | None:
        """Return the exit code, -n for signal n; None while it runs."""
        self._server.read_messages(0.0)
        return self._server.codes.get(self.pid, LOST if self._server.is_gone else None)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, at most so long."""
        until = now_s() + timeout_s
        while self.poll() is None and (left := until - now_s()) > 0:
            self._server.read_messages(left)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The launcher's side; a context manager, after which the server has ended.

    Args:
        module: what each rank runs, as `python -m` does.
        preloaded: modules that the server imports before.
        blocked: signals that ranks find blocked, so that they have them once they can handle them.

    Attributes:
        codes: exit codes of ranks that have ended, by process id.
        is_gone: whether the server has ended.
    """

    def __init__(self, module: str, preloaded: Sequence[str] = (), blocked: Collection[int] = ()) -> None:
        self._channel, theirs = socket.socketpair()
        self._rest, self._known, self.is_gone = b"", dict(os.environ), False
        self.codes, self._pids = dict[int, int](), list[int]()
        command = command_of(__spec__.name, str(theirs.fileno()), module, *preloaded)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, env={**DEFAULTS, **os.environ}, pass_fds=[theirs.fileno()], process_group=0
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def fileno(self) -> int:
        """Return what is readable when a rank has ended."""
        return self._channel.fileno()

    def start_rank(self, environment: Mapping[str, str], arguments: Sequence[str]) -> ForkedRank:
        """Start a rank, once the server has imported all, with environment variables beside those of the launcher."""
        changed = {name: value for name, value in os.environ.items() if self._known.get(name) != value}
        request = {"environment": {**changed, **environment}, "arguments": [*arguments]}
        with suppress(OSError):
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        while not self._pids and not self.is_gone:
            self.read_messages(None)
        return ForkedRank(self, self._pids.pop() if self._pids else self._process.pid)

    def read_messages(self, timeout_s: float | None) -> None:
        """Take what the server says, waiting for it so long."""
        if self.is_gone or not select.select([self._channel], [], [], timeout_s)[0]:
            return
        data = b""
        with suppress(OSError):
            data = self._channel.recv(1 << 16)
        self.is_gone = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "code" in message:
                self.codes[message["pid"]] = message["code"]
            else:
                self._pids.append(message["pid"])


def main(arguments: Sequence[str]) -> None:
    """Import what is named, fork a rank for each request, and report its end; in a rank, run its module."""
    number, module, *preloaded = arguments
    gc.disable()
    for name in preloaded:
        with suppress(Exception):  # a rank meets it again, and says so
            import_module(name)
    gc.freeze()  # pages that no collection writes to stay shared
    with socket.socket(fileno=int(number)) as channel:
        asked = _serve(channel)
    sys.argv = [module, *asked["arguments"]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(channel: socket.socket) -> Any:
    """Fork until the launcher is gone; return a request in the process that is to fulfil it."""
    wake, waking = socket.socketpair()
    for end in (wake, waking):
        end.setblocking(False)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    rest, server = b"", os.getpid()
    while True:
        for ready in select.select([channel, wake], [], [])[0]:
            if ready is wake:
                wake.recv(4096)
                _report_ends(channel)
                continue
            data = channel.recv(1 << 16)
            if not data:
                os._exit(0)
            *requests, rest = (rest + data).split(b"\n")
            for request in requests:
                pid = os.fork()
                if not pid:
                    for end in (wake, waking):
                        end.close()
                    return _as_rank(json.loads(request), server)
                _say(channel, pid=pid)


def _report_ends(channel: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _say(channel, pid=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _say(channel: socket.socket, **message: int) -> None:
    with suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


def _as_rank(request: Any, server: int) -> Any:
    """Make this process, just forked, what it would be if it had been started by itself."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with(server)
    os.environ.update(request["environment"])
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")  # what `top` and `ps -o comm` show
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    gc.enable()
    return request


if __name__ == "__main__":
    main(sys.argv[1:])

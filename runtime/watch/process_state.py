"""State and exit of processes on this machine, as the kernel reports them; nothing is known of other machines.

/proc/PID/stat     state R, S, D: runs, sleeps, waits for a disk    T: stopped    Z: ended, exit code readable
boot_id            identifies the machine: process ids are comparable where it is the same
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from weakref import WeakMethod

from quintsched.stalls.last_reported_rank_states import Fate

from .rendezvous.end_with_parent import has_launcher

_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Indices of these fields in /proc/PID/stat, counted from the state, which is the third field."""


class ProcessId(NamedTuple):
    """A process: its id, and its start time in the kernel's ticks (ids are reused); 0: not known."""

    pid: int
    started: int


NO_PROCESS = ProcessId(0, 0)


class ProcessState(NamedTuple):
    """State of a process; `exit_code` is a wait status, None where it is not available."""

    state: str
    exit_code: int | None


def process_of(pid: int) -> ProcessId:
    """Return a process of this machine by its id."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[_STARTED]) if fields else 0)


def launcher() -> ProcessId:
    """Return the launcher process that this rank ends with; `NO_PROCESS` where there is none, or it is unknown."""
    return process_of(os.getppid()) if has_launcher() else NO_PROCESS


def machine() -> str:
    """Return an id of this machine, boot and pid namespace, equal for processes that see each other; "": unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def look_at(process: ProcessId) -> ProcessState | None:
    """Return the state of a process of this machine; None: it does not exist any more."""
    fields = _stat(process.pid)
    if fields is None or (process.started and int(fields[_STARTED]) != process.started):
        return None
    ended = fields[_STATE] in "ZX"
    return ProcessState(fields[_STATE], int(fields[_EXIT_CODE]) if ended and len(fields) > _EXIT_CODE else None)


def fate_of(state: ProcessState | None) -> Fate | None:
    """Return the fate of a process by its state; None: it runs."""
    if state is None:
        return Fate("gone")
    if state.state in "ZX":
        return Fate("gone") if state.exit_code is None else fate_of_code(os.waitstatus_to_exitcode(state.exit_code))
    return Fate("stopped", signal.SIGSTOP) if state.state == "T" else None


def fate_of_code(code: int) -> Fate:
    """Return the fate for an exit code as `subprocess` returns it: minus the signal's number for a signal."""
    return Fate("signal", -code) if code < 0 else Fate("exit", code)


def _stat(pid: int) -> list[str] | None:
    """Return the fields from the state on; the process name before it may contain any characters."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()


class HeldTerm:
    """A SIGTERM that is held back, unless another handler is installed; created in the main thread.

    Attributes:
        reader: gets a byte per signal, even while the main thread hangs in a library; None: nothing is held.
    """

    def __init__(self) -> None:
        self.reader: socket.socket | None = None
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, self._writer = socket.socketpair()
        for end in (reader, self._writer):
            end.setblocking(False)
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # user code's, which keeps getting them
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, _note)
        self.reader = reader
        run_in_children(self.release)

    def has_come(self) -> bool:
        """Whether a SIGTERM has come since the last call, and no other handler is installed by now."""
        if self.reader is None:
            return False
        with suppress(OSError):
            return signal.SIGTERM in self.reader.recv(4096) and signal.getsignal(signal.SIGTERM) is _note
        return False

    def release(self) -> None:
        """Let SIGTERM end this process again; does nothing outside the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.reader is not None and is_main and signal.getsignal(signal.SIGTERM) is _note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            self.reader = None


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal number is written to the reader."""


def run_in_children(method: Callable[[], object]) -> None:
    """Run a method in forked child processes, as long as its object is alive."""
    known = WeakMethod(method)

    def run() -> None:
        found = known()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=run)

"""What became of a process, as the kernel says where it runs on this machine; nothing of it elsewhere.

/proc/PID/stat     state R, S, D: it runs, sleeps, waits for a disk    T: stopped    Z: ended, exit code readable
boot_id            whether another process is on this machine: its number means the same there as here
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

from quintsched.stalls.states import Fate

from .rendezvous.parent import has_launcher

_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Where these are in /proc/PID/stat, counted from the state, which is the third."""


class ProcessId(NamedTuple):
    """A process: its number, and when it started, in the kernel's ticks (numbers are given again); 0: not known."""

    pid: int
    started: int


NOBODY = ProcessId(0, 0)


class ProcessState(NamedTuple):
    """What the kernel says of a process; `exit_code` as `wait` has it, None where that is not said."""

    state: str
    exit_code: int | None


def process_of(pid: int) -> ProcessId:
    """Return a process of this machine by its number."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[_STARTED]) if fields else 0)


def launcher() -> ProcessId:
    """Return the process that this one ends with as a rank; `NOBODY` where there is none, or nothing is known of it."""
    return process_of(os.getppid()) if has_launcher() else NOBODY


def machine() -> str:
    """Return what only this machine has since it was started, and only processes that see each other; or nothing."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def look_at(process: ProcessId) -> ProcessState | None:
    """Return the state of a process of this machine; None: there is none any more."""
    fields = _stat(process.pid)
    if fields is None or (process.started and int(fields[_STARTED]) != process.started):
        return None
    ended = fields[_STATE] in "ZX"
    return ProcessState(fields[_STATE], int(fields[_EXIT_CODE]) if ended and len(fields) > _EXIT_CODE else None)


def fate_of(state: ProcessState | None) -> Fate | None:
    """Return what became of a process by what the kernel says; None: it runs."""
    if state is None:
        return Fate("gone")
    if state.state in "ZX":
        return Fate("gone") if state.exit_code is None else fate_of_code(os.waitstatus_to_exitcode(state.exit_code))
    return Fate("stopped", signal.SIGSTOP) if state.state == "T" else None


def fate_of_code(code: int) -> Fate:
    """Return the fate that an exit code says as `subprocess` has it: minus the signal, where one ended the process."""
    return Fate("signal", -code) if code < 0 else Fate("exit", code)


def _stat(pid: int) -> list[str] | None:
    """Return the fields from the state on; what is before may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 1 :].split()


class HeldTerm:
    """A SIGTERM that does not end this process at once, where nobody else handles it; made in the main thread.

    Attributes:
        reader: gets a byte for each signal, also while the main thread hangs in a library; None: nothing is held.
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
        if before != -1:  # somebody else's, who goes on getting them
            signal.set_wakeup_fd(before)
            return
        signal.signal(signal.SIGTERM, _note)
        self.reader = reader
        run_in_children(self.release)

    def has_come(self) -> bool:
        """Whether a SIGTERM has come since the last call that nobody else handles by now."""
        if self.reader is None:
            return False
        with suppress(OSError):
            return signal.SIGTERM in self.reader.recv(4096) and signal.getsignal(signal.SIGTERM) is _note
        return False

    def release(self) -> None:
        """Let a SIGTERM end this process again; does nothing outside the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if self.reader is not None and is_main and signal.getsignal(signal.SIGTERM) is _note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            self.reader = None


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number is with the reader."""


def run_in_children(method: Callable[[], object]) -> None:
    """Run a method in processes that are forked off, as long as its object lives."""
    known = WeakMethod(method)

    def run() -> None:
        found = known()
        if found is not None:
            found()

    os.register_at_fork(after_in_child=run)

"""What became of a process, as the kernel says where it runs on this machine; nothing of it elsewhere.

/proc/PID/stat     state R, S, D: it runs, sleeps, waits for a disk    T: stopped    Z: ended, exit code readable
boot_id            whether another process is on this machine: its number means the same there as here
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from quintsched.stalls.states import Fate

_STATE, _STARTED, _EXIT_CODE = 0, 19, 49
"""Where these are in /proc/PID/stat, counted from the state, which is the third."""


class ProcessId(NamedTuple):
    """A process: its number, and when it started, in the kernel's ticks (numbers are given again); 0: not known."""

    pid: int
    started: int


class ProcessState(NamedTuple):
    """What the kernel says of a process; `exit_code` as `wait` has it, None where that is not said."""

    state: str
    exit_code: int | None


def this_process() -> ProcessId:
    """Return this process."""
    fields = _stat(os.getpid())
    return ProcessId(os.getpid(), int(fields[_STARTED]) if fields else 0)


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
        return Fate("gone") if state.exit_code is None else fate_of_status(state.exit_code)
    return Fate("stopped", signal.SIGSTOP) if state.state == "T" else None


def fate_of_status(status: int) -> Fate:
    """Return the fate that a status of `wait` says."""
    return fate_of_code(os.waitstatus_to_exitcode(status))


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

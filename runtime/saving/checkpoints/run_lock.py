"""The lock of a folder of checkpoints: one run at a time saves there.

    DIR/run.lock     {"launch": "5e0c…", "host": "node7", "pid": 4711}     locked by the first rank as long as it lives

The system lets go of the lock with the process that holds it, however that ends, so that what a dead run left locks
nobody out; the file stays, and what is in it serves messages only, and to see that all ranks look at one folder.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from pathlib import Path
from time import sleep

from quintsched.errors import InputError, UsageError
from quintsched.files.plain import read_plain
from quintsched.files.strictjson import parse_strict, shorten

from ...comm.clock import now_s

LOCK = "run.lock"
MOST_BYTES = 4096
_POLL_S = 0.05
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What file systems say that have no locks: there, nobody is locked out; nor on Windows, which has none like these."""
_FLAGS = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


class RunLock:
    """A lock that is held; `release` lets go of it, and so does the end of the process."""

    def __init__(self, opened: int) -> None:
        self._opened: int | None = opened
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Let go of the lock."""
        if self._opened is not None:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(self._opened, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        """Close the file; in a forked child, which would hold the lock beyond the end of its parent, as well."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


OWN_FOLDER = "end that one first, or give this one a checkpoint.dir of its own"


def lock_folder(directory: Path, launch: str, patience_s: float, instead: str = OWN_FOLDER) -> RunLock:
    """Lock a folder for a launch; wait at most `patience_s` for another one that is about to end.

    `instead` says what to do where that one does not end.
    Raises `UsageError` where another run has it, `OSError` where there can be no lock.
    """
    path = directory / LOCK
    opened = os.open(path, _FLAGS, 0o666)
    try:
        deadline = now_s() + patience_s
        while not _try_lock(opened):
            if now_s() > deadline:
                raise UsageError(f"{directory}: another run saves its checkpoints there{_holder(path)}; {instead}")
            sleep(_POLL_S)
        os.ftruncate(opened, 0)
        os.write(opened, json.dumps({"launch": launch, "host": socket.gethostname(), "pid": os.getpid()}).encode())
    except BaseException:
        os.close(opened)
        raise
    return RunLock(opened)


def sees_lock(directory: Path, launch: str, patience_s: float) -> bool:
    """Return whether the lock of a launch is in a folder, or comes to be seen there within `patience_s`."""
    deadline = now_s() + patience_s
    while _read(directory / LOCK).get("launch") != launch:
        if now_s() > deadline:
            return False
        sleep(_POLL_S)
    return True


def _try_lock(opened: int) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _WITHOUT_LOCKS
    return True


def _holder(path: Path) -> str:
    """Return " (process 4711 on node7)", as far as that is known."""
    found = _read(path)
    pid, host = found.get("pid"), found.get("host")
    return f" (process {pid} on {shorten(host)})" if isinstance(pid, int) and isinstance(host, str) else ""


def _read(path: Path) -> dict[str, object]:
    try:
        found = parse_strict(read_plain(path, "the lock", MOST_BYTES))
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}

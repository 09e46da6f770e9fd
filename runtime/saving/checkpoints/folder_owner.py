"""Ownership of a checkpoint folder: one run at a time, and never steps of two runs mixed.

    what is in DIR        "new"              "resume"                           "fresh"
    empty                 begins             begins                             begins
    steps of one run      refused            goes on as that run                moves them to DIR/run-<id>, begins
    steps of two runs     refused            refused: ambiguous                 moves each to its own folder, begins
    an active run         refused in every case

The first rank looks and decides, and passes the decision to all ranks.

Lock of a checkpoint folder: one run at a time saves there.

    DIR/run.lock     {"launch": "5e0c…", "host": "node7", "pid": 4711}     locked by the first rank as long as it lives

The operating system releases the lock with the process that holds it, however that ends, so a dead run blocks no other
one. The file stays; its content serves messages only, and the check that all ranks see the same folder.

Commands that write other files than a run's steps (reshard, export) never write into that run's folder:

empty, or no steps      taken, and locked as by a run until all is written
steps of a run          refused, no file is touched
an active run           the same, also before its first step
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from typing import NamedTuple

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import writing
from quintsched.files.read_plain_files_only import read_plain
from quintsched.files.strictjson import parse_strict, shorten

from ...comm.clocks import now_s
from ...comm.host_collectives import ControlGroup
from ...settings.allowed_setting_values import Start
from ..write_tensors import WHAT
from .atomic_run_folder import LOCK, OWN_FOLDER, RunFolder, SavedStep
from .bucket_folder import BucketFolder, BucketLock, Place, open_place
from .manifest import MANIFEST, read_manifest

COSTS = "block_costs.json"
"""File of measured block costs, which a resumed run needs; see `save_and_load_checkpoints`."""

LOCK_PATIENCE_S = 5.0
"""Time that a run waits for a previous one to end, and for a shared file system to show the lock file."""


class OpenRun(NamedTuple):
    """Folder owned by a run; `run` is its id, 16 hexadecimal digits, `words` tell what was moved away."""

    folder: RunFolder
    run: str
    words: str
    lock: RunLock | BucketLock | None
    """Lock of the folder, on the first rank."""


def open_run(place: Place, start: Start, everyone: ControlGroup, beside: Sequence[str] = ()) -> OpenRun:
    """Take a folder, or a place in a bucket, for a run; all ranks call this.

    `beside` names files that are copied along with an old run.

    Raises, on all ranks alike, `UsageError` where another run is active or was saved there, or where it cannot be
    written, `InputError` where it cannot be read.
    """
    launch = everyone.share_bytes(os.urandom(8).hex().encode() if everyone.is_first else b"")[0].decode()
    folder = everyone.together(lambda: open_place(place, launch))
    lock: RunLock | BucketLock | None = None
    try:
        lock = everyone.together(lambda: _lock(folder, launch, OWN_FOLDER) if everyone.is_first else None)
        everyone.together(lambda: _require_common(folder, launch))
        run, words = everyone.together(lambda: _begin(folder, start, launch, beside) if everyone.is_first else ("", ""))
        run, _, words = everyone.share_bytes(f"{run}\n{words}".encode())[0].decode().partition("\n")
    except BaseException:
        if lock is not None:
            lock.release()
        folder.close()
        raise
    return OpenRun(folder, run, words, lock)


def _lock(folder: RunFolder, launch: str, instead: str, patience_s: float = LOCK_PATIENCE_S) -> RunLock | BucketLock:
    if isinstance(folder, BucketFolder):
        return folder.lock(instead)
    with writing(folder.directory, WHAT):
        folder.directory.mkdir(parents=True, exist_ok=True)
        return lock_folder(folder.directory, launch, patience_s, instead)


def _require_common(folder: RunFolder, launch: str) -> None:
    seen = folder.sees_lock if isinstance(folder, BucketFolder) else partial(sees_lock, folder.directory)
    if not seen(launch, LOCK_PATIENCE_S):
        raise UsageError(
            f"{folder.where}: not all ranks see the same folder there; checkpoint.dir has to be in a file system that "
            "all hosts of the run share"
        )


def _begin(folder: RunFolder, start: Start, launch: str, beside: Sequence[str]) -> tuple[str, str]:
    """Return the id of the run that begins or goes on, and what was moved away, in words."""
    steps = folder.steps()
    if not steps:
        return launch, ""
    runs = {saved.folder: run for saved in steps if (run := _run_of(saved)) is not None}
    if start == "fresh":
        with writing(folder.where, WHAT):
            homes = folder.move_to_old_runs(runs, beside)
        return launch, f"the run that was saved in {folder.where} is now in {', '.join(map(str, homes))}"
    if start == "new":
        raise UsageError(
            f"{folder.where}: an earlier run was saved there, up to step {steps[0].step}; continue it (--resume, "
            'in Python fit("resume")), move it away (--fresh, fit("fresh")), or give this run a checkpoint.dir of its '
            "own"
        )
    run = _only_run(folder.where, steps, runs) or launch
    folder.clear()
    return run, ""


def _only_run(where: str, steps: Sequence[SavedStep], runs: dict[Path, str]) -> str | None:
    """Return the id of the run that saved these steps, or None; raises `UsageError` for steps of several runs."""
    found = sorted(set(runs.values()))
    if len(found) < 2:
        return found[0] if found else None
    of_run = (", ".join(str(one.step) for one in reversed(steps) if runs.get(one.folder) == run) for run in found)
    raise UsageError(
        f"{where}: the steps there are of {len(found)} runs ({'; '.join(of_run)}); move all but one of these away"
    )


def _run_of(saved: SavedStep) -> str | None:
    try:
        return read_manifest(saved.manifest, saved.step).run
    except InputError:
        return None


MOST_OWNER_BYTES = 4096
_POLL_S = 0.05
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Error codes of file systems without locks: no run is locked out there; nor on Windows, which has no `flock`."""
_FLAGS = os.O_RDWR | os.O_CREAT | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


class RunLock:
    """Lock that is held until `release`, or until the process ends."""

    def __init__(self, opened: int) -> None:
        self._opened: int | None = opened
        if sys.platform != "win32":
            os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Release the lock."""
        if self._opened is not None:
            if sys.platform != "win32":
                import fcntl

                fcntl.flock(self._opened, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        """Close the file; also in a forked child, which would keep the lock after its parent's end."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


def lock_folder(directory: Path, launch: str, patience_s: float, instead: str = OWN_FOLDER) -> RunLock:
    """Lock a folder for a launch; wait at most `patience_s` for a previous one to end.

    `instead` advises, in the message, what to do where it does not end.
    Raises `UsageError` where another run holds the lock, `OSError` where the file cannot be locked.
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
    """Return whether a launch's lock file is visible in a folder, waiting at most `patience_s` for it."""
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
        found = parse_strict(read_plain(path, "the lock", MOST_OWNER_BYTES))
    except InputError:
        return {}
    return found if isinstance(found, dict) else {}


ELSEWHERE = "give -o another folder"


@contextmanager
def new_run_folder(output: Place) -> Iterator[RunFolder]:
    """Take a place for a new run within a context; raises `UsageError` where a run saves or has saved there."""
    launch = os.urandom(8).hex()
    folder = open_place(output, launch)
    require_unused(folder)
    lock = _lock(folder, launch, ELSEWHERE, 0.0)
    try:
        require_unused(folder)
        yield folder
    finally:
        lock.release()
        folder.close()


def require_no_run(output: Path) -> None:
    """Raise `UsageError` for a folder that a run saves in, or has saved in, or that is one of its steps."""
    require_unused(RunFolder(output, ""))
    require_no_step(output)
    if os.path.lexists(output / LOCK):
        with writing(output, WHAT):
            lock_folder(output, os.urandom(8).hex(), 0.0, ELSEWHERE).release()


def require_no_step(folder: Path) -> None:
    """Raise `UsageError` for a folder that is a step of a run."""
    if os.path.lexists(folder / MANIFEST):
        raise UsageError(f"{folder}: it is a checkpoint of a run; {ELSEWHERE}")


def require_unused(folder: RunFolder) -> None:
    """Raise `UsageError` for a folder with steps of a run."""
    steps = folder.steps()
    if steps:
        raise UsageError(f"{folder.where}: a run has saved there, up to step {steps[0].step}; {ELSEWHERE}")

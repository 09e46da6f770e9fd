"""End of a run: by its log, the verdict of its stall, or the silence of a log that nobody writes any longer."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quintsched.trace.training_log import TrainingLog

STALL = "stall.json"
"""The file beside a log in which a run that stalled or lost a rank leaves its verdict."""

QUIET_S = 30.0
"""Silence of a log that no process holds open, after which its run has been killed; longer where records are rare."""
QUIET_RECORDS = 4
KILLED = "the log has no end: the run was killed, or writes it no longer"


def summary_of(log: TrainingLog) -> dict[str, Any]:
    """Return a log's summary; for a run without an end, the verdict of a stall after its log, or that it was killed."""
    from quintsched.stalls.stall_report import StallReport

    found, stall = log.summary(), log.path.parent / STALL
    if found["ended"] is None and stall.is_file() and stall.stat().st_mtime >= log.path.stat().st_mtime:
        found["ended"] = StallReport.load(stall).words()
    elif found["ended"] is None and is_abandoned(log):
        found["ended"] = KILLED
    return found


def is_abandoned(log: TrainingLog) -> bool:
    """Return whether a log has been silent for long, and no process has it open to write."""
    steps = [record for record in log.records if record["event"] == "step"][-2:]
    between_s = (steps[-1]["step"] - steps[0]["step"]) * steps[-1].get("step_s", 0.0) if steps else 0.0
    silent_s = time.time() - log.path.stat().st_mtime
    return silent_s > max(QUIET_S, QUIET_RECORDS * between_s) and not _is_written(log.path)


def _is_written(path: Path) -> bool:
    """Whether a run holds the lock of its log; true where that cannot be known."""
    if sys.platform == "win32":
        return True
    import errno
    import fcntl

    with path.open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN, errno.ENOLCK, errno.ENOTSUP)
    return False

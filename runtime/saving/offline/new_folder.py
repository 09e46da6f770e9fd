"""Where something is written that is not a step of the run which saves there: never into that run's folder.

nothing, or no steps    taken, and locked as by a run until all is written
steps of a run          refused, nothing is touched
a run that lives        the same, also before its first step
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintsched.errors import UsageError
from quintsched.files.atomic import writing

from ..checkpoints.manifest import MANIFEST
from ..checkpoints.run_folder import RunFolder, saved_steps
from ..checkpoints.run_lock import LOCK, lock_folder
from ..write_tensors import WHAT

ELSEWHERE = "give -o another folder"


@contextmanager
def new_run_folder(output: Path) -> Iterator[RunFolder]:
    """Take possession of a folder for a new run; raises `UsageError` where a run saves or has saved there."""
    launch = os.urandom(8).hex()
    require_unused(output)
    with writing(output, WHAT):
        output.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(output, launch, 0.0, ELSEWHERE)
    try:
        require_unused(output)
        yield RunFolder(output, launch)
    finally:
        lock.release()


def require_no_run(output: Path) -> None:
    """Raise `UsageError` for a folder that a run saves in, or has saved in, or that is one of its steps."""
    require_unused(output)
    require_no_step(output)
    if os.path.lexists(output / LOCK):
        with writing(output, WHAT):
            lock_folder(output, os.urandom(8).hex(), 0.0, ELSEWHERE).release()


def require_no_step(folder: Path) -> None:
    """Raise `UsageError` for a folder that is a step of a run."""
    if os.path.lexists(folder / MANIFEST):
        raise UsageError(f"{folder}: it is a checkpoint of a run; {ELSEWHERE}")


def require_unused(output: Path) -> None:
    """Raise `UsageError` for a folder that has steps of a run."""
    steps = saved_steps(output)
    if steps:
        raise UsageError(f"{output}: a run has saved there, up to step {steps[0].step}; {ELSEWHERE}")

"""How a run takes possession of the folder of its checkpoints: one run at a time, and never two runs mixed.

    what is in DIR        "new"              "resume"                           "fresh"
    nothing               begins             begins                             begins
    steps of one run      refused            goes on as that run                moves them to DIR/run-<id>, begins
    steps of two runs     refused            refused: which one is not said     moves each to its own folder, begins
    a run that lives      refused in every case

The first rank looks and decides, and all ranks learn the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import writing

from ...comm.control import ControlGroup
from ...settings.run_settings import Start
from ..write_tensors import WHAT
from .manifest import read_manifest
from .run_folder import RunFolder, SavedStep, saved_steps
from .run_lock import RunLock, lock_folder, sees_lock

COSTS = "block_costs.json"
"""The file of what blocks cost, which a run that is resumed needs; see `job_checkpoints`."""

LOCK_PATIENCE_S = 5.0
"""How long a run waits for another one that is about to end, and for a file system to show what was written."""


class OpenRun(NamedTuple):
    """A folder that a run has to itself; `run` is its id, 16 hexadecimal digits, `words` say what was moved away."""

    folder: RunFolder
    run: str
    words: str
    lock: RunLock | None
    """On the first rank, what keeps others out."""


def open_run(directory: Path, start: Start, everyone: ControlGroup, beside: Sequence[str] = ()) -> OpenRun:
    """Take possession of a folder; all ranks call this. `beside` are files that an old run takes with it, as copies.

    Raises, on all ranks alike, `UsageError` where another run lives or was saved there, or where it cannot be written,
    `InputError` where it cannot be read.
    """
    launch = everyone.share_bytes(os.urandom(8).hex().encode() if everyone.is_first else b"")[0].decode()
    folder = RunFolder(directory, launch)
    lock = everyone.together(lambda: _lock(directory, launch) if everyone.is_first else None)
    try:
        everyone.together(lambda: _require_common(directory, launch))
        run, words = everyone.together(lambda: _begin(folder, start, launch, beside) if everyone.is_first else ("", ""))
        run, _, words = everyone.share_bytes(f"{run}\n{words}".encode())[0].decode().partition("\n")
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return OpenRun(folder, run, words, lock)


def _lock(directory: Path, launch: str) -> RunLock:
    with writing(directory, WHAT):
        directory.mkdir(parents=True, exist_ok=True)
        return lock_folder(directory, launch, LOCK_PATIENCE_S)


def _require_common(directory: Path, launch: str) -> None:
    if not sees_lock(directory, launch, LOCK_PATIENCE_S):
        raise UsageError(
            f"{directory}: not all ranks see the same folder there; checkpoint.dir has to be in a file system that all "
            "hosts of the run share"
        )


def _begin(folder: RunFolder, start: Start, launch: str, beside: Sequence[str]) -> tuple[str, str]:
    """Return the id of the run that begins or goes on, and what was moved away, in words."""
    steps = saved_steps(folder.directory)
    if not steps:
        return launch, ""
    runs = {saved.folder: run for saved in steps if (run := _run_of(saved)) is not None}
    if start == "fresh":
        with writing(folder.directory, WHAT):
            homes = folder.move_to_old_runs(runs, beside)
        return launch, f"the run that was saved in {folder.directory} is now in {', '.join(map(str, homes))}"
    if start == "new":
        raise UsageError(
            f"{folder.directory}: an earlier run was saved there, up to step {steps[0].step}; go on with it "
            "(--resume), move it away (--fresh), or give this run a checkpoint.dir of its own"
        )
    run = _only_run(folder.directory, steps, runs) or launch
    folder.clear()
    return run, ""


def _only_run(directory: Path, steps: Sequence[SavedStep], runs: dict[Path, str]) -> str | None:
    """Return the id of the run that the steps are of, or None; raises `UsageError` where they are of several."""
    found = sorted(set(runs.values()))
    if len(found) < 2:
        return found[0] if found else None
    of_run = (", ".join(str(one.step) for one in reversed(steps) if runs.get(one.folder) == run) for run in found)
    raise UsageError(
        f"{directory}: the steps there are of {len(found)} runs ({'; '.join(of_run)}); move all but one of these away"
    )


def _run_of(saved: SavedStep) -> str | None:
    try:
        return read_manifest(saved.manifest, saved.step).run
    except InputError:
        return None

"""Folder of a run's checkpoints: steps are added, replaced and removed by renaming, so that none is ever partial.

    DIR/step-00000120/                 a checkpoint: its files and manifest.json
    DIR/step-00000100/
    DIR/run.lock                       held while a run saves here (`folder_owner`)
    DIR/plan.json                      the plan of the latest run

    DIR/.saving-<launch>-<n>/          a save under way, or a killed one ─▶ renamed when all of it is on disk
    DIR/.removing-<launch>-<n>/        a checkpoint being removed: renamed first, so that it is never read when partial
    DIR/step-00000120.replaced/        the same step once more, while a new one takes its place; both are whole
    DIR/run-<id>/                      where `--fresh` moves the steps of an earlier run
    DIR/set-aside-<launch>/            later steps than the one that a run resumed from, as it saves its first step

Names of what a kill leaves behind begin with a dot; the next save removes it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quintsched.errors import InputError
from quintsched.files.atomic import sync_directory, write_whole, writing
from quintsched.files.folders import remove_all, take_place
from quintsched.files.read_plain_files_only import read_plain, reading

from ..write_tensors import WHAT
from .manifest import MANIFEST

_logger = logging.getLogger("quintsched.runtime")
_STEP = re.compile(r"step-([0-9]{8,18})(\.replaced)?")
LEFTOVER = re.compile(r"\.(saving|removing)-[0-9a-f]{16}-[0-9]+(\.saving|\.replaced)?")

Result = TypeVar("Result")
LOCK = "run.lock"
"""Name of the file that says which run writes to a folder."""
OWN_FOLDER = "end that one first, or give this one a checkpoint.dir of its own"
"""Advice where another run saves in a folder."""


@dataclass(frozen=True, order=True)
class SavedStep:
    """A checkpoint's folder; not `is_newer`: replaced by another one of the same step, which is preferred."""

    step: int
    is_newer: bool
    folder: Path

    @property
    def manifest(self) -> Path:
        """Path of its manifest."""
        return self.folder / MANIFEST

    @property
    def is_complete(self) -> bool:
        """Whether there is a manifest."""
        return os.path.lexists(self.manifest)


class RunFolder:
    """Folder of a run's checkpoints, as one launch of the run changes it; `launch` is 16 hexadecimal digits.

    All ranks see it. `BucketFolder` has the same methods for a place that is no folder; its `directory` has copies.

    Attributes:
        directory: where files are read and written.
        where: its name in messages.
    """

    def __init__(self, directory: Path, launch: str) -> None:
        self.directory, self._launch = directory, launch
        self.where = str(directory)
        self._attempts = self._removed = 0
        self._has_said = False

    def next_attempt(self) -> Path:
        """Return the path under which the next save is written; all ranks get the same one."""
        self._attempts += 1
        return self.directory / f".saving-{self._launch}-{self._attempts}"

    def shown(self, path: Path) -> str:
        """Return a path as messages name it."""
        return str(path)

    def in_words(self, error: Exception) -> str:
        """Return an error's message, with paths as `shown`."""
        return str(error)

    def sizes(self, folder: Path) -> dict[str, int | None]:
        """Return the sizes of what is in a folder, by name; None for what is no plain file. Raises `OSError`."""
        return {name: _size(folder / name) for name in os.listdir(folder)}

    def write(self, path: Path, content: bytes) -> None:
        """Write a file whole or not at all; raises `UsageError`."""
        write_whole(path, content, WHAT)

    def read(self, path: Path, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes; raises `InputError`."""
        return read_plain(path, WHAT, most)

    def remove(self, path: Path) -> None:
        """Remove a file; raises `OSError`."""
        path.unlink()

    def publish(self, file: Path, final: Path) -> None:
        """Take a file of a save to where all ranks see it: it is there."""

    def fetch(self, folder: Path, names: Sequence[str]) -> None:
        """Make files of a checkpoint readable in this process: they are."""

    def close(self) -> object:
        """Remove this process's copies of files: there are none."""

    def steps(self) -> list[SavedStep]:
        """Return the checkpoints, the newest first; raises `InputError`."""
        return saved_steps(self.directory)

    def clear(self, attempt: Path | None = None) -> None:
        """Remove the remains of killed saves, except `attempt`; no other run saves here."""
        for entry in _entries(self.directory):
            if LEFTOVER.fullmatch(entry.name) and entry != attempt:
                self._remove(entry)

    def write_beside(self, name: str, content: bytes) -> None:
        """Write a file beside the steps, whole or not at all; raises `UsageError` on failure."""
        temporary = self.directory / f".saving-{self._launch}-0"
        with writing(self.directory / name, WHAT):
            self.directory.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:  # by a name that `clear` knows, if this process is killed
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.directory / name)

    def complete(self, attempt: Path, step: int, keep: int) -> None:
        """Rename a save that is on disk to the checkpoint of `step`; then remove all but the latest `keep`."""
        final = step_folder(self.directory, step)
        replaced = final.with_name(f"{final.name}.replaced")
        if os.path.lexists(final) and os.path.lexists(replaced):
            self._drop(replaced)
        take_place(attempt, final, replaced)
        sync_directory(self.directory)
        self._set_later_aside(step)
        try:
            self._drop_old(keep)
        except (OSError, InputError) as error:  # the checkpoint is complete: old ones may stay
            self._say(error)

    def move_to_old_runs(self, run_of: Mapping[Path, str], beside: Sequence[str]) -> list[Path]:
        """Move every step to the folder of its run below this one, with copies of the files `beside`; return these."""
        homes = []
        for saved in saved_steps(self.directory):
            home = self.directory / f"run-{run_of.get(saved.folder, 'unknown')}"
            if home not in homes:
                home.mkdir(exist_ok=True)
                for name in beside:
                    if os.path.lexists(self.directory / name) and not os.path.lexists(home / name):
                        shutil.copyfile(self.directory / name, home / name, follow_symlinks=False)
                homes.append(home)
            saved.folder.rename(_free(home / saved.folder.name))
        for folder in (*homes, self.directory):
            sync_directory(folder)
        return homes

    def _set_later_aside(self, step: int) -> None:
        """Move later steps away: this run did not resume from them, and a later one must not."""
        later = [saved for saved in saved_steps(self.directory) if saved.step > step]
        if later:
            home = self.directory / f"set-aside-{self._launch}"
            home.mkdir(exist_ok=True)
            for saved in later:
                saved.folder.rename(_free(home / saved.folder.name))

    def _drop_old(self, keep: int) -> None:
        saved = saved_steps(self.directory)
        kept: dict[int, Path] = {}
        for one in saved:
            if one.is_complete and len(kept) < keep:
                kept.setdefault(one.step, one.folder)
        for one in saved:
            if one.folder not in kept.values():
                self._drop(one.folder)
        for entry in _entries(self.directory):
            if _STEP.fullmatch(entry.name) and _is_empty(entry):
                self._remove(entry)

    def _drop(self, folder: Path) -> None:
        self._removed += 1
        away = self.directory / f".removing-{self._launch}-{self._removed}"
        folder.rename(away)
        self._remove(away)

    def _remove(self, path: Path) -> None:
        """Remove a file or folder that is no checkpoint any more; one that is still open (NFS) is removed later."""
        error = remove_all(path)
        if error is not None:
            self._say(error)

    def _say(self, error: Exception) -> None:
        """Log a warning, once, that an old checkpoint cannot be removed."""
        if not self._has_said:
            _logger.warning("%s: an old checkpoint cannot be removed now, saves go on: %s", self.directory, error)
        self._has_said = True


def _size(path: Path) -> int | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def step_of(name: str) -> int | None:
    """Return the step of which a folder of that name is the checkpoint; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and match[2] is None and name == f"step-{int(match[1]):08d}" else None


def step_folder(directory: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in the folder of a run."""
    return directory / f"step-{step:08d}"


def saved_steps(directory: Path) -> list[SavedStep]:
    """Return the checkpoints of a folder, the newest first; without empty ones; the folder may not exist.

    Raises `InputError` for a folder that cannot be read.
    """
    found = []
    for entry in _entries(directory):
        match = _STEP.fullmatch(entry.name)
        if match and entry.name.removesuffix(".replaced") == f"step-{int(match[1]):08d}" and not _is_empty(entry):
            found.append(SavedStep(int(match[1]), match[2] is None, entry))
    return sorted(found, reverse=True)


def if_there(read: Callable[[], Result]) -> Result | None:
    """Return what is read, None where there is no such file; raises `InputError` as `read`."""
    try:
        return read()
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _entries(directory: Path) -> list[Path]:
    def listed() -> list[Path]:
        with reading(directory, "the checkpoints"):
            return [directory / name for name in os.listdir(directory)]

    return if_there(listed) or []


def _is_empty(path: Path) -> bool:
    """Whether it is an empty directory."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def _free(path: Path) -> Path:
    """Return an unused path: this one, or with a number appended."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free

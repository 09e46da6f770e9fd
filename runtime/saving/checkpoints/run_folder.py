"""The folder of a run's checkpoints: which steps are there, and how one comes and goes without ever being half there.

    DIR/step-00000120/                 a checkpoint: its files and manifest.json
    DIR/step-00000100/
    DIR/run.lock                       held while a run saves here (`opening`)

    DIR/.saving-<launch>-<n>/          a save under way, or one that was killed ─▶ renamed when all of it is on the disk
    DIR/.removing-<launch>-<n>/        a checkpoint that goes: renamed first, so that no half of one is ever seen
    DIR/step-00000120.replaced/        the same step once more, while a new one takes its place; both are whole
    DIR/run-<id>/                      where `--fresh` moves the steps of an earlier run
    DIR/set-aside-<launch>/            later steps than that which a run went on from, as it saves its first step

What a kill leaves behind begins with a dot, and goes with the next save.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quintsched.errors import InputError
from quintsched.files.atomic import sync_directory
from quintsched.files.folders import remove_all, take_place
from quintsched.files.plain import reading

from .manifest import MANIFEST

_logger = logging.getLogger("quintsched.runtime")
_STEP = re.compile(r"step-([0-9]{8,18})(\.replaced)?")
_LEFTOVER = re.compile(r"\.(saving|removing)-[0-9a-f]{16}-[0-9]+(\.saving|\.replaced)?")


@dataclass(frozen=True, order=True)
class SavedStep:
    """A checkpoint as it lies in the folder; not `is_newer`: beside another one of its step, which counts for more."""

    step: int
    is_newer: bool
    folder: Path

    @property
    def manifest(self) -> Path:
        """The path of its manifest."""
        return self.folder / MANIFEST

    @property
    def is_complete(self) -> bool:
        """Whether there is a manifest."""
        return os.path.lexists(self.manifest)


class RunFolder:
    """The folder of a run's checkpoints, as one launch of the run changes it; `launch` is 16 hexadecimal digits."""

    def __init__(self, directory: Path, launch: str) -> None:
        self.directory, self._launch = directory, launch
        self._attempts = self._removed = 0
        self._has_said = False

    def next_attempt(self) -> Path:
        """Return the name under which the next save is written; all ranks get the same one."""
        self._attempts += 1
        return self.directory / f".saving-{self._launch}-{self._attempts}"

    def clear(self, attempt: Path | None = None) -> None:
        """Remove what killed saves have left, but not `attempt`; nobody else saves here."""
        for entry in _entries(self.directory):
            if _LEFTOVER.fullmatch(entry.name) and entry != attempt:
                self._remove(entry)

    def complete(self, attempt: Path, step: int, keep: int) -> None:
        """Let a save that is on the disk be the checkpoint of `step`; then drop what is not among the latest `keep`."""
        final = step_folder(self.directory, step)
        replaced = final.with_name(f"{final.name}.replaced")
        if os.path.lexists(final) and os.path.lexists(replaced):
            self._drop(replaced)
        take_place(attempt, final, replaced)
        sync_directory(self.directory)
        self._set_later_aside(step)
        try:
            self._drop_old(keep)
        except (OSError, InputError) as error:  # the checkpoint is there: what it replaces may stay
            self._say(error)

    def move_to_old_runs(self, run_of: Mapping[Path, str], beside: Sequence[str]) -> list[Path]:
        """Move every step to the folder of its run below this one, with copies of what lies `beside`; return these."""
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
        """Move away later steps: this run did not go on from them, and a resumed one must not."""
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
        """Remove what is no checkpoint any more; what cannot be removed (NFS: somebody has it open) goes later."""
        error = remove_all(path)
        if error is not None:
            self._say(error)

    def _say(self, error: Exception) -> None:
        """Write a warning, once, of what could not be removed."""
        if not self._has_said:
            _logger.warning("%s: an old checkpoint cannot be removed now, saves go on: %s", self.directory, error)
        self._has_said = True


def step_folder(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies in the folder of a run."""
    return directory / f"step-{step:08d}"


def saved_steps(directory: Path) -> list[SavedStep]:
    """Return the checkpoints of a folder, the newest first; empty ones are none, and there may be no folder.

    Raises `InputError` for a folder that cannot be read.
    """
    found = []
    for entry in _entries(directory):
        match = _STEP.fullmatch(entry.name)
        if match and entry.name.removesuffix(".replaced") == f"step-{int(match[1]):08d}" and not _is_empty(entry):
            found.append(SavedStep(int(match[1]), match[2] is None, entry))
    return sorted(found, reverse=True)


def _entries(directory: Path) -> list[Path]:
    try:
        with reading(directory, "the checkpoints"):
            return [directory / name for name in os.listdir(directory)]
    except InputError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


def _is_empty(path: Path) -> bool:
    """Whether it is a directory, and nothing is in it."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode) and not os.listdir(path)
    except OSError:
        return False


def _free(path: Path) -> Path:
    """Return a path at which nothing is: this one, or with a number behind it."""
    number, free = 1, path
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free

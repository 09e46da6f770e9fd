"""A folder that is replaced whole: what was there stays until the new one is complete, on the disk.

    DIR.saving/      ranks write here, and it is as nothing until it is called DIR.replaced
    DIR.replaced/    complete ⇄ DIR: they change places in one step ─▶ what else was in the old one moves over
    .DIR.removing-…  and it goes

Where the system cannot let two folders change places, DIR is renamed to DIR.replaced, then DIR.saving to DIR. A kill in
between leaves DIR.replaced alone: it is what `standing` reads, and what the next save begins with. Where a save fails
before DIR has changed, DIR is as it was. Ranks share the file system.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from glob import escape
from pathlib import Path

from quintsched.errors import UsageError
from quintsched.files.atomic import sync_directory, writing
from quintsched.files.folders import remove_all, take_place

from ..comm.control import ControlGroup

_logger = logging.getLogger("quintsched.runtime")
_REMOVING = ".{}.removing-"
"""How the name begins of a folder that goes, so that no half of one has a name that is read."""


def replace_folder(
    path: Path, what: str, everyone: ControlGroup, replaced: re.Pattern[str], write: Callable[[Path], None]
) -> None:
    """Let all ranks `write` into a new folder, which then takes the place of `path` (collective).

    Args:
        path: the folder, or a link to it.
        what: it in words, for messages.
        everyone: all ranks, of which the first renames.
        replaced: the names of files that do not move over from what was there.
        write: writes this rank's files; may be collective, but then fails on all ranks.

    Raises `UsageError` on all ranks where some rank cannot write.
    """
    path = Path(os.path.realpath(path))
    fresh, old = path.with_name(f"{path.name}.saving"), _replaced(path)

    def begin() -> None:
        with writing(path, what):
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path}: cannot write {what}: it is not a folder")
            _end_last(path, old, replaced)
            if fresh.exists():
                shutil.rmtree(fresh)
            fresh.mkdir(parents=True)

    def finish() -> None:
        with writing(path, what):
            sync_directory(fresh)
            take_place(fresh, path, old)
            _move_over(old, path, replaced)
            sync_directory(path.parent)

    everyone.together(lambda: begin() if everyone.is_first else None)
    try:
        write(fresh)
        everyone.together(lambda: finish() if everyone.is_first else None)
    except BaseException:
        if everyone.is_first:
            shutil.rmtree(fresh, ignore_errors=True)
        raise


def standing(path: Path, *, says: bool = True) -> Path:
    """Return what is there of a folder that is to be read: where a save was killed between its renamings, the old one.

    That is said where `says`.
    """
    real = Path(os.path.realpath(path))
    old = _replaced(real) if real.name else real
    if os.path.lexists(real) or not old.is_dir():
        return path
    if says:
        _logger.warning("%s: a save was killed there as it renamed; what was there before is taken: %s", path, old)
    return old


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _end_last(path: Path, old: Path, replaced: re.Pattern[str]) -> None:
    """Bring to an end what a save that was killed had begun to rename, or could not remove."""
    for left in path.parent.glob(f"{escape(_REMOVING.format(path.name))}*"):
        remove_all(left)
    if path.exists():
        _move_over(old, path, replaced)
    elif old.is_dir():
        old.rename(path)


def _move_over(old: Path, new: Path, replaced: re.Pattern[str]) -> None:
    """Let a new folder have the files of other names that the old one has, and remove that."""
    for entry in old.iterdir() if old.is_dir() else ():
        if not replaced.fullmatch(entry.name) and not os.path.lexists(new / entry.name):
            entry.rename(new / entry.name)
    if old.is_dir():
        away = old.with_name(f"{_REMOVING.format(new.name)}{os.urandom(4).hex()}")
        old.rename(away)
        error = remove_all(away)
        if error is not None:
            _logger.warning("%s: it was replaced, and cannot be removed now: %s", away, error.strerror or error)

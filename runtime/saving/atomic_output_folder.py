"""Atomic replacement of a folder: the old content stays until the new one is complete and on disk.

    DIR.saving/      ranks write here; it is ignored until it is renamed to DIR.replaced
    DIR.replaced/    complete ⇄ DIR: exchanged in one step ─▶ other files of the old one move over
    .DIR.removing-…  and it is removed

Where the system cannot exchange two folders, DIR is renamed to DIR.replaced, then DIR.saving to DIR. A kill in
between leaves DIR.replaced alone: `standing` reads it, and the next save begins with it. Where a save fails
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

from ..comm.host_collectives import ControlGroup

_logger = logging.getLogger("quintsched.runtime")
_REMOVING = ".{}.removing-"
"""Prefix of the name of a folder that is being removed, under which it is never read."""


def replace_folder(
    path: Path, what: str, everyone: ControlGroup, replaced: re.Pattern[str], write: Callable[[Path], None]
) -> None:
    """Call `write` on all ranks with a new folder, which then takes the place of `path` (collective).

    Args:
        path: the folder, or a link to it.
        what: it in words, for messages.
        everyone: all ranks, of which the first renames.
        replaced: the names of files that do not move over from the old folder.
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
    """Return the folder to read: `path`, or the old one where a save was killed between its renamings.

    That is logged with `says`.
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
    """Finish the renaming or removal of a save that was killed."""
    for left in path.parent.glob(f"{escape(_REMOVING.format(path.name))}*"):
        remove_all(left)
    if path.exists():
        _move_over(old, path, replaced)
    elif old.is_dir():
        old.rename(path)


def _move_over(old: Path, new: Path, replaced: re.Pattern[str]) -> None:
    """Move files of other names from the old folder to the new one, and remove the old one."""
    for entry in old.iterdir() if old.is_dir() else ():
        if not replaced.fullmatch(entry.name) and not os.path.lexists(new / entry.name):
            entry.rename(new / entry.name)
    if old.is_dir():
        away = old.with_name(f"{_REMOVING.format(new.name)}{os.urandom(4).hex()}")
        old.rename(away)
        error = remove_all(away)
        if error is not None:
            _logger.warning("%s: it was replaced, and cannot be removed now: %s", away, error.strerror or error)

"""A folder that is replaced whole: what was there stays until the new one is complete, on the disk.

    DIR.saving/    ranks write here ─▶ DIR becomes DIR.replaced ─▶ DIR.saving becomes DIR ─▶ what else was in
                                       DIR.replaced moves over ─▶ DIR.replaced is removed

Where it fails before the first renaming, DIR is as it was. Ranks share the file system.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from quintsched.errors import UsageError
from quintsched.files.atomic import sync_directory, writing

from ..comm.control import ControlGroup


def replace_folder(
    path: Path,
    what: str,
    everyone: ControlGroup,
    is_first: bool,
    replaced: re.Pattern[str],
    write: Callable[[Path], None],
) -> None:
    """Let all ranks `write` into a new folder, which then takes the place of `path` (collective).

    Args:
        path: the folder.
        what: it in words, for messages.
        everyone: all ranks.
        is_first: whether this is the rank that renames.
        replaced: the names of files that do not move over from what was there.
        write: writes this rank's files; may be collective, but then fails on all ranks.

    Raises `UsageError` on all ranks where some rank cannot write.
    """
    fresh, old = path.with_name(f"{path.name}.saving"), path.with_name(f"{path.name}.replaced")

    def begin() -> None:
        with writing(path, what):
            if path.exists() and not path.is_dir():
                raise UsageError(f"{path}: cannot write {what}: it is not a folder")
            if fresh.exists():
                shutil.rmtree(fresh)
            fresh.mkdir(parents=True)

    def finish() -> None:
        with writing(path, what):
            sync_directory(fresh)
            if path.exists():
                if old.exists():
                    shutil.rmtree(old)
                path.rename(old)
            fresh.rename(path)
            if old.exists():
                _move_over(old, path, replaced)
            sync_directory(path.parent)

    def drop() -> None:
        shutil.rmtree(fresh, ignore_errors=True)

    everyone.together(begin if is_first else _nothing)
    try:
        write(fresh)
        everyone.together(finish if is_first else _nothing)
    except BaseException:
        if is_first:
            drop()
        raise


def _nothing() -> None:
    """Do nothing: the first rank does."""


def _move_over(old: Path, new: Path, replaced: re.Pattern[str]) -> None:
    for entry in old.iterdir():
        if not replaced.fullmatch(entry.name) and not (new / entry.name).exists():
            entry.rename(new / entry.name)
    shutil.rmtree(old)

"""Atomic exchange and removal of whole folders.

take_place    out.saving ─▶ out ─▶ out.replaced     in one step where the system can: `out` exists at every moment
remove_all    all below a path; returns the error of what could not be removed, for the caller to report
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path

_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2."""

_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step; False if the system or its file system cannot. Raises `OSError`."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), str(one))


def take_place(fresh: Path, path: Path, old: Path) -> None:
    """Rename a folder to `path`, and the old folder there to `old`, which must not exist. Raises `OSError`.

    A kill in between leaves a whole folder under each name. Without an exchange in one step, the old folder may then
    be at `old` alone.
    """
    if not os.path.lexists(path):
        fresh.rename(path)
        return
    fresh.rename(old)
    if not exchange(old, path):
        old.rename(fresh)
        path.rename(old)
        fresh.rename(path)


def remove_all(path: Path) -> OSError | None:
    """Remove a folder or a file; return the error if that fails, such as a file held open on NFS."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None

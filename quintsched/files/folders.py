"""Whole folders that take each other's names, and go.

take_place    out.saving ─▶ out ─▶ out.replaced     in one step, where the system can: there is no moment without out
remove_all    everything below a path; what cannot be removed stays, and is the caller's to tell
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from pathlib import Path

_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""

_UNABLE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step; False: this system, or its file system, cannot. Raises `OSError`."""
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
    """Let a folder be called `path`; what was there is called `old` then, as nothing may be before. Raises `OSError`.

    A kill in between leaves at both names something whole; where the system cannot exchange, it may be at `old` alone.
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
    """Remove a folder, or a file; return what is in the way, such as a file that somebody has open on NFS."""
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

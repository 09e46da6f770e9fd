"""Safe reading of a folder that others may have changed: only plain files in it are opened, up to a size limit.

    a link, a directory, a FIFO, a device, a socket     refused by name, never blocks
    "../secret", "/etc/passwd", "a/b"                   refused: no names of files in the folder
    a regular file                                      its size is known before anything is read

Each file is checked twice, by name and after it is open, so that it cannot be replaced in between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quintsched.errors import InputError, counted

from .strictjson import shorten

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
FILE, FOLDER = "a file", "a directory"
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISREG, FILE),
    (stat.S_ISDIR, FOLDER),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)
MOST_NAME = 200
"""Maximum number of characters in the name of a file."""


def require_plain_name(name: str) -> None:
    """Raise `InputError` unless `name` is a bare file name, without any path."""
    if not name or len(name) > MOST_NAME or name in (".", "..") or any(c in "/\\\0" for c in name):
        raise InputError(f"{shorten(name)!r} is not the name of a file in the folder")


def require_folder(path: Path, what: str) -> None:
    """Raise `InputError` unless `path` is a directory and not a link to one."""
    with reading(path, what):
        _require_kind(path, os.lstat(path).st_mode, FOLDER, what)


@contextmanager
def open_plain(path: Path, what: str, most: int | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file (of at most `most` bytes, if given) unbuffered; yields it with its size in bytes.

    Raises `InputError` with the path otherwise, and for errors while it is read; `what` names it: "the checkpoint".
    """
    with reading(path, what):
        _require_kind(path, os.lstat(path).st_mode, FILE, what)
    with reading(path, what), open(os.open(path, _FLAGS), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _require_kind(path, status.st_mode, FILE, what)
        size = status.st_size
        if most is not None and size > most:
            raise InputError(f"{path}: it has {size} bytes, more than the {most} that are read")
        yield file, size


def read_plain(path: Path, what: str, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes; raises `InputError` with the path."""
    with open_plain(path, what, most) as (file, size):
        content = bytearray(size)
        fill(file, memoryview(content), path)
        return bytes(content)


def fill(file: BinaryIO, memory: memoryview, path: Path) -> None:
    """Read from a file until `memory` is full; raises `InputError` if the file ends before."""
    left = memory
    while left:
        count = file.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise InputError(f"{path}: the file is damaged: it ends {counted(len(left), 'byte')} too early")
        left = left[count:]


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Context that turns an `OSError` into an `InputError` with the path."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot read {what}: {error.strerror or error}") from error


def kind_of(mode: int) -> str:
    """Return the kind of file of a mode as text: "a file", "a FIFO"."""
    return next(words for is_kind, words in _KINDS if is_kind(mode))


def _require_kind(path: Path, mode: int, wanted: str, what: str) -> None:
    found = kind_of(mode)
    if found != wanted:
        raise InputError(f"{path}: cannot read {what}: it is {found}, not {wanted}")

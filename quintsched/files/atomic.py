"""Atomic writes of files, whole or not at all, and reads with a limit on length.

    a regular file, or none yet    data ─▶ .a1b2c3.tmp beside it ─▶ renamed to the path      never half a file
    a link                         the same with the file that it points to; the link stays
    another user's link in /tmp    refused: it may point anywhere
    a FIFO, a device               data ─▶ straight into it: it is never replaced by a regular file
    /dev/stdout, /dev/fd/3         data ─▶ into the open file descriptor

`write_whole` serves every writer of a file that the user named, `write_plain` writers of other files, `read_whole`
readers with a size limit. Code that writes several files wraps it in `writing`, which reports the file that failed, and
flushes renames to the disk by `sync_directory`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from quintsched.errors import InputError, UsageError, WriteError

from .read_plain_files_only import FILE, kind_of

OPEN_FILE = re.compile(r"/proc/(?:self|\d+)/fd/(\d+)|/dev/fd/(\d+)")
"""Paths by which the system names open file descriptors of a process."""

READ_BYTES = 2**24
"""Bytes read at a time from a stream of unknown size."""

MOST_STREAMED = 2**27
"""Maximum number of bytes read from a stream of unknown size."""

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)

_MAY_PASS = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "ENOMEM", "EMFILE", "ENFILE", "ESTALE", "ETIMEDOUT", "ENODEV")
    if hasattr(errno, name)
}
"""Error numbers that may pass (a full disk, …), so that a retry can succeed; all others are the path's fault."""

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Error numbers of file systems that do not support `fsync` on directories."""

LONGEST_PATH = 4096
"""Maximum number of characters of a path in a message."""

MOST_LINKS = 40
"""Maximum number of symbolic links followed in a row, as in the kernel."""


def write_whole(path: Path, data: str | bytes, what: str, *, durable: bool = False) -> None:
    """Write `data` (text as UTF-8) to `path` atomically; `what` names it in messages: "the plan".

    An existing file keeps its permissions. With `durable`, the data is on the disk on return (fsync), even after a
    power cut. Raises `UsageError` on failure, and then leaves the old file as it was.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    with writing(path, what):
        _require_own_links(path)
        opened = _open_already(path)
        if opened is not None:
            _write_into(opened, content)
        elif (status := _status(path)) and not stat.S_ISREG(status.st_mode):
            _write_through(path, content)
        else:
            _replace(Path(os.path.realpath(path)), content, status, durable)


def write_plain(path: Path, data: str, what: str) -> None:
    """Write text to a regular file as `write_whole` does, but never through a link, a FIFO or a device.

    For files that the user has not named in this call. Raises `UsageError` on failure.
    """
    with writing(path, what):
        status = os.lstat(path) if os.path.lexists(path) else None
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: cannot write {what}: it is {kind_of(status.st_mode)}, not a file")
        _replace(path, data.encode(), status, durable=False)


@contextmanager
def writing(path: str | Path, what: str) -> Iterator[None]:
    """Context that turns an `OSError` into a `UsageError` naming the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, what, error) from error


def cannot_write(path: str | Path, what: str, error: OSError) -> UsageError:
    """Return the error for a failed write: a `WriteError` if the cause may pass, such as a full disk."""
    kind = WriteError if error.errno in _MAY_PASS else UsageError
    return kind(f"{path}: cannot write {what}: {error.strerror or error}")


def require_folder(folder: Path, what: str) -> None:
    """Make a folder unless it is there; raises `UsageError` where nothing can be made in it."""
    with writing(folder, what):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()


def whole_path(path: str | Path) -> Path:
    """Return the path made absolute, so that it survives a change of directory; links are not resolved.

    Raises `UsageError` for a relative path if the current directory no longer exists.
    """
    try:
        return Path(path).absolute()
    except OSError as error:
        raise UsageError(f"{path}: the current directory cannot be found: {error.strerror or error}") from error


def sync_directory(path: Path) -> None:
    """Flush a directory's new and renamed entries to the disk (fsync); raises `OSError`.

    Some file systems (CIFS, FUSE, 9p) do not support it; durability is then up to them.
    """
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(directory)


def read_whole(path: Path | None, most: int, what: str, *, after: int = 0) -> bytes:
    """Return the bytes of a file, or of standard input for None; reads at most `most` bytes and one more.

    `after`: how many bytes at the beginning of a regular file are left out.

    Only regular files and open descriptors, such as /dev/fd/63, are read; other FIFOs and devices would block.
    Raises `UsageError` if it cannot be read, `InputError` if it is longer; `what` names it: "the plan".
    """
    try:
        if path is None:
            return _read_up_to(sys.stdin.buffer.read, min(most, MOST_STREAMED))
        opened = _open_already(path)
        if opened is not None:
            with open(opened, "rb", closefd=False) as stream:
                return _read_up_to(stream.read, min(most, MOST_STREAMED))
        return _read_file(path, most, after)
    except OSError as error:
        raise UsageError(f"{_named(path)}: cannot read {what}: {error.strerror or error}") from error
    except ValueError as error:  # not a valid file name
        raise UsageError(f"{_named(path)}: cannot read {what}: {error}") from None
    except InputError as error:
        raise InputError(f"{path}: {error}" if path else str(error)) from None


def _read_file(path: Path, most: int, after: int) -> bytes:
    _require_file(os.stat(path))
    with open(os.open(path, _FLAGS), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _require_file(status)
        if status.st_size > most:
            raise _too_long(status.st_size, most)
        file.seek(after)
        return _read_up_to(file.read, most, max(status.st_size - after, 0) + 1)


def _require_file(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(status.st_mode)}, not {FILE}")


def _named(path: Path | None) -> str:
    return "standard input" if path is None else str(path)[:LONGEST_PATH]


def same_file(path: Path, other: Path) -> bool:
    """Return whether both paths are one regular file, links resolved; `other` may be a directory that contains it."""
    with suppress(OSError):
        if other.is_dir():
            return any(same_file(path, entry) for entry in other.iterdir() if entry.is_file())
        return path.is_file() and os.path.samefile(path, other)
    return False


def _read_up_to(read: Callable[[int], bytes | None], most: int, block_bytes: int = READ_BYTES) -> bytes:
    blocks, left = [], most + 1
    while left and (block := read(min(left, block_bytes))) != b"":
        if block is None:
            raise BlockingIOError(errno.EAGAIN, "it is no plain file: there would be more later")
        blocks.append(block)
        left -= len(block)
    if not left:
        raise _too_long(None, most)
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def _too_long(size: int | None, most: int) -> InputError:
    return InputError(f"it has {'more bytes' if size is None else f'{size} bytes, more'} than the {most} that are read")


def _require_own_links(path: Path) -> None:
    """Raise `PermissionError` for another user's link or FIFO in a world-writable sticky folder.

    So an easily guessed name in /tmp cannot redirect the write to another file. Linux has the same rule as
    fs.protected_symlinks and fs.protected_fifos, which may be off.
    """
    name = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        if not os.path.lexists(name):
            return
        status, folder = os.lstat(name), os.stat(os.path.dirname(name))
        is_open = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
        is_link = stat.S_ISLNK(status.st_mode)
        if (
            is_open
            and (is_link or stat.S_ISFIFO(status.st_mode))
            and status.st_uid not in (os.geteuid(), folder.st_uid)
        ):
            kind = kind_of(status.st_mode)
            raise PermissionError(errno.EACCES, f"{name} is {kind} of another user in a folder that all may write to")
        if not is_link:
            return
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))


def _open_already(path: Path) -> int | None:
    """Return the file descriptor that `path` names, like /dev/stdout, or None."""
    name = os.path.abspath(path)
    for _ in range(MOST_LINKS):
        found = OPEN_FILE.fullmatch(name)
        if found:
            return int(found[1] or found[2])
        if not os.path.islink(name):
            return None
        name = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
    return None


def _write_into(opened: int, data: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # so that earlier output comes first
    _write_all(opened, data)


def _write_through(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        _write_all(file, data)
    finally:
        os.close(file)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _replace(path: Path, data: bytes, before: os.stat_result | None, durable: bool) -> None:
    """Write to a temporary file in the same directory and rename it; the temporary file is removed on failure."""
    if before and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only")
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _write_all(file, data)
            if before:
                _inherit(file, before)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def _inherit(file: int, before: os.stat_result) -> None:
    """Give a file the permissions, and if allowed the owner, of the file that it replaces."""
    with suppress(PermissionError):
        os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]

r"""Output to the terminal: invisible characters are escaped, and a broken stream ends in one line, not a traceback.

    a message or a report of several lines    ─▶ shown          "\x1b[31m" is printed as text, line breaks stay
    standard output closed, full or broken    ─▶ StreamBroken   one line on standard error, and an exit code

Every entry point runs within `standard_streams`; all errors are printed by `write_error`. Text of a file or of
another process that goes into a message is escaped where it is read: `quintsched.errors.printable`.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from quintsched.errors import UsageError, printable

PIPE_CLOSED = 141
"""128 + SIGPIPE: the exit code of `quintsched … | head`."""

_UNSEEN = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that JSON does not escape: controls, invisible ones, and those that change the writing direction."""


def shown(text: str) -> str:
    """Return a message or report with invisible characters escaped; line breaks stay.

    Line breaks within command-line arguments are escaped too: those are names.
    """
    for part in {part for argument in sys.argv[1:] for part in argument.split("/") if "\n" in part}:
        text = text.replace(part, part.replace("\n", "\\n"))
    lines = text.split("\n")
    return "\n".join(line if line.isprintable() else printable(line, len(line), lines=True) for line in lines)


def shown_json(text: str) -> str:
    """Return equivalent JSON, with invisible characters escaped."""
    return _UNSEEN.sub(_escaped, text)


def percent(share: float) -> str:
    """Return a fraction as text: 0.125 as "12.5 %"."""
    return f"{100 * share:.1f} %"


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[place : place + 4]}" for place in range(0, len(units), 4))


def has_colours(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal that shows colours, and they are wanted: no NO_COLOR, no TERM=dumb."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and stream is not None and not stream.closed and stream.isatty()


def write_error(message: object) -> None:
    """Write `error: message` to standard error, if there is one; never raises `OSError`."""
    write_line(f"error: {message}")


def write_line(line: str) -> None:
    """Write one or more lines to standard error, if there is one; never raises `OSError`."""
    try:
        if sys.stderr is not None:
            sys.stderr.write(shown(line) + "\n")
            sys.stderr.flush()
    except (OSError, ValueError):  # full, broken, closed
        return


class StreamBroken(Exception):
    """Raised if standard output is closed, full, or a pipe without a reader."""

    def __init__(self, cause: OSError) -> None:
        why = "it is closed" if cause.errno == errno.EBADF else cause.strerror or cause
        super().__init__(f"cannot write to standard output: {why}")
        self.is_pipe = cause.errno == errno.EPIPE

    @property
    def exit_code(self) -> int:
        """Exit code of a command that could not print its result."""
        return PIPE_CLOSED if self.is_pipe else UsageError.exit_code


@contextmanager
def standard_streams() -> Iterator[None]:
    """Context that ends the process with one line if standard output fails; failed writes to stderr are dropped.

    Raises `SystemExit`: 141 for a pipe without a reader, 2 if it is closed or full.
    """
    _open_missing()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, _Output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, _Errors)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except StreamBroken as broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains when it flushes at exit
        if not broken.is_pipe:
            write_error(broken)
        raise SystemExit(broken.exit_code) from None


def _open_missing() -> None:
    """Open file descriptors 0, 1 and 2 if closed, so that no other file gets these numbers; their use then fails."""
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest free number: this one
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115


class _Output(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            raise StreamBroken(error) from error


class _Errors(io.FileIO):
    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def _stream(number: int, kind: type[io.FileIO]) -> TextIO:
    """Return a text stream with the failures of `kind`; characters outside its encoding are escaped."""
    raw = kind(number, "w", closefd=False)
    before = sys.stdout if number == 1 else sys.stderr
    encoding = before.encoding if before is not None else None
    is_seen = number == 2 or os.isatty(number)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=is_seen)

"""Classification of an error that a rank raised: its own, or the consequence of another rank's end.

    in a wait for a message     ┬─ torch raised it           frames of ours and of torch.distributed: a peer is gone
                                └─ a signal handler did      a frame of other code: this rank's own error
    in user code                ┬─ a `raise` of that code    its own error, whatever its message
                                ├─ torch.distributed did     a peer may be gone; its own error, if none is
                                └─ a call into C did         the same, if it is an error of torch's communication
    several at once             ── an ExceptionGroup         its own, if one of them is

Signal handlers (torch's for a dead DataLoader worker, a time limit set by user code) can run anywhere in Python, also
inside code that catches errors of the same kind.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from dis import opname
from itertools import takewhile
from types import TracebackType

from quintsched.errors import MisfitError, QuintschedError, StallError, printable

_WORDS_OF_WIRES = re.compile(r"gloo/|\bNCCL\b|TCPStore|ProcessGroup|Connection (closed|reset) by peer")
"""Pattern of torch's error messages for calls into C from the user's own frames, as `work.wait()`."""

_WIRE_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Names of torch's exception classes for communication."""

MOST_CAUSES = 20
WORKER_ERROR = re.compile(
    r"Caught \w+ (?P<where>in .*)\.\nOriginal Traceback.*:\n(?P<frames>(?s:.*\n)? .*\n)(?P<error>\S(?s:.*))\Z"
)
"""Message of torch's error for one in another process or thread, such as a DataLoader's worker."""
_OWN_NAME = re.compile(r"\Arank \d+ \([^)]*\),? ")
"""Beginning of a message that already names the rank."""


def came_from_handler(error: BaseException) -> bool:
    """Return whether an error passed a frame of other code than ours, torch's and Python's, such as a signal handler.

    Call it where the error is caught, around calls that run no user code.
    """
    return any(not _is_known(name) for name in _modules(error))


def is_own(error: BaseException) -> bool:
    """Return whether an error is this rank's own: neither the consequence of another rank's end nor a Ctrl-C.

    An exit that code of the user asks for, within what it was called for, is an error too.
    """
    if isinstance(error, SystemExit):
        return came_from_handler(error)
    if isinstance(error, KeyboardInterrupt):
        return type(error) is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return not _arose_from(error, lambda cause: isinstance(cause, StallError) or _is_of_wires(cause))


def lost_peer(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is that a wait for other ranks failed."""
    return _arose_from(error, lambda cause: isinstance(cause, StallError))


def failed_in_code(error: BaseException) -> bool:
    """Return whether a misfit was raised because user code raised an error."""
    cause = error.__cause__ if isinstance(error, MisfitError) else None
    return cause is not None and not isinstance(cause, QuintschedError) and came_from_handler(cause)


def headline(error: BaseException, *, first_line: bool = False) -> str:
    """Return an error's class and message on one line, fit for a terminal, without the rank at its beginning."""
    text = said(error).partition("\n")[0] if first_line else said(error)
    return printable(_OWN_NAME.sub("", text, count=1))


def said(error: BaseException) -> str:
    """Return an error as the last line of a traceback; errors of this package without their class.

    That of a process that loads data is the error there.
    """
    text = message_of(error)
    if found := WORKER_ERROR.search(text):
        return f"{found['error'].strip()}, {found['where']}"
    kind = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(map(said, error.exceptions))}"
    return text if isinstance(error, QuintschedError) else f"{kind}: {text}" if text else kind


def message_of(error: BaseException) -> str:
    """Return an error's message, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "an error that cannot say what it is"


class Suppressed:
    """Context that suppresses errors of some kinds, except those raised by a signal handler."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, self._kinds) and not came_from_handler(error)


def _arose_from(error: BaseException, is_such: Callable[[BaseException], bool]) -> bool:
    """Return whether an error or one of its causes satisfies `is_such`; for a group, all of its errors must."""
    return any(
        all(_arose_from(one, is_such) for one in cause.exceptions)
        if isinstance(cause, BaseExceptionGroup)
        else is_such(cause)
        for cause in causes_of(error)
    )


def _is_of_wires(error: BaseException) -> bool:
    """Return whether torch raised an error in communication, so that a peer may be gone or late."""
    is_wires_kind = type(error).__name__ in _WIRE_ERRORS
    if type(error) is not RuntimeError and not is_wires_kind:
        return False
    if any(name.startswith("torch.distributed") for name in takewhile(_is_torchs, reversed([*_modules(error)]))):
        return True
    return not _was_raised_in_python(error) and (is_wires_kind or _WORDS_OF_WIRES.search(message_of(error)) is not None)


def _was_raised_in_python(error: BaseException) -> bool:
    """Return whether an error was raised by a `raise` statement, not by a call into C."""
    last = list(_entries(error))[-1:]
    return any(opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]] == "RAISE_VARARGS" for entry in last)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the modules of the frames in an error's traceback; the last one raised it."""
    return (str(entry.tb_frame.f_globals.get("__name__", "")) for entry in _entries(error))


def _entries(error: BaseException) -> Iterator[TracebackType]:
    """Yield the entries of an error's traceback; the last is where it was raised."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_known(name: str) -> bool:
    """Return whether a module is this package's, torch's or Python's."""
    root = name.partition(".")[0]
    return _is_torchs(name) if root == "torch" else root == "quintsched" or root in sys.stdlib_module_names


def _is_torchs(name: str) -> bool:
    """Return whether a module is torch's, except torch.utils.data, whose signal handler reports on user loaders."""
    return name.partition(".")[0] == "torch" and not name.startswith("torch.utils.data")

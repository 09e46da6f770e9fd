"""Whose error it is that a rank raised: its own code's, or the consequence of another rank's end.

    in a wait for a message     ┬─ torch raised it           frames of ours and of torch.distributed: a peer is gone
                                └─ a signal's handler did    a frame of somebody else's: this rank's own error
    in the user's code          ┬─ a `raise` of that code    its own error, whatever it says
                                ├─ torch.distributed did     a peer may be gone; its own error, where none is
                                └─ a call into C did         the same, if it is an error of torch's wires
    several at once             ── an ExceptionGroup         its own, if one of them is

A signal's handler (torch's for a DataLoader worker that died, a time limit of the user's) runs wherever Python is, so
also inside of what catches errors of the same kind.
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
"""What torch's errors say that calls into C raise in the user's own frames, as `work.wait()` does."""

_WIRE_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Kinds of torch's."""

MOST_CAUSES = 20
_OWN_NAME = re.compile(r"\Arank \d+ \([^)]*\),? ")
"""How an error begins that says itself whose it is."""


def came_from_handler(error: BaseException) -> bool:
    """Whether an error was raised by somebody else's code than ours and torch's, in the midst of these.

    To be asked where it is caught, around calls that run no code of the user's.
    """
    return any(not _is_known(name) for name in _modules(error))


def is_own(error: BaseException) -> bool:
    """Whether an error is of this rank's own making: no consequence of what became of others, and no Ctrl-C."""
    if isinstance(error, SystemExit):
        return False
    if isinstance(error, KeyboardInterrupt):
        return type(error) is KeyboardInterrupt and signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return not _arose_from(error, lambda cause: isinstance(cause, StallError) or _is_of_wires(cause))


def lost_peer(error: BaseException) -> bool:
    """Whether an error says, itself or by what it was raised from, that a wait for others failed."""
    return _arose_from(error, lambda cause: isinstance(cause, StallError))


def failed_in_code(error: BaseException) -> bool:
    """Whether a misfit was found since somebody else's code raised an error."""
    cause = error.__cause__ if isinstance(error, MisfitError) else None
    return cause is not None and not isinstance(cause, QuintschedError) and came_from_handler(cause)


def headline(error: BaseException) -> str:
    """Return an error's kind and message on one line, fit for a terminal; without the rank that it begins with."""
    return printable(_OWN_NAME.sub("", said(error), count=1))


def said(error: BaseException) -> str:
    """Return an error as the last line of a traceback has it; one of ours says enough by itself."""
    text = message_of(error)
    kind = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(map(said, error.exceptions))}"
    return text if isinstance(error, QuintschedError) else f"{kind}: {text}" if text else kind


def message_of(error: BaseException) -> str:
    """Return an error's message, also of one that fails to say it."""
    try:
        return str(error)
    except Exception:
        return "an error that cannot say what it is"


class Suppressed:
    """A context that leaves out errors of some kinds, unless it is a signal's handler that raises them."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return isinstance(error, self._kinds) and not came_from_handler(error)


def _arose_from(error: BaseException, is_such: Callable[[BaseException], bool]) -> bool:
    """Whether an error or one of its causes is such; of a group of errors, all have to be."""
    return any(
        all(_arose_from(one, is_such) for one in cause.exceptions)
        if isinstance(cause, BaseExceptionGroup)
        else is_such(cause)
        for cause in _causes(error)
    )


def _is_of_wires(error: BaseException) -> bool:
    """Whether torch raised an error as ranks communicate, so that a peer may be gone or late."""
    is_wires_kind = type(error).__name__ in _WIRE_ERRORS
    if type(error) is not RuntimeError and not is_wires_kind:
        return False
    if any(name.startswith("torch.distributed") for name in takewhile(_is_torchs, reversed([*_modules(error)]))):
        return True
    return not _was_raised_in_python(error) and (is_wires_kind or _WORDS_OF_WIRES.search(message_of(error)) is not None)


def _was_raised_in_python(error: BaseException) -> bool:
    """Whether a `raise` statement raised an error, and no call into C."""
    last = list(_entries(error))[-1:]
    return any(opname[entry.tb_frame.f_code.co_code[entry.tb_lasti]] == "RAISE_VARARGS" for entry in last)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and what that was raised from."""
    cause: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _modules(error: BaseException) -> Iterator[str]:
    """Yield the names of the modules whose frames an error has passed, the last one raised it."""
    return (str(entry.tb_frame.f_globals.get("__name__", "")) for entry in _entries(error))


def _entries(error: BaseException) -> Iterator[TracebackType]:
    """Yield the entries of an error's traceback, the last is where it was raised."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_known(name: str) -> bool:
    """Whether a module is ours, torch's or Python's."""
    root = name.partition(".")[0]
    return _is_torchs(name) if root == "torch" else root == "quintsched" or root in sys.stdlib_module_names


def _is_torchs(name: str) -> bool:
    """Whether a module is torch's; its handler of signals counts as the user's, for it speaks of the user's loaders."""
    return name.partition(".")[0] == "torch" and not name.startswith("torch.utils.data")

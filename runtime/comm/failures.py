"""What a rank does about peers that fail: say which wait failed, and whose fault it was.

torch's messages name neither rank nor operation, and the rank that complains is rarely the one that failed. So a rank
whose wait failed asks the watch (`watch`), which knows what became of all; without one it names what it waited for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from quintsched.errors import StallError
from quintsched.stalls.own_errors import came_from_handler, headline, is_own, lost_peer
from quintsched.stalls.words import NOBODY

from ..watch.publisher import Publisher

Answer = TypeVar("Answer")

_NOT_A_STALL = re.compile(
    r"scalar type|unsupported|not supported|no backend type|invalid (argument|usage)", re.IGNORECASE
)


@contextmanager
def stall_errors(what: str, publisher: Publisher | None = None) -> Iterator[None]:
    """Turn what torch raises when a peer is gone or late into a StallError that says `what` was under way."""
    try:
        yield
    except RuntimeError as error:
        raise_stall(error, what, publisher)


def raise_stall(error: RuntimeError, what: str, publisher: Publisher | None = None) -> NoReturn:
    """Raise what torch raised as a StallError that says `what` was under way; as it is, if no peer is to blame.

    None is for what a signal's handler raises in a wait, as torch's does for a DataLoader worker that died.
    """
    if _NOT_A_STALL.search(str(error)) or came_from_handler(error):
        raise error
    said = f"{what}: a peer died or does not answer ({_first_line(error)})"
    verdict = publisher.explain(said) if publisher else None
    if verdict is None or not verdict.message:
        raise StallError(said) from error
    named_nobody = verdict.message.startswith(NOBODY)
    stall = StallError(f"{verdict.message}\n{said}" if named_nobody else verdict.message)
    stall.was_told = verdict.was_told
    raise stall from error


def as_stall(error: Exception, publisher: Publisher) -> Exception:
    """Return the verdict for an error of a user's own collective that failed since a peer is gone; any other as it is.

    So that a rank which only lost a peer does not complain of its user's code.
    """
    if is_own(error) or lost_peer(error):
        return error
    verdict = publisher.explain(headline(error), in_code=True)
    if verdict is None or not verdict.message or verdict.message.startswith(NOBODY):
        return error
    stall = StallError(verdict.message)
    stall.was_told = verdict.was_told
    return stall


def run_bounded(call: Callable[[], Answer], timeout_s: float) -> Answer | None:
    """Return `call()`, or None where it fails or takes longer than `timeout_s`; never hangs, never raises."""
    answers: list[Answer] = []

    def run() -> None:
        try:
            answers.append(call())
        except (RuntimeError, ValueError, AssertionError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]

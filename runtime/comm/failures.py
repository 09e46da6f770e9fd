"""What a rank does about peers that fail: say which wait failed, and whose fault it was.

torch's messages name neither rank nor operation, and the rank that complains is rarely the one that failed. So a
rank that gives up leaves its name and error in the store of all ranks, and those who lose their
connection look there. A rank that was killed leaves nothing; its neighbours then name the peer they waited for.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch.distributed as dist

from quintsched.errors import StallError

Answer = TypeVar("Answer")

_KEY = "quintsched/first_failure"
_ASK_TIMEOUT_S = 2.0
_NOT_A_STALL = re.compile(
    r"scalar type|unsupported|not supported|no backend type|invalid (argument|usage)", re.IGNORECASE
)


class Blame:
    """The first failure of the run, kept in the store of the default process group."""

    def accuse(self, rank: int, error: BaseException) -> None:
        """Leave word that `rank` failed with `error`, unless another rank did so before."""
        text = f"rank {rank} failed first: {type(error).__name__}: {error}"
        run_bounded(lambda: dist.distributed_c10d._get_default_store().compare_set(_KEY, "", text), _ASK_TIMEOUT_S)

    def read(self) -> str | None:
        """Return what the first rank to fail left, or None where nobody did or nobody can be asked."""
        return run_bounded(_read_first_failure, _ASK_TIMEOUT_S)


@contextmanager
def stall_errors(what: str, blame: Blame | None = None) -> Iterator[None]:
    """Turn what torch raises when a peer is gone or late into a StallError that says `what` was under way."""
    try:
        yield
    except RuntimeError as error:
        raise_stall(error, what, blame)


def raise_stall(error: RuntimeError, what: str, blame: Blame | None = None) -> NoReturn:
    """Raise what torch raised as a StallError that says `what` was under way; as it is, if no peer is to blame."""
    if _NOT_A_STALL.search(str(error)):
        raise error
    reason = (blame.read() if blame else None) or f"a peer died or does not answer ({_first_line(error)})"
    raise StallError(f"{what}: {reason}") from error


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


def _read_first_failure() -> str | None:
    store = dist.distributed_c10d._get_default_store()
    return store.get(_KEY).decode() if store.check([_KEY]) else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]

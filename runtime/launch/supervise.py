"""Waits for the ranks of an attempt, passes requests to stop on to them, and says how the attempt ended.

all ended with 0        0
one failed              its exit code; 4 where a signal ended it. The others are killed
asked to stop           each finishes its step, saves and ends with 0; asked by Ctrl-C again, they are killed
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from .processes import Ranks, Wakes

DIED = 4
FINAL = (0, 2, 3)
"""Exit codes after which the run would end in the same way again: good, a wrong setting, a misfit."""

LOOK_S = 0.5
"""How long the launcher sleeps at most; a rank's end or a signal wakes it."""


@dataclass(frozen=True)
class Ended:
    """How an attempt ended: with which exit code, and whether it is not to be started again."""

    code: int
    is_final: bool


def supervise(ranks: Ranks, wakes: Wakes, on_end: Callable[[int, int], None] | None = None) -> Ended:
    """Wait until all ranks have ended or one has failed, and return how; `on_end` is given each rank's exit code.

    An exit code is that of a `Popen`: -n where signal n ended the rank.
    """
    on_end = on_end or say_end
    asked: int | None = None
    while True:
        for number in wakes.wait(LOOK_S):
            if asked is not None and number == signal.SIGINT:
                return Ended(128 + number, is_final=True)
            if asked is None:
                ranks.ask_to_stop()
                _say_stopping()
                asked = number
        ended = ranks.ended()
        failed = sorted((rank for rank, code in ended.items() if code), key=lambda rank: _order(ended[rank]))
        for rank in [*failed, *(rank for rank in ended if rank not in failed)]:
            if asked is None or ended[rank] != -signal.SIGTERM:
                on_end(rank, ended[rank])
        if failed:
            return _failure(ended[failed[0]], asked)
        if not ranks.pids:
            return Ended(0, is_final=True)


def _order(code: int) -> int:
    """Return which of the ranks found to have ended at once failed first: who has lost a peer did not."""
    return 2 if code == DIED else int(code > 0)


def _failure(code: int, asked: int | None) -> Ended:
    if asked is not None and code == -signal.SIGTERM:
        return Ended(128 + asked, is_final=True)  # it was asked when it could not stop by itself yet
    code = code if code > 0 else DIED
    return Ended(code, is_final=code in FINAL or asked is not None)


def say_end(rank: int, code: int) -> None:
    """Say which signal ended a rank; of its exit code a rank says more itself."""
    if code < 0:
        sys.stderr.write(f"error: rank {rank} was ended by {_signal_name(-code)}\n")
        sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say_stopping() -> None:
    sys.stderr.write("stopping after the step in progress (Ctrl-C ends the run at once)\n")
    sys.stderr.flush()

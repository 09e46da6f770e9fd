"""Stop requests by the user or the cluster: the step in progress is finished and saved, then the run ends.

    SIGTERM, SIGUSR1, SIGHUP, Ctrl-C ──▶ StopRequest.asked ──with the step's all-reduced metrics──▶ all ranks know,
                                                                                                    after the same step
    Ctrl-C again                     ──▶ StopNow; torchrun makes it a SIGTERM

A signal may come before a rank can handle it. So the launcher starts ranks with these signals blocked, and a rank
unblocks them once it has handlers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from quintsched.check_call_arguments import FLAG, takes

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name))
"""Signals that ask for a stop, as far as this system has them."""


class StopNow(KeyboardInterrupt):
    """Ctrl-C for the second time."""


class StopRequest:
    """Flag whether this process was asked to stop after the step in progress.

    Args:
        under_torchrun: whether a SIGTERM that follows Ctrl-C means Ctrl-C for the second time.
    """

    @takes("StopRequest(under_torchrun=True)", under_torchrun=FLAG)
    def __init__(self, *, under_torchrun: bool = False) -> None:
        self.asked = False
        self._under_torchrun, self._by_interrupt = under_torchrun, False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals within a context, blocked pending ones included.

        Only the main thread gets signals: in another one this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled(self._take):
            let_through()
            yield

    def _take(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGTERM and self._by_interrupt and self._under_torchrun
        if again or (number == signal.SIGINT and self.asked):
            raise StopNow
        self._by_interrupt = number == signal.SIGINT
        self.asked = True


@contextmanager
def handled(take: Callable[[int, FrameType | None], object], *others: int) -> Iterator[None]:
    """Install a handler for the stop signals and `others` within a context; ignored signals (nohup) stay ignored."""
    taken = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, take) for number in (*taken, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def let_through() -> None:
    """Unblock the signals that were blocked when this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

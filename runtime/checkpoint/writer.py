"""A save that is under way beside the training: one at a time, and its error is raised by whoever waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

LAST_PATIENCE_S, OWN_PART_S = 2.0, 30.0
"""How long a run that fails waits for other ranks' parts of a save that is under way, and for its own."""


class Writer:
    """Runs one save after the other: in a thread, or at once.

    Attributes:
        is_background: whether in a thread.
        given_up: set when nobody waits for a save any more, so that it does not wait for other ranks.
    """

    def __init__(self, *, background: bool) -> None:
        self.is_background = background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.given_up = threading.Event()

    @property
    def is_under_way(self) -> bool:
        """Whether there is a save whose end nobody has waited for."""
        return self._thread is not None

    @property
    def has_failed(self) -> bool:
        """Whether the save that is under way has ended with an error."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin a save; the one before has been waited for."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        if self.is_background:
            self._thread.start()
        else:
            self._thread.run()

    def wait(self) -> None:
        """Return when the save that is under way, if there is one, is on the disk; raises what it raised."""
        thread, self._thread = self._thread, None
        if thread is not None and self.is_background:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self) -> None:
        """Let a save end if it soon does, because the run fails; it then counts, or is as if it had not begun."""
        if self._thread is not None and self.is_background:
            self._thread.join(LAST_PATIENCE_S)
            self.given_up.set()
            self._thread.join(OWN_PART_S)
        self._thread = self._error = None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

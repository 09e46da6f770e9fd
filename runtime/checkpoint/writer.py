"""A save that is under way in a thread: one at a time; all ranks end it together, and all know who could not write.

rank 0   written?  not yet ─┐          ─┐  has ended ─┐
rank 1   written?  not yet ─┼ again …  ─┼  failed ────┼─▶ all raise "rank 1: … no space left on device"
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quintsched import errors
from quintsched.errors import QuintschedError, UsageError

from ..comm.control import MOST_WORDS, ControlGroup

LAST_PATIENCE_S, OWN_PART_S = 2.0, 30.0
"""How long a run that fails waits for other ranks' parts of a save that is under way, and for its own."""
FIRST_POLL_S, LAST_POLL_S = 0.01, 0.25
"""How long ranks wait for their own writing before they ask each other again."""
UNDER_WAY, WRITTEN, FAILED = b"u", b"w", b"f"


class Writer:
    """Runs one save after the other, each in a thread.

    Attributes:
        given_up: set when nobody waits for a save any more, so that it does not wait for other ranks.
    """

    def __init__(self) -> None:
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
        self.given_up.clear()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, everyone: ControlGroup) -> None:
        """Return when the save that is under way is on the disk; all ranks call this.

        Raises on all ranks alike, as soon as one could not write, what its error says: the others are not waited for.
        """
        poll_s = FIRST_POLL_S
        while True:
            said = everyone.share_bytes(self._state(poll_s))
            if any(words[:1] == FAILED for words in said):
                self._raise(said)
            if all(words == WRITTEN for words in said):
                self._thread = None
                return
            poll_s = min(2 * poll_s, LAST_POLL_S)

    def give_up(self) -> None:
        """Let a save end if it soon does, because the run fails; it then counts, or is as if it had not begun."""
        if self._thread is not None:
            self._thread.join(LAST_PATIENCE_S)
            self.given_up.set()
            self._thread.join(OWN_PART_S)
        self._thread = self._error = None

    def _state(self, poll_s: float) -> bytes:
        """Return how the save stands, after a while if it has not ended; raises an error of another kind than ours."""
        assert self._thread is not None
        self._thread.join(poll_s)
        error = self._error
        if error is not None and not isinstance(error, QuintschedError):
            self._thread = self._error = None
            raise error
        if error is not None:
            return FAILED + f"{type(error).__name__}:{error}".encode(errors="replace")[:MOST_WORDS]
        return UNDER_WAY if self._thread.is_alive() else WRITTEN

    def _raise(self, said: list[bytes]) -> None:
        """Raise what the first rank says to whom something failed."""
        error, thread = self._error, self._thread
        self.given_up.set()
        if thread is not None:
            thread.join(OWN_PART_S)
        self._thread = self._error = None
        first = next(words for words in said if words[:1] == FAILED)
        kind, _, words = first[1:].decode(errors="replace").partition(":")
        raised: type[QuintschedError] = getattr(errors, kind, UsageError)
        raise raised(words) from error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

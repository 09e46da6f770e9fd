"""Batches read ahead by a thread, while a step computes.

    thread      read 3   read 4   ·        read 5          at most `ahead` batches wait to be taken
    loop        step 1            step 2            step 3

Taking a batch that is there takes no lock and wakes nobody: on a busy core a thread that is woken takes the place of
the one that wakes it. So the thread looks for itself, every few milliseconds, whether there is room for one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from threading import Event, Thread
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

POLL_S = 0.005
"""Time between two looks of a thread whose items wait to be taken."""


def prefetched(items: Iterator[Item], ahead: int) -> Generator[Item, None, None]:
    """Yield items in their order, up to `ahead` of them made before they are asked for; 0: none, and no thread.

    An error that making one raises is raised where it would be taken. Closing the iterator waits for the item that is
    being made.
    """
    if not ahead:
        yield from items
        return
    ready = _Ready[Item](ahead)
    thread = Thread(target=ready.fill, args=(items,), name="quintsched-prefetch", daemon=True)
    thread.start()
    try:
        while (take := ready.next()) is not None:
            yield take()
    finally:
        ready.closed.set()
        thread.join()


class _Ready(Generic[Item]):
    """Items that a thread has made: functions that return one, or raise what making it has raised; None ends them."""

    def __init__(self, ahead: int) -> None:
        self._items: deque[Callable[[], Item] | None] = deque()
        self._ahead, self._arrived, self.closed = ahead, Event(), Event()

    def fill(self, items: Iterator[Item]) -> None:
        """Make items until they end, one fails or the iterator is closed."""
        try:
            for item in items:
                self._put(lambda item=item: item)  # type: ignore[misc]
                while len(self._items) >= self._ahead and not self.closed.wait(POLL_S):
                    pass
                if self.closed.is_set():
                    return
        except BaseException as error:
            self._put(_raising(error))
        else:
            self._put(None)

    def _put(self, item: Callable[[], Item] | None) -> None:
        self._items.append(item)
        self._arrived.set()

    def next(self) -> Callable[[], Item] | None:
        """Return the next item, once it is there."""
        while not self._items:
            self._arrived.wait()
            self._arrived.clear()
        return self._items.popleft()


def _raising(error: BaseException) -> Callable[[], Any]:
    def take() -> Any:
        raise error

    return take

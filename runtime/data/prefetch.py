"""Batches read ahead by a thread, while a step computes.

    thread      read 3   read 4   ·        read 5          at most `ahead` batches wait to be taken
    loop        step 1            step 2            step 3

Taking a batch that is there waits for no lock and wakes nobody: on a busy core a thread that is woken takes the place
of the one that wakes it. So the thread looks for itself, every few milliseconds, whether there is room for one more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any, TypeVar

Item = TypeVar("Item")

POLL_S = 0.005
"""Time between two looks of a thread whose items wait to be taken."""
_END = object()


def prefetched(items: Iterator[Item], ahead: int) -> Generator[Item, None, None]:
    """Yield items in their order, up to `ahead` of them made before they are asked for; 0: none, and no thread.

    An error that making one raises is raised where it would be taken. Closing the iterator waits for the item that is
    being made.
    """
    if not ahead:
        yield from items
        return
    ready, arrived, closed = deque[Future[Any]](), Event(), Event()

    def fill() -> None:
        is_last = False
        while not (is_last or closed.is_set()):
            made = Future[Any]()
            try:
                made.set_result(next(items, _END))
            except BaseException as error:
                made.set_exception(error)
            is_last = made.exception() is not None or made.result() is _END
            ready.append(made)
            arrived.set()
            while len(ready) >= ahead and not closed.wait(POLL_S):
                pass

    thread = Thread(target=fill, name="quintsched-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            while not ready:
                arrived.wait()
                arrived.clear()
            item = ready.popleft().result()
            if item is _END:
                return
            yield item
    finally:
        closed.set()
        thread.join()

"""Batches read ahead by a thread, while a step computes.

thread      read 3   read 4   ·        read 5          at most `ahead` batches wait to be taken
loop        step 1            step 2            step 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """Yield items in their order, up to `ahead` of them made before they are asked for; 0: none, and no thread.

    An error that making one raises is raised where it would be taken. Closing the iterator waits for the item that is
    being made.
    """
    if not ahead:
        yield from items
        return
    end = object()
    pool = ThreadPoolExecutor(1, "quintsched-prefetch")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(ahead))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)

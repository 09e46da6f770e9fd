"""Cost of publishing a rank's position: per instruction of the interpreter, per wait, per phase, and in memory.

    python benchmarks/publishing.py

A loop over calls that do nothing is timed with and without the store; the difference of their fastest rounds is the
cost of an instruction. Then the publisher's other calls, and the memory growth over a million steps.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from time import perf_counter

from quintsched.runtime.watch.position_in_shared_memory import INDEX, NOTHING, PositionCell, WaitCell, receive_code
from quintsched.runtime.watch.position_publisher import Publisher

CALLS, ROUNDS = 2000, 300


def nothing() -> None:
    """A call that does nothing."""


def walk(places: list[int], calls: list[Callable[[], None]]) -> None:
    for _, _, call in zip(places, places, calls, strict=True):
        call()


def published_walk(publisher: Publisher, places: list[int], calls: list[Callable[[], None]]) -> None:
    numbers = publisher.numbers
    for mark, _, call in zip(places, places, calls, strict=True):
        numbers[INDEX] = mark
        call()


def fastest_ns(run: Callable[[], None], count: int) -> float:
    """Return the nanoseconds of one of the `count` calls in `run`, in its fastest round."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
    return best / count * 1e9


def main() -> None:
    publisher = Publisher(PositionCell(0, shared=True))
    places, calls = list(range(CALLS)), [nothing] * CALLS
    bare = fastest_ns(lambda: walk(places, calls), CALLS)
    published = fastest_ns(lambda: published_walk(publisher, places, calls), CALLS)
    print(f"per instruction   {published - bare:6.0f} ns   ({bare:.0f} ns without, {published:.0f} ns with)")

    waits = WaitCell()
    publisher.follow_waits(waits)

    def wait() -> None:
        for place in range(CALLS):
            waits.memory[waits.at] = receive_code(place)
            waits.memory[waits.at] = NOTHING

    def phases() -> None:
        for step in range(CALLS):
            publisher.enter("step", step=step)

    print(f"per wait          {fastest_ns(wait, CALLS):6.0f} ns")
    print(f"per phase         {fastest_ns(phases, CALLS):6.0f} ns")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(1_000_000):
        publisher.enter("step", step=step)
        publisher.numbers[INDEX] = step % 100
        publisher.enter("idle")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"after 1,000,000 steps the process has grown by {grown} KiB")


if __name__ == "__main__":
    main()

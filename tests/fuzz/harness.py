"""Feeds inputs to a reader, and says where one did anything else than to read it or to refuse it in words.

good      it was read
refused   a QuintschedError with a message that fits on a screen
fault     any other exception, a message too long or empty, more than a second, more than 256 MB
"""

import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from quintsched.errors import QuintschedError

MOST_SECONDS, MOST_MEMORY, LONGEST_MESSAGE = 1.0, 2**28, 5000


@dataclass(frozen=True)
class Outcome:
    """Outcome for one input: "good", "refused" or "fault", with the seconds of the processor; `words` say more."""

    kind: str
    seconds: float
    words: str = ""


class _TooSlow(BaseException):
    """No reader catches it."""


def feed(read: Callable[[bytes], object], data: bytes) -> Outcome:
    """Return what a reader does with an input; it is stopped after ten times as long as it may take."""
    began = time.process_time()
    kind, words = "good", ""
    try:
        with _stopped_after(10 * MOST_SECONDS):
            read(data)
    except QuintschedError as error:
        kind, words = "refused", str(error)
        if not words.strip() or len(words) > LONGEST_MESSAGE:
            kind, words = "fault", f"a message of {len(words)} letters: {words[:200]!r}"
    except _TooSlow:
        kind, words = "fault", "it did not end"
    except Exception as error:
        kind, words = "fault", "".join(traceback.format_exception(error)[-6:])
    seconds = time.process_time() - began
    if kind != "fault" and seconds > MOST_SECONDS:
        kind, words = "fault", f"{seconds:.2f} s: {words[:200]}"
    return Outcome(kind, seconds, words)


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> NoReturn:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def limited_memory(num_bytes: int = MOST_MEMORY) -> Iterator[None]:
    """A context in which the process may map so many bytes more than it has, and else gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

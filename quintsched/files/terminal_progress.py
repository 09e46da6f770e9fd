r"""Progress of what takes long, for a person who is watching: one line on standard error, gone when it is done.

    searching: best 19.43 s, 37 %, 12 s, about 20 s left
    proving 778432 instructions, 3 s

Nothing is written in the first two seconds, nor where standard error is no terminal: into a file, a pipe, a log. A run
that starts is an exception: a log that shows nothing for ten seconds gets a line of what is being done.

    … building the model, 10 s

One line at a time: a task within another that is shown, or beside a progress bar (`only_progress`), is not shown.
A thread of its own writes the line, so that it moves while a computation of numpy does not return.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from quintsched.files.terminal import shown

QUIET_S = 2.0
"""Nothing is shown of what is done sooner."""
PERIOD_S = 0.25
SILENT_S = 10.0
"""A log gets a line of what has taken so long, and then of what takes so long after it."""
CLEAR = "\r\x1b[K"
"""Back to the beginning of the line, and all of it gone."""

_HAS_PROGRESS: ContextVar[bool] = ContextVar("has_progress", default=False)
"""Whether something around shows progress already."""


class ProgressLine:
    """Progress of a task, reported by its caller from any thread; `what` is being done."""

    def __init__(self, what: str) -> None:
        self.what, self._words, self._share = what, "", 0.0
        self._begun_s = time.monotonic()

    def show_done(self, done: float, total: float, words: str = "") -> None:
        """Record how much is done of how much, and what is to be said besides."""
        self._share, self._words = min(done / total, 1.0) if total else 0.0, words

    def now(self, what: str) -> None:
        """Record what is being done from now on."""
        self.what, self._words, self._share = what, "", 0.0

    @property
    def line(self) -> str:
        """Line that a terminal shows."""
        taken_s = time.monotonic() - self._begun_s
        share, parts = self._share, [f"{self.what}: {self._words}" if self._words else self.what]
        parts += [f"{100 * share:.0f} %"] if share else []
        parts += [f"{taken_s:.0f} s"]
        parts += [f"about {taken_s * (1 - share) / share:.0f} s left"] if 0.02 <= share < 1 else []
        return ", ".join(parts)


@contextmanager
def only_progress() -> Iterator[None]:
    """A context in which `progress` shows nothing, since its caller shows it."""
    before = _HAS_PROGRESS.set(True)
    try:
        yield
    finally:
        _HAS_PROGRESS.reset(before)


@contextmanager
def progress(what: str, *, in_logs: bool = False, rank: int = 0) -> Iterator[ProgressLine]:
    """A context that shows how long it takes, and how far it is, once it has taken two seconds (`in_logs`: ten).

    Of several ranks that do the same, 0 alone shows it.
    """
    found, stream = ProgressLine(what), sys.stderr
    is_watched = _is_watched(stream)
    if rank or _HAS_PROGRESS.get() or (not is_watched and (not in_logs or stream is None or stream.closed)):
        yield found
        return
    done = threading.Event()
    thread = threading.Thread(target=_show if is_watched else _tell, args=(found, stream, done), daemon=True)
    thread.start()
    try:
        with only_progress():
            yield found
    finally:
        done.set()
        thread.join()


def _is_watched(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"


def _show(found: ProgressLine, stream: TextIO, done: threading.Event) -> None:
    with suppress(OSError, ValueError):  # full, broken, closed
        wait_s = QUIET_S
        while not done.wait(wait_s):
            wait_s = PERIOD_S
            _write(stream, CLEAR + shown(found.line)[: shutil.get_terminal_size().columns - 1])
        if wait_s == PERIOD_S:
            _write(stream, CLEAR)


def _tell(found: ProgressLine, stream: TextIO, done: threading.Event) -> None:
    told = ""
    with suppress(OSError, ValueError):
        while not done.wait(SILENT_S):
            if found.what != told:
                told = found.what
                _write(stream, f"… {shown(found.line)}\n")


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()

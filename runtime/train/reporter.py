"""What a run reports: lines for people, JSON lines for programs, a progress bar where a person is watching."""

from __future__ import annotations

import errno
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quintsched.errors import UsageError
from quintsched.files.atomic import cannot_write
from quintsched.stalls.own_errors import came_from_handler

from .sinks import Sinks

Record = dict[str, object]
Say = Callable[[str], None]


class Reporter:
    """Writes records as JSON lines (NaN as null) to a file that is appended to, and lines of text to `say`.

    Only the rank that reports gets one with a path and a `say` that speaks. `sinks` take its records besides.
    """

    def __init__(self, path: str | None, say: Say, *, show_progress: bool = False) -> None:
        self._say, self.sinks = say, Sinks()
        self._file: TextIO | None = None
        self._progress = _progress_bar() if show_progress else None
        if path is not None:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise cannot_write(path, "the log", error) from error
            if _is_locked(self._file):
                self.say(
                    f"{path}: another run writes to this log as well, line by line; give each a log.path of its own"
                )

    def record(self, record: Mapping[str, object]) -> None:
        """Write one record to the log, and give it to the sinks; raises `UsageError` if the log fails."""
        self.sinks.take(record)
        file = self._file
        if file is None:
            return
        with _writing(file):
            file.write(json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n")
            file.flush()

    def say(self, line: str) -> None:
        """Tell people something."""
        if self._progress is not None and sys.stdout is not None and sys.stdout.isatty():
            self._progress.console.print(line, highlight=False, soft_wrap=True)
        else:
            self._say(line)

    def start_epoch(self, name: str, total: int, done: int) -> None:
        """Show a fresh progress bar, `done` of `total` steps along."""
        if self._progress is not None:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(name, total=total, completed=done)

    def advance(self) -> None:
        """Move the progress bar on by a step."""
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def __enter__(self) -> Reporter:
        self.sinks.__enter__()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        try:
            if self._file is not None:
                with _writing(self._file):
                    self._file.close()
        except UsageError:
            if error is None:
                raise  # else that says why the run ends: a log that could not be written cannot be closed
        finally:
            self.sinks.__exit__(kind, error, trace)


def _is_locked(file: TextIO) -> bool:
    """Whether another process has locked a log; else it is locked for this one, until that closes it or ends.

    On Windows, where there are no such locks, none has.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)  # else it is a file that has no locks
    return False


@contextmanager
def _writing(file: TextIO) -> Iterator[None]:
    """A context in which a log that cannot be written is a `UsageError`; what a signal's handler raises is not."""
    try:
        yield
    except OSError as error:
        if came_from_handler(error):
            raise
        raise cannot_write(file.name, "the log", error) from error


def _progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Reports of a run: lines for people, JSON lines for programs, and a progress bar on a terminal.

Metrics of a training, passed on while it runs (sinks): to TensorBoard, Weights & Biases, or any callable.

record of a step    {"event": "step", "step": 40, "loss": 2.1, …} ─▶ {"train/loss": 2.1, …}, step 40
record of an epoch  {"event": "epoch", "step": 64, "validation_loss": 1.9, …} ─▶ {"epoch/validation_loss": 1.9, …}
sink(figures, step=40)   for each of them, on rank 0;   sink.close() at the end, if it has that

Environment of a run, for its log: versions, device and host, so that a report of the run says where it ran.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from quintsched.errors import UsageError, counted, suggest
from quintsched.files.atomic import cannot_write
from quintsched.files.terminal import StreamBroken
from quintsched.files.terminal_progress import ProgressLine, only_progress, progress
from quintsched.import_user_code import load_object, names_file
from quintsched.stalls.own_error_or_lost_peer import Suppressed, came_from_handler

from ..agreement.job_fingerprint_between_ranks import own_version
from ..comm import Transport
from ..comm.device import device_name, is_accelerator
from ..data.user_loaders import Say
from ..settings.job_file import SinkConfig

NOT_FIGURES = ("event", "step", "epoch", "rank_busy", "rank_memory_gb")
"""Fields of a record that sinks do not get: its place, and figures of each rank."""
PREFIXES = {"step": "train", "epoch": "epoch"}
"""Prefixes of the metrics' names, by the event of their record."""


class Sink(Protocol):
    """Receiver of metrics; a `close` method, if any, is called at the end, also of a run that failed."""

    def __call__(self, figures: Mapping[str, float], /, *, step: int) -> object:
        """Take the metrics of a step, by name."""


@dataclass(frozen=True)
class _OfLibrary:
    """A library's sink: functions for the metrics of a step, and for the end."""

    take: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]

    def __call__(self, figures: Mapping[str, float], *, step: int) -> None:
        """Take the metrics of a step."""
        self.take(figures, step)


def _tensorboard(**options: Any) -> Sink:
    """Return a sink that writes metrics as scalars for TensorBoard; the options are those of `SummaryWriter`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(**options)
    return _OfLibrary(lambda figures, step: [writer.add_scalar(*one, step) for one in figures.items()], writer.close)


def _wandb(**options: Any) -> Sink:
    """Return a sink that sends metrics to a run of Weights & Biases; the options are those of `wandb.init`."""
    run = import_module("wandb").init(**options)
    return _OfLibrary(lambda figures, step: run.log(dict(figures), step=step), run.finish)


TRACKERS: Mapping[str, Callable[..., Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}
"""Built-in sinks, by the package that each needs."""


class Sinks:
    """All sinks of a run, as a context manager: those of the job are built on entry, all are closed on exit."""

    def __init__(self, configs: Sequence[SinkConfig] = (), given: Sequence[Sink] = ()) -> None:
        self._configs = tuple(configs)
        self._open: list[Sink] = list(given)

    def __enter__(self) -> Sinks:
        try:
            for config in self._configs:
                self._open.append(_build(config))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def pass_record(self, record: Mapping[str, object]) -> None:
        """Pass the metrics of a record to every sink."""
        prefix, step = PREFIXES.get(str(record.get("event"))), record.get("step")
        if not self._open or prefix is None or not isinstance(step, int):
            return
        figures = dict(_figures(prefix, {key: value for key, value in record.items() if key not in NOT_FIGURES}))
        for sink in self._open:
            sink(figures, step=step)

    def _close(self) -> None:
        """Close all sinks, even if some fail; the first failure is raised."""
        failed: list[Exception] = []
        while self._open:
            close = getattr(self._open.pop(), "close", None)
            try:
                if close is not None:
                    close()
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]


def _build(config: SinkConfig) -> Sink:
    if not names_file(config.name):
        return TRACKERS[config.name](**config.options)
    found: Any = load_object(config.name)
    made: Sink = found(**config.options) if isinstance(found, type) else found
    return made


def _figures(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value; those in mappings and lists have keys and indices in their names."""
    if isinstance(value, bool | int | float):
        yield name, float(value)
        return
    inner: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for key, item in inner:
        yield from _figures(f"{name}/{key}", item)


def require_sinks(sinks: Iterable[SinkConfig]) -> None:
    """Raise `UsageError` for an unknown sink, or one whose package is not installed."""
    for sink in sinks:
        if names_file(sink.name):
            found = load_object(sink.name)
            if not callable(found):
                raise UsageError(f"log.sinks: {sink.name} is a {type(found).__name__}, not a function or a class")
            if sink.options and not isinstance(found, type):
                raise UsageError(
                    f"log.sinks: {sink.name} is a function, so that there is nothing to build with options"
                )
        elif sink.name not in TRACKERS:
            raise UsageError(f"log.sinks: there is no sink {sink.name!r}{suggest(sink.name, TRACKERS)}")
        elif find_spec(sink.name) is None:
            raise UsageError(
                f"log.sinks: {sink.name!r} needs the package {sink.name}, which is not installed; pip install "
                f"{sink.name}, or leave the sink out"
            )


LogRecord = dict[str, object]


class Reporter:
    """Writes records as JSON lines (NaN as null) to a file that is appended to, and lines of text to `say`.

    Only the reporting rank has a path and a `say` that prints. `sinks` take its records as well. The file is open
    within a `with` alone: a reporter that is never entered, as when a trainer cannot be built, holds none.
    """

    def __init__(self, path: str | None, say: Say, *, show_progress: bool = False, in_logs: bool = False) -> None:
        self._path, self._say, self.sinks = path, say, Sinks()
        self._file: TextIO | None = None
        self._in_logs, self._examining, self._beside_bar = in_logs, ExitStack(), ExitStack()
        self._progress, self._has_stepped = _progress_bar() if show_progress else None, False

    def write_record(self, record: Mapping[str, object]) -> None:
        """Write one record to the log, and pass it to the sinks; raises `UsageError` if the log fails."""
        self.sinks.pass_record(record)
        if self._file is not None:
            with _writing(self._file):
                self._file.write(
                    json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False) + "\n"
                )
                self._file.flush()

    def say(self, line: str) -> None:
        """Print a line for people."""
        if self._progress is not None and sys.stdout is not None and sys.stdout.isatty():
            self._progress.console.print(line, highlight=False, soft_wrap=True)
        else:
            self._say(line)

    def show_step(self, line: str) -> None:
        """Show the figures of a step: beside the progress bar where there is one, else as a line."""
        if self._progress is None:
            self._say(line)
        else:
            self._progress.update(self._progress.task_ids[0], figures=line)

    def start_epoch(self, name: str, total: int, done: int) -> None:
        """Show a fresh progress bar, `done` of `total` steps along."""
        examining = "" if self._has_stepped else "examining the blocks and their cuts, before the first step"
        if self._progress is not None:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(name, total=total, completed=done, figures=examining)
        elif examining:
            self._examining.enter_context(self.preparing(examining))

    def advance(self) -> None:
        """Advance the progress bar by a step."""
        self._examining.close()
        if self._progress is not None:
            if not self._has_stepped:
                self._progress.update(self._progress.task_ids[0], figures="")
            self._progress.advance(self._progress.task_ids[0])
        self._has_stepped = True

    def preparing(self, what: str) -> AbstractContextManager[ProgressLine]:
        """Return a context that shows what is prepared, where there will be a progress bar, or in a log."""
        is_shown = self._progress is not None or self._in_logs
        return progress(what, in_logs=self._in_logs) if is_shown else nullcontext(ProgressLine(what))

    def __enter__(self) -> Reporter:
        with ExitStack() as opened:
            if self._path is not None:
                try:
                    Path(self._path).parent.mkdir(parents=True, exist_ok=True)
                    self._file = opened.enter_context(open(self._path, "a", encoding="utf-8"))
                except OSError as error:
                    raise cannot_write(self._path, "the log", error) from error
                if _is_locked(self._file):
                    self.say(
                        f"{self._path}: another run writes to this log as well, line by line; "
                        "give each a log.path of its own"
                    )
            self.sinks.__enter__()
            opened.pop_all()
        if self._progress is not None:
            self._progress.start()
            self._beside_bar.enter_context(only_progress())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._examining.close()
        self._beside_bar.close()
        if self._progress is not None:
            self._progress.stop()
        try:
            if self._file is not None:
                with _writing(self._file):
                    self._file.close()
        except UsageError:
            if error is None:
                raise  # else the first error says why: closing the log fails again
        finally:
            self.sinks.__exit__(kind, error, trace)


def reporter_of(path: str | None, rank: int) -> Reporter:
    """Return the reporter of a rank: rank 0's prints and writes the log at `path`, all others are silent."""
    if rank:
        return Reporter(None, lambda line: None)
    return Reporter(path, _print, show_progress=sys.stderr is not None and sys.stderr.isatty(), in_logs=True)


def _print(line: str) -> None:
    """Print a line; where the reader of standard output is gone, as behind `| head -1`, the run goes on."""
    with Suppressed(OSError, ValueError, StreamBroken):
        if sys.stdout is not None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _is_locked(file: TextIO) -> bool:
    """Whether another process has locked a log; else lock it for this one, until it is closed or the process ends.

    On Windows, where there are no such locks, none has.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)  # else a file system without locks
    return False


@contextmanager
def _writing(file: TextIO) -> Iterator[None]:
    """Raise `UsageError` where a log cannot be written within a context; errors of signal handlers pass through."""
    try:
        yield
    except OSError as error:
        if came_from_handler(error):
            raise
        raise cannot_write(file.name, "the log", error) from error


def _progress_bar() -> Progress:
    figures = TextColumn("{task.fields[figures]}")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn(), figures)
    return Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False)


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def environment_of(transport: Transport) -> dict[str, object]:
    """Return the environment of this rank."""
    device = transport.device
    return {
        "quintsched": own_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device_name(device) if is_accelerator(device) else f"cpu, {counted(os.cpu_count() or 1, 'core')}",
        "system": f"{platform.system()} {platform.machine()}",
        "host": platform.node(),
    }

"""Figures of a training given to others while it runs: TensorBoard, Weights & Biases, and any callable.

record of a step    {"event": "step", "step": 40, "loss": 2.1, …} ─▶ {"train/loss": 2.1, …}, step 40
record of an epoch  {"event": "epoch", "step": 64, "validation_loss": 1.9, …} ─▶ {"epoch/validation_loss": 1.9, …}
sink(figures, step=40)   for each of them, on rank 0;   sink.close() at the end, if it has that
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol

from quintsched.errors import UsageError, suggest
from quintsched.user_code import load_object, names_file

from ..settings.job import SinkConfig

NOT_FIGURES = ("event", "step", "epoch")
PREFIXES = {"step": "train", "epoch": "epoch"}
"""What the names of figures begin with, by the record that they are in."""


class Sink(Protocol):
    """What takes figures; where it has a `close`, that is called at the end, also of a run that failed."""

    def __call__(self, figures: Mapping[str, float], /, *, step: int) -> object:
        """Take the figures of a step, by name."""


@dataclass(frozen=True)
class _OfLibrary:
    """A sink that a library has: what it does with the figures of a step, and at the end."""

    take: Callable[[Mapping[str, float], int], object]
    close: Callable[[], object]

    def __call__(self, figures: Mapping[str, float], *, step: int) -> None:
        """Take the figures of a step."""
        self.take(figures, step)


def _tensorboard(**options: Any) -> Sink:
    """Return what writes figures as scalars for TensorBoard; the options are those of `SummaryWriter`."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(**options)
    return _OfLibrary(lambda figures, step: [writer.add_scalar(*one, step) for one in figures.items()], writer.close)


def _wandb(**options: Any) -> Sink:
    """Return what sends figures to a run of Weights & Biases; the options are those of `wandb.init`."""
    run = import_module("wandb").init(**options)
    return _OfLibrary(lambda figures, step: run.log(dict(figures), step=step), run.finish)


BUILT_IN: Mapping[str, Callable[..., Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}
"""The sinks that there are, by the package that each takes."""


class Sinks:
    """All sinks of a run, as a context: what the job names is built on entry, everything is closed on exit."""

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

    def take(self, record: Mapping[str, object]) -> None:
        """Give the figures of a record to every sink."""
        prefix, step = PREFIXES.get(str(record.get("event"))), record.get("step")
        if not self._open or prefix is None or not isinstance(step, int):
            return
        figures = dict(_figures(prefix, {key: value for key, value in record.items() if key not in NOT_FIGURES}))
        for sink in self._open:
            sink(figures, step=step)

    def _close(self) -> None:
        """Close all, however one of them fails; the first failure is raised."""
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
        return BUILT_IN[config.name](**config.options)
    found: Any = load_object(config.name)
    made: Sink = found(**config.options) if isinstance(found, type) else found
    return made


def _figures(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value, those of mappings and lists by their names and places in it."""
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
    """Raise `UsageError` for a sink that there is not, or whose package is not installed."""
    for sink in sinks:
        if names_file(sink.name):
            found = load_object(sink.name)
            if not callable(found):
                raise UsageError(f"log.sinks: {sink.name} is a {type(found).__name__}, not a function or a class")
            if sink.options and not isinstance(found, type):
                raise UsageError(
                    f"log.sinks: {sink.name} is a function, so that there is nothing to build with options"
                )
        elif sink.name not in BUILT_IN:
            raise UsageError(f"log.sinks: there is no sink {sink.name!r}{suggest(sink.name, BUILT_IN)}")
        elif find_spec(sink.name) is None:
            raise UsageError(
                f"log.sinks: {sink.name!r} needs the package {sink.name}, which is not installed; pip install "
                f"{sink.name}, or leave the sink out"
            )

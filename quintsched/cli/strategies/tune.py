"""`quintsched tune`: the best strategies for a model, a cluster and a batch, and why.

tune --model gpt3-175b --hardware a100-80gb --gpus 1024 --batch 1536 --seq 2048       all axes free
tune … --tp 8 --zero 0,1 --recompute none,selective                                   some fixed, or few to choose among
tune … --explain dp=16,tp=8,pp=8                                                      why that one is not the best
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.calibrate import calibrate_first
from quintsched.cli.output import AsJson, emit, percent, refuse_input, say
from quintsched.cli.pictures import PAGE, PICTURES, draw_tuning, picture_path
from quintsched.cli.strategies.flags import CHOSEN, taking_flags
from quintsched.cli.strategies.report import as_data
from quintsched.errors import MisfitError, UsageError

if TYPE_CHECKING:
    from quintsched.prediction.step import Prediction
    from quintsched.tuning.tune import Candidate, Tuning

WHERE = ("model", "hardware", "gpus", "gpus_per_node", "batch", "seq")
"""Flags that say what is searched; the others say what of it is fixed."""

FRONT_SHOWN = 2.0
"""People see the front up to so many times the best time."""

Picture = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PICTURE", help="Draw time against memory: .png, .svg, .html.")
]
Top = Annotated[int, typer.Option("--top", metavar="K", min=1, max=1000, help="How many are ranked.")]
Exhaustive = Annotated[bool, typer.Option("--exhaustive", help="Evaluate everything; the result is the same.")]


@taking_flags(*CHOSEN, several=True)
def tune(
    flags: dict[str, Any],
    top: Top = 10,
    output: Picture = None,
    exhaustive: Exhaustive = False,
    as_json: AsJson = False,
) -> None:
    """Find the fastest strategies that fit a model and a cluster.

    Every flag of a strategy that is left out is free. Where nothing fits, the exit code is 3.
    """
    for name in ("gpus", "batch"):
        if name not in flags:
            raise UsageError(f"--{name} is missing; tune needs --model, --hardware, --gpus and --batch")
    refuse_input(output, flags.get("model"), flags.get("hardware"))
    path = None if output is None else picture_path(output, (*PICTURES, PAGE))
    found = _search(flags, top, exhaustive)
    if not found.best:
        raise MisfitError(f"no strategy fits {found.hardware.name} with {found.hardware.memory_gb:g} GB")
    predictions = _predictions(found)
    if path is not None:
        draw_tuning(found, path)
    if as_json:
        emit(_as_data(found, predictions))
    else:
        say(_describe(found, predictions))


def _search(flags: Mapping[str, Any], top: int, exhaustive: bool) -> Tuning:
    from quintsched.descriptions.rows import find_parts, longest_sequence
    from quintsched.tuning.tune import tune

    if isinstance(flags.get("hardware"), str):
        calibrate_first(flags["hardware"])
    model, hardware = find_parts(flags)
    fixed = {name: value for name, value in flags.items() if name not in WHERE}
    with _progress() as progress:
        return tune(
            model,
            hardware,
            flags["gpus"],
            flags["batch"],
            flags.get("seq") or longest_sequence(model),
            fixed=fixed,
            top=top,
            prune=not exhaustive,
            progress=progress,
        )


@contextmanager
def _progress() -> Iterator[Callable[[int, int, float], None] | None]:
    """Show how far a search is, and the best so far, where a person is watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("searching"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, best_s: float) -> None:
            best = f"best {best_s:.4g} s" if best_s < float("inf") else "nothing fits yet"
            bar.update(task, completed=done, total=total, description=best)

        yield show


def _predictions(found: Tuning) -> list[Prediction]:
    from quintsched.prediction.step import predict

    return [predict(found.model, found.hardware, candidate.strategy) for candidate in found.best]


def _as_data(found: Tuning, predictions: Sequence[Prediction]) -> dict[str, Any]:
    from quintsched.tuning.reasons import reasons

    return {
        "model": found.model.name,
        "hardware": found.hardware.name,
        "gpus": found.space.gpus,
        "batch": found.space.batch,
        "seq": found.space.seq,
        "considered": found.strategies,
        "evaluated": found.evaluated,
        "seconds": found.seconds,
        "strategies": [as_data(prediction) for prediction in predictions],
        "front": [
            {
                "strategy": candidate.strategy.model_dump(mode="json", exclude_none=True),
                "step_s": candidate.step_s,
                "memory_bytes": candidate.memory_bytes,
            }
            for candidate in found.front
        ],
        "reason": list(reasons(found, predictions)),
    }


def _describe(found: Tuning, predictions: Sequence[Prediction]) -> Iterator[str]:
    from quintsched.text.listing import table
    from quintsched.tuning.reasons import reasons

    space = found.space
    count = f"{found.strategies:,}" if found.strategies < 10**9 else f"{found.strategies:.1e}"
    yield f"{found.model.name} on {space.gpus} {found.hardware.name}, {space.batch} samples of {space.seq} tokens"
    yield f"{count} strategies, of which {found.evaluated:,} were evaluated and none of the others can win"
    yield ""
    rows = [(str(rank), *_row(prediction)) for rank, prediction in enumerate(predictions, start=1)]
    yield from table(("", "step", "MFU", "GB", "strategy"), rows)
    yield ""
    yield from reasons(found, predictions)
    smaller = [one for one in found.front if one.step_s <= FRONT_SHOWN * found.best[0].step_s][1:]
    if smaller:
        yield ""
        yield from table(("slower, smaller", "GB", "strategy"), [_point(candidate) for candidate in smaller])


def _row(prediction: Prediction) -> tuple[str, ...]:
    from quintsched.descriptions.wording import duration, gigabytes, strategy_name

    held = gigabytes(prediction.memory_bytes)
    return duration(prediction.step_s), percent(prediction.mfu), held, strategy_name(prediction.strategy)


def _point(candidate: Candidate) -> tuple[str, ...]:
    from quintsched.descriptions.wording import duration, gigabytes, strategy_name

    return duration(candidate.step_s), gigabytes(candidate.memory_bytes), strategy_name(candidate.strategy)

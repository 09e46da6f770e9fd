"""`quintsched report`: how training runs went, from their logs: a table, and a picture of their curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.shared_options import AsJson, emit, percent, refuse_input, say

if TYPE_CHECKING:
    from quintsched.trace.training_log import TrainingLog


STALL = "stall.json"
"""The file beside a log in which a run that stalled or lost a rank leaves its verdict."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Logs of runs (log.path), or their folders.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PICTURE", help="Draw the curves: a .png, .svg or .html file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report how runs went: loss, speed, memory, bubble, and why one ended.

    Several runs are put side by side. A run that still goes on, or was killed, is reported up to its last record.
    """
    from quintsched.cli.pictures import picture_path, write_picture
    from quintsched.trace.training_log import TrainingLog

    path = None if output is None else picture_path(output, (".png", ".svg", ".html"))
    logs = [TrainingLog.load(run) for run in runs]
    if path is not None:
        for log in logs:
            refuse_input(path, log.path)
        write_picture(path, lambda: _draw(logs, path))
    if as_json:
        emit([summary_of(log) for log in logs])
    else:
        say(_lines(logs))


def summary_of(log: TrainingLog) -> dict[str, Any]:
    """Return a log's summary, with the verdict of a stall for a run that has no end and wrote it after its log."""
    from quintsched.stalls.stall_report import StallReport

    found, stall = log.summary(), log.path.parent / STALL
    if found["ended"] is None and stall.is_file() and stall.stat().st_mtime >= log.path.stat().st_mtime:
        found["ended"] = StallReport.load(stall).words()
    return found


def _draw(logs: Sequence[TrainingLog], path: Path) -> None:
    from quintsched import viz

    viz.render_training(logs, path)


_UNITS = {
    "loss": "{:.4f}",
    "step_s": "{:.3g} s a step",
    "samples_per_s": "{:,.0f} samples/s",
    "tokens_per_s": "{:,.0f} tokens/s",
    "memory_gb": "{:.3g} GB on the fullest rank",
}


def _lines(logs: Sequence[TrainingLog]) -> Iterator[str]:
    for number, log in enumerate(logs):
        found = summary_of(log)
        if number:
            yield ""
        yield f"{found['run']}: {found['plan']}" if found["plan"] else str(found["run"])
        figures = [text.format(found[name]) for name, text in _UNITS.items() if name in found and name != "loss"]
        if "loss" in found:
            best = f", best validation {found['best_validation_loss']:.4f}" if "best_validation_loss" in found else ""
            loss = "not finite" if found["loss"] is None else f"{found['loss']:.4f}"
            yield f"  step {found['step']}: loss {loss}{best}"
        if figures:
            yield f"  {', '.join(figures)}"
        if "bubble" in found:
            planned = f" (planned {percent(found['planned_bubble'])})" if "planned_bubble" in found else ""
            used = f", MFU {percent(found['mfu'])}" if "mfu" in found else ""
            yield f"  bubble {percent(found['bubble'])}{planned}{used}"
        first, *rest = (found["ended"] or "not yet").splitlines()
        yield f"  ended: {first}"
        yield from (f"    {line}" for line in rest)

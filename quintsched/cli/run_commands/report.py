"""`quintsched report`: how training runs went, from their logs: a table, and a picture of their curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.run_commands.run_end import summary_of
from quintsched.cli.shared_options import AsJson, emit, refuse_input, say
from quintsched.files.terminal import percent

if TYPE_CHECKING:
    from quintsched.trace.training_log import TrainingLog


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Logs of runs (log.path), or their folders.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="PICTURE", help="Draw the curves (.png, .svg), or write all as a .html page."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="DIR", help="The traces of the first run, for the page; default: beside its log."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report how runs went: loss, speed, memory, bubble, and why one ended.

    Several runs are put side by side. A run that still goes on, or was killed, is reported up to its last record. The
    page has all of it: curves, ranks, environment, and with a trace the steps beside the plan, where the time of each
    rank goes, and the interactive page.
    """
    from quintsched.cli.pictures import picture_path, write_picture
    from quintsched.trace.training_log import TrainingLog

    path = None if output is None else picture_path(output, (".png", ".svg", ".html"))
    logs = [TrainingLog.load(run) for run in runs]
    if path is not None:
        traces = trace if trace is not None else _traces_beside(logs[0].path)
        for read in (*(log.path for log in logs), traces):
            refuse_input(path, read)
        write_picture(path, lambda: _draw(logs, traces, path))
    if as_json:
        emit([summary_of(log) for log in logs])
    else:
        say(_lines(logs))


def _traces_beside(log: Path) -> Path | None:
    """Return the folder beside a log that has the trace of a run; None for none, or several."""
    from quintsched.trace.trace_json import file_name

    found = [path.parent for path in log.parent.glob(f"*/{file_name(0)}")]
    return found[0] if len(found) == 1 else None


def _draw(logs: Sequence[TrainingLog], traces: Path | None, path: Path) -> None:
    from quintsched import viz
    from quintsched.trace.measured_trace import Trace

    if path.suffix.lower() != ".html":
        viz.render_training(logs, path)
        return
    trace = None if traces is None else Trace.load_run(traces)
    viz.save_report(logs, [summary_of(log) for log in logs], trace, path)


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

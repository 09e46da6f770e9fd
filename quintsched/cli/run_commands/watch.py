"""`quintsched watch`: follows a run by its log, until it ends: a view in a terminal, else a line for each record."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.run_commands.run_end import is_abandoned, summary_of
from quintsched.cli.shared_options import say
from quintsched.errors import InputError, StallError

if TYPE_CHECKING:
    from rich.live import Live

    from quintsched.trace.training_log import Record, TrainingLog

POLL_S = 0.5


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The log of a run (log.path), or its folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write a line of JSON for each update.")] = False,
) -> None:
    """Follow a run: loss, speed, bubble, and what each rank computes and holds.

    Shows what the run has logged, and all that follows, until it ends. In a terminal the view is redrawn; into a pipe
    goes a line for each record. A rank that computes much longer than most is named. Exits with 4 if the run stalled or
    was killed.
    """
    from quintsched.trace.training_log import ENDS, LogReader, TrainingLog, log_file

    reader = LogReader(log_file(run))
    records: tuple[Record, ...] = ()
    with _live(as_json) as live:
        while True:
            new = reader.read_new()
            records += tuple(new)
            if not records:
                raise InputError(f"{reader.file}: no record of a run")
            log = TrainingLog(reader.file, records)
            is_over = records[-1]["event"] in ENDS or is_abandoned(log)
            if new or is_over:
                summary = summary_of(log) if is_over else log.summary()  # a stalled run may start again
                _show(live, log, summary, new, as_json)
            if is_over:
                break
            time.sleep(POLL_S)
    if records[-1]["event"] not in ENDS:
        raise StallError(f"{reader.file}: {summary['ended']}")
    if not as_json:
        say(f"ended: {summary['ended']}")


def _live(as_json: bool) -> AbstractContextManager[Live | None]:
    """Return a context with the view of a terminal; None where standard output is none."""
    if as_json or not sys.stdout.isatty():
        return nullcontext()
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop")


def _show(live: Live | None, log: TrainingLog, summary: dict[str, Any], new: list[Record], as_json: bool) -> None:
    from quintsched.cli.run_commands.run_view import view_of
    from quintsched.files.terminal import shown, shown_json

    if live is not None:
        from rich.text import Text

        size = shutil.get_terminal_size()
        live.update(Text(shown("\n".join(view_of(log, summary, size.columns, size.lines))), no_wrap=True), refresh=True)
    elif as_json:
        typer.echo(shown_json(json.dumps(summary, ensure_ascii=False, allow_nan=False)))
    else:
        for line in _lines(new, summary):
            say(line)
    sys.stdout.flush()


def _lines(new: list[Record], summary: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each new record that has figures."""
    from quintsched.cli.run_commands.run_view import line_of

    for record in new:
        match record["event"]:
            case "start":
                yield f"{summary['run']}: {record.get('plan', '')}"
            case "step":
                yield line_of(record, summary.get("planned_bubble"))
            case "epoch" | "evaluation" if record.get("validation_loss") is not None:
                yield f"step {record['step']}  validation loss {record['validation_loss']:.4f}"

"""`quintsched predict`: step time and memory of one strategy, or of many.

predict --model gpt3-175b --hardware a100-80gb --gpus 64 --tp 8 --pp 8 --batch 64    one strategy, by flags
predict plan.json job.yaml --hardware cpu                                            what a run will do
predict --rows FILE.json                                                             many: a list of {flag: value}
predict … --for megatron --emit DIR                                                  as that framework runs it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintsched.cli.shared_options import AsJson, emit, say
from quintsched.errors import InputError, QuintschedError, UsageError, counted
from quintsched.files.terminal_progress import progress
from quintsched.strategies.commands.calibrate import calibrate_first
from quintsched.strategies.commands.flags import taking_flags
from quintsched.strategies.commands.measured_flags import MeasuredStart, ProfileAt, ProfileFile
from quintsched.strategies.commands.prediction_report import as_data, describe

if TYPE_CHECKING:
    from quintsched.strategies.descriptions.model import Model
    from quintsched.strategies.descriptions.strategy import Strategy
    from quintsched.strategies.prediction.predict_one_strategy import Prediction
    from quintsched.strategies.tuning.export.emit import Emitted as Written

MOST_ROWS_BYTES = 2**26
"""Maximum number of bytes of a file of rows."""

Files = Annotated[
    list[Path] | None, typer.Argument(metavar="[[PLAN] JOB]", help="A job file, and before it a plan file if wanted.")
]
Simulated = Annotated[
    bool, typer.Option("--simulate", help="Time the real plan in the event simulator too, with the same costs.")
]
RowsFile = Annotated[
    Path | None,
    typer.Option("--rows", metavar="FILE.json", help="Many strategies: a list of objects whose keys are the flags."),
]

For = Annotated[
    str | None,
    typer.Option("--for", metavar="FRAMEWORK", help="Only what megatron, torchtitan, deepspeed or quintsched can run."),
]
Emitted = Annotated[
    Path | None,
    typer.Option("--emit", metavar="DIR", help="Write the plan and a job file, or the framework's arguments."),
]


@taking_flags()
def predict(
    flags: dict[str, Any],
    files: Files = None,
    rows: RowsFile = None,
    profile: ProfileFile = None,
    profile_at: ProfileAt = None,
    framework: For = None,
    directory: Emitted = None,
    simulate: Simulated = False,
    as_json: AsJson = False,
) -> None:
    """Predict a strategy's step time and memory, term by term.

    By flags, from a job file (and its plan), or many at once from a file of rows, for which flags give the defaults.
    """
    if rows is not None and (files or directory):
        raise UsageError(f"--rows takes the place of {'a job file' if files else '--emit'}; leave out one of them")
    if files:
        from quintsched.strategies.commands.job_rows import row_of_job

        flags = row_of_job(files) | flags
    if simulate and profile is not None:
        raise UsageError("--simulate times a plan by the model's own costs, not by those of --profile; leave out one")
    start = MeasuredStart.from_options(profile, profile_at)
    if rows is not None:
        emit(_answers(read_rows(rows), flags, framework, start, simulate))
        return
    found = predicted(_as_run(framework, flags), start)
    with progress("simulating the plan"):
        simulated_s = simulated(found) if simulate else None
    written = None if directory is None else written_for(framework, found.model, found.strategy, directory)
    if as_json:
        emit(as_data(found, simulated_s) | ({} if written is None else {"files": written.as_data()}))
        return
    say(describe(found, simulated_s))
    if written is not None:
        say(said(written))


def read_rows(file: Path) -> list[Any]:
    """Return the rows of a file; raises InputError if it holds no list."""
    from quintsched.files.user_records import read_json

    found = read_json(file, MOST_ROWS_BYTES, "the rows")
    if not isinstance(found, list):
        raise InputError(f"{file}: /: rows are a list of objects, [{{…}}, {{…}}], not a {type(found).__name__}")
    return found


def _answers(
    rows: Sequence[Any], flags: Mapping[str, Any], framework: str | None, start: MeasuredStart | None, simulate: bool
) -> list[dict[str, Any]]:
    """Return what is predicted of each row."""
    found: list[dict[str, Any]] = []
    with progress(f"predicting {counted(len(rows), 'row')}") as shown:
        for row in rows:
            found.append(_answer(row, flags, framework, start, simulate))
            shown.show_done(len(found), len(rows))
    return found


def _answer(
    row: Any, flags: Mapping[str, Any], framework: str | None, start: MeasuredStart | None, simulate: bool
) -> dict[str, Any]:
    """Return the prediction of a row, or the error that prevents it."""
    if not isinstance(row, dict):
        return {"error": f"a row is an object whose keys are the flags, not a {type(row).__name__}"}
    try:
        found = predicted(_as_run(framework, {**flags, **row}), start)
        return as_data(found, simulated(found) if simulate else None)
    except QuintschedError as error:
        return {"error": str(error)}


def _as_run(framework: str | None, flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the flags of a strategy as a framework runs it, if one is named."""
    if framework is None:
        return flags
    from quintsched.strategies.tuning.export.frameworks import settled

    return settled(framework, flags)


def written_for(framework: str | None, model: Model, strategy: Strategy, folder: Path) -> Written:
    """Return the files with which a framework, or our own runtime, runs a strategy, written into a folder."""
    from quintsched.strategies.tuning.export.emit import emit_for
    from quintsched.strategies.tuning.export.frameworks import OWN

    return emit_for(framework or OWN, model, strategy, folder)


def said(written: Written) -> list[str]:
    """Return the lines on files that were written."""
    return ["", f"run it: {written.start}", *(f"  {line}" for line in written.notes)]


def predicted(given: Mapping[str, Any], start: MeasuredStart | None) -> Prediction:
    """Return the prediction of a row of flags."""
    from quintsched.strategies.descriptions.flag_rows import read_row
    from quintsched.strategies.prediction.predict_one_strategy import predict
    from quintsched.strategies.prediction.profiled.predict_from_profile import predict_from_profile

    if isinstance(given.get("hardware"), str):
        calibrate_first(given["hardware"])
    row = read_row(given)
    if start is None:
        return predict(row.model, row.hardware, row.strategy)
    return predict_from_profile(row.model, row.hardware, row.strategy, start.profile(given))


def simulated(found: Prediction) -> float:
    """Return the seconds of a step, by simulating the strategy's plan."""
    from quintsched.strategies.prediction.simulated_strategy import simulated_step_s

    return simulated_step_s(found.model, found.hardware, found.strategy)

"""`quintsched render`: a picture of a plan over time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from quintsched.cli.output import AsJson, CostsFile, PlanFile, emit, read_plan, say, simulate_plan
from quintsched.errors import UsageError

FORMATS = (".png", ".svg")


def render(
    plan: PlanFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PICTURE", help="A .png or .svg file.")],
    costs: CostsFile = None,
    as_json: AsJson = False,
) -> None:
    """Draw a plan over time, and the activations that stand."""
    path = picture_path(output)
    simulation = simulate_plan(read_plan(plan), costs)
    from quintsched import viz

    write_picture(path, lambda: viz.render(simulation, path))
    if as_json:
        emit({"picture": str(path), **simulation.summary()})
    else:
        say(f"{path}: {simulation.plan.title}")


def picture_path(path: Path) -> Path:
    """Return the path if a picture can be drawn there; raises `UsageError`."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: cannot draw this format; name it {' or '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("pictures need matplotlib; pip install 'quintsched[viz]'")
    return path


def write_picture(path: Path, draw: Callable[[], object]) -> None:
    """Draw; raises `UsageError` where the file cannot be written."""
    try:
        draw()
    except OSError as error:
        raise UsageError(f"{path}: cannot write the picture: {error.strerror or error}") from error

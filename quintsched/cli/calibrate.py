"""`quintsched calibrate`: measure this machine into a description that `predict` and `tune` take as `--hardware`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from quintsched.cli.runs import call
from quintsched.errors import UsageError


def calibrate(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.json", help="Where the description goes.")
    ] = Path("cpu.json"),
    device: Annotated[
        str, typer.Option("--device", metavar="KIND", help="What to measure: cpu, or cuda and its like.")
    ] = "cpu",
) -> None:
    """Measure this machine: products, memory, links between processes; takes up to a minute."""
    require_torch("measuring this machine")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: there is no folder {str(output.parent)!r}")
    code = measure_into(output, device)
    if not code:
        typer.echo(f"{output}: use it with --hardware {output}")
    raise typer.Exit(code)


def measure_into(output: Path, device: str) -> int:
    """Measure in a process with one thread per rank, as runs have it, and return its exit code."""
    return call([sys.executable, "-m", "quintsched.runtime.calibrate", str(output), "--device", device])


def require_torch(doing: str) -> None:
    """Raise `UsageError` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{doing} needs torch; pip install 'quintsched[runtime]'")

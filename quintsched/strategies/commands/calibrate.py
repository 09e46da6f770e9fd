"""`quintsched calibrate`: measure this machine, for `predict` and `tune` with `--hardware`.

quintsched calibrate                     ──▶  $XDG_CACHE_HOME or ~/.cache, in it quintsched/cpu.json
quintsched calibrate -o mine.json        ──▶  mine.json, for `--hardware mine.json`
quintsched predict --hardware cpu …      measures first, if that was never done
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from quintsched.cli.run_and_verify import call
from quintsched.cli.shared_options import note, say
from quintsched.errors import UsageError

CPU = "cpu"


def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", help="For cpu by default in ~/.cache, or $XDG_CACHE_HOME."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="KIND", help="What to measure: cpu, or cuda and its like.")
    ] = CPU,
) -> None:
    """Measure products, memory and links between processes of this machine, up to a minute, for predictions."""
    from quintsched.strategies.descriptions.presets_and_files import calibrated_file

    if output is None and device != CPU:
        raise UsageError(f"calibrate --device {device}: say where the description goes, with -o {device}.json")
    file = output or calibrated_file()
    code = _measure(file, device)
    if not code:
        say(f"{file}: this machine as measured, for --hardware {output or CPU}")
    raise typer.Exit(code)


def calibrate_first(hardware: str) -> None:
    """Measure this machine if `--hardware cpu` needs it and it was never measured; exits on failure."""
    from quintsched.strategies.descriptions.presets_and_files import calibrated_file

    file = calibrated_file()
    if hardware.strip().lower() == CPU and not file.is_file():
        _make_folder(file)
        note(f"measuring this machine, up to a minute, into {file} (again: quintsched calibrate)")
        code = _measure(file, CPU)
        if code:
            raise typer.Exit(code)


def _measure(file: Path, device: str) -> int:
    """Measure in a process of its own, and return its exit code."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("measuring this machine needs torch; pip install 'quintsched[runtime]'")
    _make_folder(file)
    return call([sys.executable, "-m", "quintsched.runtime.calibrate", str(file), "--device", device])


def _make_folder(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(21, "Is a directory")
    except OSError as error:
        raise UsageError(
            f"{file}: cannot write the description: {error.strerror or error}; write it elsewhere, like "
            "`quintsched calibrate -o cpu.json`, and give --hardware cpu.json"
        ) from error

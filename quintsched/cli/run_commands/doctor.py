"""`quintsched doctor`: report what this machine has for planning and for runs, and what keeps a run from starting.

    good      as it should be
    note      works, but a run may be slower, or an optional package is absent
    missing   runs cannot start; exit code 3

Python and packages are looked at here; torch, devices, ports and links in a process of its own, with torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from quintsched.cli.shared_options import AsJson, emit, say
from quintsched.errors import MisfitError
from quintsched.files.terminal_progress import progress

State = Literal["good", "note", "missing"]
TIMEOUT_S = 120
"""Limit of the part that starts processes."""
EXTRAS = "viz", "hf", "timm", "solve"
"""Optional parts whose packages are reported."""


class ReportLine(NamedTuple):
    """One line of the report."""

    name: str
    found: str
    state: State = "good"
    advice: str = ""


def doctor(as_json: AsJson = False) -> None:
    """Report what this machine has: Python, torch, devices, ports, links.

    Ends with 3 where something keeps runs from starting.
    """
    with progress("starting two processes"):
        findings = [*_of_python(), *_of_files(Path.cwd()), *_of_torch()]
    if as_json:
        emit([finding._asdict() for finding in findings])
    else:
        say(_lines(findings))
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        raise MisfitError(f"runs cannot start on this machine: {', '.join(missing)}; see above what to do")


def _lines(findings: Sequence[ReportLine]) -> Iterator[str]:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        yield f"{finding.state:<8} {finding.name:<{width}}  {finding.found}"
        if finding.advice:
            yield f"{'':<8} {'':<{width}}  → {finding.advice}"


def _of_python() -> Iterator[ReportLine]:
    yield ReportLine("python", f"{platform.python_version()} at {sys.executable}")
    for extra in EXTRAS:
        there, absent = [], []
        for package in _packages_of(extra):
            try:
                there.append(f"{package} {metadata.version(package)}")
            except metadata.PackageNotFoundError:
                absent.append(package)
        said = ", ".join(there + [f"no {package}" for package in absent])
        if absent:
            yield ReportLine(f"[{extra}]", said, "note", f"if you need it: pip install 'quintsched[{extra}]'")
        elif there:
            yield ReportLine(f"[{extra}]", said)


def _packages_of(extra: str) -> Iterator[str]:
    try:
        requirements = metadata.requires("quintsched") or ()
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        if name and re.search(rf"extra == ['\"]{extra}['\"]", requirement) and name[0] != "quintsched":
            yield name[0]


def _of_files(folder: Path) -> Iterator[ReportLine]:
    free = f"{shutil.disk_usage(folder).free / 1e9:.0f} GB free"
    from quintsched.files.folders import exchange

    try:
        with TemporaryDirectory(dir=folder, prefix=".quintsched-") as inside:
            one, other = Path(inside, "one"), Path(inside, "other")
            one.mkdir()
            other.mkdir()
            swaps = exchange(one, other)
    except OSError as error:
        advice = "start runs where they can write checkpoints and logs"
        yield ReportLine("files", f"{folder}: {error.strerror or error}", "note", advice)
        return
    if swaps:
        yield ReportLine("files", f"{free}; folders are replaced in one step")
    else:
        yield ReportLine(
            "files", free, "note", "this file system cannot exchange folders in one step; docs/checkpoints.md"
        )


def _of_torch() -> Iterator[ReportLine]:
    if importlib.util.find_spec("torch") is None:
        yield ReportLine("torch", "not installed", "missing", "pip install 'quintsched[runtime]'; planning needs none")
        return
    command = [sys.executable, "-m", "quintsched.runtime.calibrate.doctor_facts"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ, check=False)
        yield from (ReportLine(*finding) for finding in json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        yield ReportLine("torch", f"no answer in {TIMEOUT_S} s", "missing", f"{' '.join(command)} says where it hangs")
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        yield ReportLine("torch", last, "missing", f"{' '.join(command)} shows the whole error")

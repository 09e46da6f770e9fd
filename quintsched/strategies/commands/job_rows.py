"""Row of flags for a job file and its plan, computed by a process of the runtime."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from quintsched.cli.run_and_verify import plan_and_job
from quintsched.errors import UsageError


def row_of_job(files: Sequence[Path]) -> dict[str, Any]:
    """Return the row of a job file, or of a plan file and a job file; exits with that process's code if it fails."""
    plan, job = plan_and_job(files)
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the sizes of a job's model are found with torch; pip install 'quintsched[runtime]'")
    arguments = ["--config", str(job), *([str(plan)] if plan else [])]
    command = [sys.executable, "-m", "quintsched.runtime.launch.show_job", *arguments, "--what", "row"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found

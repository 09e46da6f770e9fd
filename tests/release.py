"""A wheel as a user gets it: in a clean environment of each Python, the first page of the README does what it shows.

    wheel ─▶ environment of Python 3.11 ─▶ train.py of the README, then its deadlock ─▶ outputs as shown
          ─▶ environment of Python 3.12 ─▶ …

`python -m tests.release WHEEL FOLDER PYTHON…` makes the environments in FOLDER, and keeps them: `make release` does.
"""

import subprocess
import sys
from pathlib import Path

from .tutorials import ROOT, blocks, is_like, run_session, write_files

README = ROOT / "README.md"
ROUNDING = 0.02
"""Relative difference of a loss from what the page shows: other machines round otherwise."""


def first_page(scripts: Path, folder: Path) -> None:
    """Run the program and the sessions of the README by an environment's commands; raises where one differs."""
    folder.mkdir(exist_ok=True)
    write_files(README, folder)
    sessions = [block.text for block in blocks(README) if block.text.startswith("$ ")]
    assert len(sessions) >= 2
    for session in sessions:
        printed = run_session(session, folder, scripts=scripts)
        assert is_like(session, printed, ROUNDING), f"shown:\n{session}\nprinted:\n{printed}"


def install(python: str, wheel: Path, environment: Path) -> Path:
    """Make an environment with the wheel and what its examples need; return the folder of its commands."""
    subprocess.run([python, "-m", "venv", "--clear", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", f"{wheel}[examples]"], check=True)
    return environment / "bin"


def main(wheel: str, folder: str, *pythons: str) -> None:
    """Check a wheel on each Python."""
    for python in pythons:
        name = Path(python).name
        scripts = install(python, Path(wheel).resolve(), Path(folder).resolve() / name)
        first_page(scripts, Path(folder) / f"{name}-page")
        sys.stdout.write(f"{wheel}: the first page of the README does what it shows on {python}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""`python -m quintsched.runtime.calibrate FILE --device cpu`: measure this machine, and write the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from quintsched.errors import QuintschedError
from quintsched.files.terminal import standard_streams, write_error

INTERRUPTED = 130
"""128 + SIGINT, what shells expect of a program that was stopped with Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure this machine and write the results; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quintsched.runtime.calibrate", description=__doc__)
    parser.add_argument("file", type=Path, help="where the description goes")
    parser.add_argument("--device", default="cpu", help="the kind of device: cpu, or that of an accelerator")
    arguments = parser.parse_args(argv)
    try:
        import torch

        from .machine_description import calibrate

        calibrate(torch.device(arguments.device), arguments.file)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

"""Plan of a job file on standard output, for `quintsched compile job.yaml`: the one that `quintsched run` would run.

    job.yaml, --set A.B=C  ──▶  parallel compiled, read from its plan file, or chosen (auto)  ──▶  JSON, a plan file's

Reasons of a choice go to standard error. An elastic job's plan is that of the mesh that the file has.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from quintsched.errors import QuintschedError
from quintsched.files.terminal import standard_streams, write_error, write_line

from .run_request import RunRequest, read_request
from .worker import prepare


def main(argv: Sequence[str] | None = None) -> int:
    """Write the plan of a job; returns the exit code."""
    try:
        with redirect_stdout(sys.stderr):
            _, plan, notes = prepare(read_request(RunRequest, sys.argv[1:] if argv is None else argv), alone=True)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    for note in notes:
        write_line(note)
    sys.stdout.write(plan.to_json())
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

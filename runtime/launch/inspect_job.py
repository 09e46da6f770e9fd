"""Command `quintsched inspect`: inputs, outputs, mutations and random draws of a job's blocks, found by one step."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quintsched.errors import QuintschedError
from quintsched.files.terminal import shown, standard_streams, write_error

from . import worker
from .run_request import InspectRequest, read_request


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; a plan or blocks that a run would refuse are refused here too."""
    request = read_request(InspectRequest, sys.argv[1:] if argv is None else argv)
    try:
        job, plan, _ = worker.prepare(request, alone=True)
        from ..comm import run_local
        from ..train.trainer import Trainer

        facts, *_ = run_local(
            plan.mesh.size, lambda transport: Trainer.of_job(job, plan, transport).inspect(), job.runtime.timeout_s
        )
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    sys.stdout.write((json.dumps(facts.to_data(), indent=1) if request.as_json else shown(facts.explain())) + "\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

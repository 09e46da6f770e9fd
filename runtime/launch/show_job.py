"""Commands that show a job, on standard output: `quintsched inspect`, `compile job.yaml`, `run --print-config`.

    facts       inputs, outputs, mutations and random draws of its blocks, found by one step
    plan        that of `quintsched run`: compiled, read from its plan file, or chosen (auto), with reasons on standard
                error; for an elastic job, that of the mesh that the file has
    row         flags of a prediction, for `quintsched predict job.yaml`
    settings    the job with all its settings        schema    that of job files

A plan or blocks that a run would refuse are refused here too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from quintsched.errors import QuintschedError
from quintsched.files.terminal import shown, standard_streams, write_error, write_line

from ..settings.job_json_schema import job_schema, job_yaml
from .run_arguments import ShowRequest, read_request


def main(argv: Sequence[str] | None = None) -> int:
    """Show what is asked for; returns the exit code."""
    request = read_request(ShowRequest, sys.argv[1:] if argv is None else argv)
    try:
        with redirect_stdout(sys.stderr):
            text = _text_of(request)
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    sys.stdout.write(text)
    return 0


def _text_of(request: ShowRequest) -> str:
    if request.what == "schema":
        return shown(json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n")
    if request.what == "settings":
        return shown(job_yaml(request.load_job()))
    from . import worker  # not needed to show settings

    job, plan, notes = worker.prepare(request, alone=True)
    if request.what == "plan":
        for note in notes:
            write_line(note)
        return plan.to_json()
    if request.what == "row":
        from .prediction_flags import row_of

        return json.dumps(row_of(job, plan)) + "\n"
    from ..comm import run_local
    from ..train.trainer import Trainer

    facts, *_ = run_local(
        plan.mesh.size, lambda transport: Trainer.of_job(job, plan, transport).inspect(), job.runtime.timeout_s
    )
    return (json.dumps(facts.to_data(), indent=1) if request.as_json else shown(facts.explain())) + "\n"


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

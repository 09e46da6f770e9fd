"""Commands `quintsched run --print-config` and `--print-schema`: a job with all its settings; the schema of jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quintsched.errors import QuintschedError
from quintsched.files.terminal import shown, standard_streams, write_error

from ..settings.job_document import job_schema, job_yaml
from .run_request import PrintRequest, read_request


def main(argv: Sequence[str] | None = None) -> int:
    """Print the settings of the job that is named, or the schema where none is; starts nothing."""
    request = read_request(PrintRequest, sys.argv[1:] if argv is None else argv)
    try:
        schema = json.dumps(job_schema(), indent=1, ensure_ascii=False) + "\n"
        text = job_yaml(request.load_job()) if request.config else schema
    except QuintschedError as error:
        write_error(error)
        return error.exit_code
    sys.stdout.write(shown(text))
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())

"""Window of traced steps; the trace is written as soon as the last of them has ended.

A run that ends sooner, since training stopped early, writes the steps it has. Steps are counted from the run's start.
"""

from __future__ import annotations

from quintsched.errors import MisfitError, counted
from quintsched.files.atomic import cannot_write, whole_path

from ..engine import Engine
from ..settings.job_file import RuntimeConfig


def traced_steps(runtime: RuntimeConfig) -> range | None:
    """Return the steps that a run traces, counted from 0; None: no trace is requested."""
    return range(runtime.trace_first, runtime.trace_first + runtime.trace_steps) if runtime.trace is not None else None


class TracedSteps:
    """Counts a run's steps, `num_steps` in all, and writes its trace.

    Raises:
        UsageError: the directory cannot be made.
        MisfitError: the run ends before the first step that is to be traced.
    """

    def __init__(self, runtime: RuntimeConfig, num_steps: int) -> None:
        self._directory = None if runtime.trace is None else whole_path(runtime.trace)
        self._left = runtime.trace_first + runtime.trace_steps
        if self._directory is None:
            return
        if runtime.trace_first >= num_steps:
            raise MisfitError(
                f"runtime.trace_first is {runtime.trace_first}, but this run ends after {counted(num_steps, 'step')}: "
                "nothing would be traced; set it to an earlier step, counted from 0"
            )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._directory, "the trace (runtime.trace)", error) from None

    def count(self, engine: Engine) -> None:
        """Count a step that has ended; after the last traced one, write the trace."""
        self._left -= 1
        if self._left == 0 and self._directory is not None:
            engine.save_trace(self._directory)

    def finish_trace(self, engine: Engine) -> None:
        """Write the trace, if it is not yet written: no more steps follow."""
        if self._left > 0 and self._directory is not None:
            engine.save_trace(self._directory)

"""Refusals of ranks that do not agree."""

from collections.abc import Callable

from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, run_local


def refusals(size: int, run: Callable[[Transport], object]) -> list[str]:
    """Return what each rank says that refuses to run."""

    def words(transport: Transport) -> str:
        try:
            run(transport)
        except MisfitError as error:
            return str(error)
        return "ran"

    return run_local(size, words)

"""Calls that have to be refused in words."""

from collections.abc import Callable
from typing import Any

import pytest

from quintsched.errors import MisfitError, UsageError


def require_refusals(*calls: tuple[str, Callable[[], object]], error: type[Exception] = UsageError) -> None:
    """Require that each call raises an error of a kind, with words that match its pattern."""
    for words, call in calls:
        with pytest.raises(error, match=words):  # noqa: PT012
            call()
            pytest.fail(f"not refused: {words}")


def refusals(size: int, run: Callable[[Any], object]) -> list[str]:
    """Return what each rank says that refuses to run with its transport, or "ran"."""
    from quintsched.runtime.comm import run_local  # here: tests of the planner do without torch

    def words(transport: Any) -> str:
        try:
            run(transport)
        except MisfitError as error:
            return str(error)
        return "ran"

    return run_local(size, words)

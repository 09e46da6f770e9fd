"""Calls that have to be refused in words."""

from collections.abc import Callable

import pytest

from quintsched.errors import UsageError


def require_refusals(*calls: tuple[str, Callable[[], object]], error: type[Exception] = UsageError) -> None:
    """Require that each call raises an error of a kind, with words that match its pattern."""
    for words, call in calls:
        with pytest.raises(error, match=words):  # noqa: PT012
            call()
            pytest.fail(f"not refused: {words}")

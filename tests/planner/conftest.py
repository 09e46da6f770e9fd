"""A plan to try things on."""

import pytest

import quintsched as qs


@pytest.fixture(scope="session")
def plan() -> qs.Plan:
    return qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=4)

"""The job of `examples/clusters` by `quintsched run`, for comparison, and a folder for another run of it."""

from pathlib import Path

import pytest

from .engine_runs import EngineRun, plain_run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """The job by `quintsched run`."""
    return plain_run(EngineRun(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="session")
def expected(plain: EngineRun) -> str:
    """SHA-256 of the weights after `quintsched run`."""
    return plain.weights()


@pytest.fixture
def run(tmp_path: Path) -> EngineRun:
    return EngineRun(tmp_path)

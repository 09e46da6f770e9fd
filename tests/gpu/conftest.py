"""Setup of GPU tests: the device, time limits, and the reason for skipping without one."""

import time
from pathlib import Path

import pytest

from .machine import Machine

FOLDER = Path(__file__).parent
STARTED_S = time.monotonic()
FILES = ("device", "transport", "refused", "matrix")
"""In which order the files run, by their names: what others stand on goes first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the tests of a GPU themselves, over gloo"
    )
    parser.addoption(
        "--begin-within",
        type=float,
        default=None,
        metavar="SECONDS",
        help="tests of a GPU that have not begun by then are skipped, for a machine that is lent for minutes",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): skipped where so many ranks cannot run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, skip those for which there are no ranks, and do not take a machine's warnings for faults.

    A driver and a library warn of what is so on a machine, such as a context that is made late.
    """
    machine, reasons = _machine_of(config), dict[int, str]()
    for item in items:
        if item.path.parent == FOLDER:
            item.add_marker(pytest.mark.filterwarnings("default"))
            for mark in item.iter_markers("ranks"):
                (count,) = mark.args
                reason = reasons.setdefault(count, machine.reason_to_skip(count))
                item.add_marker(pytest.mark.skipif(bool(reason), reason=reason or "there are ranks"))
    items.sort(key=_place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--begin-within", None)
    if limit_s is not None and time.monotonic() - STARTED_S > limit_s:
        pytest.skip(f"not begun within {limit_s:g} s")


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    return _machine_of(request.config)


def _machine_of(config: pytest.Config) -> Machine:
    return Machine(config.getoption("--device", "cuda"))


def _place(item: pytest.Item) -> int:
    """Return where a test's file stands in the order; others keep their places before it."""
    if item.path.parent != FOLDER:
        return -1
    return next((place for place, word in enumerate(FILES) if word in item.path.stem), len(FILES))

"""Shared settings of all tests: hypothesis profiles, and the selection of cases that run every day.

`pytest --hypothesis-profile=thorough` tries harder. Of the cases of a test that is `sampled(k)`, every 10k-th runs
every day, and all of them with the slow ones. The first of them is another for each test, one of the first 5k, so that
a schedule or a mesh which one test leaves out is taken by others. Likewise every day has some of hypothesis' examples,
`make test-all` all of them.
"""

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import settings

from quintsched.schedules.kit import registry

settings.register_profile("quick", max_examples=32, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")

SAMPLED_EVERY = 10
"""Factor by which fewer cases of sampled tests run every day than their mark says."""
EXAMPLES_EVERY = 6
"""Factor by which fewer of hypothesis' examples are tried every day, if there are many."""
MANY_EXAMPLES = 16

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as in the background of a script, or behind nohup
        signal.signal(number, usual)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of sampled tests as slow, but for some, before any are left out."""
    if config.getoption("markexpr") == "not slow" and config.getoption("--hypothesis-profile") is None:
        _try_fewer_examples(items)
    cases = Counter(_test_of(item) for item in items)
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test, every = _test_of(item), SAMPLED_EVERY * sampled.args[0]
            first = -crc32(test.encode()) % min(every // 2, cases[test])
            if seen[test] < first or (seen[test] - first) % every:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collectstart() -> None:
    """Have what a test file makes when it is imported be the same, whatever was imported before it."""
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have a test draw the same, whatever ran before it."""
    seed()


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that garbage collections need not scan them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the schedules that a test registers after it, and the users' modules, which register on import."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield
    for name in [name for name in sys.modules if name.startswith("quintsched_user_")]:
        del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def uncalibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide this machine's calibration, with which jobs would count FLOPs; lists of fonts and downloads stay."""
    with pytest.MonkeyPatch.context() as patch:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for name, folder in (("MPLCONFIGDIR", "matplotlib"), ("PIP_CACHE_DIR", "pip")):
            if name not in os.environ:
                patch.setenv(name, str(caches / folder))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


def seed() -> None:
    """Seed the generators of Python, and of torch where that is imported."""
    random.seed(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # until then, each call would be kept, with its traceback
            torch.cuda.manual_seed_all(0)


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    for function in {getattr(item, "function", None) for item in items}:
        said = getattr(function, "_hypothesis_internal_use_settings", None)
        if said is not None and said.max_examples > MANY_EXAMPLES:
            most = max(MANY_EXAMPLES, said.max_examples // EXAMPLES_EVERY)
            function._hypothesis_internal_use_settings = settings(said, max_examples=most)


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]

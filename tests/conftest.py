"""What all tests share: how hard hypothesis tries, and which cases run every day.

`pytest --hypothesis-profile=thorough` tries harder. Of the cases of a test that is `sampled(k)`, every k-th runs every
day, and all of them with the slow ones; which of them is another for each test, so that a schedule or a mesh which one
test leaves out is taken by others.
"""

from __future__ import annotations

import gc
import signal
from collections import Counter
from zlib import crc32

import pytest
from hypothesis import settings

settings.register_profile("quick", max_examples=32, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as in the background of a script, or behind nohup
        signal.signal(number, usual)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of sampled tests as slow, but for every k-th, before any are left out."""
    cases = Counter(_test_of(item) for item in items)
    seen: Counter[str] = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            test = _test_of(item)
            if (seen[test] + crc32(test.encode())) % min(sampled.args[0], cases[test]):
                item.add_marker(pytest.mark.slow)
            seen[test] += 1


def pytest_collection_finish() -> None:
    """What was imported stays: it need not be looked through whenever garbage is collected."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _test_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]

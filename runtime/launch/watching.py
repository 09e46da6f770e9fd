"""The launcher's side of the watch: a hub beside the ranks, and the verdict in the launcher's terminal.

a rank has failed ─▶ the hub is told how ─▶ its verdict ─▶ standard error ─▶ only then the others are ended
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..watch.hub import Hub
from ..watch.verdict import Verdict
from .supervise import say_end

VERDICT_S = 6.0
"""How long the launcher waits for the verdict when a rank has failed."""


@contextmanager
def watching(num_ranks: int) -> Iterator[Hub]:
    """Watch the ranks that are started within a `with`; they find the hub by the environment."""
    hub = Hub(num_ranks, tell=_say)
    before = dict(os.environ)
    os.environ.update(hub.environment)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()
        for name in hub.environment:
            os.environ.pop(name)
        os.environ.update({name: value for name, value in before.items() if name in hub.environment})


def note_end(hub: Hub, rank: int, code: int) -> None:
    """Take in how a rank ended; where that is a failure, return when the verdict is known, and has been said."""
    hub.ended(rank, code)
    if code and hub.wait(VERDICT_S) is None:
        say_end(rank, code)


def _say(verdict: Verdict) -> None:
    sys.stderr.write(f"error: {verdict.message}\n")
    sys.stderr.flush()

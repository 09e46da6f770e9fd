"""The launcher's side of the watch: a hub beside the ranks, and the verdict in the launcher's terminal.

a rank has failed ─▶ the hub is told how ─▶ its verdict ─▶ standard error ─▶ only then the others are ended

On several machines rank 0 starts the hub, as under torchrun, each launcher tells it how its ranks end, and every rank
that is left says the verdict.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep

from quintsched.files.terminal import write_error

from ..watch.hub import Hub
from ..watch.start import tell_end
from ..watch.verdict import Verdict
from .machines import Machines
from .processes import Place
from .supervise import say_end

VERDICT_S = 6.0
"""How long the launcher waits for the verdict when a rank has failed."""
SPEAK_S = 1.5
"""How long the ranks have to say it themselves."""


@contextmanager
def watching(place: Place) -> Iterator[Hub | None]:
    """Watch the ranks that are started within a `with`; they find the hub by the environment."""
    if place.num_nodes > 1:
        yield None
        return
    hub = Hub(place.num_ranks, tell=_say)
    os.environ.update(hub.environment)
    hub.start()
    try:
        yield hub
    finally:
        hub.close()
        for name in hub.environment:
            del os.environ[name]


def note_end(hub: Hub | None, machines: Machines | None, rank: int, code: int) -> None:
    """Take in how a rank ended; where that is a failure, return when the verdict is known, and has been said."""
    if hub is None:
        if machines is not None and machines.hub is not None:
            tell_end(machines.hub, rank, code)
        say_end(rank, code)
        sleep(SPEAK_S if code else 0.0)
        return
    hub.ended(rank, code)
    if code and hub.wait(VERDICT_S) is None:
        say_end(rank, code)


def _say(verdict: Verdict) -> None:
    write_error(verdict.message)

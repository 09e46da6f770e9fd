"""Calls of a program, and the same calls bound to the units of a step, once these come again.

call             looks up what depends on units: their shapes, and whether they have samples
call.bind(units) ──▶ a call for these units alone; None where there is nothing to do
"""

from __future__ import annotations

from collections.abc import Callable

from ...comm.overlap_threads import BoundCall
from ...step_setup.unit_samples import Units


def bound(call: BoundCall, units: Units) -> BoundCall | None:
    """Return a call bound to units; itself where it has no `bind`, None where it has nothing to do."""
    bind: Callable[[Units], BoundCall | None] | None = getattr(call, "bind", None)
    return call if bind is None else bind(units)


def in_turn(*calls: BoundCall | None) -> BoundCall:
    """Return one call of several, one after the other; None stands for no call."""
    some = [call for call in calls if call is not None]
    if len(some) == 1:
        return some[0]

    def run() -> None:
        for call in some:
            call()

    run.bind = lambda units: in_turn(*[bound(call, units) for call in some])  # type: ignore[attr-defined]
    return run

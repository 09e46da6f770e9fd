"""Calls that look up the shapes of a step's units, and the same calls bound to these, for all steps of such units.

call             looks up, each time, the shape of its unit and whether it has samples
call.bind(units) ──▶ a call for these units alone, without the lookups; None where it has nothing to do
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...comm.overlap_threads import BoundCall
from ...step_setup.unit_samples import Units


class UnitCall(partial[None]):
    """Call that looks up its unit; `bind` returns it bound to units. As a `partial`, it adds no Python frame."""

    bind: Callable[[Units], BoundCall | None]


def bound(call: BoundCall, units: Units) -> BoundCall | None:
    """Return a call bound to units; itself where it does not depend on them, None where it has nothing to do."""
    return call.bind(units) if isinstance(call, UnitCall) else call


def in_turn(*calls: BoundCall | None) -> BoundCall:
    """Return one call that makes several in turn; those that are None are left out."""
    some = [call for call in calls if call is not None]
    if len(some) == 1:
        return some[0]

    def run() -> None:
        for call in some:
            call()

    in_order = UnitCall(run)
    in_order.bind = lambda units: in_turn(*[bound(call, units) for call in some])
    return in_order

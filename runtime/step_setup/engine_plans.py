"""Plans of an engine: the one it was created with, its evaluation, and those for other numbers of microbatches.

    plan of 8 microbatches ──▶ its evaluation
            │ step(…, microbatches=6): compiled and proved again, once
            └──▶ plan of 6 ──▶ its evaluation

A plan that no schedule's name compiles to (imported, edited by hand) cannot be compiled again: then its last
microbatches get no samples, which costs their share of the bubble and changes no result.
"""

from __future__ import annotations

import logging

from quintsched.compiler import compiled_again, evaluation_of
from quintsched.errors import UsageError, counted
from quintsched.ir.mesh import whole_number
from quintsched.plan import Plan

from ..agreement.refuse_unequal_ranks import agree
from ..comm import Group, Transport
from ..parallel.mesh_groups import open_channels

_logger = logging.getLogger(__name__)


class StepPlans:
    """Plans of one rank's engine, by number of microbatches, with their channels of the transport open.

    Args:
        plan: the engine's own, proved for the transport.
        transport: this rank's.
        world: all ranks, which have to request the same number.
        ring: whether ring attention runs over cp.
    """

    def __init__(self, plan: Plan, transport: Transport, world: Group, *, ring: bool) -> None:
        self.plan = plan
        self._transport, self._world, self._ring = transport, world, ring
        self._of: dict[int, tuple[Plan, Plan]] = {plan.schedule.microbatches: (plan, evaluation_of(plan))}

    def open(self) -> None:
        """Open the channels of the engine's own plan and its evaluation."""
        open_channels([*self._of[self.plan.schedule.microbatches]], self._transport, ring=self._ring)

    def training(self, microbatches: int | None) -> Plan:
        """Return the plan for a step of so many microbatches; None: the engine's own.

        Where a number is given, all ranks give the same (collective).

        Raises:
            MisfitError: ranks give other numbers.
            UsageError: more than the plan has, where it cannot be compiled again, or less than one.
        """
        return self._both(microbatches)[0] if microbatches is not None else self.plan

    def evaluation(self, microbatches: int | None) -> Plan:
        """Return the plan that evaluates so many microbatches; see `training`."""
        return self._both(microbatches)[1]

    def _both(self, microbatches: int | None) -> tuple[Plan, Plan]:
        if microbatches is None:
            return self._of[self.plan.schedule.microbatches]
        if whole_number(microbatches) is None:
            raise UsageError(f"a step cannot have microbatches={microbatches!r}; give a whole number from 1 on")
        agree("the microbatches of a step", str(microbatches), self._world)
        if microbatches < 1:
            raise UsageError(f"a step cannot have microbatches={microbatches}; give a number from 1 on")
        if microbatches not in self._of:
            self._of[microbatches] = self._made_for(microbatches)
        return self._of[microbatches]

    def _made_for(self, microbatches: int) -> tuple[Plan, Plan]:
        own = self.plan.schedule
        plan = self._compiled(microbatches)
        if plan is None:
            _logger.info("only %d of the plan's %d microbatches get samples", microbatches, own.microbatches)
            return self._of[own.microbatches]
        _logger.info("the plan (%s) was compiled again for %d microbatches", own.name, microbatches)
        both = plan, evaluation_of(plan)
        open_channels([*both], self._transport, ring=self._ring)
        return both

    def _compiled(self, microbatches: int) -> Plan | None:
        """Return the plan compiled for another number of microbatches; None: use the engine's own, padded."""
        own, may_pad = self.plan.schedule, microbatches < self.plan.schedule.microbatches
        try:
            found = compiled_again(self.plan, microbatches=microbatches)
        except UsageError:
            if may_pad:
                return None
            raise
        if found is None and not may_pad:
            raise UsageError(
                f"the plan has {counted(own.microbatches, 'microbatch')}, and it cannot be compiled again for "
                f"{microbatches}, since it is not what {own.name!r} compiles to; give at most {own.microbatches}, or "
                "another plan"
            )
        if found is None or found.stage_to_pp != self.plan.stage_to_pp:
            return None
        found.check(profile=self._transport.profile).raise_if_unsound()
        return found

"""Certificate of a solved plan: its value, and a lower bound with the rank and the reason that it follows from.

    {"objective": "span", "value": 41.0, "bound": 37.0, "rank": 0, "reason": "memory", "memory_cap": 2.0, "costs": {…}}

`certify` adds everything up again: the plan is sound, keeps to the cap, takes as long as stated, and no order of the
same placement can be faster than the bound. It does not search, and knows nothing of how the plan was found.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from quintsched.check_call_arguments import PLAN, ours, takes
from quintsched.errors import UnsoundError, counted
from quintsched.files.atomic import write_whole
from quintsched.files.user_records import read_record
from quintsched.ir.instruction_set import COMPUTING, Instruction, LendAct, OffloadAct, Overlap, Recompute
from quintsched.ir.layout import equal_routes
from quintsched.plan import Plan
from quintsched.simulation.cost_forms import OneOrMany, PlanNumber
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulator import Simulation
from quintsched.solve.order_lower_bounds import Reason, bound_of
from quintsched.solve.order_problem import Objective, StepProblem

MAX_BYTES = 2**24
TOLERANCE = 1e-9
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


class Certificate(BaseModel):
    """Claims about a solved plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Objective
    value: Amount
    """Time of the plan, in the unit of the costs."""
    bound: Amount
    """Time that no order with this placement can be below."""
    rank: PlanNumber
    """Pipeline rank that the bound follows from."""
    reason: Reason
    memory_cap: OneOrMany[Amount] | None = None
    """Most activations of each rank, in microbatches of a whole rank: one number, or one per rank; None: any number."""
    costs: Costs = Costs()

    @classmethod
    def load(cls, path: Path) -> Certificate:
        """Read a certificate; raises `UsageError` (missing) or `InputError` (broken), with the place."""
        return read_record(cls, path, MAX_BYTES, "the certificate")

    def save(self, path: Path) -> None:
        """Write the certificate; raises `UsageError` if it cannot be written."""
        text = json.dumps(self.model_dump(mode="json", exclude_unset=True), indent=1)
        write_whole(path, text + "\n", "the certificate")

    @property
    def gap(self) -> float:
        """Fraction of the time by which the plan may be longer than the best order."""
        return 1 - self.bound / self.value if self.value else 0.0


@dataclass(frozen=True)
class Certified:
    """Result of a check: the certificate, and the peak of activations of each rank."""

    certificate: Certificate
    peaks: tuple[float, ...]

    @property
    def is_optimal(self) -> bool:
        """Whether no order with this placement is faster."""
        return self.certificate.gap <= TOLERANCE


@takes("certify(found.plan, found.certificate)", plan=PLAN, certificate=ours("Certificate"))
def certify(plan: Plan, certificate: Certificate) -> Certified:
    """Verify all claims of a certificate about a plan.

    Raises:
        UnsoundError: a claim that does not hold, or a plan that is not sound.
    """
    plan.check(profile="blocking").raise_if_unsound()
    require_searched(plan, Overlap)
    costs = certificate.costs.spread(plan.stage_shares, plan.schedule.slices)
    sizes = plan.mesh.pp, plan.schedule.microbatches, plan.stage_to_pp
    choice = plan.recompute, plan.recompute_microbatches
    problem = StepProblem.of(*sizes, costs, certificate.memory_cap, len(plan.routes), *choice)
    value = value_of(simulated := plan.simulate(certificate.costs), certificate.objective)
    _require(abs(value - certificate.value) <= TOLERANCE * value, f"its {certificate.objective} is {value:g}")
    peaks = tuple(simulated.peak_activations)
    for rank, (held, cap) in enumerate(zip(peaks, problem.caps, strict=True)):
        _require(
            held <= cap * (1 + TOLERANCE),
            f"rank {rank} holds {counted(held, 'microbatch', 'g')}, above the cap of {cap:g}",
        )
    _require(certificate.rank < plan.mesh.pp, f"it has no pipeline rank {certificate.rank}")
    if plan.columns.are(OffloadAct, LendAct).any():  # what is elsewhere is in no cap: only bounds of any cap hold
        problem = replace(problem, caps=(math.inf,) * plan.mesh.pp)
    bound = bound_of(problem, certificate.objective, certificate.rank, certificate.reason)
    where = f"rank {certificate.rank} by {certificate.reason}"
    _require(
        certificate.bound <= bound * (1 + TOLERANCE), f"{where} proves {bound:.10g} only, not {certificate.bound:.10g}"
    )
    _require(certificate.bound <= value * (1 + TOLERANCE), f"it is itself faster than the bound, {value:g}")
    return Certified(certificate, peaks)


def value_of(simulated: Simulation, objective: Objective) -> float:
    """Return the time of a simulated step; a makespan is without messages, reductions and optimizer at its end."""
    if objective == "span":
        return simulated.span
    return float(simulated.end[simulated.plan.columns.are(*COMPUTING)].max(initial=0.0))


def require_searched(plan: Plan, *refused: type[Instruction]) -> None:
    """Raise `UnsoundError` for a plan that the bounds are not for, or that has one of the instructions `refused`."""
    stages, microbatches, routes = len(plan.stage_to_pp), plan.schedule.microbatches, len(plan.routes)
    if plan.mode != "train" or routes > 2 or plan.schedule.slices != 1:
        raise UnsoundError("only training plans with whole sequences and at most 2 routes are searched; this is none")
    if stages % routes or microbatches % routes or plan.routes != equal_routes(routes, stages, microbatches):
        raise UnsoundError(
            "bounds are of plans whose stages are numbered in the order of the model, and whose routes have equal "
            "parts of stages and microbatches, in order; this is none"
        )
    counts = {plan.stage_to_pp.count(rank) for rank in range(plan.mesh.pp)}
    if counts != {plan.schedule.chunks * routes}:
        raise UnsoundError("no bound holds for plans with unlike numbers of stages on their ranks, as this one")
    for kind in refused:
        if plan.columns.are(kind).any():
            raise UnsoundError(f"plans with {kind.__name__}, as this one, are not analysed: no bound holds for them")
    computed = plan.columns.rows_where(*COMPUTING)
    recomputes = np.flatnonzero(plan.columns.are(Recompute)[computed])
    cells = (plan.columns.stage * plan.schedule.num_units + plan.columns.unit)[computed]
    if (cells[recomputes] != cells[recomputes + 1]).any():
        raise UnsoundError("bounds are of plans that recompute right before the backward; this one computes between")


def _require(holds: bool, truth: str) -> None:
    if not holds:
        raise UnsoundError(f"the certificate does not hold for this plan: {truth}")

"""Better order for a plan that has run: in equal memory, and with what the plan itself does to need less of it.

recomputes      the same stages recompute, or others where these are chosen anew
offloads        other activations may be on the host, under the same cap
lends           other activations may be on other ranks, under the same cap
bidirectional   half of the microbatches go each way
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quintsched.ir.instruction_set import Instruction, LendAct, OffloadAct, Overlap
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs
from quintsched.solve.check_order_certificate import require_searched
from quintsched.solve.order_search import OrderSearch
from quintsched.solve.recompute_offload_or_lend import LENT, OFFLOADED, SETTINGS, How, PlanOf, search_for_room
from quintsched.solve.search_problem import Orders, Problem, problem_of

CHECKPOINT = 0.1
"""Share of a stage's activations that is taken to stay until they are recomputed. With one stage on each rank, any
share leads to the same orders."""


def problem_of_plan(plan: Plan, costs: Costs | None = None, caps: float | Sequence[float] | None = None) -> Problem:
    """Return the problem of a plan's sizes, routes and recomputed stages; of unit costs by default.

    Raises:
        UnsoundError: a plan that the solver does not search.
        UsageError: a cap in which one microbatch has no room.
    """
    require_searched(plan, Overlap, *((LendAct,) if _has(plan, OffloadAct) else ()))
    costs = costs or Costs(activation_checkpointed=CHECKPOINT)
    sizes = plan.mesh.pp, plan.schedule.microbatches, plan.stage_to_pp
    choice = plan.recompute, plan.recompute_microbatches
    return problem_of(*sizes, costs, caps, len(plan.routes), *choice)


def orders_of(problem: Problem, plan: Plan) -> Orders:
    """Return the orders of a plan, which are of the problem."""
    return tuple(tuple(problem.numbers(program)) for program in plan.programs)


def moved_by(plan: Plan) -> str:
    """Return what a plan does with activations that have no room: offloaded, lent, or "" for none."""
    return next((word for word, kind in ((OFFLOADED, OffloadAct), (LENT, LendAct)) if _has(plan, kind)), "")


def _has(plan: Plan, kind: type[Instruction]) -> bool:
    return bool(plan.columns.are(kind).any())


def held_by_stages(plan: Plan, *, checkpoints: bool = True) -> dict[str, Any]:
    """Return the costs of what stages hold, by their blocks where these are known, with or without `checkpoints`."""
    shares = plan.stage_shares
    found: dict[str, Any] = {"activation": shares} if shares else {}
    if checkpoints:
        found["activation_checkpointed"] = tuple(CHECKPOINT * share for share in shares) or CHECKPOINT
    return found


def caps_of(plan: Plan, costs: Costs | None = None) -> float | tuple[float, ...]:
    """Return the most activations of each rank; of a plan that offloads or lends, the one number for all.

    `costs` say what stages hold; by default, all stages of a rank hold the same.
    """
    if moved_by(plan):
        return max(plan.simulate(costs or Costs(activation_checkpointed=CHECKPOINT)).peak_activations)
    problem = problem_of_plan(plan, costs)
    return tuple(map(problem.peak, orders_of(problem, plan)))


def better_order(
    plan: Plan,
    costs: Costs,
    caps: float | Sequence[float],
    how: How,
    plan_of: PlanOf,
    *,
    ends_s: float,
    chooses: bool = False,
) -> tuple[OrderSearch, Plan]:
    """Search from a plan's order on, by `how`; return the search, and the best plan, as `plan_of` compiles it.

    Args:
        plan: the plan that has run.
        costs: its costs.
        caps: most activations of each rank; of a plan that offloads or lends, the one cap of all.
        how: searches with problems, given seconds.
        plan_of: compiles a plan of a problem and orders; with `offload` or `lend`, one that does so.
        ends_s: when the search ends.
        chooses: whether other stages may recompute.
    """
    problem = problem_of_plan(plan, costs, caps)
    known = orders_of(problem, plan)
    word = moved_by(plan)
    moves = {word: partial(plan_of, **{SETTINGS[word]: caps})} if word else {}
    how = partial(how, known={"the recorded order": known})
    done, made = search_for_room([(problem, costs)], how, ends_s, chooses, moves, known)
    return done, made or plan_of(done.found.problem, done.found.orders)

"""Profile from a trace of this project's runtime: times of a run's blocks, and of its messages.

trace + plan ──▶ costs of stages ──▶ seconds of computation of a step, on one GPU
                                └──▶ bytes per second of a message
"""

from __future__ import annotations

from pathlib import Path

from quintsched.errors import MisfitError, counted
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.cost_forms import Wires
from quintsched.simulation.costs import Costs
from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import WIDTHS, Strategy
from quintsched.strategies.profiles.profile import Profile, ProfiledStep, WorkKind
from quintsched.trace.measured_trace import Trace

COMPUTED = ("forward", "backward_input", "backward_weight")
"""Costs that are computation, in every run."""


def read_trace(directory: Path, plan: PlanData, model: Model, strategy: Strategy) -> Profile:
    """Return the profile of a run of `plan` that trained `model` under `strategy`.

    Raises `MisfitError` if the strategy is not the plan's; also raises as `Trace.load` does.
    """
    _check(plan, strategy)
    return from_costs(Trace.load(directory, plan).costs("s"), plan, model, strategy, str(directory))


def from_costs(costs: Costs, plan: PlanData, model: Model, strategy: Strategy, source: str) -> Profile:
    """Return the profile of a run with these costs per stage, in seconds."""
    schedule, stages = plan.schedule, range(len(plan.stage_to_pp))
    names = (*COMPUTED, "recompute") if costs.recompute is not None else COMPUTED
    whole = sum(costs.of_stage(name, stage, schedule.chunks, schedule.slices) for name in names for stage in stages)
    seconds: dict[WorkKind, float] = {"block": whole / schedule.chunks * schedule.microbatches / strategy.pp}
    return Profile(
        name=model.name,
        source=source,
        steps=(ProfiledStep(model=model, strategy=strategy, seconds=seconds),),
        message=_message(costs, model, strategy),
    )


def _message(costs: Costs, model: Model, strategy: Strategy) -> Curve | None:
    took = costs.p2p.latency if isinstance(costs.p2p, Wires) else costs.p2p
    size = strategy.microbatch * strategy.seq // strategy.cp * model.hidden * WIDTHS[strategy.dtype]
    return Curve(sizes=(float(size),), rates=(size / took,)) if took > 0 else None


def _check(plan: PlanData, strategy: Strategy) -> None:
    axes = {name: size for name, size in plan.mesh.axes if size > 1}
    asked = {name: size for name in ("dp", "tp", "pp", "cp", "ep") if (size := getattr(strategy, name)) > 1}
    if axes != asked:
        raise MisfitError(f"the trace is of a mesh {axes or 'of one rank'}, the strategy says {asked or 'one rank'}")
    if plan.schedule.microbatches != strategy.microbatches:
        raise MisfitError(
            f"the trace has {counted(plan.schedule.microbatches, 'microbatch')}, the strategy {strategy.microbatches}"
        )

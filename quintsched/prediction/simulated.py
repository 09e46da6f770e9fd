"""A strategy as its real plan: compiled, and timed by the event simulator with the prediction's own costs.

    strategy ──plan_of──▶ Plan ──┐
       └─────costs_of──▶ Costs ──┴──simulate──▶ step, against the closed form: `agreement`

Waits inside a stage (of tp, cp and ep, for messages and for ZeRO's gathers) are its exchange; gradients are added up and
the optimizer steps where the plan has them. What is recomputed belongs to the backward, as it does on GPUs, where nothing
runs ahead of the gradient. Plans of many microbatches are simulated with fewer: what follows repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quintsched.compiler import compile as compile_plan
from quintsched.descriptions.hardware import Hardware
from quintsched.descriptions.model import Model
from quintsched.descriptions.placement import resolved
from quintsched.descriptions.strategy import Strategy
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan
from quintsched.prediction.columns import Table
from quintsched.prediction.efficiency import CONSTANTS, Constants
from quintsched.prediction.memory.ranks import stage_terms
from quintsched.prediction.operators import Array
from quintsched.prediction.pipeline import repetition
from quintsched.prediction.stages import Kinds, Layout, kinds, recomputed_layers, stage_layers
from quintsched.prediction.table import distinct_blocks, distinct_kinds, evaluate
from quintsched.prediction.totals import PerMicrobatch, optimizer_s, per_microbatch, reduce_s
from quintsched.schedules import find_schedule
from quintsched.simulation.costs import Costs

TWICE = 2
"""How many times as many stages as pieces of the model a bidirectional schedule has."""


@dataclass(frozen=True)
class Agreement:
    """The step time of a strategy by the closed form and by its plan, in seconds."""

    predicted_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """By what share of the simulation the prediction is more."""
        return self.predicted_s / self.simulated_s - 1


def agreement(model: Model, hardware: Hardware, strategy: Strategy, constants: Constants = CONSTANTS) -> Agreement:
    """Compile and simulate a strategy's plan, and compare; raises `UsageError` where it cannot be placed."""
    found = evaluate(model, hardware, Table.of([strategy]), constants, simulate=True)
    return Agreement(float(found.step_s[0]), simulated_step_s(model, hardware, strategy, constants))


def simulated_step_s(model: Model, hardware: Hardware, strategy: Strategy, constants: Constants = CONSTANTS) -> float:
    """Return the seconds of a step by its plan."""
    costs = costs_of(model, hardware, strategy, constants)
    few, more, times = repetition(strategy.pp, strategy.microbatches)

    def seconds(microbatches: int) -> float:
        return plan_of(model, strategy, microbatches).simulate(costs).makespan

    longer = seconds(more)
    return longer + (longer - seconds(few)) * times if times else longer


def plan_of(model: Model, strategy: Strategy, microbatches: int | None = None) -> Plan:
    """Return the plan of a strategy, or of a step of fewer microbatches; raises `UsageError` where there is none."""
    full = resolved(strategy)
    layers = _layers(model, full)
    again = recomputed_layers(layers, full.recompute)
    every = [-(-count // number) if number else 0 for count, number in zip(layers, again, strict=True)]
    twins = TWICE if find_schedule(str(full.schedule)).bidirectional else 1
    sizes = {axis: getattr(full, axis) for axis in ("pp", "dp", "ep", "cp", "tp")}
    sharded = full.dp * full.cp * full.ep > 1
    return compile_plan(
        str(full.schedule),
        mesh=Mesh(**{axis: size for axis, size in sizes.items() if size > 1 or axis == "pp"}),
        microbatches=microbatches or full.microbatches,
        chunks=full.chunks,
        stages=layers * twins,
        recompute=every * twins,
        zero=full.zero if sharded else 0,
    )


def costs_of(model: Model, hardware: Hardware, strategy: Strategy, constants: Constants = CONSTANTS) -> Costs:
    """Return what each stage of a strategy's plan takes, in seconds, and holds, in bytes."""
    table = Table.of([strategy])
    full = table.strategy(0)
    stages = _stage_kinds(model, full)
    blocks = distinct_blocks(model, hardware, table, constants)
    each = per_microbatch(model, hardware, table, blocks, stages, constants)
    each = replace(each, pp=each.pp / float(full.chunks or 1))
    ends = _ends(model, hardware, table, each, constants)
    held = stage_terms(model, table, stages)
    kept = sum(bytes_ for name, bytes_ in held.items() if name.startswith("activations") or name == "logits")
    compute = each.compute_input + each.recompute
    columns = {
        "forward": each.compute_forward,
        "backward_input": compute,
        "backward_weight": each.compute_weight,
        "recompute": np.zeros_like(compute),
        "exchange": each.forward - each.compute_forward,
        "exchange_backward": each.backward_input - compute,
        **ends,
        "weights": held["weights"],
        "gradients": held["gradients"],
        "optimizer_state": held["optimizer"],
        "activation": kept,
        "activation_checkpointed": kept,
    }
    twins = TWICE if find_schedule(str(full.schedule)).bidirectional else 1
    return Costs(unit="s", **{name: _per_stage(values, twins) for name, values in columns.items()})


def _per_stage(values: Array, twins: int) -> tuple[float, ...]:
    return tuple(np.maximum(np.broadcast_to(values, values.shape)[0], 0.0).tolist()) * twins


def _ends(
    model: Model, hardware: Hardware, table: Table, each: PerMicrobatch, constants: Constants
) -> dict[str, Array]:
    """Return what ends a step, of each stage: its rank's, shared out by weights."""
    full = table.strategy(0)
    placed = find_schedule(str(full.schedule)).placed(full.pp, full.chunks)[: each.weights.shape[1]]
    blocks = distinct_blocks(model, hardware, table, constants)
    ranks = per_microbatch(model, hardware, table, blocks, distinct_kinds(model, table, each_rank=True), constants)
    weights = each.weights + each.expert_weights
    share = weights / np.maximum(ranks.weights + ranks.expert_weights, 1.0)[:, list(placed)]
    reduction, gathering = (found[:, list(placed)] * share for found in reduce_s(hardware, table, ranks, constants))
    optimizer = optimizer_s(hardware, table, ranks, constants)[:, list(placed)] * share
    halves = 2.0 if full.zero == 0 else 1.0
    return {
        "reduce_scatter": reduction / halves,
        "all_gather": reduction / halves if full.zero == 0 else gathering,
        "optimizer": optimizer,
    }


def _stage_kinds(model: Model, strategy: Strategy) -> Kinds:
    """Return each stage as a kind of rank."""
    layers = tuple(_layers(model, strategy))
    return kinds(model, [Layout(len(layers), 1, "1f1b", layers, strategy.recompute)], each_rank=True)


def _layers(model: Model, strategy: Strategy) -> list[int]:
    """Return the layers of each stage."""
    return list(strategy.stages or stage_layers(model.layers, strategy.pp * (strategy.chunks or 1)))

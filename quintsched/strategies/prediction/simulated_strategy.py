"""Strategy as a real plan: compiled, and timed by the event simulator with the prediction's own costs.

    strategy ──plan_of──▶ Plan ──┐
       └─────costs_of──▶ Costs ──┴──simulate──▶ step

Exposed communication inside a stage (tp, cp, ep, messages, ZeRO's gathers) is part of its forward and backward, and so
is recomputation, which on GPUs does not run ahead of the gradient. Reductions and the optimizer run where the plan has
them, or after all backwards if they do not overlap. Plans of many microbatches are simulated with fewer, as the steady
state repeats.
"""

from __future__ import annotations

import numpy as np

from quintsched.simulation.costs import Costs
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.layers_of_ranks import Kinds, stages_of_rank
from quintsched.strategies.prediction.memory.vectorized_peak_memory import stage_terms
from quintsched.strategies.prediction.operators import Array
from quintsched.strategies.prediction.pipeline.formula_bound_or_simulation import StageTimes
from quintsched.strategies.prediction.pipeline.runs_of_equal_ranks import RowNumbers
from quintsched.strategies.prediction.pipeline.simulated_makespans import pace_of, repeated, require_simulable
from quintsched.strategies.prediction.ranks_on_shared_cores import shares_cores
from quintsched.strategies.prediction.step_times import stage_times
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.strategy_plans import num_stages, plan_of
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, distinct_stages, evaluate


def simulated_step_s(model: Model, hardware: Hardware, strategy: Strategy) -> float:
    """Return the seconds of a step by its plan, plus the parts that a plan does not contain."""
    costs = costs_of(model, hardware, strategy)
    full = resolved(strategy)
    schedule, pp = str(full.schedule), full.pp

    def ends_of(microbatches: int, _: RowNumbers) -> Array:
        require_simulable(schedule, pp, microbatches, num_stages(full))
        return np.array([[plan_of(model, strategy, microbatches).simulate(costs).makespan]])

    work = sum(np.asarray(getattr(costs, name)) for name in ("forward", "backward_input", "backward_weight"))
    pace = pace_of(schedule, pp, full.chunks, work).reshape(1)
    step_s = float(repeated(pp, strategy.microbatches, pace, ends_of)[0, 0])
    return step_s + _beyond_s(model, hardware, strategy)


def _beyond_s(model: Model, hardware: Hardware, strategy: Strategy) -> float:
    """Return the time that a plan does not contain: reductions after all backwards, and shared cores."""
    table, _, times = _stage_times(model, hardware, strategy)
    shared = evaluate(model, hardware, table).seconds.get("cores", np.zeros(1))
    full, reduction = resolved(strategy), times.reduction[0]
    held = (stages_of_rank(rank, full.pp, full.chunks or 1, str(full.schedule)) for rank in range(full.pp))
    overlaps = full.overlap and not shares_cores(hardware)
    summing = 0.0 if overlaps else max(float(reduction[list(stages)].sum()) for stages in held)
    return summing + float(shared[0])


def costs_of(model: Model, hardware: Hardware, strategy: Strategy) -> Costs:
    """Return the costs of each stage of a strategy's plan: times in seconds, sizes in bytes."""
    table, stages, times = _stage_times(model, hardware, strategy)
    held, each = stage_terms(model, table, stages), times.each
    kept = np.sum([bytes_ for name, bytes_ in held.items() if name.startswith(("activations", "logits"))], axis=0)
    halves = 2.0 if strategy.zero == 0 else 1.0
    overlaps = strategy.overlap and not shares_cores(hardware)
    summing = times.reduction / halves if overlaps else np.zeros_like(times.reduction)
    columns = {
        "forward": each.forward,
        "backward_input": each.backward_input,
        "backward_weight": each.backward_weight,
        "recompute": np.zeros_like(each.forward),
        "reduce_scatter": summing,
        "all_gather": times.gathering if strategy.zero else summing,
        "optimizer": times.stepping,
        "weights": held["weights"],
        "gradients": held["gradients"],
        "optimizer_state": held["optimizer"],
        "activation": kept,
        "activation_checkpointed": kept,
    }
    twins = num_stages(resolved(strategy)) // stages.dense.shape[1]  # number of copies of each piece of the model
    each_stage = {name: tuple(values[0].tolist()) * twins for name, values in columns.items()}
    return Costs.model_validate({"unit": "s", "host_bandwidth": hardware.pcie_gbps * 1e9, **each_stage})


def _stage_times(model: Model, hardware: Hardware, strategy: Strategy) -> tuple[Table, Kinds, StageTimes]:
    table = Table.from_strategies([strategy])
    stages, blocks = distinct_stages(model, table), distinct_blocks(model, hardware, table)
    return table, stages, stage_times(model, hardware, table, blocks, stages)

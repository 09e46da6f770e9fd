"""Plan of a strategy, and its section `parallel` of a job file.

    Strategy(pp=4, dp=2, chunks=2, …)  ──▶  mesh: pp=4,dp=2   schedule: interleaved-1f1b   stages: [5, 4, …]

A plan's stages count blocks: a stage's layers, plus the embedding and the head where it has them.
"""

from __future__ import annotations

from typing import Any

from quintsched.compiler import compile
from quintsched.ir.mesh import LAID_OUT
from quintsched.plan import Plan
from quintsched.schedules import find_schedule
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy, modules_of
from quintsched.strategies.descriptions.strategy_validity import resolved, stage_layers


def plan_of(model: Model, strategy: Strategy, microbatches: int | None = None) -> Plan:
    """Return the plan of a strategy, compiled and proved, optionally with fewer microbatches.

    Raises `UsageError` if the schedule does not take these sizes.
    """
    strategy = resolved(strategy)
    settings = {name: value for name, value in parallel(model, strategy).items() if name != "sequence_parallel"}
    settings["microbatches"] = microbatches or strategy.microbatches
    stages = num_stages(strategy)
    twins = find_schedule(str(strategy.schedule)).bidirectional  # their gradients are summed in any case
    tied = {"embedding": (0, stages - 1)} if model.tied and stages > 1 and not twins else None
    return compile(settings.pop("schedule"), tied=tied, **settings)


def parallel(model: Model, strategy: Strategy) -> dict[str, Any]:
    """Return the job's section `parallel`, of a strategy that is resolved; what is usual is left out."""
    mesh = ",".join(f"{axis}={size}" for axis in LAID_OUT if (size := getattr(strategy, axis)) > 1)
    found: dict[str, Any] = {
        "mesh": mesh or "dp=1",
        "schedule": strategy.schedule,
        "microbatches": strategy.microbatches,
    }
    is_sharded = strategy.zero > 0 and strategy.dp * strategy.cp * strategy.ep > 1
    every = min(strategy.zero_every, strategy.microbatches) if is_sharded and strategy.zero > 1 else 1
    usual: dict[str, Any] = {
        "chunks": None if strategy.chunks == find_schedule(str(strategy.schedule)).min_chunks else strategy.chunks,
        "stages": _blocks_of_stages(model, strategy),
        "zero": strategy.zero if is_sharded else None,
        "zero_every": every if every > 1 else None,
        "recompute": _every(model, strategy),
        "offload": strategy.offload,
        "sequence_parallel": (strategy.sequence_parallel and strategy.tp > 1) or None,
    }
    return found | {name: value for name, value in usual.items() if value is not None}


def num_stages(strategy: Strategy) -> int:
    """Return the number of stages of a strategy's schedule; twins count separately."""
    return len(find_schedule(str(strategy.schedule)).placed(strategy.pp, strategy.chunks))


def _layers(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Return the layers of each stage."""
    return strategy.stages or stage_layers(model.layers, strategy.pp * (strategy.chunks or 1))


def _blocks_of_stages(model: Model, strategy: Strategy) -> list[int] | None:
    """Return the blocks of each stage: its layers, the embedding and the head; None for one stage, or with twins."""
    if num_stages(strategy) == 1 or find_schedule(str(strategy.schedule)).bidirectional:
        return None
    blocks = list(_layers(model, strategy))
    blocks[0] += 1
    blocks[-1] += 1
    return blocks


def _every(model: Model, strategy: Strategy) -> int | list[int] | None:
    """Return the job's `recompute`: the largest k, for every k-th block, that recomputes at least as many layers."""
    asked = strategy.recompute
    if asked in ("none", 0) or modules_of(asked):
        return None
    if asked == "full":
        return 1
    layers = _layers(model, strategy)
    numbers = asked if isinstance(asked, tuple) else (int(asked),) * len(layers)
    every = [size // number if number else 0 for size, number in zip(layers, numbers, strict=True)]
    twins = num_stages(strategy) // len(layers)
    return every[0] if len(set(every)) == 1 else every * twins

"""End of a step: the optimizer, then an all-gather of the weights of which each replica has stepped a shard.

…  ShareMetrics  ClipGrad  OptStep(stages 0+4)  AllGatherBucket(0, 0)  AllGatherBucket(4, 0)
"""

from __future__ import annotations

from dataclasses import replace

from quintsched.ir.instruction_columns import Columns
from quintsched.ir.instruction_set import AllGatherBucket, OptStep
from quintsched.ir.plan_data import PlanData
from quintsched.ir.rank_programs import Programs


def step_optimizer(plan: PlanData) -> PlanData:
    """End every program with the `OptStep` of all its stages.

    If replicas step shards of weights that are resident on all of them (ZeRO-1, 2), an `AllGatherBucket` per stage
    and bucket follows.
    """
    layout = plan.layout
    blocks = [Columns.from_programs([OptStep(layout.stages_of(rank))] for rank in range(layout.num_ranks))]
    if plan.zero.shards_optimizer and not plan.zero.shards_weights:
        blocks.append(_gathers(plan))
    return replace(plan, programs=Programs(plan.columns.append(*blocks)))


def _gathers(plan: PlanData) -> Columns:
    layout = plan.layout
    programs = [
        [AllGatherBucket(stage, bucket, axes) for stage in layout.stages_of(rank) for bucket, axes in layout.reductions]
        for rank in range(layout.num_ranks)
    ]
    return Columns.from_programs(programs)

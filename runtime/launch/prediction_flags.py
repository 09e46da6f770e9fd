"""Row of prediction flags for a job and its plan: the input of `quintsched predict [plan.json] job.yaml`.

model, data   ──▶ {"model": {"layers": 4, …},          the sizes of a built-in model on the job's data
plan          ──▶  "dp": 2, "pp": 2, "chunks": 1, …    its mesh, schedule, recomputation and sharding
stages        ──▶  "stages": [2, 2]}                   the layers of each stage, as the run will assign them
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quintsched.errors import UsageError
from quintsched.plan import Plan

from ..blocks.block_costs import estimate_costs
from ..data import load_dataset
from ..models import build_model, model_sizes
from ..settings.allowed_setting_values import DTYPE_NAMES
from ..settings.job_file import JobConfig
from ..stage.build_stages import cut, cut_as_planned

ROW_AXES = ("dp", "tp", "pp", "cp", "ep")


def row_of(job: JobConfig, plan: Plan) -> dict[str, Any]:
    """Return a job and its plan as a row; raises UsageError for features that predictions do not cover."""
    _require_known(plan)
    data = load_dataset(job.data).spec
    model = model_sizes(job.model, data)
    stages = _layers(job, plan, model.layers)
    axes = {axis: plan.mesh.axis_size(axis) for axis in ROW_AXES}
    batch, replicas = job.train.batch_size, axes["dp"] * axes["ep"]
    return {
        "model": model.model_dump(mode="json", exclude_none=True),
        "gpus": plan.mesh.size,
        **axes,
        "microbatch": batch // (replicas * plan.schedule.microbatches),
        "batch": batch,
        "seq": model.seq,
        "schedule": plan.schedule.name,
        "chunks": plan.schedule.chunks,
        "zero": plan.zero.stage,
        "recompute": _recomputed(plan, stages),
        "sequence_parallel": job.parallel.sequence_parallel and axes["tp"] > 1,
        "dtype": DTYPE_NAMES[job.runtime.precision],
        **({} if plan.layout.stage_to_part else {"stages": [len(layers) for layers in stages]}),
    }


def _require_known(plan: Plan) -> None:
    unknown = {
        "slices": plan.schedule.slices > 1,
        "recompute_microbatches": bool(plan.recompute_microbatches),
        "offload": plan.schedule.options.get("offload") is not None,
        "lend": plan.schedule.options.get("lend") is not None,
        "overlap": bool(plan.schedule.options.get("overlap")),
        "stage_to_pp": len(plan.stage_to_pp) != plan.mesh.pp * plan.schedule.chunks,
    }
    for name, is_used in unknown.items():
        if is_used:
            raise UsageError(f"the plan uses {name}, which predictions do not know; leave it out")


def _layers(job: JobConfig, plan: Plan, layers: int) -> list[list[int]]:
    """Return for each stage the positions of its layers among its blocks; the embedding and the head are no layers."""
    num_blocks = layers + 2
    if plan.blocks_per_stage:
        cuts = cut_as_planned(plan, num_blocks)
    else:
        blocks = build_model(job.model, load_dataset(job.data).spec)
        cuts = cut(estimate_costs(blocks), plan.layout)
    return [[place for place, block in enumerate(held) if 0 < block <= layers] for held in cuts]


def _recomputed(plan: Plan, stages: Sequence[Sequence[int]]) -> str | list[int]:
    """Return the number of recomputed layers of each stage: every k-th of its blocks."""
    every = [plan.layout.recompute_every(stage) for stage in range(len(stages))]
    if set(every) <= {0}:
        return "none"
    if set(every) == {1}:
        return "full"
    return [sum(k > 0 and place % k == k - 1 for place in layers) for k, layers in zip(every, stages, strict=True)]

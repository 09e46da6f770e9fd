"""Costs of the blocks of a job, by which its stages are cut: estimated, or measured by one rank for all."""

from __future__ import annotations

from functools import partial

import torch

from quintsched.plan import Plan

from ..blocks.block_builders import Blocks
from ..blocks.block_costs import estimate_costs, measure_costs
from ..comm import Transport
from ..saving.checkpoints.bucket_folder import place_of
from ..saving.checkpoints.save_and_load_checkpoints import remembered_costs
from ..settings.job_file import JobConfig
from .batch_feed import Feed


def block_costs(job: JobConfig, plan: Plan, blocks: Blocks, feed: Feed, transport: Transport) -> list[float] | None:
    """Return what blocks cost: estimated, or measured by rank 0 for all; None where the plan cuts the stages."""
    if plan.blocks_per_stage:
        return None
    if job.parallel.balance == "estimated":
        return estimate_costs(blocks)
    place = job.checkpoint.dir if plan.mode == "train" else None
    return measured_costs(job, plan, blocks, feed, transport, place)


def measured_costs(
    job: JobConfig, plan: Plan, blocks: Blocks, feed: Feed, transport: Transport, place: str | None = None
) -> list[float]:
    """Return what blocks cost as rank 0 measures it for all, on one microbatch (collective).

    Once per place of checkpoints, if one is given: stages must be cut alike when a run is resumed.
    """
    costs = torch.zeros(len(blocks), dtype=torch.float64, device=transport.device)
    if transport.rank == 0:
        inputs = feed.example(max(job.train.batch_size // plan.schedule.microbatches, 1)).to(transport.device)
        example = inputs.to(job.run.dtype) if inputs.is_floating_point() else inputs
        measure = partial(measure_costs, blocks, example)
        found = measure() if place is None else remembered_costs(place_of(place), len(blocks), measure)
        costs += torch.tensor(found, device=transport.device)
    transport.world_group().broadcast(costs, 0).wait()
    return [float(cost) for cost in costs.tolist()]

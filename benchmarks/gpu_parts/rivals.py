"""Steps of torch.distributed.pipelining on the same stages, with the same end of a step as the engine's.

    ours                its schedule                     stages a rank
    1f1b                Schedule1F1B                     1
    interleaved-1f1b    ScheduleInterleaved1F1B          2
    interleaved-zb      ScheduleInterleavedZeroBubble    2
    zbv                 ScheduleZBVZeroBubble            2, folded

The same end: gradients divided by the batch's tokens, their norm over all ranks, the finite check, AdamW. All is in
float32 (TF32 products), as torch's runtime keeps no masters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import quintsched as qs
from quintsched.runtime import build_model
from quintsched.runtime.blocks.block_costs import estimate_costs
from quintsched.runtime.stage.build_stages import cut

from .model import AdamW, Size

SCHEDULES: Mapping[str, type[Any]] = {
    "1f1b": Schedule1F1B,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def chunks_of(schedule: str) -> int:
    return 1 if schedule == "1f1b" else 2


def loss_sum(output: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy of the tokens."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def stages_of(size: Size, plan: qs.Plan, rank: int, device: torch.device) -> dict[int, nn.Module]:
    """Return the stages of a rank, assigned as the engine does, with the same initial weights."""
    model = list(build_model(size.blocks(), 0, torch.float32))
    cuts = cut(estimate_costs(size.blocks()), plan.layout)
    mine = [stage for stage, holder in enumerate(plan.stage_to_pp) if holder == rank]
    return {stage: nn.Sequential(*(model[block] for block in cuts[stage])).to(device) for stage in mine}


def torch_step(
    size: Size, schedule: str, plan: qs.Plan, device: torch.device, group: dist.ProcessGroup
) -> Callable[[Tensor, Tensor], float]:
    """Return a step of torch's runtime on this rank; it returns the batch's loss."""
    rank, num_stages = dist.get_rank(), len(plan.stage_to_pp)
    modules = stages_of(size, plan, rank, device)
    ids = torch.zeros(size.samples, size.length, dtype=torch.int64, device=device)
    hidden = torch.zeros(size.samples, size.length, size.hidden, device=device, requires_grad=True)
    logits = torch.zeros(size.samples, size.length, size.tokens, device=device, requires_grad=True)
    stages = [
        PipelineStage(
            module,
            stage,
            num_stages,
            device,
            input_args=hidden if stage else ids,
            output_args=hidden if stage + 1 < num_stages else logits,
            group=group,
        )
        for stage, module in modules.items()
    ]
    held: Any = stages[0] if schedule == "1f1b" else stages
    runs = SCHEDULES[schedule](held, size.microbatches, loss_fn=loss_sum, scale_grads=False)
    quiet = {"return_outputs": False} if "return_outputs" in signature(runs.step).parameters else {}
    weights = [parameter for module in modules.values() for parameter in module.parameters()]
    optimizer, has_first, has_last = AdamW(weights), 0 in modules, num_stages - 1 in modules

    def step(inputs: Tensor, targets: Tensor) -> float:
        losses: list[Tensor] = []
        given = (inputs,) if has_first else ()
        runs.step(*given, target=targets if has_last else None, losses=losses, **quiet)
        gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
        torch._foreach_div_(gradients, float(targets.numel()))
        norms = torch.stack(torch._foreach_norm(gradients)).square().sum()
        figures = torch.stack((norms, sum(losses, torch.zeros((), device=device)).detach()))
        dist.all_reduce(figures, group=group)
        square, loss = figures.tolist()
        if math.isfinite(square):
            optimizer.step()
        optimizer.zero_grad()
        return float(loss) / targets.numel()

    return step

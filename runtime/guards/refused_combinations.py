"""Refusals of plans for kinds of blocks: one table, checked once, before any block is built.

    fact of a block ──┐
                      ├──▶ the first row of `REFUSALS` that holds ──▶ its error, on all ranks in the same words
    use of the block ─┘

A fact is found in the outline of a block, which is on the meta device and equal on all ranks; a use is given by the
plan and the settings of a run. Each row has a case in `tests/runtime/guards/test_refusals.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from quintsched.errors import MisfitError, UsageError
from quintsched.ir.instruction_set import LendAct, OffloadAct, Overlap
from quintsched.ir.mesh import REPLICA_AXES
from quintsched.plan import Plan

from ..blocks.block_builders import takes_targets
from ..blocks.dtensor import is_sharded
from ..comm.device import is_accelerator
from ..parallel.expert.moe import MoE
from ..settings.allowed_setting_values import BufferChoice
from ..user_objects.library_or_user import arguments_of
from .state_changed_by_forwards import out_of_order


@dataclass(frozen=True)
class BlockUse:
    """Settings of a run that decide how its blocks are used.

    Args:
        plan: the plan of a training step.
        device: the device of the blocks.
        blocks: the outlines of all of them.
        cuts: the blocks of each stage.
        is_sliced: whether sequence parallelism gives a block a slice of the tokens, by its number.
        buffers: how replicas handle buffers that forwards change.
        cuda_graph: whether steps run from CUDA graphs.
    """

    plan: Plan
    device: torch.device
    blocks: Sequence[nn.Module]
    cuts: Sequence[range]
    is_sliced: Callable[[int], bool]
    buffers: BufferChoice
    cuda_graph: bool

    def some_take(self, name: str) -> bool:
        """Return whether any block has an argument of this name."""
        return any(name in arguments_of(block.forward) for block in self.blocks)

    @cached_property
    def moving(self) -> set[int]:
        """Stages whose activations are offloaded to host memory, or lent to other ranks."""
        return {i.stage for program in self.plan.programs for i in program if isinstance(i, OffloadAct | LendAct)}

    @cached_property
    def has_overlaps(self) -> bool:
        """Whether a forward and a backward overlap."""
        return len(self.plan.columns.rows_where(Overlap)) > 0

    @cached_property
    def out_of_order(self) -> set[int]:
        """Stages whose forwards take the microbatches in another order than their numbers'."""
        return {*out_of_order(self.plan)}

    @property
    def with_losses(self) -> set[int]:
        """Stages on which the plan has a loss."""
        layout = self.plan.layout
        return {*layout.losses, *(route.stages[-1] for route in layout.routes)}

    @property
    def losses_advice(self) -> str:
        """Advice for blocks that take targets where the plan has no loss."""
        taking = {number for number, block in enumerate(self.blocks) if takes_targets(block)}
        stages = {stage for stage, numbers in enumerate(self.cuts) if taking.intersection(numbers)}
        if len(self.plan.routes) > 1:
            return f"{self.plan.schedule.name} has a loss on last stages alone; take a schedule with one route"
        places = self.plan.routes[0].stages
        return f"compile it with --losses {','.join(map(str, sorted(stages | self.with_losses, key=places.index)))}"


@dataclass(frozen=True)
class Use:
    """Use of one block by a run, and the fields that sentences name."""

    run: BlockUse
    block: int
    stage: int

    @property
    def count(self) -> int:
        """Number of blocks in its stage."""
        return len(self.run.cuts[self.stage])

    @property
    def every(self) -> int:
        """Recompute interval of its stage: one of so many blocks is recomputed; 0: none is."""
        return self.run.plan.layout.recompute_every(self.stage)


Fact = Callable[[nn.Module], dict[str, nn.Module]]
"""Function that returns modules of a block by name; the block itself is ""."""


class Refusal(NamedTuple):
    """Row: modules of a block (a fact), a use that they do not support, and the error with its remedy."""

    fact: Fact
    use: Callable[[Use], bool]
    error: type[MisfitError | UsageError]
    sentence: str


def modules_that(holds: Callable[[Any], bool]) -> Fact:
    """Return a fact: the modules of a block for which a condition holds."""
    return lambda block: {name: module for name, module in block.named_modules() if holds(module)}


def blocks_that(holds: Callable[[nn.Module], bool]) -> Fact:
    """Return a fact: the block itself, if a condition holds."""
    return lambda block: {"": block} if holds(block) else {}


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None and module.training


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) and module.p > 0


ANY_BLOCK = blocks_that(lambda block: True)
SHARDED = blocks_that(is_sharded)
"""Blocks that PyTorch has sharded (DTensor)."""
TAKING_TARGETS = blocks_that(takes_targets)
RUNNING_NORMS = modules_that(_keeps_statistics)
BATCH_NORMS = modules_that(lambda module: isinstance(module, _BatchNorm))
"""Norms that can share their statistics, whether they keep any or not."""
DROPOUTS = modules_that(lambda module: _drops(module) and module.training)
DROPPING_NETWORKS = modules_that(lambda module: isinstance(module, nn.RNNBase) and module.dropout > 0)
"""Recurrent networks with dropout between layers, whose masks their library draws."""
DROPPING_EXPERTS = modules_that(lambda module: isinstance(module, MoE) and any(map(_drops, module.experts.modules())))
BALANCED_EXPERTS = modules_that(lambda module: isinstance(module, MoE) and module.balance > 0)
WAITING_MIXTURES = modules_that(lambda module: isinstance(module, MoE) and module.waits_for_routing)
"""Mixtures of experts that read the tokens' routing from the device."""

_AVERAGES = "{path} ({kind}) averages over all tokens, and "
_OVER_CP = _AVERAGES + (
    "mesh {plan.mesh} cuts sequences over cp; let batch norms share their statistics: buffers='sync'"
)
_BLIND = ", but no block takes `{}` in its forward: an attention would see only its slice"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        ANY_BLOCK,
        lambda use: use.block == 0 and use.run.plan.schedule.slices > 1 and not use.run.some_take("past"),
        MisfitError,
        "{plan.schedule.name} cuts sequences into {plan.schedule.slices} slices" + _BLIND.format("past"),
    ),
    Refusal(
        ANY_BLOCK,
        lambda use: use.block == 0 and use.run.plan.mesh.has_ranks("cp") and not use.run.some_take("context"),
        MisfitError,
        "mesh {plan.mesh} cuts sequences over cp" + _BLIND.format("context"),
    ),
    Refusal(
        ANY_BLOCK,
        lambda use: use.every > use.count and use.block == use.run.cuts[use.stage][0],
        MisfitError,
        "one of {use.every} blocks of stage {use.stage} is to be recomputed, but it has {use.count}; set recompute to "
        "{use.count} or less; 1 is the whole stage",
    ),
    Refusal(
        TAKING_TARGETS,
        lambda use: use.stage not in use.run.with_losses,
        MisfitError,
        "a block of stage {use.stage} takes targets, but the plan has no loss there: {use.run.losses_advice}",
    ),
    Refusal(
        TAKING_TARGETS,
        lambda use: use.run.is_sliced(use.block),
        MisfitError,
        "block {use.block} takes targets, and sequence parallelism gives it a slice of the tokens; run without "
        "sequence_parallel",
    ),
    Refusal(
        RUNNING_NORMS,
        lambda use: use.run.plan.schedule.slices > 1,
        MisfitError,
        _AVERAGES
        + "{plan.schedule.name} gives it slices of sequences; take a schedule without slices, or another norm",
    ),
    Refusal(
        RUNNING_NORMS,
        lambda use: use.run.is_sliced(use.block),
        MisfitError,
        _AVERAGES + "sequence_parallel gives it a slice of them; run without sequence_parallel, or with another norm",
    ),
    Refusal(
        modules_that(lambda module: _keeps_statistics(module) and not isinstance(module, _BatchNorm)),
        lambda use: use.run.plan.mesh.has_ranks("cp"),
        MisfitError,
        _OVER_CP,
    ),
    Refusal(
        modules_that(lambda module: _keeps_statistics(module) and isinstance(module, _BatchNorm)),
        lambda use: use.run.plan.mesh.has_ranks("cp") and use.run.buffers != "sync",
        MisfitError,
        _OVER_CP,
    ),
    Refusal(
        RUNNING_NORMS,
        lambda use: bool(use.run.plan.layout.twins(use.stage)),
        MisfitError,
        "{path} ({kind}) has running statistics, and {plan.schedule.name} runs two copies of its block on other "
        "microbatches; take a schedule of one direction, or track_running_stats=False",
    ),
    Refusal(
        RUNNING_NORMS,
        lambda use: use.stage in use.run.out_of_order,
        MisfitError,
        "{path} ({kind}) has running statistics, which change with each microbatch in turn, and {plan.schedule.name} "
        "runs those of stage {use.stage} in another order; take a plan that runs them in order, or "
        "track_running_stats=False",
    ),
    Refusal(
        RUNNING_NORMS,
        lambda use: use.run.buffers == "refuse" and use.run.plan.mesh.has_ranks(*REPLICA_AXES),
        MisfitError,
        "the buffer {path!r} changes in every forward, each replica by its own samples; let all take what the first "
        "has: buffers='first', or let batch norms share their statistics: buffers='sync'",
    ),
    Refusal(
        BATCH_NORMS,
        lambda use: use.run.buffers == "sync" and use.run.has_overlaps and use.run.plan.mesh.has_ranks(*REPLICA_AXES),
        MisfitError,
        "{plan.schedule.name} lets a forward and a backward overlap, in which batch norms cannot share their "
        "statistics; compile the plan without overlap, or with buffers='merge'",
    ),
    Refusal(
        DROPPING_EXPERTS,
        lambda use: True,
        MisfitError,
        "block {use.block} has a dropout within the experts of {module!r}, whose rows are no samples, so that no mask "
        "belongs to them; drop out before or behind the mixture",
    ),
    Refusal(
        BALANCED_EXPERTS,
        lambda use: use.run.plan.schedule.slices > 1,
        MisfitError,
        "block {use.block} balances the experts of {module!r} over a whole microbatch, and {plan.schedule.name} "
        "gives it slices of sequences; set balance=0, or take a schedule without slices",
    ),
    Refusal(
        DROPPING_NETWORKS,
        lambda use: is_accelerator(use.run.device) and use.run.plan.mesh.size > 1,
        MisfitError,
        "block {use.block} drops out by a {kind} ({module}), whose masks would not agree over mesh {plan.mesh}; put "
        "nn.Dropout between recurrent networks of one layer each, or set its probability to 0",
    ),
    Refusal(
        SHARDED,
        lambda use: use.stage in use.run.moving,
        MisfitError,
        "PyTorch has sharded modules of stage {use.stage}, whose activations cannot leave their rank and come back; "
        "compile the plan without offload and lend",
    ),
    Refusal(
        SHARDED,
        lambda use: use.run.plan.zero.shards_optimizer,
        MisfitError,
        "PyTorch has sharded block {use.block} (DTensor), whose weights ZeRO-{plan.zero.stage} cannot share out over "
        "the replicas of mesh {plan.mesh} once more; compile the plan with zero=0",
    ),
    Refusal(
        DROPOUTS,
        lambda use: use.run.cuda_graph,
        UsageError,
        "cuda_graph: blocks draw random numbers (dropout), which follow the number of the step; let them draw none (a "
        "rate of 0), or run without cuda_graph",
    ),
    Refusal(
        WAITING_MIXTURES,
        lambda use: use.run.cuda_graph,
        UsageError,
        "cuda_graph: the mixture of experts {module} asks the device how many tokens go to each expert; give each the "
        "same number: pad_to_capacity, with a capacity_factor",
    ),
)
"""Rows of refusals: the first one that holds for some block of a run is raised."""


def require_usable_blocks(run: BlockUse) -> None:
    """Raise the error of the first row that holds for a block of a run."""
    places = sorted([(n, stage) for stage, numbers in enumerate(run.cuts) for n in numbers])
    uses = [Use(run, *place) for place in places]
    for row in REFUSALS:
        for use in uses:
            for name, module in row.fact(run.blocks[use.block]).items() if row.use(use) else ():
                path = f"{use.block}.{name}" if name else str(use.block)
                kind, names = type(module).__name__, name or "itself"
                raise row.error(row.sentence.format(use=use, plan=run.plan, path=path, module=names, kind=kind))

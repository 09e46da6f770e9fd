"""One rank's stages of the model, set up once: which blocks are a stage, how they are cut over tp, what serves them.

blocks ──▶ cuts (blocks of each stage) ──▶ tensor cuts ──▶ stages, built and the same on all their holders
                                                        ──▶ tied weights, queues of put-off weight gradients
batch  ──▶ units, each with what of it this rank needs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quintsched.ir.instructions import BwdInput
from quintsched.plan import Plan

from ..autograd.deferred_weight_grads import WeightQueue, defer_weights
from ..blocks.blocks import Blocks, outlines
from ..comm import Transport
from ..job.choices import ContextMethod, Proofs
from ..parallel.context.context import ContextParallel
from ..parallel.dropout import Masks
from ..parallel.expert.load import ExpertLoad
from ..parallel.expert.moe import leave_uncompiled
from ..parallel.mesh_groups import MeshGroups
from ..parallel.proof.prover import Prover
from ..parallel.tensor.model_cuts import TensorCuts
from ..parallel.tensor.rules import Rules
from .build import build_stages, cuts_of, require_separate
from .losses import target_stages
from .microbatches import Batch, BatchCutter
from .same_data import SameData
from .tied_weights import TiedWeights


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How blocks become stages: as the arguments of `Engine` that go by the same names."""

    block_costs: Sequence[float] | None = None
    dtype: torch.dtype | None = None
    context: ContextMethod = "ring"
    rules: Rules = field(default_factory=dict)
    prove: Proofs = "foreign"
    sequence_parallel: bool = False
    cut_logits: bool = False
    """Whether loss and metrics can do with logits that are cut over the vocabulary."""
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compiled: bool = False
    seed: int = 0


class RankModel:
    """The stages of one rank.

    Args:
        plan: says which stages there are, and where.
        blocks: the whole model, built or not.
        groups: the groups of the mesh.
        transport: this rank's.
        options: how blocks become stages.

    Attributes:
        cuts: the blocks of each stage.
        outlines: all blocks, without weights (see `blocks.outlines`).
        target_stages: the stages whose blocks take targets.
        tensor: how blocks are cut over tp.
        prover: proves that blocks give the same numbers cut as whole.
        stages: this rank's.
        batches: cuts a batch into units.
        same_data: compares what ranks of one replica are given.
        queues: where the weight gradients of split backwards wait, per stage that has such.
        deferred_share: which share of the weights of these stages has gradients that can wait; None without such.
    """

    def __init__(
        self, plan: Plan, blocks: Blocks, groups: MeshGroups, transport: Transport, options: ModelOptions
    ) -> None:
        self.plan, self.options = plan, options
        self._groups, self._transport = groups, transport
        self._coordinates = plan.mesh.coordinates(transport.rank)
        self.pp_rank = self._coordinates.get("pp", 0)
        self.sequences = ContextParallel(options.context, groups.context, transport, options.compiled)
        self._cut(blocks)
        self._build(blocks)
        self.tied = TiedWeights(plan, options.tied, self.cuts, self.stages, groups)
        self.queues, self.deferred_share = self._defer()

    def _cut(self, blocks: Blocks) -> None:
        """Settle which blocks are a stage, and how tensor parallelism cuts them, before any is built."""
        options, tensor = self.options, self._groups.tensor
        self.cuts = cuts_of(self.plan, blocks, options.block_costs)
        require_separate(blocks, self.cuts, tensor)
        self.outlines = outlines(blocks, apart=tensor.size > 1)
        self.tensor = TensorCuts(
            self.outlines,
            tensor,
            options.rules,
            sequence_parallel=options.sequence_parallel,
            cut_logits=options.cut_logits,
            proved=options.prove != "none",
        )
        self.target_stages = target_stages(self.cuts, self.outlines, self.plan.layout, self.tensor.tokens)

    def _build(self, blocks: Blocks) -> None:
        options, device = self.options, self._transport.device
        self.masks = Masks(options.seed)
        self.prover = Prover(
            self.tensor,
            self.outlines,
            (self._groups.tensor, self._groups.context),
            self.sequences,
            self.plan.schedule.slices,
            options.prove,
            options.dtype,
        )
        self.stages = build_stages(
            blocks,
            self.cuts,
            self.plan.layout,
            self.pp_rank,
            self._groups,
            self.tensor,
            self.prover,
            seed=options.seed,
            masks=self.masks,
            dtype=options.dtype,
            device=device,
        )
        self.tensor.settle(self.prover.share(self._groups.world))
        if options.compiled:
            leave_uncompiled(self.stages)
        self.expert_load = ExpertLoad(blocks, self.stages, self._groups.tensor, self._groups.world)
        self.same_data = SameData(self.replica, self.num_replicas, self._groups.world)
        self.batches = BatchCutter(
            device,
            options.dtype,
            inputs=self.needs_inputs,
            targets=self.needs_targets,
            rank=self._transport.rank,
            shard=self.sequences.shard,
        )

    def _defer(self) -> tuple[dict[int, WeightQueue], float | None]:
        """Let the weight gradients of stages with split backwards wait; return also which share of weights can."""
        split = {i.stage for i in self.plan.programs[self.pp_rank] if isinstance(i, BwdInput)}
        queues = {stage: WeightQueue(compiled=self.options.compiled) for stage in split}
        waiting = sum(defer_weights(self.stages[stage], queue) for stage, queue in queues.items())
        total = sum(p.numel() for stage in split for p in self.stages[stage].named_weights().values())
        return queues, waiting / total if total else None

    def batch(
        self, plan: Plan, inputs: Any, targets: Any, extras: Mapping[str, Any], *, needs_loss: bool = True
    ) -> Batch:
        """Return what this rank is given, cut into units; in the first steps ranks of a replica compare it.

        Unless it `needs_loss`, targets may be None.
        """
        batch = self.batches(plan, inputs, targets, extras, needs_loss=needs_loss)
        needed = {"inputs": inputs if self.needs_inputs else None, "targets": targets if self.needs_targets else None}
        self.same_data.require(plan.mode, needed, extras)
        return batch

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the blocks are in evaluation mode; those that were in training mode are so again after."""
        trained = [module for stage in self.stages.values() for module in stage.modules() if module.training]
        try:
            for stage in self.stages.values():
                stage.eval()
            yield
        finally:
            for module in trained:
                module.training = True

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so has to be given inputs."""
        return any(route.stages[0] in self.stages for route in self.plan.routes)

    @property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so has to be given them."""
        lasts = {route.stages[-1] for route in self.plan.routes}
        return not self.stages.keys().isdisjoint(lasts | self.target_stages)

    @property
    def num_replicas(self) -> int:
        """How many replicas divide the batch (dp x ep)."""
        return self.plan.mesh.axis_size("dp") * self.plan.mesh.axis_size("ep")

    @property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self._coordinates.get("dp", 0) * self.plan.mesh.axis_size("ep") + self._coordinates.get("ep", 0)

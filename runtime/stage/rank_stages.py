"""The stages of one rank, set up once: blocks of each stage, their tensor-parallel sharding, and helpers for steps.

blocks ──▶ cuts (blocks of each stage) ──▶ tensor cuts ──▶ stages, built with the same weights on all holders
                                                        ──▶ tied weights, queues of deferred weight gradients
batch  ──▶ units, each with the parts that this rank needs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import nn

from quintsched.errors import MisfitError, counted
from quintsched.ir.instruction_set import BwdInput
from quintsched.ir.mesh import REPLICA_AXES
from quintsched.plan import Plan

from ..agreement.engine_settings_between_ranks import agree_on_blocks
from ..autograd.deferred_weight_grads import WeightQueue, defer_weights
from ..autograd.engine_owned_layers import Hold
from ..blocks.block_builders import Blocks, on_meta, outlines
from ..blocks.dtensor import is_sharded
from ..blocks.state_dict_entries import require_saved
from ..comm import LocalTransport, Transport
from ..comm.host_collectives import share_bytes
from ..comm.torch_modes import Modes
from ..guards.refused_combinations import BlockUse, require_usable_blocks
from ..guards.state_changed_by_forwards import LateState, eval_mode_warning
from ..guards.state_in_several_stages import SharedState
from ..guards.weights_not_held import WeightsElsewhere
from ..guards.writes_across_stages import CommonState
from ..parallel.context.context_parallel import ContextParallel
from ..parallel.cut_proofs.prove_cuts_in_first_step import Prover
from ..parallel.expert.expert_load import ExpertLoad, expert_report, replicated_experts
from ..parallel.expert.moe import MoE, leave_uncompiled, mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.mesh_independent_dropout import Masks
from ..parallel.synced_norm import SyncedNorms
from ..parallel.tensor.cut_rules import is_built_in
from ..parallel.tensor.whole_model_cuts import TensorCuts
from ..settings.engine_settings import RunSettings
from ..user_objects.changes_since_split import Copies, SharedOrigin, sources_of
from .batches.compare_whole_batches import SameData
from .batches.microbatches import BatchCutter, shape_of
from .batches.same_batch_every_step import DataMarks, is_place_holder, is_real
from .build_stages import build_stages, cuts_of, require_separate
from .early_stage_losses import target_stages
from .merge_replica_buffers import SharedBuffers, has_batch_norms, synced_choice
from .stage_input_gradients import BoundaryGradients
from .tied_weights import TiedWeights

_logger = logging.getLogger("quintsched.runtime")

Result = TypeVar("Result")


class RankModel:
    """The stages of one rank.

    Args:
        plan: has the stages and their ranks.
        blocks: the whole model, built or not.
        groups: the groups of the mesh.
        transport: the transport of this rank.
        options: settings of the run.
        block_costs: the cost of each block; None estimates it.
        cut_logits: whether loss and metrics accept logits sharded over the vocabulary.

    Attributes:
        cuts: the blocks of each stage.
        outlines: all blocks on the meta device (see `blocks.outlines`).
        target_stages: stages whose blocks take targets.
        shared_state: Python state that blocks of several stages share besides weights.
        boundaries: `requires_grad` of stage inputs, and checks of their gradients.
        common: shared state that blocks here may mutate and others read; None: none.
        own_blocks, hold: blocks of these stages, by number, and the hold on their weights.
        late_state: numbers that code of its blocks mutates.
        elsewhere: weights that this rank does not hold whole.
        tensor: the tensor-parallel sharding of blocks.
        prover: proves that sharded blocks compute the same numbers as whole ones.
        stages: the stages of this rank.
        batches: cuts a batch into units.
        synced: shares batch norm statistics over the replicas; None: not shared.
        buffers: keeps buffers that forwards mutate equal on all replicas.
        same_data, marks: compare the data of the ranks of one replica.
        queues: deferred weight gradients, per stage with split backwards.
        deferred_share: share of the weights of these stages whose gradients can be deferred; None without such stages.
    """

    def __init__(
        self,
        plan: Plan,
        blocks: Blocks,
        groups: MeshGroups,
        transport: Transport,
        options: RunSettings,
        *,
        block_costs: Sequence[float] | None,
        cut_logits: bool,
    ) -> None:
        self.plan, self.options, self.hold = plan, options, Hold(trains=plan.mode == "train")
        self._num_steps = self._num_evaluations = 0
        self._groups, self._transport = groups, transport
        self._coordinates = plan.mesh.coordinates(transport.rank)
        self.pp_rank = self._coordinates.get("pp", 0)
        self.sequences = ContextParallel(options.context, groups.context, transport, options.compiled)
        self._copies: Sequence[Copies] = getattr(blocks, "copies", ())
        self._given = blocks if isinstance(blocks, list | nn.Sequential | nn.ModuleList) else None
        self._given_ids = [*map(id, blocks)]
        self._cut(blocks, block_costs, cut_logits=cut_logits)
        self._build(blocks)
        self.tied = TiedWeights(plan, options.tied or {}, self.cuts, self.stages, groups)
        self.queues, self.deferred_share = self._defer()

    def bind_copies(self) -> None:
        """Bind tied weights of a split model to this rank's copies, at their present memory."""
        for copies in self._copies:
            copies.bind(self.stages.values(), self.cuts)

    def _cut(self, blocks: Blocks, block_costs: Sequence[float] | None, *, cut_logits: bool) -> None:
        """Choose the blocks of each stage and their tensor-parallel sharding, before any block is built."""
        options, tensor = self.options, self._groups.tensor
        built = [on_meta(block) for block in blocks]
        require_saved(built)
        self.cuts = cuts_of(self.plan, built, block_costs)
        require_separate(built, self.cuts, tensor)
        zero = self.plan.zero
        self._moves = f"ZeRO-{zero.stage} moves weights to its buffers" if zero.shards_optimizer else ""
        separates = self._moves or ("tp cuts blocks one by one" if tensor.size > 1 else "")
        changed, tied = getattr(blocks, "changing", ()), options.tied or {}
        self.shared_state = SharedState(built, self.cuts, changed, separates=separates, tied=tied)
        agree_on_blocks(built, self.cuts, self._groups.world)
        is_shared = isinstance(self._transport, LocalTransport) and self._transport.world_size > 1
        self.outlines = outlines(built, apart=tensor.size > 1, shared=is_shared)
        self.tensor = TensorCuts(
            self.outlines,
            tensor,
            options.rules,
            sequence_parallel=options.sequence_parallel,
            cut_logits=cut_logits,
            proved=options.prove != "none",
        )
        shares = self.expert_shares if any(any(replicated_experts(one)) for one in self.outlines) else None
        in_eval_mode = eval_mode_warning(self.outlines) if self.plan.mode == "train" else None
        for line in (shares, in_eval_mode):
            if line and self._transport.rank == 0:
                _logger.warning("%s", line)
        self.target_stages = target_stages(self.cuts, self.outlines)
        self._buffer_choice = synced_choice(options.buffers, self.outlines)
        self._require_usable(lambda number: False)

    def _require_usable(self, is_sliced: Callable[[int], bool]) -> None:
        """Raise the error for the first block that the plan cannot run."""
        device, graphs = self._transport.device, self.options.cuda_graph
        run = BlockUse(self.plan, device, self.outlines, self.cuts, is_sliced, self._buffer_choice, graphs)
        require_usable_blocks(run)

    def _build(self, blocks: Blocks) -> None:
        options, device, zero = self.options, self._transport.device, self.plan.zero
        self.masks, self.elsewhere = Masks(options.seed, device), WeightsElsewhere(blocks)
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
            outlines=self.outlines,
            seed=options.seed,
            masks=self.masks,
            dtype=options.dtype,
            device=device,
            moves=self._moves,
            hold=self.hold,
        )
        self.tensor.settle_choices(self.prover.share(self._groups.world))
        if options.sequence_parallel:  # known only after the proof
            self._require_usable(self.tensor.tokens.inside)
        self.boundaries = BoundaryGradients(blocks, self.outlines, self.cuts, [*self.stages], options.dtype)
        self.own_blocks = {int(n): b for stage in self.stages.values() for n, b in stage.blocks.items()}
        self.late_state = LateState(
            {str(n): block for n, block in self.own_blocks.items()},
            are_whole=not zero.shards_weights,
            may_hook=not (options.compiled or options.cuda_graph),
        )
        self.common: CommonState | None = None
        self._published: tuple[object, tuple[int, int, int]] = None, (0, 0, 0)
        is_resident = not zero.shards_weights or self.num_replicas == 1
        self.elsewhere.settle_stages(self.stages.values(), is_resident=is_resident)
        if options.compiled:
            leave_uncompiled(self.stages)
        self.expert_load = ExpertLoad(blocks, self.stages, self._groups.tensor, self._groups.world)
        self.synced, self.buffers = self._share_buffers()
        self.same_data = SameData(self.replica, self.num_replicas, self._groups.world)
        group = self._groups.world if zero.shards_optimizer else self._groups.model
        told = partial(share_bytes, group), self._transport.publisher.fail
        self.marks = DataMarks(group.ranks, self._replica_of, self._transport.rank, device, *told)
        self._needed = {"inputs": self.needs_inputs, "targets": self.needs_targets}
        self.batches = BatchCutter(
            device,
            options.dtype,
            inputs=self.needs_inputs,
            targets=self.needs_targets,
            rank=self._transport.rank,
            shard=self.sequences.shard,
        )

    def _defer(self) -> tuple[dict[int, WeightQueue], float | None]:
        """Defer the weight gradients of stages with split backwards; return the share of weights that allow it too."""
        split = {i.stage for i in self.plan.programs[self.pp_rank] if isinstance(i, BwdInput)}
        queues = {stage: WeightQueue(compiled=self.options.compiled) for stage in split}
        waiting = sum(defer_weights(self.stages[stage], queue) for stage, queue in queues.items())
        total = sum(p.numel() for stage in split for p in self.stages[stage].named_weights().values())
        return queues, waiting / total if total else None

    def _share_buffers(self) -> tuple[SyncedNorms | None, SharedBuffers]:
        """Return the shared batch norm statistics, if any, and the object that keeps buffers equal on replicas."""
        groups, choice = self._groups, self._buffer_choice
        synced = None
        if choice == "sync" and groups.replicas.size > 1 and has_batch_norms(self.outlines):
            synced = SyncedNorms(self._transport.make_group(self.plan.mesh.groups(*REPLICA_AXES)))
        shared = SharedBuffers(choice, self.stages, groups.replicas, self._replica_of)
        return synced, shared

    def compare(self, plan: Plan, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> None:
        """Raise `MisfitError` where ranks of a replica have different data, in steps that compare it (collective)."""
        needed, given = self._needed, {"inputs": inputs, "targets": targets}
        if plan.mode == "train":
            marks = self.marks.note(given, needed, extras)
            if inputs is not None and not needed["inputs"] and is_real(marks[0]):
                self._transport.publisher.note_given(*shape_of(inputs), 0)
            if targets is not None and not needed["targets"] and is_real(marks[1]):
                self._transport.publisher.note_given(0, 0, shape_of(targets)[0])
        if self.same_data.is_due(plan.mode):
            compared = {n: g if needed[n] or not is_place_holder(g) else None for n, g in given.items()}
            self.same_data.require(compared, extras)

    def publish(self, kind: object, inputs: Any, targets: Any) -> None:
        """Publish the size of this rank's share of a batch, for the verdict on a hang: ranks may differ in it.

        Data that the rank does not need is published by `compare`, unless it is a placeholder.
        """
        if kind is None or kind is not self._published[0]:
            rows = shape_of(targets)[0] if self.needs_targets else 0
            self._published = kind, (*(shape_of(inputs) if self.needs_inputs else (0, 0)), rows)
        self._transport.publisher.begin_batch(*self._published[1])

    @property
    def in_words(self) -> str:
        """The plan, this rank's place in its mesh, and its stages, in a line."""
        axes = ", ".join(f"{axis}={place}" for axis, place in self._coordinates.items())
        stages = ", ".join(f"stage {stage} of {counted(len(self.cuts[stage]), 'block')}" for stage in self.stages)
        at = f"rank {self._transport.rank} of {self._transport.world_size} ({axes or 'alone'})"
        return f"{self.plan.title}; {at}: {stages}"

    @property
    def expert_shares(self) -> str | None:
        """Report, in one line, of the experts sharded over ep; None without it."""
        size = self._groups.experts.size
        return expert_report(self.outlines, size) if size > 1 else None

    @cached_property
    def sources(self) -> list[SharedOrigin]:
        """Shared state of split models' blocks; each source refreshes it from the model as it is now."""
        return [
            *sources_of(block for stage in self.stages.values() for block in stage.blocks.values()),
            *self._copies,
        ]

    def evaluating(self, run: Callable[[], Result]) -> Result:
        """Return the result of `run` with the blocks in evaluation mode; training flags are restored afterwards."""
        return self.running(partial(self._evaluating, run), evaluates=True)

    def running(self, run: Callable[[], Result], *, evaluates: bool = False) -> Result:
        """Return the result of `run`, with `evaluates` set for a split model's blocks, whatever their own flags are.

        Raises `ModesLeftError` where `run` leaves other torch modes active than before.
        """
        around = Modes.now()
        if self._given is not None and [*map(id, self._given)] != self._given_ids:
            self._require_as_given(self._given)
        for source in self.sources:
            source.evaluates = evaluates
        if not evaluates and not self._num_steps & (self._num_steps - 1):  # finds later additions
            self.common = self.shared_state.common(self.own_blocks)
        self._num_steps += not evaluates
        if self.common is not None:
            self.common.begin_step()
        self._num_evaluations += evaluates
        count = self._num_evaluations if evaluates else self._num_steps
        is_due, tells = not (count - 1) & (count - 2), False
        if is_due or not self.late_state.is_plain:
            is_one_of_all = not (self.replica or self._groups.tensor.index or self._groups.context.index)
            is_first = self._num_steps == 1 and not evaluates and not self.late_state.is_empty
            shares = is_first and self.num_replicas > 1 and not self._groups.tensor.index
            tells = is_one_of_all or shares
        if tells:
            self.late_state.begin_step(is_due=is_due)
        try:
            result = run()
            if self.common is not None:
                self.common.why_changed()
            if tells:
                share = partial(share_bytes, self._groups.replicas) if shares else None
                counts = self.plan.schedule.microbatches, self.num_replicas
                self.late_state.tell(*counts, share, self.plan, speaks=is_one_of_all)
            if Modes.now() != around:
                around.require_kept("a block on this rank, a hook or the loss function")
            return result
        finally:
            for source in self.sources:
                source.evaluates = None

    def _require_as_given(self, blocks: Sequence[Any]) -> None:
        """Raise `MisfitError` where the caller's list of blocks was changed; it may be emptied or set to None."""
        found = [*zip(map(id, blocks), self._given_ids, strict=False)]
        places = [k for k, (one, was) in enumerate(found) if one != was and blocks[k] is not None]
        if len(blocks) and (places or len(blocks) != len(self._given_ids)):
            raise MisfitError(
                f"the list of blocks has been changed at place {[*places, len(found)][0]} since the engine was built, "
                "which runs those that it was given: build another Engine for other blocks, or let a block's forward "
                "do what is to change"
            )

    def _evaluating(self, run: Callable[[], Result]) -> Result:
        before = [(module, module.training) for stage in self.stages.values() for module in stage.modules()]
        try:
            for stage in self.stages.values():
                stage.eval()
            return run()
        finally:
            for module, trains in before:  # a class may override `train` and undo `eval`
                if module.training is not trains:
                    module.train(trains)

    @cached_property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so needs inputs."""
        return any(route.stages[0] in self.stages for route in self.plan.routes)

    @cached_property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so needs them."""
        lasts = {route.stages[-1] for route in self.plan.routes if self.plan.mode == "train"}
        return not self.stages.keys().isdisjoint(lasts | self.target_stages)

    @cached_property
    def may_draw(self) -> bool:
        """Whether draws depend on sample numbers in the whole batch: dropout does, and user blocks may draw."""
        modules = (module for block in self.outlines for module in on_meta(block).modules())
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)
        return drops or not all(is_built_in(on_meta(block)) for block in self.outlines)

    @cached_property
    def computes_empty_units(self) -> bool:
        """Whether units without samples are computed too, for collectives between replicas inside a forward."""
        meet = self._groups.experts.size > 1 or self.synced is not None
        return meet or any(is_sharded(stage) for stage in self.stages.values())

    @cached_property
    def pads_over_experts(self) -> bool:
        """Whether mixtures of experts pad to capacity: then all ranks of ep must know if token counts are equal."""
        pads = (layer.pad_to_capacity for block in self.outlines for layer in mixtures(on_meta(block)).values())
        return self._groups.experts.size > 1 and any(pads)

    @cached_property
    def mixtures(self) -> list[MoE]:
        """The mixture-of-experts layers of this rank."""
        return [layer for stage in self.stages.values() for layer in mixtures(stage).values()]

    @cached_property
    def num_replicas(self) -> int:
        """Number of replicas that divide the batch (dp x ep)."""
        return self.plan.mesh.axis_size("dp") * self.plan.mesh.axis_size("ep")

    @cached_property
    def replica(self) -> int:
        """Index of the replica that this rank belongs to."""
        return self._replica_of(self._transport.rank)

    def _replica_of(self, rank: int) -> int:
        at = self.plan.mesh.coordinates(rank)
        return at.get("dp", 0) * self.plan.mesh.axis_size("ep") + at.get("ep", 0)

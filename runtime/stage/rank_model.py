"""One rank's stages of the model, set up once: which blocks are a stage, how they are cut over tp, what serves them.

blocks ──▶ cuts (blocks of each stage) ──▶ tensor cuts ──▶ stages, built and the same on all their holders
                                                        ──▶ tied weights, queues of put-off weight gradients
batch  ──▶ units, each with what of it this rank needs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import nn

from quintsched.errors import MisfitError
from quintsched.ir.instructions import BwdInput
from quintsched.ir.mesh import REPLICA_AXES
from quintsched.plan import Plan

from ..agreement.engine_records import agree_on_blocks
from ..autograd.deferred_weight_grads import WeightQueue, defer_weights
from ..blocks.blocks import Blocks, on_meta, outlines
from ..blocks.dtensor import is_sharded
from ..blocks.module_state import require_saved
from ..comm import LocalTransport, Transport
from ..comm.control import share_bytes
from ..comm.modes import Modes
from ..examine.eval_mode import eval_mode_warning
from ..examine.followed import Copies, Source, sources_of
from ..examine.in_common.common_state import CommonState
from ..examine.in_common.shared_state import SharedState
from ..examine.microbatch_state import LateState
from ..examine.refusals import Run, require_usable_blocks
from ..examine.weights_elsewhere import WeightsElsewhere
from ..parallel.context.context import ContextParallel
from ..parallel.dropout import Masks
from ..parallel.expert.load import ExpertLoad, expert_report
from ..parallel.expert.moe import MoE, leave_uncompiled, mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.proof.prover import Prover
from ..parallel.synced_norm import SyncedNorms
from ..parallel.tensor.model_cuts import TensorCuts
from ..parallel.tensor.rules import is_built_in
from ..settings.run_settings import RunSettings
from .batches.data_marks import DataMarks, is_place_holder
from .batches.microbatches import BatchCutter, shape_of
from .batches.same_data import SameData
from .boundary_gradients import BoundaryGradients
from .buffers import SharedBuffers, has_batch_norms, synced_choice
from .build import build_stages, cuts_of, require_separate
from .sliced_losses import target_stages
from .tied_weights import TiedWeights

_logger = logging.getLogger("quintsched.runtime")

Result = TypeVar("Result")


class RankModel:
    """The stages of one rank.

    Args:
        plan: says which stages there are, and where.
        blocks: the whole model, built or not.
        groups: the groups of the mesh.
        transport: this rank's.
        options: how blocks become stages.
        block_costs: what each block costs; None estimates it.
        cut_logits: whether loss and metrics can do with logits that are cut over the vocabulary.

    Attributes:
        cuts: the blocks of each stage.
        outlines: all blocks, without weights (see `blocks.outlines`).
        target_stages: the stages whose blocks take targets.
        shared_state: what blocks of several stages have in common besides weights.
        boundaries: whether what stages are given requires gradients, and gets them.
        common: what blocks here may change that others read; None: nothing.
        own_blocks: the blocks of these stages, by their numbers.
        late_state: the numbers that code of its blocks changes.
        elsewhere: the weights that this rank has not whole.
        tensor: how blocks are cut over tp.
        prover: proves that blocks give the same numbers cut as whole.
        stages: this rank's.
        batches: cuts a batch into units.
        synced: lets batch norms share their statistics over the replicas; None: they do not.
        buffers: keeps what forwards change the same on all replicas.
        same_data, marks: compare what ranks of one replica are given.
        queues: where the weight gradients of split backwards wait, per stage that has such.
        deferred_share: which share of the weights of these stages has gradients that can wait; None without such.
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
        self.plan, self.options = plan, options
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
        """Let weights of the model that are tied be those of the copies on this rank, wherever these lie by now."""
        for copies in self._copies:
            copies.bind(self.stages.values(), self.cuts)

    def _cut(self, blocks: Blocks, block_costs: Sequence[float] | None, *, cut_logits: bool) -> None:
        """Settle which blocks are a stage, and how tensor parallelism cuts them, before any is built."""
        options, tensor = self.options, self._groups.tensor
        built = [on_meta(block) for block in blocks]
        require_saved(built)
        self.cuts = cuts_of(self.plan, built, block_costs)
        require_separate(built, self.cuts, tensor)
        self.shared_state = SharedState(built, self.cuts, getattr(blocks, "changing", ()))
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
        shares = self.expert_shares or ""
        in_eval_mode = eval_mode_warning(self.outlines) if self.plan.mode == "train" else None
        for line in (shares if "; on all ranks alike" in shares else None, in_eval_mode):
            if line and self._transport.rank == 0:
                _logger.warning("%s", line)
        self.target_stages = target_stages(self.cuts, self.outlines)
        self._buffer_choice = synced_choice(options.buffers, self.outlines)
        self._require_usable(lambda number: False)

    def _require_usable(self, is_sliced: Callable[[int], bool]) -> None:
        """Raise the error for the first block that the plan can do nothing with."""
        device, graphs = self._transport.device, self.options.cuda_graph
        run = Run(self.plan, device, self.outlines, self.cuts, is_sliced, self._buffer_choice, graphs)
        require_usable_blocks(run)

    def _build(self, blocks: Blocks) -> None:
        options, device = self.options, self._transport.device
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
        )
        self.tensor.settle(self.prover.share(self._groups.world))
        if options.sequence_parallel:  # only now it is known which blocks get slices
            self._require_usable(self.tensor.tokens.inside)
        self.boundaries = BoundaryGradients(blocks, self.outlines, self.cuts, [*self.stages], options.dtype)
        self.own_blocks = {int(n): b for stage in self.stages.values() for n, b in stage.blocks.items()}
        self.late_state = LateState(
            {str(n): block for n, block in self.own_blocks.items()},
            are_whole=not self.plan.zero.shards_weights,
            may_hook=not (options.compiled or options.cuda_graph),
        )
        self.common: CommonState | None = None
        self._num_steps = self._num_evaluations = 0
        self._published: tuple[object, tuple[int, int, int]] = None, (0, 0, 0)
        is_resident = not self.plan.zero.shards_weights or self.num_replicas == 1
        self.elsewhere.settle(self.stages.values(), is_resident=is_resident)
        if options.compiled:
            leave_uncompiled(self.stages)
        self.expert_load = ExpertLoad(blocks, self.stages, self._groups.tensor, self._groups.world)
        self.synced, self.buffers = self._share_buffers()
        self.same_data = SameData(self.replica, self.num_replicas, self._groups.world)
        group = self._groups.world if self.plan.zero.shards_optimizer else self._groups.model
        told = partial(share_bytes, group), self._transport.publisher.fail
        self.marks = DataMarks(group.ranks, self._replica_of, self._transport.rank, device, *told)
        self.batches = BatchCutter(
            device,
            options.dtype,
            inputs=self.needs_inputs,
            targets=self.needs_targets,
            rank=self._transport.rank,
            shard=self.sequences.shard,
            replicas=self.num_replicas,
        )

    def _defer(self) -> tuple[dict[int, WeightQueue], float | None]:
        """Let the weight gradients of stages with split backwards wait; return also which share of weights can."""
        split = {i.stage for i in self.plan.programs[self.pp_rank] if isinstance(i, BwdInput)}
        queues = {stage: WeightQueue(compiled=self.options.compiled) for stage in split}
        waiting = sum(defer_weights(self.stages[stage], queue) for stage, queue in queues.items())
        total = sum(p.numel() for stage in split for p in self.stages[stage].named_weights().values())
        return queues, waiting / total if total else None

    def _share_buffers(self) -> tuple[SyncedNorms | None, SharedBuffers]:
        """Return what lets batch norms share statistics over the replicas, if they do, and what shares buffers."""
        groups, choice = self._groups, self._buffer_choice
        synced = None
        if choice == "sync" and groups.replicas.size > 1 and has_batch_norms(self.outlines):
            synced = SyncedNorms(self._transport.make_group(self.plan.mesh.groups(*REPLICA_AXES)))
        shared = SharedBuffers(choice, self.stages, self.plan, groups.replicas)
        return synced, shared

    def compare(self, plan: Plan, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> None:
        """Now and then raise `MisfitError` where ranks of a replica are not given the same (collective)."""
        needed = {"inputs": self.needs_inputs, "targets": self.needs_targets}
        given = {"inputs": inputs, "targets": targets}
        if plan.mode == "train":
            has_inputs, has_targets = self.marks.note(given, needed, extras)
            if not self.needs_inputs and inputs is not None and has_inputs:
                self._transport.publisher.note_given(*shape_of(inputs), 0)
            if not self.needs_targets and targets is not None and has_targets:
                self._transport.publisher.note_given(0, 0, shape_of(targets)[0])
        if self.same_data.is_due(plan.mode):
            compared = {n: g if needed[n] or not is_place_holder(g) else None for n, g in given.items()}
            self.same_data.require(compared, extras)

    def publish(self, kind: object, inputs: Any, targets: Any) -> None:
        """Say how much this rank is given of one more batch, of a kind, so that a verdict can tell who has others.

        What the rank does not need is told of when it is compared, if it is no place holder.
        """
        if kind is None or kind is not self._published[0]:
            rows = shape_of(targets)[0] if self.needs_targets else 0
            self._published = kind, (*(shape_of(inputs) if self.needs_inputs else (0, 0)), rows)
        self._transport.publisher.begin_batch(*self._published[1])

    @property
    def expert_shares(self) -> str | None:
        """What ep shares out, in a line; None without it."""
        size = self._groups.experts.size
        return expert_report(self.outlines, size) if size > 1 else None

    @cached_property
    def sources(self) -> list[Source]:
        """What blocks of split models have in common: each lets them be those of the model as it is now."""
        return [
            *sources_of(block for stage in self.stages.values() for block in stage.blocks.values()),
            *self._copies,
        ]

    def evaluating(self, run: Callable[[], Result]) -> Result:
        """Return what is run with the blocks in evaluation mode; those that trained do so again after."""
        return self.running(partial(self._evaluating, run), evaluates=True)

    def running(self, run: Callable[[], Result], *, evaluates: bool = False) -> Result:
        """Return what is run while blocks of a split model are told whether they train, whatever their own flags say.

        Raises `ModesLeftError` where other modes are in force behind it than before.
        """
        around = Modes.now()
        if self._given is not None and [*map(id, self._given)] != self._given_ids:
            self._require_as_given(self._given)
        for source in self.sources:
            source.evaluates = evaluates
        if not evaluates and not self._num_steps & (self._num_steps - 1):  # what is put in between comes to light
            self.common = self.shared_state.common(self.own_blocks)
        self._num_steps += not evaluates
        if self.common is not None:
            self.common.begin()
        self._num_evaluations += evaluates
        count = self._num_evaluations if evaluates else self._num_steps
        is_due = not (count - 1) & (count - 2)
        is_one_of_all = not (self.replica or self._groups.tensor.index or self._groups.context.index)
        is_first = self._num_steps == 1 and not evaluates and not self.late_state.is_empty
        shares = is_first and self.num_replicas > 1 and not self._groups.tensor.index
        tells = (is_due or not self.late_state.is_empty) and (is_one_of_all or shares)
        if tells:
            self.late_state.begin(is_due=is_due)
        try:
            result = run()
            if self.common is not None:
                self.common.why_changed()
            if tells:
                share = partial(share_bytes, self._groups.replicas) if shares else None
                counts = self.plan.schedule.microbatches, self.num_replicas
                self.late_state.tell(*counts, share, speaks=is_one_of_all)
            if Modes.now() != around:
                around.require_kept("a block on this rank, a hook or the loss function")
            return result
        finally:
            for source in self.sources:
                source.evaluates = None

    def _require_as_given(self, blocks: Sequence[Any]) -> None:
        """Raise `MisfitError` where blocks were put in place of those that the engine was given; it may be emptied."""
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
            for module, trains in before:  # a class may have a `train` of its own, which takes back what `eval` did
                if module.training is not trains:
                    module.train(trains)

    @cached_property
    def needs_inputs(self) -> bool:
        """Whether this rank holds a first stage, and so has to be given inputs."""
        return any(route.stages[0] in self.stages for route in self.plan.routes)

    @cached_property
    def needs_targets(self) -> bool:
        """Whether this rank holds a last stage, or another that takes targets, and so has to be given them."""
        lasts = {route.stages[-1] for route in self.plan.routes if self.plan.mode == "train"}
        return not self.stages.keys().isdisjoint(lasts | self.target_stages)

    @cached_property
    def may_draw(self) -> bool:
        """Whether blocks draw by the numbers of samples in the whole batch: dropouts do, and those not built in may."""
        modules = (module for block in self.outlines for module in on_meta(block).modules())
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in modules)
        return drops or not all(is_built_in(on_meta(block)) for block in self.outlines)

    @cached_property
    def computes_empty_units(self) -> bool:
        """Whether units without samples are computed too, since ranks of several replicas meet within a forward."""
        meet = self._groups.experts.size > 1 or self.synced is not None
        return meet or any(is_sharded(stage) for stage in self.stages.values())

    @cached_property
    def pads_over_experts(self) -> bool:
        """Whether mixtures of experts pad, of which all ranks of ep have to know whether they have as many tokens."""
        pads = (layer.pad_to_capacity for block in self.outlines for layer in mixtures(on_meta(block)).values())
        return self._groups.experts.size > 1 and any(pads)

    @cached_property
    def mixtures(self) -> list[MoE]:
        """The mixtures of experts of this rank."""
        return [layer for stage in self.stages.values() for layer in mixtures(stage).values()]

    @cached_property
    def num_replicas(self) -> int:
        """How many replicas divide the batch (dp x ep)."""
        return self.plan.mesh.axis_size("dp") * self.plan.mesh.axis_size("ep")

    @cached_property
    def replica(self) -> int:
        """Which of them this rank belongs to."""
        return self._replica_of(self._transport.rank)

    def _replica_of(self, rank: int) -> int:
        at = self.plan.mesh.coordinates(rank)
        return at.get("dp", 0) * self.plan.mesh.axis_size("ep") + at.get("ep", 0)

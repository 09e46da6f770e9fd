"""Binds plans to one rank when they are first run, and runs them one after the other.

    plan, first batch ──▶ ranks agree on shapes ──▶ RankState ──▶ Interpreter       once per plan
    batch             ──▶ Interpreter.run ──▶ StepResult                            every step

A training and its evaluation are two plans over the same stages, gradients and optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from quintsched.errors import UsageError, nearest
from quintsched.ir.values import Value
from quintsched.plan import Plan

from ..blocks.blocks import TARGETS, Parcel, accepted_extras, on_meta, takes_targets
from ..blocks.shapes import agree, announce_spec, find_shapes
from ..blocks.trees import TreeSpec
from ..comm import Transport
from ..comm.interleaving import Overlaps
from ..parallel.mesh_groups import MeshGroups
from ..parallel.proof.arrivals import FirstUnits
from ..stage.cargo import Cargo, require_planned_skips
from ..stage.forward import StageForward
from ..stage.in_place import require_own_memory
from ..stage.losses import require_planned_losses
from ..stage.microbatches import Batch
from ..stage.outputs import OutputJoiner
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from .activation_memory import resident_tensors
from .cells import Cells, ReceiveBuffers, Waits
from .clock import Clock
from .data_flow import ProgramFlow
from .host_copies import HostCopies
from .interpreter import Call, Interpreter
from .rank_state import (
    ComputeState,
    CurrentStep,
    LossFn,
    MessageState,
    MetricFn,
    RankState,
    Saved,
    StepEndState,
    UnitPlace,
    ZeroState,
)
from .recorder import Recorder
from .tally import StepResult, Tally


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run does with the outputs of a model and its gradients."""

    loss_fn: LossFn
    metrics: Mapping[str, MetricFn]
    clip: float | None
    """Threshold of the global gradient norm; None: gradients are not scaled."""
    max_sends: int | None
    """How many sends of a channel may be in flight; None: any number."""


@dataclass
class StepCount:
    """How many steps a training has made: in this run, and in those that it goes on from."""

    in_run: int = 0
    before: int = 0

    @property
    def total(self) -> int:
        """The steps of all runs."""
        return self.before + self.in_run


class PlanRunner:
    """Runs plans on one rank.

    Args:
        model: this rank's stages.
        state: their weights, gradients and optimizers.
        groups: the groups of the mesh.
        transport: carries messages to other ranks.
        clock: adds up the time that the rank computes.
        options: loss, metrics, clipping.
        recorder: writes down when the instructions of training steps ran.

    Attributes:
        interpreters: those that were bound, by the mode of their plan.
        steps: how many steps the training has made.
    """

    def __init__(
        self,
        model: RankModel,
        state: TrainingState,
        groups: MeshGroups,
        transport: Transport,
        clock: Clock,
        options: RunOptions,
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._state, self._groups, self._transport = model, state, groups, transport
        self._clock, self._options, self._recorder = clock, options, recorder
        self._buffers = ReceiveBuffers(transport.device)
        self.interpreters: dict[str, Interpreter] = {}
        self.steps = StepCount()
        self._latest: Interpreter | None = None
        self._is_broken = False

    def interpreter_of(self, plan: Plan, batch: Batch) -> Interpreter:
        """Return what runs a plan on batches like this one; the first time, ranks agree on shapes (collective)."""
        if plan.mode not in self.interpreters:
            self.interpreters[plan.mode] = self._bind(plan, batch)
        return self.interpreters[plan.mode]

    def run(
        self, plan: Plan, batch: Batch, calls: list[Call] | None = None, *, wants_outputs: bool = False
    ) -> StepResult:
        """Run a plan on a batch; `calls` take the place of its bound calls.

        Where somebody `wants_outputs` of an evaluation, ranks of the last stage put them together.

        Raises:
            UsageError: an earlier step failed half-way.
            MisfitError: inputs of another shape than those that the plan was bound for.
        """
        interpreter = self.interpreter_of(plan, batch)
        if self._is_broken:
            raise UsageError("an earlier step failed half-way, so gradients and messages are lost; make a new engine")
        state = interpreter.state
        if batch.inputs:
            state.compute.place.require_input(batch)
        if self._latest is not None and self._latest is not interpreter:
            self._latest.state.cells.settle()
        self._latest, self._is_broken = interpreter, True
        state.current.number, state.current.outputs = self.steps.total, {} if wants_outputs else None
        with self._model.masks.guarding(self._transport.device):
            interpreter.run(batch, self.steps.in_run, calls)
        self._settle(state.compute.overlaps)
        self._is_broken = False
        if state.flows.trains:
            self.steps.in_run += 1
        tally, outcome = state.compute.tally, state.step_end.outcome
        outputs = self._join_outputs(state, batch) if wants_outputs else None
        return StepResult(tally.figures, tuple(self._options.metrics), outcome.norm, outcome.skipped, outputs)

    def _join_outputs(self, state: RankState, batch: Batch) -> Any:
        outputs, state.current.outputs = state.current.outputs, None
        join = OutputJoiner(self._model, self._groups)
        return join(outputs or {}, state.compute.place.inputs, batch.extras[0])

    def _settle(self, overlaps: Overlaps) -> None:
        """After the first steps, settle how computations overlap, the same way on all holders of the same stages."""
        noted = overlaps.end_step()
        if noted is not None:
            agree("what overlapping stages exchange", noted, self._groups.holders, self._transport.device)
            overlaps.settle(self._groups.holders)

    def _bind(self, plan: Plan, batch: Batch) -> Interpreter:
        flows = ProgramFlow(plan, self._transport.rank)
        inputs, parcels = self._agree_on_shapes(plan, batch)
        recorder = self._recorder if flows.trains else None
        return Interpreter(self._rank_state(flows, inputs, parcels), recorder)

    def _agree_on_shapes(self, plan: Plan, batch: Batch) -> tuple[TreeSpec, list[Parcel]]:
        """Return a unit of inputs, and what every block leaves for the next; the same on all ranks."""
        device, source = self._transport.device, plan.layout.rank_of(plan.routes[0].stages[0])
        mine = batch.input_spec() if self._model.pp_rank == source else None
        inputs = announce_spec(mine, source, self._groups.pipeline, device)
        model = self._model
        extras = {name: TreeSpec.of(extra) for name, extra in batch.extras[0].items()}
        _require_takers(extras, model.outlines)
        if any(map(takes_targets, model.outlines)):
            last = plan.layout.rank_of(plan.routes[0].stages[-1])
            mine = TreeSpec.of(batch.targets[0]) if model.pp_rank == last else None
            extras[TARGETS] = announce_spec(mine, last, self._groups.pipeline, device)
        shapes = find_shapes(model.outlines, inputs, extras, model.options.dtype, self._groups.world, device)
        if plan.mode == "train":
            require_planned_losses(plan.layout, model.cuts, shapes)
        blocks = list(map(on_meta, model.outlines))
        require_planned_skips(plan, model.cuts, shapes, blocks)
        require_own_memory(model.cuts, shapes, blocks)
        travelling, count = model.tensor.travelling(shapes), plan.schedule.slices
        units = FirstUnits(inputs, extras, batch.inputs[:count], batch.targets[:count], batch.extras[:count])
        model.prover.prove(units, model.outlines, shapes, self._groups.world)
        return inputs, travelling

    def _rank_state(self, flows: ProgramFlow, inputs: TreeSpec, of_blocks: list[Parcel]) -> RankState:
        model, gradients, options = self._model, self._state.gradients, self._options
        cargo = Cargo(flows.plan, model.cuts, of_blocks)
        layout, current, waits = flows.plan.layout, CurrentStep(), Waits()
        pieces = 1 + max(map(layout.part_of, range(len(layout.stage_to_pp))))
        room = gradients.reducer.room_among(self._groups.metrics) if flows.trains else None
        tally = Tally(len(options.metrics), layout.num_microbatches, pieces, self._transport.device, room)
        cells, saved = Cells(waits), dict[Value, Saved]()
        compute = ComputeState(
            flows=flows,
            current=current,
            cells=cells,
            clock=self._clock,
            tally=tally,
            forwards=self._forwards(flows, cargo, inputs, current),
            cargo=cargo,
            place=self._place(inputs),
            loss_fn=options.loss_fn,
            metrics=options.metrics,
            gradients=gradients,
            queues=model.queues,
            host=HostCopies(
                flows,
                waits,
                self._transport.host_link(),
                self._transport.device,
                lambda: resident_tensors(model.stages, self._state.weights, current.batch),
                saved,
            ),
            saved=saved,
            overlaps=Overlaps(self._groups.sides, self._transport.device),
        )
        step_end = StepEndState(
            waits=waits,
            tally=tally,
            metrics_group=self._groups.metrics,
            gradients=gradients,
            masters=self._state.masters,
            steppers=self._state.steppers,
            clip=options.clip,
        )
        messages = MessageState(flows, cells, cargo, self._transport, options.max_sends, self._buffers)
        zero = ZeroState(waits, self._state.weights, gradients)
        return RankState(flows, current, cells, waits, compute, messages, step_end, zero)

    def _forwards(
        self, flows: ProgramFlow, cargo: Cargo, inputs: TreeSpec, current: CurrentStep
    ) -> dict[int, StageForward]:
        model, layout = self._model, flows.plan.layout
        return {
            number: StageForward(
                {int(block): module for block, module in stage.blocks.items()},
                model.cuts[number].start,
                cargo.of_stage(number),
                masks=model.masks,
                inputs=inputs,
                input_tree=lambda: current.batch.input_tree,
                skips=flows.plan.skips,
                recompute=layout.recompute_every(number) if flows.trains else 0,
                compiled=model.options.compiled,
                around=model.tensor.tokens.around,
                sliced=model.tensor.tokens.group_of,
            )
            for number, stage in model.stages.items()
        }

    def _place(self, inputs: TreeSpec) -> UnitPlace:
        model, tokens = self._model, self._model.tensor.tokens
        return UnitPlace(
            inputs=inputs,
            replica=model.replica,
            context=model.sequences.context_of(inputs.samples),
            token_shards={stage: tokens.parts_before(blocks.start) for stage, blocks in enumerate(model.cuts)},
            device=self._transport.device,
        )


def _require_takers(extras: Collection[str], blocks: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for an extra that no block takes: it would change nothing."""
    takers = list(map(accepted_extras, blocks))
    for name in extras:
        if not any(takes(name) for takes in takers):
            known = {p for block in blocks for p in inspect.signature(block.forward).parameters}
            raise UsageError(f"no block takes {name!r}, which the step is given{nearest(name, sorted(known))}")

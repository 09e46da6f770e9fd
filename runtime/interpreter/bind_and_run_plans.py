"""Binding of plans to one rank when they first run, and execution of one after the other.

    plan, batch ──▶ ranks agree on the units' shapes ──▶ RunState ──▶ Interpreter       once per plan
                    units of this step               ──▶ Interpreter.run_program ──▶ StepResult   every step

Plans for evaluation, and for other numbers of microbatches, share stages, gradients and optimizers. A program is bound
for one structure of what blocks return; each step brings the shapes of its units. Where these change, receives are
bound again to buffers of the new shapes, and calls to the new units. A program is bound anew, as a whole, where
messages have become much larger than those that it was bound for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from quintsched.errors import MisfitError, UsageError, nearest
from quintsched.files.terminal_progress import progress
from quintsched.ir.instruction_values import Value
from quintsched.plan import Plan

from ..agreement.refuse_unequal_ranks import Section, agree, require_same
from ..blocks.block_builders import Parcel, accepted_extras
from ..comm import Group, Transport
from ..comm.host_collectives import reduce_numbers
from ..comm.overlap_order import Overlaps
from ..comm.random_generators import generator_reader
from ..parallel.cut_proofs.trial_inputs import FirstUnits
from ..parallel.mesh_groups import MeshGroups
from ..parallel.mesh_independent_dropout import MOST_ALARMS
from ..stage.batches.microbatches import Batch
from ..stage.early_stage_losses import require_planned_losses
from ..stage.rank_stages import RankModel
from ..step_setup.agree_on_unit_shapes import StepSettler
from ..step_setup.unit_output_shapes import ParcelFinder
from ..step_setup.unit_samples import Latest, StepCount, Units, UnitShape, UnitSpec
from ..step_setup.weights_changed_in_forward import weights_unchanged
from ..user_objects.library_or_user import arguments_of
from ..weights_and_gradients.grad_buckets import VERSION
from ..weights_and_gradients.training_state import TrainingState
from .busy_clock import Clock
from .cuda_graphs import StepGraphs
from .errors_with_rank_and_stage import refuse_together
from .handler_table_and_loop import BoundCalls, Interpreter, PreparedStep
from .instruction_state import (
    NO_CONTEXT,
    ComputeState,
    CurrentStep,
    MessageState,
    RunOptions,
    RunState,
    SavedForward,
    StepEndState,
    ZeroState,
    stage_forwards,
)
from .join_outputs import join_outputs
from .offload_instructions import MovedActivations
from .program_dataflow import ProgramFlow
from .saved_activation_bytes import resident_tensors
from .send_and_receive import must_rebind
from .step_losses.agree_on_loss_units import RunLosses
from .step_losses.sum_losses_across_ranks import StepResult, Tally
from .trace_recorder import Recorder
from .values_between_instructions import ReceiveBuffers, ValueCells, Waits

MOST_BOUND = 8
"""Number of bound programs that are kept: of several plans, and of output structures that change between steps."""

Given = tuple[Any, Any, Mapping[str, Any]]
"""Inputs, targets and extras of a step, as the caller passes them."""


class PlanRunner:
    """Runs plans on one rank.

    Args:
        model: the stages of this rank.
        state: their weights, gradients and optimizers.
        groups: the groups of the mesh.
        transport: carries messages to other ranks.
        clock: adds up compute time.
        options: loss, metrics, clipping.
        recorder: traces the instructions of training steps.

    Attributes:
        interpreters: the latest interpreter, by mode of its plan.
        steps, is_broken: the number of training steps made, and whether a step or evaluation has failed half-way.
        usual_samples: number of samples for which a loss without a weight weighs 1 (0: not known yet).
        losses: the loss and the metrics.
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
        self._clock, self._options, self._recorder, device = clock, options, recorder, transport.device
        self._buffers, self._read_generators = ReceiveBuffers(device, transport.room_for), generator_reader(device)
        self._shapes = ParcelFinder(model, groups.pipeline, state.weights.gathered)
        self._settler = StepSettler(model, groups, device, self._find_shapes, self._shapes.agree_on_trials)
        self._bound = Latest[Interpreter](MOST_BOUND)
        self._graphs = options.settings.cuda_graph and StepGraphs(model, state, clock, device, options.functions)
        self._prepared: tuple[Plan, Units, Interpreter] | None = None
        self._settles_weights = options.shows_modules and bool(state.weights)
        self._overlaps: dict[int, tuple[Plan, Overlaps]] = {}
        self.interpreters: dict[str, Interpreter] = {}
        self.steps, self.is_broken, self.usual_samples = StepCount(), False, 0
        self._latest: Interpreter | None = None
        self.losses = RunLosses(model, groups, device, options)

    def refuse(self, plan: Plan, error: MisfitError | UsageError) -> None:
        """Announce that this rank's batch cannot be cut: to ranks that wait for its data, in a first step to all."""
        self._settler.refuse(plan, error)
        if plan.mode not in self.interpreters:
            self._shapes.are_alike = None
            self._shapes.agree_on_trials(self._groups.world)
            refuse_together(error, self._groups.world, self._same_samples, plan.mesh)

    def prepare(self, plan: Plan, batch: Batch, given: Given | None = None) -> PreparedStep:
        """Agree on a step with the pipeline's ranks; with all, in the first of a mode and where batches are compared.

        `given` are the inputs, targets and extras that the batch was cut from, to be compared between ranks.

        Raises:
            UsageError: an extra that no block takes.
            MisfitError: blocks that cannot take the batch, or ranks that disagree.
        """
        trains = plan.mode == "train"
        self._transport.publisher.enter("step" if trains else "evaluate", step=self.steps.total + 1 if trains else None)
        self._model.prover.require_sound_state()
        if plan.mode not in self.interpreters:
            with progress("examining the blocks, once", in_logs=True, rank=self._transport.rank):
                units = self._settle_first(plan, batch, given)
        else:
            units = self._settler.settle_units(plan, batch)
            if given is not None:
                self._model.compare(plan, *given)
        if self._prepared is None or self._prepared[0] is not plan or self._prepared[1] is not units:
            self._prepared = plan, units, self._interpreter_of(plan, units)
        return PreparedStep(batch, units, self._prepared[2])

    def _settle_first(self, plan: Plan, batch: Batch, given: Given | None) -> Units:
        """Agree on the first step of a mode; if a rank cannot begin it, all ranks raise: see `refuse_together`."""
        model, world, same, problem = self._model, self._groups.world, self._same_samples, None
        self._shapes.are_alike, self._shapes.some_fail = (None if world.size > 1 else True), False
        self._settler.attempts[plan.mode] += 1
        try:
            units = self._settler.settle_units(plan, batch)
            if batch.extras[0]:
                _require_takers(batch.extras[0], model.outlines)
        except (MisfitError, UsageError) as error:
            problem = None if self._shapes.some_fail else error
        if self._shapes.are_alike is None:
            self._shapes.agree_on_trials(world)
        refuse_together(problem, world, same, plan.mesh)
        agree("how many steps the loaded state has behind it", str(self.steps.total), world)
        if given is not None:
            model.compare(plan, *given)
        spec, parcels = (shape := self._settler.any_shape()).spec, shape.parcels
        words = " ".join([str(spec.inputs), *(f"{name}: {extra}" for name, extra in spec.extras)])
        settled = {"the inputs and extras of a step": words, "the shapes of what travels": " ".join(map(str, parcels))}
        require_same({"step": Section.from_settings(settled)}, same, "a step", "give all of them the same")
        self.losses.first.expect(plan.mode, parcels)
        if not self.interpreters:
            most = int(reduce_numbers(world, [max(map(len, units.samples), default=0)])[0])
            self.usual_samples = self.usual_samples or most
            self.losses.expect_auxiliary(plan, batch, units.samples, self.usual_samples, parcels)
        first = FirstUnits.of_batch(spec.inputs, dict(spec.extras), batch, plan.schedule.slices)
        if plan.mode == "train":
            require_planned_losses(plan.layout, model.cuts, parcels)
            self.losses.examine_blocks(first, parcels, self._state.weights.gathered)
        else:
            self.losses.blocks.expect_evaluation(first, parcels, self._state.weights.gathered)
        model.prover.prove(first, model.outlines, parcels, world, model.masks)
        return units

    @property
    def _same_samples(self) -> Group:
        """The ranks that compute on the same samples, whole or in parts."""
        return self._groups.model if self._groups.experts.size == 1 else self._groups.pipeline

    def _find_shapes(self, spec: UnitSpec, batch: Batch, unit: int) -> tuple[list[Parcel], bool]:
        """Return the specs of each block's output for a unit, and whether data was needed; raises `MisfitError`."""
        is_first = spec.mode not in self.interpreters
        with NO_CONTEXT if is_first else self._transport.publisher.phase("setup"):  # it may take longer than any step
            parcels, needs_data = self._shapes.find(spec, batch, unit, is_first=is_first)
            self.losses.expect_apart(self._shapes.apart)
            self._follow(spec, batch, unit, parcels)
        return parcels, needs_data

    def _follow(self, spec: UnitSpec, batch: Batch, unit: int, parcels: Sequence[Parcel]) -> None:
        """Have the prover, and the examination of block losses, examine units of shapes that are new."""
        one = slice(unit, unit + 1)
        units = FirstUnits(spec.inputs, dict(spec.extras), batch.inputs[one], batch.targets[one], batch.extras[one])
        self._model.prover.follow_units(units, parcels)
        if spec.mode == "train":
            self.losses.blocks.follow_units(units, parcels)

    @property
    def accumulates(self) -> bool:
        """Whether gradients are accumulated over further batches."""
        return self._state.gradients.reducer.accumulates

    def run_step(
        self, step: PreparedStep, calls: BoundCalls | None = None, *, last: bool = True, wants_outputs: bool = False
    ) -> StepResult:
        """Run a prepared step; `calls` replace those of the interpreter, one by one (`Interpreter.wrapped_by`).

        Without `last` its gradients are accumulated: the next training batch adds to them. With `wants_outputs`, in an
        evaluation, ranks of the last stage join the outputs of the units. Where no replica has samples, no weight
        changes and the result is `empty`.
        """
        interpreter, state = step.interpreter, step.interpreter.state
        if self._latest is not None and self._latest is not interpreter:
            self._latest.state.cells.release_sends()
            self._buffers.generation += 1  # receives of all plans share them
        trains = state.flows.trains
        self._begin(step, last=last, wants_outputs=wants_outputs)
        masks, buffers = self._model.masks, self._model.buffers
        before = self._read_generators() if masks.alarms < MOST_ALARMS else b""
        if trains and (buffers.are_shared or not self.steps.in_run):
            watched = NO_CONTEXT if self.steps.in_run else weights_unchanged(self._model, self._groups)
            with buffers.shared(step.units.samples) if buffers.are_shared else NO_CONTEXT, watched:
                self._run_or_replay(step, calls, last=last)
        else:
            self._run_or_replay(step, calls, last=last)
        if not trains:
            self.losses.settle_evaluation(state.flows.plan, wants_outputs=wants_outputs)
        masks.alarms += bool(before) and before != self._read_generators()
        if (overlaps := state.compute.overlaps).is_open and (noted := overlaps.end_step(self._groups.holders)):
            # the order of the exchanges is fixed after the first steps, for all ranks that hold the same stages
            agree("what overlapping stages exchange", noted, self._groups.holders)
            overlaps.settle_turns(self._groups.holders)
        if self._settles_weights:
            self._state.weights.wait_gathers()
        self.is_broken, outcome = False, state.step_end.outcome
        if trains:
            self._state.shown_versions = [*map(VERSION, self._state.shown)]
            masks.parts.clear() if last else self._state.masters.note_versions()
        if trains and last and not outcome.empty:
            self.steps.in_run, self.steps.total = self.steps.in_run + 1, self.steps.total + 1
            if self.steps.in_run == 1:
                drawn = any(forward.draws.have_drawn for forward in state.compute.forwards.values())
                masks.have_drawn, masks.counts = False, any(reduce_numbers(self._groups.world, [drawn]))
        outputs = self._join_outputs(step) if wants_outputs else None
        self._transport.publisher.enter("idle")
        return StepResult(
            state.compute.tally.figures,
            self._options.metrics,
            outcome.norm,
            skipped=outcome.skipped,
            empty=outcome.empty,
            outputs=outputs,
            stop_asked=outcome.stop_asked,
            _if_doubted="" if trains else self.losses.why_late(),
            _refusal="" if trains else self.losses.of_evaluation,
            _samples_per_weight=self.losses.samples_per_weight,
        )

    def _run_or_replay(self, step: PreparedStep, calls: BoundCalls | None, *, last: bool) -> None:
        """Run a step's program, or replay its graph: for a whole training step that is neither observed nor traced."""
        interpreter, number = step.interpreter, self.steps.in_run
        trains, plan = interpreter.state.flows.trains, interpreter.state.flows.plan
        is_part = trains and (not last or bool(self.losses.earlier))
        watch = partial(self.losses.observer.watch, plan, step.units, step.batch.targets, number, is_part=is_part)
        if self._graphs and trains and not is_part and calls is None and not interpreter.records(number):
            self._graphs.run_step(step, self.steps.total + 1, watch)
        else:
            watch()
            interpreter.run_program(step.batch, number if last else -1, calls)

    def _begin(self, step: PreparedStep, *, last: bool, wants_outputs: bool) -> None:
        """Set up per-step state in all objects that outlive a step; `is_broken` stays set until the step has ended."""
        interpreter, state, model = step.interpreter, step.interpreter.state, self._model
        current, trains, number = state.current, state.flows.trains, self.steps.total
        if self.losses.loss.means is not None:
            self.losses.begin_step(state.flows.plan, step.given_targets, last=last)
        for stage in model.stages.values() if trains else ():
            stage.require_known_weights(self._state.gradients.reducer.known)
        self._latest, self.is_broken = interpreter, True
        current.number, current.units, current.last = number, step.units, last
        current.runs += 1
        parts, current.outputs = model.masks.parts if trains else [], {} if wants_outputs else None
        current.samples_before = sum(of_all for _, of_all in parts) if parts else 0
        for layer in model.mixtures:
            layer.tokens_alike = step.units.alike
        if trains:
            model.boundaries.begin_step(step.units.first_spec, is_first=not parts, is_last=last)
            parts.append((step.units.num_samples, step.units.of_all))
        self._transport.stamp.begin_run(number + 1)
        if (reducer := self._state.gradients.reducer).program is not state.flows.program:
            reducer.follow_program(state.flows.program)

    def _join_outputs(self, step: PreparedStep) -> Any:
        current = step.interpreter.state.current
        outputs, current.outputs = current.outputs or {}, None
        shape = next((step.units.shapes[unit] for unit in outputs), None)
        return None if shape is None else join_outputs(outputs, shape, self._model, self._groups)

    def _interpreter_of(self, plan: Plan, units: Units) -> Interpreter:
        """Return the interpreter of a plan for these units, bound anew where their messages are much larger."""
        shapes = list(dict.fromkeys(filter(None, units.shapes)))
        shape = max(shapes, key=lambda shape: shape.cargo.nbytes, default=None) or self._settler.any_shape()
        if any(other.structure != shape.structure for other in shapes):
            raise MisfitError(
                f"blocks return a different structure for one microbatch than for another: {shapes[0].structure} and "
                f"{shapes[-1].structure}; give a number of samples that the number of microbatches divides"
            )
        key = id(plan), shape.structure
        found = self._bound.get(key, lambda: self._bind(plan, shape))
        if must_rebind(shape.cargo, found.state.messages.shape.cargo):
            self._bound.forget(key)
            found = self._bound.get(key, lambda: self._bind(plan, shape))
        self.interpreters[plan.mode] = found
        return found

    def _bind(self, plan: Plan, shape: UnitShape) -> Interpreter:
        recorder = self._recorder if plan is self._model.plan else None
        return Interpreter(self._rank_state(ProgramFlow(plan, self._transport.rank), shape), recorder)

    def _rank_state(self, flows: ProgramFlow, shape: UnitShape) -> RunState:
        model, gradients, options = self._model, self._state.gradients, self._options
        layout, current, waits = flows.plan.layout, CurrentStep(), Waits(self._transport.waits)
        pieces = 1 + max(map(layout.part_of, range(len(layout.stage_to_pp))))
        gradients.reducer.follow_program(flows.program)
        device = self._transport.device
        tally = Tally(
            len(options.metrics),
            layout.num_microbatches,
            pieces,
            device,
            room=gradients.reducer.room_among(self._groups.metrics) if flows.trains else None,
            wants_stop=options.wants_stop,
            is_doubted=self.losses.observer.is_doubted,
            clips=flows.clips,
        )
        cells, saved = ValueCells(waits), dict[Value, SavedForward]()
        resident = lambda: resident_tensors(model.stages, self._state.weights, current.batch)  # noqa: E731
        compute = ComputeState(
            flows=flows,
            current=current,
            cells=cells,
            clock=self._clock,
            tally=tally,
            forwards=stage_forwards(model, flows, shape, current, self.losses.first.require_first),
            shape=shape,
            token_shards={stage: model.tensor.tokens.parts_before(cut.start) for stage, cut in enumerate(model.cuts)},
            usual_samples=self.usual_samples,
            device=device,
            loss_fn=self.losses.loss,
            scale=options.scale,
            metrics=self.losses.metrics,
            gradients=gradients,
            queues=model.queues,
            boundaries=model.boundaries,
            moved=MovedActivations(flows, waits, self._transport.host_link(), device, resident, saved),
            saved=saved,
            overlaps=self._overlaps_of(flows.plan),
            detect_changes=model.prover.later.look,
        )
        step_end = StepEndState(
            waits=waits,
            tally=tally,
            metrics_group=self._groups.metrics,
            gradients=gradients,
            masters=self._state.masters,
            steppers=self._state.steppers,
            clip=options.settings.clip,
            scale=options.scale,
            data_digests=model.marks,
            settle_loss=partial(self.losses.settle_rule, flows.plan),
            earlier=self.losses.earlier,
        )
        messages = MessageState(flows, current, cells, shape, self._transport, options.max_sends, self._buffers)
        zero = ZeroState(waits, self._state.weights, gradients)
        return RunState(flows, current, cells, waits, compute, messages, step_end, zero)

    def _overlaps_of(self, plan: Plan) -> Overlaps:
        """Return the recorded interleavings of a plan's `Overlap`s, the same for all programs bound from it."""
        if id(plan) not in self._overlaps:  # with the plan, so that no other gets its id
            self._overlaps[id(plan)] = plan, Overlaps(self._groups.sides, self._transport.device)
        return self._overlaps[id(plan)][1]


def _require_takers(extras: Collection[str], blocks: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for an extra that no block takes, as it would have no effect."""
    for name in extras:
        if not any(accepted_extras(block)(name) for block in blocks):
            known = {p for block in blocks for p in arguments_of(block.forward)}
            raise UsageError(f"no block takes {name!r}, which the step is given{nearest(name, sorted(known))}")

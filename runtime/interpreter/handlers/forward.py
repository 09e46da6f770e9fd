"""Handlers of forwards: a stage runs on a unit, and stores its output for the next stage, or its loss in the tally.

    batch, cells ──▶ given, extras ──▶ the stage ──▶ outputs ──▶ cells: the next stage, of this rank or another
                                                            └──▶ loss, metrics: the tally

Each function binds one instruction: all that does not depend on the step is computed once, at binding. Lookups by the
shape of a unit happen in each step; a unit without samples is skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.ir import instruction_set as ins
from quintsched.ir.values import Value, ValueKind

from ...autograd.kv_store import Past, Store
from ...autograd.recompute import Rerun
from ...autograd.run_backward import edge_of
from ...blocks.block_outlines import TARGETS, Parcel
from ...blocks.trees import TreeSpec, laid_out, map_tensors
from ...blocks.without_side_effects import tensors_of_training
from ...comm.overlap_threads import BoundCall
from ...parallel.dropout import MaskUnit
from ...stage.stage_forward import UNIT, Extras, Outputs, apart
from ...stage.stage_messages import TakenSkips
from ...steps.error_location import called
from ...steps.units import UnitShape
from ..rank_state import ONLY, BackwardRoots, ComputeState, saved_of, start_of
from ..value_cells import RowParts, ValueCell
from .graph_leaves import leaves_maker

_logger = logging.getLogger(__name__)


NO_ROOTS = BackwardRoots()

_OTHER_STRIDES = (
    "stage %d (%s) leaves a tensor with strides %s, and left one with others where shapes were found, which later "
    "stages are given: what asks for strides there goes otherwise than in one process; let it return y.contiguous()"
)


def bind_fwd(state: ComputeState, index: int, instruction: ins.Fwd) -> BoundCall:
    """Run a stage forward on a unit; on the last stage of the route, compute the loss too."""
    return state.current.unless_empty(instruction.microbatch, _bind_fwd(state, index, instruction))


def _bind_fwd(state: ComputeState, index: int, instruction: ins.Fwd) -> BoundCall:
    made, plan = state.flows.made(instruction, ValueKind.OUTPUT), state.flows.plan
    finish = (
        _hand_on(state, instruction)
        if made
        else partial(_lose, state, instruction.microbatch, plan.schedule.slices * plan.mesh.axis_size("cp"))
    )
    kept = state.flows.made(instruction, ValueKind.SAVED, ValueKind.CHECKPOINT)
    if kept:
        return _bind_training(state, index, instruction, finish, kept[0])
    return _bind_evaluation(state, index, instruction, finish)


def _bind_training(
    state: ComputeState, index: int, instruction: ins.Fwd, finish: Callable[[Outputs], BackwardRoots], kept: Value
) -> BoundCall:
    """Run a forward whose graph is kept; inputs require a gradient where an earlier stage made them."""
    forward, unit, current = state.forwards[instruction.stage], instruction.microbatch, state.current
    take, extras_of, draws = _taker(state, index, instruction), _extras(state, instruction), forward.draws
    with_unit, note, now = _with_unit(state, instruction), state.clock.note, state.clock.now
    saved, losses, whole, plain = state.saved, state.tally.auxiliary, forward.whole, forward.plain
    look, host, stores, store = state.tally.look, state.host, state.stores, _store_of(state, instruction)
    moves, leaves = host.moves(kept), leaves_maker(state, instruction, kept)
    place, neighbours, stage = _place_of_loss(state, instruction), _neighbours(state, instruction), instruction.stage
    skips, weighed = _taken_skips(state, instruction), partial(_weigh_other, state, unit)
    shows_leaves = not moves and forward.is_of_torch

    def compute(given: Outputs, extras: Extras, reruns: list[Rerun]) -> tuple[BackwardRoots, Tensor | None]:
        outputs, auxiliary = forward(given, extras, reruns) if whole is None else whole(given, extras)
        return finish(outputs), auxiliary

    def run() -> None:
        given = current.batch.inputs[unit] if take is None else take()
        note(now())
        shape = current.units.shapes[unit]
        if shape is not None and stage in shape.cargo.strides:
            given = tuple(map(laid_out, given, shape.cargo.strides[stage]))
        if take is not None:
            given = leaves(given)
        reruns: list[Rerun] = []
        extras = current.batch.extras[unit] if extras_of is None else extras_of(given)
        want_unit = draws.may_draw or draws.alarms != draws.masks.alarms
        if want_unit:
            extras = with_unit(extras)
        versions = skips and skips.versions(given)
        activations = host.activations(stores.get(store)) if moves else None
        seen = given if take is None or shows_leaves else _shown(given, shape, stage)
        if activations is None and plain is not None and not want_unit:
            outputs, auxiliary = plain(seen, extras)
            start = finish(outputs)
        elif activations is None:
            start, auxiliary = compute(seen, extras, reruns)
        else:
            with activations.saving():
                start, auxiliary = compute(seen, extras, reruns)
        if skips and versions:
            skips.require_unchanged(given, versions)
        for neighbour in neighbours:
            neighbour.value = tuple([apart(output, given) for output in neighbour.value])
        if look is not None:
            look()
        if auxiliary is not None:
            auxiliary = weighed(auxiliary)
            start = start.with_loss(auxiliary, state.scale)
            losses.append((place, auxiliary.detach()))
        saved[kept] = saved_of((given, start, reruns, extras.get(UNIT) if extras else None))
        note(now())
        if activations is not None:
            host.leave(kept, activations, given if take is not None else ())

    return run


def _shown(given: Outputs, shape: UnitShape | None, stage: int) -> Outputs:
    """Return inputs as user blocks see them: clones where they may keep them, as the buffer is received into again.

    Else views: views are no leaves, as in one process, and stay valid where a leaf's memory is freed (offload).
    """
    if shape is not None and stage in shape.cargo.keeping:
        return tuple([one.clone() for one in given])
    return tuple([one.view_as(one) for one in given])


def _neighbours(state: ComputeState, instruction: ins.Fwd) -> list[ValueCell]:
    """Return the cells of outputs that later stages of this rank take: these may outlive the input of this stage.

    A skip that is taken and passed on is not among them: the plan keeps its memory alive for all stages that take it.
    """
    taken = {value.number for value in state.flows.taken(instruction, ValueKind.SKIP)}
    made = state.flows.made(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    own = [value for value in made if value.kind is ValueKind.OUTPUT or value.number not in taken]
    return [state.cells.cell_of(value) for value in own if not state.flows.is_sent(value)]


def _store_of(state: ComputeState, instruction: ins.Compute) -> tuple[int, int]:
    """Return the key of the store that holds keys and values of a microbatch's slices."""
    return instruction.stage, instruction.microbatch // state.flows.plan.schedule.slices


def _bind_evaluation(
    state: ComputeState, index: int, instruction: ins.Fwd, finish: Callable[[Outputs], BackwardRoots]
) -> BoundCall:
    """Run a forward without a graph."""
    unit, current, stage = instruction.microbatch, state.current, instruction.stage
    forward, with_unit = state.forwards[stage], _with_unit(state, instruction)
    take, extras_of, draws = _taker(state, index, instruction), _extras(state, instruction), forward.draws
    note, now = state.clock.note, state.clock.now
    losses, place, look = state.tally.auxiliary, _place_of_loss(state, instruction), state.tally.look
    skips, hands_on = _taken_skips(state, instruction), bool(state.flows.made(instruction, ValueKind.OUTPUT))
    has_loss = state.loss_fn.is_wanted

    def conclude(output: Any, given: Outputs) -> None:
        if current.outputs is not None:
            current.outputs[unit] = map_tensors(lambda tensor: apart(tensor.detach(), given), output)
        if has_loss and current.batch.targets[unit] is not None:
            finish((output,))

    def run() -> None:
        given = current.batch.inputs[unit] if take is None else take()
        note(now())
        shape = current.units.shapes[unit]
        if take is not None:
            copies = shape is not None and stage in shape.cargo.keeping
            given = tuple([t.detach().clone() if copies else t.detach() for t in given])
        if shape is not None and stage in shape.cargo.strides:
            given = tuple(map(laid_out, given, shape.cargo.strides[stage]))
        versions = skips and skips.versions(given)
        extras = current.batch.extras[unit] if extras_of is None else extras_of(given)
        extras = with_unit(extras) if draws.may_draw or draws.alarms != draws.masks.alarms else extras
        outputs, auxiliary = forward(given, extras, [])
        if skips and versions:
            skips.require_unchanged(given, versions)
        if auxiliary is not None:
            losses.append((place, _weigh_other(state, unit, auxiliary)))
        if hands_on:
            finish(tuple([apart(output.detach(), given) for output in outputs]))
        else:
            conclude(outputs[0], given)
        if look is not None:
            look()
        note(now())

    return run


def _taken_skips(state: ComputeState, instruction: ins.Fwd) -> TakenSkips | None:
    """Return the skips that a stage receives; None where there are none."""
    arriving = state.forwards[instruction.stage].arriving
    taken = state.flows.taken(instruction, ValueKind.SKIP)
    if not taken:
        return None
    found = [place for _, places in parts_of(state, taken, arriving) for place in places]
    return TakenSkips(instruction.stage, arriving, found)


def _place_of_loss(state: ComputeState, instruction: ins.Fwd) -> int:
    """Return the tally's place for a loss of blocks: by the piece of the model, then the microbatch."""
    return state.flows.plan.layout.part_of(instruction.stage) * state.tally.num_units + instruction.microbatch


def _weigh_other(state: ComputeState, unit: int, loss: Tensor) -> Tensor:
    """Return the auxiliary loss of blocks for a unit, weighted as the loss function's is."""
    return state.loss_fn.weigh_other(loss, len(state.current.units.samples[unit]), state.usual_samples)


def _taker(state: ComputeState, index: int, instruction: ins.Fwd) -> Callable[[], Outputs] | None:
    """Return a function that takes a forward's input; None where the input comes from the batch."""
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    arriving = state.forwards[instruction.stage].arriving
    return state.cells.row_taker(parts_of(state, taken, arriving), index) if taken else None


def parts_of(state: ComputeState, values: Sequence[Value], row: Parcel) -> RowParts:
    """Return the places of values in the row of a parcel."""
    places = state.shape.cargo.places
    return [(value, places(value, row)) for value in values]


def _extras(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], Extras] | None:
    """Return a function that makes a stage's extras: those of the unit, past keys and values, its context, targets.

    None where they are those of the unit alone.
    """
    stage, unit, current = instruction.stage, instruction.microbatch, state.current
    if state.forwards[stage].takes_targets:
        extras_of = _extras_of_unit(state, instruction) or (lambda given: current.batch.extras[unit])
        return lambda given: {**extras_of(given), TARGETS: current.batch.targets[unit]}
    return _extras_of_unit(state, instruction)


def _extras_of_unit(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], Extras] | None:
    stage, unit, current = instruction.stage, instruction.microbatch, state.current
    slices, stores = state.flows.plan.schedule.slices, state.stores
    if state.shape.context is not None:

        def with_context(given: Outputs) -> Extras:
            shape = current.units.shapes[unit]
            assert shape is not None
            return {**current.batch.extras[unit], "context": shape.context}

        return with_context
    if slices == 1:
        return None
    microbatch, number = divmod(unit, slices)
    key, token_shards = (stage, microbatch), state.token_shards.get(stage, 1)

    def extras(given: Outputs) -> Extras:
        if number == 0:
            stores[key] = Store()
        past = Past(stores[key], number, slices, given[0].shape[1] * token_shards)
        return {**current.batch.extras[unit], "past": past}

    return extras


def _with_unit(state: ComputeState, instruction: ins.Fwd) -> Callable[[Extras], Extras]:
    """Return a function that adds the unit to the extras, the key of random draws; evaluations have negative steps."""
    current, trains = state.current, state.flows.trains
    slices, unit, device = state.flows.plan.schedule.slices, instruction.microbatch, state.device

    def with_unit(extras: Extras) -> Extras:
        shape, samples = current.units.shapes[unit], current.units.samples[unit]
        assert shape is not None
        step = current.number if trains else -1 - current.number
        positions = shape.positions(unit % slices, slices, device)
        before = current.samples_before
        samples = range(before + samples.start, before + samples.stop)
        return {**extras, UNIT: MaskUnit(step, samples, positions)}

    return with_unit


def _hand_on(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], BackwardRoots]:
    """Return a function that stores a stage's outputs for later stages; raises where a shape is not the agreed one."""
    made, stage = state.flows.made(instruction, ValueKind.OUTPUT, ValueKind.SKIP), instruction.stage
    cell, forward, parcel = state.cells.cell_of(made[0]), state.forwards[stage], state.forwards[stage].parcel
    give = state.cells.row_giver(parts_of(state, made, parcel))
    only_one, current, unit = len(parcel.specs) == 1 and not parcel.is_resident, state.current, instruction.microbatch
    known, agreed = None, state.shape.cargo.outputs_of(stage)
    spec = agreed.output.tensors[0] if only_one else None

    def check(outputs: Outputs, agreed: Parcel) -> None:
        found = [TreeSpec.from_tree(output) for output in outputs]
        if found != list(map(TreeSpec.plain, agreed.specs)):
            gave, shapes = " + ".join(map(str, found)), [[t.shape for t in one.tensors] for one in found]
            is_cast = shapes == [[t.shape for t in TreeSpec.plain(one).tensors] for one in agreed.specs]
            why = (
                "its type is another than without data, as under torch.autocast: let each block return its output in "
                "one type (.float()), or compute all in it, Engine(…, dtype=torch.bfloat16)"
                if is_cast
                else "the shape of what a stage leaves must not depend on its data"
            )
            raise MisfitError(f"stage {stage} ({forward.title}) gave {gave}; the ranks agreed on {agreed}: {why}")

    def hand_on(outputs: Outputs) -> BackwardRoots:
        nonlocal known, agreed, spec
        output, shape = outputs[0], current.units.shapes[unit]
        if shape is not known:
            assert shape is not None
            known, agreed = shape, shape.cargo.outputs_of(stage)
            spec = agreed.output.tensors[0] if only_one else None
            left = shape.cargo.strides.get(stage + 1, [None])[0]
            if unit == 0 and isinstance(output, Tensor) and output.is_contiguous() is (left is not None):
                _logger.warning(_OTHER_STRIDES, stage, forward.title, output.stride())
        if spec and isinstance(output, Tensor) and output.shape == spec.shape and output.dtype == spec.dtype:
            cell.value = (output.detach(),)
            return start_of(((edge_of(output),), ONLY, ())) if output.requires_grad else NO_ROOTS
        check(outputs, agreed)
        give(forward.without_weights([output.detach() for output in outputs]))
        numbers = tuple(number for number, output in enumerate(outputs) if output.requires_grad)
        return BackwardRoots(tuple(edge_of(outputs[number]) for number in numbers), numbers)

    return hand_on


def _lose(state: ComputeState, unit: int, slices: int, outputs: Outputs, targets: Any = None) -> BackwardRoots:
    """Compute the loss of a unit, and add loss, weight and metrics to the tally; `targets` replace the batch's."""
    targets = state.current.batch.targets[unit] if targets is None else targets
    if torch.is_inference_mode_enabled():
        with tensors_of_training():  # losses are examined by graphs
            return _lose(state, unit, slices, *map_tensors(torch.clone, (outputs[:1], targets)))
    tally, units, usual, output = state.tally, state.current.units, state.usual_samples, outputs[0]
    if tally.look is not None:
        tally.look()  # detects changes by blocks, before the loss can undo them
    found = called("the loss function", state.loss_fn, output, targets, units, unit, usual=usual, slices=slices)
    loss, times = tally.add_loss(unit, found)
    if state.flows.trains and not loss.requires_grad:
        _tell_without_graph(state, unit, output)
    if state.metrics:
        with torch.no_grad():
            for column, own, (name, metric) in zip(tally.metrics, tally.of_metrics, state.metrics.items(), strict=True):
                found, weight = called(f"metric {name!r}", metric, output, targets, units, unit)
                column.append((unit, found))
                own.append((unit, weight))
    return NO_ROOTS.with_loss(loss, state.scale, times)


def _tell_without_graph(state: ComputeState, unit: int, output: Any) -> None:
    """Warn that a loss has no graph and trains nothing; raise later where gradients were left switched off."""
    if not torch.is_grad_enabled():
        words = (
            f"gradients are switched off where the loss of microbatch {unit} is found, so that it trains nothing: a "
            "block or the loss function has left them so; switch by a context, `with torch.no_grad(): …`"
        )
        state.loss_fn.defer(MisfitError(words), output)
        return
    _logger.warning(
        "the loss of microbatch %d has no graph, as after `detach()` or `item()`, so that it trains nothing", unit
    )

"""Handlers of forwards: a stage runs on a unit, and stores its output for the next stage, or its loss in the tally.

    batch, cells ──▶ given, extras ──▶ the stage ──▶ outputs ──▶ cells: the next stage, of this rank or another
                                                            └──▶ loss, metrics: the tally

Binding an instruction computes, once, all that does not depend on the step. Three functions
run a forward:

    run_plain              training, the common case: the blocks and `finish`, and nothing else; bound to a step's units
    run, then run_general  training, any case: random draws, extras, skips, recomputed or moved activations, strided
                           inputs, outputs to a stage of the same rank; and all traced, observed and captured steps
    run                    evaluation, without a graph

`finish` stores the outputs (`_bind_outputs`) or computes the loss (`_bind_loss`), and returns the backward's roots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import Value, ValueKind

from ...autograd.autograd_engine_call import edge_of
from ...autograd.recompute import Rerun
from ...blocks.block_builders import Parcel
from ...blocks.trees import TreeSpec, laid_out, map_tensors
from ...blocks.without_side_effects import tensors_of_training
from ...comm.overlap_threads import BoundCall
from ...stage.stage_forward import STEERED, UNIT, Extras, Outputs, RunBlocks, apart
from ...stage.tensors_sent_between_stages import TakenSkips
from ...step_setup.unit_samples import NO_UNITS, Units, UnitShape
from ..errors_with_rank_and_stage import call_user_function
from ..instruction_state import NO_CONTEXT, NO_ROOTS, ONLY, BackwardRoots, ComputeState, with_loss_root
from ..values_between_instructions import RowParts, ValueCell
from .calls_bound_to_shapes import UnitCall
from .extra_block_inputs import draw_key_adder, extras_maker
from .graph_leaves import leaves_of

_logger = logging.getLogger(__name__)


NO_RERUNS: list[Rerun] = []
NO_EXTRAS: Extras = {}
NO_OUTPUTS: Outputs = ()

_OTHER_STRIDES = (
    "stage %d (%s) returns a tensor with strides %s, and returned other strides when shapes were inferred, which later "
    "stages get: code there that reads strides may differ from one process; let it return y.contiguous()"
)


def bind_fwd(state: ComputeState, index: int, instruction: ins.Fwd) -> BoundCall:
    """Run a stage forward on a unit; on the last stage of the route, compute the loss too.

    A unit without samples, which is run for its collectives only, leaves buffers (batch norm) unchanged.
    """
    run = _bind_fwd(state, index, instruction)
    without_samples = state.forwards[instruction.stage].buffers_kept()(run)  # the context manager, as a decorator
    return state.current.unless_empty(instruction.microbatch, run, without_samples=without_samples)


def _bind_fwd(state: ComputeState, index: int, instruction: ins.Fwd) -> BoundCall:
    made, plan = state.flows.made(instruction, ValueKind.OUTPUT), state.flows.plan
    finish = (
        _bind_outputs(state, instruction)
        if made
        else _bind_loss(state, instruction.microbatch, plan.schedule.slices * plan.mesh.axis_size("cp"))
    )
    kept = state.flows.made(instruction, ValueKind.SAVED, ValueKind.CHECKPOINT)
    if kept:
        return _bind_training(state, index, instruction, finish, kept[0])
    return _bind_evaluation(state, index, instruction, finish)


def _bind_training(
    state: ComputeState, index: int, instruction: ins.Fwd, finish: Callable[[Outputs], BackwardRoots], kept: Value
) -> BoundCall:
    """Run a forward whose graph is kept; inputs from earlier stages require a gradient as they would in one process.

    Where nothing of `_GeneralForward` is needed, the call bound to units is `run_plain`: the blocks, between two
    readings of the clock. It takes a single input from its cell itself, which saves a call.
    """
    stage, unit, current = instruction.stage, instruction.microbatch, state.current
    forward, parts, saved = state.forwards[stage], _parts_taken(state, instruction), state.saved
    source, wait, take = state.cells.source(parts, index)
    note, now, moves, has_stage_input = state.clock.note, state.clock.now, state.moved.moves(kept), bool(parts)
    leaves, may_stay, hooks = leaves_of(state, instruction, kept)
    run_general, with_loss, plain = _bind_general(state, instruction, finish, kept, has_stage_input=has_stage_input)
    shows_leaves = not has_stage_input or (not moves and forward.is_of_torch)
    only, split_result = forward.only, forward.take_apart
    take_any = state.cells.row_taker(parts, index) if has_stage_input else None

    def run() -> None:
        given, shape = current.batch.inputs[unit] if take_any is None else take_any(), current.units.shapes[unit]
        note(now())
        if shape is not None and (strides := shape.cargo.strides.get(stage)):
            given = tuple(map(laid_out, given, strides))
        if has_stage_input:
            given = leaves(given)
        run_general(given, given if shows_leaves else _shown(given, shape, stage))

    def bind(units: Units) -> BoundCall:
        shape = units.shapes[unit]
        if plain is None or forward.draws.are_due or shape is None or stage in shape.cargo.strides:
            return run
        stays, buffer, row = may_stay and not any(hooks), NO_OUTPUTS, NO_OUTPUTS

        def run_plain() -> None:
            nonlocal buffer, row
            if source is not None:
                if source.works:
                    wait()
                given, source.value = source.value, ()
            else:
                given = current.batch.inputs[unit] if take is None else take()
            note(now())
            if given is not buffer or not stays:
                buffer, row = given, leaves(given) if has_stage_input else given
            seen = row if shows_leaves else _shown(row, shape, stage)
            if only is not None and isinstance(output := only(seen[0]), Tensor):
                saved[kept] = row, finish((output,)), NO_RERUNS, None
            else:
                outputs, auxiliary = plain(seen, NO_EXTRAS) if only is None else split_result(output)
                start = finish(outputs)
                saved[kept] = row, start if auxiliary is None else with_loss(start, auxiliary), NO_RERUNS, None
            note(now())

        return run_plain

    found = UnitCall(run)
    found.bind = bind
    return found


class _GeneralForward(NamedTuple):
    """A forward without the taking of its inputs; its blocks may draw random numbers, get extras or be recomputed.

    Attributes:
        run: runs it; takes the inputs, and the tensors that blocks get in their place (`_shown`).
        with_loss: adds an auxiliary loss of blocks to the roots of the backward.
        plain: the blocks alone, for a stage that needs nothing else; None: use `run`.
    """

    run: Callable[[Outputs, Outputs], None]
    with_loss: Callable[[BackwardRoots, Tensor], BackwardRoots]
    plain: RunBlocks | None


def _bind_general(
    state: ComputeState,
    instruction: ins.Fwd,
    finish: Callable[[Outputs], BackwardRoots],
    kept: Value,
    *,
    has_stage_input: bool,
) -> _GeneralForward:
    forward, unit, current = state.forwards[instruction.stage], instruction.microbatch, state.current
    extras_of, with_draw_key, moved = extras_maker(state, instruction), draw_key_adder(state, instruction), state.moved
    note, now, saved, losses = state.clock.note, state.clock.now, state.saved, state.tally.auxiliary
    detect_changes, stores, store_key = state.detect_changes, state.stores, state.store_key(instruction.stage, unit)
    place, own_cells, moves = _place_of_loss(state, instruction), _own_cells(state, instruction), moved.moves(kept)
    skips, whole, drops = _taken_skips(state, instruction), forward.whole, kept.kind is ValueKind.CHECKPOINT

    def with_loss(start: BackwardRoots, auxiliary: Tensor) -> BackwardRoots:
        auxiliary = _weigh_auxiliary(state, unit, auxiliary)
        losses.append((place, auxiliary.detach()))
        return with_loss_root(start, auxiliary, state.scale)

    def run(given: Outputs, seen: Outputs) -> None:
        reruns: list[Rerun] = [] if drops else NO_RERUNS
        extras = current.batch.extras[unit] if extras_of is None else extras_of(given)
        if forward.draws.are_due:
            extras = with_draw_key(extras)
        versions = skips and skips.versions(given)
        activations = moved.activations(stores.get(store_key)) if moves else None
        with NO_CONTEXT if activations is None else activations.saving():
            outputs, auxiliary = (
                forward(seen, extras, reruns if drops else None) if whole is None else whole(seen, extras)
            )
            start = finish(outputs)
        if skips and versions:
            skips.require_unchanged(given, versions)
        for cell in own_cells:
            cell.value = tuple([apart(output, given) for output in cell.value])
        if detect_changes is not None:
            detect_changes()
        start = start if auxiliary is None else with_loss(start, auxiliary)
        saved[kept] = given, start, reruns, extras.get(UNIT)
        note(now())
        if activations is not None:
            moved.leave(kept, activations, given if has_stage_input else ())

    plain = None if skips or moves or own_cells or detect_changes or extras_of else forward.plain
    return _GeneralForward(run, with_loss, plain)


def _shown(given: Outputs, shape: UnitShape | None, stage: int) -> Outputs:
    """Return inputs as user blocks see them: not the leaves themselves, as in one process an input is no leaf either.

    They are clones where blocks may keep them, since their buffer is received into again; else views, which stay valid
    where the memory of a leaf is freed (offload).
    """
    if shape is not None and stage in shape.cargo.keeping:
        return tuple([one.clone() for one in given])
    return tuple([one.view_as(one) for one in given])


def _own_cells(state: ComputeState, instruction: ins.Fwd) -> list[ValueCell]:
    """Return the cells of outputs that a later stage of this rank takes.

    Such an output must not be a view of this stage's input, whose buffer may receive another message before the output
    is taken. A skip that the stage only passes on may be a view: the plan keeps its buffer until all have taken it.
    """
    taken = {value.number for value in state.flows.taken(instruction, ValueKind.SKIP)}
    made = state.flows.made(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    own = [value for value in made if value.kind is ValueKind.OUTPUT or value.number not in taken]
    return [state.cells.cell_of(value) for value in own if not state.flows.is_sent(value)]


def _bind_evaluation(
    state: ComputeState, index: int, instruction: ins.Fwd, finish: Callable[[Outputs], BackwardRoots]
) -> BoundCall:
    """Run a forward without a graph."""
    unit, current, stage = instruction.microbatch, state.current, instruction.stage
    forward, with_draw_key = state.forwards[stage], draw_key_adder(state, instruction)
    parts = _parts_taken(state, instruction)
    take = state.cells.row_taker(parts, index) if parts else None
    extras_of, draws = extras_maker(state, instruction), forward.draws
    note, now = state.clock.note, state.clock.now
    losses, place, detect_changes = state.tally.auxiliary, _place_of_loss(state, instruction), state.detect_changes
    skips, passes_on = _taken_skips(state, instruction), bool(state.flows.made(instruction, ValueKind.OUTPUT))
    has_loss = state.loss_fn.is_wanted

    def finish_unit(output: Any, given: Outputs) -> None:
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
        if shape is not None and (strides := shape.cargo.strides.get(stage)):
            given = tuple(map(laid_out, given, strides))
        versions = skips and skips.versions(given)
        extras = current.batch.extras[unit] if extras_of is None else extras_of(given)
        extras = with_draw_key(extras) if draws.are_due else extras
        outputs, auxiliary = forward(given, extras, None)
        if skips and versions:
            skips.require_unchanged(given, versions)
        if auxiliary is not None:
            losses.append((place, _weigh_auxiliary(state, unit, auxiliary)))
        if passes_on:
            finish(tuple([apart(output.detach(), given) for output in outputs]))
        else:
            finish_unit(outputs[0], given)
        if detect_changes is not None:
            detect_changes()
        note(now())

    return run


def _taken_skips(state: ComputeState, instruction: ins.Fwd) -> TakenSkips | None:
    """Return the skips that a stage takes; None where there are none."""
    arriving = state.forwards[instruction.stage].arriving
    taken = state.flows.taken(instruction, ValueKind.SKIP)
    if not taken:
        return None
    found = [place for _, places in parts_of(state, taken, arriving) for place in places]
    return TakenSkips(instruction.stage, arriving, found)


def _place_of_loss(state: ComputeState, instruction: ins.Fwd) -> int:
    """Return the tally's place for a loss of blocks: by the piece of the model, then the unit."""
    return state.flows.plan.layout.part_of(instruction.stage) * state.tally.num_units + instruction.microbatch


def _weigh_auxiliary(state: ComputeState, unit: int, loss: Tensor) -> Tensor:
    """Return the auxiliary loss of blocks for a unit, weighted as the loss function's is."""
    return state.loss_fn.weigh_auxiliary(loss, len(state.current.units.samples[unit]), state.usual_samples)


def _parts_taken(state: ComputeState, instruction: ins.Fwd) -> RowParts:
    """Return the inputs that a forward takes from other stages, with their places; none if they are the batch's."""
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    return parts_of(state, taken, state.forwards[instruction.stage].arriving)


def parts_of(state: ComputeState, values: Sequence[Value], parcel: Parcel) -> RowParts:
    """Return each value with the places of its tensors in the row of a parcel, a stage's input or output."""
    places = state.shape.cargo.places
    return [(value, places(value, parcel)) for value in values]


def _bind_outputs(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], BackwardRoots]:
    """Return a function that stores a stage's outputs for later stages; raises where a shape is not the agreed one."""
    made, stage = state.flows.made(instruction, ValueKind.OUTPUT, ValueKind.SKIP), instruction.stage
    cell, forward, parcel = state.cells.cell_of(made[0]), state.forwards[stage], state.forwards[stage].parcel
    store = state.cells.row_storer(parts_of(state, made, parcel))
    only_one, current, unit = len(parcel.specs) == 1 and not parcel.is_resident, state.current, instruction.microbatch
    units, agreed = NO_UNITS, state.shape.cargo.outputs_of(stage)
    size: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def check(outputs: Outputs, agreed: Parcel) -> None:
        found = [TreeSpec.from_tree(output) for output in outputs]
        if found != list(map(TreeSpec.plain, agreed.specs)):
            gave, shapes = " + ".join(map(str, found)), [[t.shape for t in one.tensors] for one in found]
            is_cast = shapes == [[t.shape for t in TreeSpec.plain(one).tensors] for one in agreed.specs]
            why = (
                "its type is another than without data, as under torch.autocast: let each block return its output in "
                "one type (.float()), or compute all in it, Engine(…, dtype=torch.bfloat16)"
                if is_cast
                else STEERED
            )
            raise MisfitError(f"stage {stage} ({forward.title}) gave {gave}; the ranks agreed on {agreed}: {why}")

    def store_outputs(outputs: Outputs) -> BackwardRoots:
        nonlocal units, agreed, size, dtype
        output = outputs[0]
        if current.units is not units:
            units, shape = current.units, current.units.shapes[unit]
            assert shape is not None
            agreed = shape.cargo.outputs_of(stage)
            size, dtype = (agreed.specs[0].shape, agreed.specs[0].dtype) if only_one else (None, None)
            after = state.flows.plan.layout.after(stage, unit) if shape.cargo.strides else -1
            strides = shape.cargo.strides.get(after, [None])[0]
            if unit == 0 and isinstance(output, Tensor) and output.is_contiguous() is (strides is not None):
                _logger.warning(_OTHER_STRIDES, stage, forward.title, output.stride())
        if isinstance(output, Tensor) and output.dtype is dtype and output.shape == size:
            cell.value = (output.detach(),)
            return ((edge_of(output),), ONLY, ()) if output.requires_grad else NO_ROOTS
        check(outputs, agreed)
        store(forward.without_weights([output.detach() for output in outputs]))
        places = tuple(place for place, output in enumerate(outputs) if output.requires_grad)
        return tuple([edge_of(outputs[place]) for place in places]), places, ()

    return store_outputs


def _bind_loss(state: ComputeState, unit: int, parts: int) -> Callable[..., BackwardRoots]:
    """Return a function that computes the loss of a unit, and adds loss, weight and metrics to the tally.

    `parts`: number of parts of a sequence whose losses are computed apart: slices x cp.
    """
    current, tally, loss_fn, usual, scale = state.current, state.tally, state.loss_fn, state.usual_samples, state.scale
    metrics, trains, detect_changes = state.metrics.items(), state.flows.trains, state.detect_changes

    def compute_loss(outputs: Outputs, targets: Any = None) -> BackwardRoots:
        """Use `targets` in place of the batch's, if they are given."""
        targets = current.batch.targets[unit] if targets is None else targets
        if torch.is_inference_mode_enabled():
            with tensors_of_training():  # losses are examined through autograd, which inference mode rules out
                return compute_loss(*map_tensors(torch.clone, (outputs[:1], targets)))
        units, output = current.units, outputs[0]
        if detect_changes is not None:
            detect_changes()  # made by blocks, before the loss can undo them
        found = call_user_function(
            "the loss function", loss_fn, output, targets, units, unit, usual=usual, slices=parts
        )
        loss, times = tally.add_loss(unit, found)
        if metrics:
            with torch.no_grad():
                for column, weights, (name, metric) in zip(tally.metrics, tally.metric_weights, metrics, strict=True):
                    found, weight = call_user_function(f"metric {name!r}", metric, output, targets, units, unit)
                    column.append((unit, found))
                    weights.append((unit, weight))
        if loss.requires_grad:
            return (edge_of(loss),), (), (scale.gradient_of(loss, times),)
        if trains:
            _warn_without_graph(state, unit, output)
        return NO_ROOTS

    return compute_loss


def _warn_without_graph(state: ComputeState, unit: int, output: Any) -> None:
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

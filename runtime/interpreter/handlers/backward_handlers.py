"""Handlers of backwards, whole or in halves, alone or overlapped with a forward; and of recomputation.

saved ──▶ autograd ──▶ ∂input ──▶ cells: the previous stage
∂output ──┘       └──▶ ∂weights, or their deferred products (`pending`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import Value, ValueKind

from ...autograd.autograd_engine_call import run_backward
from ...blocks.block_builders import Parcel
from ...comm.overlap_threads import BoundCall
from ...stage.stage_forward import Outputs, outside, spans_of
from ..busy_clock import NoClock
from ..instruction_state import NO_CONTEXT, ONLY, ComputeState, root_gradients
from .calls_bound_to_shapes import in_turn
from .forward_handlers import bind_fwd, parts_of

Spans = Sequence[tuple[int, int]]
"""Address ranges [begin, end) of the memory of tensors."""


def bind_recompute(state: ComputeState, index: int, instruction: ins.Recompute) -> BoundCall:
    """Rerun the blocks whose activations the forward dropped."""
    (checkpoint,) = state.flows.taken(instruction, ValueKind.CHECKPOINT)
    (made,) = state.flows.made(instruction, ValueKind.SAVED)
    note, now, saved = state.clock.note, state.clock.now, state.saved

    def run() -> None:
        note(now())
        _, _, reruns, _ = saved[made] = saved.pop(checkpoint)
        for rerun in reruns:
            rerun.again()
        note(now())

    return state.current.unless_empty(instruction.microbatch, run)


def bind_bwd(state: ComputeState, index: int, instruction: ins.Bwd) -> BoundCall:
    """Run a full backward; if `reduces_early`, a stage's last one launches each gradient bucket once it is full."""
    backward, check_reached = _backward(state, index, instruction)
    run: BoundCall = partial(backward, None)
    if state.flows.reduces_early(instruction):
        run = in_turn(partial(state.gradients.hooks.expect_last, instruction.stage), run)
    return in_turn(
        state.current.unless_empty(instruction.microbatch, run, check_reached), _adding_partial_sums(state, instruction)
    )


def bind_overlap(state: ComputeState, index: int, instruction: ins.Overlap) -> BoundCall:
    """Run a forward and a backward interleaved, once the inputs of both have arrived."""
    untimed = replace(state, clock=NoClock())
    forward, backward = ins.Fwd(*instruction.forward), ins.Bwd(*instruction.backward)
    taken = [
        *state.flows.taken(forward, ValueKind.OUTPUT, ValueKind.SKIP),
        *state.flows.taken(backward, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD),
    ]
    waits = [state.cells.awaiter(value, index) for value in taken]
    waits += [partial(state.moved.wait_for, value, index) for value in state.flows.taken(backward, ValueKind.FETCHED)]
    sides = bind_fwd(untimed, index, forward), bind_bwd(untimed, index, backward)
    both = state.overlaps.pair(*sides, (forward.stage, backward.stage))
    note, now = state.clock.note, state.clock.now
    current, units = state.current, {forward.microbatch, backward.microbatch}

    def run() -> None:
        for wait in waits:
            wait()
        note(now())
        if current.units.empty.isdisjoint(units):
            both()
        else:
            for side in sides:
                side()
        note(now())

    return run


def _adding_partial_sums(state: ComputeState, instruction: ins.Compute) -> BoundCall | None:
    """Return a call that sums a stage's partial gradients over tp, after its last backward; None: nothing to sum."""
    reducer, stage = state.gradients.reducer, instruction.stage
    if not state.flows.is_last_backward(instruction) or not reducer.has_partial_sums(stage):
        return None
    return partial(reducer.add_partial_sums, stage)


def bind_bwd_input(state: ComputeState, index: int, instruction: ins.BwdInput) -> BoundCall:
    """Compute the input gradient; weight gradients that are products are deferred: `pending` keeps their operands."""
    backward, check_reached = _backward(state, index, instruction)
    queue, pending = state.queues[instruction.stage], state.pending
    (made,) = state.flows.made(instruction, ValueKind.PENDING)

    def run() -> None:
        products = queue.deferring()
        backward(products)
        pending[made] = products

    return state.current.unless_empty(instruction.microbatch, run, check_reached)


def bind_bwd_weight(state: ComputeState, index: int, instruction: ins.BwdWeight) -> BoundCall:
    """Compute the deferred weight gradients, and accumulate them; launch full buckets as `bind_bwd` does."""
    (taken,) = state.flows.taken(instruction, ValueKind.PENDING)
    hooks, pending, stage = state.gradients.hooks, state.pending, instruction.stage
    note, now = state.clock.note, state.clock.now
    drain = partial(hooks.drain_last, stage) if state.flows.reduces_early(instruction) else hooks.drain

    def run() -> None:
        note(now())
        drain(pending.pop(taken))
        note(now())

    return in_turn(state.current.unless_empty(instruction.microbatch, run), _adding_partial_sums(state, instruction))


def _backward(
    state: ComputeState, index: int, instruction: ins.Compute
) -> tuple[Callable[[AbstractContextManager[object] | None], None], BoundCall | None]:
    """Return (backward, check_reached) of a backward, or of its input half.

    `backward` runs autograd from the saved roots, within a context if one is given, and stores the input gradients.
    `check_reached` raises where the stage's inputs got no gradient in the whole step; None before its last backward.
    """
    flows, cells = state.flows, state.cells
    (kept_as,) = flows.taken(instruction, ValueKind.SAVED, ValueKind.FETCHED)
    fetch = partial(state.moved.wait_for, kept_as, index) if kept_as.kind is ValueKind.FETCHED else None
    taken = flows.taken(instruction, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)
    made = flows.made(instruction, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)
    forward, drop_slices = state.forwards[instruction.stage], _drop_slices(state, instruction)
    source, wait, take = cells.source(parts_of(state, taken, forward.parcel), index)
    store = _input_gradients(state, made, forward.arriving) if made else None
    stage, boundaries, reached = instruction.stage, state.boundaries, state.boundaries.reached
    require_reached = partial(boundaries.require_reached, stage, forward.arriving, state.shape.parcels)
    check_reached = require_reached if flows.is_last_of_inputs(instruction) else None
    note, now, saved, draws = state.clock.note, state.clock.now, state.saved, forward.draws
    is_received = all(cells.cell_of(value).receive is not None for value in taken)
    settle, cached_gradients, spans = state.gradients.hooks.settler(), None, spans_of(())

    def run(around: AbstractContextManager[object] | None) -> None:
        nonlocal cached_gradients, spans
        if source is not None:
            if source.works:
                wait()
            gradients, source.value = source.value, ()
        else:
            gradients = () if take is None else take()
        if gradients is not cached_gradients:  # those of a receive buffer are the same tensors in each step
            cached_gradients, spans = gradients if is_received else None, spans_of(gradients)
        if fetch is not None:
            fetch()
        note(now())
        given, (roots, places, of_losses), _, draw_key = saved.pop(kept_as)
        if places is not ONLY or of_losses:
            gradients = root_gradients(places, of_losses, gradients)
        if around is None and draw_key is None and draws.beside is None:
            run_backward(roots, gradients)
        else:
            beside = draws.beside if draw_key is None else draws.again(draw_key)
            with around or NO_CONTEXT, beside or NO_CONTEXT:
                run_backward(roots, gradients)
        settle()
        if store is not None:
            if stage not in reached and (roots or taken):  # else a loss without a graph, which is logged
                if len(given) == 1 and given[0].grad is not None:
                    reached.add(stage)
                else:
                    boundaries.note_gradients(stage, given)
            if check_reached is not None and stage not in reached:
                check_reached()
            store(given, spans)
        if drop_slices is not None:
            drop_slices()
        note(now())

    return run, check_reached


def _drop_slices(state: ComputeState, instruction: ins.Compute) -> BoundCall | None:
    """Return a call that drops the keys and values of a microbatch, for the backward of its first slice: it runs last.

    None for other slices, and where sequences are not sliced.
    """
    slices, unit = state.flows.plan.schedule.slices, instruction.microbatch
    if slices == 1 or unit % slices:
        return None
    return partial(state.stores.__delitem__, state.store_key(instruction.stage, unit))


def _input_gradients(state: ComputeState, made: Sequence[Value], arriving: Parcel) -> Callable[[Outputs, Spans], None]:
    """Return a function (inputs, spans) that stores the gradients of a stage's inputs, and removes them from these.

    A gradient is zero where no output depends on the input. One whose memory is within spans, that of the gradients
    received, is copied, as the buffer receives other messages. `made` are the values to store, of a stage whose inputs
    are those of `arriving`.
    """
    parts, width = parts_of(state, made, arriving), len(arriving.specs)
    cell = state.cells.cell_of_row(parts) if width == 1 else None
    if cell is not None:

        def store_one(given: Outputs, spans: Spans) -> None:
            (leaf,) = given
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            else:
                address = gradient.data_ptr()  # `outside`, written out: a call less for each microbatch
                for begin, end in spans:
                    if begin <= address < end:
                        gradient = gradient.clone()
            cell.value = (gradient,)

        return store_one
    store, wanted = state.cells.row_storer(parts), {place for _, places in parts for place in places}

    def store_row(given: Outputs, spans: Spans) -> None:
        store(tuple([_gradient_of(t, spans) if place in wanted else None for place, t in enumerate(given)]))

    return store_row


def _gradient_of(given: Tensor, spans: Spans) -> Tensor:
    gradient, given.grad = given.grad, None
    return torch.zeros_like(given) if gradient is None else outside(gradient, spans)

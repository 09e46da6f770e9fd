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
from quintsched.ir.instruction_values import ValueKind

from ...autograd.autograd_engine_call import run_backward
from ...comm.overlap_threads import BoundCall
from ...stage.stage_forward import Outputs, outside, spans_of
from ..busy_clock import NoClock
from ..instruction_state import NO_CONTEXT, ONLY, ComputeState, root_gradients
from ..values_between_instructions import RowParts
from .calls_bound_to_shapes import in_turn
from .forward_handlers import bind_fwd, parts_of

Spans = Sequence[tuple[int, int]]
"""Addresses where memory begins and ends: that of tensors."""


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
    """Run a full backward; in the stage's last one, gradients start to be reduced as they become ready."""
    backward, conclude = _backward(state, index, instruction)
    run: BoundCall = partial(backward, None)
    if state.flows.reduces_early(instruction):
        run = in_turn(partial(state.gradients.hooks.expect_last, instruction.stage), run)
    return in_turn(
        state.current.unless_empty(instruction.microbatch, run, conclude), _adding_partial_sums(state, instruction)
    )


def bind_overlap(state: ComputeState, index: int, instruction: ins.Overlap) -> BoundCall:
    """Run a forward and a backward interleaved, once the inputs of both have arrived."""
    untimed = replace(state, clock=NoClock())
    forward, backward = ins.Fwd(*instruction.forward), ins.Bwd(*instruction.backward)
    taken = state.flows.taken(forward, ValueKind.OUTPUT, ValueKind.SKIP)
    taken += state.flows.taken(backward, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)
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
    """Return a call for after a stage's last backward that sums partial gradients over tp; None: it has none."""
    reducer, stage = state.gradients.reducer, instruction.stage
    if not state.flows.is_last_backward(instruction) or not reducer.has_partial_sums(stage):
        return None
    return partial(reducer.add_partial_sums, stage)


def bind_bwd_input(state: ComputeState, index: int, instruction: ins.BwdInput) -> BoundCall:
    """Compute the input gradient; the operands of weight gradients are deferred."""
    backward, conclude = _backward(state, index, instruction)
    queue, pending = state.queues[instruction.stage], state.pending
    (made,) = state.flows.made(instruction, ValueKind.PENDING)

    def run() -> None:
        products = queue.deferring()
        backward(products)
        pending[made] = products

    return state.current.unless_empty(instruction.microbatch, run, conclude)


def bind_bwd_weight(state: ComputeState, index: int, instruction: ins.BwdWeight) -> BoundCall:
    """Compute the deferred weight gradients, and accumulate them; in the stage's last one, reductions start."""
    (taken,) = state.flows.taken(instruction, ValueKind.PENDING)
    hooks, pending, stage = state.gradients.hooks, state.pending, instruction.stage
    note, now = state.clock.note, state.clock.now
    drain = hooks.drain
    if state.flows.reduces_early(instruction):
        drain = partial(hooks.drain_last, stage)

    def run() -> None:
        note(now())
        drain(pending.pop(taken))
        note(now())

    return in_turn(state.current.unless_empty(instruction.microbatch, run), _adding_partial_sums(state, instruction))


def _backward(
    state: ComputeState, index: int, instruction: ins.Compute
) -> tuple[Callable[[AbstractContextManager[object] | None], None], BoundCall | None]:
    """Return a function that runs autograd from saved roots, in an optional context; and a check after the last one.

    The input gradient is stored for the previous stage.
    """
    flows, cells = state.flows, state.cells
    (kept_as,) = flows.taken(instruction, ValueKind.SAVED, ValueKind.FETCHED)
    arrive = partial(state.moved.wait_for, kept_as, index) if kept_as.kind is ValueKind.FETCHED else None
    taken = flows.taken(instruction, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)
    made = flows.made(instruction, ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)
    forward = state.forwards[instruction.stage]
    source, wait, take = cells.source(parts_of(state, taken, forward.parcel), index)
    give = _giver(state, parts_of(state, made, forward.arriving), len(forward.arriving.specs)) if made else None
    forget = _forget_past(state, instruction)
    stage, boundaries, reached = instruction.stage, state.boundaries, state.boundaries.reached
    conclude: BoundCall | None = None
    if flows.is_last_of_inputs(instruction):
        conclude = partial(boundaries.require_reached, stage, forward.arriving, state.shape.parcels)
    note, now, saved, draws = state.clock.note, state.clock.now, state.saved, forward.draws
    comes = all(cells.cell_of(value).receive is not None for value in taken)
    settle, known, spans = state.gradients.hooks.settler(), None, spans_of(())

    def run(around: AbstractContextManager[object] | None) -> None:
        nonlocal known, spans
        if source is not None:
            if source.works:
                wait()
            gradients, source.value = source.value, ()
        else:
            gradients = () if take is None else take()
        if gradients is not known:
            known, spans = gradients if comes else None, spans_of(gradients)
        if arrive is not None:
            arrive()
        note(now())
        given, (roots, numbers, ones), _, unit = saved.pop(kept_as)
        gradients = gradients if numbers is ONLY and not ones else root_gradients(numbers, ones, gradients)
        if around is None and unit is None and draws.beside is None:
            run_backward(roots, gradients)
        else:
            beside = draws.beside if unit is None else draws.again(unit)
            with around or NO_CONTEXT, beside or NO_CONTEXT:
                run_backward(roots, gradients)
        settle()
        if give is not None:
            if stage not in reached and (roots or taken):  # a loss without a graph is logged
                if len(given) == 1 and given[0].grad is not None:
                    reached.add(stage)
                else:
                    boundaries.note_gradients(stage, given)
            if conclude is not None and stage not in reached:
                conclude()
            give(given, spans)
        if forget is not None:
            forget()
        note(now())

    return run, conclude


def _forget_past(state: ComputeState, instruction: ins.Compute) -> BoundCall | None:
    """Return a call that drops a microbatch's keys and values; None unless this backward is of its first slice."""
    slices = state.flows.plan.schedule.slices
    microbatch, number = divmod(instruction.microbatch, slices)
    if slices == 1 or number:
        return None
    return partial(state.stores.__delitem__, (instruction.stage, microbatch))


def _giver(state: ComputeState, parts: RowParts, width: int) -> Callable[[Outputs, Spans], None]:
    """Return a function that stores the gradients of a stage's inputs, in memory outside of spans.

    They are zeros where no output depends on an input. `width` is the number of inputs; `parts` have gradients.
    """
    only = state.cells.only(parts) if width == 1 else None
    if only is not None:

        def give_one(given: Outputs, spans: Spans) -> None:
            (leaf,) = given
            gradient, leaf.grad = leaf.grad, None
            if gradient is None:
                gradient = torch.zeros_like(leaf)
            else:
                place = gradient.data_ptr()
                for begin, end in spans:
                    if begin <= place < end:
                        gradient = gradient.clone()
            only.value = (gradient,)

        return give_one
    give, wanted = state.cells.row_giver(parts), {place for _, places in parts for place in places}

    def give_row(given: Outputs, spans: Spans) -> None:
        give(tuple([_gradient_of(t, spans) if place in wanted else None for place, t in enumerate(given)]))

    return give_row


def _gradient_of(given: Tensor, spans: Spans) -> Tensor:
    gradient, given.grad = given.grad, None
    return torch.zeros_like(given) if gradient is None else outside(gradient, spans)

"""What a rank computes: forwards, recomputations, and backwards, whole or in halves.

    Fwd        input ──▶ output, or loss          saved: where the backward starts
    Bwd        ∂output ──▶ ∂input, ∂weights
    BwdInput   ∂output ──▶ ∂input                 pending: the weight gradients' products, not yet computed
    BwdWeight  products ──▶ ∂weights

Each function here binds one instruction: everything that can be known beforehand is worked out once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.ir import instructions as ins
from quintsched.ir.dataflow import Flow, Kind, Value

from ..autograd.kv_store import Past, Store
from ..autograd.recompute import Rerun
from ..autograd.run_backward import edge_of, run_backward
from ..blocks.blocks import TensorSpec
from ..parallel.dropout import Unit
from ..stage.forward import UNIT, Extras, Outputs
from .rank_state import Machine, Saved, Start

Call = Callable[[], None]

DIFFERENTIABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)


def bind_fwd(machine: Machine, index: int, instruction: ins.Fwd) -> Call:
    """Run a stage forward on a unit; on the last stage of the route, the loss too."""
    flow = machine.flow(instruction)
    forward, unit = machine.forwards[instruction.stage], instruction.microbatch
    taken = next((value for value in flow.consumes if value.kind is Kind.OUTPUT), None)
    made = next(value for value in flow.produces if value.kind in (Kind.OUTPUT, Kind.LOSS))
    kept = next((value for value in flow.produces if value.kind in (Kind.SAVED, Kind.CHECKPOINT)), None)
    take = None if taken is None else machine.taker(taken, index)
    finish = partial(_lose, machine, unit) if made.kind is Kind.LOSS else _hand_on(machine, made)
    extras_of = _extras(machine, instruction)
    if forward.drops and machine.trains:
        extras_of = _with_unit(machine, instruction, extras_of)
    clock, saved, whole, differentiable = machine.clock, machine.saved, forward.whole, DIFFERENTIABLE

    def train() -> None:
        given = (machine.batch.inputs[unit],) if take is None else take()
        clock.start()
        if take is not None:
            given = tuple([t.detach().requires_grad_() if t.dtype in differentiable else t for t in given])
        reruns: list[Rerun] = []
        extras = extras_of(given)
        outputs, auxiliary = whole(given, extras) if whole else forward(given, extras, reruns)
        start = finish(outputs)
        if auxiliary is not None:
            start = start.with_loss(auxiliary)
            machine.tally.losses.append(auxiliary.detach())
        saved[kept] = Saved(given, start, reruns)  # type: ignore[index]
        clock.stop()

    def evaluate() -> None:
        given = (machine.batch.inputs[unit],) if take is None else take()
        clock.start()
        outputs, auxiliary = forward(given, extras_of(given), [])
        if auxiliary is not None:
            machine.tally.losses.append(auxiliary)
        finish(tuple(_apart(output, given) for output in outputs))
        clock.stop()

    return evaluate if kept is None else train


def _extras(machine: Machine, instruction: ins.Fwd) -> Callable[[Outputs], Extras]:
    """Return what gives a stage its extras: those of the unit, what its slice may look back at, its part's context."""
    stage, unit, slices = instruction.stage, instruction.microbatch, machine.plan.schedule.slices
    if machine.context is not None:
        return lambda given: {**machine.batch.extras[unit], "context": machine.context}
    if slices == 1:
        return lambda given: machine.batch.extras[unit]
    microbatch, number = divmod(unit, slices)
    key, parts = (stage, microbatch), machine.token_parts.get(stage, 1)

    def extras(given: Outputs) -> Extras:
        if number == 0:
            machine.stores[key] = Store()
        past = Past(machine.stores[key], number, slices, given[0].shape[1] * parts)
        return {**machine.batch.extras[unit], "past": past}

    return extras


def _with_unit(
    machine: Machine, instruction: ins.Fwd, extras_of: Callable[[Outputs], Extras]
) -> Callable[[Outputs], Extras]:
    """Return what says beside the extras which samples of the batch a unit has, and where its tokens stand."""
    schedule, inputs = machine.plan.schedule, machine.input_spec.shape
    microbatch, number = divmod(instruction.microbatch, schedule.slices)
    first = (machine.replica * schedule.microbatches + microbatch) * inputs[0]
    samples, positions = range(first, first + inputs[0]), None
    if machine.context is not None:
        positions = machine.context.positions
    elif schedule.slices > 1:
        positions = torch.arange(number * inputs[1], (number + 1) * inputs[1], device=machine.transport.device)
    return lambda given: {**extras_of(given), UNIT: Unit(machine.step, samples, positions)}


def _hand_on(machine: Machine, made: Value) -> Callable[[Outputs], Start]:
    """Return what leaves a stage's outputs for the next one; what does not fit the agreed shape goes no further."""
    cell, parcel = machine.cell(made), machine.parcels[made.stage]
    (shape, dtype), only_one = (parcel.activation.shape, parcel.activation.dtype), not parcel.riders

    def check(outputs: Outputs) -> None:
        for output, spec in zip(outputs, parcel.specs, strict=True):
            if output.shape != spec.shape or output.dtype != spec.dtype:
                raise MisfitError(f"stage {made.stage} gave {TensorSpec.of(output)}; the ranks agreed on {parcel}")

    def hand_on(outputs: Outputs) -> Start:
        output = outputs[0]
        if only_one and output.shape == shape and output.dtype == dtype:
            cell.held = (output.detach(),)
            return Start((edge_of(output),), (0,)) if output.requires_grad else Start()
        check(outputs)
        cell.held = tuple(output.detach() for output in outputs)
        numbers = tuple(number for number, output in enumerate(outputs) if output.requires_grad)
        return Start(tuple(edge_of(outputs[number]) for number in numbers), numbers)

    return hand_on


def _lose(machine: Machine, unit: int, outputs: Outputs) -> Start:
    """Find the summed loss of a unit, and add loss, weight and metrics to the tally."""
    output, targets, tally = outputs[0], machine.batch.targets[unit], machine.tally
    found = machine.loss_fn(output, targets)
    loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, 1.0)
    if not isinstance(loss, Tensor) or loss.dim():
        raise MisfitError(
            f"the loss function must give a tensor of no dimensions, or (sum, weight); it gave {_named(found)}"
        )
    tally.losses.append(loss.detach())
    tally.weights.append(weight.detach() if isinstance(weight, Tensor) else weight)
    if machine.metrics:
        with torch.no_grad():
            for column, metric in zip(tally.metrics, machine.metrics.values(), strict=True):
                column.append(metric(output, targets))
    return Start().with_loss(loss)


def _named(found: object) -> str:
    return str(TensorSpec.of(found)) if isinstance(found, Tensor) else f"a {type(found).__name__}"


def bind_recompute(machine: Machine, index: int, instruction: ins.Recompute) -> Call:
    """Run again what the forward dropped."""
    flow = machine.flow(instruction)
    checkpoint = next(value for value in flow.consumes if value.kind is Kind.CHECKPOINT)
    made = next(value for value in flow.produces if value.kind is Kind.SAVED)
    clock, saved = machine.clock, machine.saved

    def run() -> None:
        clock.start()
        kept = saved[made] = saved.pop(checkpoint)
        for rerun in kept.reruns:
            rerun.again()
        clock.stop()

    return run


def bind_bwd(machine: Machine, index: int, instruction: ins.Bwd) -> Call:
    """Run a full backward; in the stage's last one, gradients start to be reduced as they become ready."""
    backward = _backward(machine, index, instruction)
    gradients = machine.gradients
    layout, stage = machine.plan.layout, instruction.stage
    add_parts = _adding_parts(machine, instruction)
    in_parts = bool(layout.twins(stage)) or layout.recompute_every(stage) > 1  # gradients come more than once
    if gradients is None or in_parts or instruction not in machine.last_backwards:
        return _in_turn(partial(backward, nullcontext()), add_parts)
    return _in_turn(lambda: backward(gradients.last_backward(stage)), add_parts)


def _adding_parts(machine: Machine, instruction: ins.Compute) -> Call | None:
    """Return what follows a stage's last backward where its gradients are in parts on the ranks of tp, if they are."""
    gradients, stage = machine.gradients, instruction.stage
    if gradients is None or instruction not in machine.last_backwards or not gradients.has_parts(stage):
        return None
    return partial(gradients.add_parts, stage)


def _in_turn(first: Call, second: Call | None) -> Call:
    if second is None:
        return first

    def both() -> None:
        first()
        second()

    return both


def bind_bwd_input(machine: Machine, index: int, instruction: ins.BwdInput) -> Call:
    """Find the gradient of the input; what the weights' gradients are made of is put off."""
    backward = _backward(machine, index, instruction)
    queue, pending = machine.queues[instruction.stage], machine.pending
    made = next(value for value in machine.flow(instruction).produces if value.kind is Kind.PENDING)

    def run() -> None:
        products = queue.deferring()
        backward(products)
        pending[made] = products

    return run


def bind_bwd_weight(machine: Machine, index: int, instruction: ins.BwdWeight) -> Call:
    """Compute what was put off, and add it up; in the stage's last one, gradients start to be reduced."""
    taken = machine.flow(instruction).consumes[0]
    gradients, clock, pending = machine.gradients, machine.clock, machine.pending
    assert gradients is not None
    drain = gradients.drain
    if instruction in machine.last_backwards and not machine.plan.layout.twins(instruction.stage):
        drain = partial(gradients.drain_last, instruction.stage)

    def run() -> None:
        clock.start()
        drain(pending.pop(taken))
        clock.stop()

    return _in_turn(run, _adding_parts(machine, instruction))


def _backward(
    machine: Machine, index: int, instruction: ins.Compute
) -> Callable[[AbstractContextManager[object]], None]:
    """Return what runs autograd from what was saved; the gradient of the input is left for the stage before."""
    flow = machine.flow(instruction)
    kept_as, taken, made = _backward_values(flow)
    take = None if taken is None else machine.taker(taken, index)
    cell = None if made is None else machine.cell(made)
    forget = _forget_past(machine, instruction)
    clock, saved = machine.clock, machine.saved

    def run(around: AbstractContextManager[object]) -> None:
        gradients = () if take is None else take()
        clock.start()
        given, start, _ = saved.pop(kept_as)
        with around:
            run_backward(start.roots, [*[gradients[number] for number in start.numbers], *start.ones])
        if cell is not None:
            cell.held = tuple([_gradient_of(tensor, gradients) for tensor in given])
        forget()
        clock.stop()

    return run


def _backward_values(flow: Flow) -> tuple[Value, Value | None, Value | None]:
    """Return what a backward starts from: what was saved, the output's gradient, and the input's that it makes."""
    saved = next(value for value in flow.consumes if value.kind is Kind.SAVED)
    taken = next((value for value in flow.consumes if value.kind is Kind.OUTPUT_GRAD), None)
    made = next((value for value in flow.produces if value.kind is Kind.OUTPUT_GRAD), None)
    return saved, taken, made


def _forget_past(machine: Machine, instruction: ins.Compute) -> Call:
    """Return what drops a microbatch's keys and values after the backward of its first slice."""
    microbatch, number = divmod(instruction.microbatch, machine.plan.schedule.slices)
    if machine.plan.schedule.slices == 1 or number:
        return lambda: None
    return lambda: machine.stores.__delitem__((instruction.stage, microbatch))


def _gradient_of(given: Tensor, taken: Outputs) -> Tensor:
    """Return the gradient of a stage's input: zeros where the outputs do not depend on it."""
    gradient = given.grad
    return torch.zeros_like(given) if gradient is None else _apart(gradient, taken)


def _apart(made: Tensor, taken: Outputs) -> Tensor:
    """Return what was made, copied where it lies in the memory of what was taken (a stage that only reshapes).

    That memory may be a receive buffer, which serves again while what was made is still being sent.
    """
    place = made.data_ptr()
    for tensor in taken:
        begin = tensor.data_ptr()
        if begin <= place < begin + tensor.nbytes:
            return made.clone()
    return made

"""The interpreter: a program is resolved once into a flat list of bound calls, and then just walked.

    program   Fwd(0, 0)      SendAct(0, 0, 1)    Bwd(0, 0)  …
                 │ HANDLERS[Fwd](machine, Fwd(0, 0)) ─▶ a function without arguments
    calls     [ run,          run,                run,      … ]         for call in calls: call()

One small function per instruction. A handler asks the planner's data-flow rule what its instruction takes and makes;
everything that can be known beforehand is worked out when it is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintsched import instructions as ins
from quintsched.dataflow import Kind, Value
from quintsched.errors import MisfitError
from quintsched.instructions import Instruction

from .blocks import TensorSpec
from .machine import Batch, Machine, Saved, tag_of
from .receives import Posting, plan_receives

Call = Callable[[], None]


def bind_recv(machine: Machine, instruction: ins.Recv) -> Call | None:
    """Receives are posted where `plan_receives` says, and waited for by who takes the value."""
    return None


def bind_fwd(machine: Machine, instruction: ins.Fwd) -> Call:
    """Run a stage forward on a microbatch; on the last stage of the route, the loss too."""
    flow = machine.flow(instruction)
    stage, unit = machine.stages[instruction.stage], instruction.microbatch
    taken = flow.consumes[0] if flow.consumes else None
    made = flow.produces[0]
    saved = next((value for value in flow.produces if value.kind is Kind.SAVED), None)
    finish = partial(_loss, machine, unit) if made.kind is Kind.LOSS else partial(_hand_on, machine, made)

    def run() -> None:
        given = machine.batch.inputs[unit] if taken is None else machine.take(taken)
        machine.clock.start()
        if saved is not None and taken is not None:
            given = given.detach().requires_grad_(given.is_floating_point())
        output, auxiliary = stage(given, machine.batch.extras[unit])
        if auxiliary is not None:
            machine.tally[0] += auxiliary.detach()
        output = finish(output if saved is not None else _apart(output, given))
        if saved is not None:
            machine.saved[saved] = Saved(given, output, auxiliary)
        machine.clock.stop()

    return run


def _hand_on(machine: Machine, made: Value, output: Tensor) -> Tensor:
    """Leave a stage's output for the next one; what does not fit the agreed shape goes no further."""
    spec = machine.specs[made.stage]
    if output.shape != spec.shape or output.dtype != spec.dtype:
        raise MisfitError(f"stage {made.stage} gave {TensorSpec.of(output)}; the ranks agreed on {spec}")
    machine.values[made] = output.detach()
    return output


def _loss(machine: Machine, unit: int, output: Tensor) -> Tensor:
    """Return the summed loss of a microbatch, and add loss, weight and metrics to the tally."""
    targets = machine.batch.targets[unit]
    found = machine.loss_fn(output, targets)
    loss, weight = found if isinstance(found, tuple) else (found, 1.0)
    with torch.no_grad():
        figures = [loss, weight, *(metric(output, targets) for metric in machine.metrics.values())]
        machine.tally += torch.stack([torch.as_tensor(f, device=loss.device).to(torch.float64) for f in figures])
    return loss


def bind_send(machine: Machine, instruction: ins.Send) -> Call:
    """Send an activation or a gradient; nobody waits for it here."""
    value = machine.flow(instruction).consumes[0]
    tag, peer = tag_of(value), instruction.peer

    def run() -> None:
        machine.send(machine.values.pop(value).contiguous(), peer, tag)

    return run


def bind_bwd(machine: Machine, instruction: ins.Bwd) -> Call:
    """Run a full backward; in the stage's last one, gradients start to be reduced as they become ready."""
    saved, taken, made = _backward_values(machine, instruction)
    reducing = _reducing(machine, instruction)

    def run() -> None:
        gradient = None if taken is None else machine.take(taken)
        machine.clock.start()
        kept = machine.saved.pop(saved)
        with reducing():
            roots, gradients = kept.roots(gradient)
            if roots:
                torch.autograd.backward(roots, gradients)
        if made is not None:
            _leave_gradient(machine, made, kept.given.grad, kept.given, gradient)
        machine.clock.stop()

    return run


def bind_bwd_input(machine: Machine, instruction: ins.BwdInput) -> Call:
    """Find the gradient of the input only; the graph stays for the weight half."""
    saved, taken, made = _backward_values(machine, instruction)
    pending = next(value for value in machine.flow(instruction).produces if value.kind is Kind.PENDING)

    def run() -> None:
        gradient = None if taken is None else machine.take(taken)
        machine.clock.start()
        kept = machine.saved.pop(saved)
        if made is not None:
            roots, gradients = kept.roots(gradient)
            given = kept.given
            found: Sequence[Tensor | None] = [None]
            if roots:
                found = torch.autograd.grad(roots, [given], gradients, retain_graph=True, allow_unused=True)
            _leave_gradient(machine, made, found[0], given, gradient)
        machine.saved[pending] = replace(kept, gradient=gradient)
        machine.clock.stop()

    return run


def bind_bwd_weight(machine: Machine, instruction: ins.BwdWeight) -> Call:
    """Find the gradients of the weights only, and add them up."""
    pending = machine.flow(instruction).consumes[0]
    weights = list(machine.stages[instruction.stage].named_weights().values())
    reducing = _reducing(machine, instruction)

    def run() -> None:
        machine.clock.start()
        kept = machine.saved.pop(pending)
        with reducing():
            roots, gradients = kept.roots(kept.gradient)
            if roots and weights:
                torch.autograd.backward(roots, gradients, inputs=weights)
        machine.clock.stop()

    return run


def _backward_values(machine: Machine, instruction: ins.Compute) -> tuple[Value, Value | None, Value | None]:
    """Return what a backward starts from: what was saved, the output's gradient, and the input's that it makes."""
    flow = machine.flow(instruction)
    saved = next(value for value in flow.consumes if value.kind is Kind.SAVED)
    taken = next((value for value in flow.consumes if value.kind is Kind.OUTPUT_GRAD), None)
    made = next((value for value in flow.produces if value.kind is Kind.OUTPUT_GRAD), None)
    return saved, taken, made


def _reducing(machine: Machine, instruction: ins.Compute) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which gradients are reduced as they become ready, if they are complete afterwards.

    Those of a stage with twins are not: they are added up first.
    """
    gradients = machine.gradients
    has_twins = bool(machine.plan.layout.twins(instruction.stage))
    if gradients is None or has_twins or not machine.is_last_backward(instruction):
        return nullcontext
    return partial(gradients.last_backward, instruction.stage)


def _leave_gradient(machine: Machine, made: Value, found: Tensor | None, given: Tensor, taken: Tensor | None) -> None:
    """Leave the gradient of a stage's input (zeros where it does not depend on it) for the stage before."""
    gradient = torch.zeros_like(given) if found is None else found
    machine.values[made] = gradient if taken is None else _apart(gradient, taken)


def _apart(made: Tensor, taken: Tensor) -> Tensor:
    """Return what was made, copied where it lies in the memory of what was taken (a stage that only reshapes).

    That memory may be a receive buffer, which serves again while what was made is still being sent.
    """
    return made.clone() if made.untyped_storage().data_ptr() == taken.untyped_storage().data_ptr() else made


def bind_sync_tied(machine: Machine, instruction: ins.SyncTied) -> Call:
    """Add up the gradients of a stage and its twin."""
    gradients = machine.gradients
    own = [stage for stage in instruction.stages if stage in machine.stages]
    group = machine.groups.twins[instruction.stages]
    assert gradients is not None

    def run() -> None:
        for stage in own:
            gradients.add_up(stage, group)

    return run


def bind_all_reduce_bucket(machine: Machine, instruction: ins.AllReduceBucket) -> Call:
    """Launch what is left of a bucket's reduction."""
    assert machine.gradients is not None
    return partial(machine.gradients.reduce, (instruction.stage, instruction.bucket))


def bind_share_metrics(machine: Machine, instruction: ins.ShareMetrics) -> Call:
    """Sum the tally over all ranks but tensor-parallel copies, without waiting for it."""

    def run() -> None:
        machine.shared = machine.groups.metrics.all_reduce(machine.tally)

    return run


def bind_clip_grad(machine: Machine, instruction: ins.ClipGrad) -> Call:
    """Make the gradients those of the batch, find their global norm, and scale them under the threshold."""
    gradients, clip = machine.gradients, machine.clip
    assert gradients is not None

    def run() -> None:
        gradients.finish(machine.weight())
        machine.norm = gradients.global_norm()
        machine.skipped = not bool(torch.isfinite(machine.norm))
        if clip is not None and not machine.skipped:
            gradients.scale(torch.clamp(clip / (machine.norm + 1e-6), max=1.0))

    return run


def bind_opt_step(machine: Machine, instruction: ins.OptStep) -> Call:
    """Step the optimizer of these stages, unless the gradient is not finite; then clear their gradients."""
    optimizer = machine.optimizers.get(instruction.stages)
    gradients = machine.gradients
    assert gradients is not None

    def run() -> None:
        if optimizer is not None and not machine.skipped:
            optimizer.step()
        gradients.clear(instruction.stages)

    return run


HANDLERS: dict[type[Instruction], Callable[[Machine, Any], Call | None]] = {
    ins.RecvAct: bind_recv,
    ins.Fwd: bind_fwd,
    ins.SendAct: bind_send,
    ins.RecvGrad: bind_recv,
    ins.Bwd: bind_bwd,
    ins.BwdInput: bind_bwd_input,
    ins.BwdWeight: bind_bwd_weight,
    ins.SendGrad: bind_send,
    ins.SyncTied: bind_sync_tied,
    ins.AllReduceBucket: bind_all_reduce_bucket,
    ins.ShareMetrics: bind_share_metrics,
    ins.ClipGrad: bind_clip_grad,
    ins.OptStep: bind_opt_step,
}
"""How each instruction is bound; None where there is nothing to call."""


class Interpreter:
    """Runs one rank's program on a machine."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self._rank = rank
        self._program = machine.plan.program(rank)
        self._calls: list[Call] = []
        self._places: list[int] = []
        flows = [machine.flow(i) for i in self._program]
        postings = plan_receives(self._program, flows, ahead=machine.transport.profile == "tagged")
        buffers = _allocate(machine, postings)
        posted = sorted(zip(postings, buffers, strict=True), key=lambda pair: pair[0].at)
        for index, instruction in enumerate(self._program):
            while posted and posted[0][0].at <= index:
                self._add(index, _bind_post(machine, *posted.pop(0)))
            self._add(index, HANDLERS[type(instruction)](machine, instruction))

    def _add(self, index: int, call: Call | None) -> None:
        if call is not None:
            self._calls.append(call)
            self._places.append(index)

    def run(self, batch: Batch) -> None:
        """Walk the program once; an error gets a note that says where it happened."""
        self.machine.begin(batch)
        place = iter(self._places)
        index = 0
        try:
            for call in self._calls:
                index = next(place)
                call()
        except Exception as error:
            where = ", ".join(f"{k}={v}" for k, v in self.machine.plan.mesh.coordinates(self._rank).items())
            error.add_note(f"on rank {self._rank} ({where}), instruction {index}: {self._program[index]}")
            raise


def _allocate(machine: Machine, postings: Sequence[Posting]) -> list[Tensor]:
    """Allocate the receive buffers, each slot once."""
    slots: dict[tuple[Kind, int, int], Tensor] = {}
    device = machine.transport.device
    for posting in postings:
        key = (posting.value.kind, posting.value.stage, posting.slot)
        if key not in slots:
            slots[key] = machine.specs[posting.value.stage].empty(device)
    return [slots[p.value.kind, p.value.stage, p.slot] for p in postings]


def _bind_post(machine: Machine, posting: Posting, buffer: Tensor) -> Call:
    value, peer, tag = posting.value, posting.peer, tag_of(posting.value)

    def run() -> None:
        machine.values[value] = buffer
        machine.arrivals[value] = machine.transport.recv(buffer, peer, tag)

    return run

"""Baselines of the interpreter: a pipeline loop written by hand, and torch.distributed.pipelining.

The hand-written loop implements only its schedule, without any overhead:

    for run, unit in order: run(unit)              run = a stage's forward or backward
    forward(unit)    wait for the activation ▸ stage ▸ isend the output ▸ irecv the activation after the next
    backward(unit)   wait for the gradient ▸ autograd.backward ▸ isend the input's gradient ▸ irecv likewise
    end              as the plan's end of step, below

- Order: the forwards and backwards of this rank, as in the plan.
- Messages: `dist.isend` and `dist.irecv`, tagged by stage and direction, on a process group of their own. Two receives
  per tag are always posted ahead; sends are awaited at the end of the step.
- Buffers: made once, a ring per tag. Activations arrive in leaf tensors that require gradients, so none is made for
  them; a gradient's buffer is free for the message after the next as soon as its backward is done.
- Gradients: views into one flat tensor, summed over the microbatches; one operation each to divide, measure, clear.
- End of step, the same work as the plan's: the loss and its total weight shared between ranks (one all-reduce), the
  gradients divided by that weight, the global norm (one all-reduce), the finite check on the host, SGD, clearing.

torch's runtimes have no end of step: they get the one above, with their own scaling of gradients switched off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

import quintsched as qs
from quintsched.instructions import Bwd, Fwd

AHEAD = 2
LEARNING_RATE = 1e-3

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor | None, Tensor | None], Tensor]
"""One step on (inputs, targets), where this rank needs them; returns the batch's mean loss."""


@dataclass(frozen=True)
class Wire:
    """Communication functions; `isend(tensor, dst=, tag=)` and `irecv(buffer, src=, tag=)` return works to wait for."""

    isend: Callable[..., Any]
    irecv: Callable[..., Any]
    all_reduce: Callable[[Tensor], Any]
    group: dist.ProcessGroup | None = None
    """Process group of torch's runtimes; None is the default group."""


def gloo_wire() -> Wire:
    """Return a wire with a process group of its own, of all ranks."""
    group = dist.new_group()
    return Wire(
        partial(dist.isend, group=group),
        partial(dist.irecv, group=group),
        partial(dist.all_reduce, group=group, async_op=True),
        group,
    )


@dataclass(frozen=True)
class Task:
    """Work of one rank: its stages, their order, and the shape of messages."""

    plan: qs.Plan
    rank: int
    blocks: Sequence[nn.Module]
    loss: Loss
    like: Tensor
    """A tensor with the shape and dtype of messages between stages."""

    @property
    def num_stages(self) -> int:
        return len(self.plan.stage_to_pp)

    @property
    def microbatches(self) -> int:
        return self.plan.schedule.microbatches

    def modules(self) -> dict[int, nn.Module]:
        """Return this rank's stages, of equally many blocks each."""
        per_stage = len(self.blocks) // self.num_stages
        cuts = {
            s: self.blocks[s * per_stage :][:per_stage] for s, pp in enumerate(self.plan.stage_to_pp) if pp == self.rank
        }
        return {stage: cut[0] if per_stage == 1 else nn.Sequential(*cut) for stage, cut in cuts.items()}

    def order(self) -> list[tuple[bool, int, int]]:
        """Return this rank's computations as (is it a forward, stage, microbatch)."""
        computed = [i for i in self.plan.programs[self.rank] if isinstance(i, Fwd | Bwd)]
        return [(isinstance(i, Fwd), i.stage, i.microbatch) for i in computed]

    def most_in_flight(self, stage: int) -> int:
        """Return the most microbatches of a stage that are between forward and backward at a time."""
        level = most = 0
        for is_forward, of, _ in self.order():
            level += (1 if is_forward else -1) * (of == stage)
            most = max(most, level)
        return most

    def cut(self, batch: Tensor | None) -> Sequence[Tensor]:
        return () if batch is None else batch.split(batch.shape[0] // self.microbatches)


class EndOfStep:
    """Flat gradients, and the end of a step; see the module."""

    def __init__(self, modules: Mapping[int, nn.Module], wire: Wire, weight: int) -> None:
        parameters = [p for module in modules.values() for p in module.parameters()]
        self._flat = torch.zeros(sum(p.numel() for p in parameters))
        for parameter, view in zip(parameters, self._flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = view.view_as(parameter)
        self._optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
        self._wire = wire
        self._weight = float(weight)

    @torch.no_grad()
    def run(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean loss of the batch; `losses` are those of the last stage, none on other ranks."""
        tally = torch.zeros(2, dtype=torch.float64)
        if losses:
            tally[0], tally[1] = torch.stack(tuple(losses)).sum(), self._weight
        self._wire.all_reduce(tally).wait()
        self._flat.div_(tally[1])
        square = torch.linalg.vector_norm(self._flat).double().square_()
        self._wire.all_reduce(square).wait()
        if math.isfinite(square.item()):
            self._optimizer.step()
        self._flat.zero_()
        return tally[0] / tally[1]


class Ring:
    """Receives of one tag, two posted ahead: message `unit` comes into buffer `unit` modulo their number."""

    def __init__(self, buffers: Sequence[Tensor], receive: Callable[..., Any], messages: int) -> None:
        self._buffers = buffers
        self._receives = [partial(receive, buffer.detach()) for buffer in buffers]
        self._coming: list[Any] = [None] * len(buffers)
        self._messages = messages

    def begin(self) -> None:
        for unit in range(AHEAD):
            self.post(unit)

    def post(self, unit: int) -> None:
        if unit < self._messages:
            slot = unit % len(self._buffers)
            self._coming[slot] = self._receives[slot]()

    def take(self, unit: int) -> Tensor:
        slot = unit % len(self._buffers)
        self._coming[slot].wait()
        return self._buffers[slot]


class HandStage:
    """One stage of the hand-written loop: its module, its neighbours and tensors kept between forward and backward."""

    def __init__(self, task: Task, stage: int, module: nn.Module, wire: Wire) -> None:
        homes, count, like = task.plan.stage_to_pp, task.microbatches, task.like
        self._module, self._loss = module, task.loss
        self._acts = self._grads = None
        if stage > 0:
            peer = homes[stage - 1]
            acts = [torch.ones_like(like, requires_grad=True) for _ in range(task.most_in_flight(stage) + AHEAD)]
            self._acts = Ring(acts, partial(wire.irecv, src=peer, tag=2 * stage), count)
            self._send_grad = partial(wire.isend, dst=peer, tag=2 * stage + 1)
        if stage < task.num_stages - 1:
            peer = homes[stage + 1]
            grads = [torch.ones_like(like) for _ in range(AHEAD)]
            self._grads = Ring(grads, partial(wire.irecv, src=peer, tag=2 * stage + 3), count)
            self._send_act = partial(wire.isend, dst=peer, tag=2 * stage + 2)
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * count
        self._inputs: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self.sent: list[tuple[Any, Tensor]] = []
        self.losses: list[Tensor] = []

    def begin(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self._inputs, self._targets = inputs, targets
        for ring in (self._acts, self._grads):
            if ring is not None:
                ring.begin()

    def forward(self, unit: int) -> None:
        given = self._inputs[unit] if self._acts is None else self._acts.take(unit)
        output = self._module(given)
        if self._grads is None:
            output = self._loss(output, self._targets[unit])
            self.losses.append(output.detach())
        else:
            out = output.detach()
            self.sent.append((self._send_act(out), out))
        self._kept[unit] = (given, output)
        if self._acts is not None:
            self._acts.post(unit + AHEAD)

    def backward(self, unit: int) -> None:
        given, output = self._kept[unit]  # type: ignore[misc]
        self._kept[unit] = None
        if self._grads is None:
            torch.autograd.backward((output,))
        else:
            torch.autograd.backward((output,), (self._grads.take(unit),))
            self._grads.post(unit + AHEAD)
        if self._acts is not None:
            gradient, given.grad = given.grad, None
            assert gradient is not None
            self.sent.append((self._send_grad(gradient), gradient))

    def end(self) -> None:
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
        self.losses.clear()


def hand_written(task: Task, wire: Wire) -> Step:
    """Return a step of the hand-written loop."""
    modules = task.modules()
    stages = {stage: HandStage(task, stage, module, wire) for stage, module in modules.items()}
    order = [
        (stages[stage].forward if is_forward else stages[stage].backward, unit)
        for is_forward, stage, unit in task.order()
    ]
    last = stages.get(task.num_stages - 1)
    end = EndOfStep(modules, wire, task.microbatches)

    def step(inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        input_cuts, target_cuts = task.cut(inputs), task.cut(targets)
        for stage in stages.values():
            stage.begin(input_cuts, target_cuts)
        for run, unit in order:
            run(unit)
        loss = end.run(last.losses if last is not None else ())
        for stage in stages.values():
            stage.end()
        return loss

    return step


def pure_compute(task: Task, wire: Wire) -> Step:
    """Return a step that only computes: forwards and backwards on constant tensors, and the same end of step.

    For ranks that hold neither the first nor the last stage.
    """
    modules = task.modules()
    given = torch.ones_like(task.like, requires_grad=True)
    gradient = (torch.ones_like(task.like),)
    order = [(is_forward, modules[stage], stage, unit) for is_forward, stage, unit in task.order()]
    end = EndOfStep(modules, wire, task.microbatches)

    def step(_inputs: Tensor | None, _targets: Tensor | None) -> Tensor:
        outputs: dict[tuple[int, int], tuple[Tensor]] = {}
        for is_forward, module, stage, unit in order:
            if is_forward:
                outputs[stage, unit] = (module(given),)
            else:
                torch.autograd.backward(outputs.pop((stage, unit)), gradient)
                given.grad = None
        return end.run(())

    return step


def torch_pipelining(name: str, task: Task, wire: Wire) -> Step:
    """Return a step of one of torch's runtimes, by the name of its class, for the same stages in the same order."""
    modules = task.modules()
    device, group = torch.device("cpu"), wire.group
    like, graded = task.like, task.like.clone().requires_grad_()
    stages: list[Any] = [
        PipelineStage(module, stage, task.num_stages, device, graded if stage else like, graded, group=group)
        for stage, module in modules.items()
    ]
    world = dist.get_world_size(group)
    common: dict[str, Any] = {"loss_fn": task.loss, "scale_grads": False}
    schedule: Any
    if name == "_PipelineScheduleRuntime":
        schedule = _PipelineScheduleRuntime(stages, task.microbatches, **common)
        schedule._prepare_schedule_with_comms({rank: _actions(replace(task, rank=rank)) for rank in range(world)})
    elif name == "ScheduleInterleaved1F1B":
        schedule = ScheduleInterleaved1F1B(stages, task.microbatches, **common)
    else:
        schedule = Schedule1F1B(stages[0], task.microbatches, **common)
    end = EndOfStep(modules, wire, task.microbatches)
    has_first, has_last = 0 in modules, task.num_stages - 1 in modules

    def step(inputs: Tensor | None, targets: Tensor | None) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs,) if has_first else ()
        schedule.step(*given, target=targets if has_last else None, losses=losses, return_outputs=False)
        return end.run([loss.detach() for loss in losses])

    return step


def _actions(task: Task) -> list[_Action]:
    """Return the order of a rank as torch's actions; its own `Schedule1F1B` has none that its runtime takes."""
    return [_Action.from_str(f"{stage}{'F' if is_forward else 'B'}{unit}") for is_forward, stage, unit in task.order()]

"""A pipeline-parallel training loop in one file: threads run a plan with plain torch. Read it first.

    plan = quintsched.compile("1f1b", mesh="dp=2,pp=2", microbatches=4)
    losses = train(plan, pieces, mse_loss, lambda weights: SGD(weights, lr=0.1), batches)

    a rank holds    outputs[stage, unit]      output of a stage, computed here or received; a unit is a microbatch
                    gradients[stage, unit]    gradient of that output, computed here or received
                    saved[stage, unit]        input and output, with the autograd graph between them

`Engine` does the same over processes and devices, for all axes and instructions, with checks and hang detection.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import torch
from torch import Tensor, nn

from quintsched import Plan, UsageError
from quintsched.ir import instruction_set as ins


def train(
    plan: Plan,
    pieces: Sequence[nn.Module],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: Sequence[tuple[Tensor, Tensor]],
) -> list[float]:
    """Train `pieces`, the modules that the model is cut into, in their order; return the loss of each step.

    A stage runs a copy of a piece; in bidirectional schedules two stages run copies of one. `loss_fn` has to be a mean
    over samples. A batch is (inputs, targets), each (samples, …): replicas x microbatches has to divide the number of
    samples, and each parameter has to get a gradient. Raises `UsageError` for what this file does not implement.
    """
    wires = _Wires()
    ranks = [_Rank(plan, number, pieces, loss_fn, optimizer, wires) for number in range(plan.mesh.size)]
    with ThreadPoolExecutor(len(ranks)) as threads:
        losses = [threads.submit(rank.train, batches) for rank in ranks]
    if wires.error is not None:
        raise wires.error
    for rank in ranks:
        for stage, module in rank.stages.items():
            pieces[plan.layout.part_of(stage)].load_state_dict(module.state_dict())
    return losses[0].result()


class _Wires:
    """Messages between threads: sends and receives match by name; after `fail`, no receive waits for a send."""

    def __init__(self) -> None:
        self._posted: defaultdict[Hashable, deque[Tensor]] = defaultdict(deque)
        self._changed = Condition()
        self.error: BaseException | None = None

    def send(self, name: Hashable, tensor: Tensor) -> None:
        with self._changed:
            self._posted[name].append(tensor)
            self._changed.notify_all()

    def receive(self, name: Hashable) -> Tensor:
        with self._changed:
            self._changed.wait_for(lambda: self._posted[name] or self.error)
            if not self._posted[name]:
                raise ConnectionAbortedError("another rank has failed")
            return self._posted[name].popleft()

    def all_reduce(self, name: Hashable, me: int, members: Sequence[int], tensor: Tensor) -> Tensor:
        for other in members:
            self.send((name, me, other), tensor)
        return torch.stack([self.receive((name, other, me)) for other in members]).sum(0)

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()


class _Rank:
    """One rank of the mesh: its stages, with an optimizer for each, and the tensors that it holds."""

    def __init__(self, plan: Plan, number: int, pieces: Any, loss_fn: Any, optimizer: Any, wires: _Wires) -> None:
        if plan.tied or plan.schedule.slices > 1 or len(plan.mesh.groups("dp", "pp")) > 1:
            raise UsageError("only the axes dp and pp are run here, without ties and slices; train by Engine")
        self.layout, self.number, self.loss_fn, self.wires = plan.layout, number, loss_fn, wires
        self.replicas, self.pipeline = (next(g for g in plan.mesh.groups(axis) if number in g) for axis in ("dp", "pp"))
        self.world, pp = range(plan.mesh.size), self.pipeline.index(number)
        self.program, held = plan.programs[pp], self.layout.stages_of(pp)
        self.stages = {stage: copy.deepcopy(pieces[self.layout.part_of(stage)]) for stage in held}
        self.optimizers = {stage: optimizer(module.parameters()) for stage, module in self.stages.items()}
        self.outputs, self.gradients, self.saved = dict[Any, Tensor](), dict[Any, Tensor](), dict[Any, Any]()

    def train(self, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
        try:
            return [self.step(*batch) for batch in batches]
        except BaseException as error:
            self.wires.fail(error)
            raise

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Run the program on this replica's share of a batch; return the loss of the whole batch."""
        count, replica = self.layout.num_microbatches, self.replicas.index(self.number)
        if len(inputs) % (units := count * len(self.replicas)):
            raise UsageError(f"{len(inputs)} samples do not divide by {units} microbatches; train by Engine")
        self.inputs, self.targets = (x.chunk(units)[replica * count :][:count] for x in (inputs, targets))
        self.loss, self.weight = torch.zeros(()), 1 / units
        for side in (side for instruction in self.program for side in instruction.sides):  # one; an Overlap has two
            self.run_instruction(side)
        return float(self.loss)

    def run_instruction(self, instruction: ins.Instruction) -> None:
        """Execute one instruction. A message is named by the stage whose output it is, or whose output's gradient."""
        pipeline, send, receive = self.pipeline, self.wires.send, self.wires.receive
        match instruction:
            case ins.Fwd(stage, unit):
                self.forward(stage, unit)
            case ins.Bwd(stage, unit) | ins.BwdInput(stage, unit) | ins.BwdWeight(stage, unit):
                self.backward(stage, unit, instruction)
            case ins.SendAct(stage, unit):
                send(("output", pipeline, stage, unit), self.outputs.pop((stage, unit)))
            case ins.RecvAct(stage, unit):
                earlier = self.layout.before(stage, unit)
                self.outputs[earlier, unit] = receive(("output", pipeline, earlier, unit))
            case ins.SendGrad(stage, unit):
                earlier = self.layout.before(stage, unit)
                send(("gradient", pipeline, earlier, unit), self.gradients.pop((earlier, unit)))
            case ins.RecvGrad(stage, unit):
                self.gradients[stage, unit] = receive(("gradient", pipeline, stage, unit))
            case ins.SyncTied(_, stages):  # stages that run copies of one piece; other ties are refused
                self.all_reduce_gradients(stages, [pipeline[pp] for pp in self.layout.ranks_of(stages)])
            case ins.AllReduceBucket(stage, bucket):
                self.all_reduce_gradients([stage] if bucket == 0 else [], self.replicas)  # bucket 0: the whole stage
            case ins.ShareMetrics():
                self.loss = self.wires.all_reduce("loss", self.number, self.world, self.loss)
            case ins.OptStep(stages):
                for stage in stages:
                    self.optimizers[stage].step()
                    self.optimizers[stage].zero_grad()
            case _ if not isinstance(instruction, ins.ClipGrad):  # nothing is clipped here
                raise UsageError(f"{instruction} is not run here; train by Engine")

    def forward(self, stage: int, unit: int) -> None:
        earlier = self.layout.before(stage, unit)
        given = self.inputs[unit] if earlier < 0 else self.outputs.pop((earlier, unit)).requires_grad_()
        output = self.stages[stage](given)
        if self.layout.after(stage, unit) < 0:
            output = self.loss_fn(output, self.targets[unit]) * self.weight
            self.loss = self.loss + output.detach()
        else:
            self.outputs[stage, unit] = output.detach()
        self.saved[stage, unit] = given, output

    def backward(self, stage: int, unit: int, instruction: ins.Instruction) -> None:
        (given, output), gradient = self.saved[stage, unit], self.gradients.get((stage, unit))
        if instruction.begins_backward and given.requires_grad:
            earlier = self.layout.before(stage, unit)
            (self.gradients[earlier, unit],) = torch.autograd.grad(output, given, gradient, retain_graph=True)
        if instruction.ends_backward:  # a `Bwd` passes over the graph twice; `Engine` does so once
            torch.autograd.backward(output, gradient, inputs=[*self.stages[stage].parameters()])
            del self.saved[stage, unit]
            self.gradients.pop((stage, unit), None)  # a loss has none

    def all_reduce_gradients(self, stages: Sequence[int], members: Sequence[int]) -> None:
        """Sum the gradients of stages that run copies of one piece: over those on this rank, then over `members`."""
        copies = [self.stages[stage].parameters() for stage in stages if stage in self.stages]
        for weights in zip(*copies, strict=True):  # the same weight in each copy
            own = torch.stack([weight.grad for weight in weights]).sum(0)
            total = self.wires.all_reduce(("gradient", *stages), self.number, members, own)
            for weight in weights:
                weight.grad = total.clone()

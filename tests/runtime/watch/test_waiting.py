"""Waits of a rank are recorded while it waits, and removed afterwards."""

import pytest
import torch

import quintsched as qs
from quintsched.ir.instruction_set import RecvGrad, SendAct
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.runtime.watch.rank_position import NOTHING, wait_of

from ..toys import Task, sgd, share, tiny_vit


class Noted(list[int]):
    """A memory that remembers what was written."""

    def __init__(self) -> None:
        super().__init__([NOTHING])
        self.said: list[int] = []

    def __setitem__(self, at, code):
        self.said.append(code)
        super().__setitem__(at, code)


@pytest.mark.parametrize(("mesh", "rules"), [("pp=2", "mailbox"), ("pp=2,tp=2", "nccl")])
def test_a_step_says_what_it_waits_for(mesh, rules):
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
    task, blocks = Task.make(2, 8, torch.float32), tiny_vit()

    def run(transport: Transport):
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, dtype=torch.float32, transport=transport)
        engine.step(*share(engine, task.inputs[0], task.targets[0]))
        memory = Noted()
        transport.waits.move(memory, 0)
        engine.step(*share(engine, task.inputs[1], task.targets[1]))
        assert list(memory) == [NOTHING]
        return [wait_of(code, transport.groups) for code in memory.said if code != NOTHING], plan.program(
            transport.rank
        )

    ranks = plan.mesh.size
    for rank, (waits, program) in enumerate(run_local(ranks, run, rules=rules)):
        received = {wait.index for wait in waits if wait.kind == "receive"}
        assert received == {i for i, one in enumerate(program) if type(one).__name__ in ("RecvAct", "RecvGrad")}
        sends = [program[wait.index] for wait in waits if wait.kind == "send"]
        assert all(type(one).__name__ in ("SendAct", "SendGrad") for one in sends)
        if rules != "mailbox" and any(isinstance(i, RecvGrad) for i in program):
            assert any(isinstance(one, SendAct) for one in sends), "a gradient releases what was sent"
        groups = {wait.ranks for wait in waits if wait.kind == "collective"}
        assert groups
        assert all(rank in group for group in groups)

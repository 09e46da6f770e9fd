"""A refused plan, replayed with blocking calls, stops where its counter-example says."""

import random
from dataclasses import replace

import pytest
import torch

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import WHOLE_MESH, Message, Send
from quintsched.runtime.comm import Transport, run_local

PLANS = [
    qs.compile("1f1b", mesh="pp=2", microbatches=4),
    qs.compile("1f1b", mesh="pp=4", microbatches=6),
    qs.compile("gpipe", mesh="pp=3", microbatches=4),
    qs.compile("interleaved-1f1b", mesh="pp=3", microbatches=6),
    qs.compile("zb-h1", mesh="pp=4", microbatches=8),
]


def mutant(plan: qs.Plan, chance: random.Random) -> qs.Plan:
    """Move a message of one rank to another place in its program, past nothing of its own channel."""
    rank = chance.randrange(len(plan.programs))
    program = list(plan.programs[rank])
    index = chance.choice([i for i, instruction in enumerate(program) if isinstance(instruction, Message)])
    program.insert(max(0, index + chance.randint(-6, 6)), program.pop(index))
    return replace(plan, programs=(*plan.programs[:rank], tuple(program), *plan.programs[rank + 1 :]))


def replay(plan: qs.Plan) -> dict[int, int]:
    """Walk the programs with blocking calls; return where each rank stands when nothing moves any more."""
    standing: dict[int, int] = {}
    ranks = tuple(range(len(plan.programs)))

    def walk(transport: Transport) -> None:
        group = transport.make_group([ranks])
        transport.open_channels([(a, b) for a in ranks for b in ranks if a != b])
        for index, instruction in enumerate(plan.programs[transport.rank]):
            standing[transport.rank] = index
            if isinstance(instruction, Message):
                call = transport.send if isinstance(instruction, Send) else transport.recv
                call(torch.zeros(1), instruction.peer, 0).wait()
            elif isinstance(instruction, WHOLE_MESH):
                group.all_reduce(torch.zeros(1)).wait()
        standing[transport.rank] = -1

    with pytest.raises(qs.StallError):
        run_local(len(ranks), walk, timeout_s=10, rules="rendezvous")
    return standing


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.title)
def test_every_rank_of_the_cycle_stands_where_the_counterexample_says(plan: qs.Plan) -> None:
    chance, seen = random.Random(0), 0
    while seen < 12:
        broken = mutant(plan, chance)
        verdict = broken.check(profile="blocking")
        cycle = [f for f in verdict.findings if f.point is Point.DEADLOCK and f.rank is not None]
        if not cycle:
            continue
        seen += 1
        standing = replay(broken)
        for finding in cycle:
            assert standing[finding.rank] == finding.index, verdict.explain()

"""Plans that the planner calls free of deadlock run, or are refused; replayed, a refused one blocks where it says.

Models are a few linear blocks; most runs are compared with the same blocks on one rank, where nothing is sent.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.graph.event_edges import build_graph
from quintsched.graph.plan_events import Events
from quintsched.graph.transport_profiles import find_profile
from quintsched.ir import instruction_set as ins
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import WHOLE_MESH, Message, Send
from quintsched.runtime import Engine
from quintsched.runtime.comm import Rules, Transport, run_local

from ...helpers.training import require_same_bits
from ..linear_blocks import WIDTH, alone, batch, linear, mutant, squared_sum, train
from ..toys import sgd, worst_difference

# ---------------------------------------------------------------- order of messages and sums

LOOSE = [
    qs.compile("1f1b", mesh="pp=2", microbatches=4),
    qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4),
    qs.compile("zb-h1", mesh="pp=3", microbatches=4),
    qs.compile("dualpipe", mesh="pp=2", microbatches=4),
]


def loosened(plan: qs.Plan, chance: random.Random) -> qs.Plan:
    """Move messages to where the planner still calls the plan free of deadlock, but for no stricter profile."""
    while True:
        other = mutant(plan, chance)
        if not queues_are_free(other):
            continue
        plan = other
        if not plan.check().profiles["blocking"] and chance.random() < 0.3:
            return plan


def queues_are_free(plan: qs.Plan) -> bool:
    """Whether a plan is sound but for the order in which hosts issue it."""
    if any(finding.point is not Point.DEADLOCK for finding in plan.check(profile="channel").findings):
        return False
    return build_graph(Events.merge(plan), plan.flows, find_profile("channel")).run_events().finished


def is_runnable(plan: qs.Plan) -> bool:
    return plan.check(profile="channel").sound


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", LOOSE, ids=lambda plan: plan.title)
def test_what_is_not_refused_runs_with_messages_in_order(plan: qs.Plan) -> None:
    chance, data = random.Random(0), batch(4)
    plans = [loosened(plan, chance) for _ in range(10)]
    blocks = [linear] * len(plan.stage_to_pp)
    expected = train(plan, blocks, data, steps=1)
    for loose in filter(is_runnable, plans):
        found = train(loose, blocks, data, steps=1, wire="nccl")
        assert all(outcome.losses == expected[0].losses for outcome in found)
    assert not all(map(is_runnable, plans)), "all of them could have been run before"


@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
def test_a_sum_of_tied_weights_may_stand_before_other_work(rules: Rules) -> None:
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2, chunks=3, tied={"w": (1, 4)})
    first = list(plan.programs[0])
    sync = next(i for i in first if isinstance(i, ins.SyncTied))
    first.remove(sync)
    first.insert(1 + max(k for k, i in enumerate(first) if isinstance(i, ins.Bwd) and i.stage == 4), sync)
    early = replace(plan, programs=(tuple(first), plan.programs[1]))
    tied = {"w": ("1.weight", "4.weight")}
    expected, found = (train(p, [linear] * 6, batch(4), tied=tied, wire=rules) for p in (plan, early))
    assert [after.losses for after in found] == [before.losses for before in expected]
    require_same_bits(found, expected)


# ---------------------------------------------------------------- recomputation and slices


# ---------------------------------------------------------------- what steps leave behind


def test_a_batch_is_let_go_of_after_its_step() -> None:
    engine = Engine(alone(2), [linear, linear], squared_sum, sgd, dtype=torch.float64)
    engine.step(*batch(4))
    engine.evaluate(*batch(4))
    assert set(engine._runner.interpreters) == {"train", "forward"}
    for interpreter in engine._runner.interpreters.values():
        assert not interpreter.state.current.batch.inputs
        assert not interpreter.state.current.batch.targets


PLANS = [
    qs.compile("1f1b", mesh="pp=2", microbatches=4),
    qs.compile("1f1b", mesh="pp=4", microbatches=6),
    qs.compile("gpipe", mesh="pp=3", microbatches=4),
    qs.compile("interleaved-1f1b", mesh="pp=3", microbatches=6),
    qs.compile("zb-h1", mesh="pp=4", microbatches=8),
]


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


def test_a_sound_plan_does_not_block() -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        replay(PLANS[1])


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
            assert finding.rank is not None
            assert standing[finding.rank] == finding.index, verdict.explain()


class Added(nn.Module):
    """Stands between two ranks with numbers that are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class ToComplex(Added):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.layer(x), x)


class FromComplex(Added):
    def forward(self, z: Tensor) -> Tensor:
        return self.layer((z * z).real)  # type: ignore[no-any-return]


def test_gradients_of_complex_activations_come_back() -> None:
    blocks = [ToComplex, FromComplex]
    expected = train(alone(2), blocks, batch(4))[0]
    found = train(qs.compile("1f1b", mesh="pp=2", microbatches=2), blocks, batch(4))
    assert worst_difference(found, expected) < 1e-12

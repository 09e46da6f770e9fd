"""Plans that the planner calls free of deadlock run, or are refused; and what a step must not leave behind.

Models are a few linear blocks; most runs are compared with the same blocks on one rank, where nothing is sent.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.graph.event_edges import build_graph
from quintsched.graph.plan_events import Events
from quintsched.graph.transport_profiles import find_profile
from quintsched.ir import instruction_set as ins
from quintsched.ir.diagnostics import Point
from quintsched.ir.layout import Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.passes import TRAIN_PASSES, lower
from quintsched.runtime import Engine
from quintsched.runtime.comm import Rules, Transport, run_local

from ...helpers.training import require_same_bits
from ..linear_blocks import WIDTH, Attention, alone, batch, linear, mutant, squared_sum, train
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


# ---------------------------------------------------------------- recomputation and slices


def split_in_slices(slices: int) -> qs.Plan:
    """One microbatch on one rank: slices forward, then input halves backward, then weight halves."""
    order = (
        *(ins.Fwd(0, unit) for unit in range(slices)),
        *(ins.BwdInput(0, unit) for unit in reversed(range(slices))),
        *(ins.BwdWeight(0, unit) for unit in reversed(range(slices))),
    )
    return lower(
        qs.Plan(
            mode="train",
            schedule=ScheduleSpec("mine", 1, 1, slices, {}),
            mesh=Mesh.parse("pp=1"),
            stage_to_pp=(0,),
            routes=(Route((0,), tuple(range(slices))),),
            buckets_per_stage=1,
            programs=(order,),
        ),
        TRAIN_PASSES,
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_slices_with_split_backwards(samples: int) -> None:
    expected = train(alone(), [Attention, Attention], batch(samples, 6))[0]
    found = train(split_in_slices(3), [Attention, Attention], batch(samples, 6))
    assert worst_difference(found, expected) < 1e-12


def test_a_number_per_sample_goes_to_every_slice() -> None:
    shift = torch.arange(4, dtype=torch.float64)
    expected = train(alone(2), [Attention, Attention], batch(4, 6), shift=shift)[0]
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=3)
    found = train(plan, [Attention, Attention], batch(4, 6), shift=shift)
    assert worst_difference(found, expected) < 1e-12


# ---------------------------------------------------------------- what steps leave behind


def test_a_counted_step_leaves_the_trace_alone(tmp_path: Path) -> None:
    inputs, targets = (tensor.float() for tensor in batch(4))
    engine = Engine(alone(2), [linear, linear], squared_sum, sgd, trace_steps=[1, 2])
    engine.step(inputs, targets)
    engine.step_counting_saved(inputs, targets)
    assert torch.isfinite(engine.step(inputs, targets).loss)
    engine.save_trace(tmp_path)
    steps = json.loads((tmp_path / "rank0.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [2]


def test_a_batch_is_let_go_of_after_its_step() -> None:
    engine = Engine(alone(2), [linear, linear], squared_sum, sgd, dtype=torch.float64)
    engine.step(*batch(4))
    engine.evaluate(*batch(4))
    assert set(engine._runner.interpreters) == {"train", "forward"}
    for interpreter in engine._runner.interpreters.values():
        assert not interpreter.state.current.batch.inputs
        assert not interpreter.state.current.batch.targets


def test_what_an_evaluation_sent_is_let_go_of_by_the_next_step() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)

    def run(transport: Transport) -> tuple[int, int]:
        engine = Engine(plan, [linear, linear], squared_sum, sgd, dtype=torch.float64, transport=transport)
        engine.evaluate(*batch(4))
        kept = sends_in_flight(engine)
        engine.step(*batch(4))
        return kept, sends_in_flight(engine)

    assert run_local(2, run, rules="rendezvous") == [(4, 0), (0, 0)]


def sends_in_flight(engine: Engine) -> int:
    evaluation = engine._runner.interpreters["forward"]
    return sum(cell.sent is not None for cell in evaluation.state.cells.sending)

"""Receives posted ahead: every one once, never too late, in buffers that nothing else is in; sends in flight: few."""

import itertools
from collections.abc import Callable

import pytest
import torch

import quintsched as qs
from quintsched.ir.instruction_set import (
    Bwd,
    ClipGrad,
    Fwd,
    Instruction,
    OptStep,
    Recv,
    RecvAct,
    RecvGrad,
    SendAct,
    SendGrad,
    ShareMetrics,
)
from quintsched.ir.layout import Route
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.runtime import Engine
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.interpreter.instruction_state import RankState
from quintsched.runtime.interpreter.program_dataflow import ProgramFlow
from quintsched.runtime.interpreter.send_and_receive import plan_receives
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.simulation.message_slots import AHEAD, MAX_SENDS, MessageRule

from ..toys import Task, sgd, share, tiny_vit


@pytest.mark.parametrize("ahead", [2, 5, None])
@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "chunks"),
    [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved-1f1b", 4, 8, 3), ("inference", 3, 5, 2)],
)
def test_receives_are_posted_in_time_and_in_order(
    schedule: str, pp: int, microbatches: int, chunks: int, ahead: int | None
) -> None:
    plan = qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    for rank, program in enumerate(plan.programs):
        flows = ProgramFlow(plan, rank).flows
        postings = plan_receives(ProgramFlow(plan, rank), MessageRule(ahead))
        places = {flows[index].produces[0]: index for index, i in enumerate(program) if isinstance(i, Recv)}
        assert {p.value for p in postings} == set(places)
        assert all(p.at <= places[p.value] if ahead else p.at == places[p.value] for p in postings)
        for tag in {(p.peer, p.value.kind, p.value.stage) for p in postings}:
            alike = [p for p in postings if (p.peer, p.value.kind, p.value.stage) == tag]
            assert [places[p.value] for p in alike] == sorted(places[p.value] for p in alike)
            takers = [next(i for i, f in enumerate(flows) if p.value in f.consumes) for p in alike]
            for number, posting in enumerate(alike):
                assert sum(taker >= posting.at for taker in takers[:number]) < (ahead or len(program))
        ends = {}
        for p in postings:
            taker = next(i for i, f in enumerate(flows) if p.value in f.consumes)
            saved = (
                [v for v in flows[taker].produces if v.kind.name == "SAVED"] if p.value.kind.name == "OUTPUT" else []
            )
            ends[p] = next((i for i, f in enumerate(flows) if saved and saved[0] in f.consumes), taker)
        for a, b in itertools.combinations(postings, 2):
            if a.slots == b.slots:
                assert ends[a] < b.at or ends[b] < a.at


def test_buffers_do_not_grow_with_the_microbatches() -> None:
    def slots(microbatches: int) -> int:
        plan = qs.compile("1f1b", mesh="pp=4", microbatches=microbatches)
        return len({p.slots for p in plan_receives(ProgramFlow(plan, 1), MessageRule(AHEAD))})

    assert slots(64) == slots(8) <= 3 + 2 * AHEAD


class Watch:
    """Counts, after every call, what was sent and is not let go of yet, and what of it a backward would keep."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self.kept = self.rooted = 0

    def wrap(self, index: int, call: Callable[[], None]) -> Callable[[], None]:
        def watched() -> None:
            call()
            self.kept = max(self.kept, sum(cell.sent is not None for cell in self._state.cells.sending))
            roots = (root for _, start, *_ in self._state.compute.saved.values() for root in start[0])
            self.rooted = max(self.rooted, sum(isinstance(root, torch.Tensor) for root in roots))

        return watched


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_what_was_sent_is_let_go_of(schedule: str, rules: Rules) -> None:
    plan = qs.compile(schedule, mesh="pp=2", microbatches=12)
    task, blocks = Task.make(1, 12, torch.float32), tiny_vit()

    def run(transport: Transport) -> tuple[int, int]:
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, dtype=torch.float32, transport=transport)
        batch = share(engine, task.inputs[0], task.targets[0])
        engine.step(*batch)
        interpreter = engine._runner.interpreters["train"]
        watch = Watch(interpreter.state)
        interpreter.run_program(engine._model.batches(plan, *batch, {}), 1, interpreter.watched(watch))
        return watch.kept, watch.rooted

    for kept, rooted in run_local(2, run, rules=rules):
        assert 0 < kept <= MAX_SENDS + 1
        assert rooted == 0, "an edge of the graph keeps no output alive"


def fill_then_drain(units: int) -> qs.Plan:
    """Stages on ranks 0, 1, 2, 0; rank 0 sends all activations before it takes any: not free under `blocking`."""
    first: list[Instruction] = [i for u in range(units) for i in (Fwd(0, u), SendAct(0, u, 1))]
    second: list[Instruction] = []
    third: list[Instruction] = []
    for u in range(units):
        second += [RecvAct(1, u, 0), Fwd(1, u), SendAct(1, u, 2), RecvGrad(1, u, 2), Bwd(1, u), SendGrad(1, u, 0)]
        third += [RecvAct(2, u, 1), Fwd(2, u), SendAct(2, u, 0), RecvGrad(2, u, 0), Bwd(2, u), SendGrad(2, u, 1)]
        first += [RecvAct(3, u, 2), Fwd(3, u), Bwd(3, u), SendGrad(3, u, 2), RecvGrad(0, u, 1), Bwd(0, u)]
    ends = (((0, 3), first), ((1,), second), ((2,), third))
    return qs.Plan(
        mode="train",
        schedule=ScheduleSpec("fill-then-drain", units),
        mesh=qs.Mesh(pp=3),
        stage_to_pp=(0, 1, 2, 0),
        routes=(Route((0, 1, 2, 3), tuple(range(units))),),
        buckets_per_stage=1,
        programs=tuple((*order, ShareMetrics(), ClipGrad(), OptStep(stages)) for stages, order in ends),
    )


def test_sends_are_awaited_only_where_the_plan_is_proved_for_it() -> None:
    plan, task = fill_then_drain(8), Task.make(3, 8, torch.float64)
    verdict = plan.check(profile="tagged")
    assert verdict.sound
    assert not verdict.profiles["blocking"]

    def run(transport: Transport) -> tuple[int | None, float]:
        engine = Engine(plan, tiny_vit(), cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        loss = engine.step(task.inputs[0], task.targets[0]).loss.item()
        return engine._runner.interpreters["train"].state.messages.max_sends, loss

    expected = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=8), tiny_vit(), cross_entropy_sum, sgd)
    loss = expected.step(task.inputs[0].float(), task.targets[0]).loss.item()
    assert expected._runner.interpreters["train"].state.messages.max_sends == MAX_SENDS
    for kept, found in run_local(3, run):
        assert kept is None
        assert found == pytest.approx(loss, rel=1e-5)

"""Receives posted ahead: every one once, never too late, and buffers never shared by what stands together."""

import itertools

import pytest

import quintsched as qs
from quintsched.dataflow import flow
from quintsched.instructions import Recv
from quintsched.runtime.messages import AHEAD, plan_receives


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
        flows = [flow(i, plan.layout, rank) for i in program]
        postings = plan_receives(program, flows, (lambda stage: ahead) if ahead else None)
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
            if (a.value.kind, a.value.stage, a.slot) == (b.value.kind, b.value.stage, b.slot):
                assert ends[a] < b.at or ends[b] < a.at


def test_buffers_do_not_grow_with_the_microbatches() -> None:
    def slots(microbatches: int) -> int:
        plan = qs.compile("1f1b", mesh="pp=4", microbatches=microbatches)
        flows = [flow(i, plan.layout, 1) for i in plan.programs[1]]
        return len(
            {(p.value.kind, p.value.stage, p.slot) for p in plan_receives(plan.programs[1], flows, lambda stage: AHEAD)}
        )

    assert slots(64) == slots(8) <= 3 + 2 * AHEAD

"""Messages in one global order: skips beside activations, to each rank once, and their gradients in a chain."""

from __future__ import annotations

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import SKIP_MESSAGES, RecvSkip, RecvSkipGrad, SendSkip, SendSkipGrad
from quintsched.plan import Plan


def ways(plan: Plan, kind: type) -> list[tuple[int, int, int]]:
    """(rank, stage, peer) of the messages of a kind for microbatch 0."""
    return [
        (rank, i.stage, i.peer)
        for rank, program in enumerate(plan.programs)
        for i in program
        if isinstance(i, kind) and i.microbatch == 0
    ]


def test_a_skip_goes_to_each_rank_once_and_its_gradient_from_taker_to_taker() -> None:
    """Stages 0 to 5 on the ranks 0, 1, 0, 1, 0, 1."""
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4, chunks=3, skip={"h": (0, 1, 3, 4, 5)})
    assert ways(plan, SendSkip) == [(0, 0, 1)]
    assert ways(plan, RecvSkip) == [(1, 1, 0)]
    assert sorted(ways(plan, SendSkipGrad)) == [(0, 4, 1), (1, 1, 0), (1, 5, 0)]
    assert sorted(ways(plan, RecvSkipGrad)) == [(0, 0, 1), (0, 4, 1), (1, 3, 0)]
    of_one_rank = qs.compile("zbv", mesh="pp=2", microbatches=4, skip={"h": (0, 3)})
    assert not any(isinstance(i, SKIP_MESSAGES) for program in of_one_rank.programs for i in program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe-v", "inference"])
def test_many_skips_into_one_computation_are_free_of_deadlock(name: str) -> None:
    """More messages for one computation than are received ahead on a channel."""
    for pp in (2, 4):
        stages = len(qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=8).stage_to_pp)
        skips = {f"h{source}": tuple(range(source, stages)) for source in range(stages - 1)}
        many = {f"k{number}": (0, stages - 1) for number in range(6)}
        plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=8, skip={**skips, **many})
        assert plan.check(profile="blocking").sound


def test_a_skip_takes_the_time_of_a_message_as_large_as_what_the_stage_leaves_that_makes_it() -> None:
    def lasting(costs: qs.Costs, *stages: int) -> list[float]:
        plan = qs.compile("gpipe", mesh="pp=3", microbatches=1, skip={"h": stages})
        spans = [span for row in plan.simulate(costs).timeline for span in row]
        return [span.end - span.start for span in spans if isinstance(span.instruction, SKIP_MESSAGES)]

    costs = qs.Costs(p2p=5.0)
    assert lasting(costs, 0, 2) == [5.0] * 4
    assert lasting(qs.Costs(p2p=2.0, message=(3.0, 1.0, 1.0)), 0, 1, 2) == [6.0] * 8
    for pp, later in ((3, 0.0), (2, 10.0)):  # over stage 1 it is there before the activation
        beside, plain = (
            qs.compile("gpipe", mesh=f"pp={pp}", microbatches=1, skip=skip).simulate(costs).makespan
            for skip in ({"h": (0, pp - 1)}, {})
        )
        assert beside == plain + later

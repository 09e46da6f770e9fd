"""Messages in one global order: skips beside activations, to each rank once, and their gradients in a chain."""

from __future__ import annotations

from dataclasses import replace

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


def test_stages_of_one_rank_exchange_no_message() -> None:
    plan = qs.compile("zbv", mesh="pp=2", microbatches=4, skip={"h": (0, 3)})
    assert plan.stage_to_pp == (0, 1, 1, 0)
    assert not any(isinstance(i, SKIP_MESSAGES) for program in plan.programs for i in program)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe-v", "inference"])
@pytest.mark.parametrize("pp", [2, 4])
def test_many_skips_into_one_computation_are_free_of_deadlock(name: str, pp: int) -> None:
    """More messages for one computation than are received ahead on a channel."""
    stages = len(qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=8).stage_to_pp)
    skips = {f"h{source}": tuple(range(source, stages)) for source in range(stages - 1)}
    many = {f"k{number}": (0, stages - 1) for number in range(6)}
    plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=8, skip={**skips, **many})
    assert plan.check(profile="blocking").sound


def test_a_plan_without_skips_is_as_ever_and_one_with_them_keeps_its_computations() -> None:
    plain = qs.compile("1f1b", mesh="pp=4", microbatches=6)
    assert '"skips"' not in plain.to_json()
    assert '"losses"' not in qs.compile("1f1b", mesh="pp=4", microbatches=6, losses=[3]).to_json()
    skips = qs.compile("1f1b", mesh="pp=4", microbatches=6, skip={"h": (0, 3)})
    for program, other in zip(plain.programs, skips.programs, strict=True):
        assert [*program] == [i for i in other if not isinstance(i, SKIP_MESSAGES)]


def test_a_skip_takes_the_time_of_a_message() -> None:
    plan = qs.compile("gpipe", mesh="pp=3", microbatches=1, skip={"h": (0, 2)})
    costs = qs.Costs(p2p=5.0)
    spans = {str(span.instruction): span.end - span.start for row in plan.simulate(costs).timeline for span in row}
    assert spans["SendSkip(stage=0, microbatch=0, peer=2, skip=h)"] == 5.0
    beside = qs.compile("gpipe", mesh="pp=3", microbatches=1).simulate(costs).makespan
    assert plan.simulate(costs).makespan == beside  # it is there before the activation that went through stage 1
    late = qs.compile("gpipe", mesh="pp=2", microbatches=1, skip={"h": (0, 1)})
    assert (
        late.simulate(costs).makespan == qs.compile("gpipe", mesh="pp=2", microbatches=1).simulate(costs).makespan + 10
    )


def test_a_skip_is_as_large_as_what_the_stage_leaves_that_makes_it() -> None:
    plan = qs.compile("gpipe", mesh="pp=3", microbatches=1, skip={"h": (0, 1, 2)})
    costs = qs.Costs(p2p=2.0, message=(3.0, 1.0, 1.0))
    spans = {str(span.instruction): span.end - span.start for row in plan.simulate(costs).timeline for span in row}
    skips = [length for name, length in spans.items() if "Skip" in name]
    assert skips == [6.0] * 8


@pytest.mark.parametrize(
    ("i", "words"),
    [
        (SendSkip(0, 0, 2, "k"), "the plan has no skip 'k'"),
        (SendSkip(0, 0, 0, "h"), "its peer is rank 0 itself"),
        (SendSkip(0, 0, 1, "h"), "stage 0 does not exchange the skip 'h' with rank 1, but with rank 2"),
        (RecvSkip(0, 0, 2, "h"), "stage 0 exchanges nothing of the skip 'h' with another rank there"),
        (SendSkipGrad(0, 0, 2, "h"), "stage 0 exchanges nothing of the skip 'h' with another rank there"),
        (RecvSkipGrad(0, 9, 2, "h"), "microbatch 9 is out of range"),
    ],
)
def test_a_message_of_a_skip_that_nobody_expects_is_malformed(i: SendSkip, words: str) -> None:
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=2, skip={"h": (0, 2)})
    programs = ((i, *plan.programs[0]), *plan.programs[1:])
    verdict = replace(plan, programs=programs).check()
    assert words in verdict.explain()

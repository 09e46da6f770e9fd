"""Messages in one global order: skips beside activations, to each rank once, and their gradients in a chain."""

from __future__ import annotations

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

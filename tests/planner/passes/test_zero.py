"""ZeRO and tied weights: where their instructions stand, and that each of them is needed."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.ir import instruction_set as ops
from quintsched.verify.equivalence import equivalence
from tests.planner.verify.edits import edited, every
from tests.planner.verify.mutants import with_program


def test_the_algebra_sees_sums_that_are_not_there_at_all():
    tied = qs.compile("1f1b", mesh="pp=2", microbatches=2, tied={"embedding": (0, 1)})
    zero = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=2)
    for plan, kind in ((tied, ops.SyncTied), (zero, ops.AllGatherBucket)):
        broken = edited(edited(plan, 0, every(kind, lambda i: [])), 1, every(kind, lambda i: []))
        for stage in range(2):
            words = f"the optimizer steps stage {stage} with another gradient than the sequential program's"
            assert words in equivalence(broken).explain()


PLANS = [
    qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=4, chunks=2, zero=zero, zero_every=every)
    for zero, every in ((1, 1), (2, 1), (2, 3), (3, 1), (3, 2))
] + [qs.compile("zb-h1", mesh="dp=2,ep=2,pp=2", microbatches=3, zero=zero, recompute=1) for zero in (1, 2, 3)]
SHARING = (ops.ReduceScatterBucket, ops.AllGatherBucket, ops.GatherParams, ops.FreeParams)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.title}, every {plan.zero.every}")
def test_whatever_is_dropped_or_doubled_is_found(plan):
    """By the proof; and by the symbolic run, but for a reduction that the next one makes up for."""
    for rank, program in enumerate(plan.programs):
        for index, i in enumerate(program):
            if isinstance(i, SHARING):
                fewer, more = [*program[:index], *program[index + 1 :]], [*program[: index + 1], *program[index:]]
                last = not isinstance(i, ops.ReduceScatterBucket) or replace(i, part=i.part + 1) not in program
                for changed in (fewer, more):
                    broken = with_program(plan, rank, changed)
                    assert not broken.check(profile="tagged").sound, i
                    assert equivalence(broken).holds == (changed is fewer and not last), i

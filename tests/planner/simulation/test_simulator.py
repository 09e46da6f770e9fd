"""Times, bubbles and memory of small plans, each worked out by hand."""

from dataclasses import replace

import pytest

import quintsched as qs
from tests.planner.verify.small_plans import without_care


def test_a_plan_that_cannot_finish_is_not_timed():
    plan = without_care(qs.compile("1f1b", mesh="pp=2", microbatches=4))
    assert plan.simulate().makespan == 15, "free under the channel profile, so it can be timed"
    programs = (plan.programs[0][::-1], plan.programs[1])
    with pytest.raises(qs.UnsoundError, match="not sound"):
        replace(plan, programs=programs).simulate()


def test_the_end_of_a_step_takes_time():
    """The norm waits for all ranks and takes as long as the one with the most to do; each steps on its own."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    simulation = plan.simulate(qs.Costs(clip=(0.5, 2.0), optimizer=(3.0, 1.0)))
    last = [[(s.start, s.end) for s in row[-2:]] for row in simulation.timeline]
    assert last == [[(9, 11), (11, 14)], [(9, 11), (11, 12)]]
    assert simulation.makespan == 14
    assert simulation.busy == (6.0, 6.0)
    assert simulation.bubble == 1 - 12 / 28
    assert simulation.spans == plan.simulate().spans, "a span ends with the last weight gradient"


@pytest.mark.parametrize(("name", "chunks", "slices"), [("interleaved-1f1b", 3, 1), ("seq-1f1b", 1, 3)])
def test_what_is_done_once_is_for_a_whole_rank(name, chunks, slices):
    plan = qs.compile(name, mesh="pp=2", microbatches=2, chunks=chunks, slices=slices)
    idle = plan.simulate().makespan
    assert plan.simulate(qs.Costs(clip=5.0, optimizer=7.0)).makespan == pytest.approx(idle + 12, rel=1e-15)
    stages = len(plan.stage_to_pp)
    listed = plan.simulate(qs.Costs(clip=(1.0,) * stages, optimizer=(2.0,) * stages))
    assert listed.makespan == pytest.approx(idle + 3 * chunks, rel=1e-15)

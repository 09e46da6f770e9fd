"""Schedules with their pairs side by side: how many there are, in which order, and what is refused.

`test_every_schedule.py` proves them at any shape and setting.
"""

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Fwd, Overlap
from quintsched.schedules import all_schedules

SCHEDULES = [schedule.name for schedule in all_schedules() if schedule.overlaps]


@pytest.mark.parametrize("name", SCHEDULES)
def test_most_forwards_have_a_backward_beside_them_and_apart_the_order_is_the_same(name):
    for pp in (2, 4):
        plan, apart = (
            qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=6 * pp, overlap=overlap) for overlap in (True, False)
        )
        forwards = plan.columns.apart.columns.rows_where(Fwd)
        assert len(plan.columns.rows_where(Overlap)) >= 0.6 * len(forwards)
        assert not len(apart.columns.rows_where(Overlap))
        for together, alone in zip(plan.programs, apart.programs, strict=True):
            sides = [side for i in together if i.computes for side in i.sides]
            assert not name.startswith("dualpipe") or sides == [i for i in alone if i.computes]


@pytest.mark.parametrize("value", [1, "yes", None, "true"])
def test_overlap_is_true_or_false(value):
    with pytest.raises(qs.UsageError, match=r"overlap.*give true or false"):
        qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=value)

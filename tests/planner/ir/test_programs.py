"""Programs show columns as sequences of instructions; rows are put in where they belong; a plan is proved once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintsched.ir.instruction_columns import ABSENT, Columns
from quintsched.ir.instruction_set import (
    AllReduceBucket,
    Bwd,
    ClipGrad,
    Fwd,
    GatherParams,
    Instruction,
    OptStep,
    ReduceScatterBucket,
    SendAct,
    ShareMetrics,
    SyncTied,
)
from quintsched.ir.programs import Programs
from quintsched.plan import Plan

NUMBERS = st.integers(-3, 9)
AXES = st.sampled_from([("dp",), ("dp", "cp"), ()])
INSTRUCTIONS = st.one_of(
    st.builds(Fwd, NUMBERS, NUMBERS),
    st.builds(Bwd, NUMBERS, NUMBERS),
    st.builds(SendAct, NUMBERS, NUMBERS, NUMBERS),
    st.builds(GatherParams, NUMBERS),
    st.builds(AllReduceBucket, NUMBERS, NUMBERS, AXES),
    st.builds(ReduceScatterBucket, NUMBERS, NUMBERS, AXES, NUMBERS),
    st.builds(SyncTied, st.sampled_from(["stage", "embedding"]), st.sampled_from([(0, 1), (0, 3)])),
    st.builds(OptStep, st.sampled_from([(0,), (), (1, 2)])),
    st.just(ShareMetrics()),
    st.just(ClipGrad()),
)
PROGRAMS = st.lists(st.lists(INSTRUCTIONS, max_size=6), min_size=1, max_size=4)


@given(one=PROGRAMS, other=PROGRAMS)
def test_they_are_equal_if_their_instructions_are(one, other):
    assert (Programs.from_programs(one) == Programs.from_programs(other)) == (one == other)
    assert Columns.from_programs(one) == Columns.from_programs([[*program] for program in one])


@given(programs=PROGRAMS, data=st.data())
def test_rows_are_put_in_where_they_belong(programs, data):
    columns = Columns.from_programs(programs)
    marks: list[list[Instruction]] = [[] for _ in programs]
    before, expected = [], [list(program) for program in programs]
    for rank, program in enumerate(programs):
        places = sorted(data.draw(st.lists(st.integers(0, len(program)), max_size=3)))
        for number, index in enumerate(places):
            marks[rank].append(Fwd(rank, number))
            before.append(int(columns.first[rank]) + index)
            expected[rank].insert(index + number, Fwd(rank, number))
    if before:
        assert Programs(columns.insert(np.array(before), Columns.from_programs(marks))) == expected
    ends = Columns.from_programs([[ClipGrad()] for _ in programs])
    assert Programs(columns.append(ends)) == [[*program, ClipGrad()] for program in programs]


def test_a_column_says_where_there_is_no_such_field(plan: Plan):
    columns = plan.columns
    assert (columns.peer[columns.rows_where(Fwd, Bwd)] == ABSENT).all()
    assert (columns.column("params") == ABSENT).all()
    assert columns.place(int(columns.first[1])) == (1, 0)


def test_a_plan_is_proved_once(plan: Plan, monkeypatch):
    from quintsched.verify import soundness

    found = plan.check("tagged")
    monkeypatch.setattr(soundness, "_prove", None)
    assert plan.check("blocking", memory_cap=1000).profiles == found.profiles
    assert not plan.check(memory_cap=0).sound
    with pytest.raises(TypeError):
        replace(plan).check()

"""Programs are columns: what may stand in them, what they are equal to, how they are copied; nobody changes them."""

import copy
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_columns import LARGEST, Columns
from quintsched.ir.instruction_set import (
    AllReduceBucket,
    Bwd,
    ClipGrad,
    Compute,
    Fwd,
    GatherParams,
    Instruction,
    OptStep,
    ReduceScatterBucket,
    SendAct,
    ShareMetrics,
    SyncTied,
)
from quintsched.ir.rank_programs import Programs
from quintsched.plan import Plan
from quintsched.verify import soundness

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
    st.sampled_from([ShareMetrics(), ClipGrad()]),
)
PROGRAMS = st.lists(st.lists(INSTRUCTIONS, max_size=6), min_size=1, max_size=4)


@dataclass(frozen=True, slots=True)
class Foreign(Compute):
    """An instruction that no plan knows."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return qs.compile("1f1b", mesh="pp=2,dp=2", microbatches=3, tied={"embedding": (0, 1)})


def beginning_with(plan: Plan, instruction: Instruction) -> Plan:
    first, *others = plan.programs
    return replace(plan, programs=[[instruction, *first[1:]], *others])


REFUSED = [
    (Fwd(True, 0), "stage is True; give a whole number"),
    (Fwd(0, np.bool_(False)), "microbatch is np.False_; give a whole number"),
    (Fwd(0.0, 0), "stage is 0.0; give a whole number"),
    (Fwd("0", 0), "stage is '0'; give a whole number"),
    (Fwd(np.array(0), 0), r"stage is array\(0\); give a whole number"),
    (Fwd(0, 10**40), "microbatch is larger than any number of a plan"),
    (Fwd(np.int64(-(2**63)), 0), "stage is larger than any number of a plan"),
    (Fwd(np.uint64(2**64 - 1), 0), "stage is larger than any number of a plan"),
    (OptStep([0]), r"stages is \[0\]; give a tuple of whole numbers"),
    (OptStep("0"), "stages is '0'; give a tuple of whole numbers"),
    (OptStep(("0",)), r"stages is \('0',\); give a tuple of whole numbers"),
    (OptStep((True,)), r"stages is \(True,\); give a tuple of whole numbers"),
    (AllReduceBucket(0, 0, ["dp"]), r"axes is \['dp'\]; give a tuple of names"),
    (AllReduceBucket(0, 0, "dp"), "axes is 'dp'; give a tuple of names"),
    (AllReduceBucket(0, 0, (0,)), r"axes is \(0,\); give a tuple of names"),
    (SyncTied((0, 1), (0, 1)), r"params is \(0, 1\); give a name"),
    (Foreign(0, 0), r"Foreign\(stage=0, microbatch=0\) is no instruction"),
    (Fwd, "is no instruction"),
    ("Fwd", "'Fwd' is no instruction"),
]


def test_what_belongs_nowhere_is_one_error_with_the_place(plan):
    for instruction, message in REFUSED:
        with pytest.raises(qs.UnsoundError, match="^rank 0 instruction 0.*" + message):
            beginning_with(plan, instruction)
    same = beginning_with(plan, Fwd(np.int64(0), np.uint8(0)))
    assert same == plan
    assert type(same.programs[0][0].stage) is int


@pytest.mark.parametrize("number", [-1, -LARGEST, LARGEST, np.int8(-128), np.uint16(9)])
def test_numbers_that_name_nothing_are_malformed(plan, number):
    for instruction in (Fwd(number, 0), Fwd(0, number), OptStep((int(number),))):
        broken = beginning_with(plan, instruction)
        assert [finding.point for finding in broken.check().findings] == [Point.WELL_FORMED]
        for verb in (broken.simulate, broken.graph):
            with pytest.raises(qs.UnsoundError, match="out of range"):
                verb()


@given(one=PROGRAMS, other=PROGRAMS)
def test_programs_are_equal_if_their_instructions_are(one, other):
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


def test_a_plan_is_proved_once_and_a_copy_with_other_data_anew(plan, monkeypatch):
    for changed in (replace(plan, tied={}), replace(plan, programs=plan.programs[::-1])):
        assert not changed.check().sound
    found = plan.check("tagged")
    monkeypatch.setattr(soundness, "_prove", None)
    assert plan.check("blocking", memory_cap=1000).profiles == found.profiles
    assert not plan.check(memory_cap=0).sound
    with pytest.raises(TypeError):
        replace(plan).check()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan)), replace])
def test_a_copy_is_equal_and_does_all_that_a_plan_does(plan, copied):
    plan.check()
    again = copied(plan)
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert again.check() == plan.check()
    assert again.simulate() == plan.simulate()
    assert again != replace(plan, programs=((), ()))
    assert not again.columns.op.flags.writeable


def test_nobody_can_change_a_plan_behind_its_back(plan):
    columns = plan.columns
    arrays = [columns.first, columns.op, columns.rank, columns.stage, columns.peer, columns.rows_where(Fwd)]
    for array in [*arrays, *columns.columns.values()]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        columns.columns["stage"] = columns.unit
    given = columns.op.copy()
    replace(columns, op=given)
    given[0] = 0  # an array that is given stays the giver's

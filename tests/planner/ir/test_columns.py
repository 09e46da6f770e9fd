"""Programs are columns: what may stand in them, what they are equal to, how they are copied; nobody changes them."""

import copy
import pickle
from dataclasses import dataclass, replace

import numpy as np
import pytest

import quintsched as qs
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_columns import LARGEST
from quintsched.ir.instruction_set import AllReduceBucket, ClipGrad, Compute, Fwd, Instruction, OptStep, SyncTied
from quintsched.plan import Plan


@dataclass(frozen=True, slots=True)
class Foreign(Compute):
    """An instruction that no plan knows."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return qs.compile("1f1b", mesh="pp=2,dp=2", microbatches=3, tied={"embedding": (0, 1)})


def beginning_with(plan: Plan, instruction: Instruction) -> Plan:
    first, *others = plan.programs
    return replace(plan, programs=[[instruction, *first[1:]], *others])


REFUSED = {
    "a bool": (Fwd(True, 0), "stage is True; give a whole number"),
    "numpy's bool": (Fwd(0, np.bool_(False)), "microbatch is np.False_; give a whole number"),
    "a float": (Fwd(0.0, 0), "stage is 0.0; give a whole number"),
    "numpy's float": (Fwd(np.float64(0), 0), r"stage is np.float64\(0.0\); give a whole number"),
    "text": (Fwd("0", 0), "stage is '0'; give a whole number"),
    "nothing": (Fwd(None, 0), "stage is None; give a whole number"),
    "an array": (Fwd(np.array(0), 0), r"stage is array\(0\); give a whole number"),
    "a huge number": (Fwd(0, 10**40), "microbatch is larger than any number of a plan"),
    "a huge number below 0": (Fwd(-(10**40), 0), "stage is larger than any number of a plan"),
    "the smallest int64": (Fwd(np.int64(-(2**63)), 0), "stage is larger than any number of a plan"),
    "the smallest int32": (Fwd(np.int32(-(2**31)), 0), "stage is larger than any number of a plan"),
    "the largest uint64": (Fwd(np.uint64(2**64 - 1), 0), "stage is larger than any number of a plan"),
    "a list of stages": (OptStep([0]), r"stages is \[0\]; give a tuple of whole numbers"),
    "stages as text": (OptStep("0"), "stages is '0'; give a tuple of whole numbers"),
    "no stages as text": (OptStep(""), "stages is ''; give a tuple of whole numbers"),
    "names as stages": (OptStep(("0",)), r"stages is \('0',\); give a tuple of whole numbers"),
    "true as a stage": (OptStep((True,)), r"stages is \(True,\); give a tuple of whole numbers"),
    "stages in stages": (OptStep(((0,),)), r"stages is \(\(0,\),\); give a tuple of whole numbers"),
    "a list of axes": (AllReduceBucket(0, 0, ["dp"]), r"axes is \['dp'\]; give a tuple of names"),
    "axes as text": (AllReduceBucket(0, 0, "dp"), "axes is 'dp'; give a tuple of names"),
    "numbers as axes": (AllReduceBucket(0, 0, (0,)), r"axes is \(0,\); give a tuple of names"),
    "stages as a name": (SyncTied((0, 1), (0, 1)), r"params is \(0, 1\); give a name"),
    "a number as a name": (SyncTied(1, (0, 1)), "params is 1; give a name"),
    "another class": (Foreign(0, 0), r"Foreign\(stage=0, microbatch=0\) is no instruction"),
    "a class that has no letters": (Compute(0, 0), r"Compute\(stage=0, microbatch=0\) is no instruction"),
    "a class": (Fwd, "is no instruction"),
    "a word": ("Fwd", "'Fwd' is no instruction"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_nowhere_is_one_error_with_the_place(plan, name):
    instruction, message = REFUSED[name]
    with pytest.raises(qs.UnsoundError, match="^rank 0 instruction 0.*" + message):
        beginning_with(plan, instruction)


@pytest.mark.parametrize("number", [-1, -LARGEST, LARGEST, np.int8(-128), np.uint16(9)])
def test_numbers_that_name_nothing_are_malformed(plan, number):
    for instruction in (Fwd(number, 0), Fwd(0, number), OptStep((int(number),))):
        broken = beginning_with(plan, instruction)
        assert [finding.point for finding in broken.check().findings] == [Point.WELL_FORMED]
        for verb in (broken.simulate, broken.graph):
            with pytest.raises(qs.UnsoundError, match="out of range"):
                verb()


def test_whole_numbers_of_numpy_are_whole_numbers(plan):
    same = beginning_with(plan, Fwd(np.int64(0), np.uint8(0)))
    assert same == plan
    assert type(same.programs[0][0].stage) is int


def test_too_many_programs_or_too_few_are_malformed(plan):
    for programs in ((), plan.programs[:1], [*plan.programs, ()], [*plan.programs, plan.programs[0]]):
        (finding,) = replace(plan, programs=programs).check().findings
        assert (finding.point, finding.rank) == (Point.WELL_FORMED, None)
    assert not replace(plan, programs=((), ())).check().sound


def test_a_program_is_a_sequence_like_a_tuple(plan):
    program, plain = plan.programs[0], tuple(plan.programs[0])
    bounds = (None, -100, -3, -1, 0, 2, 100)
    for cut in (slice(a, b, step) for a in bounds for b in bounds for step in (None, 1, 2, -1, -3)):
        assert program[cut] == plain[cut]
    assert [program[k] for k in range(-len(plain), len(plain))] == [*plain, *plain]
    assert (program, repr(program)) == (plain, repr(plain))
    assert program == [*plain]
    assert program not in (plain[:-1], (*plain[:-1], ClipGrad()), "text", None)
    assert list(reversed(program)) == [*reversed(plain)]
    assert plan.programs == tuple(map(tuple, plan.programs))
    assert plan.programs[::-1] == (plan.programs[1], plan.programs[0])
    for wrong in (len(plain), -len(plain) - 1):
        with pytest.raises(IndexError):
            program[wrong]
    with pytest.raises(TypeError):
        hash(program)


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


def test_a_copy_with_other_data_is_proved_anew(plan):
    assert plan.check().sound
    assert not replace(plan, tied={}).check().sound
    assert not replace(plan, programs=plan.programs[::-1]).check().sound
    assert plan.check().sound


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

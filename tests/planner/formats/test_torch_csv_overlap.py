"""Forwards and backwards side by side in PyTorch's schedule files: OVERLAP_F_B both ways."""

import re
from collections.abc import Sequence

import pytest

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Bwd, BwdInput, Fwd, Instruction, Overlap
from quintsched.verify.equivalence import equivalence
from tests.planner.formats.torch_files import published, refusal

IN_ONE_CELL = "0F0,1F0,0F1,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n"


def computed(program: Sequence[Instruction]) -> list[Instruction]:
    return [i for i in program if i.computes]


def test_a_forward_and_a_backward_in_one_cell_run_side_by_side():
    imported = torch_csv.loads(IN_ONE_CELL, mesh="pp=1")
    assert computed(imported.plan.programs[0])[2:5] == [Fwd(0, 1), Overlap((1, 1), (1, 0)), Bwd(1, 1)]
    assert imported.notes == ()
    assert equivalence(imported.plan).holds
    assert torch_csv.dumps(imported.plan, compute_only=True) == IN_ONE_CELL


@pytest.mark.parametrize("pair", ["(1B0;1F1)OVERLAP_F_B", " ( 1B0 ; 1F1 )OVERLAP_F_B ", "(1F1;\t1B0)OVERLAP_F_B"])
def test_either_may_stand_first_in_the_brackets(pair):
    plan = torch_csv.loads(IN_ONE_CELL.replace("(1F1;1B0)OVERLAP_F_B", pair)).plan
    assert plan == torch_csv.loads(IN_ONE_CELL).plan


def test_published_pairs_come_back_as_they_were():
    text = published("dualpipev_4rank_10mb")
    plan = torch_csv.loads(text).plan
    assert Overlap((0, 7), (7, 3)) in plan.programs[0]
    cells = [[cell for cell in line.split(",") if cell] for line in text.splitlines()]
    assert [line.split(",") for line in torch_csv.dumps(plan, compute_only=True).splitlines()] == cells


def test_published_pairs_are_ours_but_for_the_first_of_the_last_rank():
    plan = torch_csv.loads(published("dualpipev_4rank_10mb")).plan
    ours = qs.compile("dualpipe-v", mesh="pp=4", microbatches=10, overlap=True)
    *others, (theirs, mine) = zip(*(map(computed, found.programs) for found in (plan, ours)), strict=True)
    assert all(there == here for there, here in others)
    first = mine.index(Overlap((3, 4), (4, 0)))
    assert theirs == [*mine[:first], Fwd(3, 4), Bwd(4, 0), *mine[first + 1 :]]


@pytest.mark.parametrize(
    ("pair", "parts"),
    [
        ("(1F1;1I0)OVERLAP_F_B,1W0", [Fwd(1, 1), BwdInput(1, 0)]),
        ("(1I0;1F1)OVERLAP_F_B,1W0", [BwdInput(1, 0), Fwd(1, 1)]),
    ],
)
def test_beside_an_input_half_a_forward_keeps_its_place(pair, parts):
    imported = torch_csv.loads(IN_ONE_CELL.replace("(1F1;1B0)OVERLAP_F_B", pair), mesh="pp=1")
    assert computed(imported.plan.programs[0])[3:5] == parts
    assert imported.notes == (
        "took 1 OVERLAP_F_B one part after the other, the first in line 1, cell 4 (rank 0, step 3): side by side run a "
        "forward and a whole backward of another microbatch or stage",
    )


def test_a_microbatch_beside_itself_is_computed_one_part_after_the_other():
    imported = torch_csv.loads("0F0,0B0\n(1F0;1B0)OVERLAP_F_B")
    assert computed(imported.plan.programs[1]) == [Fwd(1, 0), Bwd(1, 0)]
    assert imported.notes[0].startswith("took 1 OVERLAP_F_B one part after the other, the first in line 2, cell 1 ")
    assert "line 1, cell 1 (rank 0, step 0): 0B0 comes without 0F0 before it" in refusal("(0B0;0F0)OVERLAP_F_B")


def test_a_counter_example_names_the_cell_as_it_stands():
    with_messages = torch_csv.dumps(torch_csv.loads("0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1").plan)
    broken = with_messages.replace("1RECV_F1,(1F1;1B0)OVERLAP_F_B", "(1B0;1F1)OVERLAP_F_B,1RECV_F1")
    assert broken != with_messages
    message = refusal(broken)
    assert "needs the output of stage 0, microbatch 1" in message
    assert "in the file:\n  line 2, cell 3 (rank 1, step 2): (1B0;1F1)OVERLAP_F_B" in message


@pytest.mark.parametrize("schedule", ["dualpipe-v", "interleaved-1f1b"])
def test_weights_that_a_file_leaves_gathered_are_freed(schedule):
    plan = qs.compile(schedule, mesh="dp=2,pp=2", microbatches=4, zero=3, zero_every=4, overlap=True)
    text = torch_csv.dumps(plan)
    *_, last = re.finditer(r",\dRESHARD", text)
    imported = torch_csv.loads(text[: last.start()] + text[last.end() :], mesh=plan.mesh, zero=3)
    assert imported.plan.programs == plan.programs
    assert imported.notes[0].startswith("added 1 RESHARD")

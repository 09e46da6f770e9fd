"""Forwards beside backwards (OVERLAP_F_B) and gatherings of weights in PyTorch's schedule files, both ways."""

from collections.abc import Sequence

import pytest

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Bwd, FreeParams, Fwd, GatherParams, Instruction, Overlap
from quintsched.verify.equivalence import equivalence
from tests.helpers.refusals import require_refusals
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
    for pair in ("(1B0;1F1)OVERLAP_F_B", " ( 1B0 ; 1F1 )OVERLAP_F_B ", "(1F1;\t1B0)OVERLAP_F_B"):
        assert torch_csv.loads(IN_ONE_CELL.replace("(1F1;1B0)OVERLAP_F_B", pair)).plan == imported.plan


def test_published_pairs_come_back_as_they_were():
    text = published("dualpipev_4rank_10mb")
    plan = torch_csv.loads(text).plan
    assert Overlap((0, 7), (7, 3)) in plan.programs[0]
    cells = [[cell for cell in line.split(",") if cell] for line in text.splitlines()]
    assert [line.split(",") for line in torch_csv.dumps(plan, compute_only=True).splitlines()] == cells


SHARDED = ("titan_example_interleaved_2rank_4mb_comms", "titan_interleaved1f1b_8ranks_16mb_comms")


def weights(plan: qs.Plan) -> list[list[tuple[str, int]]]:
    """Return the gathers and frees of weights of each rank, in order."""
    return [[(i.op, i.stage) for i in p if isinstance(i, GatherParams | FreeParams)] for p in plan.programs]


@pytest.mark.parametrize("name", SHARDED)
def test_published_gatherings_of_weights_are_kept_where_replicas_share_them_out(name):
    text = published(name)
    lines = text.splitlines()
    imported = torch_csv.loads(text, mesh=f"dp=2,pp={len(lines)}", zero=3)
    for line, found in zip(lines, weights(imported.plan), strict=True):
        said = [cell for cell in line.split(",") if "SHARD" in cell]
        words = [f"{stage}{'UNSHARD' if op == 'GatherParams' else 'RESHARD'}" for op, stage in found]
        assert [word for word in words if word in said] == said
        assert len(words) == 2 * sum("UNSHARD" in cell for cell in said)
    assert imported.notes == (
        f"added {len(lines)} RESHARD, after the last use of weights that the file leaves to FSDP to free",
    )
    assert imported.verdict.sound
    assert equivalence(imported.plan).holds
    written = torch_csv.dumps(imported.plan)
    again = torch_csv.loads(written, mesh=imported.plan.mesh, zero=3)
    assert again.plan.programs == imported.plan.programs
    assert again.notes == ()
    assert torch_csv.dumps(again.plan) == written
    for how in ({}, {"mesh": f"dp=2,pp={len(lines)}", "zero": 1}):
        whole = torch_csv.loads(text, **how)
        assert not any(weights(whole.plan))
        more = "; zero 3 keeps them" if how else ""
        assert whole.notes[0].endswith(f"in this plan a stage keeps its full weights{more}")


def test_what_torch_cannot_share_out():
    words = {1: r"ZeRO-1.*weights as well \(3\)", 2: "ZeRO-2", 3: "every 1 microbatch .* zero_every 4"}
    for zero, why in words.items():
        plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=4, zero=zero)
        require_refusals((why, lambda plan=plan: torch_csv.dumps(plan)))


def test_weights_that_are_used_before_they_are_gathered_are_refused():
    text = published(SHARDED[0]).replace("0UNSHARD,", "", 1)
    message = refusal(text, mesh="dp=2,pp=2", zero=3)
    assert "data flow: rank 0 instruction 1, Fwd(stage=0, microbatch=0)" in message
    assert "in the file:\n  line 1, cell 2 (rank 0, step 1): 0F0" in message
    require_refusals(
        ("ZeRO-3 shares out over replicas; the mesh pp=2 has none", lambda: torch_csv.loads(text, zero=3)),
        ("zero is 4", lambda: torch_csv.loads(text, zero=4)),
    )

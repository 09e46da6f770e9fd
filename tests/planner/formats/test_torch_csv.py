"""PyTorch's schedule files, read strictly, proved, and written, with pairs and gatherings; and both ways round."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched import torch_csv
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_set import (
    AllReduceBucket,
    Bwd,
    FreeParams,
    Fwd,
    GatherParams,
    Instruction,
    Message,
    OptStep,
    Overlap,
)
from quintsched.ir.layout import Route
from quintsched.verify.equivalence import equivalence
from tests.helpers.refusals import require_refusals
from tests.planner.drawn_requests import shapes

PUBLISHED = Path(__file__).parents[2] / "data" / "torch_csv"
SCHEDULES = qs.all_schedules()
"""Ours; other tests add their own later."""

FREE_FROM = {
    "titan_example_interleaved_2rank_4mb_comms": "channel",
    "titan_interleaved1f1b_8ranks_16mb_comms": "pair-stream",
}
"""The strictest profile under which a published file is free of deadlock; the others are free under all."""

CROSSES = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"

OLDER_ALPHABET = {
    "titan_4-rank_bf3319a": "line 1, cell 14 (rank 0, step 13): 4W0 is half of a backward, but 4B0 in line 1, ",
    "titan_8-rank_bf3319a": "line 1, cell 12 (rank 0, step 11): 0W0 is half of a backward, but 0B0 in line 1, ",
    "titan_zb_283f3ae": "line 1, cell 10 (rank 0, step 9): 7W0 is half of a backward, but 7B0 in line 1, cell 9 ",
}


def published(name: str) -> str:
    return (PUBLISHED / f"{name}.csv").read_text()


def refusal(text: str, **options) -> str:
    with pytest.raises(qs.InputError) as caught:
        torch_csv.loads(text, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(path.stem for path in PUBLISHED.glob("*.csv")))
def test_published_files_are_sound_under_the_profiles_their_readme_names_or_refused_with_the_place(name):
    text, order, first = published(name), list(PROFILES), FREE_FROM.get(name, "blocking")
    if name in OLDER_ALPHABET:
        assert refusal(text).startswith(OLDER_ALPHABET[name])
        assert "older alphabet" in refusal(text)
        return
    assert torch_csv.loads(text, profile=first).verdict.sound
    for profile in order[: order.index(first)]:
        message = refusal(text, profile=profile)
        assert f"deadlock: under the transport profile {profile!r}" in message
        assert "in the file:\n  line " in message


FAULTS = [
    ("0F0x,0B0", "line 1, cell 1 (rank 0, step 0): '0F0x' is no action; torch reads it as '0F0'; write a stage"),
    ("0F0,2BW0", "line 1, cell 2 (rank 0, step 1): '2BW0' is no action; torch reads it as '2B'"),
    ("0F0,0B0\n1F0,,-1B0", "line 2, cell 3 (rank 1, step 2): '-1B0' is no action; write"),
    ("0F00,0B0", "'0F00' is no action; write a stage"),
    ("0F٣,0B0", "'0F٣' is no action; write a stage"),
    ("\ufeff0F0,0B0", "line 1, cell 1"),
    ("0F0\r0B0", "'0F0\\r0B0' is no action"),
    ("0F" + "9" * 9999, "999999999…' is no action"),
    ("0F,0B0", "line 1, cell 1 (rank 0, step 0): 0F lacks its microbatch"),
    ("0F0,0B0,0REDUCE_GRAD0", "line 1, cell 3 (rank 0, step 2): 0REDUCE_GRAD0 is about a whole stage"),
    ("(0F0;0W0)OVERLAP_F_B", "'(0F0;0W0)OVERLAP_F_B' overlaps other things than a forward and a backward"),
    ("(0F0;0B0x)OVERLAP_F_B", "'0B0x' is no action"),
    ("", "line 1 (rank 0) computes nothing"),
    ("0F0,0B0\n\n1F0,1B0", "line 2 (rank 1) computes nothing; each line is a pipeline rank with a stage"),
    ("0F0,0F0,0B0", "line 1, cell 2 (rank 0, step 1): 0F0 is already in line 1, cell 1 (rank 0, step 0)"),
    ("0F0,0B0\n1F0,0B0", "line 2, cell 2 (rank 1, step 1): 0B0 is already in line 1, cell 2"),
    ("0F0,0B0\n1F0,1B0,0I1", "line 2, cell 3 (rank 1, step 2): 0I1 is of stage 0, which rank 0 computes: see 0F0"),
    ("0F0,0B0,3SEND_F0", "3SEND_F0 is of stage 3, which no rank computes"),
    ("0F0,0B0\n2F0,2B0", "line 2, cell 2 (rank 1, step 1): 2B0 is there, but nothing of stage 1; they are"),
    ("0F0,0F9,0B0,0B9", "line 1, cell 2 (rank 0, step 1): 0F9 is there, but nothing of microbatch 1"),
    ("\n".join([",".join(f"0F{m}" for m in range(99)), *(f"{s}B0" for s in range(1, 99))]), "197 actions, too few for"),
    ("0F0,0F1,0I0,0W1,0W0,0I1", "line 1, cell 4 (rank 0, step 3): 0W1 comes without 0I1 before it"),
    ("0B0,0F0", "line 1, cell 1 (rank 0, step 0): 0B0 comes without 0F0 before it"),
    ("0F0,0I0,0W0,0F1,0B1,0W1", "line 1, cell 6 (rank 0, step 5): 0W1 is half of a backward, but 0B1 in line 1"),
]


def test_faults_of_the_file_are_said_with_their_place():
    for text, message in FAULTS:
        assert message in refusal(text)


ACCEPTED = [
    (("1RECV_F0,1F0", "1F0,1RECV_F0"), "needs the output of stage 0", "line 2, cell 1 (rank 1, step 0): 1F0"),
    (("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"), "channel 0→1, message 0", "line 2, cell 1 (rank 1, step 0)"),
    ((",0RECV_B0,0B0,0RECV_B1", ",0RECV_B1,0B0,0RECV_B0"), "channel 1→0, message 0", "line 1, cell 5"),
    ((",1SEND_B1", ""), "1 sends but 2 receives", "line 1, cell 7"),
    (("1SEND_B1", "1SEND_F1"), "the route begins or ends here", "line 2, cell 8 (rank 1, step 7): 1SEND_F1"),
    (("1SEND_B1", "1SEND_B2"), "microbatch 2 is out of range", "line 2, cell 8 (rank 1, step 7): 1SEND_B2"),
    ((",1B1", ""), "complete: rank 1 runs Bwd(stage=1, microbatch=1) 0 times", "line 2, cell 7"),
    (("0SEND_F0,", "0RECV_B0,0SEND_F0,"), "is already in", ""),
]


@pytest.mark.parametrize(("change", "message", "cell"), ACCEPTED, ids=[message for _, message, _ in ACCEPTED])
def test_faults_that_torch_accepts_are_refused_with_their_place(change, message, cell):
    assert torch_csv.loads(CROSSES).verdict.sound
    assert change[0] in CROSSES
    said = refusal(CROSSES.replace(*change))
    assert message in said
    assert cell in said


def test_reductions_stand_where_the_file_says():
    text = "0F0,2F0,2B0,2REDUCE_GRAD,0B0,0REDUCE_GRAD\n1F0,1B0\n"
    assert "line 2, cell 2 (rank 1, step 1): 1B0 is the last backward of stage 1, but no 1REDUCE_GRAD" in refusal(text)
    early = CROSSES.replace("1B1,1SEND_B1", "1REDUCE_GRAD,1B1,1SEND_B1").replace("0B1\n", "0B1,0REDUCE_GRAD\n")
    assert "line 2, cell 7 (rank 1, step 6): 1REDUCE_GRAD comes before 1B1 in line 2, cell 8" in refusal(early)
    placed = CROSSES.replace("1B1,1SEND_B1", "1B1,1REDUCE_GRAD,1SEND_B1").replace("0B1\n", "0B1,0REDUCE_GRAD\n")
    for mesh in (None, "pp=2"):
        assert not reductions(torch_csv.loads(placed, mesh=mesh).plan)
    plan = torch_csv.loads(placed, mesh="dp=2,pp=2,cp=2").plan
    assert reductions(plan) == [AllReduceBucket(0, 0, ("dp", "cp")), AllReduceBucket(1, 0, ("dp", "cp"))]
    assert [type(i) for i in plan.programs[1][-5:-3]] == [AllReduceBucket, type(plan.programs[1][-4])]
    assert isinstance(plan.programs[1][-4], Message)
    experts = torch_csv.loads(placed, mesh="dp=2,pp=2,ep=2").plan
    assert [(i.bucket, i.axes) for i in reductions(experts)] == [(0, ("dp", "ep")), (1, ("dp",))] * 2
    ours = torch_csv.loads(CROSSES, mesh="dp=2,pp=2").plan
    assert len(reductions(ours)) == 2, "where the file says nothing, our pass places them"
    bare = torch_csv.loads("0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD", mesh="dp=2,pp=2").plan
    assert bare == torch_csv.loads("0F0,0B0\n1F0,1B0", mesh="dp=2,pp=2").plan


def reductions(plan: qs.Plan) -> list[AllReduceBucket]:
    return [i for program in plan.programs for i in program if isinstance(i, AllReduceBucket)]


def test_a_mesh_that_does_not_fit():
    lines = "the mesh dp=2,pp=4 has 4 pipeline ranks, but the file has 2 lines"
    require_refusals(
        (lines, lambda: torch_csv.loads(CROSSES, mesh="dp=2,pp=4")),
        ("unknown transport profile", lambda: torch_csv.loads(CROSSES, profile="chanel")),
    )


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


def test_weights_that_are_used_before_they_are_gathered_are_refused():
    text = published(SHARDED[0]).replace("0UNSHARD,", "", 1)
    message = refusal(text, mesh="dp=2,pp=2", zero=3)
    assert "data flow: rank 0 instruction 1, Fwd(stage=0, microbatch=0)" in message
    assert "in the file:\n  line 1, cell 2 (rank 0, step 1): 0F0" in message
    require_refusals(
        ("ZeRO-3 shares out over replicas; the mesh pp=2 has none", lambda: torch_csv.loads(text, zero=3)),
        ("zero is 4", lambda: torch_csv.loads(text, zero=4)),
    )


def test_waits_stand_behind_what_they_wait_for():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    text = torch_csv.dumps(plan, waits=True)
    assert text == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,"
        "1WAIT_SEND_B1\n"
    )
    back = torch_csv.loads(text, mesh=plan.mesh)
    assert back.notes == (
        "left out 6 waits, the first in line 1, cell 7 (rank 0, step 6): a run waits where it must itself",
    )
    assert back.plan.programs == plan.programs


def test_a_wait_without_what_it_waits_for_is_refused():
    other = "\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    for text, wrong in (
        ("0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_B0" + other, "0WAIT_SEND_B0 comes without 0SEND_B0"),
        ("0WAIT_SEND_F0,0F0,0SEND_F0,0RECV_B0,0B0" + other, "0WAIT_SEND_F0 comes without 0SEND_F0"),
        ("0F0,0B0,0WAIT_REDUCE_GRAD\n", "0WAIT_REDUCE_GRAD comes without 0REDUCE_GRAD"),
        ("0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0WAIT_REDUCE_GRAD\n", "is already in"),
        ("0F0,0B0,0WAIT_SEND_F\n", "lacks its microbatch"),
    ):
        with pytest.raises(qs.InputError, match=wrong):
            torch_csv.loads(text)


@given(
    shape=shapes([found for found in SCHEDULES if found.mode == "train"]), sharded=st.booleans(), pairs=st.booleans()
)
def test_a_plan_comes_back_as_it_went(shape, sharded, pairs):
    """Of any schedule and shape, with pairs side by side or without, its weights shared out or whole."""
    more = {"zero": 3, "zero_every": shape["microbatches"]} if sharded and "dp" in shape["mesh"] else {}
    plan = qs.compile(**shape, **more, overlap=pairs and shape["schedule"].overlaps)
    if len(plan.routes) > 1 or plan.schedule.slices > 1 or {*plan.stage_to_pp} < {*range(plan.mesh.pp)}:
        with pytest.raises(qs.UsageError, match=r"go both ways|cuts microbatches into . slices|holds no stage"):
            torch_csv.dumps(plan)
        return
    how = {"mesh": plan.mesh, "profile": "blocking", "zero": plan.zero.stage}
    for options in ({}, {"compute_only": True}):
        text = torch_csv.dumps(plan, **options)
        back = torch_csv.loads(text, **how)
        assert back.notes == ()
        assert replace(back.plan, schedule=plan.schedule) == plan
        assert torch_csv.dumps(back.plan, **options) == text
    waiting = torch_csv.loads(torch_csv.dumps(plan, waits=True), **how)
    assert waiting.plan.programs == plan.programs


def own(order) -> qs.Schedule:
    return qs.Schedule(name="own", order=order, summary="", bubble="", memory="")


def backwards_first_to_last(rank, shape):
    for m in reversed(range(shape.microbatches)):
        yield Fwd(rank, m)
    for m in range(shape.microbatches):
        yield Bwd(rank, m)


def test_what_torch_cannot_express_is_refused():
    def refused(plan: qs.Plan) -> str:
        with pytest.raises(qs.UsageError, match="torch's pipeline runtime cannot run this plan: ") as caught:
            torch_csv.dumps(plan)
        return str(caught.value)

    assert "cuts microbatches into 2 slices" in refused(qs.compile("seq-1f1b", mesh="pp=4", microbatches=8, slices=2))
    assert "only computes forward" in refused(qs.compile("inference", mesh="pp=2", microbatches=2))
    late = qs.compile(own(backwards_first_to_last), mesh="pp=2", microbatches=2)
    assert "its last stage computes the microbatches in the order [1, 0]" in refused(late)
    for settings, words in (
        ({"recompute": 1}, "it recomputes activations"),
        ({"tied": {"embedding": (0, 1)}}, "tied weights, 'embedding'; torch has no word for that"),
        ({"offload": 1}, "offload"),
        ({"mesh": "dp=2,pp=2", "zero": 1}, "weights as well (3)"),
        ({"mesh": "dp=2,pp=2", "zero": 2}, "it shares out state over replicas (ZeRO-2)"),
        ({"mesh": "dp=2,pp=2", "zero": 3}, "zero_every 4"),
    ):
        assert words in refused(qs.compile("1f1b", **{"mesh": "pp=2", "microbatches": 4} | settings))
    one = qs.compile("gpipe", mesh="pp=1", microbatches=1)
    idle = replace(one, mesh=qs.Mesh(pp=2), programs=(one.programs[0], (*one.programs[0][-3:-1], OptStep(()))))
    assert "rank 1 holds no stage" in refused(idle)
    two = torch_csv.loads("0F0,1F0,1B0,0B0").plan
    swapped = [replace(i, stage=1 - i.stage) if isinstance(i, Fwd | Bwd) else i for i in two.programs[0]]
    other = replace(two, routes=(Route((1, 0), (0,)),), programs=(tuple(swapped),))
    with pytest.raises(qs.UnsoundError, match=r"visits the pieces of the model in the order \[1, 0\]"):
        torch_csv.dumps(other)

"""PyTorch's schedule files, read: strictly, and proved."""

import pytest

import quintsched as qs
from quintsched import torch_csv
from quintsched.graph.transport_ordering_rules import PROFILES
from quintsched.ir.instruction_set import AllReduceBucket, Message
from tests.helpers.refusals import require_refusals
from tests.planner.formats.torch_files import PUBLISHED, published, refusal

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
    ("0F999999999,0B0", "'0F999999999' is no action"),
    ("0F" + "9" * 9999, "999999999…' is no action"),
    ("0F,0B0", "line 1, cell 1 (rank 0, step 0): 0F lacks its microbatch"),
    ("0F0,0B0,0REDUCE_GRAD0", "line 1, cell 3 (rank 0, step 2): 0REDUCE_GRAD0 is about a whole stage"),
    ("(0F0;0W0)OVERLAP_F_B", "'(0F0;0W0)OVERLAP_F_B' overlaps other things than a forward and a backward"),
    ("(0F0;0B0x)OVERLAP_F_B", "'0B0x' is no action"),
    ("(0F0;0B0)", "'(0F0;0B0)' is no action"),
    ("(0F0;)OVERLAP_F_B", "line 1, cell 1 (rank 0, step 0): '' is no action"),
    ("", "line 1 (rank 0) computes nothing"),
    ("0F0,0B0\n\n1F0,1B0", "line 2 (rank 1) computes nothing; each line is a pipeline rank with a stage"),
    ("0F0,0F0,0B0", "line 1, cell 2 (rank 0, step 1): 0F0 is already in line 1, cell 1 (rank 0, step 0)"),
    ("0F0,0B0\n1F0,0B0", "line 2, cell 2 (rank 1, step 1): 0B0 is already in line 1, cell 2"),
    ("0F0,0B0\n1F0,1B0,0I1", "line 2, cell 3 (rank 1, step 2): 0I1 is of stage 0, which rank 0 computes: see 0F0"),
    ("0F0,0B0,3SEND_F0", "3SEND_F0 is of stage 3, which no rank computes"),
    ("0F0,0B0\n2F0,2B0", "line 2, cell 2 (rank 1, step 1): 2B0 is there, but nothing of stage 1; they are"),
    ("0F0,0F9,0B0,0B9", "line 1, cell 2 (rank 0, step 1): 0F9 is there, but nothing of microbatch 1"),
    ("0F9999999,0B9999999", "0F9999999 is there, but nothing of microbatch 0"),
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

"""PyTorch's schedule files, written, and both ways round."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Bwd, Fwd, OptStep
from quintsched.ir.layout import Route
from tests.planner.drawn_requests import shapes
from tests.planner.formats.torch_files import SCHEDULES


def test_what_is_written():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    assert torch_csv.dumps(plan, compute_only=True) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert torch_csv.dumps(plan) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )
    alone = qs.compile("zb-h1", mesh="pp=1", microbatches=2)
    assert torch_csv.dumps(alone) == "0F0,0I0,0W0,0F1,0I1,0W1,0REDUCE_GRAD\n"


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
        ({"mesh": "dp=2,pp=2", "zero": 2}, "it shares out state over replicas (ZeRO-2)"),
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

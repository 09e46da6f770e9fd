"""Runs that are impossible, or would train another model than was meant, are refused with a message beforehand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.ir import instruction_set as ins
from quintsched.ir.layout import Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.passes import TRAIN_PASSES, lower
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.verify import soundness

from .linear_blocks import batch, linear, squared_sum, train
from .toys import sgd

TWO_RANKS = qs.compile("1f1b", mesh="pp=2", microbatches=2)


# ---------------------------------------------------------------- plans


def test_a_send_that_a_host_never_comes_to_is_refused_where_order_is_identity() -> None:
    *last, send, metrics, clip, step = TWO_RANKS.programs[1]
    assert isinstance(send, ins.SendGrad)
    late = replace(TWO_RANKS, programs=(TWO_RANKS.programs[0], (*last, metrics, clip, send, step)))
    assert late.check(profile="tagged").sound
    losses = [outcome.losses for outcome in train(late, [linear] * 2, batch(4))]
    assert losses == [outcome.losses for outcome in train(TWO_RANKS, [linear] * 2, batch(4))]
    with pytest.raises(qs.UnsoundError, match=r"rank 1: 7 ShareMetrics\(\) must end before 9 SendGrad\(") as refusal:
        train(late, [linear] * 2, batch(4), wire="nccl")
    assert "'channel' 2 waits close a circle" in str(refusal.value)
    assert late.check(profile="channel").explain() == str(refusal.value), "a run says what the check says"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_plan_is_proved_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []

    def noted(plan: qs.Plan, *args: Any, **options: Any) -> soundness.Verdict:
        proved.append(plan.mode)
        return check(plan, *args, **options)

    plan, check = qs.compile(schedule, mesh="dp=2,pp=2", microbatches=2), soundness.check
    monkeypatch.setattr(soundness, "check", noted)

    def run(transport: Transport) -> float:
        engine = Engine(plan, [linear] * 2, squared_sum, sgd, dtype=torch.float64, transport=transport)
        return engine.step(*batch(2)).loss.item()

    losses = run_local(4, run)
    assert losses == losses[:1] * 4
    assert proved.count("train") <= 4, "at most once for each rank"


def swapped(instruction: ins.Instruction) -> ins.Instruction:
    """Say stage 1 for 0, and 0 for 1."""
    changes: dict[str, object] = {}
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name == "stage":
            changes["stage"] = 1 - value
        elif field.name == "stages":
            changes["stages"] = tuple(1 - stage for stage in value)
    return replace(instruction, **changes)


def test_a_route_through_the_model_backwards_is_refused() -> None:
    programs = tuple(tuple(map(swapped, program)) for program in TWO_RANKS.programs)
    routes = (Route((1, 0), TWO_RANKS.routes[0].microbatches),)
    plan = replace(TWO_RANKS, stage_to_pp=(1, 0), routes=routes, programs=programs)
    with pytest.raises(qs.UnsoundError, match=r"route 0 visits the pieces of the model in the order \[1, 0\]"):
        train(plan, [linear] * 2, batch(4))


def on_one_rank(
    routes: tuple[Route, ...], order: tuple[ins.Instruction, ...], parts: tuple[int, ...] | None
) -> qs.Plan:
    """Return a plan of two stages, both on the only rank."""
    plan = qs.Plan(
        mode="train",
        schedule=ScheduleSpec("mine", 2, 2, 1, {}),
        mesh=Mesh.parse("pp=1"),
        stage_to_pp=(0, 0),
        routes=routes,
        buckets_per_stage=1,
        programs=(order,),
        stage_to_part=parts,
    )
    return lower(plan, TRAIN_PASSES)


def test_a_route_through_a_part_of_the_model_is_refused() -> None:
    order = (ins.Fwd(0, 0), ins.Fwd(1, 0), ins.Bwd(1, 0), ins.Bwd(0, 0), ins.Fwd(0, 1), ins.Bwd(0, 1))
    plan = on_one_rank((Route((0, 1), (0,)), Route((0,), (1,))), order, None)
    with pytest.raises(qs.UnsoundError, match=r"in the order \[0\]; each route must visit all"):
        train(plan, [linear] * 2, batch(4))


def test_twins_on_one_rank_are_refused() -> None:
    order = (ins.Fwd(0, 0), ins.Bwd(0, 0), ins.Fwd(1, 1), ins.Bwd(1, 1))
    plan = on_one_rank((Route((0,), (0,)), Route((1,), (1,))), order, (0, 0))
    with pytest.raises(qs.UnsoundError, match="stages 0 and 1 hold the same piece of the model, 0, both on pipeline"):
        train(plan, [linear], batch(4))


# ---------------------------------------------------------------- what blocks and losses give


# ---------------------------------------------------------------- recomputation, slices, ties


@pytest.mark.parametrize("names", [["0.weight", "1.weight"], ["0.weight", "3.weight"]])
def test_a_model_that_ties_weights_does_not_go_both_ways(names: list[str]) -> None:
    plan = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
    with pytest.raises(qs.MisfitError, match=r"ties weights \(w\), which a bidirectional schedule cannot"):
        train(plan, [linear] * 4, batch(8), tied={"w": names})

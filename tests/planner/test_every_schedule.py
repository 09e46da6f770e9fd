"""Every schedule with any settings: sound, as the judge says, the sequential gradient, and the same from its file."""

from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings

import quintsched as qs
from quintsched.compiler import compiled_again
from quintsched.formats.plan_columns import pack, unpack
from quintsched.instructions import BEGINS_BACKWARD, Compute, FetchAct, HostCopy, OffloadAct
from quintsched.ir import instruction_set as ops
from quintsched.testing import assert_plan_sound
from tests.planner.drawn_requests import PLAIN, requests
from tests.planner.verify.judge import Judge
from tests.planner.verify.small_plans import LIGHT

Program = tuple[ops.Instruction, ...]


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(asked=requests())
def test_every_schedule_is_sound_with_any_settings(asked: dict[str, Any]) -> None:
    plan = qs.compile(**asked)
    assert_plan_sound(plan)
    judge = Judge(plan)
    assert judge.good, judge.faults
    text = plan.to_json()
    for again in (qs.Plan.from_json(text), qs.Plan.of(unpack(pack(plan)))):
        assert again == plan
        assert again.to_json() == text
    assert "costs" in asked or compiled_again(plan).to_json() == text
    plain = {name: asked[name] for name in PLAIN if name in asked}
    plain |= {"costs": LIGHT} if "costs" in asked and asked["schedule"].searches else {}
    for program, bare in zip(plan.programs, qs.compile(**plain).programs, strict=True):
        sides = tuple(side for i in program for side in i.sides)
        assert_computes_the_same(sides, bare, asked)
        assert_gathered(plan, program)
    if "offload" in asked:
        assert_within_the_cap(plan, asked["offload"])
    if "lend" in asked:
        assert_lent(plan, asked["lend"])


def assert_computes_the_same(sides: Program, bare: Program, asked: dict[str, Any]) -> None:
    """Settings change no computation; recomputations are right for the stages that ask; only overlaps may reorder."""
    again = [i for i in sides if isinstance(i, ops.Recompute)]
    found = [i for i in sides if isinstance(i, Compute) and not isinstance(i, ops.Recompute)]
    wanted = [i for i in bare if isinstance(i, Compute)]
    assert found == wanted or ("overlap" in asked and asked["overlap"] and sorted(map(str, found)) == text_of(wanted))
    every = asked.get("recompute", 0)
    some = asked.get("recompute_microbatches", range(asked["microbatches"]))
    asks = [i for i in wanted if isinstance(i, ops.Fwd) and (every if isinstance(every, int) else every[i.stage])]
    asks = [i for i in asks if i.microbatch // asked["slices"] in some]
    assert text_of(again) == sorted(str(ops.Recompute(i.stage, i.microbatch)) for i in asks)


def text_of(instructions: list[ops.Instruction]) -> list[str]:
    return sorted(map(str, instructions))


def assert_gathered(plan: qs.Plan, program: Program) -> None:
    """Full weights are resident where they are used, of two stages at most (four beside overlaps), none at the end."""
    pairs = any(isinstance(i, ops.Overlap) for i in program)
    resident: set[int] = set()
    for i in program:
        if isinstance(i, ops.GatherParams):
            assert i.stage not in resident
            resident.add(i.stage)
        elif isinstance(i, ops.FreeParams):
            resident.remove(i.stage)
        elif plan.zero.stage == 3:
            assert {side.stage for side in i.sides if isinstance(side, ops.NEEDS_WEIGHTS)} <= resident
        assert len(resident) <= (0 if plan.zero.stage < 3 else 4 if pairs else 2)
    assert not resident
    uses = [i.stage for i in program if isinstance(i, ops.NEEDS_WEIGHTS)]
    runs = bool(uses) + sum(a != b for a, b in pairwise(uses))
    gathers = sum(isinstance(i, ops.GatherParams) for i in program)
    assert pairs or gathers == (runs if plan.zero.stage == 3 else 0)
    shards = {i.stage for i in program if isinstance(i, ops.AllGatherBucket)}
    assert bool(shards) == (plan.zero.stage in (1, 2) and bool(uses))


def assert_within_the_cap(plan: qs.Plan, cap: float) -> None:
    """Offloaded activations come back once; copies run within their bounds, and one at a time on each way."""
    assert max(plan.simulate(LIGHT).peak_activations) <= cap + 1e-9
    gone = [i for program in plan.programs for i in program if isinstance(i, OffloadAct)]
    copies = [i for program in plan.programs for i in program if isinstance(i, HostCopy)]
    assert len({*gone}) == len(gone) == len(copies) / 2
    simulation = plan.simulate(LIGHT.model_copy(update={"host_bandwidth": 0.7}))
    for row in simulation.timeline:
        computed = [(index, span) for index, span in enumerate(row) if span.instruction.computes]
        at = {(type(side), cell(side)): span for _, span in computed for side in span.instruction.sides}
        for kind in (OffloadAct, FetchAct):
            ran = [span for span in row if isinstance(span.instruction, kind)]
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(ran))
        for index, span in enumerate(row):
            i = span.instruction
            if isinstance(i, OffloadAct):
                assert span.start >= at[ops.Fwd, cell(i)].end - 1e-9
                assert span.end <= next(other for place, other in computed if place > index).start + 1e-9
            elif isinstance(i, FetchAct):
                assert span.start >= [other for place, other in computed if place < index][-1].end - 1e-9
                assert span.end <= min(at[k, cell(i)].start for k in BEGINS_BACKWARD if (k, cell(i)) in at) + 1e-9


def assert_lent(plan: qs.Plan, cap: float) -> None:
    """Lent activations come back once; a computation waits until its room is free, and a backward for its own."""
    assert max(plan.simulate(LIGHT).peak_activations) <= cap + 1e-9
    ends = [i for program in plan.programs for i in program if isinstance(i, ops.LOANS)]
    assert len({*ends}) == len(ends) == 4 * len(plan.layout.loans)
    for row in plan.simulate(LIGHT.model_copy(update={"p2p": 0.5, "activation_message": 3.0})).timeline:
        computed = [(index, span) for index, span in enumerate(row) if span.instruction.computes]
        at = {(type(side), cell(side)): span for _, span in computed for side in span.instruction.sides}
        for index, span in enumerate(row):
            i, before = span.instruction, [other for place, other in computed if place < index]
            after = next((other for place, other in computed if place > index), None)
            if isinstance(i, ops.LendAct | ops.ReturnAct):
                assert after is None or span.end <= after.start + 1e-9
                assert isinstance(i, ops.ReturnAct) or span.start >= at[ops.Fwd, cell(i)].end - 1e-9
            elif isinstance(i, ops.HoldAct) and len(before) > 1:
                assert span.start >= before[-2].end - 1e-9
            elif isinstance(i, ops.ReclaimAct):
                assert span.start >= before[-1].end - 1e-9
                assert span.end <= min(at[k, cell(i)].start for k in BEGINS_BACKWARD if (k, cell(i)) in at) + 1e-9


def cell(i: ops.Instruction) -> tuple[int, int]:
    return i.stage, i.microbatch

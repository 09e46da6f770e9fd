"""Costs per microbatch, slice and link, and exchanges: against a naive simulator, and what holds for all of them."""

import json
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Message
from tests.planner.simulation.drawn_costs import HELD, UNITS, costs_file
from tests.planner.simulation.naive import Naive
from tests.planner.verify.small_plans import EACH, OVERLAPPING, SMALL, Recipe


def plans(recipes: Sequence[Recipe] = EACH) -> st.SearchStrategy[qs.Plan]:
    return st.sampled_from(recipes).map(lambda recipe: recipe.plan)


PLAN = plans() | plans([one for one in EACH if one.options.get("slices", 1) > 1 or one.options.get("overlap")])
RANDOM = st.integers(0, 2**32).map(Random)


def read(file: dict[str, Any]) -> qs.Costs:
    return qs.Costs.model_validate_json(json.dumps(file))


@given(random=RANDOM, plan=plans([one for one in (*SMALL, *OVERLAPPING) if "skip" not in one.options]))
def test_a_naive_simulator_agrees(random: Random, plan: qs.Plan) -> None:
    file = costs_file(plan, random)
    simulation, naive = plan.simulate(read(file)), Naive(plan, file).run()
    for rank, row in enumerate(simulation.timeline):
        assert [span.instruction for span in row] == list(plan.programs[rank])
        for index, span in enumerate(row):
            if span.instruction.computes or isinstance(span.instruction, Message):
                assert span.end == pytest.approx(float(naive.ends[rank, index]), rel=1e-12)
        computed = [span for span in row if span.instruction.computes]
        exchange = sum(naive.exchange(span.instruction) for span in computed)
        busy = sum(naive.pure(span.instruction) for span in computed) + exchange
        assert simulation.exchange[rank] == pytest.approx(float(exchange), rel=1e-12)
        assert simulation.busy[rank] == pytest.approx(float(busy), rel=1e-12)
        assert all(a.end <= b.start for a, b in pairwise(computed))
        assert simulation.busy[rank] <= simulation.spans[rank] <= simulation.makespan
    assert simulation.makespan == pytest.approx(float(max(naive.ends.values())), rel=1e-12)
    assert simulation.peak_activations == pytest.approx([float(peak) for peak in naive.peaks()], rel=1e-12, abs=1e-12)
    path = [simulation.timeline[place.rank][place.index] for place in simulation.critical_path]
    assert sum(span.end - span.start for span in path) == pytest.approx(simulation.makespan, rel=1e-12)
    assert 0 <= simulation.bubble <= 1
    assert 0 <= simulation.span_bubble <= 1


@given(data=st.data(), plan=PLAN)
def test_factors_of_1_change_no_bit(data, plan):
    spec, ranks = plan.schedule, len(plan.programs)
    thirds = st.integers(0, 12).map(lambda n: n / 3)  # not exact in floating point
    ones = {"microbatches": [1] * spec.microbatches, "slices": [1] * spec.slices}
    plain = {name: data.draw(thirds) for name in (*UNITS, *HELD, "p2p") if data.draw(st.booleans())}
    rich: dict[str, Any] = dict(plain)
    for name in {*UNITS, *HELD} & plain.keys():
        own = {k: v for k, v in ones.items() if (name, k) != ("keys", "slices") and data.draw(st.booleans())}
        rich[name] = {"stages": plain[name], **own} if data.draw(st.booleans()) else plain[name]
    rich |= {k: v for k, v in ones.items() if data.draw(st.booleans())}
    if "message" not in plain and "p2p" in plain:
        same = {"latency": plain["p2p"]}
        p2p = {**same, "nodes": [0] * ranks, "within": same} if data.draw(st.booleans()) else same
        rich["p2p"] = data.draw(st.sampled_from([plain["p2p"], p2p]))
    one, other = plan.simulate(read(plain)), plan.simulate(read(rich))
    assert one.start.tobytes() == other.start.tobytes()
    assert one.end.tobytes() == other.end.tobytes()
    assert one.summary() == other.summary()


@given(random=RANDOM, plan=plans([recipe for recipe in EACH if recipe.mesh.pp > 1]))
def test_a_slower_link_never_makes_a_step_shorter(random, plan):
    file = costs_file(plan, random, least=0.25)
    source, destination = random.sample(range(len(plan.programs)), 2)
    if not isinstance(file["p2p"], dict):
        file["p2p"] = {}
    ends = {"source": source, "destination": destination}
    others = [link for link in file["p2p"].get("links", []) if ends.items() - link.items()]
    spans = [
        plan.simulate(read(file | {"p2p": file["p2p"] | {"links": [*others, ends | {"latency": latency}]}})).makespan
        for latency in (0.75, 1.5)
    ]
    assert spans[0] <= spans[1]


WIRE = {"latency": 1}
LINK = {"source": 0, "destination": 1, "latency": 1}

BROKEN: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "not JSON"),
    ("[]", ".*object"),
    ({"forward": -1}, "/forward: "),
    ({"weights": 1e101}, "/weights: Input should be at most 1e[+]100"),
    ({"activation": 5e-324}, "/activation: Input should be 0, or at least 1e-100"),
    ({"forward": [1.0, 1e-310]}, "/forward/1: Input should be 0, or at least 1e-100"),
    ({"microbatches": [1e-200]}, "/microbatches/0: Input should be 0, or at least 1e-100"),
    ({"forwards": 1}, "/forwards: unknown key"),
    ({"forward": True}, "/forward: "),
    ({"forward": [1, "x"]}, "/forward/1: Input should be a valid number"),
    ({"forward": {"stage": 1}}, "/forward/stages: Field required"),
    ({"forward": {"stages": 1, "ranks": [1]}}, "/forward/ranks: unknown key"),
    ({"keys": {"stages": 1, "slices": [1]}}, "/keys/slices: unknown key"),
    ({"optimizer": {"stages": 1}}, "/optimizer: "),
    ({"p2p": {"speed": 1}}, "/p2p/speed: unknown key"),
    ({"p2p": {"nodes": [0, 1]}}, "/p2p: give nodes together with within or across"),
    ({"p2p": {"within": WIRE}}, "/p2p: give nodes together with within or across"),
    ({"p2p": {"nodes": [True, 1], "within": WIRE}}, "/p2p/nodes/0: "),
    ({"p2p": {"links": [LINK | {"destination": 0}]}}, "/p2p/links/0: .*rank 0 to itself"),
    ({"p2p": {"links": [{"source": 0}]}}, "/p2p/links/0/destination: Field required"),
    ({"p2p": {"links": [LINK, LINK | {"source": 2}, LINK]}}, "/p2p: links 0 and 2 are both from 0 to 1"),
]


def test_broken_costs_are_one_error_with_the_place(tmp_path):
    path = tmp_path / "costs.json"
    for file, words in BROKEN:
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        with pytest.raises(qs.InputError, match=f"costs.json: {words}"):
            qs.Costs.load(path)


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"exchange": {"stages": [1, 2, 3]}}, "/exchange/stages has 3 values, but the plan has 2 stages"),
    ({"forward": {"stages": 1, "microbatches": [1]}}, "/forward/microbatches has 1 value, but the plan has 4 micro"),
    ({"microbatches": []}, "/microbatches has 0 values, but the plan has 4 microbatches"),
    ({"slices": [1, 2]}, "/slices has 2 values, but the plan has 1 slice"),
    ({"message": [1]}, "/message has 1 value, but the plan has 2 stages"),
    ({"p2p": {"nodes": [0], "across": WIRE}}, "/p2p/nodes has 1 value, but the plan has 2 pipeline ranks"),
    ({"p2p": {"links": [LINK | {"source": 2}]}}, "/p2p/links/0/source is 2, but the plan has 2 pipeline"),
]


def test_costs_for_another_plan_say_where():
    for file, words in MISFITS:
        with pytest.raises(qs.InputError, match=f"^costs: {words}"):
            qs.compile("1f1b", mesh="pp=2", microbatches=4).simulate(read(file))
        with pytest.raises(qs.InputError, match=f"^costs: {words}"):
            qs.compile("zb-auto", mesh="pp=2", microbatches=4, costs=read(file))

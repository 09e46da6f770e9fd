"""Costs per microbatch, slice and link, and exchanges: against a naive simulator, and what holds for all of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd, Message, Overlap, Recompute
from quintsched.plan import Plan
from quintsched.simulation.durations import computation_times, exchange_times
from quintsched.simulation.time_grid import time_grid
from tests.planner.simulation.naive import Naive

EXAMPLE = Path(__file__).parents[3] / "examples" / "costs_two_nodes.json"
UNITS = ("forward", "backward_input", "backward_weight", "recompute", "exchange", "exchange_backward", "message")
HELD = ("activation", "activation_after_input", "activation_checkpointed", "keys")


def shapes() -> Iterator[Plan]:
    """Every schedule in small shapes, with recomputation and overlaps where it takes them."""
    for schedule in [found for found in qs.all_schedules() if found.built_in]:
        for pp, microbatches in ((1, 2), (2, 4), (4, 8)):
            chunks = min(schedule.max_chunks, max(schedule.min_chunks, pp - 1))
            for slices in {1, min(schedule.max_slices, 3)}:
                for recompute, overlap in ((0, False), (1, False), (0, True)):
                    options = {"chunks": chunks, "slices": slices, "recompute": recompute, "overlap": overlap}
                    try:
                        yield qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=microbatches, **options)
                    except qs.UsageError:
                        continue


@cache
def every_plan() -> list[Plan]:
    return list(shapes())


def is_special(plan: Plan) -> bool:
    return plan.schedule.slices > 1 or bool(len(plan.columns.rows_where(Overlap)))


def plans(keep: Callable[[Plan], bool] | None = None) -> st.SearchStrategy[Plan]:
    """Draw one of the plans, or of those to keep; none is compiled before the first is drawn."""
    return st.deferred(lambda: st.sampled_from([plan for plan in every_plan() if keep is None or keep(plan)]))


PLAN = plans() | plans(is_special)
QUARTERS = st.integers(0, 12).map(lambda n: n / 4)
SOME = st.integers(1, 8).map(lambda n: n / 4)
BANDWIDTHS = st.sampled_from([0.25, 0.5, 1, 2, 4])


@st.composite
def costs_files(draw: st.DrawFn, plan: Plan, values: st.SearchStrategy[float] = QUARTERS) -> dict[str, Any]:
    """Draw what a costs file for a plan may say, of computations, messages and activations."""
    spec, ranks = plan.schedule, len(plan.programs)
    lengths = {"stages": len(plan.stage_to_pp), "microbatches": spec.microbatches, "slices": spec.slices}

    def several(what: str, values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=lengths[what], max_size=lengths[what]))

    def cost(name: str) -> Any:
        found: Any = several("stages", values) if draw(st.booleans()) else draw(values)
        if not draw(st.booleans()):
            return found
        factors = ("microbatches",) if name == "keys" else ("microbatches", "slices")
        return {"stages": found, **{f: several(f, SOME) for f in factors if draw(st.booleans())}}

    def wire() -> dict[str, float]:
        found = {"latency": draw(values)} if draw(st.booleans()) else {}
        return found | ({"bandwidth": draw(BANDWIDTHS)} if draw(st.booleans()) else {})

    file: dict[str, Any] = {name: cost(name) for name in (*UNITS, *HELD) if draw(st.booleans())}
    file |= {what: several(what, SOME) for what in ("microbatches", "slices") if draw(st.booleans())}
    if draw(st.booleans()):
        return file | {"p2p": draw(values)}
    file["p2p"] = wire()
    if draw(st.booleans()):
        file["p2p"]["nodes"] = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
        both = draw(st.sampled_from([("within",), ("across",), ("within", "across")]))
        file["p2p"] |= {name: wire() for name in both}
    pairs = [(s, d) for s in range(ranks) for d in range(ranks) if s != d]
    if pairs and draw(st.booleans()):
        named = draw(st.lists(st.sampled_from(pairs), unique=True))
        file["p2p"]["links"] = [{"source": s, "destination": d, **wire()} for s, d in named]
    return file


def read(file: dict[str, Any]) -> qs.Costs:
    return qs.Costs.model_validate_json(json.dumps(file))


@given(data=st.data(), plan=PLAN)
def test_a_naive_simulator_agrees(data, plan):
    file = data.draw(costs_files(plan))
    simulation, naive = plan.simulate(read(file)), Naive(plan, file).run()
    for rank, row in enumerate(simulation.timeline):
        for index, span in enumerate(row):
            if span.instruction.computes or isinstance(span.instruction, Message):
                assert span.end == pytest.approx(float(naive.ends[rank, index]), rel=1e-12)
        computed = [span.instruction for span in row if span.instruction.computes]
        exchange = sum(map(naive.exchange, computed))
        assert simulation.exchange[rank] == pytest.approx(float(exchange), rel=1e-12)
        assert simulation.busy[rank] == pytest.approx(float(sum(map(naive.pure, computed)) + exchange), rel=1e-12)
    assert simulation.makespan == pytest.approx(float(max(naive.ends.values())), rel=1e-12)
    assert simulation.peak_activations == pytest.approx([float(peak) for peak in naive.peaks()], rel=1e-12, abs=1e-12)
    assert_consistent(simulation)


def assert_consistent(simulation: qs.Simulation) -> None:
    plan = simulation.plan
    length = 0.0
    for place in simulation.critical_path:
        span = simulation.timeline[place.rank][place.index]
        length += span.end - span.start
    assert length == pytest.approx(simulation.makespan, rel=1e-12), "the critical path has no gap"
    for rank, row in enumerate(simulation.timeline):
        assert [span.instruction for span in row] == list(plan.programs[rank])
        computed = [span for span in row if span.instruction.computes]
        assert all(a.end <= b.start for a, b in pairwise(computed))
        assert simulation.spans[rank] <= simulation.makespan
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


@given(data=st.data(), plan=plans(lambda plan: len(plan.programs) > 1))
def test_a_slower_link_never_makes_a_step_shorter(data, plan):
    file = data.draw(costs_files(plan, SOME))
    ranks = len(plan.programs)
    source = data.draw(st.integers(0, ranks - 1))
    destination = (source + data.draw(st.integers(1, ranks - 1))) % ranks
    if not isinstance(file["p2p"], dict):
        file["p2p"] = {}
    others = [
        link for link in file["p2p"].get("links", []) if (link["source"], link["destination"]) != (source, destination)
    ]
    spans = []
    for latency in (0.75, 1.5):
        link = {"source": source, "destination": destination, "latency": latency}
        changed = copy.deepcopy(file)
        changed["p2p"]["links"] = [*others, link]
        spans.append(plan.simulate(read(changed)).makespan)
    assert spans[0] <= spans[1]


def test_what_differs_in_an_example(tmp_path):
    """The file that the docs show, loaded, fits the plan that they compile."""
    costs = qs.Costs.load(EXAMPLE)
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=8)
    simulation = plan.simulate(costs)
    naive = Naive(plan, json.loads(EXAMPLE.read_text())).run()
    assert simulation.makespan == pytest.approx(float(max(naive.ends.values())), rel=1e-12)
    assert all(exchange > 0 for exchange in simulation.exchange)
    copied = tmp_path / "copied.json"
    copied.write_text(costs.model_dump_json(exclude_none=True))
    assert qs.Costs.load(copied) == costs


def test_the_parts_of_a_computation_can_be_had_alone():
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=3)
    costs = qs.Costs(forward=2.0, exchange=(0.5, 0.25), backward_weight=3.0, microbatches=(1.0, 2.0, 3.0))
    columns = plan.columns
    stages, units = columns.stage[:2], columns.unit[:2]
    assert stages.tolist() == [0, 0]
    assert units.tolist() == [0, 0], "its forward, and the message with it"
    expected = {Fwd: (2, 0.5), Bwd: (4, 0.5), BwdInput: (1, 0.5), BwdWeight: (3, 0), Recompute: (2, 0.5)}
    for kind, (pure, exchange) in expected.items():
        found = (times(kind, stages, units + 2, plan, costs) for times in (computation_times, exchange_times))
        assert [times.tolist() for times in found] == [[3 * pure] * 2, [3 * exchange] * 2]


def test_an_overlap_hides_what_the_other_side_computes_beside():
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4, overlap=True)
    index, _ = next((k, i) for k, i in enumerate(plan.programs[0]) if isinstance(i, Overlap))

    def took(exchange: float, exchange_backward: float) -> float:
        costs = qs.Costs(forward=2, backward_input=3, exchange=exchange, exchange_backward=exchange_backward)
        span = plan.simulate(costs).timeline[0][index]
        return (span.end - span.start) * plan.schedule.chunks

    assert took(0, 0) == 6.0, "the forward's 2, and the backward's 3 and 1"
    assert took(4, 2) == 6.0, "all hidden"
    assert took(5, 2) == 7.0, "of the forward's exchange, what its own 2 leave beside the backward's 4"
    assert took(0, 3) == 7.0
    assert took(5, 7) == 11.0


def test_a_grid_of_very_uneven_costs_is_refused():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=3)
    assert time_grid(plan.simulate(qs.Costs(microbatches=(1e-3, 1.0, 1.0))))
    for factor in (1e-9, 5e-324):
        with pytest.raises(qs.UsageError, match=r"more than \d+ cells.*quintsched render"):
            time_grid(plan.simulate(qs.Costs(microbatches=(factor, 1.0, 1.0))))


WIRE = {"latency": 1}
LINK = {"source": 0, "destination": 1, "latency": 1}
BROKEN: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{", "not JSON"),
    "not a number": ('{"forward": NaN}', "NaN is not a JSON number"),
    "a key twice": ('{"forward": 1, "forward": 2}', "duplicate key 'forward'"),
    "a number that is too large": ('{"forward": 1e999}', "1e999 is too large"),
    "a list": ("[]", ".*object"),
    "a negative number": ({"forward": -1}, "/forward: "),
    "an unknown cost": ({"forwards": 1}, "/forwards: unknown key"),
    "true": ({"forward": True}, "/forward: "),
    "a word": ({"forward": "1"}, "/forward: Input should be a valid number"),
    "a word in a list": ({"forward": [1, "x"]}, "/forward/1: Input should be a valid number"),
    "an unknown form": ({"forward": {"stage": 1}}, "/forward/stages: Field required"),
    "an unknown key": ({"forward": {"stages": 1, "ranks": [1]}}, "/forward/ranks: unknown key"),
    "a list of lists": ({"forward": {"stages": [[1]]}}, "/forward/stages/0: "),
    "a negative factor": ({"forward": {"stages": 1, "slices": [1, -1]}}, "/forward/slices/1: "),
    "an absurd factor": ({"microbatches": [1e10]}, "/microbatches/0: "),
    "a number for factors": ({"microbatches": 2}, "/microbatches: "),
    "slices of keys": ({"keys": {"stages": 1, "slices": [1]}}, "/keys/slices: unknown key"),
    "a form of what is done once": ({"optimizer": {"stages": 1}}, "/optimizer: "),
    "a list of messages": ({"p2p": [1]}, "/p2p: "),
    "an unknown key of wires": ({"p2p": {"speed": 1}}, "/p2p/speed: unknown key"),
    "a negative latency": ({"p2p": {"latency": -1}}, "/p2p/latency: "),
    "no bandwidth": ({"p2p": {"bandwidth": 0}}, "/p2p/bandwidth: "),
    "nodes alone": ({"p2p": {"nodes": [0, 1]}}, "/p2p: give nodes together with within or across"),
    "no nodes": ({"p2p": {"within": WIRE}}, "/p2p: give nodes together with within or across"),
    "a node that is no number": ({"p2p": {"nodes": [True, 1], "within": WIRE}}, "/p2p/nodes/0: "),
    "an unknown key of a wire": ({"p2p": {"nodes": [0], "within": {"links": []}}}, "/p2p/within/links: unknown key"),
    "a link to itself": ({"p2p": {"links": [LINK | {"destination": 0}]}}, "/p2p/links/0: .*rank 0 to itself"),
    "a link to nowhere": ({"p2p": {"links": [{"source": 0}]}}, "/p2p/links/0/destination: Field required"),
    "a negative rank": ({"p2p": {"links": [LINK | {"source": -1}]}}, "/p2p/links/0/source: "),
    "a pair twice": (
        {"p2p": {"links": [LINK, LINK | {"source": 2}, LINK]}},
        "/p2p: links 0 and 2 are both from 0 to 1",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_costs_are_one_error_with_the_place(tmp_path, fault):
    file, words = BROKEN[fault]
    path = tmp_path / "costs.json"
    path.write_text(file if isinstance(file, str) else json.dumps(file))
    with pytest.raises(qs.InputError, match=f"costs.json: {words}"):
        qs.Costs.load(path)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"exchange": {"stages": [1, 2, 3]}}, "/exchange/stages has 3 values, but the plan has 2 stages"),
    "own microbatches": (
        {"forward": {"stages": 1, "microbatches": [1]}},
        "/forward/microbatches has 1 value, but the plan has 4 microbatches",
    ),
    "microbatches": ({"microbatches": []}, "/microbatches has 0 values, but the plan has 4 microbatches"),
    "slices": ({"slices": [1, 2]}, "/slices has 2 values, but the plan has 1 slice"),
    "message": ({"message": [1]}, "/message has 1 value, but the plan has 2 stages"),
    "nodes": ({"p2p": {"nodes": [0], "across": WIRE}}, "/p2p/nodes has 1 value, but the plan has 2 pipeline ranks"),
    "a rank": ({"p2p": {"links": [LINK | {"source": 2}]}}, "/p2p/links/0/source is 2, but the plan has 2 pipeline"),
}


@pytest.mark.parametrize("fault", MISFITS)
def test_costs_for_another_plan_say_where(fault):
    file, words = MISFITS[fault]
    with pytest.raises(qs.InputError, match=f"^costs: {words}"):
        qs.compile("1f1b", mesh="pp=2", microbatches=4).simulate(read(file))
    with pytest.raises(qs.InputError, match=f"^costs: {words}"):
        qs.compile("zb-auto", mesh="pp=2", microbatches=4, costs=read(file))


def test_costs_from_python_take_the_same_forms():
    made = qs.Costs(
        forward={"stages": [1, 2], "microbatches": [1, 2]},
        p2p={"latency": 1, "links": [LINK]},
        slices=[1, 3],
    )
    file = {
        "forward": {"stages": [1, 2], "microbatches": [1, 2]},
        "p2p": {"latency": 1, "links": [LINK]},
        "slices": [1, 3],
    }
    assert made == read(file)
    assert hash(made) == hash(read(file))
    assert qs.Costs(p2p=made.p2p, forward=made.forward, slices=(1, 3)) == made

"""Orders that are searched: zb-auto is no worse than the published tables; `list_schedule` is sound within its cap."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.instructions import Bwd
from quintsched.schedules import find_schedule
from quintsched.schedules.kit import HALVES, WHOLE, linear, list_schedule, loop, v
from quintsched.schedules.zb_auto import _best
from tests.helpers.refusals import require_refusals

DATA = Path(__file__).parents[2] / "data"
PUBLISHED = json.loads((DATA / "zero_bubble_published.json").read_text())["rows"]
CAPPED = json.loads((DATA / "memory_capped.json").read_text())["rows"]
NOT_YET_OPTIMAL = {(4, 3): 32.0, (8, 7): 6953.0}
"""Spans that are found where better ones are known, by pp and cap."""

POSITIVE = st.integers(1, 40).map(lambda n: n / 4)


def planned(P: int, M: int, costs: qs.Costs | None = None, cap: float | None = None) -> qs.Plan:
    return qs.compile("zb-auto", mesh=qs.Mesh(pp=P), microbatches=M, costs=costs, memory_cap=cap)


TIMES = ("forward", "backward_input", "backward_weight", "p2p")


def costs_of(row, names=TIMES, **more) -> qs.Costs:
    return qs.Costs(**{cost: row[name] for cost, name in zip(TIMES, names, strict=True)}, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['m']}")
@pytest.mark.parametrize(("column", "caps"), [("ZB-1p", 1), ("ZB-2p", 2)])
def test_no_worse_than_published(row, column, caps):
    cap, after = float(caps * row["p"]), row["activation_after_input"]
    costs = costs_of(row, ("T_F", "T_B", "T_W", "T_comm"), activation_after_input=after)
    plan = planned(row["p"], row["m"], costs, cap)
    simulation = plan.simulate(costs)
    assert round(simulation.span_bubble, 4) <= row["bubble"][column]
    assert max(simulation.peak_activations) <= cap + 1e-9


@pytest.mark.parametrize("row", CAPPED, ids=lambda row: f"{row['pp']}-{row['cap']}")
def test_near_to_the_best_known_below_pp(row):
    costs = costs_of(row)
    simulation = planned(row["pp"], row["microbatches"], costs, float(row["cap"])).simulate(costs)
    assert max(simulation.peak_activations) <= row["cap"]
    assert simulation.span <= row["zero_bubble_heuristic_span"]
    assert simulation.span <= NOT_YET_OPTIMAL.get((row["pp"], row["cap"]), row["best_known_span"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pp", range(1, 8))
def test_sound_at_every_size(pp):
    for microbatches in (1, 2, pp, 2 * pp - 1, 3 * pp + 2):
        for cap in {1, 2, pp, 2 * pp - 1}:
            simulation = planned(pp, microbatches, cap=float(cap)).simulate()
            assert max(simulation.peak_activations) <= min(cap, microbatches)
            assert simulation.busy == (3.0 * microbatches,) * pp
            if cap >= pp:
                h1 = qs.compile("zb-h1", mesh=qs.Mesh(pp=pp), microbatches=microbatches).simulate()
                assert simulation.span <= h1.span
            if cap >= 2 * pp - 1 <= microbatches:
                assert simulation.span == 3 * microbatches


@settings(max_examples=64)
@given(data=st.data(), P=st.integers(1, 5), M=st.integers(1, 10))
def test_costs_that_differ_per_stage_microbatch_and_link(data, P, M):
    """The cap holds under what each microbatch really holds, and what was planned is what the simulator finds."""

    def values(count: int, values: st.SearchStrategy[float] = POSITIVE) -> tuple[float, ...]:
        return tuple(data.draw(st.lists(values, min_size=count, max_size=count)))

    activation, after, factors = values(P), values(P), values(M)
    costs = qs.Costs(
        forward={"stages": values(P), "microbatches": values(M)},
        backward_input={"stages": 2.0, "microbatches": values(M)},
        backward_weight=values(P, st.integers(0, 40).map(float)),
        exchange={"stages": data.draw(POSITIVE)},
        microbatches=values(M),
        activation={"stages": activation, "microbatches": factors},
        activation_after_input={"stages": after, "microbatches": factors},
        p2p={"latency": data.draw(st.sampled_from([0.0, 0.25, 3.0])), "links": _links(data, P)},
    )
    most = max(*activation, *after) * max(factors)
    cap = most * data.draw(st.sampled_from([1.0, 1.5, 2.0, 4.0, 20.0]))
    simulation = planned(P, M, costs, cap).simulate(costs)
    assert max(simulation.peak_activations) <= cap + 1e-9
    with pytest.raises(qs.UsageError, match="the nearest that works"):
        planned(P, M, costs, most * 0.99)
    at_once = costs.model_copy(update={"p2p": 0.0})
    outcome = _best(find_schedule("zb-auto").shape(P, M, None, 1, at_once, cap))
    assert planned(P, M, at_once, cap).simulate(at_once).makespan <= outcome.makespan * (1 + 1e-12)


def _links(data, P):
    pairs = [(s, d) for s in range(P) for d in range(P) if s != d]
    named = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return [{"source": s, "destination": d, "latency": data.draw(POSITIVE)} for s, d in named]


ROOT = Path(__file__).parents[3]


def scheduled(placement=linear, chunks=1, searches=False, mode="train", routes=None, **how) -> qs.Schedule:
    def order(rank, shape):
        given = {name: value(shape) if name == "memory_cap" else value for name, value in how.items()}
        return list_schedule(shape, routes=routes and routes(shape), **given)[rank]

    sizes = {"min_chunks": chunks, "max_chunks": chunks, "max_slices": 3}
    return qs.Schedule("listed", order, mode=mode, placement=placement, searches=searches, routes=routes, **sizes)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 1), (3, 8), (4, 2), (5, 11)])
def test_the_memory_of_1f1b_makes_it_1f1b(pp, microbatches):
    mine = scheduled(memory_cap=lambda shape: lambda rank: shape.pp - rank)
    found = qs.compile(mine, mesh=f"pp={pp}", microbatches=microbatches)
    assert found.columns == qs.compile("1f1b", mesh=f"pp={pp}", microbatches=microbatches).columns


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    slices=st.integers(1, 3),
    placed=st.sampled_from([(linear, 1), (v, 2), (loop, 2), (v, 3)]),
    passes=st.sampled_from([WHOLE, HALVES]),
    cap=st.floats(1, 6),
    mixed=st.integers(0, 2**20),
)
def test_no_cap_and_no_priority_gets_stuck(pp, microbatches, slices, placed, passes, cap, mixed):
    """Even a priority at random: the oldest microbatch always has room."""
    salted = lambda c: hash((mixed, type(c).__name__, c.stage, c.microbatch))  # noqa: E731
    mine = scheduled(*placed, passes=passes, memory_cap=lambda _: cap, priority=salted)
    plan = qs.compile(mine, mesh=f"pp={pp}", microbatches=microbatches, slices=slices)
    verdict = plan.check(memory_cap=cap + 1e-6)
    assert verdict.sound, verdict.explain()


def test_the_ten_lines_of_the_docs():
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# a schedule by priorities\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    found = SimpleNamespace()
    exec(code, vars(found))
    plan = qs.compile(found.half_v, mesh="pp=4", microbatches=8)
    usual = qs.compile("1f1b", mesh="pp=4", microbatches=8)
    assert max(plan.check().peak_activations) <= max(usual.check().peak_activations) / 2


def test_what_cannot_be_is_refused():
    tight, odd = scheduled(memory_cap=lambda _: 0.5), scheduled(passes=(Bwd,))
    few = r"memory_cap is 0\.5 on rank 0, where one microbatch holds 1; give at"
    require_refusals(
        (few, lambda: qs.compile(tight, mesh="pp=2", microbatches=2)),
        ("passes is none of WHOLE, HALVES", lambda: qs.compile(odd, mesh="pp=2", microbatches=2)),
    )

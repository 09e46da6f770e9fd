"""`list_schedule`: sound at all shapes, within its cap, and what it finds is what papers draw."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.instructions import Bwd
from quintsched.schedules.kit import HALVES, WHOLE, linear, list_schedule, loop, registry, v
from tests.helpers.refusals import require_refusals

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


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def test_the_ten_lines_of_the_docs(registered):
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

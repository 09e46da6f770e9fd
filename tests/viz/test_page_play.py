"""The page's compiler makes the planner's plans, and its explanations of idle time hold when they are tried."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, GatherParams, Instruction
from quintsched.solve import Certificate, certify, solve
from quintsched.viz.page.page_tables import page_tables

from .node import NEEDS_NODE, run_node

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "viz" / "page"

pytestmark = NEEDS_NODE

SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb")
TAKEN_APART = ("zbv", "v-half", "v-min", "bfs", "zb-auto")


def ask(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(question) for question in [{"tables": page_tables()}, *questions])
    return [json.loads(line) for line in run_node("compiled.mjs", text=lines.encode()).splitlines()]


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])  # 17: all sizes, in turn
def test_its_plans_are_those_of_the_planner(every: int) -> None:
    questions = [
        {"name": name, "pp": pp, "microbatches": microbatches, "chunks": chunks, "dp": dp, "zero": zero}
        for name, (dp, zero), microbatches, chunks, pp in product(
            SCHEDULES, ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)), (1, 4, 8), (1, 2, 3), (1, 2, 3, 4)
        )
    ][::every]
    compiled = 0
    for question, found in zip(questions, ask(questions), strict=True):
        mesh = {name: question[name] for name in ("dp", "pp") if name == "pp" or question["dp"] > 1}
        options = {name: question[name] for name in ("microbatches", "chunks", "zero")}
        if "fault" in found:
            with pytest.raises(qs.UsageError):
                qs.compile(question["name"], mesh=qs.Mesh(**mesh), **options)
            continue
        plan = qs.compile(question["name"], mesh=qs.Mesh(**mesh), **options)
        assert qs.Plan.from_json(json.dumps(found["plan"])) == plan, question
        compiled += 1
    assert compiled > 375 // every


def test_plans_that_were_taken_apart_are_the_same_again() -> None:
    plans = [qs.compile(name, mesh="dp=2,pp=3", microbatches=6) for name in TAKEN_APART]
    answers = ask([{"plan": json.loads(plan.to_json())} for plan in plans])
    for plan, found in zip(plans, answers, strict=True):
        assert qs.Plan.from_json(json.dumps(found["plan"])) == plan


def test_each_level_can_be_solved_and_its_floor_is_certified() -> None:
    """Par is reached by an order within the cap; `certify` proves a floor, which is par but in "Half the memory".

    That of gathers follows from all orders of a rank.
    """
    levels = json.loads((PAGE / "levels.json").read_text("utf-8"))
    solutions = json.loads((DATA / "page_levels.json").read_text("utf-8"))
    asked = [
        level | {"orders": orders}
        for level in levels
        for orders in (level["start"], solutions[level["name"]]["orders"])
    ]
    answers = iter(ask(asked))
    best = 0
    for level, start, solution in zip(levels, answers, answers, strict=True):
        costs = qs.Costs(**level["costs"])
        cap, goal = level["cap"], level["goal"]

        def value(found: dict[str, Any], costs: qs.Costs = costs, goal: str = goal) -> float:
            plan = qs.Plan.from_json(json.dumps(found))
            if goal == "gathers":
                return sum(isinstance(i, GatherParams) for program in plan.programs for i in program)
            run = plan.simulate(costs)
            return run.span if goal == "span" else run.makespan

        if start["plan"] is not None:
            assert value(start["plan"]) > level["par"]
        plan = qs.Plan.from_json(json.dumps(solution["plan"]))
        assert plan.check(memory_cap=cap).sound
        assert value(solution["plan"]) == pytest.approx(level["par"])
        if goal == "gathers":
            runs = fewest_runs(level["microbatches"], level["chunks"], cap)
            assert level["par"] == level["pp"] * runs
            best += 1
            continue
        certificate = Certificate(**solutions[level["name"]]["certificate"])
        assert (certificate.objective, certificate.memory_cap) == (goal, cap)
        assert certificate.value == level["par"]
        certify(split(plan), certificate)
        best += certificate.bound >= certificate.value
    assert (len(levels), best) == (14, 13)


def fewest_runs(microbatches: int, chunks: int, cap: float) -> int:
    """Return the fewest runs of one stage in the order of a rank with so many chunks, under a cap: a shortest path.

    A state is the computations done of each kind (forwards of all chunks, then backwards of them), and the last chunk.
    """
    kinds = [*range(chunks), *reversed(range(chunks))]
    fewest = {((0,) * len(kinds), -1): 0}
    states = [*fewest]
    for done, last in states:  # each computation adds 1 to the sum: breadth first meets a state's best before its next
        held = sum(done[:chunks]) - sum(done[chunks:])
        for at, chunk in enumerate(kinds):
            if done[at] == (done[at - 1] if at else microbatches) or (at < chunks and held >= cap * chunks):
                continue
            state = (*done[:at], done[at] + 1, *done[at + 1 :]), chunk
            runs = fewest[done, last] + (chunk != last)
            if state not in fewest:
                states.append(state)
            fewest[state] = min(runs, fewest.get(state, runs))
    return min(runs for (done, _), runs in fewest.items() if min(done) == microbatches)


@pytest.mark.slow
def test_a_par_above_its_certified_floor_is_proved_by_cp_sat() -> None:
    """One more par: no order is faster, which only CP-SAT proves."""
    pytest.importorskip("ortools")
    levels = json.loads((PAGE / "levels.json").read_text("utf-8"))
    (level,) = (level for level in levels if level["name"] == "Half the memory")
    sizes = {"pp": level["pp"], "microbatches": level["microbatches"], "memory_cap": level["cap"]}
    costs, goal = qs.Costs(**level["costs"]), level["goal"]
    found = solve(**sizes, costs=costs, objective=goal, placement="linear", effort=30, seconds=600)
    assert found.proved == level["par"]


def split(plan: qs.Plan) -> qs.Plan:
    """Return a plan with each whole backward as its two halves, which is the form that the solver searches."""

    def halves(i: Instruction) -> tuple[Instruction, ...]:
        cell = getattr(i, "stage", 0), getattr(i, "microbatch", 0)
        return (BwdInput(*cell), BwdWeight(*cell)) if isinstance(i, Bwd) else (i,)

    return replace(plan, programs=tuple(tuple(h for i in program for h in halves(i)) for program in plan.programs))


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_what_a_rank_is_said_to_wait_for_is_what_it_waits_for(tmp_path: Path, count: int) -> None:
    """On random plans: what a sentence names, made shorter, makes the gap shorter by as much."""
    (tmp_path / "tables.json").write_text(json.dumps(page_tables()))
    found = json.loads(run_node("idle.mjs", tmp_path / "tables.json", str(count), "7"))
    assert found["wrongs"] == 0, found["wrong"]
    assert found["shrunk"] == found["named"] > 10 * count
    assert found["kept"] >= 0.95 * found["others"]
    causes = {"warm-up", "cool-down", "imbalance", "message", "order", "cap", "collective"}
    assert found["causes"].keys() == causes

"""The page's programs agree with the planner: verdicts, times, memory, plans; explanations of idle time hold."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, GatherParams, Instruction
from quintsched.simulation.idle_time import IdleTime
from quintsched.simulation.simulator import simulate
from quintsched.solve import Certificate, certify, solve
from quintsched.viz.page.page_tables import page_tables
from tests.planner.simulation.drawn_costs import UNITS, costs_file
from tests.planner.verify.mutants import mutant, reordered
from tests.planner.verify.small_plans import LENDING, OFFLOADED, OVERLAPPING, SMALL, TIED, UNEVEN

from .node import NEEDS_NODE, run_node

RECIPES = (*SMALL, *OFFLOADED, *LENDING, *OVERLAPPING, *UNEVEN, *TIED)
CAP, EXPLAINED = 2.0, 4
"""Memory cap of explanations of idle time; every which plan has them."""

HEADS: dict[str, Any] = {
    "tied": {"w": [0, 1]}, "skips": {"a": [0, 1]}, "losses": [0, 1], "blocks_per_stage": [1, 1], "recompute": [1, 0],
    "zero": {"stage": 1, "every": 1}, "stage_to_part": [0, 1], "communication": "ring",
    "recompute_microbatches": [[0], []],
}  # fmt: skip
"""Entries of a plan's head that most plans lack."""

pytestmark = NEEDS_NODE


def drawn_costs(plan: qs.Plan, random: Random) -> qs.Costs:
    """Draw costs of every form: also of single cells, and what only the planner's simulator and the page know."""
    stages = len(plan.stage_to_pp)

    def number() -> float:
        return random.choice((0.0, 0.5, 1.0, round(random.uniform(0.1, 4), 3)))

    file = costs_file(plan, random)
    for name in random.sample(UNITS, 2):
        cells = [[number() for _ in range(plan.schedule.num_units)] for _ in range(stages)]
        file[name] = {"stages": number(), "cells": cells}
    for name in ("clip", "optimizer", "reduce_scatter", "all_gather", "gather_params"):
        file[name] = random.choice((number(), [number() for _ in range(stages)]))
    file |= {"activation_message": random.choice((number(), [number() for _ in range(stages)]))}
    file |= {"host_latency": number(), "host_bandwidth": random.choice((None, 1.5))}
    return qs.Costs.model_validate(file | {"experts": random.choice((0.0, 0.25)), "pieces": random.choice((1.0, 3.0))})


def cases(count: int, seed: int) -> Iterator[tuple[qs.Plan, qs.Costs]]:
    """Yield small plans of every kind in turn, as they are and with faults, and costs for each."""
    random = Random(seed)
    recipes = [*RECIPES]
    random.shuffle(recipes)
    for number in range(count):
        plan = recipes[number % len(recipes)].plan
        if random.random() > 0.2:
            plan = mutant(plan, random)
        if plan.tied and random.random() < 0.2:
            plan = reordered(plan, random)
        yield plan, drawn_costs(plan, random)


def expected(plan: qs.Plan, costs: qs.Costs, *, explained: bool) -> dict[str, Any]:
    """Return what the planner says, in the form of `answer.mjs`."""
    verdict = plan.check()
    points = {finding.point.value for finding in verdict.findings} - {"deadlock"}
    found: dict[str, Any] = {"points": sorted(points), "profiles": verdict.profiles, "peaks": verdict.peak_activations}
    found["cycles"] = {name: len(cycle) - 1 for name, cycle in verdict.cycles.items()}
    if "well-formed" not in points:
        try:
            run = simulate(plan, costs)
        except qs.UnsoundError:
            found["run"] = None
        else:
            found["run"] = {"start": run.start.tolist(), "end": run.end.tolist(), "makespan": run.makespan}
            found["run"] |= {"bubble": run.bubble, "peaks": run.peak_activations}
            if explained:
                found["run"]["idle"] = [
                    [why.gap.rank, why.gap.start, why.gap.end, why.cause, [*why.ranks]]
                    for gaps in IdleTime(run, CAP).of_ranks()
                    for why in gaps
                ]
    return found


def close(one: Any, other: Any) -> bool:
    return bool(one == pytest.approx(other, rel=1e-12, abs=1e-12))


def answers(asked: list[dict[str, Any]], program: str = "answer.mjs") -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(one) for one in [{"tables": page_tables()}, *asked])
    return [json.loads(line) for line in run_node(program, text=lines.encode()).splitlines()]


def compare(count: int, seed: int) -> Counter[str]:
    """Compare so many plans; return how many of them were what."""
    tried = list(cases(count, seed))
    asked = [
        {"plan": json.loads(plan.to_json()), "costs": costs.model_dump(mode="json")}
        | ({"cap": CAP} if number % EXPLAINED == 0 else {})
        for number, (plan, costs) in enumerate(tried)
    ]
    seen: Counter[str] = Counter()
    for number, ((plan, costs), theirs) in enumerate(zip(tried, answers(asked), strict=True)):
        ours = expected(plan, costs, explained=number % EXPLAINED == 0)
        assert "error" not in theirs, f"{plan!r}: {theirs['error']}"
        said = f"{plan.title}: {plan.check().explain()}"
        if "well-formed" in ours["points"]:
            assert theirs["points"] == ["well-formed"], said
            seen["malformed"] += 1
            continue
        for name in ("points", "profiles"):
            assert theirs[name] == ours[name], f"{name}: {theirs[name]}, not {ours[name]}; {said}"
        assert theirs["cycles"].keys() == ours["cycles"].keys(), said
        assert close(theirs["peaks"], ours["peaks"]), said
        assert (theirs["run"] is None) == (ours["run"] is None), said
        for mine, page in zip(*((run or {}).pop("idle", []) for run in (ours["run"], theirs["run"])), strict=True):
            assert (close(page[:3], mine[:3]), page[3:]) == (True, mine[3:]), f"{mine}; {said}"
            seen["explained"] += 1
        for name, value in (ours["run"] or {}).items():
            assert close(theirs["run"][name], value), f"{name}; {said}"
        seen["sound" if plan.check().sound else "deadlock" if ours["cycles"] else "faulty"] += 1
        seen["cannot finish"] += ours["run"] is None
    return seen


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("count", "seed"), [(60, 1), *(pytest.param(2000, seed, marks=pytest.mark.slow) for seed in range(100, 110))]
)
def test_the_engine_agrees_with_the_planner(count: int, seed: int) -> None:
    seen = compare(count, seed)
    assert seen["sound"] > count // 8
    assert seen["explained"] > count
    assert min(seen[kind] for kind in ("deadlock", "faulty", "malformed")) > count // 30, seen


def changed(value: Any, random: Random) -> Any:
    """Return JSON data with one value in it changed, often to one that other files have there."""
    if isinstance(value, list | dict) and value and random.random() < 0.8:
        kept = [*value] if isinstance(value, list) else {**value}
        place = random.choice(range(len(value)) if isinstance(value, list) else [*value])
        return (
            [*kept[:place], changed(kept[place], random), *kept[place + 1 :]]
            if isinstance(kept, list)
            else {**kept, place: changed(kept[place], random)}
        )
    if isinstance(value, list) and value:
        return random.choice((value[1:], [*value, random.choice(value)], value[::-1], []))
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, 0, 3, 2**24, 2**31))
    return random.choice(("pp", "cp", "train", "forward", None, 1, 1.5, [], {}, [0, 1], {"w": [0, 1]}))


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_plan_that_the_planner_refuses_is_refused(count: int) -> None:
    random, files = Random(count), []
    for recipe in random.choices(RECIPES, k=count):
        file = json.loads(recipe.plan.to_json())
        head = {name: value for name, value in file.items() if name != "programs"}
        for name in random.sample([*head, *HEADS], random.choice((1, 1, 2))):
            head[name] = changed(head[name], random) if name in head else HEADS[name]
        files.append(head | {"programs": file["programs"]})
    taken = 0
    for file, answer in zip(files, answers([{"plan": file, "costs": {}} for file in files]), strict=True):
        refusal = ""
        try:
            qs.Plan.from_json(json.dumps(file))
        except qs.InputError as error:
            refusal = str(error)
        said = answer.get("error", "")
        is_refused = "this is no plan" in said or "well-formed" in answer.get("points", ())
        assert is_refused == bool(refusal), (refusal, said)
        taken += not refusal
    assert taken > count // 20


DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "viz" / "page"
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb")
TAKEN_APART = ("zbv", "v-half", "v-min", "bfs", "zb-auto")


compiled = partial(answers, program="compiled.mjs")


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])  # 17: all sizes, in turn
def test_its_plans_are_those_of_the_planner(every: int) -> None:
    questions = [
        {"name": name, "pp": pp, "microbatches": microbatches, "chunks": chunks, "dp": dp, "zero": zero}
        for name, (dp, zero), microbatches, chunks, pp in product(
            SCHEDULES, ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)), (1, 4, 8), (1, 2, 3), (1, 2, 3, 4)
        )
    ][::every]
    taken = 0
    for question, found in zip(questions, compiled(questions), strict=True):
        mesh = {name: question[name] for name in ("dp", "pp") if name == "pp" or question["dp"] > 1}
        options = {name: question[name] for name in ("microbatches", "chunks", "zero")}
        if "fault" in found:
            with pytest.raises(qs.UsageError):
                qs.compile(question["name"], mesh=qs.Mesh(**mesh), **options)
            continue
        plan = qs.compile(question["name"], mesh=qs.Mesh(**mesh), **options)
        assert qs.Plan.from_json(json.dumps(found["plan"])) == plan, question
        taken += 1
    assert taken > 375 // every


def test_plans_that_were_taken_apart_are_the_same_again() -> None:
    plans = [qs.compile(name, mesh="dp=2,pp=3", microbatches=6) for name in TAKEN_APART]
    again = compiled([{"plan": json.loads(plan.to_json())} for plan in plans])
    for plan, found in zip(plans, again, strict=True):
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
    found = iter(compiled(asked))
    best = 0
    for level, start, solution in zip(levels, found, found, strict=True):
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

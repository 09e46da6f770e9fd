"""Solved plans: as good as the best known, never worse than a named schedule, with bounds that hold."""

import itertools
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

import quintsched as qs
from benchmarks.solve import FOLDER, Instance, instances, updated
from quintsched.errors import UnsoundError, UsageError
from quintsched.formats.plan_file import loads
from quintsched.formats.plan_json import dumps
from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules import Schedule
from quintsched.schedules.kit.stage_placements import v
from quintsched.simulation.costs import Costs
from quintsched.solve import Certificate, LayerCosts, certify, cut_stages, order_search, solve
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.named_placements import PLACEMENTS, routes_of
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.search_problem import Problem, lower_bound, problem_of
from quintsched.solve.starting_orders import named_orders
from tests.helpers.refusals import require_refusals

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("pp", "microbatches", "placement", "cap", "best", "status"),
    [
        (4, 8, "linear", 2, 41.0, "solver-proved"),
        (4, 8, "linear", 3, 31.0, "solver-proved"),
        (8, 16, "linear", 8, 55.0, "certified"),
        (4, 8, "v", 4, 24.0, "certified"),
        (8, 16, "linear", 6, 61.0, "certified"),
        (8, 16, "v", 5, 56.5, "open"),
    ],
)
def test_it_finds_the_best_known(pp, microbatches, placement, cap: float, best: float, status: str) -> None:
    def end_at_best(attempt: order_search.PlacementSearch, seconds: float) -> None:
        if status == "open" and attempt.value <= best * (1 + 1e-9):
            raise KeyboardInterrupt

    sizes = {"pp": pp, "microbatches": microbatches, "placement": placement, "memory_cap": cap}
    found = solve(**sizes, effort=4, seconds=120, told=end_at_best)
    assert found.certificate.value == pytest.approx(best)
    assert found.status == status
    assert found.plan.simulate().span == pytest.approx(best)
    values = [value for _, value, _, _ in found.log]
    assert values == sorted(set(values), reverse=True)
    assert values[-1] == found.certificate.value
    assert max(found.plan.simulate().peak_activations) <= cap
    certified = certify(found.plan, found.certificate)
    assert certified.is_optimal == (status == "certified")


@pytest.mark.parametrize(
    ("pp", "microbatches", "cap", "least"),
    [
        *((2, 2, 1, 9), (2, 2, 2, 6), (2, 4, 1, 17), (2, 4, 2, 12)),
        *((2, 4, 3, 12), (2, 4, 4, 12), (2, 6, 2, 18), (4, 2, 1, 15)),
    ],
)
def test_the_makespan_of_both_ways_is_the_least(pp: int, microbatches: int, cap: int, least: int) -> None:
    """Least makespans at unit costs, by a search through all states of a step, beat by beat."""
    sizes = {"pp": pp, "microbatches": microbatches, "memory_cap": cap, "objective": "makespan"}
    found = solve(**sizes, placement="bidirectional", effort=2, seconds=600)
    timed = found.plan.simulate()
    assert (found.certificate.value, timed.makespan) == (least, least)
    assert found.status != "open"
    assert max(timed.peak_activations) <= cap
    assert found.plan.stage_to_part == (*range(pp),) * 2
    certify(found.plan, found.certificate)


def placed_of(pp: int, placement: str) -> tuple[int, ...]:
    return PLACEMENTS[placement](pp, 2 if placement == "v" else 1)


def drawn(seed: int) -> tuple[dict[str, Any], Costs]:
    """Return an instance with unlike stages, messages and microbatches, and a cap of one to pp of the largest."""
    rng = random.Random(seed)
    placement = ("linear", "v", "bidirectional")[seed % 3]
    pp = rng.choice((2, 4)) if placement == "bidirectional" else rng.choice((2, 3, 4))
    microbatches = pp * rng.choice((1, 2, 4)) if placement == "bidirectional" else rng.randint(2, 2 * pp)
    each = lambda: tuple(rng.uniform(0.5, 2.0) for _ in placed_of(pp, placement))  # noqa: E731
    factor, after = rng.choice((1.0, 2.0)), rng.choice((0.5, 1.0))
    factors = [rng.uniform(1.0, factor) for _ in range(microbatches)]
    times = {name: each() for name in ("forward", "backward_input", "backward_weight")}
    costs = Costs(microbatches=factors, **times, p2p=rng.choice((0.0, 0.2, 3.0)), activation_after_input=after)
    cap = rng.randint(1, pp) * factor
    return {"pp": pp, "microbatches": microbatches, "placement": placement, "memory_cap": cap}, costs


def problem_from(sizes: dict[str, Any], costs: Costs) -> Problem:
    pp, microbatches, placement, cap = sizes.values()
    return problem_of(pp, microbatches, placed_of(pp, placement), costs, cap, routes_of(placement))


@pytest.mark.parametrize("seed", range(60))
def test_no_order_is_below_a_bound(seed: int) -> None:
    problem = problem_from(*drawn(seed))
    found = (schedule_by(problem, policy) for policy in itertools.islice(policies(problem, random.Random(seed)), 60))
    timings = [timing for orders in found if orders and (timing := time_orders(problem, orders))]
    for objective in ("span", "makespan"):
        bound = lower_bound(problem, objective).value  # type: ignore[arg-type]
        assert all(bound <= timing.value(objective) + 1e-9 for timing in timings)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=SLOW) for seed in range(6, 44))])
def test_it_is_never_worse_than_a_named_schedule_and_its_certificate_holds(seed: int) -> None:
    sizes, costs = drawn(seed)
    found = solve(**sizes, costs=costs, effort=1, seconds=2)
    problem, cap = problem_from(sizes, costs), sizes["memory_cap"]
    named = dict(named_orders(problem, costs))
    assert {"linear": "1f1b", "v": "zbv", "bidirectional": "chimera"}[sizes["placement"]] in named
    for name, orders in named.items():
        if not all(has_room(problem, rank, order) for rank, order in enumerate(orders)):
            continue
        timing = time_orders(problem, orders)
        assert timing is not None
        assert found.certificate.value <= timing.value("span") + 1e-9, name
    timed = found.plan.simulate(costs)
    assert timed.span == pytest.approx(found.certificate.value)
    assert max(timed.peak_activations) <= cap + 1e-9
    assert found.certificate.bound <= found.certificate.value
    certify(found.plan, found.certificate)


def interleavings(chains: list[list[int]]) -> list[list[int]]:
    """Return all orders that keep to each chain."""
    if not any(chains):
        return [[]]
    return [
        [chain[0], *rest]
        for number, chain in enumerate(chains)
        if chain
        for rest in interleavings([one[1:] if k == number else one for k, one in enumerate(chains)])
    ]


@pytest.mark.parametrize(
    ("costs", "cap"),
    [
        (None, 1),
        (None, None),
        (Costs(forward=(1.0, 2.5), p2p=0.5), 2),
        (Costs(p2p=3.0, activation_after_input=2.0), 3),
        (Costs(microbatches=(1.0, 3.0), backward_weight=0.0), 3),
    ],
)
@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize("placement", ["linear", "bidirectional"])
def test_it_finds_what_all_orders_tried_one_by_one_find(
    costs: Costs | None, cap: float | None, objective: str, placement: str
) -> None:
    sizes = {"pp": 2, "microbatches": 2, "placement": placement, "memory_cap": cap}
    found = solve(**sizes, costs=costs, objective=objective, effort=1)
    costs, placed = found.certificate.costs, PLACEMENTS[placement](2, 1)
    problem = problem_of(2, 2, placed, costs, cap, len(found.plan.routes))
    units = range(problem.microbatches)
    every = [
        interleavings([[problem.number(kind, stage, k) for kind in range(3)] for stage in stages for k in units])
        for stages in ([stage for stage, where in enumerate(placed) if where == rank] for rank in range(2))
    ]
    each = [[order for order in every[rank] if has_room(problem, rank, order)] for rank in range(2)]
    timings = (time_orders(problem, list(orders)) for orders in itertools.product(*each))
    best = min(timing.value(objective) for timing in timings if timing is not None)  # type: ignore[arg-type]
    assert found.certificate.value == pytest.approx(best)
    assert lower_bound(problem, objective).value <= best + 1e-9  # type: ignore[arg-type]
    assert cap is None or max(found.plan.simulate(costs).peak_activations) <= cap


CLAIMED = {"bound": 12.0, "rank": 0, "reason": "work", "memory_cap": None}


def test_claims_that_do_not_hold_are_refused() -> None:
    found = solve(pp=2, microbatches=4, memory_cap=1, placement="linear", effort=1)
    claim = found.certificate
    other = qs.compile("gpipe", mesh="pp=2", microbatches=4)
    uneven = qs.compile("1f1b", mesh="pp=2", microbatches=4, stages=(1, 3))
    both_ways = qs.compile("chimera", mesh="pp=2", microbatches=4)
    by_work = {"value": both_ways.simulate().span, "memory_cap": None, "reason": "work"}
    assert certify(both_ways, claim.model_copy(update=by_work | {"bound": 12.0})).is_optimal
    wrong: list[tuple[qs.Plan, dict[str, object], str]] = [
        (found.plan, {"value": claim.value - 1}, "its span is"),
        (found.plan, {"bound": claim.bound + 0.5}, "proves .* only"),
        (found.plan, {"rank": 2}, "no pipeline rank 2"),
        (other, {"value": other.simulate().span}, "above the cap of 1"),
        (both_ways, by_work | {"bound": 12.5}, "proves 12 only"),
        (qs.compile(by_turns(4), mesh="pp=2", microbatches=4), {}, "equal parts of stages and microbatches, in order"),
        (qs.compile("inference", mesh="pp=2", microbatches=4), {}, "at most 2 routes are searched"),
        (qs.compile("gpipe", mesh="pp=2", microbatches=4, recompute=1), {}, "its span is 19"),
        (
            qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True),
            {},
            "plans with Overlap, as this one, are not analysed",
        ),
        (qs.compile("1f1b", mesh="pp=2", microbatches=4, stage_to_pp=(0, 0, 1)), {}, "unlike numbers of stages"),
        (qs.compile("1f1b", mesh="pp=2", microbatches=4), {"objective": "makespan", "value": 13}, "its makespan is 15"),
        (uneven, CLAIMED | {"value": uneven.simulate().span}, "proves 6 only"),
    ]
    for plan, changed, why in wrong:
        with pytest.raises(UnsoundError, match=why):
            certify(plan, claim.model_copy(update=changed))
    for broken in ({"value": True}, {"bound": -1.0}, {"rank": 0.5}, {"memory_cap": "2"}):
        with pytest.raises(ValidationError):
            Certificate.model_validate(claim.model_dump() | broken)


def by_turns(microbatches: int) -> Schedule:
    """Return a schedule in which microbatches take both routes in turn."""
    ways = [((0, 1), range(0, microbatches, 2)), ((2, 3), range(1, microbatches, 2))]

    def order(rank: int, shape: object) -> list[Fwd | Bwd]:
        pairs = [(k, stage) for k in range(microbatches) for stage in ways[k % 2][0] if (0, 1, 1, 0)[stage] == rank]
        return [kind(stage, k) for k, stage in pairs for kind in (Fwd, Bwd)]

    return Schedule("by turns", order, placement=lambda pp, chunks: (0, 1, 1, 0), routes=lambda shape: ways)


def numbered_backwards(plan: qs.Plan) -> qs.Plan:
    """Return the plan with its stages numbered from the last one on."""
    data, last = json.loads(dumps(plan)), len(plan.stage_to_pp) - 1
    for i in itertools.chain(*data["programs"]):
        i |= {"stage": last - i["stage"]} if "stage" in i else {}
        i |= {"stages": sorted(last - stage for stage in i["stages"])} if "stages" in i else {}
    every = [last - stage for stage in range(last + 1)]
    data["stage_to_pp"] = [plan.stage_to_pp[stage] for stage in every]
    data["stage_to_part"] = data["routes"][0]["stages"] = every
    return qs.Plan.of(loads(json.dumps(data)))


def test_no_bound_is_certified_where_stages_are_not_in_the_order_of_the_model() -> None:
    plan = numbered_backwards(qs.compile("zb-h1", mesh="pp=3", microbatches=6))
    assert plan.check().sound
    costs = Costs(forward=(1.0, 1.0, 5.0), backward_input=(1.0, 1.0, 5.0), backward_weight=(1.0, 1.0, 5.0))
    claim = Certificate(objective="makespan", value=90.0, bound=92.0, rank=0, reason="fill", costs=costs)
    assert plan.simulate(costs).makespan < claim.bound
    with pytest.raises(UnsoundError, match="in the order of the model"):
        certify(plan, claim)


@pytest.mark.parametrize("cap", [1e30, 1e150, 1.7e308])
@pytest.mark.parametrize("activation", [1e-100, 1.0, 1e100])
def test_a_cap_that_is_never_reached_proves_nothing(cap: float, activation: float) -> None:
    costs = Costs(activation=activation)
    plan = qs.compile("gpipe", mesh="pp=4", microbatches=8)
    claim = Certificate(objective="span", value=33.0, bound=33.0, rank=0, reason="memory", memory_cap=cap, costs=costs)
    with pytest.raises(UnsoundError, match=r"rank 0 by memory proves [08] only|above the cap"):
        certify(plan, claim)
    if 8 * activation <= cap:
        found = solve(pp=2, microbatches=4, memory_cap=cap, placement="linear", costs=costs, effort=1)
        assert (found.certificate.value, found.status) == (12.0, "certified")


def test_ranks_may_have_unlike_caps() -> None:
    found = solve(pp=3, microbatches=6, memory_cap=(3, 2, 2), placement="linear", effort=1, seconds=20)
    assert found.certificate.memory_cap == (3.0, 2.0, 2.0)
    peaks = certify(found.plan, found.certificate).peaks
    assert all(peak <= cap for peak, cap in zip(peaks, (3, 2, 2), strict=True))
    least, most = (
        solve(pp=3, microbatches=6, memory_cap=cap, placement="linear", effort=1, seconds=20).certificate.value
        for cap in (3, 2)
    )
    assert least <= found.certificate.value < most
    for caps, why in (((3, 2), "2 values; give one, or one for each"), ((3, math.inf, 2), "infinite for a rank")):
        with pytest.raises(UsageError, match=why):
            solve(pp=3, microbatches=6, memory_cap=caps)


@pytest.mark.parametrize("placement", ["linear", "loop", "v"])
@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_the_way_of_one_microbatch_is_certified(placement: str, objective: Objective) -> None:
    costs = Costs(p2p=0.3)
    found = solve(pp=4, microbatches=1, placement=placement, costs=costs, objective=objective, effort=1)
    assert found.status == "certified"


def test_units_of_time_and_memory_do_not_change_the_plan() -> None:
    each = lambda seed: tuple(random.Random(seed).uniform(0.2, 3.0) for _ in range(8))  # noqa: E731
    plans = [
        solve(
            pp=4,
            microbatches=8,
            placement="v",
            memory_cap=3 * memory,
            costs=Costs(
                forward=tuple(time * one for one in each(1)),
                backward_input=tuple(time * one for one in each(2)),
                backward_weight=tuple(time * one for one in each(3)),
                activation=memory,
            ),
            effort=1,
            seconds=600,
            told=end_after_lists,
        ).plan
        for time, memory in ((1.0, 1.0), (2.0**-40, 2.0**30))
    ]
    assert plans[0] == plans[1]


def test_policies_leave_as_many_microbatches_free_in_any_unit() -> None:
    found = [
        [policy.caps for policy in itertools.islice(policies(problem, random.Random(0)), 60)]
        for problem in (problem_of(4, 8, v(4, 2), Costs(activation=memory), 3 * memory) for memory in (1.0, 2.0**30))
    ]
    assert found[1] == [tuple(2.0**30 * cap for cap in caps) for caps in found[0]]
    assert {cap for caps in found[0] for cap in caps} == {1.0, 2.0, 3.0}


def end_after_lists(attempt: order_search.PlacementSearch, seconds: float) -> None:
    if attempt.origin == "annealing":
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"pp": 2.0}, "pp is 2.0; give a whole number"),
        ({"seconds": "x"}, "seconds is 'x'; give a number"),
        ({"memory_cap": "2,1"}, "memory_cap is '2,1'; give a number, or a list with one per rank"),
        ({"memory_cap": ("2", 1)}, "memory_cap is a tuple"),
        ({"costs": {"forward": 2.0}}, "costs is a dict; give a Costs"),
        ({"placement": None}, "placement is None; give text"),
        ({"seed": 1.5}, "seed is 1.5; give a whole number"),
        ({"jitter": 0.1}, "jitter is 0.1; give text"),
        ({"mesh": 3, "pp": None}, "mesh is 3; give a Mesh, or text"),
        ({"told": 3}, "told is 3; give a function"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        solve(**{"pp": 2, "microbatches": 2} | wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="certificate is a dict; give a Certificate"):
        certify(qs.compile("gpipe", mesh="pp=2", microbatches=2), {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="schedules is '1f1b'; give a list of names"):
        cut_stages(LAYERS, pp=2, microbatches=2, schedules="1f1b")


LAYERS = LayerCosts.model_validate(
    {"layers": [{"kind": "embedding", "forward": 1}, {"forward": 1, "count": 4}, {"kind": "loss", "forward": 1}]}
)


def test_a_solved_order_of_both_ways_is_a_schedule_of_other_plans(tmp_path: Path) -> None:
    found = solve(pp=4, microbatches=8, placement="bidirectional", memory_cap=4, effort=1, told=end_after_lists)
    path = tmp_path / "solved.json"
    found.plan.save(path)
    assert qs.compile(str(path), mesh="pp=4", microbatches=8) == found.plan == qs.Plan.load(path)
    wide = qs.compile(str(path), mesh="dp=2,pp=4", microbatches=8, zero=1)
    assert wide.check().sound
    assert wide.routes == found.plan.routes


def test_both_ways_are_searched_on_request_and_for_even_sizes_only() -> None:
    assert set(solve(pp=2, microbatches=4, effort=1).bounds) == {"linear", "loop", "v"}
    both_ways = partial(solve, placement="bidirectional")
    require_refusals(
        ("both have to be even", lambda: both_ways(pp=3, microbatches=4)),
        ("both have to be even", lambda: both_ways(pp=2, microbatches=3)),
        ("bidirectional has no chunks; leave chunks=2 out", lambda: both_ways(pp=2, microbatches=4, chunks=2)),
        ("the smallest that works: 1", lambda: both_ways(pp=2, microbatches=4, memory_cap=0.5)),
    )


INSTANCES = dict(instances())


def test_every_kind_has_instances_whose_bounds_hold():
    assert {one.kind for one in INSTANCES.values()} == set(get_args(Instance.model_fields["kind"].annotation))
    assert len(INSTANCES) == len(list(FOLDER.glob("*.json")))
    for path, one in INSTANCES.items():
        assert path.stem.startswith(one.kind)
        placed = PLACEMENTS[one.placement](one.pp, one.chunks)
        sizes = one.pp, one.microbatches, placed, one.costs, one.cap_of_bound, routes_of(one.placement)
        bound = lower_bound(problem_of(*sizes), one.objective)
        assert bound.value <= one.bound.value * (1 + 1e-9), path
        assert one.bound.value <= one.best_known.value * (1 + 1e-9), path
        assert not one.bound.by.startswith("certificate") or one.bound.value == pytest.approx(bound.value), path


@pytest.mark.parametrize("name", ["capped-4-8-linear-3", "unit-4-8-v", "network-4-8-linear-slow"])
def test_the_best_known_is_found_again(name):
    ((_, one),) = instances([name])
    found = one.solved(effort=2, seconds=600)
    assert found.certificate.value <= one.best_known.value * (1 + 1e-9)
    assert updated(one, found).best_known.value == pytest.approx(found.certificate.value)

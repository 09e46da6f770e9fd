"""Solved orders of microbatches that go both ways: optimal where all orders are tried, and as good as named ones."""

import itertools
import random
from collections.abc import Iterator
from itertools import product

import pytest

import quintsched as qs
from quintsched.errors import UnsoundError, UsageError
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd
from quintsched.schedules import Schedule
from quintsched.schedules.kit.stage_placements import bidirectional
from quintsched.simulation.costs import Costs
from quintsched.solve import Solution, certify, solve
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.order_search import Attempt
from quintsched.solve.order_timing import has_room, time_orders
from quintsched.solve.periodic.periodic_orders import periodic_placements
from quintsched.solve.periodic.periodic_patterns import unrolled
from quintsched.solve.search_problem import lower_bound, problem_of

SLOW = pytest.mark.slow
Counts = tuple[tuple[int, int, int], ...]
"""Forwards, input halves and weight halves that are done of each stage: that of route 0, then of route 1, by rank."""


def least_makespan(pp: int, microbatches: int, cap: int) -> int:
    """Return the least makespan of any order at unit costs, by a search through all states of a step, beat by beat."""
    first, last = ((0, 0, 0),) * (2 * pp), ((microbatches // 2,) * 3,) * (2 * pp)
    states, beats = {first}, 0
    while last not in states:
        beats, states = beats + 1, {after for state in states for after in beats_after(state, pp, microbatches, cap)}
    return beats


def beats_after(state: Counts, pp: int, microbatches: int, cap: int) -> Iterator[Counts]:
    """Yield the states one beat after `state`; where two computations wait for nothing, a rank takes either."""
    ranks = bidirectional(pp, 1)
    choices: list[list[tuple[int, int]]] = [[(-1, 0)] for _ in range(pp)]
    for stage, (forwards, halves, weights) in enumerate(state):
        is_first, is_last, rank = stage % pp == 0, stage % pp == pp - 1, ranks[stage]
        held = sum(done[0] - done[2] for done, where in zip(state, ranks, strict=True) if where == rank)
        given = microbatches // 2 if is_first else state[stage - 1][0]
        returned = forwards if is_last else state[stage + 1][1]
        ready = (forwards < given and held < cap, halves < min(returned, forwards), weights < halves)
        choices[rank] += [(stage, kind) for kind in range(3) if ready[kind]]
    for chosen in product(*choices):
        rows = [list(done) for done in state]
        for stage, kind in chosen:
            if stage >= 0:
                rows[stage][kind] += 1
        yield tuple((one, two, three) for one, two, three in rows)


@pytest.mark.parametrize(
    ("pp", "microbatches", "cap"), [(2, 2, 1), (2, 2, 2), *((2, 4, cap) for cap in (1, 2, 3, 4)), (2, 6, 2), (4, 2, 1)]
)
def test_the_makespan_is_the_least_of_all_states(pp: int, microbatches: int, cap: int) -> None:
    sizes = {"pp": pp, "microbatches": microbatches, "memory_cap": cap}
    found = solve(**sizes, placement="bidirectional", objective="makespan", effort=2, seconds=600)
    assert found.certificate.value == least_makespan(pp, microbatches, cap)
    assert found.status != "open"
    require_certified(found, None, cap)


def require_certified(found: Solution, costs: Costs | None, cap: float | None) -> None:
    """Require the plan to take as long, and to hold as much, as its certificate says."""
    timed, claim = found.plan.simulate(costs), certify(found.plan, found.certificate).certificate
    value = timed.span if claim.objective == "span" else timed.makespan
    assert value == pytest.approx(claim.value)
    assert claim.bound <= claim.value
    assert cap is None or max(timed.peak_activations) <= cap + 1e-9
    assert found.plan.stage_to_part == (*range(found.plan.mesh.pp),) * 2


def drawn(seed: int) -> tuple[int, int, Costs, float]:
    """Return ranks, microbatches, costs (of twins that differ, in half of the cases), and a cap."""
    rng = random.Random(seed)
    pp = rng.choice((2, 4))
    stages, microbatches = pp * rng.choice((1, 2)), pp * rng.choice((1, 2, 3, 4))
    forward, half, weight = (tuple(rng.uniform(0.5, 2.0) for _ in range(stages)) for _ in range(3))
    factors = tuple(rng.uniform(1.0, rng.choice((1.0, 2.0))) for _ in range(microbatches))
    costs = Costs(
        forward=forward,
        backward_input=half,
        backward_weight=weight,
        p2p=rng.choice((0.0, 0.2, 3.0)),
        activation_after_input=rng.choice((0.5, 1.0)),
        microbatches=factors,
    )
    return pp, microbatches, costs, rng.randint(1, pp + 1) * max(factors)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=SLOW) for seed in range(3, 24))])
def test_it_is_never_worse_than_a_named_schedule_and_its_certificate_holds(seed: int) -> None:
    pp, microbatches, costs, cap = drawn(seed)
    sizes = {"pp": pp, "microbatches": microbatches, "placement": "bidirectional", "memory_cap": cap}
    found = solve(**sizes, costs=costs, effort=1, seconds=5)
    own = found.certificate.costs
    for name in ("chimera", "dualpipe") if microbatches >= 2 * pp else ("chimera",):
        timed = qs.compile(name, mesh=f"pp={pp}", microbatches=microbatches).simulate(own)
        if max(timed.peak_activations) <= cap:
            assert found.certificate.value <= timed.span + 1e-9, name
    require_certified(found, own, cap)
    problem, kinds = problem_of(pp, microbatches, bidirectional(pp, 1), own, cap, routes=2), (Fwd, BwdInput, BwdWeight)
    for program, peak in zip(found.plan.programs, found.plan.simulate(own).peak_activations, strict=True):
        order = [
            problem.number(kinds.index(type(i)), i.stage, i.microbatch % problem.microbatches)  # type: ignore[union-attr]
            for i in program
            if isinstance(i, kinds)
        ]
        assert max(itertools.accumulate(problem.holds[number] for number in order)) == pytest.approx(peak)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_is_below_a_bound(seed: int) -> None:
    pp, microbatches, costs, cap = drawn(seed)
    if isinstance(costs.forward, tuple) and len(costs.forward) == pp:
        costs = costs.with_stages(lambda name, value: value * 2 if isinstance(value, tuple) else value)
    problem = problem_of(pp, microbatches, bidirectional(pp, 1), costs, cap, routes=2)
    bounds = {objective: lower_bound(problem, objective).value for objective in ("span", "makespan")}  # type: ignore[arg-type]
    tried = [problem.one_by_one]
    for policy in itertools.islice(policies(problem, random.Random(seed)), 60):
        orders = schedule_by(problem, policy)
        if orders is not None:
            assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
            tried.append(tuple(map(tuple, orders)))
    assert len(tried) > 1 or cap < 2 * max(costs.microbatches or (1.0,))
    for orders in tried:
        timing = time_orders(problem, orders)
        assert timing is not None
        for objective, bound in bounds.items():
            assert timing.value(objective) >= bound - 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [2, 3, 4])
def test_orders_that_repeat_keep_to_caps(cap: int) -> None:
    problem = problem_of(4, 64, bidirectional(4, 1), None, cap, routes=2)
    found = [unrolled(problem, one.starts_of(32)) for one in periodic_placements(problem, random.Random(0))]
    timed = [time_orders(problem, orders) for orders in found]
    assert all(has_room(problem, rank, order) for orders in found for rank, order in enumerate(orders))
    assert all(timing is not None and timing.sequence for timing in timed)
    most = {2: 1.4, 3: 1.25, 4: 1.03}[cap] * lower_bound(problem, "span").value
    assert min(timing.value("span") for timing in timed if timing is not None) < most


def test_bounds_are_verified_for_named_schedules_too_and_false_claims_are_refused() -> None:
    found = solve(pp=4, microbatches=8, placement="bidirectional", memory_cap=4, effort=1, told=end_after_lists)
    claim = found.certificate
    named = qs.compile("chimera", mesh="pp=4", microbatches=8)
    honest = claim.model_copy(update={"value": named.simulate().span})
    assert not certify(named, honest).is_optimal
    dualpipe = qs.compile("dualpipe", mesh="pp=4", microbatches=8)
    both_ways = by_turns(4)
    wrong: list[tuple[qs.Plan, dict[str, object], str]] = [
        (found.plan, {"value": claim.value - 1}, "its span is"),
        (found.plan, {"bound": claim.bound + 0.5}, "proves .* only"),
        (found.plan, {"memory_cap": 3.0}, "above the cap of 3"),
        (found.plan, {"rank": 4}, "no pipeline rank 4"),
        (dualpipe, {"value": dualpipe.simulate().span}, "above the cap of 4"),
        (qs.compile(both_ways, mesh="pp=2", microbatches=4), {}, "equal parts of stages and microbatches, in order"),
    ]
    for plan, changed, why in wrong:
        with pytest.raises(UnsoundError, match=why):
            certify(plan, claim.model_copy(update=changed))


def by_turns(microbatches: int) -> Schedule:
    """Return a schedule in which microbatches take both routes in turn."""
    ways = [((0, 1), range(0, microbatches, 2)), ((2, 3), range(1, microbatches, 2))]

    def order(rank: int, shape: object) -> list[Fwd | Bwd]:
        pairs = [(k, stage) for k in range(microbatches) for stage in ways[k % 2][0] if (0, 1, 1, 0)[stage] == rank]
        return [kind(stage, k) for k, stage in pairs for kind in (Fwd, Bwd)]

    return Schedule("by turns", order, placement=lambda pp, chunks: (0, 1, 1, 0), routes=lambda shape: ways)


def end_after_lists(attempt: Attempt, _: float) -> None:
    if attempt.origin == "list schedule":
        raise KeyboardInterrupt


def test_a_solved_order_is_a_schedule_of_other_plans(tmp_path) -> None:
    found = solve(pp=4, microbatches=8, placement="bidirectional", memory_cap=4, effort=1, told=end_after_lists)
    path = tmp_path / "solved.json"
    found.plan.save(path)
    assert qs.compile(str(path), mesh="pp=4", microbatches=8) == found.plan == qs.Plan.load(path)
    wide = qs.compile(str(path), mesh="dp=2,pp=4", microbatches=8, zero=1)
    assert wide.check().sound
    assert wide.routes == found.plan.routes


def test_it_is_searched_on_request_and_for_even_sizes_only() -> None:
    assert set(solve(pp=2, microbatches=4, effort=1).bounds) == {"linear", "loop", "v"}
    for sizes in ({"pp": 3, "microbatches": 4}, {"pp": 2, "microbatches": 3}):
        with pytest.raises(UsageError, match="both have to be even"):
            solve(**sizes, placement="bidirectional")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="placement bidirectional has no chunks; leave chunks=2 out"):
        solve(pp=2, microbatches=4, placement="bidirectional", chunks=2)
    with pytest.raises(UsageError, match="the smallest that works: 1"):
        solve(pp=2, microbatches=4, placement="bidirectional", memory_cap=0.5)

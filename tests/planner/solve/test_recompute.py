"""Plans that recompute or offload: timed as the simulator times them, never worse than without, and certified."""

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

import quintsched as qs
from quintsched.errors import InputError, UnsoundError, UsageError
from quintsched.formats.plan_file import loads
from quintsched.formats.plan_json import dumps
from quintsched.ir.instruction_set import BwdWeight, OffloadAct
from quintsched.ir.mesh import Mesh
from quintsched.schedules.kit.stage_placements import bidirectional, linear, loop, v
from quintsched.simulation.costs import Costs
from quintsched.solve import certify, solve
from quintsched.solve.check_order_certificate import Certificate, value_of
from quintsched.solve.list_policies import policies, schedule_by
from quintsched.solve.order_annealing import random_jump
from quintsched.solve.order_problem import Chosen, Objective
from quintsched.solve.order_search import OrderSearch, PlacementSearch, search
from quintsched.solve.order_timing import has_room, time_orders, timed
from quintsched.solve.recompute_choices import recompute_choices
from quintsched.solve.recompute_offload_or_lend import search_for_room
from quintsched.solve.search_problem import Problem, lower_bound, problem_of
from quintsched.solve.solved_plan import plan_of

OBJECTIVES: tuple[Objective, ...] = ("span", "makespan")


def drawn(seed: int) -> tuple[Problem, Costs, random.Random]:
    """Return a problem of which some stages recompute, in every fourth some microbatches of these, in others both ways.

    Stages, twins among them, microbatches, times and activations are unlike.
    """
    rng = random.Random(seed)
    routes, is_shared = 1 + (seed % 4 == 3), seed % 4 == 1
    pp, microbatches = rng.randint(1, 4 // routes) * routes, rng.randint(1, 6) * routes
    placed = bidirectional(pp, 1) if routes > 1 else rng.choice((linear(pp, 1), loop(pp, 2), v(pp, 2)))
    each = lambda: tuple(rng.uniform(0.3, 2.0) for _ in placed)  # noqa: E731
    costs = Costs(
        microbatches=rng.choice((None, tuple(rng.uniform(0.5, 2.0) for _ in range(microbatches)))),
        forward=each(),
        backward_input=each(),
        backward_weight=rng.choice((0.0, each())),
        recompute=rng.choice((None, 3.0, each())),
        exchange=rng.choice((0.0, 0.3)),
        p2p=rng.choice((0.0, 0.2, 3.0)),
        activation=each(),
        activation_after_input=rng.choice((None, 0.2, each())),
        activation_checkpointed=rng.choice((0.0, 0.1, each())),
    )
    chosen = [tuple(m for m in range(microbatches) if rng.random() < 0.5) for _ in placed]
    choice = [int(bool(some)) for some in chosen] if is_shared else [rng.randint(0, 1) for _ in placed]
    some = tuple(chosen) if is_shared and any(chosen) else ()
    cap = rng.choice((None, 8.0, 12.0))
    more = {"routes": routes, "recompute": choice, "recompute_microbatches": some}
    return problem_of(pp, microbatches, placed, costs, cap, **more), costs, rng


@pytest.mark.parametrize("seed", range(80))
def test_times_memory_and_bounds_are_those_of_the_simulator(seed: int) -> None:
    problem, costs, rng = drawn(seed)
    orders = schedule_by(problem, next(policies(problem, rng))) or [list(order) for order in problem.one_by_one]
    assert all(has_room(problem, rank, order) for rank, order in enumerate(orders))
    for _ in range(15):
        order = rng.choice(orders)
        source = rng.randrange(len(order))
        target = min(max(source + random_jump(rng), 0), len(order) - 1)
        order.insert(target, order.pop(source))
        if time_orders(problem, orders) is None:
            order.insert(source, order.pop(target))
    simulated = plan_of(problem, tuple(map(tuple, orders)), Mesh(pp=problem.pp)).simulate(costs)
    assert simulated.peak_activations == pytest.approx([problem.peak(order) for order in orders])
    fits = all(has_room(problem, rank, order) for rank, order in enumerate(orders))
    for objective in OBJECTIVES:
        value = timed(problem, orders).value(objective)
        assert value == pytest.approx(value_of(simulated, objective), abs=1e-9)
        assert not fits or lower_bound(problem, objective).value <= value + 1e-9


def orders_of(problem: Problem, rank: int, order: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield all orders of a rank with one stage that keep to its cap, each kind from the first microbatch on."""
    counts = [sum(number // problem.microbatches == 2 * kind + rank for number in order) for kind in range(3)]
    if counts[2] == problem.microbatches:
        yield order
    for kind, most in enumerate((problem.microbatches, *counts[:2])):
        if counts[kind] < most:
            further = (*order, problem.number(kind, rank, counts[kind]))
            if has_room(problem, rank, list(further)):
                yield from orders_of(problem, rank, further)


@pytest.mark.parametrize(
    ("costs", "cap"),
    [
        (Costs(), 1),
        (Costs(forward=(1.0, 2.5), activation_checkpointed=0.2, p2p=0.5), 1.5),
        *(
            pytest.param(costs, cap, marks=pytest.mark.slow)
            for costs, cap in (
                (Costs(activation_checkpointed=0.4, recompute=0.5, backward_weight=(0.5, 1.5)), 2),
                (Costs(recompute=3.0, activation_after_input=0.5, activation_checkpointed=0.1), 2),
                (
                    Costs(
                        recompute=(0.3, 2.0), activation=(1.0, 0.5), activation_checkpointed=0.5, backward_weight=0.0
                    ),
                    1.5,
                ),
            )
        ),
    ],
)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_finds_what_all_orders_and_choices_of_microbatches_find(
    costs: Costs, cap: float, objective: Objective
) -> None:
    each, best = range(3), dict[Chosen, float]()
    for bits in itertools.product((0, 1), repeat=6):
        chosen = tuple(tuple(m for m in each if row[m]) for row in (bits[:3], bits[3:]))
        more = {"recompute": [int(bool(some)) for some in chosen], "recompute_microbatches": chosen}
        problem = problem_of(2, 3, (0, 1), costs, cap, **more)
        timings = (time_orders(problem, both) for both in itertools.product(*(orders_of(problem, k) for k in (0, 1))))
        best[chosen] = min(timing.value(objective) for timing in timings if timing is not None)
        assert lower_bound(problem, objective).value <= best[chosen] + 1e-9
    sizes = {"pp": 2, "microbatches": 3, "placement": "linear", "memory_cap": cap, "objective": objective}
    found = solve(**sizes, costs=costs, recompute="auto", effort=1)
    assert found.certificate.value == pytest.approx(min(best.values()))
    again = found.plan.layout.recomputing
    assert best[tuple(tuple(np.flatnonzero(row).tolist()) for row in again)] == pytest.approx(found.certificate.value)
    certify(found.plan, found.certificate)


def test_shares_of_microbatches_are_faster_than_whole_stages_and_their_claims_are_their_own() -> None:
    """With a cap of 3 of 4, the best choice of stages takes 32; the search itself would go on to prove more."""
    problem, values = problem_of(4, 8, linear(4, 1), memory_cap=3), dict[float, tuple[Problem, list[list[int]]]]()
    for choice, _ in recompute_choices(problem, None, "span", monotonic() + 600):
        for policy in itertools.islice(policies(choice, random.Random(0)), 5):
            if orders := schedule_by(choice, policy):
                values.setdefault(timed(choice, orders).value("span"), (choice, orders))
    (value, (best, orders)), whole = (
        min(values.items()),
        problem_of(4, 8, linear(4, 1), memory_cap=3, recompute=[1] * 4),
    )
    plan, bound = plan_of(best, tuple(map(tuple, orders)), Mesh(pp=4)), lower_bound(best, "span")
    assert (value, plan.simulate().span, bool(plan.recompute_microbatches)) == (28, 28, True)
    claims = {"objective": "span", "value": value, "memory_cap": 3, "rank": bound.rank, "reason": bound.reason}
    assert max(certify(plan, Certificate(bound=bound.value, **claims)).peaks) <= 3
    assert lower_bound(whole, "span").value == 32
    with pytest.raises(UnsoundError, match=f"proves {bound.value:g} only"):
        certify(plan, Certificate(bound=28, **claims))
    with pytest.raises(UnsoundError, match="its span is"):
        certify(plan_of(whole, tuple(map(tuple, orders)), Mesh(pp=4)), Certificate(bound=bound.value, **claims))


SCARCE = Costs(
    forward=(1.0, 1.2, 0.8), activation_checkpointed=0.2, p2p=0.1, host_bandwidth=2.0, activation_after_input=0.6
)


@pytest.mark.parametrize(("costs", "cap"), [(Costs(), 1), pytest.param(SCARCE, 2, marks=pytest.mark.slow)])
def test_it_is_never_worse_than_without_nor_than_a_named_schedule(costs: Costs, cap: float) -> None:
    sizes = {"pp": 3, "microbatches": 6, "placement": "linear", "memory_cap": cap, "costs": costs}
    kept = solve(**sizes, effort=1, seconds=600)
    recomputed = solve(**sizes, recompute="auto", effort=1, seconds=600)
    offloaded = solve(**sizes, offload=True, effort=1, seconds=600)
    assert kept.plan.recompute == () != recomputed.plan.recompute
    assert offloaded.offloads > kept.offloads
    for found in (recomputed, offloaded):
        assert found.certificate.value < kept.certificate.value
        simulated = found.plan.simulate(costs)
        assert (found.span, found.certificate.value) == pytest.approx((simulated.span, simulated.span))
        assert max(certify(found.plan, found.certificate).peaks) <= cap + 1e-9
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        timed_there = qs.compile(schedule, mesh="pp=3", microbatches=6, recompute=1).simulate(costs)
        if max(timed_there.peak_activations) <= cap:
            assert recomputed.certificate.value <= timed_there.span + 1e-9


def test_a_cap_of_an_offload_has_room_for_sums_that_are_rounded() -> None:
    costs = Costs(activation=(0.44, 0.8), activation_after_input=1.7)
    problem = problem_of(2, 4, (0, 1), costs, 1.7)
    halves = [(kind, k) for k in range(4) for kind in (1, 2)]
    orders = tuple(
        tuple(problem.number(kind, rank, k) for kind, k in (*((0, k) for k in range(4)), *halves)) for rank in (0, 1)
    )
    plan = plan_of(problem, orders, Mesh(pp=2), offload=1.7, costs=costs)
    assert plan.simulate(costs).peak_activations == pytest.approx((1.7, 1.7))
    kept = qs.compile("gpipe", mesh="pp=2", microbatches=3, costs=Costs(activation=0.1), offload=0.3)
    assert not kept.columns.are(OffloadAct).any()
    with pytest.raises(UsageError, match="the least that works: 4294912345"):
        qs.compile("1f1b", mesh="pp=2", microbatches=2, costs=Costs(activation=4294912345.0), offload=4e9)


def test_claims_about_other_plans_are_refused() -> None:
    costs = Costs(activation_checkpointed=0.2)
    sizes = {"pp": 3, "microbatches": 6, "placement": "linear", "memory_cap": 1.5, "costs": costs, "effort": 1}
    found, offloaded = (solve(**sizes, **more) for more in ({"recompute": (1, 1, 0)}, {"offload": True}))
    assert (found.plan.recompute, offloaded.offloads) == ((1, 1, 0), True)
    claim, other = found.certificate, offloaded.certificate
    wrong = [
        (found.plan, claim.model_copy(update={"bound": claim.bound + 0.1}), "only"),
        (found.plan, claim.model_copy(update={"memory_cap": 1.1}), "above the cap"),
        (found.plan, claim.model_copy(update={"costs": Costs(activation_checkpointed=0.9)}), "above the cap"),
        (recomputed_early(found.plan), claim, "right before the backward"),
        (qs.compile("1f1b", mesh="pp=3", microbatches=6), claim, "its span is"),
        (offloaded.plan, other.model_copy(update={"reason": "memory"}), "by memory proves 0 only"),
        (offloaded.plan, other.model_copy(update={"value": other.value - 1}), "its span is"),
        (offloaded.plan, other.model_copy(update={"costs": Costs(host_bandwidth=0.5)}), "its span is"),
        (offloaded.plan, other.model_copy(update={"memory_cap": 0.9}), "above the cap"),
    ]
    for plan, changed, why in wrong:
        with pytest.raises(UnsoundError, match=why):
            certify(plan, changed)


def recomputed_early(plan: qs.Plan) -> qs.Plan:
    """Return the plan with the last recomputation of rank 0 before the computation that precedes it."""
    data = json.loads(dumps(plan))
    program = data["programs"][0]
    last = max(place for place, one in enumerate(program) if one["op"] == "Recompute")
    before = max(k for k in range(last) if program[k]["op"] in ("Fwd", "BwdInput", "BwdWeight"))
    program.insert(before, program.pop(last))
    return qs.Plan.of(loads(json.dumps(data)))


def test_a_cap_may_have_room_only_where_stages_recompute() -> None:
    sizes = {"pp": 2, "microbatches": 4, "placement": "v", "costs": Costs(activation_checkpointed=0.2), "effort": 1}
    for recompute in ("auto", "all", (1, 1, 1, 1), (1, 1, 0, 0)):
        found = solve(**sizes, recompute=recompute, memory_cap=0.6)
        assert max(certify(found.plan, found.certificate).peaks) <= 0.6 + 1e-9
    for wrong, least in ((("none", 0.6), "1"), (("auto", 0.5), "0.6"), (("all", 0.5), "0.6")):
        with pytest.raises(UsageError, match=f"the smallest that works: {least}$"):
            solve(**sizes, recompute=wrong[0], memory_cap=wrong[1])
    with pytest.raises(InputError, match="recompute has 2 values, but there are 4 stages"):
        solve(**sizes, recompute=(1, 0))
    for more in ({}, {"memory_cap": (1, 1)}, {"memory_cap": 1, "jitter": "0.1"}):
        with pytest.raises(UsageError, match="offload and lend take one memory_cap"):
            solve(pp=2, microbatches=2, offload=True, **more)


def test_an_interrupt_leaves_a_plan_that_offloads_with_its_certificate() -> None:
    def told(attempt: PlacementSearch, seconds: float) -> None:
        if "offloaded" in attempt.origin:
            raise KeyboardInterrupt

    found = solve(pp=3, microbatches=6, placement="linear", memory_cap=1, offload=True, effort=1, told=told)
    assert found.offloads
    assert max(certify(found.plan, found.certificate).peaks) <= 1


@pytest.mark.parametrize(("cap", "span"), [(1, 12), (3, 9)])
def test_backwards_are_whole_where_halves_need_more_memory(cap: int, span: int) -> None:
    """In halves, it would take 10 under a cap of 3, and have no room under 1; a bound of halves would be false."""
    costs = Costs(activation_after_input=3)
    found = solve(pp=2, microbatches=2, memory_cap=cap, costs=costs, placement="linear", effort=1)
    assert (found.certificate.value, found.plan.columns.are(BwdWeight).any()) == (span, False)
    assert max(found.certificate.bound, found.proved or 0.0) <= simulated(costs).span == 9
    assert certify(found.plan, found.certificate).peaks[0] <= cap


def simulated(costs: Costs) -> qs.Simulation:
    return qs.compile("1f1b", mesh="pp=2", microbatches=2).simulate(costs)


def test_lending_to_the_last_ranks_gains_where_the_first_lack_room() -> None:
    sizes = {"pp": 4, "microbatches": 8, "placement": "linear", "memory_cap": 3, "effort": 1, "seconds": 600}
    kept, lent = solve(**sizes), solve(**sizes, lend=True)
    assert (lent.lends, kept.lends, lent.certificate.value) == (True, False, 30)
    assert lent.certificate.value < kept.certificate.value
    found = certify(lent.plan, lent.certificate)
    assert max(found.peaks) <= 3
    assert found.certificate.value == lent.plan.simulate().span
    with pytest.raises(UnsoundError, match="by memory proves"):
        certify(lent.plan, lent.certificate.model_copy(update={"reason": "memory", "bound": 29.0}))


def test_a_share_of_the_time_without_an_order_does_not_end_the_search() -> None:
    def how(problems: Iterable[tuple[Problem, Costs | None]], seconds: float, **more: Any) -> OrderSearch:
        if seconds < 400:
            raise UsageError("the time was over")
        return search(problems, "span", seed=0, effort=1, seconds=seconds, **more)

    problems = [(problem_of(2, 4, (0, 1), memory_cap=1), Costs())]
    assert search_for_room(problems, how, monotonic() + 600, True, {})[0].value == 20


def test_a_plain_order_is_tried_before_all_others() -> None:
    def told(*_: object) -> None:
        raise KeyboardInterrupt

    found = solve(pp=4, microbatches=32, memory_cap=4, told=told)
    assert (found.origin, found.placement) == ("1f1b", "linear")

"""Better cuts and orders for runs: planted slow ranks and blocks are found, and plans keep what they do for room."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import quintsched as qs
from quintsched.compiler import compile_request
from quintsched.ir.instruction_set import OffloadAct
from quintsched.plan import Plan
from quintsched.request import CompileRequest
from quintsched.schedules.kit.given_order import schedule_of_rows
from quintsched.simulation.costs import Costs
from quintsched.solve.recorded.retune_cut_and_order import Rows, costs_of, paced_layers, retune


def measured(plan: Plan, held: list[int], blocks: list[float], slow: int, recompute: float) -> Costs:
    """Return what a trace would say where `slow` is a rank that takes twice as long for each block."""
    ways = len(held) // len(plan.routes)
    ends = np.cumsum([0, *held[:ways]])
    sums = np.array([sum(blocks[first:end]) for first, end in pairwise(ends)] * len(plan.routes))
    times = sums * np.where(np.array(plan.stage_to_pp) == slow, 2.0, 1.0)
    again = tuple((times * recompute * (np.array(plan.recompute or [0] * len(held)) > 0)).tolist())
    return Costs(
        unit="ms",
        forward=tuple(times.tolist()),
        backward_input=tuple((0.9 * times).tolist()),
        backward_weight=tuple((0.8 * times).tolist()),
        recompute=again,
        p2p=0.05,
        host_bandwidth=1.0,
    )


LAST_IS_LONG, LIKE = [1.0] * 7 + [3.0], [1.0] * 12


@pytest.mark.parametrize(
    ("settings", "held", "blocks", "slow"),
    [
        ({"schedule": "1f1b"}, [2, 2, 2, 2], LAST_IS_LONG, -1),
        ({"schedule": "1f1b", "recompute": 1}, [3, 3, 3, 3], LIKE, 1),
        ({"schedule": "1f1b", "recompute": (1, 1, 0, 0)}, [2, 2, 2, 2], LAST_IS_LONG, -1),
        ({"schedule": "gpipe", "offload": 3.0}, [2, 2, 2, 2], LAST_IS_LONG, -1),
        ({"schedule": "chimera"}, [3] * 8, LIKE, 1),
        ({"schedule": "chimera", "recompute": 1}, [3] * 8, LIKE, 1),
        ({"schedule": "zb-auto", "memory_cap": 4.0}, [3] * 4, LIKE, 1),
    ],
)
def test_a_cut_or_an_order_is_faster_and_the_plan_does_the_same_for_room(
    settings: dict, held: list[int], blocks: list[float], slow: int
) -> None:
    request = CompileRequest(mesh="pp=4", microbatches=8, **settings)
    plan = compile_request(request)
    costs = measured(plan, held, blocks, slow, recompute=0.9)
    layers = paced_layers(plan, costs, held, blocks)

    def of_cut(stages: tuple[int, ...]) -> Costs:
        return costs_of(layers, costs, np.cumsum([0, *stages[: len(stages) // len(plan.routes)]]))

    before = of_cut(tuple(held))
    for name in ("forward", "backward_input", "backward_weight", "recompute"):
        assert plan.recompute or name != "recompute" or before.recompute == costs.recompute
        assert getattr(before, name) == pytest.approx(getattr(costs, name))

    def compiled(stages: tuple[int, ...], rows: Rows | None) -> Plan:
        changed = replace(request, stages=stages)
        if rows is not None:
            schedule = schedule_of_rows(rows, plan.stage_to_pp, plan.mesh.pp, bidirectional=len(plan.routes) > 1)
            changed = replace(changed, schedule=schedule, chunks=schedule.min_chunks, memory_cap=None)
        return compile_request(changed)

    found = retune(plan, costs, held, blocks, compiled, seconds=0.8)
    assert found.plan is not None
    after = found.plan.simulate(of_cut(found.plan.blocks_per_stage)).makespan
    assert found.gain == pytest.approx(plan.simulate(costs).makespan - after)
    assert found.gain > 0.05 * plan.simulate(costs).makespan
    assert (found.plan.recompute, len(found.plan.routes)) == (plan.recompute, len(plan.routes))
    assert found.plan.schedule.options.get("offload") == settings.get("offload")
    assert found.plan.columns.are(OffloadAct).any() == plan.columns.are(OffloadAct).any()


def test_a_plan_in_which_nothing_is_better_stays() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    costs = measured(plan, [2, 2], [1.0] * 4, -1, recompute=0.0)
    found = retune(plan, costs, [2, 2], [1.0] * 4, lambda stages, rows: plan, seconds=1.0)
    assert (found.plan, found.gain) == (None, 0.0)

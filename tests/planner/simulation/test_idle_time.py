"""Idle time by cause: parts add up to the makespan; the page's twin agrees (tests/viz/test_page_engine.py)."""

import pytest

import quintsched as qs
from quintsched.simulation.held_activations import held_activations
from quintsched.simulation.idle_time import CAUSES, COMPUTING_TIME, IdleTime, times_of_ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "seq-1f1b", "dualpipe-v", "chimera"])
def test_the_parts_of_each_rank_add_up_to_the_makespan(name: str) -> None:
    slices = 2 if name == "seq-1f1b" else 1
    costs = qs.Costs(p2p=0.3, optimizer=0.5, clip=0.4, backward_input=1.5, keys=0.5)
    simulation = qs.compile(name, mesh="dp=2,pp=4", microbatches=8, slices=slices).simulate(costs)
    for time, busy in zip(times_of_ranks(simulation), simulation.busy, strict=True):
        assert sum(time.parts.values()) == pytest.approx(simulation.makespan)
        assert time.parts[COMPUTING_TIME] == pytest.approx(busy)
        idle = sum(length for cause, length in time.parts.items() if cause in CAUSES)
        assert sum(time.waits.values()) == pytest.approx(idle)
        assert time.rank not in time.waits
    peaks = [held.peak for held in held_activations(simulation, simulation.costs)]
    assert peaks == pytest.approx(simulation.peak_activations, rel=0.2)


def test_idle_time_of_1f1b_is_that_of_the_textbook() -> None:
    """Rank r fills for r forwards, then for its first gradient: P-1-r forwards and backwards of the ranks behind it."""
    simulation = qs.compile("1f1b", mesh="pp=4", microbatches=8).simulate()
    for rank, time in enumerate(times_of_ranks(simulation)):
        assert {cause: length for cause, length in time.parts.items() if cause in CAUSES} == pytest.approx(
            {"warm-up": 6 - rank, "cool-down": 3 + rank}
        )
    assert times_of_ranks(simulation)[0].waits == pytest.approx({1: 9.0})


def test_a_slow_stage_a_slow_wire_and_a_cap_are_told_apart() -> None:
    def causes(costs: qs.Costs, cap: float | None = None, name: str = "1f1b") -> set[str]:
        simulation = qs.compile(name, mesh="pp=8", microbatches=24).simulate(costs)
        return {why.cause for gaps in IdleTime(simulation, cap).of_ranks() for why in gaps}

    assert causes(qs.Costs()) == {"warm-up", "cool-down"}
    assert "imbalance" in causes(qs.Costs(forward=(1.0,) * 5 + (3.0, 1.0, 1.0)))
    assert "message" in causes(qs.Costs(p2p=2.0))
    assert "collective" in causes(qs.Costs(clip=1.0, forward=(1.0,) * 7 + (9.0,)))
    assert "order" in causes(qs.Costs(p2p=0.1))
    assert {"cap", "order"} & causes(qs.Costs(p2p=0.1), 1.0) == {"cap"}

"""Times, bubbles, memory and shares of uneven stages of small plans, by hand or by formula; and causes of idle time."""

import pytest

import quintsched as qs
from quintsched.simulation.held_activations import held_activations
from quintsched.simulation.idle_time import CAUSES, COMPUTING_TIME, IdleTime, times_of_ranks


def test_the_end_of_a_step_takes_time():
    """The norm waits for all ranks and takes as long as the one with the most to do; each steps on its own."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    simulation = plan.simulate(qs.Costs(clip=(0.5, 2.0), optimizer=(3.0, 1.0)))
    last = [[(s.start, s.end) for s in row[-2:]] for row in simulation.timeline]
    assert last == [[(9, 11), (11, 14)], [(9, 11), (11, 12)]]
    assert simulation.makespan == 14
    assert simulation.busy == (6.0, 6.0)
    assert simulation.bubble == 1 - 12 / 28
    assert simulation.spans == plan.simulate().spans, "a span ends with the last weight gradient"


W, G, S = 3.0, 5.0, 12.0
STATE = qs.Costs(weights=W, gradients=G, optimizer_state=S)
R = 4


@pytest.mark.parametrize(
    ("zero", "chunks", "expected"),
    [
        (0, 1, W + G + S),
        (1, 1, W + G + S / R),
        (2, 1, W + G / R + G + S / R),
        (3, 1, W / R + W + G / R + G + S / R),
        (0, 4, W + G + S),
        (1, 4, W + G + S / R),
        (2, 4, W + G / R + G / 4 + S / R),
        (3, 4, W / R + 2 * W / 4 + G / R + G / 4 + S / R),
    ],
)
@pytest.mark.parametrize("mesh", ["dp=4,pp=2,tp=2", "dp=2,cp=2,pp=2", "pp=2,cp=2,ep=2"])
def test_state_is_that_of_the_formulas(zero, chunks, expected, mesh):
    name = "1f1b" if chunks == 1 else "interleaved-1f1b"
    plan = qs.compile(name, mesh=mesh, microbatches=8, chunks=chunks, zero=zero)
    simulation = plan.simulate(STATE)
    assert simulation.peak_state == pytest.approx((expected,) * 2)
    per_stage = qs.Costs(
        weights=(W / chunks,) * 2 * chunks,
        gradients=(G / chunks,) * 2 * chunks,
        optimizer_state=(S / chunks,) * 2 * chunks,
    )
    assert plan.simulate(per_stage).peak_state == pytest.approx((expected,) * 2)


def test_full_gradients_of_several_stages_stand_where_they_are_reduced_late():
    plan = qs.compile("interleaved-1f1b", mesh="dp=4,pp=2", microbatches=4, chunks=2, zero=2, zero_every=4)
    assert plan.simulate(qs.Costs(gradients=8.0)).peak_state == (8.0 / 2 / R + 8.0,) * 2, (
        "the first stage's share comes while the full gradients of both stand; then the second's"
    )


def test_experts_are_shared_out_over_fewer():
    plan = qs.compile("1f1b", mesh="dp=2,ep=4,pp=2", microbatches=4, zero=1)
    found = plan.simulate(qs.Costs(optimizer_state=16.0, experts=0.25)).peak_state
    assert found == (0.75 * 16 / 8 + 0.25 * 16 / 2,) * 2
    alone = qs.compile("1f1b", mesh="ep=4,pp=2", microbatches=4, zero=2)
    costs = qs.Costs(gradients=16.0, optimizer_state=16.0, experts=0.25)
    assert alone.simulate(costs).peak_state == (12.0 + 3.0 + 4.0 + 3.0 + 4.0,) * 2, "those stand until the step"
    with pytest.raises(qs.UsageError, match=r"Costs: /experts: .* 1$"):
        qs.Costs(experts=1.5)


def test_activations_come_on_top_where_they_stand_at_the_same_time():
    """The only backward: its activation still stands when its gradients come; then the optimizer's turn."""
    plan = qs.compile("1f1b", mesh="dp=2,pp=1", microbatches=1, zero=3)
    costs = qs.Costs(weights=2.0, gradients=4.0, optimizer_state=8.0, activation=16.0)
    assert plan.simulate(costs).peak_memory == (1.0 + 2.0 + 4.0 + 4.0 + 16.0,)
    assert plan.simulate(costs.model_copy(update={"activation": 0.0})).peak_memory == (
        1.0 + 2.0 + 4.0 + 2.0 + 4.0 - 2.0,
    )
    gpipe = qs.compile("gpipe", mesh="dp=2,pp=2", microbatches=3, zero=2).simulate(STATE)
    assert gpipe.peak_memory == pytest.approx(tuple(W + S / 2 + max(G + 3, G + G / 2 + 2) for _ in range(2)))


SCALARS = qs.Costs(forward=2.0, backward_weight=0.5, optimizer=4.0, weights=8.0, keys=1.0, p2p=0.25, activation=3.0)


def test_stages_cost_in_proportion_to_their_blocks():
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=4, stage_to_pp=[0, 1, 1, 2], stages=[1, 4, 1, 0])
    shares = (0.5, 2.0, 0.5, 0.0)
    assert plan.stage_shares == shares
    per_stage = {"forward": 2.0, "backward_input": 1.0, "backward_weight": 0.5, "optimizer": 4.0, "weights": 8.0}
    by_stage = qs.Costs(
        p2p=0.25, **{n: tuple(v * s for s in shares) for n, v in (per_stage | {"activation": 3.0}).items()}
    )
    found, expected = plan.simulate(SCALARS), plan.simulate(by_stage)
    assert (found.makespan, found.busy, found.spans) == (expected.makespan, expected.busy, expected.spans)
    assert found.peak_memory == expected.peak_memory
    assert found.busy == tuple(4 * 3.5 * share for share in (0.5, 2.5, 0.0))
    assert found.peak_activations[2] == 0.0


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

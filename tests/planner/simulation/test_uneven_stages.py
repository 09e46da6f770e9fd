"""Costs of a whole rank's layers, spread over stages by their blocks where these are known."""

import json

import pytest

import quintsched as qs

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


def costs_of_all_kinds() -> qs.Costs:
    """Costs in which every field has another number, and some differ from microbatch to microbatch."""
    values: dict[str, object] = {"unit": "ms", "microbatches": [1, 2, 0.5, 1], "experts": 0.25}
    for number, name in enumerate(sorted({*qs.Costs.model_fields} - {*values, "slices"})):
        values[name] = 0.5 + number / 4
    for name in ("keys", "forward"):
        values[name] = {"stages": values[name], "microbatches": [1, 1, 2, 2]}
    return qs.Costs.model_validate_json(json.dumps(values))


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,ep=2,pp=2"])
@pytest.mark.parametrize(
    ("schedule", "slices", "stages"), [("seq-1f1b", 2, 2), ("interleaved-1f1b", 1, 4), ("zb-h1", 1, 2)]
)
def test_every_cost_is_spread_over_even_blocks_as_over_even_stages(schedule, slices, stages, mesh):
    shape: dict = {"mesh": mesh, "microbatches": 4, "slices": slices, "recompute": [1] * (stages - 1) + [0]}
    shape |= {"zero": 3} if "dp" in mesh else {}
    costs = costs_of_all_kinds()
    even = qs.compile(schedule, **shape, stages=[3] * stages).simulate(costs)
    plain = qs.compile(schedule, **shape).simulate(costs)
    for name in ("makespan", "busy", "spans", "peak_activations", "peak_state", "peak_memory"):
        assert getattr(even, name) == pytest.approx(getattr(plain, name), rel=1e-12), name

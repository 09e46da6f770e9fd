"""Closed forms of what is in flight, against the compiled plans."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.schedules import find_schedule
from quintsched.simulation.simulated_activation_memory import peak_activations
from quintsched.strategies.prediction.layers_of_ranks import stages_of_rank
from quintsched.strategies.prediction.memory import in_flight as forms
from quintsched.strategies.prediction.memory.vectorized_peak_memory import ENOUGH

TRAINING = [one.name for one in qs.all_schedules() if one.built_in and one.mode == "train" and not one.searches]
BOUNDS = {"v-min", "v-half", "dualpipe-v", "zbv"}
"""Schedules that hold less than their form says if there are few microbatches."""


def _shapes(name: str) -> list[tuple[int, int, int]]:
    chunks = (1,) if find_schedule(name).max_chunks == 1 else (2,) if find_schedule(name).max_chunks == 2 else (2, 3, 4)
    return [(pp, count, v) for pp in (1, 2, 4, 6) for count in (1, 2, 4, 6, 12, 24) for v in chunks]


def compiled(name: str, pp: int, microbatches: int, chunks: int) -> qs.Plan | None:
    """Return a plan; None where the schedule does not take the shape."""
    try:
        return qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    except qs.UsageError:
        return None


def _plans(name: str) -> Iterator[tuple[dict[str, int], qs.Plan]]:
    for pp, microbatches, chunks in _shapes(name):
        if plan := compiled(name, pp, microbatches, chunks):
            yield {"pp": pp, "microbatches": microbatches, "chunks": chunks}, plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_in_flight_is_what_the_plan_holds(name: str) -> None:
    plans = list(_plans(name))
    assert len(plans) > 4
    for shape, plan in plans:
        pp = shape["pp"]
        held = np.array(peak_activations(plan, qs.Costs())) / (2 if find_schedule(name).bidirectional else 1)
        said = np.broadcast_to(forms.in_flight(name, **shape, rank=np.arange(pp)), pp)
        where = f"{name} {shape}: {held} {said}"
        if name in BOUNDS and shape["microbatches"] < 2 * pp:
            assert (held <= said + 1e-9).all(), where
        else:
            assert held == pytest.approx(said), where
        for first in range(pp):
            for last in range(first, pp):
                most = forms.in_flight(name, **shape, rank=first, last=last)
                assert most == pytest.approx(said[first : last + 1].max()), (where, first, last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_microbatches_of_the_first_stage_and_of_the_last(name: str) -> None:
    """Check the point at which their rank holds most, and of several such points the one with most of the stage."""
    scale, ways = 1e-6, 1 + find_schedule(name).bidirectional
    for shape, plan in _plans(name):
        few = {size: shape[size] for size in ("pp", "microbatches")}
        places = plan.stage_to_pp
        ends = {0: forms.first_in_flight(name, **shape), len(places) // ways - 1: forms.logits_in_flight(name, **few)}
        for stage, said in ends.items():
            activation = np.ones(len(places))
            alike = peak_activations(plan, qs.Costs(activation=activation.tolist()))[places[stage]]
            activation[stage] += scale
            heavier = peak_activations(plan, qs.Costs(activation=activation.tolist()))[places[stage]]
            held = round((heavier - alike) / scale, 3)
            where = f"{name} {shape} stage={stage}: {held} {said}"
            if name in BOUNDS or ways > 1 or (stage and shape["chunks"] > 1):
                assert held <= said or (stage and shape["microbatches"] < 2 * shape["pp"]), where
            else:
                assert held == said, where


@given(name=st.sampled_from(sorted({*TRAINING} - forms.KEEPS_LOGITS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_uneven_stages_hold_what_the_plan_holds(name: str, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 6), "pp")
    _, microbatches, chunks = data.draw(st.sampled_from(_shapes(name)), "microbatches and chunks")
    plan = compiled(name, pp, microbatches, chunks)
    if plan is None:
        return
    twins = 1 + find_schedule(name).bidirectional
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=pp * chunks, max_size=pp * chunks), "sizes")
    held = peak_activations(plan, qs.Costs(activation=tuple(map(float, sizes * twins))))
    enough = min(microbatches, ENOUGH * pp + microbatches % pp)
    moments = forms.stages_in_flight(name, pp, enough, chunks)
    own = [[sizes[stage] for stage in stages_of_rank(rank, pp, chunks, name)] for rank in range(pp)]
    assert held == pytest.approx([(moments[rank] @ own[rank]).max() for rank in range(pp)])

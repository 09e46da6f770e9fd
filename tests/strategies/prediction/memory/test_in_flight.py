"""Closed forms of what is in flight, against the compiled plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.errors import UsageError
from quintsched.schedules import all_schedules, find_schedule
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulated_activation_memory import peak_activations
from quintsched.strategies.prediction.layers_of_ranks import stages_of_rank
from quintsched.strategies.prediction.memory.in_flight import (
    KEEPS_LOGITS,
    first_in_flight,
    in_flight,
    logits_in_flight,
    stages_in_flight,
)
from quintsched.strategies.prediction.memory.vectorized_peak_memory import ENOUGH

TRAINING = [one.name for one in all_schedules() if one.built_in and one.mode == "train" and not one.searches]
BOUNDS = {"v-min", "v-half", "dualpipe-v", "zbv"}
"""Schedules that hold less than their form says if there are few microbatches."""


def _shapes(name: str) -> list[tuple[int, int, int]]:
    chunks = (1,) if find_schedule(name).max_chunks == 1 else (2,) if find_schedule(name).max_chunks == 2 else (2, 3, 4)
    return [(pp, count, v) for pp in (1, 2, 4, 6) for count in (1, 2, 4, 6, 12, 24) for v in chunks]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_in_flight_is_what_the_plan_holds(name: str) -> None:
    compiled = 0
    for pp, microbatches, chunks in _shapes(name):
        try:
            plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
        except UsageError:
            continue
        compiled += 1
        held = np.array(peak_activations(plan, Costs())) / (2 if find_schedule(name).bidirectional else 1)
        said = in_flight(name, pp=pp, microbatches=microbatches, chunks=chunks, rank=np.arange(pp))
        said = np.broadcast_to(said, pp)
        where = f"{name} pp={pp} microbatches={microbatches} chunks={chunks}: {held} {said}"
        if name in BOUNDS and microbatches < 2 * pp:
            assert (held <= said + 1e-9).all(), where
        else:
            assert held == pytest.approx(said), where
        for first in range(pp):
            for last in range(first, pp):
                most = in_flight(name, pp=pp, microbatches=microbatches, chunks=chunks, rank=first, last=last)
                assert most == pytest.approx(said[first : last + 1].max()), (where, first, last)
    assert compiled > 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_microbatches_of_the_first_stage_and_of_the_last(name: str) -> None:
    """Check the point at which their rank holds most, and of several such points the one with most of the stage."""
    scale = 1e-6
    for pp, microbatches, chunks in _shapes(name):
        try:
            plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
        except UsageError:
            continue
        places = plan.stage_to_pp
        ends = {
            0: first_in_flight(name, pp=pp, microbatches=microbatches, chunks=chunks),
            len(places) // (1 + find_schedule(name).bidirectional) - 1: logits_in_flight(
                name, pp=pp, microbatches=microbatches
            ),
        }
        for stage, said in ends.items():
            activation = np.ones(len(places))
            alike = peak_activations(plan, Costs(activation=activation.tolist()))[places[stage]]
            activation[stage] += scale
            heavier = peak_activations(plan, Costs(activation=activation.tolist()))[places[stage]]
            held = round((heavier - alike) / scale, 3)
            where = f"{name} pp={pp} microbatches={microbatches} chunks={chunks} stage={stage}: {held} {said}"
            if name in BOUNDS or find_schedule(name).bidirectional or (stage and chunks > 1):
                assert held <= said or (stage and microbatches < 2 * pp), where
            else:
                assert held == said, where


@given(name=st.sampled_from(sorted({*TRAINING} - KEEPS_LOGITS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_uneven_stages_hold_what_the_plan_holds(name: str, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 6), "pp")
    _, microbatches, chunks = data.draw(st.sampled_from(_shapes(name)), "microbatches and chunks")
    try:
        plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    except UsageError:
        return
    twins = 1 + find_schedule(name).bidirectional
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=pp * chunks, max_size=pp * chunks), "sizes")
    held = peak_activations(plan, Costs(activation=tuple(map(float, sizes * twins))))
    enough = min(microbatches, ENOUGH * pp + microbatches % pp)
    moments = stages_in_flight(name, pp, enough, chunks)
    own = [[sizes[stage] for stage in stages_of_rank(rank, pp, chunks, name)] for rank in range(pp)]
    assert held == pytest.approx([(moments[rank] @ own[rank]).max() for rank in range(pp)])

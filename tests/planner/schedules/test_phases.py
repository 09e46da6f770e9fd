"""Phases are numbered as if every turn were walked through, in time that does not grow with what falls away."""

import time
from collections import deque
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintsched.ir.instruction_set import BwdInput, BwdWeight, Compute, Fwd, Overlap
from quintsched.schedules import find_schedule
from quintsched.schedules.kit.orders_from_phases import TURN_COMPUTES, Both, Lane, Phase, Turn, number


def walked(phases: list[Phase], lanes: tuple[Lane, Lane]) -> list[Compute | Overlap]:
    """Number turn by turn."""
    found: list[Compute | Overlap] = []
    forwards, backwards = [0, 0], [0, 0]
    pending: deque[tuple[int, int]] = deque()
    for whole in chain.from_iterable(turns * times for turns, times in phases):
        done: list[Compute] = []
        for turn in (whole.forward, whole.backward) if isinstance(whole, Both) else (whole,):
            if turn is Turn.W:
                kind, (lane, k) = BwdWeight, pending.popleft()
            else:
                kind, lane = TURN_COMPUTES[turn]
                count = forwards if kind is Fwd else backwards
                k = count[lane]
                count[lane] += 1
            if kind is BwdInput:
                pending.append((lane, k))
            if k < len(lanes[lane].microbatches):
                done.append(kind(lanes[lane].stage, lanes[lane].microbatches[k]))
        found += [Overlap(*((i.stage, i.microbatch) for i in done))] if len(done) > 1 else done
    return found


@st.composite
def valid_phases(draw: st.DrawFn) -> list[Phase]:
    """Draw phases in which no weight half comes before an input half, with pairs of both lanes."""
    phases, room, pairs = [], 0, [Both(Turn.F0, Turn.B1), Both(Turn.F1, Turn.B0)]
    for _ in range(draw(st.integers(1, 8))):
        turns = tuple(draw(st.lists(st.sampled_from([*Turn, *pairs]), min_size=1, max_size=5)))
        times = draw(st.integers(0, 12))
        for turn in turns * times:
            room += (turn in (Turn.I0, Turn.I1)) - (turn is Turn.W)
            if room < 0:
                turns, times = (), 0
        if room < 0:
            break
        phases.append((turns, times))
    return phases


@given(phases=valid_phases(), sizes=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_skipping_changes_nothing(phases: list[Phase], sizes: tuple[int, int]) -> None:
    lanes = (Lane(3, range(sizes[0])), Lane(7, range(20, 20 + sizes[1])))
    assert list(number(phases, lanes)) == walked(phases, lanes)


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v", "zb-h1", "zb-h2", "1f1b", "bfs", "inference", "eager-1f1b"])
def test_few_microbatches_on_many_ranks_cost_what_they_compute(name: str) -> None:
    """20,000 ranks, of which some are asked: what one costs does not grow with how many there are."""
    schedule = find_schedule(name)
    shape = schedule.shape(20_000, 4, None)
    shape.stages_of(0)
    began = time.process_time()
    assert all(0 < sum(1 for _ in schedule.order(rank, shape)) <= 24 for rank in range(0, 20_000, 400))
    assert time.process_time() - began < 0.5

"""Cutting blocks into stages: the exact minimum, against all cuts."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.runtime.stage.build_stages import partition

COSTS = st.lists(st.integers(0, 20).map(float) | st.floats(0, 10), min_size=1, max_size=9)


def every_cut(num_blocks: int, stages: int):
    for cuts in combinations(range(1, num_blocks), stages - 1):
        yield [range(a, b) for a, b in zip((0, *cuts), (*cuts, num_blocks), strict=True)]


def slowest(costs: list[float], cut: list[range]) -> float:
    return max(sum(costs[block] for block in stage) for stage in cut)


@given(costs=COSTS, data=st.data())
def test_exact_minimum(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    cut = partition(costs, stages)
    assert [block for stage in cut for block in stage] == list(range(len(costs)))
    assert len(cut) == stages
    assert all(cut)
    assert slowest(costs, cut) == min(slowest(costs, other) for other in every_cut(len(costs), stages))


def test_first_stages_take_as_much_as_they_can():
    assert partition([1.0] * 5, 3) == [range(2), range(2, 4), range(4, 5)]


def test_too_few_blocks():
    with pytest.raises(qs.MisfitError, match="2 blocks cannot fill 3 stages"):
        partition([1.0, 1.0], 3)

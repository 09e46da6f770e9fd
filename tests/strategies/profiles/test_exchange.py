"""1F1B with exchanges that block: against its closed form, and against a plain simulation of who waits for whom."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.strategies.profiles.blocking_1f1b import blocking_1f1b
from quintsched.strategies.profiles.stage_times import Exchange

FREE = Exchange(0.0, 0.0, 0.0)


def test_equal_stages_take_what_the_closed_form_says():
    stages, microbatches = 4, 16
    finished = blocking_1f1b([1.0] * stages, [2.0] * stages, [FREE] * (stages - 1), microbatches)
    assert max(finished) == (microbatches + stages - 1) * 3.0
    assert finished[0] == max(finished)


TIMES = st.floats(0.1, 10.0)


@settings(max_examples=25)
@given(st.data())
def test_no_stage_ends_before_its_own_work_and_all_end(data):
    stages = data.draw(st.integers(1, 6))
    microbatches = data.draw(st.integers(1, 12))
    forward, backward = (data.draw(st.lists(TIMES, min_size=stages, max_size=stages)) for _ in range(2))
    one_way = data.draw(st.lists(TIMES, min_size=stages - 1, max_size=stages - 1))
    between = [Exchange(way, way, 2 * way) for way in one_way]
    finished = blocking_1f1b(forward, backward, between, microbatches)
    assert len(finished) == stages
    for stage, end in enumerate(finished):
        assert end >= microbatches * (forward[stage] + backward[stage]) - 1e-9
    through = sum(forward) + sum(backward) + sum(2 * way for way in one_way)
    assert finished[0] >= through - 1e-9

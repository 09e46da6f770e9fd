"""Number of this package's own function calls: a change that raises it must update the limit here."""

from benchmarks.own_calls import calls_at_first, calls_of_a_step, parts_of

MOST = (57, 52, 56)
"""Before the first forward, from there to the last backward, and after it."""
MOST_AT_FIRST = (3444, 2619)
"""In `Engine.__init__`, and in the first step: up to five fewer there where snapshots of generators overlap."""


def test_a_steady_step_makes_few_calls():
    found = parts_of(calls_of_a_step())
    assert all(count <= most for count, most in zip(found, MOST, strict=True)), found


def test_building_an_engine_and_its_first_step_make_few_calls():
    found = [len(calls) for calls in calls_at_first()]
    assert all(count <= most for count, most in zip(found, MOST_AT_FIRST, strict=True)), found

"""How much of this package's own code one steady step runs; a change that makes it more has to say so here."""

from benchmarks.own_calls import calls_of_a_step, parts_of

MOST = (130, 60, 120)
"""Before the first forward, from there to the last backward, and after it."""


def test_a_steady_step_makes_few_calls():
    found = parts_of(calls_of_a_step())
    assert all(count <= most for count, most in zip(found, MOST, strict=True)), found

"""Instances of the benchmark: their bounds hold, and the best known times of small ones are found again."""

import pytest

from benchmarks.solve import FOLDER, instances, updated
from quintsched.solve.named_placements import PLACEMENTS
from quintsched.solve.search_problem import lower_bound, problem_of

ALL = dict(instances())


def test_every_kind_has_instances_whose_bounds_hold():
    assert {one.kind for one in ALL.values()} == {"unit", "published", "capped", "heterogeneous", "network"}
    assert len(ALL) == len(list(FOLDER.glob("*.json")))
    for path, one in ALL.items():
        assert path.stem.startswith(one.kind)
        placed = PLACEMENTS[one.placement](one.pp, one.chunks)
        bound = lower_bound(problem_of(one.pp, one.microbatches, placed, one.costs, one.memory_cap), one.objective)
        assert bound.value <= one.bound.value * (1 + 1e-9), path
        assert one.bound.value <= one.best_known.value * (1 + 1e-9), path
        if one.bound.by.startswith("certificate"):
            assert one.bound.value == pytest.approx(bound.value), path


@pytest.mark.parametrize("name", ["capped-4-8-linear-3", "unit-4-8-v", "network-4-8-linear-slow"])
def test_the_best_known_is_found_again(name):
    ((_, one),) = instances([name])
    found = one.solved(effort=2, seconds=600)
    assert found.certificate.value <= one.best_known.value * (1 + 1e-9)
    assert updated(one, found).best_known.value == pytest.approx(found.certificate.value)

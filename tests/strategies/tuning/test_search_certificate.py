"""Certificates of searches hold; changed ones do not."""

from collections.abc import Iterator

import pytest

from quintsched.errors import InputError, UnsoundError
from quintsched.strategies.tuning.check_search_certificate import check_certificate
from quintsched.strategies.tuning.search_certificate import Certificate, certify, load_certificate
from quintsched.strategies.tuning.tune import Tuning, tune

from .problems import groups, problem


def search(seed: int, top: int = 3, front: bool = False) -> Tuning:
    given = problem(seed)
    fixed = given.choices.model_dump()
    return tune(given.model, given.hardware, given.gpus, given.batch, given.seq, fixed=fixed, top=top, front=front)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_certificates_hold_and_survive_being_saved(seed, tmp_path):
    tuning = search(seed)
    certify(tuning).save(tmp_path / "c.json")
    assert check_certificate(load_certificate(tmp_path / "c.json")) == tuning.strategies


LIKELY = 133
"""The problem to begin with: its certificate had all, when this was written."""


@pytest.fixture(scope="module")
def good() -> Iterator[Certificate]:
    """A certificate with all that one may have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quintsched.strategies.tuning.branch_and_bound.FIRST_ROWS", 16)
        patch.setattr("quintsched.strategies.tuning.branch_and_bound.ROWS_AT_ONCE", 64)
        seeds = (seed for seed in (*range(LIKELY, 200), *range(LIKELY)) if groups(problem(seed)))
        found = (certify(search(seed)) for seed in seeds)
        yield next(made for made in found if _has_all(made))


def _has_all(made: Certificate) -> bool:
    reasons, sizes = {box.reason for box in made.pruned}, {len(box.box) for box in made.pruned}
    if made.hardware.measured.matmul:  # changed rates of its datasheet would change nothing
        return False
    return bool(made.per_stage and made.evaluated) and (len(made.best), len(reasons), len(sizes)) == (3, 2, 2)


def test_the_certificate_that_is_changed_holds(good):
    check_certificate(good)


def refused(good: Certificate, said: str, **changed: object) -> None:
    with pytest.raises(UnsoundError, match=said):
        check_certificate(good.model_copy(update=changed))


def with_bound(good: Certificate, row: int, **changed: object) -> tuple[object, ...]:
    boxes = list(good.pruned)
    boxes[row] = boxes[row].model_copy(update=changed)
    return tuple(boxes)


def test_a_box_that_is_missing_is_missed(good):
    for row in range(len(good.pruned)):
        refused(good, "accounted for 0 times", pruned=good.pruned[:row] + good.pruned[row + 1 :])


def test_a_box_that_is_there_twice_is_refused(good):
    refused(good, "accounted for 2 times", pruned=(*good.pruned, good.pruned[0]))
    refused(good, "accounted for 2 times", evaluated=(*good.evaluated, good.evaluated[0]))


def test_a_frame_that_was_evaluated_is_missed(good):
    refused(good, "accounted for 0 times", evaluated=good.evaluated[1:])


def test_a_box_that_is_not_of_the_space_is_refused(good):
    refused(good, "the space has no box", pruned=with_bound(good, 0, box=(3, 3, 3, 3, 3)))
    refused(good, "the space has no frame", evaluated=((9,) * 8,))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factor", [0.5, 1.001])
def test_a_bound_that_is_not_the_box_s_is_refused(good, factor):
    for row, box in enumerate(good.pruned):
        refused(good, "has the bound", pruned=with_bound(good, row, bound=box.bound * factor))


def test_an_evaluated_frame_cannot_be_passed_off_as_pruned(good):
    evaluated = good.evaluated[0]
    for reason, bound in (("time", 1e9), ("memory", 1e15)):
        box = good.pruned[0].model_copy(update={"box": evaluated, "reason": reason, "bound": bound})
        refused(good, "has the bound", pruned=(*good.pruned, box), evaluated=good.evaluated[1:])


def test_a_reason_that_is_none_is_refused(good):
    boxes = tuple(box.model_copy(update={"reason": "time"}) for box in good.pruned)
    refused(good, "has the bound|may hold", pruned=boxes)


def test_the_best_have_to_be_the_best(good):
    refused(good, "number 1 of the best", best=good.best[::-1][:1] + good.best[1:])
    refused(good, "number|may", best=good.best[1:], top=2)
    slower = good.best[0].model_copy(update={"step_s": good.best[0].step_s * 1.01})
    refused(good, "number 1 of the best", best=(slower, *good.best[1:]))


def test_tuples_of_stages_have_to_be_least(good):
    entry = next(one for one in good.per_stage if max(one.least) < good.model.layers)
    rest = tuple(one for one in good.per_stage if one is not entry)
    more = entry.model_copy(update={"least": tuple(number + 1 for number in entry.least)})
    refused(good, "fewer than said", per_stage=(more, *rest))
    beyond = entry.model_copy(update={"least": (good.model.layers + 2,) * len(entry.least)})
    refused(good, "beyond the .* layers", per_stage=(beyond, *rest))
    refused(good, "it has no bounds of its tuples", per_stage=())
    short = entry.model_copy(update={"least": (*entry.least, 0)})
    refused(good, "pipeline ranks", per_stage=(short, *rest))


def test_the_count_has_to_be_right(good):
    refused(good, "but the space holds", strategies=good.strategies + 1)


def test_the_certificate_of_another_problem_is_refused(good):
    with pytest.raises(UnsoundError):
        check_certificate(good.model_copy(update={"hardware": good.hardware.model_copy(update={"memory_gbps": 1.0})}))


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"top": 0}'])
def test_a_file_that_is_no_certificate_is_refused(text, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match=r"c\.json"):
        load_certificate(tmp_path / "c.json")

"""Certificates of searches hold; changed ones do not."""

from collections.abc import Callable, Iterator

import pytest

import quintsched as qs
from quintsched.strategies.tuning.check_search_certificate import check_certificate
from quintsched.strategies.tuning.search_certificate import Certificate, certify, load_certificate

from .problems import groups, problem


def search(seed: int, top: int = 3, front: bool = False) -> qs.Tuning:
    given = problem(seed)
    fixed = given.choices.model_dump()
    return qs.tune(given.model, given.hardware, given.gpus, given.batch, given.seq, fixed=fixed, top=top, front=front)


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
        made = next(made for made in found if _has_all(made))
        check_certificate(made)
        yield made


def _has_all(made: Certificate) -> bool:
    reasons, sizes = {box.reason for box in made.pruned}, {len(box.box) for box in made.pruned}
    if made.hardware.measured.matmul:  # changed rates of its datasheet would change nothing
        return False
    return bool(made.per_stage and made.evaluated) and (len(made.best), len(reasons), len(sizes)) == (3, 2, 2)


def with_bound(good: Certificate, row: int, **changed: object) -> tuple[object, ...]:
    boxes = list(good.pruned)
    boxes[row] = boxes[row].model_copy(update=changed)
    return tuple(boxes)


def passed_off(good: Certificate, reason: str, bound: float) -> dict[str, object]:
    """Return a frame that was evaluated as one that was pruned."""
    box = good.pruned[0].model_copy(update={"box": good.evaluated[0], "reason": reason, "bound": bound})
    return {"pruned": (*good.pruned, box), "evaluated": good.evaluated[1:]}


def with_tuple(good: Certificate, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> dict[str, object]:
    """Return a tuple of stages that is another one."""
    entry = next(one for one in good.per_stage if max(one.least) < good.model.layers)
    rest = (one for one in good.per_stage if one is not entry)
    return {"per_stage": (entry.model_copy(update={"least": change(entry.least)}), *rest)}


def slower(good: Certificate) -> dict[str, object]:
    first = good.best[0].model_copy(update={"step_s": good.best[0].step_s * 1.01})
    return {"best": (first, *good.best[1:])}


CHANGES: list[tuple[str, Callable[[Certificate], dict[str, object]]]] = [
    ("accounted for 2 times", lambda good: {"pruned": (*good.pruned, good.pruned[0])}),
    ("accounted for 2 times", lambda good: {"evaluated": (*good.evaluated, good.evaluated[0])}),
    ("accounted for 0 times", lambda good: {"evaluated": good.evaluated[1:]}),
    ("the space has no box", lambda good: {"pruned": with_bound(good, 0, box=(3, 3, 3, 3, 3))}),
    ("the space has no frame", lambda good: {"evaluated": ((9,) * 8,)}),
    ("has the bound", lambda good: passed_off(good, "time", 1e9)),
    ("has the bound", lambda good: passed_off(good, "memory", 1e15)),
    ("has the bound|may hold", lambda good: {"pruned": [b.model_copy(update={"reason": "time"}) for b in good.pruned]}),
    ("number 1 of the best", lambda good: {"best": good.best[::-1][:1] + good.best[1:]}),
    ("number|may", lambda good: {"best": good.best[1:], "top": 2}),
    ("number 1 of the best", slower),
    ("fewer than said", lambda good: with_tuple(good, lambda least: tuple(number + 1 for number in least))),
    ("beyond the .* layers", lambda good: with_tuple(good, lambda least: (good.model.layers + 2,) * len(least))),
    ("pipeline ranks", lambda good: with_tuple(good, lambda least: (*least, 0))),
    ("it has no bounds of its tuples", lambda good: {"per_stage": ()}),
    ("but the space holds", lambda good: {"strategies": good.strategies + 1}),
    (r"\S", lambda good: {"hardware": good.hardware.model_copy(update={"memory_gbps": 1.0})}),
]


@pytest.mark.parametrize(("said", "change"), CHANGES)
def test_a_certificate_that_was_changed_is_refused(good, said, change):
    with pytest.raises(qs.UnsoundError, match=said):
        check_certificate(good.model_copy(update=change(good)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("factor", [None, 0.5, 1.001])
def test_a_box_that_is_missing_or_has_another_bound_is_refused(good, factor):
    for row, box in enumerate(good.pruned):
        others = good.pruned[:row] + good.pruned[row + 1 :]
        pruned = with_bound(good, row, bound=box.bound * factor) if factor else others
        with pytest.raises(qs.UnsoundError, match="has the bound" if factor else "accounted for 0 times"):
            check_certificate(good.model_copy(update={"pruned": pruned}))


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"top": 0}'])
def test_a_file_that_is_no_certificate_is_refused(text, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(qs.InputError, match=r"c\.json"):
        load_certificate(tmp_path / "c.json")

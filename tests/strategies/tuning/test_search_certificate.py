"""Searches: no strategy is below its box's bounds, certificates hold, changed ones do not, the best plans compile."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import quintsched as qs
from quintsched.strategies.prediction.simulated_strategy import simulated_step_s
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.tuning.check_search_certificate import check_certificate
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.search_certificate import SearchCertificate, load_certificate, make_certificate
from quintsched.strategies.tuning.strategy_bounds import frame_bounds, mesh_bounds
from quintsched.strategies.tuning.strategy_space import PER_STAGE, make_space

from .problems import groups, problem


def search(seed: int, top: int = 3, front: bool = False) -> qs.Tuning:
    given = problem(seed)
    fixed = given.choices.model_dump()
    return qs.tune(given.model, given.hardware, given.gpus, given.batch, given.seq, fixed=fixed, top=top, front=front)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_certificates_hold_and_survive_being_saved(seed, tmp_path):
    tuning = search(seed)
    make_certificate(tuning).save(tmp_path / "c.json")
    assert check_certificate(load_certificate(tmp_path / "c.json")) == tuning.strategies


LIKELY = 133
"""The problem to begin with: its certificate had all, when this was written."""


@pytest.fixture(scope="module")
def good() -> Iterator[SearchCertificate]:
    """A certificate with all that one may have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quintsched.strategies.tuning.branch_and_bound.FIRST_ROWS", 16)
        patch.setattr("quintsched.strategies.tuning.branch_and_bound.ROWS_AT_ONCE", 64)
        seeds = (seed for seed in (*range(LIKELY, 200), *range(LIKELY)) if groups(problem(seed)))
        found = (make_certificate(search(seed)) for seed in seeds)
        made = next(made for made in found if _has_all(made))
        check_certificate(made)
        yield made


def _has_all(made: SearchCertificate) -> bool:
    reasons, sizes = {box.reason for box in made.pruned}, {len(box.box) for box in made.pruned}
    if made.hardware.measured.matmul:  # changed rates of its datasheet would change nothing
        return False
    return bool(made.per_stage and made.evaluated) and (len(made.best), len(reasons), len(sizes)) == (3, 2, 2)


def with_bound(good: SearchCertificate, row: int, **changed: object) -> tuple[object, ...]:
    boxes = list(good.pruned)
    boxes[row] = boxes[row].model_copy(update=changed)
    return tuple(boxes)


def passed_off(good: SearchCertificate, reason: str, bound: float) -> dict[str, object]:
    """Return a frame that was evaluated as one that was pruned."""
    box = good.pruned[0].model_copy(update={"box": good.evaluated[0], "reason": reason, "bound": bound})
    return {"pruned": (*good.pruned, box), "evaluated": good.evaluated[1:]}


def with_tuple(good: SearchCertificate, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> dict[str, object]:
    """Return a tuple of stages that is another one."""
    entry = next(one for one in good.per_stage if max(one.least) < good.model.layers)
    rest = (one for one in good.per_stage if one is not entry)
    return {"per_stage": (entry.model_copy(update={"least": change(entry.least)}), *rest)}


def slower(good: SearchCertificate) -> dict[str, object]:
    first = good.best[0].model_copy(update={"step_s": good.best[0].step_s * 1.01})
    return {"best": (first, *good.best[1:])}


CHANGES: list[tuple[str, Callable[[SearchCertificate], dict[str, object]]]] = [
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


def holds(seed: int) -> int:
    """Check every box of a problem; return how many there are."""
    given = problem(seed)
    if not groups(given):
        return 0
    space = make_space(given.model, given.gpus, given.batch, given.seq, given.choices)
    evaluator = Evaluator(space, given.hardware)
    frames = frame_bounds(space, evaluator, np.arange(space.num_frames))
    columns, place = space.expand(np.arange(space.num_frames))
    found = evaluator.evaluate(columns)
    whole = columns["recompute"] != PER_STAGE
    assert np.all(frames.time_s[place[:, 0]] <= found.step_s)
    assert np.all(frames.memory_bytes[place[whole, 0]] <= found.memory_bytes[whole])
    _tuples_hold(seed, space, evaluator, frames, columns, place)
    meshes = mesh_bounds(space, frames)
    mesh_of = np.repeat(np.arange(len(space.starts) - 1), np.diff(space.starts))
    assert np.all(meshes.time_s[mesh_of] <= frames.time_s)
    assert np.all(meshes.memory_bytes[mesh_of] <= frames.memory_bytes)
    return space.num_frames


def _tuples_hold(seed, space, evaluator, frames, columns, place):
    draw = np.random.default_rng(seed)
    for pp in np.unique(columns["pp"]):
        by_stage = (columns["recompute"] == PER_STAGE) & space.recomputes_by_stage(place[:, 0])
        rows = np.flatnonzero(by_stage & (columns["pp"] == pp))[:300]
        if len(rows):
            layers = space.stage_layers(place[rows, 0])
            numbers = draw.integers(0, layers[:, None] + 1, (len(rows), pp))
            found = evaluator.evaluate({name: values[rows] for name, values in columns.items()}, numbers)
            bounds = frames.time_s[place[rows, 0]]
            assert np.all(bounds[found.exact] <= found.step_s[found.exact])
            assert np.all(frames.memory_bytes[place[rows, 0]] <= found.memory_bytes)
            some = np.flatnonzero(~found.exact)[:20]
            if len(some):
                strategies = [space.strategy(space.rows(place[rows[[row]]]), 0, tuple(numbers[row])) for row in some]
                assert np.all(bounds[some] <= evaluator.simulate(strategies))


def test_bounds_hold_for_every_strategy_of_hundreds_of_boxes():
    assert sum(holds(seed) for seed in range(3)) > 60


@pytest.mark.slow
def test_bounds_hold_for_every_strategy_of_tens_of_thousands_of_boxes():
    assert sum(holds(seed) for seed in range(3, 1000)) > 20_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fixed"),
    [
        ("gpt3-175b", 64, 64, {"recompute": "full", "tp": 8, "cp": 1}),
        ("mpt-1b", 16, 64, {"pp": (2, 4), "recompute": "none", "zero": (0, 1)}),
        ("mpt-1b", 8, 32, {"schedule": "zbv", "recompute": "none", "pp": (2, 4)}),
    ],
)
def test_the_best_five_take_what_is_said(model, gpus, batch, fixed):
    found = qs.tune(
        qs.find_model(model), qs.find_hardware("a100-80gb"), gpus, batch, 2048, fixed=fixed, top=5, front=False
    )
    assert found.best
    for one in found.best:
        plan_of(found.model, one.strategy).check("blocking").raise_if_unsound()
        predicted = qs.predict(found.model, found.hardware, one.strategy)
        assert (predicted.step_s, predicted.memory_bytes) == pytest.approx((one.step_s, one.memory_bytes))
        assert simulated_step_s(found.model, found.hardware, one.strategy) == pytest.approx(one.step_s, rel=0.01)

"""Explanation why a strategy is not the best: slower terms, or the rank that holds too much and a change that fits.

    explain(tuning, strategy)      a strategy beside the winner, term by term
    misfit(tuning)                 if nothing fits: the strategy that holds least, and the smallest change that fits

Changes are ordered by cost: first switches, then other ways to cut the work, then more GPUs:

    sequence parallelism ▶ ZeRO ▶ recomputation ▶ microbatch ▶ pp, tp, cp instead of dp ▶ twice as many GPUs, …
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import numpy as np

from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.flag_rows import read_strategy
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name, term_name
from quintsched.strategies.descriptions.strategy_validity import check, resolved
from quintsched.strategies.prediction.predict_one_strategy import Prediction, predict
from quintsched.strategies.prediction.strategy_columns import SWITCH_COLUMNS, Table
from quintsched.strategies.prediction.vectorized_prediction import Evaluated, evaluate
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.evaluator import Evaluator, Floats
from quintsched.strategies.tuning.strategy_bounds import frame_bounds
from quintsched.strategies.tuning.strategy_space import FRAME, PER_STAGE, SWITCHES, Columns, Space, divisors, make_space
from quintsched.strategies.tuning.tune import Tuning

MOST_GPUS = 2**20
FRAMES_AT_ONCE = 64
LESS_KEPT = ("none", "selective", "layernorm", "mlp_act", "layernorm+mlp_act", "layernorm+moe_act", "full")
"""Recomputation that is tried where a strategy does not fit: what comes behind its own, and else "full"."""
SMALL = 1e-3
"""Fraction of the winner's step below which differences of terms are not named."""


@dataclass(frozen=True)
class FittingChange:
    """Change that would make a strategy fit."""

    strategy: Strategy
    words: str
    """Text of the change: "microbatch 1 instead of 4"."""
    step_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Explanation:
    """Explanation why a strategy is not the best."""

    prediction: Prediction
    winner: Prediction | None
    """Prediction of the best strategy; None if nothing fits."""
    change: FittingChange | None
    """Smallest change that would make it fit; None if it fits, or no such change is known."""
    lines: tuple[str, ...]
    """Explanation as text."""


TAKEN = ("microbatch", "schedule", "chunks", "recompute", *SWITCH_COLUMNS, "zero", "zero_every", "gradients")
"""Settings that a strategy takes from the best one where it does not say them."""


def completed(tuning: Tuning, given: Mapping[str, Any]) -> Strategy:
    """Return a strategy with what is left out: sizes from the search, each setting from the best, if it can be placed.

    Raises UsageError for an unknown key or an invalid value.
    """
    space = tuning.space
    sizes: dict[str, Any] = {
        "gpus": space.gpus,
        "batch": space.batch,
        "seq": space.seq,
        "dtype": space.choices.dtype[0],
    }
    plain = read_strategy(tuning.model, sizes | dict(given))
    if not tuning.best:
        return plain
    best = tuning.best[0].strategy
    pipeline = () if plain.pp > 1 and best.pp > 1 else ("schedule", "chunks")
    taken = {name: getattr(best, name) for name in TAKEN if name not in {*given, *pipeline}}
    if best.tp == 1 and "sequence_parallel" in taken:
        taken["sequence_parallel"] = plain.tp > 1
    filled = plain
    for name, value in taken.items():
        tried = filled.model_copy(update={name: value})
        filled = tried if _can_be_placed(tuning.model, tuning.hardware, tried) else filled
    return filled


def explain(tuning: Tuning, strategy: Strategy) -> Explanation:
    """Explain why a strategy lost, does not fit, or won; raises `UsageError` for an invalid strategy."""
    found = predict(tuning.model, tuning.hardware, strategy)
    winner = predict(tuning.model, tuning.hardware, tuning.best[0].strategy) if tuning.best else None
    named = f"judged: {strategy_name(found.strategy)}"
    if not found.fits:
        change = smallest_change(tuning.model, tuning.hardware, found.strategy)
        return Explanation(found, winner, change, (named, *_too_large(found, change)))
    return Explanation(found, winner, None, (named, *_slower(found, winner)))


def misfit(tuning: Tuning) -> Explanation:
    """Explain why nothing fits: for the strategy that holds least, the limiting term and a change that would fit.

    Choices fixed by the user are freed first, one axis at a time; then the number of GPUs is raised.
    """
    space, hardware = tuning.space, tuning.hardware
    smallest, _ = least_memory(space, hardware)
    found = predict(space.model, hardware, smallest)
    changes = (_fitting(space, hardware, smallest, *wider) for wider in _wider(space))
    change = next((one for one in changes if one is not None), None)
    most = gigabytes(hardware.memory_gb * 1e9)
    said = f"nothing fits {hardware.name} with {most} GB; what holds least is {strategy_name(smallest)}"
    return Explanation(found, None, change, (said, *_too_large(found, change)))


def least_memory(space: Space, hardware: Hardware) -> tuple[Strategy, float]:
    """Return the strategy that holds least (with one number of recomputed layers for all stages), and its bytes."""
    evaluator = Evaluator(space, hardware)
    everything = np.arange(space.num_frames)
    bounds = frame_bounds(space, evaluator, everything).memory_bytes
    held, place = _least(space, evaluator, everything, bounds, lambda _, found: found.memory_bytes)
    columns = space.rows(place)
    columns["recompute"] = np.where(columns["recompute"] == PER_STAGE, 0, columns["recompute"])
    return space.strategy(columns, 0), held


def _least(
    space: Space, evaluator: Evaluator, frames: Ints, bounds: Floats, score: Callable[[Columns, Evaluated], Floats]
) -> tuple[float, Ints]:
    """Return the least score of the leaves of some frames, and its place, (1, 2): of equal ones, that of the fastest.

    `bounds` are lower bounds of the scores of each frame.
    """
    best: tuple[float, float, int, int] = (np.inf, np.inf, -1, -1)
    order = np.argsort(bounds, kind="stable")
    for start in range(0, len(order), FRAMES_AT_ONCE):
        batch = order[start : start + FRAMES_AT_ONCE]
        if bounds[batch[0]] > best[0]:
            break
        columns, place = space.expand(frames[batch])
        found = evaluator.evaluate(columns)
        scores = score(columns, found)
        row = int(np.lexsort((place[:, 1], place[:, 0], found.step_s, scores))[0])
        best = min(best, (float(scores[row]), float(found.step_s[row]), *place[row].tolist()))
    return best[0], np.array([best[2:]])


def smallest_change(model: Model, hardware: Hardware, strategy: Strategy) -> FittingChange | None:
    """Return the smallest change that makes a strategy fit, the fastest among those of one kind; None if unknown."""
    for _, same in groupby(_changes(model, strategy), key=lambda one: one[0]):
        placed = [(words, one) for _, words, one in same if _can_be_placed(model, hardware, one)]
        if not placed:
            continue
        fits = evaluate(model, hardware, Table.from_strategies([one for _, one in placed])).fits
        if fits.any():
            fitting = [placed[row] for row in np.flatnonzero(fits)]
            found = evaluate(model, hardware, Table.from_strategies([one for _, one in fitting]), simulate=True)
            row = int(found.step_s.argmin())
            words, one = fitting[row]
            return FittingChange(one, words, float(found.step_s[row]), float(found.memory_bytes[row]))
    return None


def binding_term(prediction: Prediction) -> tuple[str, float]:
    """Return the largest memory term of the rank that holds most, with all activations as one term, and its bytes."""
    terms: dict[str, float] = {}
    for name, held in prediction.breakdown_bytes.items():
        kind = "activations" if name.startswith("activations") else name
        terms[kind] = terms.get(kind, 0.0) + held
    return max(terms.items(), key=lambda term: term[1])


def _changes(model: Model, strategy: Strategy) -> Iterator[tuple[int, str, Strategy]]:
    """Yield (size, text, changed strategy), smaller changes first; not all of them are valid."""

    def changed(**values: Any) -> tuple[str, Strategy]:
        other = strategy.model_copy(update=values)
        return _in_words(strategy, other, values), other

    if not strategy.sequence_parallel and strategy.tp > 1:
        yield 0, "with sequence parallelism", strategy.model_copy(update={"sequence_parallel": True})
    for zero in range(strategy.zero + 1, 4):
        yield 1, *changed(zero=zero)
    at = LESS_KEPT.index(strategy.recompute) if strategy.recompute in LESS_KEPT else -2
    for recompute in LESS_KEPT[at + 1 :]:
        yield 1, *changed(recompute=recompute)
    for size in divisors(strategy.microbatch)[:-1]:
        yield 1, *changed(microbatch=size)
    sparing = {"zero": 3, "recompute": "full", "microbatch": 1, "sequence_parallel": strategy.tp > 1}
    more = {name: value for name, value in sparing.items() if value != getattr(strategy, name)}
    for size, others in ((2, {}), (3, more)):
        for axis, factor in product(("pp", "tp", "cp"), divisors(strategy.dp)[1:]):
            cut = {axis: getattr(strategy, axis) * factor, "dp": strategy.dp // factor}
            yield size, *changed(**cut, **others)
    gpus = strategy.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        for axis in ("dp", "pp", "tp"):
            yield gpus, *changed(gpus=gpus, **{axis: getattr(strategy, axis) * gpus // strategy.gpus})


def _in_words(strategy: Strategy, other: Strategy, names: Iterable[str]) -> str:
    return ", ".join(
        f"{name} {_value(getattr(other, name))} instead of {_value(getattr(strategy, name))}" for name in names
    )


def _value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _can_be_placed(model: Model, hardware: Hardware, strategy: Strategy) -> bool:
    try:
        check(model, hardware, strategy)
    except UsageError:
        return False
    return True


def _wider(space: Space) -> Iterator[tuple[Choices, int]]:
    """Yield choices and GPUs: with each of the user's fixed axes freed, then with more GPUs."""
    free = Choices()
    order = ("sequence_parallel", "zero", "recompute", "microbatch", "chunks", "schedule", "pp", "tp", "cp", "ep", "dp")
    for axis in order:
        if getattr(space.choices, axis) != getattr(free, axis):
            yield space.choices.model_copy(update={axis: getattr(free, axis)}), space.gpus
    gpus = space.gpus
    while (gpus := 2 * gpus) <= min(MOST_GPUS, 64 * space.gpus):
        yield space.choices.model_copy(update={"dp": None}), gpus


def _fitting(space: Space, hardware: Hardware, smallest: Strategy, choices: Choices, gpus: int) -> FittingChange | None:
    """Return the change to the strategy that fits with these choices and differs in the fewest fields."""
    try:
        wider = make_space(space.model, gpus, space.batch, space.seq, choices)
    except UsageError:
        return None
    nearest = _nearest(wider, hardware, smallest)
    if nearest is None:
        return None
    found = predict(space.model, hardware, nearest)
    names = [name for name in type(smallest).model_fields if getattr(smallest, name) != getattr(nearest, name)]
    return FittingChange(nearest, _in_words(smallest, nearest, names), found.step_s, found.memory_bytes)


def _nearest(space: Space, hardware: Hardware, wanted: Strategy) -> Strategy | None:
    """Return the strategy that fits and differs in the fewest columns from the one wanted, the fastest of those."""
    evaluator = Evaluator(space, hardware)
    everything = np.arange(space.num_frames)
    frames = everything[frame_bounds(space, evaluator, everything).memory_bytes <= evaluator.capacity_bytes]
    apart = np.array([_values(wanted, space, name) for name in FRAME]) != space.frames[frames]

    def differing(columns: Columns, found: Evaluated) -> Floats:
        fits = (found.memory_bytes <= evaluator.capacity_bytes) & (columns["recompute"] != PER_STAGE)
        each = [columns[name] != _values(wanted, space, name) for name in (*FRAME, *SWITCHES)]
        return np.where(fits, np.sum(each, axis=0), np.inf)

    least, place = _least(space, evaluator, frames, apart.sum(axis=1), differing)
    return space.strategy(space.rows(place), 0) if least < np.inf else None


def _values(strategy: Strategy, space: Space, column: str) -> int:
    """Return a strategy's value in a column of the space; -9 if the space has no such choice."""
    value = getattr(strategy, column)
    if column in ("schedule", "dtype"):
        choices = getattr(space.choices, column)
        return choices.index(value) if value in choices else -9
    return space.words.get(value, -9) if isinstance(value, str) else int(value)


def _too_large(found: Prediction, change: FittingChange | None) -> Iterator[str]:
    capacity = found.hardware.memory_gb * 1e9
    name, held = binding_term(found)
    of_ranks = found.memory_bytes_per_rank
    yield (
        f"does not fit: pipeline rank {of_ranks.index(max(of_ranks))} would hold {gigabytes(found.memory_bytes)} GB of "
        f"{gigabytes(capacity)}, {gigabytes(held)} of them {name.replace('_', ' ')}"
    )
    if change is None:
        yield f"no single change is known that fits; it takes GPUs with {gigabytes(found.memory_bytes)} GB"
    else:
        yield (
            f"the smallest change that fits: {change.words}; then {gigabytes(change.memory_bytes)} GB and "
            f"{duration(change.step_s)} a step"
        )


def _slower(found: Prediction, winner: Prediction | None) -> Iterator[str]:
    if winner is None or strategy_name(resolved(found.strategy)) == strategy_name(winner.strategy):
        yield f"nothing is faster: {duration(found.step_s)} a step"
        return
    if found.strategy.gpus != winner.strategy.gpus:
        yield f"on {counted(found.strategy.gpus, 'GPU')}, where the search had {winner.strategy.gpus}:"
    slower = found.step_s / winner.step_s - 1
    yield f"{duration(found.step_s)} a step, {percent(slower)} slower than the best: {strategy_name(winner.strategy)}"
    for name, mine, theirs in terms(found, winner):
        if abs(mine - theirs) >= SMALL * winner.step_s:
            change = f"{'+' if mine > theirs else '-'}{duration(abs(mine - theirs))}"
            yield f"  {term_name(name)}: {duration(mine)}, best {duration(theirs)} ({change})"


def terms(found: Prediction, winner: Prediction) -> list[tuple[str, float, float]]:
    """Return the terms of both steps, (name, seconds, winner's seconds), largest loss first."""
    names = dict.fromkeys((*found.waited_s, *winner.waited_s))
    both = [(name, found.waited_s.get(name, 0.0), winner.waited_s.get(name, 0.0)) for name in names]
    return sorted(both, key=lambda term: term[2] - term[1])

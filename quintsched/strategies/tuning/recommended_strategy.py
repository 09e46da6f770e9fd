"""Advice from a ranking: the simplest strategy within the model's own error, rows that say something new, and reasons.

4.00 s  dp=64; ZeRO-2          ┐ within 5 % no prediction tells them apart: the simplest is recommended
4.03 s  dp=64; microbatch 1    │ a variation of the first: one row
4.08 s  dp=32,cp=2; ZeRO-3     ┘
4.10 s  dp=32,tp=2; ZeRO-3       slower and larger than another: no row
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from quintsched.files.terminal import percent
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import (
    duration,
    held_name,
    strategy_mesh,
    strategy_name,
    term_name,
)
from quintsched.strategies.prediction.predict_one_strategy import Prediction, predict
from quintsched.strategies.tuning.explain_choice import binding_term, terms
from quintsched.strategies.tuning.tune import Candidate, Tuning

BAND = 0.05
"""Relative difference of times that predictions do not resolve: their mean error on tables of measured steps
(benchmarks/prediction.py)."""
POOL = 64
"""Number of ranked strategies from which the simplest is chosen."""
PLAIN = ("1f1b", "gpipe")
MOST_VARIATIONS = 3
BINDING = 0.9
"""Fraction of the memory above which it counts as binding."""


def reasons(found: Tuning, predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield lines on the terms of the recommended step, whether memory binds it, and the second's loss."""
    chosen = predict(found.model, found.hardware, recommended(found).strategy)
    waits = chosen.waited_s
    beside = {name: value for name, value in chosen.breakdown_s.items() if name not in waits}
    computes = waits.pop("compute", 0.0) / chosen.step_s
    lost, hidden = _largest(waits, chosen, 0.001), _largest(beside, chosen, 0.01)
    yield (
        f"why: {percent(computes)} of its step computes{f'; the rest is {lost}' if lost else ''}"
        f"{f'; hidden beside computation: {hidden}' if hidden else ''}"
    )
    used = chosen.memory_bytes / (found.hardware.memory_gb * 1e9)
    kind, held = binding_term(chosen)
    binds = "memory binds" if used > BINDING else "memory does not bind"
    share = percent(held / chosen.memory_bytes)
    yield f"{binds}: the fullest rank uses {percent(used)} of what it has, {share} of it {held_name(kind)}"
    if len(predictions) > 1:
        yield _difference(predictions[0], predictions[1])


def _largest(costs: Mapping[str, float], of: Prediction, least: float) -> str:
    """Return the three largest terms as text, as far as they are at least this share of the step."""
    costly = sorted((value, name) for name, value in costs.items() if value >= least * of.step_s)[::-1][:3]
    return ", ".join(
        f"{term_name(name.removesuffix('_hidden'))} {percent(value / of.step_s)}" for value, name in costly
    )


def advice(found: Tuning) -> Iterator[str]:
    """Yield which strategy is recommended, if it is not the fastest: the simplest within the model's own error."""
    chosen = recommended(found)
    slower = chosen.step_s / found.best[0].step_s - 1
    if slower > 0:
        yield (
            f"recommended: {strategy_name(chosen.strategy)}, {duration(chosen.step_s)}: the simplest within "
            f"{percent(BAND)} of the fastest (+{percent(slower)}), which no prediction tells apart"
        )


def _difference(best: Prediction, other: Prediction) -> str:
    """Return the term by which another strategy is slower, as text."""
    slower = other.step_s / best.step_s - 1
    name, own, least = terms(other, best)[0]
    if own <= least:
        return "the second takes as long"
    return f"the second is {percent(slower)} slower, most of it for {term_name(name)}"


@dataclass(frozen=True)
class Row:
    """Strategy of a table, with settings that its variations within the band have."""

    candidate: Candidate
    variations: tuple[str, ...]


def recommended(tuning: Tuning) -> Candidate:
    """Return the simplest of the strategies whose times are within the band of the best, the fastest of equals."""
    near = [one for one in tuning.best if one.step_s <= tuning.best[0].step_s * (1 + BAND)]
    return min(near, key=lambda one: (complexity(one.strategy, tuning.hardware), one.step_s))


def complexity(strategy: Strategy, hardware: Hardware) -> int:
    """Return a count of what a strategy asks of its user: axes, ZeRO beyond its first stage, schedules, recomputation,
    and tp, cp or ep over the borders of nodes."""
    axes: dict[str, int] = {axis: getattr(strategy, axis) for axis in ("tp", "cp", "ep", "pp")}
    reach, borders = 1, 0
    for axis in ("tp", "cp", "ep"):
        reach *= axes[axis]
        borders += axes[axis] > 1 and reach > hardware.gpus_per_node
    recompute = 0 if strategy.recompute == "none" else 1 if isinstance(strategy.recompute, str) else 2
    schedule = strategy.pp > 1 and strategy.schedule not in PLAIN
    kept_apart = schedule and strategy.schedule != "interleaved-1f1b"
    return (
        2 * sum(size > 1 for size in axes.values())
        + 2 * borders
        + max(strategy.zero - 1, 0)
        + recompute
        + int(schedule)
        + int(kept_apart)
    )


def rows(candidates: Sequence[Candidate]) -> list[Row]:
    """Return a row for each mesh that no candidate of another beats in time and memory, by ascending time."""
    found: dict[str, list[Candidate]] = {}
    for one in candidates:
        found.setdefault(strategy_mesh(one.strategy), []).append(one)
    kept = [
        members[0]
        for members in found.values()
        if not any(one.step_s < members[0].step_s and one.memory_bytes < members[0].memory_bytes for one in candidates)
    ]
    return [Row(one, _variations(one, found[strategy_mesh(one.strategy)][1:])) for one in kept]


def _variations(best: Candidate, others: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the settings in which others of the same mesh differ, as far as they are within the band of the best."""
    own = set(strategy_name(best.strategy).split("; "))
    near = [one for one in others if one.step_s <= best.step_s * (1 + BAND)]
    differing = [part for one in near for part in strategy_name(one.strategy).split("; ") if part not in own]
    return tuple(dict.fromkeys(differing))[:MOST_VARIATIONS]

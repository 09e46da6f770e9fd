"""Text on why the best strategy is best: the terms of its time, whether memory binds, and the loss of the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quintsched.strategies.descriptions.strategy_text import held_name, percent, term_name
from quintsched.strategies.prediction.step import Prediction
from quintsched.strategies.tuning.explain_choice import binding_term
from quintsched.strategies.tuning.tune import Tuning

BINDING = 0.9
"""Fraction of the memory above which it counts as binding."""


def reasons(found: Tuning, predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yield lines on the terms of the best step's time, whether memory binds it, and the second's loss."""
    best = predictions[0]
    waits = {name: value for name, value in best.breakdown_s.items() if not name.endswith("_hidden")}
    computes = waits.pop("compute", 0.0) / best.step_s
    costly = sorted((value, name) for name, value in waits.items() if value >= 0.001 * best.step_s)[::-1][:3]
    lost = ", ".join(f"{term_name(name)} {percent(value / best.step_s)}" for value, name in costly)
    yield f"why: {percent(computes)} of the best step computes{f'; the rest is {lost}' if lost else ''}"
    used = best.memory_bytes / (found.hardware.memory_gb * 1e9)
    kind, held = binding_term(best)
    binds = "memory binds" if used > BINDING else "memory does not bind"
    share = percent(held / best.memory_bytes)
    yield f"{binds}: the fullest rank uses {percent(used)} of what it has, {share} of it {held_name(kind)}"
    if len(predictions) > 1:
        yield _difference(best, predictions[1])


def _difference(best: Prediction, other: Prediction) -> str:
    """Return the term by which another strategy is slower, as text."""
    slower = other.step_s / best.step_s - 1
    terms = {name for name in (*best.breakdown_s, *other.breakdown_s) if not name.endswith("_hidden")}
    change = {name: other.breakdown_s.get(name, 0.0) - best.breakdown_s.get(name, 0.0) for name in sorted(terms)}
    name, most = max(change.items(), key=lambda term: term[1])
    if most <= 0:
        return "the second takes as long"
    return f"the second is {percent(slower)} slower, most of it for {term_name(name)}"

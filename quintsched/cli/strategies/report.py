"""A prediction in words: what the strategy is, its figures, and where time and memory go."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from quintsched.cli.output import percent

if TYPE_CHECKING:
    from quintsched.descriptions.strategy import Strategy
    from quintsched.prediction.step import Prediction

HIDDEN = "_hidden"

TERMS = {
    "compute": "forward and backward",
    "recompute": "recomputation",
    "tp": "tp communication",
    "sp": "sequence-parallel communication",
    "cp": "cp communication",
    "ep": "ep communication",
    "pp": "pp communication",
    "dp": "dp communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer step",
}
"""Terms of time in words; others are shown by their names."""


def describe(found: Prediction) -> Iterator[str]:
    """Yield the lines of one prediction."""
    from quintsched.text.listing import table

    yield f"{found.model.name} on {found.strategy.gpus} {found.hardware.name}: {name_of(found.strategy)}"
    capacity = found.hardware.memory_gb
    verdict = "fits" if found.fits else "DOES NOT FIT"
    rows = [
        ("step", f"{duration(found.step_s)}", f"{found.strategy.microbatches} microbatches on each replica"),
        ("throughput", f"{found.tokens_per_s:,.0f} tokens/s", f"{found.tokens_per_s / found.strategy.gpus:,.0f} a GPU"),
        ("MFU", percent(found.mfu), "of the peak, by the model's own operations"),
        ("memory", f"{gigabytes(found.memory_bytes)} GB", f"on the fullest rank, of {capacity:g} GB: {verdict}"),
    ]
    yield from table(("", "", ""), rows)[1:]
    yield ""
    yield from table(("time", "waited for", "share", "hidden"), _times(found.breakdown_s, found.step_s))
    yield ""
    yield from table(("memory of the fullest rank", "GB", "share"), _bytes(found.breakdown_bytes, found.memory_bytes))


def name_of(strategy: Strategy) -> str:
    """Return a strategy in one line; what is plain is left out."""
    axes = ",".join(
        f"{axis}={size}" for axis in ("dp", "pp", "ep", "cp", "tp") if (size := getattr(strategy, axis)) > 1
    )
    parts = [axes or "one rank", f"microbatch {strategy.microbatch}"]
    if strategy.pp > 1:
        chunks = f", {strategy.chunks} chunks" if (strategy.chunks or 1) > 1 else ""
        parts.append(f"{strategy.schedule}{chunks}")
    if strategy.stages:
        parts.append(f"stages {','.join(map(str, strategy.stages))}")
    parts += [recompute_of(strategy)] if strategy.recompute != "none" else []
    parts += ["sequence-parallel"] if strategy.sequence_parallel else []
    parts += [f"ZeRO-{strategy.zero}"] if strategy.zero else []
    return "; ".join([*parts, strategy.dtype])


def recompute_of(strategy: Strategy) -> str:
    """Return how much is recomputed, in words."""
    if isinstance(strategy.recompute, str):
        return f"{strategy.recompute} recomputation"
    several = isinstance(strategy.recompute, tuple)
    numbers = ",".join(map(str, strategy.recompute)) if isinstance(strategy.recompute, tuple) else strategy.recompute
    return f"{numbers} layers recomputed by {'stage' if several else 'each stage'}"


def _times(terms: Mapping[str, float], step_s: float) -> Iterator[tuple[str, ...]]:
    for name in dict.fromkeys(term.removesuffix(HIDDEN) for term in terms):
        waited, hidden = terms.get(name, 0.0), terms.get(f"{name}{HIDDEN}", 0.0)
        if waited or hidden:
            yield (
                TERMS.get(name, name.replace("_", " ")),
                duration(waited) if waited else "-",
                percent(waited / step_s) if waited else "-",
                duration(hidden) if hidden else "-",
            )


def _bytes(terms: Mapping[str, float], total: float) -> Iterator[tuple[str, ...]]:
    for name, held in terms.items():
        if held:
            yield name.replace("_", " "), gigabytes(held), percent(held / total)


def duration(seconds: float) -> str:
    """Return a time with four digits that count, in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def gigabytes(held: float) -> str:
    """Return bytes in units of 10^9."""
    return _digits(held / 1e9) if held >= 1e7 else f"{held / 1e9:.2g}"


def _digits(value: float) -> str:
    """Return a number with four digits that count, or all before the point."""
    whole = max(math.floor(math.log10(value)), 0) if value > 0 else 0
    return f"{value:,.{max(3 - whole, 0)}f}"

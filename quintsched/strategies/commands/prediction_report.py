"""Text of a prediction: the strategy, its figures, and the terms of time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from quintsched.errors import counted
from quintsched.files.terminal import percent

if TYPE_CHECKING:
    from quintsched.strategies.prediction.predict_one_strategy import Prediction


def describe(found: Prediction, simulated_s: float | None = None) -> Iterator[str]:
    """Yield the lines of one prediction."""
    from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name
    from quintsched.text.plan_listing import table

    yield f"{found.model.name} on {found.strategy.gpus} {found.hardware.name}: {strategy_name(found.strategy)}"
    capacity = found.hardware.memory_gb
    verdict = "fits" if found.fits else "DOES NOT FIT"
    rows = [
        ("step", duration(found.step_s), f"{counted(found.strategy.microbatches, 'microbatch')} on each replica"),
        ("throughput", f"{found.tokens_per_s:,.0f} tokens/s", f"{found.tokens_per_s / found.strategy.gpus:,.0f} a GPU"),
        ("MFU", percent(found.mfu), "of the peak, by the model's own operations"),
        ("memory", f"{gigabytes(found.memory_bytes)} GB", f"on the fullest rank, of {capacity:g} GB: {verdict}"),
    ]
    if simulated_s is not None:
        error = f"{100 * (found.step_s / simulated_s - 1):+.2f} %"
        rows.insert(
            1, ("simulated", duration(simulated_s), f"by its plan, event by event; the step above is {error} off")
        )
    yield from table(("", "", ""), rows)[1:]
    yield ""
    yield from table(("time", "waited for", "share", "hidden"), _times(found.breakdown_s, found.step_s))
    yield ""
    yield from table(("memory of the fullest rank", "GB", "share"), _bytes(found.breakdown_bytes, found.memory_bytes))


def as_data(found: Prediction, simulated_s: float | None = None) -> dict[str, Any]:
    """Return a prediction as JSON data, with the simulated time of its plan if that was requested."""
    return {
        "model": found.model.name,
        "hardware": found.hardware.name,
        "strategy": found.strategy.model_dump(mode="json", exclude_none=True),
        "step_s": found.step_s,
        **({} if simulated_s is None else {"simulated_step_s": simulated_s}),
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "fits": found.fits,
        "memory_bytes": {"peak": found.memory_bytes, "per_pipeline_rank": list(found.memory_bytes_per_rank)},
        "breakdown_s": found.breakdown_s,
        "breakdown_bytes": found.breakdown_bytes,
    }


def _times(terms: Mapping[str, float], step_s: float) -> Iterator[tuple[str, ...]]:
    from quintsched.strategies.descriptions.strategy_text import duration, term_name

    for name in dict.fromkeys(term.removesuffix("_hidden") for term in terms):
        waited, hidden = terms.get(name, 0.0), terms.get(f"{name}_hidden", 0.0)
        if waited or hidden:
            yield (
                term_name(name),
                duration(waited) if waited else "-",
                percent(waited / step_s) if waited else "-",
                duration(hidden) if hidden else "-",
            )


def _bytes(terms: Mapping[str, float], total: float) -> Iterator[tuple[str, ...]]:
    from quintsched.strategies.descriptions.strategy_text import gigabytes, held_name

    for name, held in terms.items():
        if held:
            yield held_name(name), gigabytes(held), percent(held / total)

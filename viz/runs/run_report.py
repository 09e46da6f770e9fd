"""Report of a run: one HTML page with its figures, curves, ranks, and its steps beside the plan.

    figures and how it ended  │ curves of the log │ a row per rank │ where it ran
    with a trace: planned beside measured, where the time of each rank goes, and the interactive page within

The page needs nothing else: pictures are within it, and the page of the plan is a frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quintsched.files.atomic import write_whole
from quintsched.simulation.notebook_html import figures, rows_of, words
from quintsched.simulation.simulator import Simulation, simulate
from quintsched.trace.measured_trace import MeasuredStep, Trace
from quintsched.trace.training_log import TrainingLog
from quintsched.verify.soundness import check

from ..draw_timeline import draw_comparison, draw_measured
from ..house_style import house_style
from ..page.plan_page import page_of
from .report_parts import page_of_parts, page_within, section
from .training_curves import draw_training

NAMES = {
    "plan": "plan",
    "step": "optimizer steps",
    "loss": "loss",
    "best_validation_loss": "best validation loss",
    "step_s": "seconds a step",
    "samples_per_s": "samples per second",
    "tokens_per_s": "tokens per second",
    "mfu": "MFU",
    "bubble": "bubble, measured",
    "planned_bubble": "bubble, planned with unit costs",
    "memory_gb": "memory of the fullest rank, GB",
    "ended": "ended",
}
"""Figures of a run's summary in order, with what they are."""


MOST_DRAWN = 5_000
"""Maximum number of instructions of a plan that is drawn beside its interactive page."""
SHARES = "mfu", "bubble", "planned_bubble"


def save_report(
    logs: Sequence[TrainingLog], summaries: Sequence[Mapping[str, Any]], trace: Trace | None, path: Path
) -> None:
    """Write the report of runs, and of the trace of the first one; raises `UsageError` on failure."""
    title = ", ".join(log.name for log in logs)
    with house_style():
        parts = [*_runs(logs, summaries), *(_steps(trace) if trace is not None else ())]
    write_whole(path, page_of_parts(title, parts), "the report")


def _runs(logs: Sequence[TrainingLog], summaries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for log, summary in zip(logs, summaries, strict=True):
        yield section(
            log.name, figures([(NAMES[name], _text(summary[name], name)) for name in NAMES if name in summary])
        )
    if any(log.series("loss")[0] for log in logs):
        yield section("curves", draw_training(logs).part())
    for log in logs:
        if ranks := _ranks(log):
            yield section(f"{log.name}: ranks", rows_of(("rank", "computes", "memory, GB"), ranks))
        if found := next((record["environment"] for record in reversed(log.records) if "environment" in record), None):
            yield section(f"{log.name}: environment", figures([(name, _text(value)) for name, value in found.items()]))


def _text(value: object, name: str = "") -> str:
    if value is None:
        return "not yet" if name == "ended" else "not finite"
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _ranks(log: TrainingLog) -> list[tuple[str, ...]]:
    """Return the share of time in which each rank computes, and its memory, of the last record."""
    last = next((record for record in reversed(log.records) if record.get("rank_busy")), None)
    if last is None:
        return []
    memory = last.get("rank_memory_gb") or [0.0] * len(last["rank_busy"])
    found = zip(last["rank_busy"], memory, strict=False)
    return [(str(rank), f"{busy:.1%}", f"{held:.2f}") for rank, (busy, held) in enumerate(found)]


def _steps(trace: Trace) -> Iterator[str]:
    """Yield what a trace shows: the typical step under the plan, which is timed by the trace's own costs."""
    step, simulation = trace.step(), simulate(trace.plan, trace.costs())
    yield section("planned beside measured", rows_of(("", "makespan", "bubble"), _makespans(trace, simulation)))
    if trace.plan.num_instructions <= MOST_DRAWN:
        yield section("the step of median length", draw_measured(simulation, [step]).part())
        yield section("where the time goes, under the measured costs", draw_comparison([simulation]).part())
    page = page_of(simulation, [step], trace.plan.title)
    yield section("the plan: click on idle time to ask why", page_within(page, trace.plan.title))
    yield section("proof", words(check(trace.plan).explain()))


def _makespans(trace: Trace, simulation: Simulation) -> Iterator[tuple[str, str, str]]:
    runs: list[tuple[str, Simulation | MeasuredStep]] = [("planned, under the measured costs", simulation)]
    runs += [(f"measured, step {number}", trace.step(number)) for number in trace.steps]
    for name, run in runs:
        yield name, f"{run.makespan:.4g} {run.unit}", f"{run.bubble:.1%}"

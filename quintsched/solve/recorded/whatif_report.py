"""Report of an analysis in words: replay, causes, waits, and the better orders."""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.errors import counted
from quintsched.files.terminal import percent
from quintsched.solve.recorded.whatif import WhatIf
from quintsched.text.plan_listing import table

MOST_NAMED = 3
"""Most ranks that are named on which one rank has waited."""
LEAST_SHARE = 0.0005
"""Shares of a step below this are left out."""


def in_words(found: WhatIf) -> Iterator[str]:
    """Yield the lines of a report."""
    step = found.step.makespan
    yield f"{found.run.source}: {found.run.plan.title}; step {found.step.number}, of {len(found.run.steps)} recorded"
    yield f"measured {step:.4g} ms, bubble {percent(found.bubble)}"
    alone, with_messages, everything = found.replayed.values()
    yield (
        f"replayed from computations {_signed(alone / step - 1)}, with {found.recording.message_time:.3g} ms for each "
        f"message {_signed(with_messages / step - 1)}, from all parts {_signed(everything / step - 1)}"
    )
    yield ""
    rows = [("work", percent(found.work / step), "computations of a rank on average")]
    rows += [(one.name, percent(one.time / step), one.where) for one in found.causes]
    yield from table(("of the step", "", ""), rows)
    yield ""
    for rank, waited in enumerate(found.waits):
        named = [f"{name} {percent(time / step)}" for name, time in waited.items() if time >= LEAST_SHARE * step]
        more = [f"others {percent(sum([*waited.values()][MOST_NAMED:]) / step)}"] if len(named) > MOST_NAMED else []
        yield f"rank {rank} idle {percent(sum(waited.values()) / step)}: {', '.join([*named[:MOST_NAMED], *more])}"
    yield ""
    most = counted(max(found.memory_cap), "microbatch", "g")
    yield f"best order in the same memory (at most {most} on a rank):"
    for name, best in found.better.items():
        claim = best.certificate
        yield (
            f"{name} backwards {claim.value:.4g} ms: {percent(found.avoidable(name))} of the step was avoidable; "
            f"certified bound {claim.bound:.4g} (rank {claim.rank} by {claim.reason}), gap {percent(claim.gap)}"
        )
        if best.proved is not None and best.proved > claim.bound:
            yield f"  bound proved by CP-SAT {best.proved:.4g}, gap {percent(best.gap)}"
    if len(found.better) > 1:
        yield "split backwards: both halves are taken to be equally long"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"

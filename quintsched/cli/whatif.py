"""`quintsched whatif`: how much of a recorded step was avoidable, and the causes of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.pictures import PAGE, PICTURES, picture_path, write_picture
from quintsched.cli.shared_options import AsJson, emit, percent, refuse_input, say
from quintsched.errors import UsageError
from quintsched.files.progress_line import progress

if TYPE_CHECKING:
    from quintsched.solve.order_search import Attempt
    from quintsched.solve.recorded import WhatIf

SAME = "same"
MOST_NAMED = 3
"""Most ranks that are named on which one rank has waited."""
LEAST_SHARE = 0.0005
"""Shares of a step below this are left out."""


def whatif(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="Directory of traces of a run: by this project, Primus or torch.profiler."
        ),
    ],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Step to analyse; default: the one of median time.")
    ] = None,
    memory_cap: Annotated[
        str,
        typer.Option(
            "--memory-cap", metavar="X", help="Most activations on a rank, in microbatches; same: as recorded."
        ),
    ] = SAME,
    effort: Annotated[int, typer.Option("--effort", metavar="N", help="Work of the search.")] = 4,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", help="End after this time at the latest.")] = 60.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the search.")] = 0,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="Write the better plan there.")] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="Write its lower bound, for `certify`.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PICTURE", help="Draw both timelines: .png, .svg or .html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tell how much of a measured step was avoidable, and by what.

    Rebuilds plan and costs from a trace and replays them. Then says what each cause of idle time costs, on whom each
    rank has waited, and how much faster the best order in equal memory is, with a certified bound.
    """
    from quintsched.solve.recorded import load_run, what_if

    path = None if output is None else picture_path(output, (*PICTURES, PAGE))
    for file in filter(None, (path, plan, certificate)):
        refuse_input(file, trace)
    with progress("reading the trace") as shown:
        run = load_run(trace)

        def told(attempt: Attempt, taken_s: float) -> None:
            shown.at(taken_s, seconds, f"{attempt.value:g} at most, {attempt.bound.value:g} at least")

        cap = None if memory_cap == SAME else _number(memory_cap)
        found = what_if(run, step=step, memory_cap=cap, effort=effort, seconds=seconds, seed=seed, told=told)
    best = found.better[found.alike]
    if plan is not None:
        best.plan.save(plan)
    if certificate is not None:
        best.certificate.save(certificate)
    if path is not None:
        write_picture(path, lambda: _draw(found, path))
    if as_json:
        emit(found.summary())
    else:
        say(_in_words(found))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--memory-cap {text}: give a number of microbatches, or {SAME}") from None


def _draw(found: WhatIf, path: Path) -> None:
    from quintsched import viz

    viz.compare(found.simulations, path)


def _in_words(found: WhatIf) -> Iterator[str]:
    from quintsched.text.listing import table

    step = found.step.makespan
    yield f"{found.run.source}: {found.run.plan.title}; step {found.step.number} of {len(found.run.steps)} recorded"
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
    caps = sorted({f"{cap:g}" for cap in found.memory_cap}, key=float)
    yield f"best order in the same memory (at most {caps[-1]} microbatches on a rank):"
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

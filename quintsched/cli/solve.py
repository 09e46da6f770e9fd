"""`quintsched solve` and `certify`: the best order for given costs and memory, and the check of its lower bound."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, cast

import typer

from quintsched.cli.shared_options import (
    AsJson,
    CostsFile,
    Effort,
    Microbatches,
    PlanFile,
    Seconds,
    Seed,
    check_outputs,
    emit,
    note,
    read_costs,
    read_plan,
    say,
)
from quintsched.errors import UsageError
from quintsched.files.terminal import percent
from quintsched.files.terminal_progress import progress

if TYPE_CHECKING:
    from quintsched.solve import Solution
    from quintsched.solve.order_problem import Objective
    from quintsched.solve.order_search import PlacementSearch

Placed = Annotated[
    str,
    typer.Option(
        "--placement",
        metavar="NAME",
        help="linear, loop, v, or auto: each of these. bidirectional: half of the microbatches each way; holds all "
        "weights twice.",
    ),
]
Chunks = Annotated[
    int | None, typer.Option("--chunks", metavar="V", help="Stages on each rank, for loop and v; default: 2.")
]
Cap = Annotated[
    str | None,
    typer.Option(
        "--memory-cap",
        metavar="X",
        help="Most activations on a rank, in the unit of the costs (default: microbatches); or one for each: 4,3,3,2.",
    ),
]
Recomputed = Annotated[
    str,
    typer.Option(
        "--recompute",
        metavar="STAGES",
        help="Stages that recompute: none, all, auto (those that pay under the cap, with all or some of their "
        "microbatches), or 0 or 1 for each: 1,1,0,0.",
    ),
]
Minimised = Annotated[
    str, typer.Option("--objective", metavar="TIME", help="span (the longest of a rank) or makespan (of all ranks).")
]
Noise = Annotated[
    str | None,
    typer.Option(
        "--jitter",
        metavar="NOISE",
        help="Minimise the 95th percentile where durations vary: 0.1, 3%x4, or a directory of traces.",
    ),
]

Offloads = Annotated[bool, typer.Option("--offload", help="Offload activations where that is faster.")]
Lends = Annotated[bool, typer.Option("--lend", help="Lend activations to other ranks where that is faster.")]
LogFile = Annotated[
    Path | None, typer.Option("--log", metavar="FILE", help="Write each improvement there, a JSON line each.")
]
BoundFile = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="Write the lower bound, for `certify`.")
]


def solve(
    microbatches: Microbatches,
    pp: Annotated[int | None, typer.Option("--pp", metavar="P", help="Pipeline ranks; or give --mesh.")] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", metavar="MESH", help="Mesh of the plan: dp=2,pp=4.")] = None,
    placement: Placed = "auto",
    chunks: Chunks = None,
    memory_cap: Cap = None,
    costs: CostsFile = None,
    recompute: Recomputed = "none",
    offload: Offloads = False,
    lend: Lends = False,
    objective: Minimised = "span",
    jitter: Noise = None,
    effort: Effort = 4,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    log: LogFile = None,
    certificate: BoundFile = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the fastest order of computation.

    Starts from all named schedules that fit and have its placements, and improves the best by list scheduling, local
    search and, with quintsched[solve], constraint programming. Ctrl-C ends it with the best plan so far, which is then
    proved and written; a second Ctrl-C gives that up.
    """
    from quintsched.solve import solve as solve_order

    began_s = monotonic()
    check_outputs({"-o": output, "--log": log, "--certificate": certificate}, costs)
    with progress("solving") as shown:
        found = solve_order(
            pp=pp,
            mesh=mesh,
            microbatches=microbatches,
            placement=placement,
            chunks=chunks,
            memory_cap=None if memory_cap is None else _caps(memory_cap),
            costs=read_costs(costs),
            recompute=_stages(recompute),
            offload=offload,
            lend=lend,
            objective=cast("Objective", objective),
            jitter=jitter,
            effort=effort,
            seconds=seconds,
            seed=seed,
            told=lambda attempt, taken_s: shown.show_done(taken_s, seconds, _in_brief(attempt)),
        )
    _write(found, output, certificate, log)
    if as_json:
        emit({**_as_json(found), "seconds": monotonic() - began_s})
    else:
        say(_in_words(found))
        if output is None:
            note("no plan was written: give -o PLAN")


def _in_brief(attempt: PlacementSearch) -> str:
    bound = max(attempt.bound.value, attempt.proved)
    return f"{attempt.value:g} at most, {bound:g} at least ({attempt.origin})"


def certify(
    plan: PlanFile,
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="The file that `solve` has written.")],
    as_json: AsJson = False,
) -> None:
    """Verify a solved plan and its lower bound, without a search."""
    from quintsched.solve import Certificate
    from quintsched.solve import certify as verify

    found = verify(read_plan(plan), Certificate.load(certificate))
    claim = found.certificate
    if as_json:
        keys = {"objective": claim.objective, "value": claim.value, "bound": claim.bound, "gap": claim.gap}
        emit({**keys, "optimal": found.is_optimal, "peak_activations": found.peaks})
        return
    reason = f"rank {claim.rank} by {claim.reason}"
    best = "no order of this placement is faster" if found.is_optimal else f"at most {percent(claim.gap)} can be gained"
    say(f"certified: {claim.objective} {claim.value:g}, at least {claim.bound:g} ({reason}): {best}")


def _caps(text: str) -> float | tuple[float, ...]:
    try:
        every = tuple(map(float, text.split(",")))
    except ValueError:
        raise UsageError(f"--memory-cap {text}: give a number, or one for each rank: 4,3,3,2") from None
    return every[0] if len(every) == 1 else every


def _stages(text: str) -> str | tuple[int, ...]:
    """Return a word, or a number for each stage."""
    each = text.split(",")
    return tuple(map(int, each)) if set(each) <= {"0", "1"} else text


def _write(found: Solution, output: Path | None, certificate: Path | None, log: Path | None) -> None:
    from quintsched.files.atomic import write_whole

    if output is not None:
        found.plan.save(output)
    if certificate is not None:
        found.certificate.save(certificate)
    if log is not None:
        rows = (dict(zip(("seconds", "value", "bound", "origin"), row, strict=True)) for row in found.log)
        write_whole(log, "".join(json.dumps(row) + "\n" for row in rows), "the log")


def _as_json(found: Solution) -> dict[str, object]:
    return {
        **found.summary(),
        **({} if (noise := found.robustness) is None else {"jitter": {**asdict(noise), "closed": noise.closed}}),
    }


def _in_words(found: Solution) -> str:
    from quintsched.request.recomputed_microbatches import written

    claim = found.certificate
    plan, each = found.plan, dict(enumerate(map(written, found.plan.recompute_microbatches)))
    recomputing = [
        f"stage {stage}" + (f" (microbatches {each[stage]})" if each else "")
        for stage, again in enumerate(plan.recompute)
        if again
    ]
    other = f"makespan {found.makespan:g}" if claim.objective == "span" else f"span {found.span:g}"
    lines = [
        f"{claim.objective} {claim.value:g} {claim.costs.unit}, {other}, placement {found.placement}, "
        + (f"each stage in {found.parts} equal parts, " if found.parts > 1 else "")
        + (f"recomputing {', '.join(recomputing)}, " if recomputing else "")
        + ("offloading, " if found.offloads else "")
        + ("lending, " if found.lends else "")
        + f"found by: {found.origin}",
        f"certified bound {claim.bound:g} (rank {claim.rank} by {claim.reason})",
    ]
    if found.proved is not None and found.proved > claim.bound:
        lines.append(f"bound proved by CP-SAT {found.proved:g}")
    if others := ", ".join(f"{name} {bound:g}" for name, bound in found.bounds.items() if name != found.placement):
        lines.append(f"bounds of other placements: {others}")
    state = {"certified": "optimal, certified", "solver-proved": "optimal, proved by the solver"}
    lines.append(state.get(found.status, f"gap {percent(found.gap)}"))
    if (noise := found.robustness) is not None:
        lines.append(
            f"95th percentile under jitter {noise.jitter}: {noise.value:g}, of the order without regard to it "
            f"{noise.nominal:g}, of any order at least {noise.bound:g}: {percent(noise.closed)} of the gap closed"
        )
    return "\n".join(lines)

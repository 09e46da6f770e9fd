"""`quintsched compile` and `quintsched show`: make a plan, and read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.output import (
    AsJson,
    Chunks,
    MemoryCap,
    Microbatches,
    PlanFile,
    Slices,
    emit,
    note,
    percent,
    read_costs,
    read_plan,
    read_schedule,
    say,
    simulate_plan,
    terminal_width,
)
from quintsched.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    from quintsched.plan import Plan


ScheduleName = Annotated[
    str, typer.Option("--schedule", "-s", metavar="NAME", help="A schedule, or my_file.py:my_schedule.")
]
MeshText = Annotated[str, typer.Option("--mesh", metavar="AXES", help="The device mesh, like dp=2,pp=2,tp=2.")]
PlanningCosts = Annotated[
    Path | None,
    typer.Option("--costs", metavar="FILE", help="For schedules that search: a JSON file of costs to plan with."),
]
Recompute = Annotated[
    str,
    typer.Option(
        "--recompute",
        metavar="K",
        help="0: keep activations; 1: recompute them; K: of every K-th block. Or one number per stage: 0,1,1,0.",
    ),
]
Tied = Annotated[
    list[str] | None,
    typer.Option("--tied", metavar="NAME=STAGES", help="A weight that several stages hold: embedding=0,3."),
]
ZeroStage = Annotated[
    int,
    typer.Option(
        "--zero", metavar="0-3", help="Share out over replicas: 1 optimizer state, 2 gradients too, 3 weights too."
    ),
]
ZeroEvery = Annotated[
    int, typer.Option("--zero-every", metavar="K", help="Reduce gradients after every K microbatches (ZeRO-2, 3).")
]
BucketsPerStage = Annotated[int, typer.Option("--buckets-per-stage", metavar="N", help="Gradient buckets of a stage.")]
Means = Annotated[
    str, typer.Option("--communication", metavar="MEANS", help="Sum gradients by native, ring, tree or auto.")
]
Latency = Annotated[float, typer.Option("--latency", metavar="S", help="For auto: seconds that a message costs.")]
Bandwidth = Annotated[float, typer.Option("--bandwidth", metavar="B/S", help="For auto: bytes per second of a wire.")]
PlanOutput = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PLAN", help="The plan file; default: standard output.")
]
PrintAfter = Annotated[
    str | None,
    typer.Option(
        "--print-after", metavar="PASS", help="Write the plan after this pass, or after all, to standard error."
    ),
]


def compile(
    schedule: ScheduleName,
    mesh: MeshText,
    microbatches: Microbatches,
    chunks: Chunks = None,
    slices: Slices = 1,
    costs: PlanningCosts = None,
    memory_cap: MemoryCap = None,
    recompute: Recompute = "0",
    tied: Tied = None,
    zero: ZeroStage = 0,
    zero_every: ZeroEvery = 1,
    buckets_per_stage: BucketsPerStage = 1,
    communication: Means = "native",
    latency_s: Latency = 20e-6,
    bandwidth: Bandwidth = 1e9,
    output: PlanOutput = None,
    print_after: PrintAfter = None,
    as_json: AsJson = False,
) -> None:
    """Compile a plan and prove it sound."""
    from quintsched.cli.check import report
    from quintsched.collectives import Wire
    from quintsched.compiler import compile

    plan = compile(
        read_schedule(schedule),
        mesh=mesh,
        microbatches=microbatches,
        chunks=chunks,
        buckets_per_stage=buckets_per_stage,
        slices=slices,
        costs=read_costs(costs),
        memory_cap=memory_cap,
        recompute=_read_recompute(recompute),
        tied=_read_tied(tied or []),
        communication=communication,
        wire=Wire(latency_s, bandwidth),
        zero=zero,
        zero_every=zero_every,
        after=_watch(print_after),
    )
    verdict = plan.check(profile="blocking")
    if output is None:
        note(f"{plan.title}\n{verdict.explain()}")
        typer.echo(plan.to_json(), nl=False)
        return
    plan.save(output)
    if as_json:
        emit({"plan": str(output), **report(verdict, "blocking")})
    else:
        say(f"{output}: {plan.title}\n{verdict.explain()}")


def _read_recompute(text: str) -> int | tuple[int, ...]:
    numbers = _read_numbers(text, "--recompute", "1 or 0,1,1,0")
    return numbers if "," in text else numbers[0]


def _read_tied(texts: list[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, equals, stages = text.rpartition("=")
        if not equals:
            raise UsageError(f"--tied: cannot read {text!r}; write a name and the stages that hold it: embedding=0,3")
        if name in found:
            raise UsageError(f"--tied: {name!r} is given twice; name all stages that hold it at once")
        found[name] = _read_numbers(stages, "--tied", "embedding=0,3")
    return found


def _read_numbers(text: str, option: str, example: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) <= 9 for part in parts):
        raise UsageError(
            f"{option}: cannot read {text!r}; write whole numbers with commas between them, like {example}"
        )
    return tuple(map(int, parts))


def _watch(print_after: str | None) -> Callable[[str, Plan], None] | None:
    """Return what writes the plan after a pass, or after each; raises `UsageError` for an unknown one."""
    from quintsched.compiler import ORDER
    from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES
    from quintsched.text.listing import listing

    if print_after is None:
        return None
    names = [ORDER, *dict.fromkeys(step.name for step in (*TRAIN_PASSES, *FORWARD_PASSES)), "all"]
    if print_after not in names:
        raise UsageError(f"--print-after: unknown pass {print_after!r}{suggest(print_after, names)}")

    def watch(name: str, plan: Plan) -> None:
        if print_after in (name, "all"):
            note(f"== after {name}: {plan.title}")
            for rank, program in enumerate(plan.programs):
                note("\n".join([f"pipeline rank {rank}", *(f"  {line}" for line in listing(program))]))

    return watch


def show(
    plan: PlanFile,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="Show this global rank's list.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan's grid over time, or one rank's list."""
    found = read_plan(plan)
    if rank is None:
        _show_grid(found, as_json)
    else:
        _show_rank(found, rank, as_json)


def _show_grid(plan: Plan, as_json: bool) -> None:
    from quintsched.simulation.time_grid import time_grid

    simulation = simulate_plan(plan)
    if as_json:
        emit({"title": plan.title, "makespan": simulation.makespan, "grid": time_grid(simulation)})
        return
    title = f"{plan.title}: {simulation.makespan:g} forwards long, bubble {percent(simulation.bubble)}"
    say([title, *time_grid(simulation, terminal_width())])


def _show_rank(plan: Plan, rank: int, as_json: bool) -> None:
    from quintsched.formats.plan_json import encode
    from quintsched.text.listing import listing

    program, where = plan.program(rank), plan.mesh.coordinates(rank)
    if as_json:
        emit({"title": plan.title, "rank": rank, "coordinates": where, "program": [encode(i) for i in program]})
        return
    place = ", ".join(f"{axis}={at}" for axis, at in where.items())
    say([f"{plan.title}", f"rank {rank}{f' ({place})' if place else ''}; peers are global ranks", *listing(program)])

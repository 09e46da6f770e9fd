"""`quintsched layout`: the best cut of a model's layers into stages, with its schedule, for several frameworks.

layout --costs layers.json --pp 8 --vpp 4 -m 32                                      a file of layer costs
layout --model llama-3-70b --hardware h100 --gpus 64 --tp 4 --pp 8 --batch 64        costs as `predict` computes them
layout --trace traces/ --plan plan.json                                              costs that a run has measured
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from quintsched.cli.request_options import AXIS_OPTIONS
from quintsched.cli.shared_options import AsJson, Effort, Seconds, Seed, check_outputs, emit, read_plan, read_trace, say
from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.files.terminal_progress import progress
from quintsched.strategies.commands.flags import FLAGS, option_of, taking_flags

if TYPE_CHECKING:
    from quintsched.solve import CutStages, LayerCosts
    from quintsched.solve.order_problem import Objective
    from quintsched.solve.stage_cuts.stage_layout import StageCut

OWN = ("chunks", "schedule", "stages")
"""Flags of a strategy that this command decides, or gives another meaning."""
AXES = tuple(AXIS_OPTIONS)

Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="LAYOUT", help="A Megatron-LM layout string to compare with; repeatable."),
]
Chosen = Annotated[
    str,
    typer.Option(
        "--schedule", metavar="NAMES", help="Schedules to choose among; auto: all; solve: an order of its own."
    ),
]
MostMemory = Annotated[
    float | None, typer.Option("--memory-cap", metavar="X", help="Most memory of a rank, in the costs' unit (GB).")
]
TokenPredictors = Annotated[
    int, typer.Option("--mtp", metavar="K", help="With --model: layers of multi-token prediction at its end.")
]


@taking_flags(*(name for name in FLAGS if name not in OWN))
def layout(
    flags: dict[str, Any],
    costs: Annotated[
        Path | None, typer.Option("--costs", metavar="FILE", help="A JSON file with the costs of each layer.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="DIR", help="The traces of a run of --plan: costs as measured.")
    ] = None,
    plan: Annotated[str | None, typer.Option("--plan", metavar="PLAN", help="The plan of --trace.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", metavar="M", help="Microbatches of a step; or give --batch.")
    ] = None,
    vpp: Annotated[int, typer.Option("--vpp", metavar="V", help="Stages on each pipeline rank.")] = 1,
    schedules: Chosen = "",
    mtp: TokenPredictors = 0,
    against: Against = None,
    memory_cap: MostMemory = None,
    objective: Annotated[
        str, typer.Option("--objective", metavar="TIME", help="span (the longest of a rank) or makespan.")
    ] = "span",
    effort: Effort = 4,
    seconds: Seconds = 60.0,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the plan file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Cut layers into stages, and choose the schedule.

    Prints the cut as --stages, as Megatron-LM's layout string and as torchtitan's list of modules, with the gain over
    even stages and the memory of each stage. Give --costs, --trace, or the flags of `predict`.
    """
    from quintsched.solve import cut_stages

    check_outputs({"-o": output}, costs, trace, plan)
    if sum(given is not None for given in (costs, trace, flags.get("model"))) != 1:
        raise UsageError("give one of --costs, --model and --trace: they say what each layer costs")
    found, mesh, number = _sources(flags, costs, trace, plan, microbatches, mtp)
    with progress("cutting stages"):
        cut = cut_stages(
            found,
            mesh=mesh,
            microbatches=number,
            chunks=vpp,
            schedules=[name.strip() for name in schedules.split(",") if name.strip()],
            memory_cap=memory_cap,
            objective=cast("Objective", objective),
            layouts=against or (),
            effort=effort,
            seconds=seconds,
            seed=seed,
        )
    if output is not None:
        cut.plan().save(output)
    if as_json:
        emit(_as_json(cut, objective))
    else:
        say(_in_words(cut, against or [], objective))


def _sources(
    flags: Mapping[str, Any],
    costs: Path | None,
    trace: Path | None,
    plan: str | None,
    microbatches: int | None,
    mtp: int,
) -> tuple[LayerCosts, str, int]:
    """Return layer costs, mesh and number of microbatches."""
    from quintsched.solve import LayerCosts

    if flags.get("model") is not None:
        return _predicted(flags, microbatches, mtp)
    extra = [name for name in flags if name not in (*AXES, "gpus")]
    if extra or mtp:
        raise UsageError(f"{option_of(extra[0] if extra else 'mtp')} is for --model; leave it out")
    mesh = ",".join(
        f"{axis}={flags[axis]}" for axis in AXES if flags.get(axis, 1) > 1 or (axis == "pp" and "pp" in flags)
    )
    if costs is not None:
        if "pp" not in flags or microbatches is None:
            raise UsageError("give --pp, the number of pipeline ranks, and -m, that of microbatches")
        return LayerCosts.load(costs), mesh, microbatches
    if plan is None or trace is None:
        raise UsageError("--trace needs the plan that was traced: give --plan")
    traced = read_plan(plan)
    measured = read_trace(trace, traced).costs()
    found = LayerCosts.from_stage_costs(traced, measured)
    return found, mesh or str(traced.mesh), microbatches or traced.schedule.microbatches


def _predicted(flags: Mapping[str, Any], microbatches: int | None, mtp: int) -> tuple[LayerCosts, str, int]:
    """Return layer costs as `predict` computes them, mesh and number of microbatches."""
    from quintsched.strategies.commands.calibrate import calibrate_first
    from quintsched.strategies.descriptions.flag_rows import read_row
    from quintsched.strategies.prediction.layer_times import layer_costs

    if isinstance(flags.get("hardware"), str):
        calibrate_first(flags["hardware"])
    if microbatches is not None and "batch" in flags:
        raise UsageError("--batch says the number of microbatches; leave out -m")
    row = read_row({"batch": 1, **flags})
    strategy = row.strategy
    if microbatches is not None:
        batch = microbatches * strategy.replicas * strategy.microbatch
        strategy = strategy.model_copy(update={"batch": batch})
    elif "batch" not in flags:
        raise UsageError("give --batch, the samples of a step over all replicas, or -m, the number of microbatches")
    mesh = ",".join(f"{axis}={getattr(strategy, axis)}" for axis in AXES if getattr(strategy, axis) > 1)
    return layer_costs(row.model, row.hardware, strategy, mtp), mesh or "pp=1", strategy.microbatches


def _in_words(cut: CutStages, against: list[str], objective: str) -> Iterator[str]:
    from quintsched.text.plan_listing import table

    best, unit, held = cut.best, cut.costs.unit, cut.costs.memory_unit
    mesh, microbatches = cut.sizes
    chunks = len(best.stage_to_pp) // mesh.pp
    yield f"{best.schedule} on {mesh}, {counted(microbatches, 'microbatch')}, stages on a rank: {chunks}"
    proof = "the best of all cuts" if best.is_exact else "the best cut that was found"
    yield f"{objective} {best.value:.6g} {unit}: {proof}"
    compared = (f"even stages, {cut.even.schedule}", cut.even), *zip(against, cut.others, strict=True)
    for text, other in compared:
        most = f"{max(other.peaks):.4g} {held} on a rank"
        yield f"{text}: {other.value:.6g} {unit}, {most}; saved: {percent(cut.gain_over(other))}"
    yield f"--stages {','.join(map(str, best.stages))}"
    if _is_loop(best, mesh.pp):
        yield f"Megatron-LM: {best.megatron}"
    yield f"torchtitan: {json.dumps(best.torchtitan)}"
    yield ""
    yield from table(("stage", "rank", "layers", "forward", "backward", f"state, {held}", "activation"), _rows(best))
    yield ""
    yield f"most memory by rank, {held}: " + "  ".join(f"{rank}: {peak:.4g}" for rank, peak in enumerate(best.peaks))


def _is_loop(cut: StageCut, pp: int) -> bool:
    return all(rank == stage % pp for stage, rank in enumerate(cut.stage_to_pp))


def _rows(cut: StageCut) -> Iterator[tuple[str, ...]]:
    from quintsched.solve.stage_cuts.layout_strings import short_letters, stage_letters

    letters = stage_letters(cut.layers, cut.cut)
    names = ("forward", "backward_input", "backward_weight", "state", "activation")
    columns = [cut.of_stages(name) for name in names]
    for stage, (rank, forward, inputs, weights, state, held) in enumerate(zip(cut.stage_to_pp, *columns, strict=True)):
        times = f"{forward:.4g}", f"{inputs + weights:.4g}"
        yield str(stage), str(rank), short_letters(letters[stage]) or "-", *times, f"{state:.4g}", f"{held:.4g}"


def _as_json(cut: CutStages, objective: str) -> dict[str, object]:
    best = cut.best
    return {
        "schedule": best.schedule,
        "objective": objective,
        "value": best.value,
        "unit": cut.costs.unit,
        "exact": best.is_exact,
        "even": cut.even.value,
        "against": [other.value for other in cut.others],
        "gain": cut.gain,
        "stages": best.stages,
        "stage_to_pp": best.stage_to_pp,
        "megatron": best.megatron if _is_loop(best, cut.sizes[0].pp) else None,
        "torchtitan": best.torchtitan,
        "costs": {"unit": cut.costs.unit, "p2p": cut.costs.p2p, **best.costs},
        "state": best.of_stages("state"),
        "memory": best.peaks,
        "memory_unit": cut.costs.memory_unit,
    }

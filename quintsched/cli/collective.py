"""`quintsched collective`: spell out a collective in messages, prove it, time it and draw it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.pictures import draw_collective
from quintsched.cli.shared_options import AsJson, emit, refuse_input, say, terminal_width
from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.ir.collective_means_and_wire import Wire

if TYPE_CHECKING:
    from quintsched.collectives import CollectivePlan, CollectiveRun
    from quintsched.collectives.collective_program import CollectiveProgram
    from quintsched.collectives.collective_proof import CollectiveVerdict


def collective(
    target: Annotated[
        str, typer.Argument(metavar="ring|tree|two-level|FILE", help="An algorithm, or a file written by -o.")
    ],
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="all_reduce, reduce_scatter or all_gather.")
    ] = "all_reduce",
    ranks: Annotated[int | None, typer.Option("--ranks", metavar="N", help="How many ranks take part.")] = None,
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="K", help="Chunks of the data; default: N (ring), 8 (tree).")
    ] = None,
    num_bytes: Annotated[float, typer.Option("--bytes", metavar="B", help="Bytes of the data, to time it.")] = 25e6,
    latency_s: Annotated[
        float, typer.Option("--latency", metavar="S", help="Seconds that a message costs.")
    ] = Wire.latency_s,
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", metavar="B/S", help="Bytes per second of a wire.")
    ] = Wire.bandwidth,
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="G", help="Nodes over which the ranks are spread, equally many on each.")
    ] = 1,
    node_latency_s: Annotated[
        float, typer.Option("--node-latency", metavar="S", help="The same inside a node, if there are several.")
    ] = Wire.node_latency_s,
    node_bandwidth: Annotated[
        float, typer.Option("--node-bandwidth", metavar="B/S", help="Bytes per second inside a node.")
    ] = Wire.node_bandwidth,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the plan (.json) or a picture (.png, .svg)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Spell out a collective in messages, prove it, and time it."""
    refuse_input(output, target)
    plan = _read(target, kind, ranks, chunks, nodes)
    verdict = plan.check()
    if not verdict.sound:
        if as_json:
            emit({"title": plan.title, "sound": False, "findings": [f.message for f in verdict.findings]})
        else:
            say(verdict.explain())
        raise typer.Exit(1)
    wire = Wire(latency_s, bandwidth, max(nodes, plan.nodes), node_latency_s, node_bandwidth)
    run = plan.simulate(num_bytes, wire)
    if output is not None:
        _write(run, output)
    _report(run, verdict, output, as_json=as_json)


def _report(run: CollectiveRun, verdict: CollectiveVerdict, output: Path | None, *, as_json: bool) -> None:
    """Print the proof and the times, and the grid where no file was written."""
    plan, num_bytes, wire = run.plan, run.num_bytes, run.wire
    if as_json:
        emit(
            {
                "title": plan.title,
                "sound": True,
                **run.summary(),
                "closed_forms_s": _closed_forms(plan, num_bytes, wire),
                "crossover_bytes": _crossovers(plan, wire),
            }
        )
        return
    say([verdict.explain(), *_figures(run)])
    if output is None:
        from quintsched.text.collective_grid import time_grid

        say(["", *time_grid(plan, terminal_width())])
    else:
        say(f"{output}: written")


def _read(target: str, kind: str, ranks: int | None, chunks: int | None, nodes: int) -> CollectivePlan:
    """Return the requested plan; raises `UsageError`."""
    from quintsched.collectives import CollectivePlan, spell

    if target.endswith(".json"):
        if ranks is not None or chunks is not None:
            raise UsageError(f"{target} says how many ranks and chunks there are; leave out --ranks and --chunks")
        return CollectivePlan.load(Path(target))
    if ranks is None:
        raise UsageError("--ranks: say how many ranks take part")
    return spell(kind, target, ranks, chunks, nodes)


def _write(run: CollectiveRun, path: Path) -> None:
    from quintsched.collectives.collective_json import save

    if path.suffix.lower() == ".json":
        save(run.plan, path)
    else:
        draw_collective(run, path)


def _closed_forms(plan: CollectiveProgram, num_bytes: float, wire: Wire) -> dict[str, float]:
    """Return the times of all means by the closed forms, in seconds."""
    from quintsched.collectives.collective_timing import fastest_tree_seconds, native_seconds, spelled_seconds
    from quintsched.collectives.expand_collective import has_two_levels

    found = {
        "native": native_seconds(plan.kind, plan.size, num_bytes, wire),
        "ring": spelled_seconds(plan.kind, "ring", plan.size, plan.size, num_bytes, wire),
    }
    if has_two_levels(plan.size, wire.nodes):
        found["two-level"] = spelled_seconds(plan.kind, "two-level", plan.size, plan.size, num_bytes, wire)
    if plan.kind == "all_reduce":
        found["tree"] = fastest_tree_seconds(plan.size, num_bytes, wire)
    return found


def _crossovers(plan: CollectiveProgram, wire: Wire) -> dict[str, float]:
    """Return the bytes above which an all-reduce by rings, of one or two levels, is faster than by tree."""
    from quintsched.collectives.collective_timing import crossover_bytes
    from quintsched.collectives.expand_collective import has_two_levels

    if plan.kind != "all_reduce":
        return {}
    found = {"ring": crossover_bytes(plan.size, wire)}
    if has_two_levels(plan.size, wire.nodes):
        found["two-level"] = crossover_bytes(plan.size, wire, "two-level")
    return found


def _figures(run: CollectiveRun) -> list[str]:
    plan, wire = run.plan, run.wire
    forms = _closed_forms(plan, run.num_bytes, wire)
    listed = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in forms.items())
    inside = f", inside {counted(wire.nodes, 'node')} {wire.node_latency_s:g} s and {wire.node_bandwidth:g} bytes/s"
    crossed = [f"{name} above {counted(size, 'byte', '.4g')}" for name, size in _crossovers(plan, wire).items()]
    return [
        f"{counted(run.num_bytes, 'byte', 'g')} at {wire.latency_s:g} s and {wire.bandwidth:g} bytes/s"
        f"{inside if wire.nodes > 1 else ''}: {1e3 * run.makespan:.4g} ms, "
        f"bandwidth use {percent(run.bandwidth_use)}; a rank sends up to {max(run.sent_bytes):.4g} bytes",
        f"closed forms: {listed} (native: a bound for any library; tree: in its best number of chunks)",
        *([f"faster than tree: {', '.join(crossed)}"] if wire.nodes > 1 and crossed else []),
    ]

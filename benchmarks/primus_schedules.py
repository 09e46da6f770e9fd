"""Solved orders beside the schedules of Primus, timed by its own simulator, in the memory that each of them takes.

`python benchmarks/solve.py --primus DIRECTORY` reads a copy of AMD-AGI/Primus, runs its simulator on the schedules of
its `pp_simulation.yaml` with 32 and 16 microbatches, and compares makespans.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from quintsched.simulation.costs import Costs
from quintsched.solve import solve

PROJECTION = Path("primus", "core", "projection")
TOLERANCE = 1e-6


def placement_of(scheduler: dict[str, Any]) -> str:
    """Return the placement of a scheduler of Primus."""
    if scheduler["vpp_size"] == 1:
        return "linear"
    return "loop" if "interleaved" in scheduler["class"] else "v"


def simulated(module: Any, settings: dict[str, Any], scheduler: dict[str, Any]) -> tuple[float, float]:
    """Return the makespan and the most activations of a scheduler, as its own simulator counts them."""
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(io.StringIO()):
        config = {**settings, "print_simulation_result": False, "output_dir": output, "schedulers": [scheduler]}
        summary = module.SchedulerSimulationRunner(config=config).run()[0]["summary"]
    return float(summary["step_time_ms"]), float(summary["max_memory"])


def compare(directory: Path, effort: int, seconds: float) -> int:
    """Print both for all schedulers; return how often ours is worse."""
    sys.path.insert(0, str(directory))
    spec = importlib.util.spec_from_file_location(
        "primus_simulator", directory / PROJECTION / "performance_projection" / "simulator.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = yaml.safe_load((directory / PROJECTION / "configs" / "pp_simulation.yaml").read_text(encoding="utf-8"))
    times = dict(zip(("forward", "backward_input", "backward_weight"), ("fwd", "bwd", "wgrad"), strict=True))
    costs = Costs(**{name: float(settings[f"{theirs}_time"]) for name, theirs in times.items()})
    worse = 0
    print("schedule             microbatches  memory     Primus       ours  certified")
    for microbatches in (32, 16):
        for scheduler in settings["schedulers"]:
            theirs, memory = simulated(module, settings, {**scheduler, "micro_batches": microbatches})
            found = solve(
                pp=scheduler["pp_size"],
                microbatches=microbatches,
                placement=placement_of(scheduler),
                chunks=None if scheduler["vpp_size"] == 1 else scheduler["vpp_size"],
                memory_cap=memory,
                costs=costs,
                objective="makespan",
                effort=effort,
                seconds=seconds,
            ).certificate
            worse += found.value > theirs * (1 + TOLERANCE)
            print(
                f"{scheduler['name']:20} {microbatches:12} {memory:7g} {theirs:10g} {found.value:10g} {found.bound:10g}"
            )
    print(f"ours is worse on {worse}")
    return worse

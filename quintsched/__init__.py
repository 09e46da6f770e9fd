"""quintsched: pipeline-parallel training from an explicit, readable plan.

    import quintsched as qs

    plan = qs.compile("1f1b", mesh=qs.Mesh(dp=2, pp=2, tp=2), microbatches=8)
    plan.save("plan.json")
    print(plan.simulate().bubble)

The planner is in this package; `quintsched.runtime` (torch) runs plans and `quintsched.viz` (matplotlib) draws them.
Public names are imported on first use, so that `import quintsched` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quintsched.compiler import compile
    from quintsched.errors import (
        CodeError,
        InputError,
        MisfitError,
        NotFiniteError,
        QuintschedError,
        StallError,
        UnsoundError,
        UsageError,
    )
    from quintsched.ir.diagnostics import Finding
    from quintsched.ir.mesh import Mesh
    from quintsched.plan import Plan, simulate
    from quintsched.schedules import Schedule, Shape, all_schedules, schedule
    from quintsched.simulation.costs import Costs
    from quintsched.simulation.simulator import Simulation
    from quintsched.strategies.descriptions.hardware import Hardware
    from quintsched.strategies.descriptions.model import Model
    from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
    from quintsched.strategies.descriptions.strategy import Strategy
    from quintsched.strategies.prediction.predict_one_strategy import Prediction, predict
    from quintsched.strategies.tuning.tune import Tuning, tune
    from quintsched.verify.soundness import Verdict, check

_HOMES = {
    "verify.soundness": ("Verdict", "check"),
    "compiler": ("compile",),
    "strategies.descriptions.hardware": ("Hardware",),
    "strategies.descriptions.presets_and_files": ("find_hardware", "find_model"),
    "strategies.descriptions.model": ("Model",),
    "strategies.descriptions.strategy": ("Strategy",),
    "strategies.prediction.predict_one_strategy": ("Prediction", "predict"),
    "strategies.tuning.tune": ("Tuning", "tune"),
    "simulation.costs": ("Costs",),
    "errors": (
        "CodeError",
        "InputError",
        "MisfitError",
        "NotFiniteError",
        "QuintschedError",
        "StallError",
        "UnsoundError",
        "UsageError",
        "WriteError",
    ),
    "ir.diagnostics": ("Finding",),
    "ir.mesh": ("Mesh",),
    "plan": ("Plan", "simulate"),
    "schedules": ("Schedule", "Shape", "all_schedules", "schedule"),
    "simulation.simulator": ("Simulation",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CodeError",
    "Costs",
    "Finding",
    "Hardware",
    "InputError",
    "Mesh",
    "MisfitError",
    "Model",
    "NotFiniteError",
    "Plan",
    "Prediction",
    "QuintschedError",
    "Schedule",
    "Shape",
    "Simulation",
    "StallError",
    "Strategy",
    "Tuning",
    "UnsoundError",
    "UsageError",
    "Verdict",
    "WriteError",
    "all_schedules",
    "check",
    "compile",
    "find_hardware",
    "find_model",
    "predict",
    "schedule",
    "simulate",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quintsched' has no attribute {name!r}")
    return getattr(import_module(f"quintsched.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""The runtime: what runs plans. Needs torch (`pip install 'quintsched[runtime]'`).

    Engine, StepResult          a plan and a list of blocks; the user keeps the loop
    Trainer, load_job, plan_of  that loop written out, driven by a job file
    run_local, connect          all ranks in one process; gloo and NCCL
    MoE, apply_expert_parallel  a mixture of experts, shared out over ep
    apply_tensor_parallel, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    Carry                       what a block returns with tensors that ride along to later blocks (skip connections)
    defer                       how a layer of one's own puts weight gradients off to the weight half of a backward
    build_model, measure_costs  the model in one piece; what its blocks cost

    torchrun --nproc-per-node N -m quintsched.runtime [plan.json] --config job.yaml

Names are loaded when they are first used, so that a job that does not fit is refused before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import Carry, build_model, measure_costs
    from .config import JobConfig
    from .deferred import defer
    from .engine import Engine
    from .experts import MoE, apply_expert_parallel
    from .job import plan_of
    from .jobfile import load_job
    from .results import StepResult
    from .tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        apply_tensor_parallel,
    )
    from .trainer import Trainer
    from .transport import Group, Transport, connect, run_local
    from .wiring import connect_for

_HOMES = {
    "blocks": ("Carry", "build_model", "measure_costs"),
    "deferred": ("defer",),
    "config": ("JobConfig",),
    "wiring": ("connect_for",),
    "engine": ("Engine",),
    "experts": ("MoE", "apply_expert_parallel"),
    "job": ("plan_of",),
    "jobfile": ("load_job",),
    "results": ("StepResult",),
    "tensor_parallel": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "apply_tensor_parallel",
    ),
    "trainer": ("Trainer",),
    "transport": ("Group", "Transport", "connect", "run_local"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Carry",
    "ColumnParallelLinear",
    "Engine",
    "Group",
    "JobConfig",
    "MoE",
    "RowParallelLinear",
    "StepResult",
    "Trainer",
    "Transport",
    "VocabParallelEmbedding",
    "apply_expert_parallel",
    "apply_tensor_parallel",
    "build_model",
    "connect",
    "connect_for",
    "defer",
    "load_job",
    "measure_costs",
    "plan_of",
    "run_local",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quintsched.runtime' has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)

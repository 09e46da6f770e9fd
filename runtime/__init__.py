"""The runtime: runs plans with PyTorch. Needs torch (`pip install 'quintsched[runtime]'`).

    Engine, StepResult          trains a list of blocks by a plan; the caller keeps the training loop
    ForwardEngine               runs a forward-only plan on a list of blocks, without gradients or optimizers
    LoadedWeights               names that a pretrained checkpoint and the model did not have in common
    StopRequest                 whether a signal has asked this process to stop after the step
    drained                     a loop over loaders of unequal length that ends on all ranks together
    Trainer, load_job, plan_of  the training loop itself, driven by a job file
    run_local, connect          transports: all ranks as threads of one process; gloo and NCCL
    MoE, apply_expert_parallel  mixture of experts, sharded over ep
    apply_tensor_parallel, ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    split, Split                a whole model, from transformers or user code, cut into blocks
    SumOfMeans                  a sum of several mean losses, each over its own elements
    Carry                       block output with tensors that later blocks receive as well (skip connections)
    defer                       lets a custom layer defer weight gradients to the weight half of a backward
    build_model, measure_costs  the model as one module; measured costs of its blocks

    torchrun --nproc-per-node N -m quintsched.runtime [plan.json] --config job.yaml

Names are imported lazily, so that a job that does not fit is refused before torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autograd.deferred_weight_grads import defer
    from .blocks.block_builders import Carry, build_model
    from .blocks.block_costs import measure_costs
    from .blocks.sum_of_means import SumOfMeans
    from .comm import Group, Transport, connect, run_local
    from .comm.choose_transport import connect_for
    from .engine import Engine
    from .forward_engine import ForwardEngine
    from .interpreter.step_losses.sum_losses_across_ranks import StepResult
    from .launch.job_plan import plan_of
    from .launch.stop_signals import StopRequest
    from .parallel.expert.moe import MoE, apply_expert_parallel
    from .parallel.tensor.apply_tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        apply_tensor_parallel,
    )
    from .saving.pretrained.load_pretrained import LoadedWeights
    from .settings.job_file import JobConfig, load_job
    from .splitting.split_whole_model import Split, split
    from .train.batch_feed import drained
    from .train.trainer import Trainer

_HOMES = {
    "blocks.block_builders": ("Carry", "build_model"),
    "blocks.block_costs": ("measure_costs",),
    "autograd.deferred_weight_grads": ("defer",),
    "settings.job_file": ("JobConfig", "load_job"),
    "comm.choose_transport": ("connect_for",),
    "engine": ("Engine",),
    "forward_engine": ("ForwardEngine",),
    "saving.pretrained.load_pretrained": ("LoadedWeights",),
    "parallel.expert.moe": ("MoE", "apply_expert_parallel"),
    "launch.job_plan": ("plan_of",),
    "launch.stop_signals": ("StopRequest",),
    "interpreter.step_losses.sum_losses_across_ranks": ("StepResult",),
    "parallel.tensor.apply_tensor_parallel": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "VocabParallelEmbedding",
        "apply_tensor_parallel",
    ),
    "splitting.split_whole_model": ("Split", "split"),
    "blocks.sum_of_means": ("SumOfMeans",),
    "train.batch_feed": ("drained",),
    "train.trainer": ("Trainer",),
    "comm": ("Group", "Transport", "connect", "run_local"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Carry",
    "ColumnParallelLinear",
    "Engine",
    "ForwardEngine",
    "Group",
    "JobConfig",
    "LoadedWeights",
    "MoE",
    "RowParallelLinear",
    "Split",
    "StepResult",
    "StopRequest",
    "SumOfMeans",
    "Trainer",
    "Transport",
    "VocabParallelEmbedding",
    "apply_expert_parallel",
    "apply_tensor_parallel",
    "build_model",
    "connect",
    "connect_for",
    "defer",
    "drained",
    "load_job",
    "measure_costs",
    "plan_of",
    "run_local",
    "split",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quintsched.runtime' has no attribute {name!r}")
    from .watch.uncaught_error import report_own_uncaught

    report_own_uncaught()
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)

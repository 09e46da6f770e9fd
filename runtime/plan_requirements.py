"""Checks that the runtime can run a plan, before anything is built: transport, CUDA graphs, types of blocks, loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan
from quintsched.verify.soundness import Verdict

from .comm import Transport
from .comm.device import graphs_of
from .comm.random_generators import draws_undone
from .stage.early_stage_losses import cuts_sequences
from .user_objects.snapshot import Snapshot, require_undone


def require_runnable(plan: Plan, transport: Transport) -> Verdict:
    """Prove a plan for this transport, and return the proof; raise `UsageError`, `MisfitError` or `UnsoundError`.

    No other code of the runtime proves a plan.
    """
    plan.mesh.require_world_size(transport.world_size)
    if plan.mesh.axis_size("cp") > 1 and plan.schedule.slices > 1:
        raise UsageError(
            f"mesh {plan.mesh} cuts each sequence over cp, and {plan.schedule.name} cuts it into "
            f"{plan.schedule.slices} slices; a run does one or the other"
        )
    verdict = plan.check(profile=transport.profile)
    verdict.raise_if_unsound()
    return verdict


def require_mode(plan: Plan, mode: str, taker: str) -> None:
    """Raise `UsageError` for a plan of another mode than `taker` runs: say which class does."""
    if plan.mode != mode:
        other, needs = (
            ("ForwardEngine(plan, blocks)", "a plan of a training")
            if mode == "train"
            else ("Engine(plan, blocks, loss_fn, optimizer)", 'one of the schedule "inference"')
        )
        raise UsageError(
            f"{taker} needs {needs}, but this plan ({plan.schedule.name}) is for {plan.mode}: {other} takes it; in a "
            f"job file, mode: {plan.mode}"
        )


def require_capturable(plan: Plan, device: torch.device, *, scales: bool) -> None:
    """Raise `UsageError` if a step of the plan cannot be captured, `MisfitError` if the device has no CUDA graphs.

    `scales`: whether the loss is scaled (GradScaler), as for fp16.
    """
    if obstacles := plan.capture_obstacles():
        raise UsageError(f"cuda_graph: no step of this plan can be captured: {'; '.join(obstacles)}")
    if scales:
        raise UsageError("cuda_graph: the loss scale is a number of the host, which a graph would keep; take bfloat16")
    if graphs_of(device) is None:
        raise MisfitError(f"cuda_graph wants a CUDA device, and this run is on {device.type}; leave it out there")


def require_usable(plan: Plan, blocks: Any, functions: Mapping[str, Any]) -> None:
    """Raise `UsageError` for blocks that are none, and for what is to be called and cannot be."""
    require_blocks(blocks)
    for name, function in functions.items():
        if function is None and name == "loss_fn":
            raise UsageError(
                "loss_fn is None: this model has no loss of its own that is known; give one, a function of (output, "
                "targets) such as torch.nn.functional.mse_loss"
            )
        if not callable(function):
            raise UsageError(f"{name} is a {type(function).__name__}; it must be a function of (output, targets)")
    _require_nothing_to_train(blocks, functions)
    _require_loss_of_slices(plan, functions["loss_fn"])


def require_blocks(blocks: Any) -> None:
    """Raise `UsageError` for blocks that are none."""
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise UsageError(
            f"blocks is a whole {type(blocks).__name__}; give a list of its blocks, or cut it: "
            "Engine(plan, quintsched.runtime.split(model), …)"
        )
    if not hasattr(blocks, "__len__") or not hasattr(blocks, "__getitem__") or isinstance(blocks, str | Mapping):
        raise UsageError(f"blocks is a {type(blocks).__name__}; give a list of modules, or of functions that build one")
    if not len(blocks):
        raise UsageError("blocks is empty; give a list of modules, or of functions that build one")
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module) and not callable(block):
            raise UsageError(
                f"block {number} is a {type(block).__name__}; it must be a module, or a function that builds one: "
                "lambda: MyBlock(…)"
            )


def _require_nothing_to_train(blocks: Any, functions: Mapping[str, object]) -> None:
    """Raise `UsageError` for a loss with trainable weights of its own: no optimizer of the engine would step them."""
    modules = [block for block in blocks if isinstance(block, nn.Module)]
    known = {id(weight) for module in modules for weight in module.parameters()}
    loss = functions.get("loss_fn")
    require_undone(Snapshot({"": loss}, numbers=False), "loss_fn")
    for name, weight in loss.named_parameters() if isinstance(loss, nn.Module) else ():
        if weight.requires_grad and id(weight) not in known:
            raise UsageError(
                f"loss_fn, a {type(loss).__name__}, has weights to train ({name}), which no optimizer steps here: let "
                "the last block find what they are for, or write loss_fn.requires_grad_(False)"
            )


def _require_loss_of_slices(plan: Plan, loss_fn: Callable[..., Any]) -> None:
    """Raise `MisfitError` where sequences are cut (cp, slices) and the loss shifts its targets by one token itself.

    Such a loss ignores the last token's logits: their gradient is 0. It is tried on random logits of shape (2, 6, 8).
    """
    if not cuts_sequences(plan) or hasattr(loss_fn, "prepare"):
        return
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 8, generator=random, dtype=torch.float64).requires_grad_()
    try:
        with draws_undone():
            given = loss_fn(logits, torch.randint(0, 8, (2, 6), generator=random))
        loss = given[0] if isinstance(given, tuple) else given
        (gradient,) = torch.autograd.grad(loss, logits)
    except Exception:  # the loss does not take logits of tokens
        return
    if bool(gradient[:, :-1].any()) and not bool(gradient[:, -1].any()):
        raise MisfitError(
            "the loss shifts its targets by a token, but sequences are cut into slices (cp, slices), whose last tokens "
            "would be left out; shift targets before the step, targets[:, i] = ids[:, i + 1], and not in the loss"
        )

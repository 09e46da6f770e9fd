"""What the runtime can run of all the plans that are sound: said before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quintsched.errors import MisfitError, UsageError
from quintsched.ir.instructions import OffloadAct
from quintsched.plan import Plan
from quintsched.verify.soundness import Verdict

from .blocks.blocks import Blocks, some_take
from .blocks.dtensor import is_sharded
from .comm import Transport
from .comm.device import draws_undone, graphs_of, is_accelerator
from .objects.snapshot import Snapshot, require_undone
from .parallel.dropout import KeyedDropout
from .parallel.expert.moe import mixtures
from .stage.build import Stage
from .stage.sliced_losses import cuts_sequences


def require_runnable(plan: Plan, transport: Transport) -> Verdict:
    """Return the proof of a plan; raise `UsageError`, `MisfitError` or `UnsoundError` if this transport cannot run it.

    This is the only place where the runtime has a plan proved.
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


def require_capturable(plan: Plan, device: torch.device, *, scales: bool) -> None:
    """Raise `UsageError` where a step of the plan cannot be captured, `MisfitError` where the device has no graphs.

    `scales` says whether losses are scaled, for fp16.
    """
    if obstacles := plan.capture_obstacles():
        raise UsageError(f"cuda_graph: no step of this plan can be captured: {'; '.join(obstacles)}")
    if scales:
        raise UsageError("cuda_graph: the loss scale is a number of the host, which a graph would keep; take bfloat16")
    if graphs_of(device) is None:
        raise MisfitError(f"cuda_graph wants a CUDA device, and this run is on {device.type}; leave it out there")


def require_constant(stages: Mapping[int, Stage]) -> None:
    """Raise `UsageError` for blocks that the host leads through each step, which no CUDA graph can hold."""
    for stage in stages.values():
        if any(isinstance(m, KeyedDropout) and m.p > 0 and m.training for m in stage.modules()):
            raise UsageError(
                "cuda_graph: blocks draw random numbers (dropout), which follow the number of the step; let them draw "
                "none (a rate of 0), or run without cuda_graph"
            )
        for name, mixture in mixtures(stage).items():
            if mixture.waits_for_routing:
                raise UsageError(
                    f"cuda_graph: the mixture of experts {name} asks the device how many tokens go to each expert; "
                    "give each the same number: pad_to_capacity, with a capacity_factor"
                )


def require_usable(plan: Plan, blocks: Any, functions: Mapping[str, Any]) -> None:
    """Raise `UsageError` for blocks that are none, and for what is to be called and cannot be.

    Raises `MisfitError` as `require_long_sight` does.
    """
    if isinstance(blocks, nn.Module) and not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise UsageError(
            f"blocks is a whole {type(blocks).__name__}; give a list of its blocks, or cut it: "
            "Engine(plan, quintsched.runtime.split(model), …)"
        )
    if not hasattr(blocks, "__len__") or not hasattr(blocks, "__getitem__") or isinstance(blocks, str | Mapping):
        raise UsageError(f"blocks is a {type(blocks).__name__}; give a list of modules, or of functions that build one")
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module) and not callable(block):
            raise UsageError(
                f"block {number} is a {type(block).__name__}; it must be a module, or a function that builds one: "
                "lambda: MyBlock(…)"
            )
    for name, function in functions.items():
        if function is None and name == "loss_fn":
            raise UsageError(
                "loss_fn is None: this model has no loss of its own that is known; give one, a function of (output, "
                "targets) such as torch.nn.functional.mse_loss"
            )
        if not callable(function):
            raise UsageError(f"{name} is a {type(function).__name__}; it must be a function of (output, targets)")
    _require_nothing_to_train(blocks, functions)
    require_long_sight(plan, blocks)
    _require_loss_of_slices(plan, functions["loss_fn"])


def _require_nothing_to_train(blocks: Any, functions: Mapping[str, object]) -> None:
    """Raise `UsageError` for a loss with weights of its own, which no optimizer of an engine steps."""
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


def require_long_sight(plan: Plan, blocks: Blocks) -> None:
    """Raise `MisfitError` where sequences are cut and no block can look beyond its slice."""
    cuts = {
        "past": (f"{plan.schedule.name} cuts sequences into {plan.schedule.slices} slices", plan.schedule.slices),
        "context": (f"mesh {plan.mesh} cuts sequences over cp", plan.mesh.axis_size("cp")),
    }
    for name, (what, count) in cuts.items():
        if count > 1 and not some_take(name, blocks):
            raise MisfitError(
                f"{what}, but no block takes `{name}` in its forward: an attention would see only its slice"
            )


def require_stages(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` where a rank's stages cannot do what the plan has them do."""
    require_keyed_dropout(plan, stages)
    require_blocks_to_recompute(plan, stages)
    require_movable_activations(plan, stages)


def _require_loss_of_slices(plan: Plan, loss_fn: Callable[..., Any]) -> None:
    """Raise `MisfitError` for a loss that compares tokens with the next ones' targets, where sequences are cut.

    Such a loss has no use for what the last token gives; it is tried on a few numbers.
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
    except Exception:  # a loss of something else than logits of tokens
        return
    if bool(gradient[:, :-1].any()) and not bool(gradient[:, -1].any()):
        raise MisfitError(
            "the loss shifts its targets by a token, but sequences are cut into slices (cp, slices), whose last tokens "
            "would be left out; shift targets before the step, targets[:, i] = ids[:, i + 1], and not in the loss"
        )


def require_keyed_dropout(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` for draws that cannot be keyed: in experts, and in recurrent networks of an accelerator.

    Its library draws these masks by a generator that it keeps for itself.
    """
    for stage in stages.values():
        for number, block in stage.blocks.items():
            _refuse_dropouts_of_experts(number, block)
            if plan.mesh.size == 1:
                continue
            for name, module in block.named_modules():
                drops = isinstance(module, nn.RNNBase) and module.dropout > 0
                if drops and is_accelerator(next(module.parameters()).device):
                    raise MisfitError(
                        f"block {number} drops out by a {type(module).__name__} ({name or 'itself'}), whose masks "
                        f"would not agree over mesh {plan.mesh}; put nn.Dropout between recurrent networks of one "
                        "layer each, or set its probability to 0"
                    )


def _refuse_dropouts_of_experts(number: str, block: nn.Module) -> None:
    for name, mixture in mixtures(block).items():
        if any(isinstance(module, KeyedDropout) and module.p > 0 for module in mixture.experts.modules()):
            raise MisfitError(
                f"block {number} has a dropout within the experts of {name or 'itself'!r}, whose rows are no samples, "
                "so that no mask belongs to them; drop out before or behind the mixture"
            )


def require_blocks_to_recompute(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` where a stage has too few blocks for every k-th of them to be recomputed, but not none."""
    for number, stage in stages.items():
        every = plan.layout.recompute_every(number)
        if every > len(stage.blocks) > 0:
            raise MisfitError(
                f"one of {every} blocks of stage {number} is to be recomputed, but it has {len(stage.blocks)}; "
                f"set recompute to {len(stage.blocks)} at most, or to 1 for the whole stage"
            )


def require_movable_activations(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` where activations go to the host's memory that PyTorch has sharded."""
    moving = {i.stage for program in plan.programs for i in program if isinstance(i, OffloadAct)}
    for number in moving.intersection(stages):
        if is_sharded(stages[number]):
            raise MisfitError(
                f"PyTorch has sharded modules of stage {number}, whose activations cannot go to the host's memory and "
                "back; compile the plan without offload"
            )

"""Weights that a forward changes in place: `nn.Embedding(max_norm=…)`, weights that are normalised where they are used.

One process changes its only copy. Shards and master weights would lose the change, and a recomputed forward would
make it twice: such changes are refused in the first step. Replicas may each change theirs by their own samples: the
changed weights are compared after the first step. With several microbatches each makes the change: this is logged.
A weight that a forward creates would not train: it is refused too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..agreement.refuse_unequal_ranks import agree
from ..blocks.dtype_names import is_low
from ..guards.state_changed_by_forwards import changed_line, out_of_order
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_stages import RankModel

_logger = logging.getLogger("quintsched.runtime")

WeightSums = tuple[int, float, float]
Changed = dict[str, WeightSums]
"""Weights that forwards have changed, by block and name, with the state that detects a change."""


@contextmanager
def weights_unchanged(model: RankModel, groups: MeshGroups) -> Iterator[None]:
    """Context for the first step that refuses forwards which change weights, where copies would miss the change.

    Collective. Raises `MisfitError` that names the block and the weight. Compiled blocks are not watched.
    """
    blocks = {number: block for stage in model.stages.values() for number, block in stage.blocks.items()}
    for number, block in blocks.items():
        _require_no_max_norm(number, block, model)
    changed = Changed()
    watched = {} if model.options.compiled else blocks
    handles = [handle for number, block in watched.items() for handle in _watch(number, block, changed, model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    names = [
        f"block {number} ({type(blocks[number]).__name__}).{weight}"
        for number, _, weight in (name.partition(".") for name in changed)
    ]
    line = changed_line(names, model.plan.schedule.microbatches)
    if line and not model.replica and not groups.tensor.index:
        _logger.warning("%s", line)
    words = " ".join(f"{name}: {numbers}" for name, (_, *numbers) in changed.items())
    for group in (groups.replicas, groups.tensor):
        if group.size > 1:
            agree("what forwards make of the weights that they change", words, group)


def _why_lost(model: RankModel, parameter: Tensor) -> str:
    """Return the reason why the change of a weight would be lost or made twice; "" where it is as in one process."""
    plan = model.plan
    if isinstance(parameter, DTensor):
        return f"mesh {plan.mesh} has shards of it over tp"
    if plan.mesh.axis_size("ep") > 1:
        return f"mesh {plan.mesh} may have other experts on each rank"
    if plan.zero.stage and model.num_replicas > 1:
        return f"ZeRO-{plan.zero.stage} has shards of it"
    if is_low(parameter.dtype):
        return "the optimizer works on its float32 master"
    if any(plan.layout.recompute_every(stage) for stage in range(len(plan.layout.stage_to_pp))):
        return "recompute runs its block twice"
    if any(plan.layout.twins(stage) for stage in model.stages):
        return f"{plan.schedule.name} holds its block twice"
    return ""


def _why_apart(model: RankModel, known: WeightSums, now: WeightSums) -> str:
    """Return the reason why a change that goes on differs from one process, which makes it in all forwards; else ""."""
    if all(isclose(one, other, rel_tol=1e-5) for one, other in zip(known[1:], now[1:], strict=True)):
        return ""
    if out_of_order(model.plan).keys() & model.stages.keys():
        return f"{model.plan.schedule.name} runs microbatches in another order than their numbers'"
    return "" if model.num_replicas == 1 else "each replica does so in its own forwards only"


def _require_no_max_norm(number: str, block: nn.Module, model: RankModel) -> None:
    for path, module in block.named_modules():
        is_changed = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        if is_changed and (model.num_replicas > 1 or isinstance(module.weight, DTensor)):
            _refuse(number, block, f"{path}.weight".lstrip("."), "only in the rows that its own samples have")


def _watch(number: str, block: nn.Module, changed: Changed, model: RankModel) -> list[Any]:
    """Hook a block to compare its weights before and after each forward; refuse a change, or record it in `changed`."""
    before = Changed()

    def begin(*_: object) -> None:
        before.update(_states(block))

    def end(*_: object) -> None:
        for name, now in _states(block).items():
            if name not in before:
                raise MisfitError(
                    f"block {number} ({type(block).__name__}) creates its weight {name!r} in a forward, when the "
                    "optimizer has been given all others: create it in __init__, before the engine is built"
                )
            if now != before[name]:
                known = changed.setdefault(f"{number}.{name}", now)
                if why := _why_lost(model, block.get_parameter(name)) or _why_apart(model, known, now):
                    _refuse(number, block, name, why)

    return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]


def _states(block: nn.Module) -> dict[str, WeightSums]:
    """Return (address or version, sum, sum of squares) by weight; a clamp that clips nothing moves only the version."""
    found: dict[str, WeightSums] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():  # modes around the block must not see this
        for name, weight in block.named_parameters():
            if isinstance(weight, DTensor):
                found[name] = weight._version, 0.0, 0.0
                continue
            plain = torch.view_as_real(weight) if weight.is_complex() else weight
            numbers = plain.detach().double().nan_to_num()
            found[name] = weight.data_ptr(), float(numbers.sum()), float(numbers.square().sum())
    return found


def _refuse(number: str, block: nn.Module, name: str, why: str) -> None:
    raise MisfitError(
        f"block {number} ({type(block).__name__}) changes its weight {name!r} in a forward, and {why}, so it would "
        "not train as one process does; let the forward compute with a changed copy, such as F.normalize(weight), "
        "or train without copies and in their order, on mesh pp=N"
    )

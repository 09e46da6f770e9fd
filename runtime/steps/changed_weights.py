"""Weights that a forward itself changes: `nn.Embedding(max_norm=…)`, weights that are normalised where they are used.

One process has the change in the one copy that there is. Shards and master weights would lose it, and what is run again
would make it twice: refused where it happens in the first step. Replicas may each change theirs by their own samples:
what they have made of them in the first step is compared. Several microbatches make it of each of them: that is named.
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

from ..agreement.sections import agree
from ..blocks.number_types import is_low
from ..examine.microbatch_state import changed_line
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_model import RankModel

_logger = logging.getLogger("quintsched.runtime")

State = tuple[int, float, float]
Changed = dict[str, State]
"""Weights that forwards have changed, by block and name, and what tells their numbers."""


@contextmanager
def weights_unchanged(model: RankModel, groups: MeshGroups) -> Iterator[None]:
    """A context for the first step, in which a forward that changes weights is refused where copies would miss it.

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
    parts = (name.partition(".")[::2] for name in changed)
    names = [f"block {number} ({type(blocks[number]).__name__}).{weight}" for number, weight in parts]
    line = changed_line(names, model.plan.schedule.microbatches)
    if line and not model.replica and not groups.tensor.index:
        _logger.warning("%s", line)
    words = " ".join(f"{name}: {numbers}" for name, (_, *numbers) in changed.items())
    for group in (groups.replicas, groups.tensor):
        if group.size > 1:
            agree("what forwards make of the weights that they change", words, group)


def _why_lost(model: RankModel, parameter: Tensor) -> str:
    """Return why what a forward does to a weight would not be what it is in one process; "" where it is."""
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


def _why_apart(model: RankModel, known: State, now: State) -> str:
    """Return why a change would not be what it is in one process, which makes it in the forwards of all replicas."""
    is_settled = all(isclose(one, other, rel_tol=1e-5) for one, other in zip(known[1:], now[1:], strict=True))
    return "" if is_settled or model.num_replicas == 1 else "each replica does so in its own forwards only"


def _require_no_max_norm(number: str, block: nn.Module, model: RankModel) -> None:
    for path, module in block.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if model.num_replicas > 1 or isinstance(module.weight, DTensor):
            _refuse(number, block, f"{path}.weight".lstrip("."), "only in the rows that its own samples have")


def _watch(number: str, block: nn.Module, changed: Changed, model: RankModel) -> list[Any]:
    """Compare the weights of a block before and behind each forward; refuse a change, or take note of it."""
    before = Changed()

    def begin(*_: object) -> None:
        before.update(_states(block))

    def end(*_: object) -> None:
        for name, now in _states(block).items():
            if name in before and now != before[name]:
                known = changed.setdefault(f"{number}.{name}", now)
                if why := _why_lost(model, block.get_parameter(name)) or _why_apart(model, known, now):
                    _refuse(number, block, name, why)

    return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]


def _states(block: nn.Module) -> dict[str, State]:
    """Return what tells that weights have changed; a clamp that has nothing to do moves the version counter only."""
    found: dict[str, State] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():  # modes around the block have nothing to do with it
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
        "or train without copies, on mesh pp=N"
    )

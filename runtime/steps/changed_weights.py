"""Weights that a forward itself changes: `nn.Embedding(max_norm=…)`, weights that are normalised where they are used.

One process has the change in the one copy that there is. Replicas would change theirs each by its own samples, shards
and master weights would lose it, and what is run again would make it twice. So it is refused where there are such: an
embedding with `max_norm` before the first step, others by what the first step's forwards have done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..stage.rank_model import RankModel

State = tuple[int, float, float]


def copies_in(model: RankModel) -> str:
    """Return what of a plan keeps weights more than once, or uses them again; "" where there is nothing of it."""
    plan, stages = model.plan, model.stages
    axes = [axis for axis in ("dp", "ep", "cp", "tp") if plan.mesh.axis_size(axis) > 1]
    if axes:
        return f"mesh {plan.mesh} has copies or shards of it over {axes[0]}"
    if any(plan.layout.recompute_every(stage) for stage in range(len(plan.layout.stage_to_pp))):
        return "recompute runs its block twice"
    if any(plan.layout.twins(stage) for stage in stages):
        return f"{plan.schedule.name} holds its block twice"
    return ""


@contextmanager
def weights_unchanged(model: RankModel) -> Iterator[None]:
    """A context for the first step, in which a forward that changes weights is refused where these have copies.

    Raises `MisfitError` that names the block and the weight. Compiled blocks are not watched.
    """
    copies = copies_in(model)
    blocks = {n: block for stage in model.stages.values() for n, block in stage.blocks.items()} if copies else {}
    for number, block in blocks.items():
        _require_no_max_norm(number, block, copies)
    watched = {} if model.options.compiled else blocks
    handles = [handle for number, block in watched.items() for handle in _watch(number, block, copies)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _require_no_max_norm(number: str, block: nn.Module, copies: str) -> None:
    for path, module in block.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            _refuse(number, block, f"{path}.weight".lstrip("."), copies)


def _watch(number: str, block: nn.Module, copies: str) -> list[Any]:
    """Compare the weights of a block before and behind each forward."""
    before = dict[str, State]()

    def begin(*_: object) -> None:
        before.update((name, _state(parameter)) for name, parameter in block.named_parameters())

    def end(*_: object) -> None:
        for name, parameter in block.named_parameters():
            if name in before and _state(parameter) != before[name]:
                _refuse(number, block, name, copies)

    return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]


@torch.no_grad()
def _state(parameter: Tensor) -> State:
    """Return what tells that numbers have changed; a clamp that has nothing to do moves the version counter only."""
    if isinstance(parameter, DTensor):
        return parameter._version, 0.0, 0.0
    plain = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    numbers = plain.detach().double().nan_to_num()
    return parameter.data_ptr(), float(numbers.sum()), float(numbers.square().sum())


def _refuse(number: str, block: nn.Module, name: str, copies: str) -> None:
    raise MisfitError(
        f"block {number} ({type(block).__name__}) changes its weight {name!r} in a forward, and {copies}, which would "
        "differ from one process's; let the forward compute with a changed copy, such as F.normalize(weight), "
        "or train without copies, on mesh pp=N"
    )

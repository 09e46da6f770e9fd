"""Weights that a loss or a metric reads, but that this rank does not hold whole: its result would be wrong, unnoticed.

    lambda output, targets: mse(output, targets) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

        of other stages     keep their values from when the model was built                                refused
        cut over tp, ep     its shards, of which each rank has others; with ZeRO-3 resident only in a block    refused

Reads of shapes and devices, and of frozen weights, are allowed anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError

from ..parallel.expert.moe import expert_weights
from ..parallel.tensor.parameter_shards import shard_of

_PLAIN = (Tensor, nn.Parameter)

_ELSEWHERE = (
    "which other ranks train: here it stays as it was at the start; let the block that has the weight return a loss of "
    "it, (output, loss)"
)
_OVER_TP = "of which tp gives this rank a shard; keep the layers of its block whole, rules={{'{}.*': 'replicate'}}"
_OVER_EP = "of an expert that other ranks of ep do not have; let the block that has it return a loss of it"
_BY_ZERO = (
    "and with ZeRO-3 a loss or a metric cannot read weights, which are resident only while blocks use them; compile "
    "the plan with zero=2, or let the block that has the weight return a loss of it, (output, loss)"
)
_INSTEAD = "let the optimizer decay weights (weight_decay=…), or take engine.full_weights() between steps"

Places = dict[int, list[tuple[int, int, str]]]
"""Weights by data_ptr of their storage: first and last address of each, and its description for messages."""


class WeightsElsewhere:
    """Weights of a model that only other ranks train, or of which this rank has a shard.

    Args:
        blocks: the whole model, before it is cut; weights of blocks not built yet cannot be read.
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        built = {number: block for number, block in enumerate(blocks) if isinstance(block, nn.Module)}
        self._weights = [
            (f"{number}.{name}", ref(parameter))
            for number, block in built.items()
            for name, parameter in block.named_parameters()
            if parameter.requires_grad and type(parameter) in _PLAIN
        ]
        self._own: dict[str, nn.Parameter] = {}
        self._experts = set[nn.Parameter]()
        self._is_resident = True

    def settle_stages(self, here: Iterable[nn.Module], *, is_resident: bool) -> None:
        """Add the stages that this rank trains, and whether their weights are resident between steps."""
        self._is_resident = is_resident
        for stage in here:
            self._own.update((name.removeprefix("blocks."), weight) for name, weight in stage.named_parameters())
            self._experts |= expert_weights(stage)

    def places(self) -> Places:
        """Return the addresses of these weights, with their descriptions."""
        found: Places = {}
        for name, weight in self._own.items():
            if why := self._why_cut(name, weight):
                _add(found, weight, f"{name!r} (<block>.<weight>), {why}")
        held = {memory for weight in self._own.values() for memory in _memory(weight)}
        for name, reference in self._weights:
            weight_elsewhere = reference()
            if weight_elsewhere is not None and held.isdisjoint(_memory(weight_elsewhere)):
                _add(found, weight_elsewhere, f"{name!r} (<block>.<weight>), {_ELSEWHERE}")
        return found

    def _why_cut(self, name: str, weight: nn.Parameter) -> str:
        if shard_of(weight) is not None:
            return _OVER_TP.format(name.partition(".")[0])
        if weight in self._experts:
            return _OVER_EP
        return "" if self._is_resident or not weight.requires_grad else _BY_ZERO


class ReadsElsewhere(TorchDispatchMode):
    """Mode that detects reads of weights that this rank does not hold whole.

    Attributes:
        refusal: the first such read, in words; "": there was none.
    """

    def __init__(self, weights: WeightsElsewhere, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._what, self._places = weights, what, Places()
        self.refusal = ""

    def __enter__(self) -> Any:
        self._places = self._weights.places()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if self._places and not (name.startswith("aten::new_") or name.endswith(("_like", "::detach"))):
            read = next(filter(None, map(self._told_of, tree_leaves((args, kwargs)))), "")
            if read and not self.refusal:
                self.refusal = f"{self._what} goes by {read}; {_INSTEAD}"
        return func(*args, **(kwargs or {}))

    def _told_of(self, leaf: Any) -> str:
        spans = (span for memory in _memory(leaf) for span in self._places.get(memory, ()))
        return next((told for first, last, told in spans if first <= leaf.data_ptr() < last), "")


def require_own_weights(
    blocks: Sequence[nn.Module], stage_of: Mapping[int, int], held: Sequence[Sequence[tuple[str, Tensor]]]
) -> None:
    """Raise `MisfitError` where a block holds, outside its modules, a weight that another stage trains.

    `held`: the tensors reachable from each block, through lists, closures, methods, weak references and others.
    """
    homes: dict[int, dict[int, str]] = {}
    for number, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            if weight.requires_grad:
                homes.setdefault(_place(weight), {}).setdefault(stage_of[number], f"{number}.{name}")
    for number, tensors in enumerate(held):
        stage = stage_of[number]
        for name, tensor in tensors:
            home = homes.get(_place(tensor), {})
            if home and stage not in home and "_state_dict_" not in name:
                other = min(home)
                raise MisfitError(
                    f"block {number} ({type(blocks[number]).__name__}) on stage {stage} holds {home[other]!r} "
                    f"(<block>.<weight>), which stage {other} trains, as {name.partition(' ')[2] or name!r}, and would "
                    "have it as it was at the start; register its module in the block (split ties what several blocks "
                    "have), hand what it gives on as an argument, or have both blocks on one stage"
                )


def _place(tensor: Tensor) -> int:
    """Return the storage address of a tensor, or else its id."""
    return next(iter(_memory(tensor)), id(tensor))


def _add(places: Places, weight: Tensor, told: str) -> None:
    for memory in _memory(weight):
        first = weight.data_ptr()
        places.setdefault(memory, []).append((first, first + max(1, weight.nbytes), told))


def _memory(leaf: Any) -> Iterable[int]:
    """Yield the storage address of a plain tensor, if it has one."""
    if type(leaf) in _PLAIN and leaf.layout is torch.strided and (place := leaf.untyped_storage().data_ptr()):
        yield place

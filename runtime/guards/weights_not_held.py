"""Weights that a loss or a metric reads, but that this rank does not hold whole: its result would be wrong, unnoticed.

    lambda output, targets: mse(output, targets) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

        of other stages     keep their values from when the model was built                                refused
        cut over tp, ep     its shards, of which each rank has others; with ZeRO-3 resident only in a block    refused

Reads of shapes and devices, and of frozen weights, are allowed anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError

from ..parallel.expert.moe import expert_weights
from ..parallel.tensor.parameter_shards import shard_of
from ..user_objects.snapshot import Snapshot

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

AddressRanges = dict[int, list[tuple[int, int, str]]]
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

    def places(self) -> AddressRanges:
        """Return the addresses of these weights, with their descriptions."""
        found: AddressRanges = {}
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
        self._weights, self._what, self._places = weights, what, AddressRanges()
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
    blocks: Sequence[nn.Module],
    stage_of: Mapping[int, int],
    held: Sequence[Sequence[tuple[str, Tensor]]],
    separates: str = "",
    tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise `MisfitError` where a block holds, outside its modules, a weight that another stage trains, or its memory.

    `held`: the tensors reachable from each block, through lists, closures, methods, weak references and others.
    `separates`: the cause, if any, by which other tensors in a weight's memory are separated from it on one stage too.
    `tied`: names of weights that may share memory.
    """
    weights = [(number, *named) for number, block in enumerate(blocks) for named in block.named_parameters()]
    reached = [(number, *named) for number, tensors in enumerate(held) for named in tensors]
    together = {pair for names in tied.values() for pair in permutations(names, 2)}
    for (home, weight_name, weight), (number, name, tensor) in _in_one_memory(weights, reached):
        stage, other, full = stage_of[number], stage_of[home], f"{home}.{weight_name}"
        is_tie = isinstance(tensor, nn.Parameter) and tensor.requires_grad and tensor is not weight
        if other != stage and not is_tie:
            raise MisfitError(
                f"block {number} ({type(blocks[number]).__name__}) on stage {stage} holds {full!r} "
                f"(<block>.<weight>), which stage {other} trains, as {name.partition(' ')[2] or name!r}, and would "
                "have it as it was at the start; register its module in the block (split ties what several blocks "
                "have), hand what it gives on as an argument, or have both blocks on one stage"
            )
        there = f"{number}.{_plain(name)}"
        is_apart = home != number and (other != stage or (separates and tensor is not weight))
        if is_apart and (full, there) not in together:
            cause = separates if other == stage else f"stages {other} and {stage} train one each"
            raise MisfitError(_words(full, there, tensor, cause, f"tie them, tied={{'w': ({full!r}, {there!r})}}"))


def why_separated(number: int, block: nn.Module, separates: str) -> str:
    """Return the reason to refuse a block with other tensors in the memory of its trained weights; "": none.

    `separates`: what gives weights other memory, in words.
    """
    weights = [(number, *named) for named in block.named_parameters()]
    reached = [(number, *named) for named in Snapshot({"": block}, numbers=False).tensors()]
    for (_, weight_name, _), (_, name, tensor) in _in_one_memory(weights, reached):
        if f"{_plain(name)}_orig" != weight_name:  # which torch's hooks set in each forward
            said = _words(
                weight_name, _plain(name), tensor, separates, f"tie by object, {_plain(name)} = {weight_name}"
            )
            return f"block {number} ({type(block).__name__}): {said}"
    return ""


_Reached = tuple[int, str, Tensor]
"""Tensor that a block reaches: number of the block, name there."""


def _in_one_memory(weights: Iterable[_Reached], reached: Iterable[_Reached]) -> Iterator[tuple[_Reached, _Reached]]:
    """Yield each trained weight with other tensors that have elements of it, and with itself in other blocks."""
    found: dict[int, list[_Reached]] = {}
    for one in reached:
        if "_state_dict_" not in one[1]:
            found.setdefault(_place(one[2]), []).append(one)
    for weight in weights:
        for one in found.get(_place(weight[2]), ()) if weight[2].requires_grad else ():
            if (weight[0] != one[0]) if weight[2] is one[2] else _overlap(weight[2], one[2]):
                yield weight, one


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    (first, size), (second, length) = spans = _span(one), _span(other)
    is_apart = min(first + size, second + length) <= max(first, second)
    if is_apart or one.itemsize != other.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return not is_apart
    at = [
        torch.arange(start, start + extent, one.itemsize).as_strided(tensor.shape, tensor.stride())
        for tensor, (start, extent) in zip((one, other), spans, strict=True)
    ]
    return bool(torch.isin(*map(torch.flatten, at)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins in its storage, and how far it extends, in bytes."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) * tensor.itemsize, extent * tensor.itemsize if tensor.numel() else 0


def _words(weight: str, name: str, tensor: Tensor, cause: str, tie: str) -> str:
    is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
    return (
        f"{name!r} is another tensor in the memory of the trained weight {weight!r}, and {cause}, so that they would "
        f"differ; {tie if is_trained else f'let forward read {weight} itself in place of a view or .detach() of it'}"
    )


def _plain(name: str) -> str:
    """Return the name of a tensor in a snapshot without the classes of modules."""
    return re.sub(r" \([^)]*\)", "", name).lstrip(".")


def _place(tensor: Tensor) -> int:
    """Return the storage address of a tensor, or else its id."""
    return next(iter(_memory(tensor)), id(tensor))


def _add(places: AddressRanges, weight: Tensor, told: str) -> None:
    for memory in _memory(weight):
        first = weight.data_ptr()
        places.setdefault(memory, []).append((first, first + max(1, weight.nbytes), told))


def _memory(leaf: Any) -> Iterable[int]:
    """Yield the storage address of a plain tensor, if it has one."""
    is_plain = isinstance(leaf, _PLAIN) and not is_traceable_wrapper_subclass(leaf)
    if is_plain and leaf.layout is torch.strided and (place := leaf.untyped_storage().data_ptr()):
        yield place

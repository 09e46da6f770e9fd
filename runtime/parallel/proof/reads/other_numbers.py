"""Other numbers than a first batch has, by which a block may do something else later.

activation    the last tokens exactly 0, as padding is
extras        1 0 0 -inf ─▶ 0.7 0.4 0.6 -inf    True True ─▶ True False    7 9 8 ─▶ 9 7 7, 3 0 5, and some of them 1000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..arrivals import Arrival, Given, GivenTree
from ..twins import FEW, SEED
from .steering import SteeringState

_TRIED = (0, 1, 2, 3, 5, 10, 100)
_COUNTS = 9
_MOST, _MOST_OF_MANY = 16, 4
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Agree = Callable[[Sequence[float]], list[float]]


def others_of(arrival: Arrival, block: nn.Module, agree: Agree, *, pads: bool) -> Iterator[Arrival]:
    """Yield a block's arrival, and then with other numbers; `pads`: in the activation, too.

    Some may be nothing that the block can be given. `agree` makes as many numbers of ranks that run together the same.
    """
    yield arrival
    if pads:
        parts = [replace(part, tensor=_padded(part)) for part in arrival.activation.parts]
        if any(new.tensor is not old.tensor for new, old in zip(parts, arrival.activation.parts, strict=True)):
            padded = GivenTree(parts, arrival.activation.tree)
            yield replace(arrival, activation=padded, words="where it is given tokens that are 0")
    held = {(name, k): part.tensor for name, tree in arrival.extras.items() for k, part in enumerate(tree.parts)}
    held = {place: tensor for place, tensor in held.items() if _is_plain(tensor)}
    for draw in (_drawn, _counts):
        others = {place: draw(tensor) for place, tensor in held.items() if tensor.numel() > FEW}
        if any(other is not held[place] for place, other in others.items()):
            yield _with_extras(arrival, others)
    whole = {place: tensor for place, tensor in held.items() if _is_whole(tensor)}
    named = _numbers_of(block, agree) if whole else []
    for place, tensor in whole.items():
        for number in dict.fromkeys([*_TRIED, *named] if tensor.numel() <= FEW else named[:_MOST_OF_MANY]):
            if torch.iinfo(tensor.dtype).min <= number <= torch.iinfo(tensor.dtype).max:
                yield _with_extras(arrival, {place: _put(tensor, number)})


def _with_extras(arrival: Arrival, others: dict[tuple[str, int], Tensor]) -> Arrival:
    extras = {
        name: GivenTree([Given(others.get((name, k), p.tensor), p.tokens) for k, p in enumerate(tree.parts)], tree.tree)
        for name, tree in arrival.extras.items()
    }
    return replace(arrival, extras=extras, words="where its extras are other numbers")


def _padded(part: Given) -> Tensor:
    """Return a tensor with the last quarter of its tokens 0, or its last sample where it has none."""
    tensor = part.tensor
    dim = part.tokens if part.tokens is not None else max(0, min(tensor.dim() - 2, 2))
    if not tensor.is_floating_point() or tensor.dim() < 2 or tensor.shape[dim] < 2:
        return tensor
    length, tensor = tensor.shape[dim], tensor.clone(memory_format=torch.contiguous_format)
    tensor.narrow(dim, length - max(1, length // 4), max(1, length // 4)).zero_()
    return tensor


def _drawn(tensor: Tensor) -> Tensor:
    """Return other numbers of about the size of a tensor's, or in its range; a quarter of its flags turned."""
    generator = torch.Generator().manual_seed(SEED)
    if tensor.is_floating_point():
        share = 0.25 + 0.75 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        return torch.where(tensor == 0, share, tensor * share)
    if tensor.dtype is torch.bool and tensor.device.type == "cpu":
        return tensor ^ (torch.rand(tensor.shape, generator=generator) < 0.25)
    if not _is_whole(tensor):
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _counts(tensor: Tensor) -> Tensor:
    """Return small counts in place of whole numbers."""
    drawn = torch.randint(0, _COUNTS, tensor.shape, generator=torch.Generator().manual_seed(SEED))
    return drawn.to(tensor.dtype) if _is_whole(tensor) else tensor


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested and tensor.numel() > 0


def _is_whole(tensor: Tensor) -> bool:
    return tensor.dtype in _WHOLE and tensor.device.type == "cpu"


def _put(tensor: Tensor, number: int) -> Tensor:
    """Return a tensor of a number alone where it has a few, and of every third of them otherwise."""
    if tensor.numel() <= FEW:
        return torch.full_like(tensor, number)
    places = torch.arange(tensor.numel()).view(tensor.shape) % 3 == 0
    return tensor.masked_fill(places, number)


def _numbers_of(block: nn.Module, agree: Agree) -> list[int]:
    """Return whole numbers that a block's code goes by, and the next after the last."""
    found = SteeringState({"block": block}).whole_numbers()[:_MOST]
    found = [*found, *(number + 1 for number in found[-1:])]
    return [int(number) for number in agree([*found, *[0] * (_MOST + 1 - len(found))])]

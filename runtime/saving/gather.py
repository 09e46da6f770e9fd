"""Full tensors, gathered over ranks that hold parts of them: each puts its numbers in their places among zeros.

    rank 0  [ segment, shard 0 of tp ]     ▓ ▓ 0 0          of each byte the largest is taken, so that
    rank 1  [ segment, shard 1 of tp ]     0 0 ▓ ▓   ──▶    every bit stays what it was, on all of them

What has no place in a whole, such as counts of steps and Adafactor's factors, is that of the first rank that has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm import Group, ReduceOp
from ..comm.control import share_bytes
from ..state.state_dict import require_alike
from .placement import Box, Placement
from .rank_tensors import RankTensors, sizes_of
from .saved_state import parts_of


def gather_boxes(
    boxes: Iterable[Box], sizes: Sequence[int], dtype: torch.dtype, group: Group, offsets: Sequence[int] = ()
) -> Tensor:
    """Return what the members' boxes, of no number in common, have in a window of these sizes: on all (collective)."""
    piece = torch.zeros(tuple(sizes), dtype=dtype, device=group.device)
    offsets = offsets or (0,) * len(sizes)
    for box in boxes:
        here = box.within(offsets, sizes)
        if here is not None:
            piece[here.places_from(offsets)] = here.numbers.to(piece)
    if piece.numel():
        group.all_reduce(piece.reshape(-1).view(torch.uint8), ReduceOp.MAX).wait()
    return piece


def full_state(rank: RankTensors, *, all_blocks: bool) -> dict[str, Tensor]:
    """Return full tensors of weights, averages and what optimizers keep, on the CPU (collective).

    They are those of the ranks that hold the same stages; with `all_blocks`, of all. What modules and optimizers keep
    beside is there too; raises `MisfitError` where ranks have it otherwise.
    """
    beside = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rank.training.beside.read().items()}
    require_alike(beside, rank.groups.world)
    group = rank.groups.world if all_blocks else rank.groups.holders
    return dict(_gathered(rank, {**rank.tensors(), **beside}, group))


def _gathered(rank: RankTensors, tensors: dict[str, Tensor], group: Group) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors of those that some member of a group has, by name."""
    placements, _ = rank.placements(sizes_of(tensors))
    speaks = {one.name for one in rank.held() if one.speaks}
    mine = {
        name: (placements.get(name) or Placement.whole(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    text = json.dumps({name: [*placement.shape, dtype] for name, (placement, dtype) in mine.items()})
    first: dict[str, int] = {}
    specs: dict[str, list[object]] = {}
    for member, theirs in enumerate(share_bytes(group, text.encode())):
        for name, spec in json.loads(theirs).items():
            first.setdefault(name, member)
            specs.setdefault(name, spec)
    for name, (*shape, dtype) in sorted(specs.items()):
        boxes: Iterable[Box] = ()
        if name in mine:
            placement, _ = mine[name]
            here = first[name] == group.index if placement.is_whole else parts_of(name)[1] in speaks
            boxes = placement.boxes(tensors[name].detach()) if here else ()
        sizes = [int(str(size)) for size in shape]
        yield name, gather_boxes(boxes, sizes, getattr(torch, str(dtype)), group).cpu()

"""How a parameter is cut over the ranks of a group, noted on the parameter itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...comm import Group
from ...comm.autograd_collectives import gather_from_group
from ...settings.tensor_rules import Parts
from .fused import block_sizes, require_even


@dataclass(frozen=True)
class Shard:
    """Slice `index` of `size` along `dim`, taken from each of the fused blocks (`parts`) and joined."""

    dim: int
    parts: Parts
    index: int
    size: int

    def places(self, total: int) -> list[slice]:
        """Return which places of a full dimension of `total` make up the slice: one in each of the fused blocks."""
        places, start = [], 0
        for block in block_sizes(total, self.parts):
            here = block // self.size
            places.append(slice(start + self.index * here, start + (self.index + 1) * here))
            start += block
        return places


def shard_of(param: Tensor) -> Shard | None:
    """Return how `param` was cut, or None: it is replicated."""
    shard: Shard | None = getattr(param, "_quintsched_shard", None)
    return shard


def mark_shard(param: Tensor, shard: Shard) -> None:
    """Note on `param` how it was cut."""
    param._quintsched_shard = shard  # type: ignore[attr-defined]


def take_shard(full: Tensor, shard: Shard) -> Tensor:
    """Return the slice of `full` that `shard` stands for, as a contiguous copy; the inverse of `gather_full`.

    Raises:
        MisfitError: the dimension does not divide.
    """
    require_even(full.shape[shard.dim], shard.size, f"features of {tuple(full.shape)}", shard.parts)
    pieces = [full.detach().narrow(shard.dim, p.start, p.stop - p.start) for p in shard.places(full.shape[shard.dim])]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def gather_full(param: Tensor, group: Group, shard: Shard | None = None) -> Tensor:
    """Return the full tensor that the members' `param` are slices of, detached; a copy where it is replicated.

    Args:
        param: a parameter, or with `shard` any tensor cut like one (a gradient, an optimizer state).
        group: all its members must call this.
        shard: default `shard_of(param)`.

    Raises:
        MisfitError: cut over a group of another size.
    """
    shard = shard or shard_of(param)
    mine = param.detach()
    if shard is None:
        return mine.clone()
    if shard.size != group.size:
        raise MisfitError(f"a parameter cut into {shard.size} cannot be gathered over a group of {group.size}")
    return gather_blocks(mine, group, shard.dim, shard.parts).clone()


def gather_blocks(tensor: Tensor, group: Group, dim: int, parts: Parts) -> Tensor:
    """Join the members' slices along `dim` (from 0, or -1), block by block; its backward takes this member's."""
    if isinstance(parts, int):
        at = dim % tensor.dim()
        blocks = tensor.reshape(*tensor.shape[:at], parts, 1, -1, *tensor.shape[at + 1 :])
        return gather_from_group(blocks, group, at + 1).flatten(at, at + 2)
    pieces = tensor.split(block_sizes(tensor.shape[dim], parts), dim)
    return torch.cat([gather_from_group(piece, group, dim) for piece in pieces], dim)

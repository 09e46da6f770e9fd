"""How a parameter is cut over the ranks of a group, noted on the parameter itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...comm import Group
from ...comm.autograd_collectives import gather_from_group
from .rules import require_even


@dataclass(frozen=True)
class Shard:
    """Slice `index` of `size` along `dim`, taken from each of `parts` equal blocks and joined."""

    dim: int
    parts: int
    index: int
    size: int


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
    blocks = _split_dim(full.detach(), shard.dim, shard.parts, shard.size).select(shard.dim + 1, shard.index)
    return blocks.flatten(shard.dim, shard.dim + 1).clone(memory_format=torch.contiguous_format)


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
    blocks = _split_dim(mine, shard.dim, shard.parts, 1)
    return gather_from_group(blocks, group, shard.dim + 1).flatten(shard.dim, shard.dim + 2).clone()


def _split_dim(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """Split dimension `dim` into dimensions of these sizes and one for the rest."""
    return tensor.reshape(*tensor.shape[:dim], *sizes, -1, *tensor.shape[dim + 1 :])

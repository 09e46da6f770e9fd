"""Marks of what is looked up by tokens, or put where tokens say, as mixtures of experts do: owners and labels alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..marks.owner_rules import LABEL, Owners, joined, name_of, require_one

_SCATTERING = {"index_put", "index_add", "scatter_add", "index_copy", "scatter"}


def looked_up(
    func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any, of: Owners, of_index: Owners
) -> Tensor | None:
    """Return the marks of a result that is looked up by marked numbers, or put where they say; None: it is no such."""
    name = name_of(func)
    if name == "embedding":
        marks = joined(name, require_one(of(args[0]), [0, 1], keeps=False), of(args[1]))
        return marks[..., None].expand(result.shape)
    if name in ("index", "gather", "index_select"):
        moved: Tensor = of(args[0])
        if moved.dtype is not LABEL and not any(of_index(i).any() for i in _indices(name, args)):
            return None
        moved = func(moved, *args[1:], **given)
        return joined(name, moved, _of_places(name, args, result, of_index))
    return _scattered(name, args, of, of_index) if name in _SCATTERING else None


def _of_places(name: str, args: Sequence[Any], result: Tensor, of: Owners) -> Tensor:
    """Return the marks of the indices by which each number of a result is looked up."""
    of_places = joined(name, *(_of_chosen(index, of) for index in _indices(name, args)))
    if name == "gather":
        return of_places
    chosen = [dim for dim, index in enumerate(args[1]) if index is not None] if name == "index" else [args[1]]
    is_apart = chosen != list(range(chosen[0], chosen[0] + len(chosen)))
    behind = result.dim() - of_places.dim() - (0 if is_apart else chosen[0] % result.dim())
    return of_places.reshape(*of_places.shape, *[1] * max(behind, 0))


def _scattered(name: str, args: Sequence[Any], of: Owners, of_index: Owners) -> Tensor:
    """Follow numbers to where they are put; by which owners a place is met is counted, labels are added up."""
    at = 2 if name == "index_put" else 3
    base, places = of(args[0]), _of_targets(name, args, of_index)
    values = joined(name, of(args[at]) if isinstance(args[at], Tensor) else torch.zeros_like(places), places)
    if base.dtype is LABEL:
        hit = _put(name, args, base, values)
        return torch.where(hit != 0, joined(name, base, hit), base)
    found = base
    for owner in values.unique().tolist():
        mine = (values == owner).int() if owner else torch.zeros_like(values, dtype=torch.int32)
        found = joined(name, found, (_put(name, args, base, mine) > 0) * torch.tensor(owner, dtype=torch.int8))
    return found


def _put(name: str, args: Sequence[Any], base: Tensor, values: Tensor) -> Tensor:
    """Return the sums of values, int32, at the places where a function puts them."""
    hit = torch.zeros(base.shape, dtype=torch.int32, device=base.device)
    if name == "index_put":
        return hit.index_put_(args[1], values, accumulate=True)
    if name in ("index_add", "index_copy"):
        return hit.index_add_(args[1], args[2], values)
    return hit.scatter_add_(args[1], args[2], values)


def _of_targets(name: str, args: Sequence[Any], of: Owners) -> Tensor:
    if name == "index_put":
        places = joined(name, *(_of_chosen(index, of) for index in args[1] if index is not None))
        return places.reshape(*places.shape, *[1] * max(args[2].dim() - places.dim(), 0))
    places = of(args[2])
    if name in ("index_add", "index_copy"):
        places = places.reshape([-1 if dim == args[1] % args[3].dim() else 1 for dim in range(args[3].dim())])
    return places


def _of_chosen(index: Tensor, of: Owners) -> Tensor:
    return of(index)[index] if index.dtype is torch.bool else of(index)


def _indices(name: str, args: Sequence[Any]) -> list[Tensor]:
    return [index for index in args[1] if index is not None] if name == "index" else [args[2]]

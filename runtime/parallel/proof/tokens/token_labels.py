"""Labels of what each number is made of, where sequences are cut: tokens are labelled by their places in whole ones.

    whole    a b c d ─▶ [:, :1] * g ─▶ e b c d       a part's tokens have the labels that they have in the whole,
    part         c d ─▶             ─▶     f d       or a block goes by their places among those that are there

What whole numbers that code makes come to is known by their values, `context.positions` and masks made of them too: by
these tokens are chosen as they are in the whole, or are not.

Marks of what is looked up by tokens, or put where tokens say, as mixtures of experts do: owners and labels alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..feature_owners import line
from ..marks.labels import Labels, key_of, memory_of, start_of
from ..marks.owner_rules import LABEL, Joined, Owners, blended, identity, joined, mixed, name_of, require_one


class TokenLabels(Labels):
    """Follows labels through the calls of one run, of whole sequences or a part of their tokens.

    Args:
        block: what is run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block, trusts=False)
        self._plain: set[int] = set()
        """Memories of whole numbers that are known by their values."""
        self._lost: dict[int, torch.UntypedStorage] = {}
        """Memories of what is made of keys that slices have so far, of which later ones have more."""

    def _begin(self, tensor: Tensor) -> None:
        if key_of(tensor) in self._starts or tensor.is_complex():
            super()._begin(tensor)
            return
        memory = tensor.detach().as_strided((memory_of(tensor),), (1,), 0)
        labels = _by_values(memory)
        if tensor.is_floating_point():  # what the loop may have made: each place has its own
            labels = mixed(labels + placed(memory, line()))
        else:
            self._plain.add(key_of(tensor))
        self._shadows.add(tensor, labels)

    def hear(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        """Note the labels of what a function gave or changed; of tokens, if it `is_owned`."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func.is_view or not found:
            return
        if any(map(self.is_lost, given)):
            self.lose(*found)
            return
        if all(map(self._is_plain, given)) and not any(one.is_floating_point() or one.is_complex() for one in found):
            if func._schema.is_mutable:
                self._shadows.forget(given[0])
            return
        try:
            self._follow_one(func, args, kwargs, result, is_owned=is_owned)
        except (Joined, RuntimeError, IndexError):
            self._lose(func, (args, kwargs), found)

    def _follow_one(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        name = name_of(func)
        if name == "arange":
            self.note(result, _by_values(result))
        elif name == "nonzero" and is_owned:  # what is chosen by them is moved by their values
            self.note(result, torch.zeros_like(result, dtype=LABEL))
        elif name == "nonzero":
            self.note(result, self.of(args[0])[args[0] != 0][:, None])
        elif name == "sort" and args[0].dim() == 1:
            for one in result:
                self.note(one, self.of(args[0])[result[1]])
        elif (labels := looked_up(func, args, kwargs, result, self.of, self._of_index)) is not None:
            self.note(result, labels)
        else:
            self.follow(func, args, kwargs, result, of_features=True)

    def lose(self, *made: Tensor) -> None:
        """Note that numbers have no labels from here on."""
        self._lost |= {key_of(tensor): tensor.untyped_storage() for tensor in made}

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether numbers have no labels."""
        return key_of(tensor) in self._lost

    def note_attention(self, query: Tensor, result: Tensor) -> None:
        """Note that each query looks at what it may, by rules that labels do not follow."""
        if not self.is_lost(query):
            self._lost.pop(key_of(result), None)
            self.note(result, require_one(self.of(query), [query.dim() - 1], keeps=True).expand(result.shape))

    def _is_plain(self, tensor: Tensor) -> bool:
        key, is_whole = key_of(tensor), not (tensor.is_floating_point() or tensor.is_complex())
        return is_whole and (key in self._plain or not (key in self._shadows or key in self._starts))

    def _of_index(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, dtype=LABEL) if self._is_plain(tensor) else self.of(tensor)

    def _lose(self, func: Any, given: Any, results: Sequence[Tensor]) -> None:
        made_of = [identity(self.of(leaf)) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        for number, result in enumerate(results if made_of else ()):
            self.note(result, blended(f"{name_of(func)} {number}", placed(result, ""), *made_of))


def placed(tensor: Tensor, what: str) -> Tensor:
    """Return labels of a tensor's numbers by what it is and their places."""
    places = torch.arange(tensor.numel(), dtype=LABEL, device=tensor.device)
    return mixed(places + start_of(what)).view(tensor.shape)


def _by_values(tensor: Tensor) -> Tensor:
    """Return labels that equal numbers have in common."""
    bits = tensor.detach().double().view(torch.int64) if tensor.is_floating_point() else tensor.long()
    return mixed((bits ^ (bits >> 32)).to(LABEL) + 1)


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

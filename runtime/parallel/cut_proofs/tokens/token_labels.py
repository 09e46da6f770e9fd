"""Labels (value numbering) for cut sequences: tokens are labelled by their positions in the whole sequence.

    whole    a b c d ─▶ [:, :1] * g ─▶ e b c d       labels of a part's tokens must equal those of the whole run;
    part         c d ─▶             ─▶     f d       here they differ: code depends on positions within the part

Integer tensors that code makes are labelled by value, as are `context.positions` and masks made of these: so a choice
of tokens by them has the same labels in part and whole, or is detected.

Also here: marks (owners and labels) through lookups and scatters by token indices, as in mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..marks.operator_rules_for_taint import (
    LABEL,
    Joined,
    Owners,
    blended,
    identity,
    joined,
    mixed,
    name_of,
    require_one,
)
from ..marks.value_numbers_of_elements import Labels, key_of, memory_of, start_of
from ..taint_features_by_rank import line


class TokenLabels(Labels):
    """Propagation of labels through one run, on whole sequences or on a part of their tokens.

    Args:
        block: the module that is run.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block, trusts=False)
        self._plain: set[int] = set()
        """Storages of integer tensors that are labelled by value."""
        self._lost: dict[int, torch.UntypedStorage] = {}
        """Storages without labels: computed from the keys so far, of which later slices have more."""

    def _begin(self, tensor: Tensor, name: str = "") -> None:
        if key_of(tensor) in self._starts or tensor.is_complex():
            super()._begin(tensor, name)
            return
        memory = tensor.detach().as_strided((memory_of(tensor),), (1,), 0)
        labels = _by_values(memory)
        if tensor.is_floating_point():  # the training loop may have made it: one label per position
            labels = mixed(labels + placed(memory, line()))
        else:
            self._plain.add(key_of(tensor))
        self._shadows.add_storage(tensor, labels)

    def hear(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        """Propagate labels through a call, to its results and mutated arguments; `is_owned`: some are of tokens."""
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
            self.set_labels(result, _by_values(result))
        elif name == "nonzero" and is_owned:  # lookups by them go by their values
            self.set_labels(result, torch.zeros_like(result, dtype=LABEL))
        elif name == "nonzero":
            self.set_labels(result, self.labels_of(args[0])[args[0] != 0][:, None])
        elif name == "sort" and args[0].dim() == 1:
            for one in result:
                self.set_labels(one, self.labels_of(args[0])[result[1]])
        elif (labels := looked_up(func, args, kwargs, result, self.labels_of, self._of_index)) is not None:
            self.set_labels(result, labels)
        else:
            self.follow_call(func, args, kwargs, result, of_features=True)

    def lose(self, *made: Tensor) -> None:
        """Mark tensors as having no labels from here on."""
        self._lost |= {key_of(tensor): tensor.untyped_storage() for tensor in made}

    def is_lost(self, tensor: Tensor) -> bool:
        """Whether a tensor has no labels."""
        return key_of(tensor) in self._lost

    def note_attention(self, query: Tensor, result: Tensor) -> None:
        """Label an attention's result by its queries alone: labels do not track which keys they see."""
        if not self.is_lost(query):
            self._lost.pop(key_of(result), None)
            self.set_labels(
                result, require_one(self.labels_of(query), [query.dim() - 1], keeps=True).expand(result.shape)
            )

    def _is_plain(self, tensor: Tensor) -> bool:
        key, is_whole = key_of(tensor), not (tensor.is_floating_point() or tensor.is_complex())
        return is_whole and (key in self._plain or not (key in self._shadows or key in self._starts))

    def _of_index(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, dtype=LABEL) if self._is_plain(tensor) else self.labels_of(tensor)

    def _lose(self, func: Any, given: Any, results: Sequence[Tensor]) -> None:
        made_of = [identity(self.labels_of(leaf)) for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        for number, result in enumerate(results if made_of else ()):
            self.set_labels(result, blended(f"{name_of(func)} {number}", placed(result, ""), *made_of))


def placed(tensor: Tensor, what: str) -> Tensor:
    """Return labels for a tensor's elements by its name and their positions."""
    places = torch.arange(tensor.numel(), dtype=LABEL, device=tensor.device)
    return mixed(places + start_of(what)).view(tensor.shape)


def _by_values(tensor: Tensor) -> Tensor:
    """Return labels by value: equal numbers have equal labels."""
    bits = tensor.detach().double().view(torch.int64) if tensor.is_floating_point() else tensor.long()
    return mixed((bits ^ (bits >> 32)).to(LABEL) + 1)


_SCATTERING = {"index_put", "index_add", "scatter_add", "index_copy", "scatter"}


def looked_up(
    func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any, of: Owners, of_index: Owners
) -> Tensor | None:
    """Return the marks of the result of a lookup or scatter by marked indices; None for other operators."""
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
    """Return the marks of the indices by which each element of a result is looked up."""
    of_places = joined(name, *(_of_chosen(index, of) for index in _indices(name, args)))
    if name == "gather":
        return of_places
    chosen = [dim for dim, index in enumerate(args[1]) if index is not None] if name == "index" else [args[1]]
    is_apart = chosen != list(range(chosen[0], chosen[0] + len(chosen)))
    behind = result.dim() - of_places.dim() - (0 if is_apart else chosen[0] % result.dim())
    return of_places.reshape(*of_places.shape, *[1] * max(behind, 0))


def _scattered(name: str, args: Sequence[Any], of: Owners, of_index: Owners) -> Tensor:
    """Return the marks of a scatter's result: owners are combined at each target, labels are summed and hashed."""
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
    """Return the sums of values, int32, at the target positions of a scatter."""
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

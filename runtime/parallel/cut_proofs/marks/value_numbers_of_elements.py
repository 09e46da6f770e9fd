"""Labels: value numbering (as in compilers) of tensor elements, to detect code that treats features by position.

    whole    a b a b ─▶ gelu ─▶ c d c d ─▶ row        features are labelled by their positions on their rank,
    cut      a b     ─▶ gelu ─▶ c d     ─▶ row        so labels agree between ranks, and between whole and cut
    whole    a b a b ─▶ [..., :1] * g ─▶ e b a b      no pair: only one rank's first feature is changed
    cut      a b     ─▶               ─▶ e b

Two elements have the same label if the same operators computed them from elements of the same labels. So actual values
hide no difference: a factor that is 1 today has a label of its own. A fill by one number has one label everywhere;
results of operators that are not tracked have a different label at each position.

`Shadows` stores one mark per element of a storage in shadow memory: views share the storage, and so the marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...seeded_block_draws import FACTORIES, IN_PLACE_DRAWS
from .operator_rules_for_taint import (
    LABEL,
    MOVING,
    Joined,
    blended,
    is_pointwise,
    mixed,
    name_of,
    owners_of_results,
    require_one,
)

DRAWN = {name.removesuffix("_") for name in FACTORIES | IN_PLACE_DRAWS}
"""Operators that draw each element independently."""
FILLED = {"zeros", "ones", "full", "empty", "empty_strided", "zero", "fill"}
"""Operators that fill a tensor with one number."""


class Labels:
    """Propagation of labels through the operators of one run.

    Args:
        block: the module that is run; its weights and buffers are labelled by their order.
        trusts: unknown operators are taken to treat all features alike.
    """

    def __init__(self, block: nn.Module, *, trusts: bool) -> None:
        self._trusts = trusts
        self._shadows = Shadows(LABEL)
        self._starts = {
            key_of(tensor): number for number, tensor in enumerate((*block.parameters(), *block.buffers()), 1)
        }
        self._last = len(self._starts)
        self.whole_numbers: list[Tensor] = []
        """Integer tensors that no tracked operator made, in order of first use."""

    def labels_of(self, tensor: Tensor) -> Tensor:
        """Return the labels of a tensor's elements, of its shape."""
        if key_of(tensor) not in self._shadows:
            self._begin(tensor)
        labels = self._shadows.marks_of(tensor)
        assert labels is not None
        return labels

    def _begin(self, tensor: Tensor, name: str = "") -> None:
        """Label the storage of a new tensor by positions, from its `name`, or from the next number."""
        start = self._starts.get(key_of(tensor))
        if start is None and not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
            self.whole_numbers.append(tensor.detach().clone())
        places = torch.arange(memory_of(tensor), dtype=LABEL, device=tensor.device)
        self._shadows.add_storage(tensor, mixed(places + start_of(start or name or self._next())))

    def follow_call(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, of_features: bool
    ) -> None:
        """Propagate labels through a call, to its results and mutated arguments; `of_features`: some are features."""
        name = name_of(func)
        base = name.removeprefix("new_").removesuffix("_like")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        beside = given[1:] if func._schema.is_mutable or base != name else given
        if base.startswith("empty") and not result.is_floating_point():
            return  # untracked code may fill it, with sizes
        if base in FILLED:
            word = repr(kwargs.get("fill_value", args[-1])) if base in ("full", "fill") and not beside else base
            label = torch.full((), crc32(word.encode()) >> 2, dtype=LABEL, device=result.device)
            self.set_labels(result, blended(base, label, *map(self.labels_of, beside)))
        elif base in DRAWN:
            self.place(result)
            if beside:
                self.set_labels(result, blended(name, self.labels_of(result), *map(self.labels_of, beside)))
        elif of_features or name in MOVING or is_pointwise(name, func):
            self._blend(func, args, kwargs, result, of_features=of_features)
        else:
            self._renew(given[0] if func._schema.is_mutable else result)

    def _blend(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, of_features: bool
    ) -> None:
        word = repr([leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)])
        is_each = name_of(func) not in MOVING and is_pointwise(name_of(func), func)
        try:
            for tensor, labels in list(owners_of_results(func, args, kwargs, result, self.labels_of)):
                self.set_labels(tensor, blended(word, labels) if is_each else labels)
        except Joined:
            leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if not (of_features and self._trusts):
                self._lose(func, (args, kwargs), leaves)
                return
            for leaf in leaves:
                self.set_labels(leaf, torch.full((), start_of(self._next()), dtype=LABEL, device=leaf.device))

    def set_labels(self, tensor: Tensor, labels: Tensor, beside: str = "") -> None:
        """Set the labels of a tensor's elements; `beside`: a name for labels of the rest of a new storage."""
        if key_of(tensor) not in self._shadows and tensor.numel() < memory_of(tensor):
            self._begin(tensor, beside)
        self._shadows.set_marks(tensor, labels)

    def place(self, result: Any, owners: Tensor | None = None) -> None:
        """Label elements by their positions; features, given their `owners`, by positions on their rank."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                labels = torch.full(leaf.shape, start_of(number := self._next()), dtype=LABEL, device=leaf.device)
                for dim, size in enumerate(leaf.shape):
                    places = torch.arange(size, device=leaf.device)
                    if owners is not None and owners.shape == leaf.shape:
                        places = _places_on_ranks(owners, dim)
                    labels = mixed(labels + mixed(places.to(LABEL)).view([-1] + [1] * (leaf.dim() - dim - 1)))
                # a rank's view of a gathered norm takes one number, as the whole norm does, so that later ones agree
                self.set_labels(leaf, labels, beside=f"beside {number}")

    def _lose(self, func: Any, given: Any, results: Sequence[Tensor]) -> None:
        """Label the results of an unknown operator."""
        self._renew(results)

    def _renew(self, result: Any) -> None:
        """Assign fresh labels to elements."""
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and key_of(leaf) in self._shadows:
                self._shadows.set_marks(leaf, mixed(self.labels_of(leaf) + start_of(self._next())))

    def _next(self) -> int:
        self._last += 1
        return self._last


def start_of(number: object) -> int:
    """Return the base label for a number or name."""
    return crc32(str(number).encode()) >> 2


def are_alike(labels: Tensor, whole: Tensor) -> bool:
    """Whether each rank's contiguous chunk of the `whole` labels, along the last dimension, equals `labels`."""
    if labels.shape[:-1] != whole.shape[:-1] or whole.shape[-1] % labels.shape[-1]:
        return False
    return bool((whole.unflatten(-1, (-1, labels.shape[-1])) == labels.unsqueeze(-2)).all())


def _places_on_ranks(owners: Tensor, dim: int) -> Tensor:
    """Return positions along a dimension, counted separately for each owner."""
    along = owners.movedim(dim, -1).flatten(0, -2)[0] if owners.dim() > 1 else owners
    places = torch.arange(len(along), device=owners.device)
    if bool((along != along[:1]).any()):
        for owner in along.unique().tolist():
            places[along == owner] = torch.arange(int((along == owner).sum()), device=owners.device)
    return places


class Shadows:
    """Shadow memory: marks of one dtype for each storage, which is kept alive meanwhile."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found: dict[int, tuple[torch.UntypedStorage, int, Tensor]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._found

    def marks_of(self, tensor: Tensor) -> Tensor | None:
        """Return the marks of a tensor's elements, of its shape; None: its storage has none."""
        if (found := self._found.get(key_of(tensor))) is None:
            return None
        _, unit, shadow = found
        places = _places(tensor, unit, shadow)
        return require_one(places, [places.dim() - 1], keeps=False) if tensor.is_complex() else places.clone()

    def set_marks(self, tensor: Tensor, marks: Tensor) -> None:
        """Set the marks of a tensor's elements; other elements of a new storage get 0."""
        if key_of(tensor) not in self._found:
            self.add_storage(tensor, torch.zeros(memory_of(tensor), dtype=self._dtype, device=tensor.device))
        _, unit, shadow = self._found[key_of(tensor)]
        places = _places(tensor, unit, shadow)
        marks = (marks[..., None] if tensor.is_complex() else marks).expand_as(places)
        for dim, stride in enumerate(places.stride()):
            if stride == 0 and places.shape[dim] > 1:  # an expanded tensor: these elements are one
                places, marks = places.narrow(dim, 0, 1), marks.narrow(dim, 0, 1)
        places.copy_(marks)

    def add_storage(self, tensor: Tensor, shadow: Tensor) -> None:
        """Set the marks of the whole storage of a tensor."""
        self._found[key_of(tensor)] = tensor.untyped_storage(), _unit(tensor), shadow

    def forget(self, tensor: Tensor) -> None:
        """Remove the marks of a tensor's storage."""
        self._found.pop(key_of(tensor), None)


def key_of(tensor: Tensor) -> int:
    """Return the key of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> int:
    """Return the number of elements of a tensor's storage; a complex element counts as two."""
    return max(tensor.untyped_storage().nbytes() // _unit(tensor), 1)


def _unit(tensor: Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def _places(tensor: Tensor, unit: int, shadow: Tensor) -> Tensor:
    """Return a tensor's view of a shadow: same shape and strides; complex tensors get a last dimension of 2."""
    if _unit(tensor) != unit:
        raise Joined("reads the bytes of features as another type")
    if not tensor.is_complex():
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    strides = (*(2 * stride for stride in tensor.stride()), 1)
    return shadow.as_strided((*tensor.shape, 2), strides, 2 * tensor.storage_offset())

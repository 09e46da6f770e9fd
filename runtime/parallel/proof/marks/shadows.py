"""A mark for each number of memories, in memories of their own: views share a memory, and so the marks."""

from __future__ import annotations

import torch
from torch import Tensor

from .owner_rules import Joined, require_one


class Shadows:
    """Marks of this type, by memories, which are kept as long."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._found: dict[int, tuple[torch.UntypedStorage, int, Tensor]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._found

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the marks of a tensor's numbers, of its shape; None: its memory has none."""
        if (found := self._found.get(key_of(tensor))) is None:
            return None
        _, unit, shadow = found
        places = _places(tensor, unit, shadow)
        return require_one(places, [places.dim() - 1], keeps=False) if tensor.is_complex() else places.clone()

    def note(self, tensor: Tensor, marks: Tensor) -> None:
        """Note the marks of a tensor's numbers; those of others in a new memory are 0."""
        if key_of(tensor) not in self._found:
            self.add(tensor, torch.zeros(memory_of(tensor), dtype=self._dtype, device=tensor.device))
        _, unit, shadow = self._found[key_of(tensor)]
        places = _places(tensor, unit, shadow)
        places.copy_((marks[..., None] if tensor.is_complex() else marks).expand_as(places))

    def add(self, tensor: Tensor, shadow: Tensor) -> None:
        """Take marks for the whole memory of a tensor."""
        self._found[key_of(tensor)] = tensor.untyped_storage(), _unit(tensor), shadow

    def forget(self, tensor: Tensor) -> None:
        """Let a tensor's memory have no marks."""
        self._found.pop(key_of(tensor), None)


def key_of(tensor: Tensor) -> int:
    """Return what a tensor's memory is known by."""
    return int(tensor.untyped_storage()._cdata)


def memory_of(tensor: Tensor) -> int:
    """Return how many numbers a tensor's memory has, two for a complex one."""
    return max(tensor.untyped_storage().nbytes() // _unit(tensor), 1)


def _unit(tensor: Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def _places(tensor: Tensor, unit: int, shadow: Tensor) -> Tensor:
    """Return the places of a tensor's numbers in a shadow; of complex ones two each, in a last dimension."""
    if _unit(tensor) != unit:
        raise Joined("reads the bytes of features as another type")
    if not tensor.is_complex():
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    strides = (*(2 * stride for stride in tensor.stride()), 1)
    return shadow.as_strided((*tensor.shape, 2), strides, 2 * tensor.storage_offset())

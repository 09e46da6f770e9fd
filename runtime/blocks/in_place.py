"""Which tensors that blocks are given change in place, found while shapes are: by the versions that torch counts.

    stage 0    block 0 ──x──┐
    stage 1                 └─▶ block 1: x.relu_()      x is the message here, and a leaf of a graph: it gets a copy

Within a stage a change in place is autograd's affair. At its border, or where blocks are run again, what is changed is
a copy; what shares its memory would have to change with it, and is refused (see `stage.in_place`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from .blocks import Change
from .trees import tensors_of

Key = int | str


class InPlace:
    """What is given to each block of a model that runs on the meta device."""

    def __init__(self) -> None:
        self._arrived: list[dict[Key, tuple[Tensor, int]]] = []
        self._changed: dict[tuple[int, Key], int] = {}
        self._held: dict[int, Tensor] = {}

    def arrive(self, given: object, beside: Mapping[str, object]) -> None:
        """Take note of what the next block is given, and of what goes by its side; of names that are tensors."""
        tensors: dict[Key, Tensor] = dict(enumerate(tensors_of(given)))
        tensors |= {name: extra for name, extra in beside.items() if isinstance(extra, Tensor)}
        self._arrived.append({key: (tensor, tensor._version) for key, tensor in tensors.items()})

    def note(self, block: int) -> None:
        """Take note of what has changed by a block that has run: of all that was ever given."""
        for taker, tensors in enumerate(self._arrived):
            for key, (tensor, version) in tensors.items():
                if tensor._version != version:
                    self._changed.setdefault((taker, key), block)

    def changes(self, block: int) -> tuple[Change, ...]:
        """Return the changes of what a block was given."""
        tensors = {key: tensor for key, (tensor, _) in self._arrived[block].items()}
        return tuple(
            [
                Change(key, self._changed[block, key], _neighbour(key, tensors))
                for key in tensors
                if (block, key) in self._changed
            ]
        )

    def strides(self, block: int) -> dict[Key, tuple[int, ...]]:
        """Return the strides of what a block was given that does not lie in memory in order."""
        return {key: one.stride() for key, (one, _) in self._arrived[block].items() if not one.is_contiguous()}

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Take note of weights and buffers."""
        self._held |= {weight.untyped_storage()._cdata: weight for weight in weights}

    def holds(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of the tensors is a weight or a buffer, or looks into one."""
        return not self._held.keys().isdisjoint([tensor.untyped_storage()._cdata for tensor in tensors])


def _neighbour(key: Key, tensors: Mapping[Key, Tensor]) -> Key | None:
    memory = tensors[key].untyped_storage()._cdata
    return next((k for k, t in tensors.items() if k != key and t.untyped_storage()._cdata == memory), None)

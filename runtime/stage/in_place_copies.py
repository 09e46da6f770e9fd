"""Copies of stage inputs that blocks mutate in place.

An input is a received message, or a tensor that an earlier stage of this rank keeps; and recomputation passes the
same input again. So it is cloned before a block mutates it. A clone is not enough where another tensor has to see the
mutation, as it does in one process: one that shares its memory, or an extra that a later stage takes too. This raises.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..blocks.block_builders import Parcel, accepted_extras


@dataclass(frozen=True)
class Copied:
    """Inputs to clone: tensors of a row, by their places, and extras, by their names."""

    places: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def copies_of(
        self, given: tuple[Tensor, ...], extras: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, ...], Mapping[str, Any]]:
        """Return the inputs and extras, with clones of those that blocks mutate."""
        row = tuple([tensor.clone() if place in self.places else tensor for place, tensor in enumerate(given)])
        if not self.names:
            return row, extras
        return row, {name: extra.clone() if name in self.names else extra for name, extra in extras.items()}


NOTHING_COPIED = Copied()


def copied_in(blocks: range, parcels: Sequence[Parcel], arriving: Parcel, skips: Collection[str]) -> Copied:
    """Return the inputs of the first of some consecutive blocks that the blocks mutate; skips are not mutated."""
    if not blocks:
        return NOTHING_COPIED
    changed = {change.what for change in parcels[blocks.start].changes if change.block in blocks}.difference(skips)
    places = {what if isinstance(what, int) else arriving.place(what) for what in changed if _arrives(what, arriving)}
    names = {what for what in changed if isinstance(what, str) and what not in arriving.names}
    return Copied(frozenset(places), frozenset(names))


def _arrives(what: int | str, arriving: Parcel) -> bool:
    return isinstance(what, int) or what in arriving.names


def require_own_memory(cuts: Sequence[range], parcels: Sequence[Parcel], blocks: Sequence[nn.Module]) -> None:
    """Raise `MisfitError` where an in-place mutation by a stage has to be visible elsewhere."""
    for numbers in dict.fromkeys(cuts):
        for change in parcels[numbers.start].changes if numbers else ():
            if change.block not in numbers:
                continue
            name = f"what it is given at {change.what}" if isinstance(change.what, int) else repr(change.what)
            said = f"block {change.block} ({type(blocks[change.block]).__name__}) changes {name} in place"
            if numbers.start and change.shared_with is not None:
                raise MisfitError(
                    f"{said}, and with it {change.shared_with!r}, which shares its memory, but arrives as a "
                    "tensor of its own from the stage before; pass one of them on, and let each block take the other "
                    "from it, as v = h[:, :4]"
                )
            later = [n for n in range(numbers.stop, len(blocks)) if _takes(blocks[n], change.what)]
            if isinstance(change.what, str) and later and change.what not in parcels[numbers.stop - 1].names:
                raise MisfitError(
                    f"{said}, an extra that block {later[0]} takes as well, on another stage, where it is as it was; "
                    f"pass it on as an output, return y, {change.what}, or, where later blocks are to have it as it "
                    f"was, let the block change a copy: {change.what} = {change.what}.clone()"
                )


def _takes(block: nn.Module, what: int | str) -> bool:
    return isinstance(what, str) and accepted_extras(block)(what)

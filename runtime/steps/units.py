"""What each unit of a step is: which samples it has, and in which shapes they go from stage to stage.

    11 samples in 4 microbatches    samples  [0 1 2] [3 4 5] [6 7 8] [9 10]      shapes  A A A B
     2 samples in 4 microbatches    samples  [0] [1] [] []                       shapes  A A – –

A unit without samples is passed over: nobody computes or sends it. Only where ranks of several replicas meet within a
forward (experts over ep), it is computed, on no rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..blocks.blocks import Parcel
from ..blocks.trees import TreeSpec
from ..parallel.context.context import Context
from ..stage.cargo import Cargo

Made = TypeVar("Made")

MOST_SHAPES = 512
"""So many shapes of units are remembered."""


@dataclass(frozen=True)
class UnitSpec:
    """What a unit is given, as all ranks of its pipeline know it; `extras` are targets too, where blocks take them."""

    mode: str
    inputs: TreeSpec
    extras: tuple[tuple[str, TreeSpec], ...]

    @property
    def num_samples(self) -> int:
        """How many samples it has."""
        return self.inputs.samples.shape[0]

    def twice(self) -> UnitSpec:
        """Return what a unit of twice as many samples is given."""
        count = self.num_samples
        extras = tuple([(name, extra.twice(count)) for name, extra in self.extras])
        return UnitSpec(self.mode, self.inputs.twice(count), extras)


@dataclass(frozen=True, eq=False)
class UnitShape:
    """What units of a shape are like on one rank.

    Attributes:
        spec: what it is given.
        parcels: what every block leaves for the next, whatever a rank holds of it.
        cargo: what travels between stages.
        context: what blocks are given where sequences are cut over cp; None where they are not.
        tokens: the length of a unit's sequences; 0 where there are none.
        structure: how what blocks leave is built, whatever its shapes, in words.
        needs_data: whether all this was found by running a unit with data.
    """

    spec: UnitSpec
    parcels: Sequence[Parcel]
    cargo: Cargo
    context: Context | None
    tokens: int
    structure: str
    needs_data: bool
    _positions: dict[int, Tensor] = field(default_factory=dict)

    def positions(self, number: int, slices: int, device: torch.device) -> Tensor | None:
        """Return the positions of the tokens of slice `number` in the whole sequence; None: they are all of it."""
        if self.context is not None:
            return self.context.positions
        if slices == 1:
            return None
        if number not in self._positions:
            first = number * self.tokens
            self._positions[number] = torch.arange(first, first + self.tokens, device=device)
        return self._positions[number]


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a step on one rank.

    Attributes:
        shapes: by unit; None for one that is passed over.
        samples: by unit: the numbers of its samples in the whole batch, over all replicas.
        empty: the units that are passed over.
        num_samples: how many samples this replica has in all.
        alike: whether all ranks of ep have units of these shapes, where mixtures want to know.
        num_replicas: how many divide the batch.
    """

    shapes: Sequence[UnitShape | None]
    samples: Sequence[range]
    empty: frozenset[int]
    num_samples: int
    alike: bool = True
    num_replicas: int = 1

    def first_spec(self) -> UnitSpec | None:
        """Return what the first unit with samples is given."""
        return next((shape.spec for shape in self.shapes if shape is not None), None)


NO_UNITS = Units((), (), frozenset(), 0)
"""Those of a rank that has not stepped yet."""


def samples_of(sizes: Sequence[int], slices: int, first: int) -> list[range]:
    """Return the numbers of the samples of each unit, where the replica's begin at `first`."""
    found = []
    for size in sizes:
        found += [range(first, first + size)] * slices
        first += size
    return found


class Latest(Generic[Made]):
    """What was made last, by what it was made for: the oldest of more than `most` is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, Made] = OrderedDict()

    def forget(self, key: Hashable) -> None:
        """Forget what was made for a key."""
        del self._made[key]

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what was made for a key, or make it."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        made = self._made[key] = make()
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return made

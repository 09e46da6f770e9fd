"""Units of a step: the samples of each, and the shapes that are sent from stage to stage.

    11 samples in 4 microbatches    samples  [0 1 2] [3 4 5] [6 7 8] [9 10]      shapes  A A A B
     2 samples in 4 microbatches    samples  [0] [1] [] []                       shapes  A A – –

A unit without samples is skipped: it is neither computed nor sent. Only where ranks of several replicas communicate
within a forward (experts over ep), it is computed, on no rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..blocks.block_builders import Parcel
from ..blocks.trees import TreeSpec
from ..parallel.context.context_parallel import Context
from ..stage.tensors_sent_between_stages import Cargo

Result = TypeVar("Result")

MOST_SHAPES = 512
"""Shapes of units that are cached."""


@dataclass(frozen=True)
class UnitSpec:
    """Specs of a unit's inputs, known to all ranks of its pipeline; `extras` has the targets where blocks take them."""

    mode: str
    inputs: TreeSpec
    extras: tuple[tuple[str, TreeSpec], ...]

    @property
    def num_samples(self) -> int:
        """Number of samples of the unit."""
        return self.inputs.samples.shape[0]

    def twice(self) -> UnitSpec:
        """Return the spec of a unit with twice as many samples."""
        count = self.num_samples
        extras = tuple([(name, extra.twice(count)) for name, extra in self.extras])
        return UnitSpec(self.mode, self.inputs.twice(count), extras)


@dataclass(frozen=True, eq=False)
class UnitShape:
    """Shapes of units with one spec, on one rank.

    Attributes:
        spec: the specs of its inputs.
        parcels: the specs of every block's outputs, on this rank or not.
        cargo: the tensors sent between stages.
        context: the argument of blocks where sequences are cut over cp; None where they are not.
        tokens: the length of a unit's sequences; 0 where there are none.
        structure: the structure of the parcels, without shapes, as text.
        needs_data: whether the shapes were found by running a unit with data.
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
        """Return the positions of the tokens of slice `number` in the whole sequence; None: the slice is all of it."""
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
    """Units of a step on one rank.

    Attributes:
        shapes: by unit; None for one that is skipped.
        samples: by unit: the indices of its samples in the whole batch, over all replicas.
        empty: the units that are skipped.
        num_samples: number of samples of this replica.
        alike: whether all ranks of ep have units of these shapes, where mixtures of experts pad.
        of_all: number of samples of all replicas; where that is not counted, it is as if they were even.
    """

    shapes: Sequence[UnitShape | None]
    samples: Sequence[range]
    empty: frozenset[int]
    num_samples: int
    alike: bool = True
    of_all: int = 0

    @cached_property
    def sizes(self) -> frozenset[int]:
        """The numbers of samples that units have."""
        return frozenset(map(len, self.samples))

    def first_spec(self) -> UnitSpec | None:
        """Return the spec of the first unit with samples."""
        return next((shape.spec for shape in self.shapes if shape is not None), None)


NO_UNITS = Units((), (), frozenset(), 0)
"""Units of a rank before its first step."""


def samples_of(sizes: Sequence[int], slices: int, first: int) -> list[range]:
    """Return the sample indices of each unit, where the replica's begin at `first`."""
    found = []
    for size in sizes:
        found += [range(first, first + size)] * slices
        first += size
    return found


@dataclass
class StepCount:
    """Number of training steps: in this run, and including those of the runs that it resumes."""

    in_run: int = 0
    total: int = 0
    """The steps of all runs."""

    def take_back(self) -> None:
        """Uncount the last step."""
        self.in_run, self.total = self.in_run - 1, self.total - 1


class Latest(Generic[Result]):
    """Cache of at most `most` values by key; the least recently used one is evicted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, Result] = OrderedDict()

    def forget(self, key: Hashable) -> None:
        """Remove the value of a key."""
        del self._made[key]

    def get(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return the cached value of a key, or make it."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        made = self._made[key] = make()
        if len(self._made) > self._most:
            self._made.popitem(last=False)
        return made

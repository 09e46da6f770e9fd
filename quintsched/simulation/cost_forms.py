"""What a cost may look like: a number, a list or an object; and the wires between pipeline ranks.

    18.5                                                    a number: a whole rank's worth
    [18.5, 20.1]                                            a list: a value per stage
    {"stages": …, "microbatches": [1, 2], "slices": [1, 3]} an object: either of these, times a factor per
                                                            microbatch, times a factor per slice

    {"latency": 0.1, "bandwidth": 4}                        a message of size s is under way for 0.1 + s / 4
    {…, "nodes": [0, 0, 1, 1], "within": {…}, "across": {…}, "links": [{"source": 1, "destination": 2, …}]}

A wire between two ranks is that of the link that names them, or else `within` a node or `across` nodes, or else the
one given first. A link that is given one way only is the same the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from quintsched.files.strictjson import LIST, NUMBER, OBJECT, pointer
from quintsched.ir.columns import LARGEST, Amounts, Ints

MOST = 1e100
"""The largest cost: sums and products of costs stay finite numbers."""

MOST_TIMES = 1e9
"""How many times as much as another a microbatch, or a slice, may cost."""

Cost = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Bandwidth = Annotated[float, Field(ge=1 / MOST, le=MOST, allow_inf_nan=False, strict=True)]
Factor = Annotated[float, Field(ge=0, le=MOST_TIMES, allow_inf_nan=False, strict=True)]
Number = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]


def form_of(value: object) -> str:
    """Return the form of a value, by which pydantic then judges it; what has none is refused as a number."""
    if isinstance(value, dict | BaseModel):
        return OBJECT
    return LIST if isinstance(value, Iterable) and not isinstance(value, str) else NUMBER


Entry = TypeVar("Entry")
OneOrMany = Annotated[
    Annotated[Entry, Tag(NUMBER)] | Annotated[tuple[Entry, ...], Tag(LIST)],
    Discriminator(form_of),
]

PerStage = OneOrMany[Cost]
"""A whole rank's worth, or a value per stage."""

PerStageShare = OneOrMany[Share]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PerMicrobatch(_Form):
    """A cost that differs from microbatch to microbatch."""

    stages: PerStage
    """What it is where the factors are 1."""
    microbatches: tuple[Factor, ...] | None = None
    """A factor for each microbatch; None: those of the file."""


class PerUnit(PerMicrobatch):
    """A cost that also differs from slice to slice."""

    slices: tuple[Factor, ...] | None = None
    """A factor for each slice; None: those of the file. Of a scalar, 1 is an equal share of the microbatch."""


MicrobatchCost = Annotated[
    Annotated[Cost, Tag(NUMBER)] | Annotated[tuple[Cost, ...], Tag(LIST)] | Annotated[PerMicrobatch, Tag(OBJECT)],
    Discriminator(form_of),
]
UnitCost = Annotated[
    Annotated[Cost, Tag(NUMBER)] | Annotated[tuple[Cost, ...], Tag(LIST)] | Annotated[PerUnit, Tag(OBJECT)],
    Discriminator(form_of),
]


class Wire(_Form):
    """How long a message is under way: the latency, and its size by the bandwidth."""

    latency: Cost = 0.0
    bandwidth: Bandwidth | None = None
    """What passes in one unit of time, in the unit of `message`; None: no limit."""


class Link(Wire):
    """The wire from one pipeline rank to another."""

    source: Number
    destination: Number

    @model_validator(mode="after")
    def _connects_two(self) -> Link:
        if self.source == self.destination:
            raise PydanticCustomError("link", f"a link from pipeline rank {self.source} to itself")
        return self


class Wires(Wire):
    """The wires between all pipeline ranks; `latency` and `bandwidth` are those of the pairs of which no more is said.

    `nodes` says on which node each pipeline rank is.
    """

    nodes: tuple[Number, ...] | None = None
    within: Wire | None = None
    """The wire between ranks of one node."""
    across: Wire | None = None
    """The wire between ranks of different nodes."""
    links: tuple[Link, ...] = ()
    """The wires of single pairs of ranks, instead of all else that is said of these."""

    @model_validator(mode="after")
    def _says_each_thing_once(self) -> Wires:
        if (self.nodes is None) != (self.within is None and self.across is None):
            raise PydanticCustomError("nodes", "give nodes together with within or across, or none of them")
        seen: dict[tuple[int, int], int] = {}
        for number, link in enumerate(self.links):
            pair = (link.source, link.destination)
            first = seen.setdefault(pair, number)
            if first != number:
                raise PydanticCustomError("links", f"links {first} and {number} are both from {pair[0]} to {pair[1]}")
        return self

    def misfits(self, num_ranks: int) -> Iterator[str]:
        """Yield what is said of ranks that there are not, or not of all ranks, each with its place."""
        if self.nodes is not None and len(self.nodes) != num_ranks:
            yield f"/nodes has {len(self.nodes)} values"
        for number, link in enumerate(self.links):
            for end in ("source", "destination"):
                if getattr(link, end) >= num_ranks:
                    yield f"{pointer('links', number, end)} is {getattr(link, end)}"

    def between(self, sources: Ints, destinations: Ints) -> tuple[Amounts, Amounts]:
        """Return the latency and the bandwidth (without a limit: infinite) from each of the sources to its partner."""
        given = {(link.destination, link.source): link for link in self.links}
        given |= {(link.source, link.destination): link for link in self.links}
        wires = [
            given.get(pair) or self._of_nodes(*pair)
            for pair in zip(sources.tolist(), destinations.tolist(), strict=True)
        ]
        bandwidths = [np.inf if wire.bandwidth is None else wire.bandwidth for wire in wires]
        return np.array([wire.latency for wire in wires]), np.array(bandwidths)

    def _of_nodes(self, source: int, destination: int) -> Wire:
        if self.nodes is None:
            return self
        return (self.within if self.nodes[source] == self.nodes[destination] else self.across) or self


WireCost = Annotated[Annotated[Cost, Tag(NUMBER)] | Annotated[Wires, Tag(OBJECT)], Discriminator(form_of)]

"""Forms of a cost in a costs file: a number, a list or an object; and the wires between pipeline ranks.

    18.5                                                    a number: for the layers of a whole rank
    [18.5, 20.1]                                            a list: one value per stage
    {"stages": …, "microbatches": [1, 2], "slices": [1, 3]} an object: either of these, times a factor per
                                                            microbatch, times a factor per slice
    {"stages": …, "cells": [[1, 1.2], [0.9, 1]]}            and times a factor per stage and unit

    {"latency": 0.1, "bandwidth": 4}                        a message of size s takes 0.1 + s / 4
    {…, "nodes": [0, 0, 1, 1], "within": {…}, "across": {…}, "links": [{"source": 1, "destination": 2, …}]}

The wire between two ranks is the link that names them, or else `within` a node or `across` nodes, or else the default
given first. A link that is given in one direction only also holds for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from quintsched.errors import counted
from quintsched.files.strictjson import LIST, NUMBER, OBJECT, pointer
from quintsched.ir.instruction_columns import LARGEST, Amounts, Ints

LARGEST_COST = 1e100
"""Largest cost, so that sums and products of costs stay finite."""

SMALLEST = 1 / LARGEST_COST
"""Smallest cost or factor but 0, so that products of costs keep all of their digits."""

MOST_TIMES = 1e9
"""Largest factor of a microbatch or a slice."""


def _require_digits(value: float) -> float:
    """Raise an error for a value that has lost digits, or of which a product would."""
    if 0 < value < SMALLEST:
        raise PydanticCustomError("smallest", f"Input should be 0, or at least {SMALLEST:g}")
    return value


Cost = Annotated[float, Field(ge=0, le=LARGEST_COST, allow_inf_nan=False, strict=True), AfterValidator(_require_digits)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
Bandwidth = Annotated[float, Field(ge=SMALLEST, le=LARGEST_COST, allow_inf_nan=False, strict=True)]
Factor = Annotated[float, Field(ge=0, le=MOST_TIMES, allow_inf_nan=False, strict=True), AfterValidator(_require_digits)]
PlanNumber = Annotated[int, Field(ge=0, le=LARGEST, strict=True)]


def form_of(value: object) -> str:
    """Return the form of a value, the tag of pydantic's union; other values count as numbers, and are refused."""
    if isinstance(value, dict | BaseModel):
        return OBJECT
    return LIST if isinstance(value, Iterable) and not isinstance(value, str) else NUMBER


CostT = TypeVar("CostT")
OneOrMany = Annotated[
    Annotated[CostT, Tag(NUMBER)] | Annotated[tuple[CostT, ...], Tag(LIST)],
    Discriminator(form_of),
]

PerStage = OneOrMany[Cost]
"""One value for the layers of a whole rank, or one value per stage."""

PerStageShare = OneOrMany[Share]
Pieces = OneOrMany[Annotated[float, Field(ge=1, le=LARGEST, allow_inf_nan=False, strict=True)]]


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PerMicrobatch(_Form):
    """Cost that differs between microbatches."""

    stages: PerStage
    """Cost at factors of 1."""
    microbatches: tuple[Factor, ...] | None = None
    """One factor per microbatch; None: those of the file."""


class PerUnit(PerMicrobatch):
    """Cost that also differs between slices."""

    slices: tuple[Factor, ...] | None = None
    """One factor per slice; None: those of the file. For a scalar cost, 1 is an equal share of the microbatch."""
    cells: tuple[tuple[Factor, ...], ...] | None = None
    """Rows of stages, with one factor per microbatch and slice each, besides the others; None: all 1."""


MicrobatchCost = Annotated[
    Annotated[Cost, Tag(NUMBER)] | Annotated[tuple[Cost, ...], Tag(LIST)] | Annotated[PerMicrobatch, Tag(OBJECT)],
    Discriminator(form_of),
]
UnitCost = Annotated[
    Annotated[Cost, Tag(NUMBER)] | Annotated[tuple[Cost, ...], Tag(LIST)] | Annotated[PerUnit, Tag(OBJECT)],
    Discriminator(form_of),
]


class LatencyAndBandwidth(_Form):
    """Cost of a message on a wire: latency + size / bandwidth."""

    latency: Cost = 0.0
    bandwidth: Bandwidth | None = None
    """Size per unit of time, in the unit of `message`; None: no limit."""


class Link(LatencyAndBandwidth):
    """Wire from one pipeline rank to another."""

    source: PlanNumber
    destination: PlanNumber

    @model_validator(mode="after")
    def _connects_two(self) -> Link:
        if self.source == self.destination:
            raise PydanticCustomError("link", f"a link from pipeline rank {self.source} to itself")
        return self


class Wires(LatencyAndBandwidth):
    """Wires between all pipeline ranks; `latency` and `bandwidth` are the defaults for pairs without their own wire.

    `nodes` gives the node of each pipeline rank.
    """

    nodes: tuple[PlanNumber, ...] | None = None
    within: LatencyAndBandwidth | None = None
    """Wire between ranks of one node."""
    across: LatencyAndBandwidth | None = None
    """Wire between ranks of different nodes."""
    links: tuple[Link, ...] = ()
    """Wires of single pairs of ranks, which take precedence."""

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
        """Yield each entry that names a rank out of range or does not cover all ranks, with its place."""
        if self.nodes is not None and len(self.nodes) != num_ranks:
            yield f"/nodes has {counted(len(self.nodes), 'value')}"
        for number, link in enumerate(self.links):
            for end in ("source", "destination"):
                if getattr(link, end) >= num_ranks:
                    yield f"{pointer('links', number, end)} is {getattr(link, end)}"

    def between(self, sources: Ints, destinations: Ints) -> tuple[Amounts, Amounts]:
        """Return the latency and the bandwidth (infinite if unlimited) from each source to its destination."""
        given = {(link.destination, link.source): link for link in self.links}
        given |= {(link.source, link.destination): link for link in self.links}
        wires = [
            given.get(pair) or self._of_nodes(*pair)
            for pair in zip(sources.tolist(), destinations.tolist(), strict=True)
        ]
        bandwidths = [np.inf if wire.bandwidth is None else wire.bandwidth for wire in wires]
        return np.array([wire.latency for wire in wires]), np.array(bandwidths)

    def _of_nodes(self, source: int, destination: int) -> LatencyAndBandwidth:
        if self.nodes is None:
            return self
        return (self.within if self.nodes[source] == self.nodes[destination] else self.across) or self


WireCost = Annotated[Annotated[Cost, Tag(NUMBER)] | Annotated[Wires, Tag(OBJECT)], Discriminator(form_of)]

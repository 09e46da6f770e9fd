"""Which rows travel to which expert, and where what comes back belongs: with counts of rows, or with room for as many.

    assignments    0 1 2 0 2 0        to experts 0 1 2, of tokens 0 0 1 1 2 2

    counted        0 0 0 │ 1 │ 2 2                     the host reads how many there are, and the ranks swap these
    padded         0 0 │ 1 1 │ 2 2     capacity 2      as many for each: what is too much is dropped, what is lacking
                                                       repeats rows that are there

Shapes alone decide how many rows `padded` sends, so the host need not wait for the routing (Lepikhin et al. 2021,
"GShard"; Fedus et al. 2021, "Switch Transformers"). All ranks must have as many tokens, then. A repeated row is never
looked at again: nothing depends on it, and its gradient is zero. It is one of the rank's own all the same, since a row
of zeros could make an expert divide by its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm import Group
from .router import Routing

Rows = list[list[int]]
"""How many rows, per rank of ep and expert of the rank that they lie on."""


@dataclass(frozen=True)
class Dispatch:
    """Where rows of one rank go.

    Attributes:
        rows: which assignments (of T · k, a token's side by side) travel, by expert.
        sent: how many of them to each rank.
        received: how many come from each rank, for each expert here.
        place: puts what comes back, a row for each of `rows`, where the assignments are: (T · k, D), zeros where an
            assignment was dropped.
    """

    rows: Tensor
    sent: list[int]
    received: Rows
    place: Callable[[Tensor], Tensor]


def counted(routing: Routing, limit: int | None, group: Group) -> Dispatch:
    """Send what there is, of each expert's assignments the first `limit`. The host waits for the routing here."""
    counts = routing.counts if limit is None else routing.counts.clamp(max=limit)
    sent, received = _exchange(counts, group)
    to_others = [sum(rows) for rows in sent]
    order = _order(routing, limit)
    kept = order[: sum(to_others)]

    def place(returned: Tensor) -> Tensor:
        return returned.new_zeros(len(order), *returned.shape[1:]).index_copy(0, kept, returned)

    return Dispatch(kept, to_others, received, place)


def padded(routing: Routing, capacity: int, group: Group) -> Dispatch:
    """Send `capacity` rows to each expert, and get as many from each rank, which has as many tokens."""
    counts, assigned = routing.counts, routing.experts.flatten()
    by_expert, order = assigned.sort(stable=True)
    first = counts.cumsum(0) - counts
    # An expert without assignments is given the first of the next one, or the very last.
    number = torch.arange(capacity, device=order.device) % counts.clamp(min=1).unsqueeze(1)
    rows = order[(first.unsqueeze(1) + number).clamp(max=len(order) - 1).flatten()]
    places = torch.arange(len(order), device=order.device) - first[by_expert]
    places = torch.empty_like(order).scatter_(0, order, places)
    late = (places >= capacity).unsqueeze(1)
    slots = assigned * capacity + places.clamp(max=capacity - 1)

    def place(returned: Tensor) -> Tensor:
        return returned.index_select(0, slots).masked_fill(late, 0)

    here = len(counts) // group.size
    return Dispatch(rows, [here * capacity] * group.size, [[capacity] * here] * group.size, place)


def _order(routing: Routing, limit: int | None) -> Tensor:
    """Return the assignments (of T · k, a token's side by side) by expert, each in order; those beyond `limit` last."""
    experts, order = routing.experts.flatten().sort(stable=True)
    if limit is None:
        return order
    first = routing.counts.cumsum(0) - routing.counts
    is_late = torch.arange(len(order), device=order.device) - first[experts] >= limit
    return order[is_late.to(torch.uint8).sort(stable=True).indices]


def _exchange(counts: Tensor, group: Group) -> tuple[Rows, Rows]:
    """Return the rows that go to each rank's experts, and those that come from each to the experts here.

    `counts` (E,) are those that go.
    """
    arriving = torch.empty_like(counts)
    group.all_to_all(arriving, counts).wait()
    sent, received = torch.stack((counts, arriving)).unflatten(1, (group.size, -1)).tolist()
    return sent, received

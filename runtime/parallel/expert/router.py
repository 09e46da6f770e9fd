"""Which experts a token goes to, and what keeps the experts evenly loaded.

    tokens (T, D) ──▶ logits (T, E) ──softmax──▶ probabilities ──top-k──▶ experts (T, k), weights (T, k)

                                 balance   E/(T·k) · Σ over experts of assignments · probability
    losses, summed over tokens
                                 z         Σ over tokens of logsumexp(logits)²

The balancing loss is T times the usual mean: least, and then 1 per token, where every expert has as many assignments
as any other. Where ranks hold slices of a sequence, the assignments are those of all of them and the probabilities
those of the tokens here: the sum over the ranks is the loss of the whole, and so is that of the gradients, since none
flows through the assignments.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks" (top-k gating); Fedus et al. 2021, "Switch
Transformers", equation 4 (balance; here with k assignments per token); Zoph et al. 2022, "ST-MoE", equation 5 (z).

Which rows travel to which expert, and where what comes back belongs: with counts of rows, or with room for as many.

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


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
        logits: (T, E), in float32 at least, as are the next two.
        probabilities: (T, E).
        weights: (T, k), what each of a token's experts counts.
        experts: (T, k), int64.
        counts: (E,), int64: how often each expert was chosen.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    counts: Tensor


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """Choose the `top_k` likeliest experts of each token by its `logits` (T, E).

    An expert's weight is its probability among all experts; with `renormalise`, among those that were chosen.
    """
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(top_k)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    # Not bincount, which has a GPU's host wait for the greatest.
    counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
    return Routing(logits, probabilities, weights, experts, counts)


def balance_loss(routing: Routing, group: Group) -> Tensor:
    """Return this rank's summand of the balancing loss, 0-dimensional; `group` holds slices of the same sequences.

    Of no tokens it is 0.
    """
    counts = routing.counts
    if group.size > 1:
        counts = counts.clone()
        group.all_reduce(counts).wait()
    assignments = routing.experts.numel() * group.size
    chosen = routing.probabilities.sum(0) @ counts.to(routing.probabilities.dtype)
    return chosen * (len(counts) / max(assignments, 1))


def z_loss(routing: Routing) -> Tensor:
    """Return the squared logarithms of the softmaxes' denominators, summed over tokens: 0-dimensional."""
    return routing.logits.logsumexp(-1).square().sum()


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

"""Router of a mixture of experts: top-k choice of experts, auxiliary losses, and dispatch of rows to ranks.

    tokens (T, D) ──▶ logits (T, E) ──softmax──▶ probabilities ──top-k──▶ experts (T, k), weights (T, k)

                                 balance   E/(T·k) · Σ over experts of assignments · probability
    losses, summed over tokens
                                 z         Σ over tokens of logsumexp(logits)²

The balancing loss is T times the usual mean. Its minimum is 1 per token, where all experts have equally many
assignments. If ranks hold slices of a sequence, assignments are counted over all of them, and probabilities are those
of the local tokens: so losses and gradients of the ranks sum to those of the whole, as no gradient flows through the
assignments.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks" (top-k gating); Fedus et al. 2021, "Switch
Transformers", equation 4 (balance; here with k assignments per token); Zoph et al. 2022, "ST-MoE", equation 5 (z).

Dispatch: the rows that are sent to each expert, and their places after the return; with row counts, or padded.

    assignments    0 1 2 0 2 0        to experts 0 1 2, of tokens 0 0 1 1 2 2

    counted        0 0 0 │ 1 │ 2 2                     the host reads row counts, and the ranks exchange them
    padded         0 0 │ 1 1 │ 2 2     capacity 2      equally many for each: surplus rows are dropped, missing rows are
                                                       filled by repeats

The number of rows that `padded` sends depends on shapes only, so the host need not wait for the routing (Lepikhin et
al. 2021, "GShard"; Fedus et al. 2021, "Switch Transformers"). All ranks must then have equally many tokens. The result
of a repeated row is not used, and its gradient is zero. It is a real row, not zeros, since an expert that normalises by
a row's length would divide by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm import Group


@dataclass(frozen=True)
class Routing:
    """Assignment of tokens to experts.

    Attributes:
        logits: (T, E), in float32 at least, as are the next two.
        probabilities: (T, E).
        weights: (T, k), the weights of a token's experts.
        experts: (T, k), int64.
        counts: (E,), int64: number of assignments of each expert.
    """

    logits: Tensor
    probabilities: Tensor
    weights: Tensor
    experts: Tensor
    counts: Tensor


def route(logits: Tensor, top_k: int, *, renormalise: bool) -> Routing:
    """Choose the `top_k` most probable experts of each token by its `logits` (T, E).

    An expert's weight is its probability among all experts; with `renormalise`, among the chosen ones.
    """
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(top_k)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    # Not bincount, which synchronises the host with the GPU to read the maximum.
    counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
    return Routing(logits, probabilities, weights, experts, counts)


def balance_loss(routing: Routing, group: Group) -> Tensor:
    """Return this rank's summand of the balancing loss, 0-dimensional; `group` holds slices of the same sequences.

    Without tokens it is 0.
    """
    counts = routing.counts
    if group.size > 1:
        counts = counts.clone()
        group.all_reduce(counts).wait()
    assignments = routing.experts.numel() * group.size
    chosen = routing.probabilities.sum(0) @ counts.to(routing.probabilities.dtype)
    return chosen * (len(counts) / max(assignments, 1))


def z_loss(routing: Routing) -> Tensor:
    """Return the router's z-loss: squared logsumexp of the logits, summed over tokens, 0-dimensional."""
    return routing.logits.logsumexp(-1).square().sum()


RowCounts = list[list[int]]
"""Row counts by rank of ep, then by expert on the receiving rank."""


@dataclass(frozen=True)
class Dispatch:
    """Dispatch of one rank's rows over ep.

    Attributes:
        rows: indices of the assignments that are sent (of T · k, a token's are adjacent), ordered by expert.
        sent: number of rows to each rank.
        received: number of rows from each rank, for each local expert.
        place: maps returned rows, one for each of `rows`, to the order of assignments: (T · k, D), zeros where an
            assignment was dropped.
    """

    rows: Tensor
    sent: list[int]
    received: RowCounts
    place: Callable[[Tensor], Tensor]


def counted(routing: Routing, limit: int | None, group: Group) -> Dispatch:
    """Dispatch each expert's first `limit` assignments, and exchange row counts; synchronises host and device."""
    counts = routing.counts if limit is None else routing.counts.clamp(max=limit)
    sent, received = _exchange(counts, group)
    to_others = [sum(rows) for rows in sent]
    order = _order(routing, limit)
    kept = order[: sum(to_others)]

    def place(returned: Tensor) -> Tensor:
        return returned.new_zeros(len(order), *returned.shape[1:]).index_copy(0, kept, returned)

    return Dispatch(kept, to_others, received, place)


def padded(routing: Routing, capacity: int, group: Group) -> Dispatch:
    """Dispatch exactly `capacity` rows to each expert; all ranks must have equally many tokens."""
    counts, assigned = routing.counts, routing.experts.flatten()
    by_expert, order = assigned.sort(stable=True)
    first = counts.cumsum(0) - counts
    # An expert without assignments repeats the next expert's first row, or the last row of all.
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
    """Return indices of assignments (of T · k, a token's are adjacent) sorted by expert; those beyond `limit` last."""
    experts, order = routing.experts.flatten().sort(stable=True)
    if limit is None:
        return order
    first = routing.counts.cumsum(0) - routing.counts
    is_late = torch.arange(len(order), device=order.device) - first[experts] >= limit
    return order[is_late.to(torch.uint8).sort(stable=True).indices]


def _exchange(counts: Tensor, group: Group) -> tuple[RowCounts, RowCounts]:
    """Return row counts sent to each rank's experts, and received from each rank by the local experts (collective).

    `counts` (E,) are the rows sent to each expert.
    """
    arriving = torch.empty_like(counts)
    group.all_to_all(arriving, counts).wait()
    sent, received = torch.stack((counts, arriving)).unflatten(1, (group.size, -1)).tolist()
    return sent, received

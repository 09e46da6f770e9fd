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
"""

from __future__ import annotations

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

"""Losses that are sums of means with different denominators: over masked tokens, and over pairs of sentences.

    microbatch 0    3 masked tokens of 7    2 pairs of 4      sum / 7 + sum / 4  ─┐
    microbatch 1    4 masked tokens of 7    2 pairs of 4      sum / 7 + sum / 4  ─┴▶ added up: the loss of the batch

No single weight per microbatch yields the loss of the batch. So before a step the engine sums each mean's denominator
over all microbatches and replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import UsageError

Term = tuple[Callable[[Any, Any], Tensor], Callable[[Any], Tensor | float]]
"""(output, targets) → a sum, and targets → its denominator: the number of items summed over."""


class SumOfMeans:
    """A loss function that is a sum of means.

    loss_fn = SumOfMeans((masked_loss_sum, num_masked), (pair_loss_sum, num_pairs))

    Args:
        terms: each mean, as two functions: (output, targets) → its sum, and targets → its denominator. A factor of a
            mean belongs in its sum.

    Raises:
        UsageError: a term that is no pair of functions.
    """

    def __init__(self, *terms: Term) -> None:
        for term in terms or (None,):
            if not isinstance(term, tuple) or len(term) != 2 or not all(map(callable, term)):
                raise UsageError(
                    "SumOfMeans takes pairs of functions: (output, targets) → a sum, and targets → how many things it "
                    "is over, such as SumOfMeans((loss_sum, lambda targets: (targets != -100).sum()))"
                )
        self.terms = terms

    def __call__(self, output: Any, targets: Any) -> Tensor:
        """Return the loss of a whole batch, 0-dimensional."""
        return self.over(output, targets, self.weights(targets))

    def weights(self, targets: Any) -> Tensor:
        """Return the denominator of each mean, (terms,), float64, on the CPU or the targets' device."""
        found = [torch.as_tensor(count(targets)).double() for _, count in self.terms]
        return torch.stack([weight.to(found[0].device) for weight in found])

    def over(self, output: Any, targets: Any, weights: Tensor) -> Tensor:
        """Return a microbatch's share of the batch's loss, given the denominators of the whole batch, (terms,)."""
        sums = [add(output, targets) for add, _ in self.terms]
        whole = torch.where(weights == 0, 1, weights)
        parts = [total / whole[number].to(total.device, total.dtype) for number, total in enumerate(sums)]
        return torch.stack(parts).sum()


def term_of(
    add: Callable[[Any, Any], Tensor], count: Callable[[Any], Tensor | float], output: Any, targets: Any
) -> tuple[Tensor, Tensor | float]:
    """Return the sum of a term, and the number of things it is over."""
    return add(output, targets), count(targets)

"""Metrics with a weight per microbatch: sums, (sum, weight), or means, which are examined as losses are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from .loss_reductions import Over, named
from .watched_loss import Examined
from .weighted_losses import WeighedLoss, note_misuse

OF_LOSS = -1
"""Weight of a microbatch's metric that the loss's weight divides."""


class WeighedMetric:
    """A user metric.

    Args:
        name: its name.
        metric: (output, targets) → a number, or (sum, weight).
        loss: sums are divided by its weight, or by samples where it has no weight of its own.

    Attributes:
        function: the user function.
        examined: findings about it.
        watched: the context that the user's function runs in, if any.
        misuses: why this rank refuses its result, see `WeighedLoss`.
    """

    def __init__(self, name: str, metric: Callable[..., Any], loss: WeighedLoss) -> None:
        self._name, self.function, self._loss = name, metric, loss
        self.examined = Examined(metric, f"metric {name!r}", is_loss=False, is_cut=loss.is_cut)
        self.watched: AbstractContextManager[Any] | None = None
        self.misuses: list[str] | None = None

    @property
    def refusal(self) -> str:
        """Reason why it is none of these, in words; "": it is one."""
        why = self.examined.refusal
        return why and f"metric {self._name!r} is not that of the batch: {why}; let it return (sum, weight)"

    def defer(self, error: MisfitError, output: Any) -> tuple[Any, Any]:
        """Record why a microbatch's metric is refused, and return zeros; raise at once without `misuses`."""
        note_misuse(error, self.misuses)
        return 0.0, 0

    def __call__(self, output: Any, targets: Any, samples: int = 1) -> tuple[Any, Any]:
        """Return the sum and the weight of a microbatch; a weight of `OF_LOSS` stands for that of its loss."""
        rule = self.examined.rule
        if rule is None:
            self.examined.before_call(output)
        with self.watched or nullcontext():
            found = self.function(output, targets)
        if rule is None:
            rule = self.examined.find(found, output, targets, samples)
        assert rule is not None
        if isinstance(found, tuple) and len(found) == 2:
            return found
        if rule.over is Over.SUM:
            return found, samples if self._loss.is_bare else OF_LOSS
        weight = samples if rule.over is Over.SAMPLES else rule.of_targets(named(targets), self.examined.tables)
        wide = found.double() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
        return torch.where(torch.as_tensor(weight, device=wide.device) == 0, 0.0, wide * weight), weight

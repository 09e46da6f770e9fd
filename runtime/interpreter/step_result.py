"""What a step gives on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .tally import Figures


@dataclass(frozen=True)
class StepResult:
    """What a step gives on every rank. Reading a figure waits until it is reduced over the ranks.

    `grad_norm` is the global 2-norm of the batch's gradient before clipping (None after an evaluation); `skipped`
    says that it was not finite, so that no rank stepped its optimizer.
    """

    _figures: Figures
    _metrics: Sequence[str]
    grad_norm: Tensor | None = None
    skipped: bool = False

    @property
    def weight(self) -> Tensor:
        """The batch's total loss weight: samples or tokens; 0-dimensional."""
        return self._figures.sums()[1]

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: summed losses over total weight; 0-dimensional, float64."""
        sums = self._figures.sums()
        return sums[0] / sums[1]

    @property
    def sums(self) -> dict[str, Tensor]:
        """What to add up over batches: "loss", "weight" and each metric, as sums."""
        return dict(zip(("loss", "weight", *self._metrics), self._figures.sums(), strict=True))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Each metric over the whole batch: its sum over total weight."""
        _, weight, *metrics = self._figures.sums()
        return {name: metric / weight for name, metric in zip(self._metrics, metrics, strict=True)}

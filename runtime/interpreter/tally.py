"""Loss, loss weight and metrics of a step: collected per microbatch, added up once, summed over the ranks.

Fwd, Fwd, …      losses [·, ·, …]   weights [·, ·, …]   one list per metric
ShareMetrics     (loss, weight, metrics …)  ── all-reduce ──▶  the same on every rank, waited for when it is read
StepResult       what of them a step gives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm import DoneWork, Group, Work


class Tally:
    """The figures of one rank's step.

    Attributes:
        losses, weights: what each microbatch brought so far, tensors or numbers.
        metrics: one such list per metric.
        sums: float64: loss, loss weight, then one per metric, reduced over the ranks; before that not-a-number.
        work: what is to be waited for before `sums` are read.
    """

    def __init__(self, num_metrics: int, device: torch.device) -> None:
        self._device = device
        self._columns: list[list[Tensor | float]] = [[] for _ in range(2 + num_metrics)]
        self.losses, self.weights, *self.metrics = self._columns
        self._nothing = torch.full((len(self._columns),), torch.nan, dtype=torch.float64, device=device)
        self.begin()

    def begin(self) -> None:
        """Start a step, whose sums nobody knows yet."""
        self.sums: Tensor = self._nothing
        self.work: Work = DoneWork()

    def reduce(self, group: Group) -> None:
        """Add up what was collected, and begin to sum it over the ranks of a group; collect anew."""
        self.sums = self._add_up()
        self.work = group.all_reduce(self.sums)

    def weight(self, wait: Callable[[Sequence[Work]], None]) -> Tensor:
        """Return the batch's total loss weight, 0-dimensional, waiting until it is known."""
        wait([self.work])
        return self.sums[1]

    def _add_up(self) -> Tensor:
        if not any(self._columns):
            return torch.zeros(len(self._columns), dtype=torch.float64, device=self._device)
        sums = [_total(column) for column in self._columns]
        for column in self._columns:
            column.clear()
        return torch.stack([self._as_tensor(total) for total in sums])

    def _as_tensor(self, total: Tensor | float) -> Tensor:
        """Return a sum where the others are; a number is written there, not copied, which would wait for a GPU."""
        if isinstance(total, Tensor):
            return total.to(self._device, torch.float64)
        return torch.full((), float(total), dtype=torch.float64, device=self._device)


@dataclass(frozen=True)
class StepResult:
    """What a step gives on every rank. Reading a figure waits until it is reduced over the ranks.

    `grad_norm` is the global 2-norm of the batch's gradient before clipping (None after an evaluation); `skipped`
    says that it was not finite, so that no rank stepped its optimizer.
    """

    _sums: Tensor
    _work: Work
    _metrics: Sequence[str]
    grad_norm: Tensor | None = None
    skipped: bool = False

    @property
    def weight(self) -> Tensor:
        """The batch's total loss weight: samples or tokens; 0-dimensional."""
        self._work.wait()
        return self._sums[1]

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: summed losses over total weight; 0-dimensional, float64."""
        self._work.wait()
        return self._sums[0] / self._sums[1]

    @property
    def sums(self) -> dict[str, Tensor]:
        """What to add up over batches: "loss", "weight" and each metric, as sums."""
        self._work.wait()
        return dict(zip(("loss", "weight", *self._metrics), self._sums, strict=True))

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Each metric over the whole batch: its sum over total weight."""
        weight = self.weight
        return {name: self._sums[number] / weight for number, name in enumerate(self._metrics, start=2)}


def _total(column: Iterable[Tensor | float]) -> Tensor | float:
    """Add up numbers on the host and tensors where they are, in double precision."""
    tensors = [x for x in column if isinstance(x, Tensor)]
    numbers = sum(x for x in column if not isinstance(x, Tensor))
    if not tensors:
        return numbers
    if len({t.dtype for t in tensors}) > 1:
        tensors = [t.to(torch.float64) for t in tensors]
    return torch.stack(tensors).sum(dtype=torch.float64) + numbers

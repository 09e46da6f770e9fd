"""Loss, loss weight and metrics of a step: collected per microbatch, summed over ranks, then added up.

    Fwd, Fwd, …      losses [· · …]   weights [· · …]   two rows per metric  auxiliary [· · … for every piece]
    ShareMetrics     all of it  ── all-reduce ──▶  the same on every rank; waited for when it is read, then added up
                     or piggybacked on the last gradient all-reduce (`losses_in_gradient_buckets`), and read from there
    StepResult       the results of a step: loss, weight, metrics, gradient norm

Every figure of a replica has a place of its own, where the replica's other pipeline ranks have 0. So places are added
in one order, that of model pieces and microbatches: the sums are bitwise the same for every schedule and layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import mul
from struct import unpack
from typing import Any, cast

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ...comm import DoneWork, Group, Work
from ...comm.device import is_at_hand, numbers_of
from ...losses.weighted_losses import Counted
from ...weights_and_gradients.losses_in_gradient_buckets import ROOM, Room

_CODES: dict[torch.dtype | None, str] = {torch.float32: "f", torch.float64: "d"}
DOUBT = 1 << 20
"""Added to the count of stop requests by a rank that doubts its loss: larger than any number of ranks."""

NUM_SUMS, NUM_ASKED, NUM_LOSSES = -3, -2, -1
"""Indices of the three counts at the end of a table: see `StepFigures`."""

DONE = DoneWork()

Column = list[tuple[int, Tensor | float]]
"""Numbers of one row of the table, each with its place in the row."""


class FiguresMemory:
    """The table of a step's figures: rows of `shape` (figures, units), then the rest.

    `numbers` are the same memory as a Python buffer, which is read and written without torch operations; None where
    `tensor` is on a device.
    """

    __slots__ = ("numbers", "shape", "tensor")

    def __init__(self, tensor: Tensor, shape: tuple[int, int]) -> None:
        self.tensor, self.shape = tensor, shape
        self.numbers = numbers_of(tensor) if is_at_hand(tensor.device) else None


class StepFigures:
    """Totals of a step, read from one table, float64: rows (figures, units), auxiliary losses, then three counts.

    The counts: losses that are sums, which nothing divides; ranks that were asked to stop, plus `DOUBT` for each rank
    that doubts its loss; losses that were computed.

    Attributes:
        totals: sums of the rows, where they are Python numbers and no loss is a sum; else empty. Set by `read_sums`.
        rest: auxiliary losses and the three counts: a list, or a tensor on the device; set by `read_sums`.
    """

    __slots__ = ("_sums", "is_read", "rest", "table", "totals", "work")

    rest: list[float] | Tensor

    def __init__(self, table: FiguresMemory, work: Work = DONE) -> None:
        self.table, self.work, self.is_read = table, work, False
        self._sums: Tensor | list[float] = []
        self.totals: list[float] = []

    def read_sums(self) -> StepFigures:
        """Wait for the reduction, and add the rows up, once; return self."""
        if not self.is_read:
            (count, units), numbers = self.table.shape, self.table.numbers
            if self.work is not DONE:
                self.work.wait()
            self.is_read = True
            if numbers is None:
                rows, self.rest = self.table.tensor.tensor_split([count * units])
                self._sums = rows.view(count, units).sum(1)
                self._sums[0].add_(self.rest[:-3].sum())
                return self
            found = unpack(f"{len(numbers)}d", numbers)  # in a third of the time of `tolist`
            self.rest = rest = [*found[count * units :]]
            self._sums = sums = [sum(found[row * units : (row + 1) * units]) for row in range(count)]
            if any(rest[:-3]):
                sums[0] += sum(rest[:-3])
            self.totals = [] if rest[NUM_SUMS] else sums
        return self

    @property
    def sums(self) -> Tensor:
        """Loss, weight, sums of metrics and their weights: (figures,), not to be modified."""
        if isinstance(self.read_sums()._sums, list):
            self._sums = torch.tensor(self._sums, dtype=torch.float64)
        return cast("Tensor", self._sums)


def added(first: StepFigures, others: Sequence[StepFigures] = ()) -> Tensor | Sequence[Tensor]:
    """Return the sums over the batches of one accumulated step; where losses are sums, the loss weight is 1."""
    num_summed: Any = first.read_sums().rest[NUM_SUMS]
    if not others and not isinstance(num_summed, Tensor) and not num_summed:
        return first.sums
    total = [sum(more, start=mine) for mine, *more in zip(first.sums, *[f.sums for f in others], strict=True)]
    total[1] = total[1] + (sum((figures.rest[NUM_SUMS] for figures in others), start=num_summed) > 0)
    return total


class Tally:
    """The figures of one rank's step, from the units' losses to their sums over ranks.

    Args:
        num_metrics: number of metrics.
        num_units: number of units of a step.
        num_pieces: number of pieces of the model, each of which may have auxiliary losses.
        device: where figures are reduced.
        room: the space for figures behind the last gradients; None: there is none.
        wants_stop: whether this rank was asked to stop after the step.
        is_doubted: whether this rank doubts its finding about the loss.
        clips: whether the program has a `ClipGrad`, which reads the figures in the step: steps may share the table.

    Attributes:
        losses, weights: (unit, tensor or number) for each unit whose loss has been computed in this step.
        metrics, metric_weights: one such list for each metric, and one for its weights; a negative weight means that
            the metric is weighted as the loss is.
        auxiliary: losses of blocks, by `piece of the model x num_units + unit`.
        piggybacked: collects the figures for the last gradient all-reduce; None: they are always reduced by themselves.
        figures: those of the step; NaN before they are reduced.
    """

    def __init__(
        self,
        num_metrics: int,
        num_units: int,
        num_pieces: int,
        device: torch.device,
        *,
        room: Room | None,
        wants_stop: Callable[[], bool],
        is_doubted: Callable[[], bool | Tensor],
        clips: bool,
    ) -> None:
        self._clips = clips
        self._device, self._num_rows, self.num_units = device, 2 + 2 * num_metrics, num_units
        self._size = (self._num_rows + num_pieces) * num_units + 3
        self._wants_stop, self._is_doubted = wants_stop, is_doubted
        self._num_summed = 0
        self._times: list[float] = []
        self._shape, self._zeros = (self._num_rows, num_units), array("d", bytes(8 * self._size))
        self._in_order = (*range(num_units),)
        self._columns: list[Column] = [[] for _ in range(self._num_rows + 1)]
        self.losses, self.weights, *metrics, self.auxiliary = self._columns
        self.metrics, self.metric_weights = metrics[:num_metrics], metrics[num_metrics:]
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._room = room if self._size <= ROOM else None
        self.piggybacked = (lambda: self._collect().tensor) if self._room is not None else None
        self._kept: FiguresMemory | None = None
        self._unknown = StepFigures(self._table(torch.nan))
        self.begin_step()

    def begin_step(self, *, alone: bool = False) -> None:
        """Start a step, with unknown figures; `alone`: no gradients are reduced that they could be piggybacked on."""
        self._is_piggybacked, self._keeps = self._room is not None and not alone, self._clips and not alone
        self.figures = self._unknown

    def add_loss(self, unit: int, found: Counted) -> tuple[Tensor, float]:
        """Collect the result of a loss function for a unit; return its loss, and the factor that it counts by."""
        loss, weight, times, is_sum = found
        self._num_summed += is_sum
        self.losses.append((unit, loss.detach()))
        self._times.append(times)
        self.weights.append((unit, weight))
        return loss, times

    def reduce(self, group: Group) -> None:
        """Start an all-reduce of the collected figures, unless they are piggybacked on gradients."""
        if not self._is_piggybacked:
            table = self._collect()
            self.figures = StepFigures(table, group.all_reduce(table.tensor))

    def set_figures(self, tensor: Tensor) -> None:
        """Set the figures of this step from a whole table: one flat tensor, float64, that no other step uses."""
        self.figures = StepFigures(FiguresMemory(tensor, self._shape))

    def _table(self, number: float) -> FiguresMemory:
        return FiguresMemory(torch.full((self._size,), number, dtype=torch.float64, device=self._device), self._shape)

    def note_stop(self) -> None:
        """Poll `wants_stop` where that was postponed, and write it into the figures."""
        if self._wants_stop():
            self.figures.table.tensor[NUM_ASKED].fill_(1)
            self.figures = StepFigures(self.figures.table)

    @contextmanager
    def polls_disabled(self) -> Iterator[None]:
        """Return a context in which neither stop requests nor doubts are polled."""
        polls = self._wants_stop, self._is_doubted
        self._wants_stop = self._is_doubted = lambda: False
        try:
            yield
        finally:
            self._wants_stop, self._is_doubted = polls

    def _collect(self) -> FiguresMemory:
        """Return the collected figures as a table; clear them."""
        here, kept = is_at_hand(self._device), self._kept
        if here and self._keeps and kept is not None and kept.numbers is not None:
            table, kept.numbers[:] = kept, self._zeros
        else:
            table = self._table(0.0)
            self._kept = table if here and self._keeps else kept
        numbers = table.numbers
        if (num_computed := len(self._times)) and {*self._times} != {1}:
            self.losses[:] = _counted(self.losses, self._times, here=here)
        self._times.clear()
        for row, column in enumerate(self._columns):
            if column:
                begin, (places, found) = row * self.num_units, zip(*column, strict=True)
                if numbers is None:
                    _fill(table.tensor[begin:], column, self._places_of)
                elif places == self._in_order:
                    numbers[begin : begin + len(column)] = array("d", found)
                else:
                    for place, x in column:
                        numbers[begin + place] = float(x)
                column.clear()
        doubt = self._is_doubted()
        asked = self._wants_stop() + (0 if isinstance(doubt, Tensor) else DOUBT * doubt)
        num_summed, self._num_summed = self._num_summed, 0
        if numbers is not None:
            numbers[NUM_SUMS], numbers[NUM_ASKED], numbers[NUM_LOSSES] = num_summed, asked, num_computed
        else:
            for place, number in zip((NUM_SUMS, NUM_ASKED, NUM_LOSSES), (num_summed, asked, num_computed), strict=True):
                table.tensor[place].fill_(number)  # an assignment would copy from the host
        if isinstance(doubt, Tensor):
            table.tensor[NUM_ASKED].add_(doubt * DOUBT)
        return table

    def weight(self, wait: Callable[[Sequence[Work]], None], earlier: Sequence[StepFigures] = ()) -> Tensor | float:
        """Return the total loss weight of this batch and earlier ones; waits until it is known.

        It is a Python number where the table is in host memory, else 0-dimensional. Figures that were piggybacked on
        gradients are read from the gradients' buffer.
        """
        if self._room is not None and self._is_piggybacked:
            self.set_figures(self._room.read_figures(self._size))
        figures = self.figures
        if figures.work is not DONE:
            wait([figures.work])
            figures.work = DONE
        if figures.read_sums().totals and not earlier:
            return figures.totals[1]
        weight = added(figures, earlier)[1]
        return float(weight) if isinstance(figures.rest, list) else weight

    def _places_of(self, places: tuple[int, ...]) -> Tensor:
        """Return places as an index tensor on the device, filled there without a host copy, and cached."""
        if places not in self._places:
            self._places[places] = torch.stack([torch.full((), place, device=self._device) for place in places])
        return self._places[places]


_FLAGS = ("skipped", "empty", "stop_asked")


@dataclass(eq=False, slots=True)
class StepResult:
    """Results of a step, on every rank. Reading a figure waits until it is reduced over the ranks.

    `skipped`: the gradient was not finite, so that no rank stepped its optimizer; `empty`: no replica had samples.
    `outputs` are those of an evaluation with `outputs=True`, on ranks of the last stage. `stop_asked`: some rank was
    asked to stop after this step. Its `repr` reads the figures, on this rank alone.
    """

    _figures: StepFigures
    _metrics: Collection[str]
    _norm: Callable[[], Tensor] | None = None
    skipped: bool = False
    empty: bool = False
    outputs: Any = None
    stop_asked: bool = False
    _if_doubted: str = ""
    _refusal: str = ""
    _samples_per_weight: int = 1  # 1 where the weight counts something else than samples
    _earlier: tuple[StepFigures, ...] = ()

    def __repr__(self) -> str:
        try:
            figures = {"loss": self.loss, "weight": self.weight, "grad_norm": self.grad_norm, **self.metrics}
        except MisfitError as error:
            return f"StepResult({error})"
        words = [f"{name}={float(figure):.6g}" for name, figure in figures.items() if figure is not None]
        return f"StepResult({', '.join([*words, *(n for n in _FLAGS if getattr(self, n))])})"

    def with_earlier(self, results: Sequence[StepResult]) -> StepResult:
        """Return the result of a step with gradient accumulation, over all its batches."""
        return replace(self, _earlier=tuple(result._figures for result in results))

    def _read(self) -> StepFigures:
        """Return the figures; raises `MisfitError` for an evaluation whose loss is refused, or doubted by a rank."""
        if self._refusal:
            raise MisfitError(self._refusal)
        if self._if_doubted and self._figures.read_sums().rest[NUM_ASKED] >= DOUBT:
            raise MisfitError(self._if_doubted)
        return self._figures.read_sums()

    def _sums(self) -> Tensor | Sequence[Tensor]:
        """Return all sums."""
        return added(self._read(), self._earlier)

    @property
    def grad_norm(self) -> Tensor | None:
        """The global 2-norm of the batch's gradient before clipping; None after an evaluation."""
        return self._norm and self._norm()

    @property
    def weight(self) -> Tensor:
        """The batch's total loss weight: samples, tokens or targets; 1 if losses are sums; 0-dimensional, float64."""
        return self._sums()[1] * self._samples_per_weight

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: summed losses over total weight; 0-dimensional, float64."""
        if (totals := self._read().totals) and totals[1] and not self._earlier:
            return torch.scalar_tensor(totals[0] / totals[1], dtype=torch.float64)
        sums = self._sums()
        return sums[0] / sums[1]

    @property
    def sums(self) -> dict[str, Tensor]:
        """Sums to accumulate over batches: "loss", "weight" and each metric; one of weight 0 adds 0."""
        total, weight = (figure * self._samples_per_weight for figure in self._sums()[:2])
        counted = {
            name: torch.where(own == 0, 0.0, found / own * weight) for name, (found, own) in self._of_metrics().items()
        }
        return {"loss": total, "weight": weight, **counted}

    @property
    def metrics(self) -> dict[str, Tensor]:
        """Each metric over the whole batch: its sum divided by its weight or, without one, by the loss weight."""
        return {name: found / own for name, (found, own) in self._of_metrics().items()}

    def _of_metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the sum of each metric, and its weight."""
        _, weight, *found = self._sums()
        count = len(self._metrics)
        weights = [torch.where(own < 0, weight, own) for own in found[count:]]
        return dict(zip(self._metrics, zip(found[:count], weights, strict=True), strict=True))


def _counted(column: Column, times: Sequence[float], *, here: bool) -> Column:
    """Return losses times their factors; on the host Python multiplies them, and the results are rounded as torch's.

    The product of two 24-bit significands is exact in one of 53 bits, so that it is rounded once.
    """
    units, losses = zip(*column, strict=True)
    kinds = {loss.dtype if isinstance(loss, Tensor) else None for loss in losses}
    code = _CODES.get(kinds.pop()) if here and len(kinds) == 1 else None
    if code is None:
        return [(unit, loss if often == 1 else loss * often) for (unit, loss), often in zip(column, times, strict=True)]
    return [*zip(units, array(code, map(mul, map(float, losses), array(code, times))), strict=True)]


def _fill(row: Tensor, column: Column, places_of: Callable[[tuple[int, ...]], Tensor]) -> None:
    """Write figures to their places; plain numbers by fill, since a copy from the host would wait for a GPU."""
    tensors = [(place, x) for place, x in column if isinstance(x, Tensor)]
    if tensors:
        values = [x for _, x in tensors]
        if len({x.dtype for x in values}) > 1:
            values = [x.to(torch.float64) for x in values]
        stacked = torch.stack(values).to(row.device, torch.float64)
        row.index_copy_(0, places_of(tuple([place for place, _ in tensors])), stacked)
    numbers: dict[float, list[int]] = {}
    for place, x in column:
        if not isinstance(x, Tensor):
            numbers.setdefault(float(x), []).append(place)
    for number, places in numbers.items():
        row.index_fill_(0, places_of(tuple(places)), number)

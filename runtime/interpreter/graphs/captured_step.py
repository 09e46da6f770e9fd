"""One step in a graph of the device: captured, replayed, and compared with the instructions that it comes from."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quintsched.errors import QuintschedError, UsageError

from ...comm.device import DeviceGraph
from ...state.training_state import Gradients
from ..clock import Clock
from ..interpreter import PreparedStep
from .static_batch import copy_of, taken_apart

_logger = logging.getLogger(__name__)

MOST_APART, SCATTER = 64, 0x9E3779B1
"""At most so many replays go by between two comparisons; what scatters these."""

REPEATS, LIKE = 3, 4.0
"""So often a step is repeated whose graph had other numbers; so many times as far off as repetitions they may be."""


class CapturedStep:
    """A step captured from the batch that it is given; raises `UsageError` where it cannot be.

    Args:
        step: with the batch.
        gradients: those of all stages.
        clock: does not run while it is captured.
        graph: what captures it.
        changing: tensors that its forwards change.
        number: of the step.
    """

    def __init__(
        self,
        step: PreparedStep,
        gradients: Gradients,
        clock: Clock,
        graph: DeviceGraph,
        changing: Sequence[Tensor],
        number: int,
    ) -> None:
        self._interpreter, self._gradients, self._clock, self._graph = step.interpreter, gradients, clock, graph
        self._tally, self._changing = step.interpreter.state.compute.tally, changing
        self._replays = self._compared = 0
        self._batch = copy_of(step.batch)
        self._inputs = list(taken_apart(self._batch)[1])
        try:
            with clock.off(), self._tally.unasked(), graph.capturing():
                self._figures = self._interpreter.lead(self._batch)
        except (RuntimeError, QuintschedError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UsageError(
                f"cuda_graph: step {number} cannot be captured: {said}. Where a block, the loss or a metric asks the "
                "device for a number (.item(), .tolist(), a mask as an index) or copies from the host in every step, "
                "leave that out; or run without cuda_graph"
            ) from error
        self._table = self._tally.figures.table
        self._begin_again()
        _logger.info("step %d is captured; steps of its shape run from its graph", number)

    def run(self, given: Sequence[Tensor], number: int) -> str:
        """Run a step on such tensors, instead of those that it was captured with.

        Return why the graph is not to be used again, which its first replay shows; empty: it is.
        """
        self._replays += 1
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(given))
        is_compared = self._replays in (1, next_moment(self._compared))
        before = [tensor.detach().clone() for tensor in self._changing] if is_compared else []
        self._interpreter.announce()
        self._clock.note(self._clock.now())
        self._graph.replay()
        self._clock.note(self._clock.now())
        figures, table, excuse = self._figures.clone(), self._table.clone(), ""
        if is_compared:
            found = self._numbers(figures, table)
            figures, apart = self._compare(found, before, given)
            excuse = self._judge(apart, number)
        else:
            self._take_over(table)
        self._tally.note_stop()
        figures[2:3] = self._tally.figures.num_asked()
        self._interpreter.conclude(figures)
        return excuse

    def _judge(self, apart: float, number: int) -> str:
        """Return why the first replay is the last; raises `UsageError` where a later one was wrong."""
        if apart and self._compared:
            raise UsageError(
                f"cuda_graph: step {number}, run from its graph, is not what its instructions do: numbers differ by "
                f"{apart:.1g} of their norm. Something that a block or the loss goes by has changed where none sees "
                f"it; what was learnt in the last {self._replays - self._compared} steps of this shape may be wrong. "
                "Go back to a checkpoint, and run without cuda_graph"
            )
        self._compared = self._replays
        return f"its graph has other numbers, {apart:.1g} of their norm apart" if apart else ""

    def _take_over(self, table: Tensor) -> None:
        """Let the host be where it would be, had it led through the step."""
        self._gradients.accumulate(on=False)
        self._gradients.reducer.give()
        self._gradients.absent.forget()
        self._tally.replay(table)

    def _begin_again(self) -> None:
        """Forget a step that was not ended."""
        self._interpreter.state.end()
        self._gradients.reducer.clear_all()

    def _compare(
        self, found: Sequence[Tensor], before: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor, float]:
        """Run a step that was replayed by its instructions too; return their figures, and by how much it differs.

        Some kernels add up in any order: where the instructions have other numbers each time, so may the graph.
        """
        figures = self._by_instructions(before, given)
        expected = self._numbers(figures, self._tally.figures.table)
        if all(map(torch.equal, found, expected)):
            return figures, 0.0
        noise = [0.0] * len(expected)
        for _ in range(REPEATS):
            self._begin_again()
            figures = self._by_instructions(before, given)
            again = self._numbers(figures, self._tally.figures.table)
            noise = list(map(max, noise, map(_share, again, expected)))
        return figures, max(map(_beyond, map(_share, found, expected), noise, expected))

    def _by_instructions(self, before: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        """Run the step up to its norm, from tensors as they were; return its figures."""
        with torch.no_grad():
            for tensor, numbers in zip((*self._changing, *self._inputs), (*before, *given), strict=True):
                tensor.copy_(numbers)
        with self._tally.unasked():
            return self._interpreter.lead(self._batch)

    def _numbers(self, figures: Tensor, table: Tensor) -> list[Tensor]:
        """Return what a step up to its norm has led to, but for what the host has of it: a stop, marks of data."""
        return [t.clone() for t in (*self._gradients.reducer.sums(), *self._changing, figures[:2], table[:-2])]


def next_moment(compared: int) -> int:
    """Return which replay is compared next, up to twice as many later, but soon; no rhythm of a training keeps up."""
    return compared + 1 + ((compared * SCATTER) >> 7) % min(max(compared, 1), MOST_APART)


def _share(found: Tensor, expected: Tensor) -> float:
    """Return the distance as a share of the norm; what is not finite has to be so in both."""
    if torch.equal(found, expected):
        return 0.0
    found, expected = (t if t.is_floating_point() else t.double() for t in (found, expected))
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    found, expected = found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    norm, distance = torch.linalg.vector_norm(expected).item(), torch.linalg.vector_norm(found - expected).item()
    return distance / norm if norm else math.inf if distance else 0.0


def _beyond(apart: float, noise: float, numbers: Tensor) -> float:
    """Return by how much numbers differ, where they may not: more than they do among themselves, or much."""
    most = torch.finfo(numbers.dtype).eps ** 0.5 if numbers.is_floating_point() else 0.0
    return apart if apart > min(LIKE * noise, most) else 0.0

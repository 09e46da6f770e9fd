"""One step in a graph of the device: captured, replayed, and compared with the instructions that it comes from."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quintsched.errors import QuintschedError, UsageError

from ...blocks.host_state import HostState
from ...comm.device import DeviceGraph
from ...state.training_state import Gradients
from ..clock import Clock
from ..interpreter import PreparedStep
from .numbers import Numbers, beyond_rounding, next_moment
from .static_batch import copied

_logger = logging.getLogger(__name__)

REPEATS = 3
"""So often a step is repeated whose graph had other numbers."""


class Held(NamedTuple):
    """What a graph relies on: where weights are, which are trained and have hooks, modes of modules and of torch."""

    memory: Hashable
    frozen: Hashable
    modes: Hashable
    torch_modes: Hashable


HELD = Held(
    "where weights are in memory", "which weights are trained, or have hooks", "which modules train", "a mode of torch"
)
"""The same, in words."""


class CapturedStep:
    """A step captured from the batch that it is given; raises `UsageError` where it cannot be.

    Args:
        step: with the batch.
        gradients: those of all stages.
        clock: does not run while it is captured.
        graph: what captures it.
        changing: tensors that its forwards change.
        held, host: what it relies on.
        number: of the step.

    Attributes:
        replays: how often it was replayed.
    """

    def __init__(
        self,
        step: PreparedStep,
        gradients: Gradients,
        clock: Clock,
        graph: DeviceGraph,
        changing: Sequence[Tensor],
        held: Held,
        host: HostState,
        number: int,
    ) -> None:
        self._held, self._host, self._changing = held, host, changing
        self._interpreter, self._gradients, self._clock, self._graph = step.interpreter, gradients, clock, graph
        self._tally = step.interpreter.state.compute.tally
        self.replays = self._compared = 0
        self._static, self._inputs = copied(step.batch)
        try:
            with clock.off(), self._tally.unasked(), graph.capturing():
                self._figures = self._interpreter.lead(self._static)
        except (RuntimeError, QuintschedError) as error:
            raise UsageError(
                f"cuda_graph: step {number} cannot be captured: {_first_line(error)}. Where a block, the loss or a "
                "metric asks the device for a number (.item(), .tolist(), a mask as an index) or copies from the host "
                "in every step, leave that out; or run without cuda_graph"
            ) from error
        self._table = self._tally.figures.table
        self._begin_again()
        _logger.info("step %d is captured; steps of its shape run from its graph", number)

    def stale(self, held: Held) -> str | None:
        """Return what has changed of what the graph relies on, in words."""
        if held != self._held:
            return next(str(words) for words, was, now in zip(HELD, self._held, held, strict=True) if was != now)
        return self._host.changed()

    def run(self, step: PreparedStep, given: Sequence[Tensor], number: int) -> str:
        """Run the step on such tensors, instead of those that it was captured with.

        Return why the graph is not to be used again, which its first replay shows; empty: it is.
        """
        self.replays += 1
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(given))
        is_compared = self.replays == 1 or self.replays == next_moment(self._compared)
        before = [tensor.detach().clone() for tensor in self._changing] if is_compared else []
        self._interpreter.announce()
        self._clock.start()
        self._graph.replay()
        self._clock.stop()
        figures, table, excuse = self._figures.clone(), self._table.clone(), ""
        if is_compared:
            figures, apart = self._compare(figures, table, before, given)
            if apart and self._compared:
                raise UsageError(
                    f"cuda_graph: step {number}, run from its graph, is not what its instructions do: numbers differ "
                    f"by {apart:.1g} of their norm. Something that a block or the loss goes by has changed where none "
                    f"sees it; what was learnt in the last {self.replays - self._compared} steps of this shape may be "
                    "wrong. Go back to a checkpoint, and run without cuda_graph"
                )
            self._compared = self.replays
            excuse = f"its graph has other numbers, {apart:.1g} of their norm apart" if apart else ""
        else:
            self._take_over(table)
        self._tally.note_stop()
        figures[2:3] = self._tally.figures.num_asked()
        self._interpreter.conclude(figures)
        return excuse

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
        self, figures: Tensor, table: Tensor, before: Sequence[Tensor], given: Sequence[Tensor]
    ) -> tuple[Tensor, float]:
        """Run a step that was replayed by its instructions too; return their figures, and by how much it differs.

        Some kernels add up in any order: where the instructions have other numbers each time, so may the graph.
        """
        found = Numbers([*self._gradients.reducer.sums(), *self._changing], figures, table).copied()
        figures = self._by_instructions(before, given)
        if not max(found.apart_from(self._numbers(figures)), default=0.0):
            return figures, 0.0
        expected = self._numbers(figures).copied()
        apart, among_themselves = found.apart_from(expected), [0.0] * len(expected.tensors)
        for _ in range(REPEATS):
            self._begin_again()
            figures = self._by_instructions(before, given)
            again = self._numbers(figures).apart_from(expected)
            among_themselves = list(map(max, among_themselves, again))
        return figures, max(map(beyond_rounding, apart, among_themselves, expected.tensors))

    def _by_instructions(self, before: Sequence[Tensor], given: Sequence[Tensor]) -> Tensor:
        """Run the step up to its norm, from tensors as they were; return its figures."""
        with torch.no_grad():
            for tensor, numbers in zip((*self._changing, *self._inputs), (*before, *given), strict=True):
                tensor.copy_(numbers)
        with self._tally.unasked():
            return self._interpreter.lead(self._static)

    def _numbers(self, figures: Tensor) -> Numbers:
        """Return what a step up to its norm has led to."""
        return Numbers([*self._gradients.reducer.sums(), *self._changing], figures, self._tally.figures.table)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

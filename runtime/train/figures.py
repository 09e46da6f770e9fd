"""Adding up what steps give, without waiting for it before it is needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from ..comm.clock import now_s
from ..interpreter.tally import StepResult

UNDER_WAY = 4
"""How many of the latest results may still be on their way."""


class Sums:
    """Sums of results over batches; they stay tensors until they are read.

    The latest results are not looked at yet: looking waits until they are reduced over the ranks.

    Args:
        start: sums of batches before.
        scale: says by what those are multiplied; asked when the first batch is added.
    """

    def __init__(self, start: dict[str, float], scale: Callable[[], float] | None = None) -> None:
        self._sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}
        self._scale = scale
        self._latest: deque[StepResult] = deque()

    def add(self, result: StepResult) -> None:
        """Add a batch's sums."""
        if self._scale is not None:
            factor, self._scale = self._scale(), None
            self._sums = {name: value * factor for name, value in self._sums.items()} if factor != 1 else self._sums
        self._latest.append(result)
        if len(self._latest) > UNDER_WAY:
            self._add_oldest()

    def _add_oldest(self) -> None:
        for name, value in self._latest.popleft().sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def read(self) -> dict[str, float]:
        """Return the sums as numbers."""
        while self._latest:
            self._add_oldest()
        return {name: value.item() for name, value in self._sums.items()}


class Window:
    """The last `every` steps: their sums and how long they took."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._restart()

    def _restart(self) -> None:
        self._steps, self._began, self._sums = 0, now_s(), Sums({})

    def add(self, result: StepResult) -> bool:
        """Add a step; whether the window is full."""
        self._sums.add(result)
        self._steps += 1
        return self._steps == self.every

    def take(self) -> tuple[float, dict[str, float]]:
        """Return (seconds, sums) and begin anew."""
        sums = self._sums.read()
        seconds = now_s() - self._began
        self._restart()
        return seconds, sums


def figures_in_words(means: Mapping[str, object]) -> str:
    """Return loss, and accuracy where there is one, for a line that people read."""
    accuracy = f"  accuracy {means['accuracy']:.2%}" if "accuracy" in means else ""
    return f"loss {means['loss']:.4f}{accuracy}"

"""Exponential moving averages (EMA) of the weights, sharded over ranks as the optimizer's master weights are.

    after each step     average = decay · average + (1 - decay) · weights        float32, or as wide as the weights
    applied()           weights ⇄ average, and back                              for an evaluation, say

A skipped step changes neither. Buffers and frozen weights are not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError

from ..weights_and_gradients.training_state import TrainingState

Decay = float | Callable[[int], float]
"""Decay of the average, in [0, 1]; or a function of the number of updates so far."""

DECAY = "decay"
"""Key of the decay in a state dict."""


class WeightAverage:
    """EMA of the weights of one rank's stages.

    Attributes:
        updates: number of steps averaged so far.
        is_applied: whether weights and average are swapped.
    """

    def __init__(self, state: TrainingState, decay: Decay) -> None:
        if not callable(decay) and not 0 <= decay <= 1:
            raise UsageError(f"the decay of an average is a number from 0 to 1, not {decay}")
        self._state, self._decay = state, decay
        self.updates, self.is_applied = 0, False
        self._averages: dict[str, Tensor] = {}
        self._add_new()

    def _add_new(self) -> None:
        """Start averages of newly trained weights from their present values."""
        for name, master in self._state.stepped().items():
            if name not in self._averages:
                self._averages[name] = master.detach().clone()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [
            (self._averages[name], master.detach())
            for name, master in self._state.stepped().items()
            if name in self._averages
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the weights after a step; the engine calls this by itself."""
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        self._add_new()
        for average, master in self._pairs():
            average.lerp_(master, 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap weights and average within a context, as for an evaluation (collective where replicas hold shards).

        Within it no step is made and no state is saved.
        """
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        with self._state.writing():
            for average, master in self._pairs():
                kept = master.clone()
                master.copy_(average)
                average.copy_(kept)
        self.is_applied = not self.is_applied

    def full_weights(self) -> dict[str, Tensor]:
        """Return the average in the form of `Engine.full_weights` (collective)."""
        with self.applied():
            return self._state.full_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the average, by the names of weights, with the number of updates and the decay."""
        return {**self._averages, "updates": torch.tensor(self.updates), DECAY: self.saved_decay}

    @property
    def saved_decay(self) -> Tensor:
        """Decay as a state dict stores it; -1 for a function."""
        return torch.tensor(-1.0 if callable(self._decay) else self._decay, dtype=torch.float64)

    def average_of(self, name: str) -> Tensor | None:
        """Return this rank's part of the average of a weight, or None."""
        return self._averages.get(name)


class Averages:
    """Averages of an engine, by their numbers; a state dict stores them under "ema.<number>.<name>"."""

    def __init__(self) -> None:
        self.all: list[WeightAverage] = []

    def update(self) -> None:
        """Update all averages with the weights after a step."""
        for average in self.all:
            average.update()

    def require_none_applied(self, what: str) -> None:
        """Raise `UsageError` while weights and an average are swapped."""
        if any(average.is_applied for average in self.all):
            raise UsageError(f"{what} inside of `with ema.applied()` would take the average for the weights; leave it")

    def require_loadable(self, where: str, count: int, decays: Mapping[int, Tensor]) -> None:
        """Raise for a state whose averages, `count` of them with these decays by number, do not match the engine's.

        `UsageError` for more averages than the engine keeps, `MisfitError` for the same decays in another order; decays
        that differ otherwise are accepted: the program may change them between runs, as it may learning rates.
        """
        if count > len(self.all):
            raise UsageError(
                f"{where}: the state has {count} averages of weights, the engine {len(self.all)}; call "
                "engine.ema(decay) before it is loaded"
            )
        mine = {number: float(self.all[number].saved_decay) for number in decays}
        theirs = {number: float(decay) for number, decay in decays.items()}
        if mine != theirs and sorted(mine.values()) == sorted(theirs.values()):
            odd = next(number for number in mine if mine[number] != theirs[number])
            raise MisfitError(
                f"{where}: average {odd} of the state has a decay of {theirs[odd]:g}, that of the engine {mine[odd]:g}:"
                " call engine.ema in the order of the run that was saved"
            )

"""Exponential moving averages of the weights, which lie on the ranks as what the optimizer works on does.

    after each step     average = decay · average + (1 - decay) · weights        float32, or as wide as the weights
    applied()           weights ⇄ average, and back                              for an evaluation, say

A step that is skipped changes neither. Buffers, and weights that are not trained, are not averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError

from ..state.training_state import TrainingState

Decay = float | Callable[[int], float]
"""The share that stays of the average; or a function of how many times it was updated before."""

DECAY = "decay"
"""What a state calls the share that stays."""


class WeightAverage:
    """An average of the weights of one rank's stages.

    Attributes:
        updates: how many steps it has taken in.
        is_applied: whether weights and average have changed places.
    """

    def __init__(self, state: TrainingState, decay: Decay) -> None:
        if not callable(decay) and not 0 <= decay <= 1:
            raise UsageError(f"the decay of an average is a number from 0 to 1, not {decay}")
        self._state, self._decay = state, decay
        self.updates, self.is_applied = 0, False
        self._averages: dict[str, Tensor] = {}
        self._add_new()

    def _add_new(self) -> None:
        """Begin with the weights as they are, also with those that are trained from now on."""
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
        """Take in the weights after a step; the engine does this by itself."""
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        self._add_new()
        for average, master in self._pairs():
            average.lerp_(master, 1 - decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the blocks compute with the average (collective where replicas hold shards).

        Within it there are no steps, and nothing is saved.
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
        """Return the average as `Engine.full_weights` gives weights (collective)."""
        with self.applied():
            return self._state.full_weights()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this rank has of the average, by the names of weights, and how often it was updated."""
        return {**self._averages, "updates": torch.tensor(self.updates), DECAY: self.saved_decay}

    @property
    def saved_decay(self) -> Tensor:
        """The share that stays of it, as a state has it; -1 where that is a function."""
        return torch.tensor(-1.0 if callable(self._decay) else self._decay, dtype=torch.float64)

    def of(self, name: str) -> Tensor | None:
        """Return what this rank has of the average of a weight."""
        return self._averages.get(name)


class Averages:
    """The averages of an engine, by their numbers; their state goes by "ema.<number>.<name>"."""

    def __init__(self) -> None:
        self.all: list[WeightAverage] = []

    def update(self) -> None:
        """Take in the weights after a step."""
        for average in self.all:
            average.update()

    def require_none_applied(self, what: str) -> None:
        """Raise `UsageError` while weights and an average have changed places."""
        if any(average.is_applied for average in self.all):
            raise UsageError(f"{what} inside of `with ema.applied()` would take the average for the weights; leave it")

    def require_loadable(self, where: str, count: int, decays: Mapping[int, Tensor]) -> None:
        """Raise for a state of so many averages, of these decays by number, that is not of these.

        `UsageError` where there are more than are kept, `MisfitError` where they were made in another order; other
        decays than any of these are the program's, as learning rates are.
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

"""Loaders of one's own: whatever gives batches, one replica's share each, in place of a data set in memory.

    def load(replica, num_replicas):                       on every rank; ranks of a replica get the same batches
        sampler = DistributedSampler(texts, num_replicas, replica)
        return Loaders(StatefulDataLoader(texts, batch_size=8, sampler=sampler))

A batch is (inputs, targets), (inputs, targets, extras), or a mapping with the targets under "labels" or "targets", the
inputs first. A loader with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, is saved in
checkpoints and goes on where it was.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quintsched.errors import MisfitError, UsageError

from .dataset import DataSpec

TARGETS = ("labels", "targets")
"""The names of targets in a mapping."""

UNKNOWN = DataSpec(input_shape=(), num_classes=0)
"""What is known of data of which nothing was said."""

Batch = tuple[Any, Any, Mapping[str, Any]]
"""Inputs, targets, extras."""


@dataclass(frozen=True)
class Loaders:
    """The loaders of one replica.

    Attributes:
        train: gives the batches of training.
        validation: those of validation, or None.
        spec: what a built-in model must know of the data.
        batches: how many batches an epoch has; None: all that the loader has. With a number, a loader may be endless,
            and an epoch begins where the one before ended.
    """

    train: Any
    validation: Any = None
    spec: DataSpec = UNKNOWN
    batches: int | None = None


class LoaderFeed:
    """Batches of a loader, epoch by epoch, and where it is.

    Raises `UsageError` for a loader of which nobody knows how many batches it has.
    """

    def __init__(self, loader: Any, batches: int | None) -> None:
        self._loader, self._goes_on = loader, batches is not None
        self._batches: Iterator[Any] | None = None
        if batches is None and not hasattr(loader, "__len__"):
            raise UsageError(
                f"the loader, a {type(loader).__name__}, has no length; say how many batches an epoch has: "
                "Loaders(loader, batches=1000)"
            )
        self.num_batches = len(loader) if batches is None else batches

    @property
    def has_state(self) -> bool:
        """Whether the loader says where it is."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on, which the loader's state has to be at.

        Raises `MisfitError` where the loader ends before its length, or goes on behind it.
        """
        sampler: Any = getattr(self._loader, "sampler", None)
        if not self._goes_on and start == 0 and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for number in range(start, self.num_batches):
            yield batch_of(self._next(number))
        if not self._goes_on:
            left, self._batches = self._batches, None
            if left is not None and next(left, None) is not None:
                raise MisfitError(f"the loader has more batches than the {self.num_batches} that its length says")

    def _next(self, number: int) -> Any:
        for batches in (self._batches, None):
            self._batches = iter(self._loader) if batches is None else batches
            found = next(self._batches, None)
            if found is not None:
                return found
            if not self._goes_on:
                raise MisfitError(f"the loader ended after {number} batches; its length says {self.num_batches}")
        raise MisfitError("the loader has no batches")

    def state(self) -> bytes:
        """Return where the loader is, as plain data; raises `UsageError` where it keeps anything else."""
        saved = io.BytesIO()
        drawn = [generator.get_state() for generator in _generators(self._loader)]
        torch.save({"loader": self._loader.state_dict(), "generators": drawn}, saved)
        try:
            torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        except Exception as error:
            raise UsageError(
                f"the state of the loader, a {type(self._loader).__name__}, cannot be saved: it has to consist of "
                f"numbers, strings, tensors, lists and dicts: {error}"
            ) from error
        return saved.getvalue()

    def skip(self, epoch: int, batch: int) -> None:
        """Let a loader that has not begun be `batch` batches into an epoch: it gives all that come before, for nobody.

        Of a sampler with `set_epoch` these are the epoch's, of any other all since the first epoch.
        """
        sampler: Any = getattr(self._loader, "sampler", None)
        if self._goes_on:
            for number in range(epoch * self.num_batches + batch):
                self._next(number)
            return
        for earlier in range(0 if hasattr(sampler, "set_epoch") else epoch):
            for _ in self.epoch(earlier):
                pass
        if batch and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        for number in range(batch):
            self._next(number)

    def restore(self, state: bytes, batch: int) -> None:
        """Let the loader be where `state` says, `batch` batches into an epoch.

        torchdata's loader draws from its generator whenever an iterator is made, and what was drawn is no part of its
        state; so generators are set behind that.
        """
        saved = torch.load(io.BytesIO(state), weights_only=True)
        self._loader.load_state_dict(saved["loader"])
        generators = _generators(self._loader)
        begun = iter(self._loader) if generators or batch or self._goes_on else None
        self._batches = begun if batch or self._goes_on else None
        for generator, drawn in zip(generators, saved["generators"], strict=True):
            generator.set_state(drawn)


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers draw from, each once."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[1], "sampler", None))
    found = (getattr(holder, "generator", None) for holder in (loader, *samplers))
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def batch_of(given: Any) -> Batch:
    """Read what a loader gives; raises `UsageError` for what is no batch."""
    if isinstance(given, Mapping):
        name = next((name for name in TARGETS if name in given), None)
        first = next((key for key in given if key not in TARGETS), None)
        if name is not None and first is not None:
            return given[first], given[name], {k: v for k, v in given.items() if k not in (first, name)}
    elif isinstance(given, list | tuple) and len(given) in (2, 3):
        inputs, targets, *extras = given
        return inputs, targets, extras[0] if extras else {}
    raise UsageError(
        f"the loader gave a {type(given).__name__}; a batch is (inputs, targets), (inputs, targets, extras), or a "
        'mapping with "labels"'
    )

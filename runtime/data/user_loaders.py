"""User-supplied data loaders: any iterable of batches, one per replica, in place of a data set in memory.

    def load(replica, num_replicas):                       on every rank; ranks of a replica get the same batches
        sampler = DistributedSampler(texts, num_replicas, replica)
        return Loaders(StatefulDataLoader(texts, batch_size=8, sampler=sampler))

A batch is (inputs, targets), (inputs, targets, extras), or a mapping with the targets under "labels" or "targets", the
inputs first. A loader with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, is saved in
checkpoints and resumes at its position; so does torch's DataLoader over a map-style data set, by its sampler's
position. Others are refused when a checkpoint is saved.

Also the states of random generators that a loader's order depends on, as plain data for checkpoints.

of the process    torch's, Python's, numpy's
of the loader     those passed to torch's DataLoader and its samplers: `generator=…`
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from quintsched.check_call_arguments import shown
from quintsched.errors import MisfitError, UsageError, counted

from .memory_dataset import DataSpec
from .same_data_on_resume import Sample, SampleDigests, is_marked, mark_of, sample_of
from .torch_loader_position import naming_workers, refusal_of_position, samplers_of, skipped, with_epochs

GeneratorStates = list[Any]
"""States of some generators: tensors, numbers, tuples, dicts."""

_OF_PROCESS = 3
"""Number of generators of the process, which come first."""


class Generators:
    """Random generators of the process, then those of `holders`, each once."""

    def __init__(self, holders: Iterable[Any] = ()) -> None:
        given = [getattr(holder, "generator", None) for holder in holders]
        own = {id(one): one for one in given if isinstance(one, torch.Generator)}
        own.pop(id(torch.default_generator), None)
        self._all: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (_numpys_state, _set_numpys_state),
            *((one.get_state, one.set_state) for one in own.values()),
        ]

    def states(self) -> GeneratorStates:
        """Return their states."""
        return [read() for read, _ in self._all]

    def takes_states(self, states: GeneratorStates) -> bool:
        """Whether states are those of as many generators."""
        return len(states) == len(self._all)

    def set(self, states: GeneratorStates) -> None:
        """Set their states; where their number differs, only those of the process."""
        known = states if self.takes_states(states) else states[:_OF_PROCESS]
        for (_, put), state in zip(self._all, known, strict=False):
            put(state)


def _numpys_state() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    inner = state["state"]
    return {**state, "state": {**inner, "key": torch.from_numpy(inner["key"].view(np.int32).copy())}}


def _set_numpys_state(state: Mapping[str, Any]) -> None:
    key: Tensor = state["state"]["key"]
    np.random.set_state({**state, "state": {**state["state"], "key": key.numpy().view(np.uint32)}})


TARGET_COLUMNS = ("labels", "targets")
"""Names of targets in a mapping."""

UNKNOWN_SPEC = DataSpec(input_shape=(), num_classes=0)
"""Sizes of data that the user does not declare."""


def is_map_style(given: Any) -> bool:
    """Return whether this is a data set of torch whose samples have indices."""
    return isinstance(given, TorchDataset) and not isinstance(given, IterableDataset)


MIXED = "one of training and validation is a data set, the other a loader; give both as data sets, or both as loaders"

LoadedBatch = tuple[Any, Any, Mapping[str, Any]]
"""Inputs, targets, extras."""

Say = Callable[[str], None]

OTHER_GENERATORS = (
    "the loader has not as many generators of random numbers as the checkpoint: those of the process go on where they "
    "were, its own begin anew"
)
OTHER_DATA = (
    "the loader gave the last batch before the checkpoint once more, with other data: they depend on what was read "
    "before, on a generator of the data set's own, or on the time. The run goes on, but with other batches than it "
    "would have had; use StatefulDataLoader over a data set with state_dict and load_state_dict"
)


@dataclass
class Position:
    """Position of a loader without `state_dict`, in its sampler's order.

    Attributes:
        begin: states of the generators when its latest pass began, before its iterator was made.
        given: number of batches it has yielded in that pass.
        last: number of the last batch that was read in the latest pass, from 1 on; 0: none was.
        before: states of the generators before that batch, where it can be read alone.
        mark: digests of that batch.
    """

    begin: GeneratorStates = field(default_factory=list)
    given: int = 0
    last: int = 0
    before: GeneratorStates = field(default_factory=list)
    mark: SampleDigests = field(default_factory=dict)


@dataclass(frozen=True)
class Loaders:
    """Data loaders of one replica, or map-style data sets of torch, which are divided over the replicas.

    Attributes:
        train: yields the batches of training.
        validation: those of validation, or None.
        spec: the sizes that a built-in model is built for.
        batches: number of batches of an epoch; None: all that the loader has. With a number, a loader may be endless,
            and an epoch begins where the one before ended.
    """

    train: Any
    validation: Any = None
    spec: DataSpec = UNKNOWN_SPEC
    batches: int | None = None


class LoaderFeed:
    """Batches of a loader, epoch by epoch, and its position for checkpoints.

        a state of its own      saved, and loaded
        a sampler's position    generators are set as at the start of its latest pass, and yielded batches are skipped;
                                the last one is read, and compared with its mark
        neither                 refused when its state is requested, unless not `saves`

    Raises `UsageError` for a loader whose number of batches is unknown.
    """

    def __init__(self, loader: Any, batches: int | None, *, saves: bool = True) -> None:
        self._loader, self._goes_on = loader, batches is not None
        self._batches: Iterator[Any] | None = None
        if isinstance(loader, Mapping | str) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise UsageError(
                f"{shown(loader)} is no loader; give an object that yields batches, or a function (replica, "
                "num_replicas) that returns one"
            )
        if batches is None and (not hasattr(loader, "__len__") or length_hint(loader, -1) < 0):  # -1: of a stream
            raise UsageError(
                f"the loader, {shown(loader)}, has no length; say how many batches an epoch has: "
                "Loaders(loader, batches=1000)"
                if saves
                else f"the loader of validation, {shown(loader)}, has no length; give a list of its batches: "
                "validation=list(itertools.islice(loader, 50))"
            )
        self.num_batches = len(loader) if batches is None else batches
        if saves and not self.num_batches:
            raise UsageError(f"the loader of training, {shown(loader)}, has no batch")
        self._length = length_hint(loader)  # 0: the length of a pass is unknown
        self._generators = Generators([loader, *samplers_of(loader)])
        self._at = Position()
        self._sample: Sample | None = None
        self._refusal = refusal_of_position(loader, goes_on=self._goes_on)
        self._is_alone = not getattr(loader, "num_workers", 0)
        self._marks = saves and not self.has_state and self._refusal is None

    @property
    def has_state(self) -> bool:
        """Whether the loader has a state dict."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    @property
    def is_last(self) -> bool:
        """Whether the current batch is the last of several of a pass."""
        return self._at.given == self._length > 1

    def epoch(self, epoch: int, start: int = 0) -> Iterator[LoadedBatch]:
        """Yield the batches of an epoch from number `start` on, which must be the loader's position.

        Raises `MisfitError` where the loader has fewer batches than its length, or more.
        """
        if start == 0:
            self._set_epoch(epoch)
        for number in range(start, self.num_batches):
            yield batch_of(self._next(number))
        self._end_epoch()

    def _set_epoch(self, epoch: int) -> None:
        for sampler in () if self._goes_on else with_epochs(self._loader):
            sampler.set_epoch(epoch)

    def _end_epoch(self) -> None:
        if self._goes_on:
            return
        left, self._batches, self._at.given = self._batches, None, 0
        if left is not None and next(left, None) is not None:
            raise MisfitError(f"the loader has more batches than the {self.num_batches} that its length says")

    def _next(self, number: int, *, reads: bool = True) -> Any:
        at, marks = self._at, self._marks and reads
        for batches in (self._batches, None):
            if batches is None:
                at.begin, at.given = self._generators.states(), 0
            self._batches = iter(self._loader) if batches is None else batches
            before = self._generators.states() if marks and self._is_alone else []
            with naming_workers():
                found = next(self._batches, None) if reads else skipped(self._batches)
            if found is not None:
                at.given += 1
                if marks:
                    at.last, at.before, self._sample = at.given, before, sample_of(found)
                return found
            if not self._goes_on:
                raise MisfitError(
                    f"the loader ended after {counted(number, 'batch')}; its length says {self.num_batches}"
                )
        raise MisfitError("the loader has no batches")

    def state(self) -> bytes:
        """Return the loader's state; raises `UsageError` where it has none, or one that is no plain data."""
        kind = type(self._loader).__name__
        if not self.has_state and self._refusal is not None:
            raise UsageError(
                f"a checkpoint cannot say where the loader, a {kind}, is: {self._refusal}; use "
                "torchdata.stateful_dataloader.StatefulDataLoader(…), or give it state_dict() and "
                "load_state_dict(state)"
            )
        if self._sample is not None:
            self._at.mark, self._sample = mark_of(self._sample), None
        kept = {"loader": self._loader.state_dict()} if self.has_state else {"past": vars(self._at)}
        saved = io.BytesIO()
        torch.save({**kept, "drawn": self._generators.states()}, saved)
        try:
            torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        except Exception as error:
            raise UsageError(
                f"the state of the loader, a {kind}, cannot be saved: it has to consist of "
                f"numbers, strings, tensors, lists and dicts: {error}"
            ) from error
        return saved.getvalue()

    def restore(self, state: bytes | None, epoch: int, batch: int, say: Say) -> None:
        """Move a fresh loader to `batch` batches into an epoch, by its state.

        Without a state, or with that of a loader of another kind, earlier batches are skipped one by one: with a
        `set_epoch` those of the epoch, else all since the first epoch. A message by `say` reports it.
        """
        saved = {} if state is None else torch.load(io.BytesIO(state), weights_only=True)
        if self.has_state and "loader" in saved:
            self._load(saved["loader"], batch)
        elif self._marks and "past" in saved:
            at = Position(**{one.name: saved["past"][one.name] for one in fields(Position)})
            if not self._pass_over(at, epoch):
                say(OTHER_DATA)
        else:
            self._give_again(epoch, batch, say)
        if "drawn" in saved:
            if not self._generators.takes_states(saved["drawn"]):
                say(OTHER_GENERATORS)
            self._generators.set(saved["drawn"])

    def _load(self, state: Any, batch: int) -> None:
        """Load the loader's state.

        torchdata's loader draws from its generator whenever an iterator is made, and that draw is not part of its
        state; so it is made before generators are set.
        """
        self._loader.load_state_dict(state)
        self._at.given = batch
        holders = [self._loader, *samplers_of(self._loader)]
        draws = any(isinstance(getattr(holder, "generator", None), torch.Generator) for holder in holders)
        begun = iter(self._loader) if draws or batch or self._goes_on else None
        self._batches = begun if batch or self._goes_on else None

    def _pass_over(self, at: Position, epoch: int) -> bool:
        """Start the latest pass again, and skip the batches that it has yielded, except the last one.

        Return whether that one equals its mark. A finished pass is restarted for that batch alone, if without workers.
        """
        self._at = at
        number = at.given or (at.last if self._is_alone else 0)
        if not number:
            return True
        self._set_epoch(epoch if at.given else epoch - 1)
        self._generators.set(at.begin)
        self._batches = batches = iter(self._loader)
        for passed in range(number - 1):
            if skipped(batches) is None:
                raise MisfitError(f"the loader ended after {counted(passed, 'batch')}; it had given {number}")
        if at.before:
            self._generators.set(at.before)
        found = next(batches, None)
        if found is None:
            raise MisfitError(f"the loader ended after {counted(number - 1, 'batch')}; it had given {number}")
        if not at.given:
            self._batches = None
        return is_marked(mark_of(sample_of(found)), at.mark)

    def _give_again(self, epoch: int, batch: int, say: Say) -> None:
        first = epoch if not self._goes_on and with_epochs(self._loader) else 0
        batches = (epoch - first) * self.num_batches + batch
        if batches:
            say(f"there is no state that the loader could go on from: it gives {counted(batches, 'batch')} once more")
        for now in range(first, epoch + 1):
            self._set_epoch(now)
            for number in range(self.num_batches if now < epoch else batch):
                self._next(number, reads=False)
            if now < epoch:
                self._end_epoch()


def batch_of(given: Any) -> LoadedBatch:
    """Split a loader's batch into inputs, targets, extras; raises `UsageError` for an object that is no batch."""
    if isinstance(given, Mapping):
        name = next((name for name in TARGET_COLUMNS if name in given), None)
        first = next((key for key in given if key not in TARGET_COLUMNS), None)
        if name is not None and first is not None:
            return given[first], given[name], {k: v for k, v in given.items() if k not in (first, name)}
    elif isinstance(given, list | tuple) and len(given) in (2, 3):
        inputs, targets, *extras = given
        return inputs, targets, extras[0] if extras else {}
    raise UsageError(
        f"the loader gave a {type(given).__name__}; a batch is (inputs, targets), (inputs, targets, extras), or a "
        'mapping with "labels"'
    )

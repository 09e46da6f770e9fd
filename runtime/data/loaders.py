"""Loaders of one's own: whatever gives batches, one replica's share each, in place of a data set in memory.

    def load(replica, num_replicas):                       on every rank; ranks of a replica get the same batches
        sampler = DistributedSampler(texts, num_replicas, replica)
        return Loaders(StatefulDataLoader(texts, batch_size=8, sampler=sampler))

A batch is (inputs, targets), (inputs, targets, extras), or a mapping with the targets under "labels" or "targets", the
inputs first. A loader with `state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader, is saved in
checkpoints and goes on where it was; one without them draws again what it drew.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from quintsched.errors import MisfitError, UsageError

from .dataset import DataSpec
from .generators import Generators, State, is_alike
from .marks import Mark, Sample, is_marked, mark_of, sample_of
from .torch_loaders import can_pass_over, knows_indices, naming_workers, passed_over, samplers_of, with_epochs

TARGETS = ("labels", "targets")
"""The names of targets in a mapping."""

UNKNOWN = DataSpec(input_shape=(), num_classes=0)
"""What is known of data of which nothing was said."""

Batch = tuple[Any, Any, Mapping[str, Any]]
"""Inputs, targets, extras."""

Say = Callable[[str], None]

SHARED = (
    "the loader has no state, and the training draws from a generator that it draws its batches from: it may go on "
    "with other batches than it would have had; give it a generator of its own, or state_dict and load_state_dict"
)
OTHER_GENERATORS = (
    "the loader has not as many generators of random numbers as the checkpoint: those of the process go on where they "
    "were, its own begin anew"
)
OTHER_DATA = (
    "the loader gave the last batch before the checkpoint once more, with other data: they depend on what was read "
    "before, on a generator that is not found, or on the time. The run goes on, but with other batches than it would "
    "have had; give the loader state_dict and load_state_dict"
)
REREAD = ", or say Loaders(loader, rereads=True), which reads all batches since the beginning once more"


@dataclass
class Past:
    """What a loader without a state has given.

    Attributes:
        begin: where generators were when its latest pass began: an iterator was made.
        given: how many batches it has given in that pass.
        jumps: by epoch, where those generators were at its beginning that others had drawn from since the one before.
        after: where generators were at the end of the latest epoch.
        last: which batch of the latest pass was the last that was read, from 1 on; 0: none was.
        before: where generators were before it, where it can be read alone.
        mark: what it had.
    """

    begin: State = field(default_factory=list)
    given: int = 0
    jumps: dict[int, State] = field(default_factory=dict)
    after: State | None = None
    last: int = 0
    before: State = field(default_factory=list)
    mark: Mark = field(default_factory=dict)


@dataclass(frozen=True)
class Loaders:
    """The loaders of one replica.

    Attributes:
        train: gives the batches of training.
        validation: those of validation, or None.
        spec: what a built-in model must know of the data.
        batches: how many batches an epoch has; None: all that the loader has. With a number, a loader may be endless,
            and an epoch begins where the one before ended.
        rereads: whether a run that goes on reads all batches since its beginning once more, for nobody: for data that
            depend on what was read before, or on a generator that is not found.
    """

    train: Any
    validation: Any = None
    spec: DataSpec = UNKNOWN
    batches: int | None = None
    rereads: bool = False


class LoaderFeed:
    """Batches of a loader, epoch by epoch, and where it is; `beside` it others may hold the same generators.

        a state of its own                     saved, and loaded
        torch's DataLoader over its samplers   generators are set to where its latest pass began, and it passes over
        any other, or one that rereads         generators are set to where the run began, and it gives all batches again

    The last batch that was given is given once more in both of the latter, and compared with the mark that it left.
    Without `saves`, its state is not asked for. Raises `UsageError` for a loader of which nobody knows how many batches
    it has.
    """

    def __init__(
        self, loader: Any, batches: int | None, *, beside: Any = None, rereads: bool = False, saves: bool = True
    ) -> None:
        self._loader, self._goes_on = loader, batches is not None
        self._batches: Iterator[Any] | None = None
        if batches is None and not hasattr(loader, "__len__"):
            raise UsageError(
                f"the loader, a {type(loader).__name__}, has no length; say how many batches an epoch has: "
                "Loaders(loader, batches=1000)"
            )
        self.num_batches = len(loader) if batches is None else batches
        self._length = _length_of(loader)
        self._generators = Generators(loader, beside)
        self._past = Past()
        self._sample: Sample | None = None
        self._reads = True
        self._passes_over = not rereads and can_pass_over(loader, goes_on=self._goes_on)
        self._marks, self._is_alone = saves and not self.has_state, not getattr(loader, "num_workers", 0)

    @property
    def has_state(self) -> bool:
        """Whether the loader says where it is."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    @property
    def is_last(self) -> bool:
        """Whether the batch that was given is the last of several of a pass."""
        return self._past.given == self._length > 1

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on, which the loader's state has to be at.

        Raises `MisfitError` where the loader ends before its length, or goes on behind it.
        """
        for given in self._epoch(epoch, start):
            yield batch_of(given)

    def _epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        past = self._past
        if start == 0:
            self._set_epoch(epoch)
            changes = self._generators.changes(past.after)
            if any(state is not None for state in changes):
                past.jumps[epoch] = changes
        for number in range(start, self.num_batches):
            yield self._next(number)
        if not self._goes_on:
            left, self._batches = self._batches, None
            past.given = 0
            if left is not None and next(left, None) is not None:
                raise MisfitError(f"the loader has more batches than the {self.num_batches} that its length says")
        past.after = self._generators.states()

    def _set_epoch(self, epoch: int) -> None:
        for sampler in () if self._goes_on else with_epochs(self._loader):
            sampler.set_epoch(epoch)

    def _next(self, number: int) -> Any:
        for batches in (self._batches, None):
            if batches is None:
                self._past.begin, self._past.given = self._generators.states(), 0
            self._batches = iter(self._loader) if batches is None else batches
            marks = self._marks and self._reads
            before = self._generators.states() if marks and self._is_alone else []
            with naming_workers():
                found = next(self._batches, None) if self._reads else passed_over(self._batches)
            if found is not None:
                self._past.given += 1
                if marks:
                    self._past.last, self._past.before = self._past.given, before
                    self._sample = sample_of(found)
                return found
            if not self._goes_on:
                raise MisfitError(f"the loader ended after {number} batches; its length says {self.num_batches}")
        raise MisfitError("the loader has no batches")

    def state(self) -> bytes:
        """Return where the loader is, as plain data; raises `UsageError` where it keeps anything else."""
        saved = io.BytesIO()
        if self._sample is not None:
            self._past.mark, self._sample = mark_of(self._sample), None
        kept: dict[str, Any] = (
            {"loader": self._loader.state_dict()} if self.has_state else {"past": dict(vars(self._past))}
        )
        if self._passes_over and not self.has_state:
            kept["past"]["jumps"] = {}
        torch.save(kept | {"drawn": self._generators.states()}, saved)
        try:
            torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        except Exception as error:
            raise UsageError(
                f"the state of the loader, a {type(self._loader).__name__}, cannot be saved: it has to consist of "
                f"numbers, strings, tensors, lists and dicts: {error}"
            ) from error
        return saved.getvalue()

    def restore(self, state: bytes | None, epoch: int, batch: int, say: Say) -> None:
        """Let a loader that has not begun be `batch` batches into an epoch, as `state` says.

        Without a state, or with that of a loader of another kind, it gives all that come before, for nobody: of a
        sampler with `set_epoch` the epoch's, of any other all since the first epoch. `say` is told that it does so.
        """
        saved = {} if state is None else torch.load(io.BytesIO(state), weights_only=True)
        if "drawn" not in saved or self.has_state != ("loader" in saved):
            first = epoch if not self._goes_on and with_epochs(self._loader) else 0
            self._give_again(first, epoch, batch, {}, say)
            return
        if not self._generators.fit(saved["drawn"]):
            say(OTHER_GENERATORS)
        if self.has_state:
            self._load(saved["loader"], batch)
        elif self._passes_over:
            if not self._pass_over(Past(**saved["past"]), epoch):
                say(OTHER_DATA + REREAD)
        else:
            past = Past(**saved["past"])
            early = self._give_again(0, epoch, batch, past.jumps, say)
            now = self._generators.states()
            is_other = self._sample is not None and not is_marked(mark_of(self._sample), past.mark)
            is_shared = _is_shared(early, now, saved["drawn"])
            if is_shared or (is_other and _is_shared(now, self._past.before, past.before)):
                say(SHARED)
            elif is_other:
                say(OTHER_DATA)
        self._generators.set(saved["drawn"])

    def _load(self, state: Any, batch: int) -> None:
        """Give the loader its state.

        torchdata's loader draws from its generator whenever an iterator is made, and what was drawn is no part of its
        state; so it is made before generators are set.
        """
        self._loader.load_state_dict(state)
        self._past.given = batch
        holders = [self._loader, *samplers_of(self._loader)]
        draws = any(isinstance(getattr(holder, "generator", None), torch.Generator) for holder in holders)
        begun = iter(self._loader) if draws or batch or self._goes_on else None
        self._batches = begun if batch or self._goes_on else None

    def _pass_over(self, past: Past, epoch: int) -> bool:
        """Begin the latest pass again, and pass over the batches that it has given, but for the last one.

        Return whether that one has what it had. A pass that is over begins again for that alone, if without workers.
        """
        self._past = past
        number = past.given or (past.last if self._is_alone else 0)
        if not number:
            return True
        self._set_epoch(epoch if past.given else epoch - 1)
        self._generators.set(past.begin)
        self._batches = batches = iter(self._loader)
        reads, found = not knows_indices(batches), None
        for at in range(1, number + 1):
            is_last = at == past.last
            if is_last and past.before:
                self._generators.set(past.before)
            found = next(batches, None) if reads or is_last else passed_over(batches)
            if found is None:
                raise MisfitError(f"the loader ended after {at - 1} batches; it had given {number}")
        if not past.given:
            self._batches = None
        return number != past.last or is_marked(mark_of(sample_of(found)), past.mark)

    def _give_again(self, first: int, epoch: int, batch: int, jumps: Mapping[int, State], say: Say) -> State:
        """Give all batches from those of epoch `first` on, for nobody, with generators where they were then.

        Return where these were after the first batch of the epoch that has begun; nothing where none has.
        """
        batches = (epoch - first) * self.num_batches + batch
        if batches:
            say(f"there is no state that the loader could go on from: it gives {batches} batches once more")
        if type(self._loader) is DataLoader and self._passes_over:
            self._reads = self._loader.num_workers > 0
        for earlier in range(first, epoch):
            self._generators.set(jumps.get(earlier, []))
            for _ in self._epoch(earlier):
                pass
        drawn: State = []
        if batch:
            self._generators.set(jumps.get(epoch, []))
            for _ in islice(self._epoch(epoch), batch):
                drawn = drawn or self._generators.states()
        self._reads = True
        return drawn


def _is_shared(first: State, reached: State, saved: State) -> bool:
    """Whether a generator is not where it was that moves from batch to batch: then others drew from it in between."""
    states = zip(first, reached, saved, strict=False)
    return any(not is_alike(before, now) and not is_alike(now, was) for before, now, was in states)


def _length_of(loader: Any) -> int:
    """Return how many batches a pass has; 0: nobody says."""
    try:
        return len(loader)
    except TypeError:
        return 0


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

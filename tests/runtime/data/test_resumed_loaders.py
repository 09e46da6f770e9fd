"""Loaders without a state of their own, stopped behind any batch: another process gives the batches that were left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from quintsched.errors import MisfitError
from quintsched.runtime.data.generators import Generators, is_alike
from quintsched.runtime.data.loaders import LoaderFeed

ROWS = 14
EPOCHS = 3


class Rows(Dataset[Any]):
    """Sample i, with noise of the process's generators, or of its own."""

    def __init__(self, noise: str = "") -> None:
        self.noise = noise
        self.own = {"numpy": np.random.default_rng(5), "python": random.Random(5), "old": np.random.RandomState(5)}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        noise = 0.0
        if self.noise == "process":
            noise = float(torch.rand(())) + random.random() + np.random.rand()
        elif self.noise == "own":
            noise = self.own["numpy"].random() + self.own["python"].random() + self.own["old"].rand()
        return torch.tensor(index + noise), torch.tensor(index)


class Stream(IterableDataset[Any]):
    """Numbers that go on from pass to pass, in a buffer that is shuffled."""

    def __init__(self, length: int | None, *, draws: bool = False) -> None:
        self.numbers, self.length, self.draws = count(), length, draws
        self.own = np.random.default_rng(3)

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for at in count():
            if at == self.length:
                return
            buffer = [*buffer, next(self.numbers)] if len(buffer) > 3 else [next(self.numbers) for _ in range(5)]
            place = random.randrange(len(buffer)) if self.draws else int(self.own.integers(len(buffer)))
            number = buffer.pop(place)
            yield torch.tensor(number), torch.tensor(number)


class Secretive(Sampler[int]):
    """An order that depends on how often it was asked, which nobody sees."""

    def __init__(self) -> None:
        self._asked = 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        self._asked += 1
        return iter([index * 3 * self._asked % ROWS for index in range(ROWS)])


class Own:
    """A loader of nobody's: each pass begins where the one before ended."""

    def __init__(self) -> None:
        self._at = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self._at += 1
            yield torch.tensor([self._at]), torch.tensor([self._at])


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(6)


def loader(data: Any = None, **options: Any) -> Callable[[], Any]:
    """Return what makes a loader of 4 samples a batch, whose options are made anew with it."""

    def make() -> Any:
        made = {name: option() if callable(option) else option for name, option in options.items()}
        rows = Rows() if data is None else data()
        return DataLoader(rows, **({"batch_size": 4} if "batch_sampler" not in made else {}), **made)

    return make


Weighted = partial(WeightedRandomSampler, [1.0, 2.0] * 7, 15)
LOADERS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "plain": (loader(), None),
    "shuffled": (loader(shuffle=True), None),
    "by its own generator": (loader(shuffle=True, generator=own_generator), None),
    "with replacement": (loader(sampler=lambda: RandomSampler(range(ROWS), True, 40, own_generator())), None),
    "replaced by the process": (loader(sampler=lambda: RandomSampler(range(ROWS), True, 40)), None),
    "subset": (loader(sampler=lambda: SubsetRandomSampler(range(9), own_generator())), None),
    "weighted": (loader(sampler=Weighted), None),
    "by the epoch": (loader(sampler=lambda: DistributedSampler(range(ROWS), 2, 1)), None),
    "batches by the epoch": (
        loader(batch_sampler=lambda: BatchSampler(DistributedSampler(range(ROWS), 2, 0), 3, False)),
        None,
    ),
    "noise of the process": (loader(partial(Rows, "process"), shuffle=True), None),
    "noise of its own": (loader(partial(Rows, "own"), shuffle=True), None),
    "secretive": (loader(sampler=Secretive), None),
    "list": (lambda: [(torch.tensor([k]), torch.tensor([k])) for k in range(4)], None),
    "own": (Own, None),
    "endless stream": (loader(partial(Stream, None)), 4),
    "stream": (loader(partial(Stream, 11)), 4),
    "drawing stream": (loader(partial(Stream, 11, draws=True)), 4),
    "rows over epochs": (loader(shuffle=True), 3),
    "more rows than an epoch": (loader(partial(Rows, "process"), shuffle=True, generator=own_generator), 6),
    "iterated once": (lambda: ((torch.tensor([k]), torch.tensor([k])) for k in range(99)), 4),
}
WORKERS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "workers": (loader(partial(Rows, "process"), shuffle=True, num_workers=2), None),
    "workers' own": (loader(partial(Rows, "own"), shuffle=True, num_workers=2), None),
    "persistent": (loader(partial(Rows, "process"), shuffle=True, num_workers=1, persistent_workers=True), None),
    "stream of a worker": (loader(partial(Stream, 11), num_workers=1), 4),
}


def another_process(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def numbers(batch: Any) -> list[Any]:
    return [part.tolist() for part in batch if isinstance(part, Tensor)]


class Run:
    """A run over epochs, with a validation after each that draws from the generator of the process."""

    def __init__(self, make: Callable[[], Any], batches: int | None, seed: int) -> None:
        another_process(seed)
        self.feed = LoaderFeed(make(), batches)
        self.validation = LoaderFeed(DataLoader(Rows(), batch_size=7), None)
        self.said: list[str] = []

    def go_on(self, epoch: int, batch: int, *, saved: bool = True) -> Iterator[tuple[int, int, list[Any], bytes]]:
        """Yield epoch, batch, what it has, and the state behind it; at an epoch's end also behind the validation.

        If nothing is `saved`, the states are empty.
        """
        state = self.feed.state if saved else bytes
        for now in range(epoch, EPOCHS):
            for number, given in enumerate(self.feed.epoch(now, batch), batch):
                yield now, number + 1, numbers(given), state()
            batch = 0
            list(self.validation.epoch(0))
            yield now + 1, 0, [], state()


def require_resumable(make: Callable[[], Any], batches: int | None, every: int = 1) -> None:
    first = Run(make, batches, seed=1)
    whole = list(first.go_on(0, 0))
    reached = Generators().states()
    for at in range(0, len(whole) - 1, every):
        epoch, batch, _, state = whole[at]
        second = Run(make, batches, seed=2 + at)
        second.feed.restore(state, epoch, batch, second.said.append)
        left = list(second.go_on(epoch, batch, saved=False))
        assert [given[:3] for given in left] == [given[:3] for given in whole[at + 1 :]], (epoch, batch)
        assert is_alike(Generators().states(), reached)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_without_state_goes_on_behind_any_batch(kind: str) -> None:
    require_resumable(*LOADERS[kind])


@pytest.mark.processes
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", WORKERS)
def test_so_do_workers(kind: str) -> None:
    require_resumable(*WORKERS[kind], every=4)


def test_a_run_that_has_gone_on_can_do_so_again() -> None:
    for make, batches in (LOADERS["stream"], LOADERS["noise of the process"]):
        whole = list(Run(make, batches, seed=1).go_on(0, 0))
        state, at = whole[2][3], 2
        for seed, further in ((2, 3), (3, 4)):
            run = Run(make, batches, seed)
            run.feed.restore(state, *whole[at][:2], run.said.append)
            some = run.go_on(*whole[at][:2])
            for at in range(at + 1, at + further + 1):  # noqa: B020
                *now, state = next(some)
                assert tuple(now) == whole[at][:3]


def test_it_is_said_that_batches_are_given_again() -> None:
    states = {}
    for kind in ("stream", "shuffled"):
        run = Run(*LOADERS[kind], seed=1)
        states[kind] = [state for *_, state in run.go_on(0, 0)][5]
        run = Run(*LOADERS[kind], seed=2)
        run.feed.restore(states[kind], 1, 1, run.said.append)
        given = "there is no state that the loader could go on from: it gives 5 batches once more"
        assert run.said == ([given] if kind == "stream" else [])


def test_samples_that_nobody_wants_are_not_read() -> None:
    read: list[int] = []

    class Watched(Rows):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    make = loader(Watched, shuffle=True)
    states = [state for *_, state in Run(make, None, seed=1).go_on(0, 0)]
    read.clear()
    run = Run(make, None, seed=2)
    run.feed.restore(states[7], 1, 3, run.said.append)
    assert len(read) == 4, "the last batch alone, which is compared"
    read.clear()
    next(run.feed.epoch(1, 3))
    assert len(read) == 2


def test_training_that_draws_where_a_stream_draws_is_said() -> None:
    make, batches = LOADERS["drawing stream"]
    run = Run(make, batches, seed=1)
    states = []
    for *_, state in run.go_on(0, 0):
        random.random()
        states.append(state)
    run = Run(make, batches, seed=2)
    run.feed.restore(states[2], 0, 3, run.said.append)
    assert "the training draws from a generator that it draws its batches from" in run.said[-1]


@pytest.mark.parametrize("kind", ["own", "stream", "by the epoch", "by its own generator"])
def test_without_a_state_all_batches_are_given_again(kind: str) -> None:
    """As for another number of replicas: loaders are where they had been, had the run begun with these."""
    make, batches = LOADERS[kind]
    whole = list(Run(make, batches, seed=1).go_on(0, 0, saved=False))
    for at, (epoch, batch, *_) in enumerate(whole[:-1]):
        run = Run(make, batches, seed=2)
        run.feed.restore(None, epoch, batch, run.said.append)
        assert list(run.go_on(epoch, batch, saved=False)) == whole[at + 1 :]


def test_a_loader_that_became_shorter_is_refused() -> None:
    run = Run(loader(shuffle=True), None, seed=1)
    state = [state for *_, state in run.go_on(0, 0)][2]
    feed = LoaderFeed(DataLoader(range(8), batch_size=4), None)  # type: ignore[arg-type]
    with pytest.raises(MisfitError, match="the loader ended after 2 batches; it had given 3"):
        feed.restore(state, 0, 3, print)

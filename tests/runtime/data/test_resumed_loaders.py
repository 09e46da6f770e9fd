"""Loaders that resume by a position, stopped behind any batch: another process gives the batches that were left."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
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

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.data.same_data_on_resume import is_marked, mark_of, sample_of
from quintsched.runtime.data.user_loaders import OTHER_DATA, Generators, LoaderFeed

ROWS = 14
EPOCHS = 3


class Rows(Dataset[Any]):
    """Sample i, with noise of the process's generators, of one of its own, or by how many samples were read."""

    def __init__(self, noise: str = "") -> None:
        self.noise, self.own, self.read = noise, np.random.default_rng(5), 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        noise = 0.0
        if self.noise == "process":
            noise = float(torch.rand(())) + random.random() + np.random.rand()
        elif self.noise == "own":
            noise = self.own.random()
        elif self.noise == "read":
            self.read += 1
            noise = self.read / 100
        return torch.tensor(index + noise), torch.tensor(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.tensor(at), torch.tensor(at)) for at in count())


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
by_epoch = partial(DistributedSampler, range(ROWS), 2, 1)
LOADERS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "plain": (loader(), None),
    "shuffled": (loader(shuffle=True), None),
    "by its own generator": (loader(shuffle=True, generator=own_generator), None),
    "with replacement": (loader(sampler=lambda: RandomSampler(range(ROWS), True, 40, own_generator())), None),
    "replaced by the process": (loader(sampler=lambda: RandomSampler(range(ROWS), True, 40)), None),
    "subset": (loader(sampler=lambda: SubsetRandomSampler(range(9), own_generator())), None),
    "weighted": (loader(sampler=Weighted), None),
    "by the epoch": (loader(sampler=by_epoch), None),
    "batches by the epoch": (loader(batch_sampler=lambda: BatchSampler(by_epoch(), 3, False)), None),
    "noise of the process": (loader(partial(Rows, "process"), shuffle=True), None),
    "list": (lambda: [(torch.tensor([k]), torch.tensor([k])) for k in range(4)], None),
    "rows over epochs": (loader(shuffle=True), 3),
    "more rows than an epoch": (loader(partial(Rows, "process"), shuffle=True, generator=own_generator), 6),
}
REFUSED: dict[str, tuple[Callable[[], Any], int | None, str]] = {
    "stream": (loader(Stream), 4, "a DataLoader, is: its data set, a Stream, has no index"),
    "secretive": (loader(sampler=Secretive), None, r"sampler, a Secretive, follows from no epoch \(set_epoch\)"),
    "own": (Own, None, "a Own, is: it is not torch's DataLoader"),
    "persistent": (loader(num_workers=1, persistent_workers=True), None, "its workers outlive an epoch"),
    "iterated once": (lambda: ((torch.tensor([k]), torch.tensor([k])) for k in range(99)), 4, "a generator, is"),
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


def reached_states() -> list[Any]:
    return [state.tolist() if isinstance(state, Tensor) else state for state in tree_leaves(Generators().states())]


def require_resumable(make: Callable[[], Any], batches: int | None, every: int = 1) -> None:
    first = Run(make, batches, seed=1)
    whole = list(first.go_on(0, 0))
    reached = reached_states()
    for at in range(0, len(whole) - 1, every):
        epoch, batch, _, state = whole[at]
        second = Run(make, batches, seed=2 + at)
        second.feed.restore(state, epoch, batch, second.said.append)
        left = list(second.go_on(epoch, batch, saved=False))
        assert [given[:3] for given in left] == [given[:3] for given in whole[at + 1 :]], (epoch, batch)
        assert reached_states() == reached


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_goes_on_behind_any_batch(kind: str) -> None:
    require_resumable(*LOADERS[kind])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_neither_state_nor_position_is_refused_as_it_is_saved(kind: str) -> None:
    make, batches, words = REFUSED[kind]
    given = make()
    feed = LoaderFeed(given, batches)
    with pytest.raises(UsageError, match=rf"where the loader, .*{words}.*; use torchdata.* load_state_dict\(state\)"):
        feed.state()


@pytest.mark.parametrize(("kind", "batches"), [("read", None), ("own", 3)])
def test_other_data_of_the_last_batch_are_said(kind: str, batches: int | None) -> None:
    make = loader(partial(Rows, kind), shuffle=True)
    whole = list(Run(make, batches, seed=1).go_on(0, 0))
    for at, (epoch, batch, _, state) in enumerate(whole[:-1]):
        run = Run(make, batches, seed=2)
        run.feed.restore(state, epoch, batch, run.said.append)
        left = list(run.go_on(epoch, batch, saved=False))
        is_exact = [given[:3] for given in left] == [given[:3] for given in whole[at + 1 :]]
        assert is_exact or run.said == [OTHER_DATA]
    assert run.said


def test_a_mark_tells_batches_apart() -> None:
    batch = {"ids": torch.arange(5000.0).reshape(50, 100), "labels": [torch.tensor([1, 2]), np.arange(3)], "name": "a"}
    mark = mark_of(sample_of(batch))
    assert is_marked(mark_of(sample_of(batch)), mark)
    assert is_marked(mark_of(sample_of({**batch, "ids": batch["ids"].t().contiguous().t()})), mark)  # type: ignore[attr-defined]
    for name, other in {"ids": batch["ids"] + 1, "labels": [torch.tensor([2, 1])], "name": "b"}.items():  # type: ignore[operator]
        assert not is_marked(mark_of(sample_of({**batch, name: other})), mark)
    assert mark_of(sample_of({"none": None, "empty": torch.ones(0), "kind": torch.ones(3, dtype=torch.bfloat16)}))


def test_a_loader_that_became_shorter_is_refused() -> None:
    run = Run(loader(shuffle=True), None, seed=1)
    state = [state for *_, state in run.go_on(0, 0)][2]
    feed = LoaderFeed(DataLoader(range(8), batch_size=4), None)  # type: ignore[arg-type]
    with pytest.raises(MisfitError, match="the loader ended after 2 batches; it had given 3"):
        feed.restore(state, 0, 3, print)

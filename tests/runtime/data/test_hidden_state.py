"""Loaders whose data depend on more than one sees: they go on exactly where it is found, and say so where it is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from quintsched.runtime.data.loaders import OTHER_DATA, OTHER_GENERATORS, REREAD, SHARED, LoaderFeed
from quintsched.runtime.data.marks import is_marked, mark_of, sample_of, scattered

EPOCHS, ROWS = 2, 14

GLOBAL: Any = None
OLD: Any = None
HIDDEN: dict[str, Any] = {}


class Rows(Dataset[Any]):
    """Sample i, with some noise."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index + self.noise()), torch.tensor(index)

    def noise(self) -> float:
        return 0.0


class OfGlobals(Rows):
    def noise(self) -> float:
        return float(GLOBAL.random() + OLD.rand())


class OfClass(Rows):
    generator = random.Random(1)

    def noise(self) -> float:
        return self.generator.random()


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self) -> float:
        return float(torch.rand((), generator=self.generator))


class OfTransform(Rows):
    def __init__(self) -> None:
        self.noise = nn.Sequential(Noise())  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index + self.noise[0]()), torch.tensor(index)  # type: ignore[index]


class Counting(Rows):
    def __init__(self, *, shows: bool = True) -> None:
        self.calls, self.shows = 0, shows

    def noise(self) -> float:
        self.calls += 1
        return self.calls / 100 if self.shows else 0.0


class OfMany(Rows):
    """Draws from generators in a list as long as data."""

    def __init__(self) -> None:
        self.generators = [np.random.default_rng(at) for at in range(100)]

    def noise(self) -> float:
        return float(self.generators[7].random())


class Dawdling(IterableDataset[Any]):
    """Another number each time, in another process too."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(ROWS):
            HIDDEN["time"] += 1
            yield torch.tensor([index, HIDDEN["time"]]), torch.tensor(index)


class Drawing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(ROWS):
            yield torch.tensor(index + random.random()), torch.tensor(index)


def another_process(seed: int) -> None:
    """Let all that a process begins with be anew."""
    global GLOBAL, OLD
    GLOBAL, OLD, OfClass.generator = np.random.default_rng(4), np.random.RandomState(5), random.Random(6)
    HIDDEN["time"] = 1000 * seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


Given = tuple[int, int, list[Any]]
SHUFFLED = {"batch_size": 4, "shuffle": True}


class Run:
    """A run over epochs, whose training draws from the generators of the process."""

    def __init__(self, make: Callable[[], Any], seed: int, batches: int | None, **options: Any) -> None:
        another_process(seed)
        loader = DataLoader(make(), **({"batch_size": 4} if make in (Dawdling, Drawing) else SHUFFLED))
        self.feed = LoaderFeed(loader, batches, **options)
        self.said: list[str] = []

    def go_on(self, epoch: int, batch: int) -> Iterator[Given]:
        """Yield epoch, batch, and what it has; at an epoch's end nothing."""
        for now in range(epoch, EPOCHS):
            for number, given in enumerate(self.feed.epoch(now, batch), batch):
                random.random()
                yield now, number + 1, [part.tolist() for part in given if isinstance(part, Tensor)]
            torch.rand(())
            batch = 0
            yield now + 1, 0, []


def resumed(
    make: Callable[[], Any], batches: int | None = None, **options: Any
) -> Iterator[tuple[int, bool, set[str]]]:
    """Yield for each state of a run: its place, whether another process goes on exactly from it, and what it says."""
    first = Run(make, 1, batches, **options)
    whole = [(given, first.feed.state()) for given in first.go_on(0, 0)]
    for at, ((epoch, batch, _), state) in enumerate(whole[:-1]):
        run = Run(make, 2 + at, batches, **options)
        run.feed.restore(state, epoch, batch, run.said.append)
        left = list(run.go_on(epoch, batch))
        said = {words for words in run.said if "once more" not in words or "other data" in words}
        yield at, left == [given for given, _ in whole[at + 1 :]], said


@pytest.mark.parametrize("kind", [OfGlobals, OfClass, OfTransform])
@pytest.mark.parametrize("batches", [None, 3])
def test_what_is_found_goes_on(kind: type, batches: int | None) -> None:
    for _, is_exact, said in resumed(kind, batches):
        assert is_exact
        assert not said


@pytest.mark.parametrize("kind", [Counting, OfMany])
@pytest.mark.parametrize("batches", [None, 3])
def test_what_is_not_found_is_said(kind: type, batches: int | None) -> None:
    found = list(resumed(kind, batches))
    assert not all(is_exact for _, is_exact, _ in found)
    for _, is_exact, said in found:
        assert is_exact or said == {OTHER_DATA + REREAD}


@pytest.mark.parametrize("kind", [Counting, OfMany])
@pytest.mark.parametrize("batches", [None, 3])
def test_who_rereads_goes_on_exactly(kind: type, batches: int | None) -> None:
    for _, is_exact, said in resumed(kind, batches, rereads=True):
        assert is_exact
        assert not said


def test_a_count_that_changes_no_data_is_nothing_to_speak_of() -> None:
    for _, is_exact, said in resumed(lambda: Counting(shows=False)):
        assert is_exact
        assert not said


def test_a_stream_that_is_not_deterministic_is_said() -> None:
    found = list(resumed(Dawdling, 4))
    assert not any(is_exact for _, is_exact, _ in found[:-1])
    assert all(said == {OTHER_DATA} for *_, said in found)


def test_training_that_draws_where_a_stream_draws_is_said() -> None:
    for at, is_exact, said in resumed(Drawing, 4):
        assert is_exact or said == {SHARED}
        assert at < 1 or said


def test_other_generators_are_said() -> None:
    run = Run(OfGlobals, 1, None)
    state = [run.feed.state() for _ in run.go_on(0, 0)][1]
    run = Run(OfClass, 2, None)
    run.feed.restore(state, 0, 2, run.said.append)
    assert OTHER_GENERATORS in run.said


def test_a_mark_tells_batches_apart() -> None:
    batch = {"ids": torch.arange(5000.0).reshape(50, 100), "labels": [torch.tensor([1, 2]), np.arange(3)], "name": "a"}
    mark = mark_of(sample_of(batch))
    assert is_marked(mark_of(sample_of(batch)), mark)
    assert is_marked(mark_of(sample_of({**batch, "ids": batch["ids"].t().contiguous().t()})), mark)  # type: ignore[attr-defined]
    for name, other in {"ids": batch["ids"] + 1, "labels": [torch.tensor([2, 1])], "name": "b"}.items():  # type: ignore[operator]
        assert not is_marked(mark_of(sample_of({**batch, name: other})), mark)
    assert is_marked(mark_of(sample_of({**batch, "ids": torch.zeros(50, 100), "labels": None})), mark)
    assert not is_marked(mark_of(sample_of(torch.ones(3))), mark_of(sample_of(torch.zeros(3))))
    assert mark_of(sample_of({"none": None, "empty": torch.ones(0), "kind": torch.ones(3, dtype=torch.bfloat16)}))


def test_a_mark_is_of_what_was_given_whatever_becomes_of_it() -> None:
    batch = torch.arange(6.0)
    sample = sample_of(batch)
    batch.zero_()
    assert mark_of(sample) == mark_of(sample_of(torch.arange(6.0)))


def test_marks_of_earlier_runs_still_say_the_same() -> None:
    places = scattered(5000, 1024)
    assert (len(set(places.tolist())), places[:4].tolist()) == (1024, [0, 761, 1522, 2283])
    assert mark_of(sample_of({"x": torch.arange(5000.0)})) == {"/x": [1847380588, 0]}

"""Packed streams: batches against a plain concatenation, on any number of replicas, stopped behind any batch."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch

from quintsched.errors import UsageError
from quintsched.runtime.data import PackedStream
from quintsched.runtime.data.user_loaders import LoaderFeed

TEXTS = [str(number) * (1 + number * 7 % 5) for number in range(10, 60)]
END = 0


class Source:
    """Documents with a state and epochs, as an `IterableDataset` of Hugging Face has them."""

    def __init__(self) -> None:
        self.at, self.turn, self.begun = 0, 0, 0

    def set_epoch(self, turn: int) -> None:
        self.turn = turn

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(TEXTS):
            self.at += 1
            self.begun += 1
            yield {"text": TEXTS[self.at - 1] + "x" * self.turn, "more": 1}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


SOURCES: dict[str, Callable[[], Iterable[Any]]] = {
    "texts": lambda: TEXTS,
    "ids": lambda: [list(text.encode()) for text in TEXTS],
    "mappings": lambda: [{"text": text} for text in TEXTS],
    "with a state": Source,
}
stream = partial(PackedStream, sequence=5, batch_size=4, end=END)


def rows(batches: Iterable[Any]) -> list[Any]:
    return [(inputs.tolist(), targets.tolist()) for inputs, targets, *_ in batches]


@pytest.mark.parametrize("name", SOURCES)
def test_documents_are_packed_one_after_the_other(name: str) -> None:
    found = rows(stream(SOURCES[name]()))
    ids = b"".join(text.encode() + b"\0" for text in TEXTS)
    assert len(found) == (len(ids) - 1) // 20 > 5
    for number, (inputs, targets) in enumerate(found):
        assert bytes(chain(*inputs)) == ids[20 * number : 20 * number + 20]
        assert bytes(chain(*targets)) == ids[20 * number + 1 : 20 * number + 21]
    assert [len(row) for row in found[0][0]] == [5] * 4


def test_replicas_share_the_batches_of_one() -> None:
    whole = rows(stream(TEXTS))
    parts = [rows(stream(TEXTS, replica=replica, num_replicas=2)) for replica in range(2)]
    joined = [(a + c, b + d) for (a, b), (c, d) in zip(*parts, strict=True)]
    assert joined == whole


@pytest.mark.parametrize("name", SOURCES)
def test_a_feed_goes_on_behind_any_batch_over_passes(name: str) -> None:
    """As a job does: three epochs of 4 batches each, which are more than a pass."""

    def feed(**options: int) -> LoaderFeed:
        return LoaderFeed(stream(SOURCES[name](), **options), 4)

    unbroken = feed()
    expected = [rows(unbroken.epoch(epoch)) for epoch in range(3)]
    assert len({str(batch) for epoch in expected for batch in epoch}) > 8
    for stop in range(12):
        epoch, batch = divmod(stop, 4)
        before = feed()
        for earlier in range(epoch):
            rows(before.epoch(earlier))
        begun = before.epoch(epoch)
        for _ in range(batch):
            next(begun)
        after = feed()
        after.restore(before.state(), epoch, batch, pytest.fail)
        assert rows(after.epoch(epoch, batch)) == expected[epoch][batch:]
        assert [rows(after.epoch(later)) for later in range(epoch + 1, 3)] == expected[epoch + 1 :]


def test_other_replicas_go_on_to_the_sample() -> None:
    expected = rows(stream(TEXTS))
    said: list[str] = []
    found = []
    for replica in range(2):
        after = LoaderFeed(stream(TEXTS, replica=replica, num_replicas=2), 4)
        after.restore(None, 0, 3, said.append)
        found.append(rows(after.epoch(0, 3)))
    assert [(a + c, b + d) for (a, b), (c, d) in zip(*found, strict=True)] == expected[3:4]
    assert "gives 3 batches once more" in said[0]


def test_what_is_refused() -> None:
    for options, words in (
        ({"sequence": 0}, "sequence=0"),
        ({"num_replicas": 3}, "that its replicas divide; .*batch_size=4, replica=0, num_replicas=3"),
        ({"replica": 1}, "replica=1, num_replicas=1"),
    ):
        with pytest.raises(UsageError, match=words):
            stream(TEXTS, **options)
    for documents, words in (
        ((text for text in TEXTS), "a generator can be iterated once"),
        ([{"body": "x"}], "document 0 has no 'text'; say field=…: body"),
        ([[0.5]], r"document 0 is neither a text nor ids in a row: \[0.5\]"),
    ):
        with pytest.raises(UsageError, match=words):
            next(iter(stream(documents)))
    many = torch.utils.data.DataLoader(stream(TEXTS), batch_size=None, num_workers=2)
    with pytest.raises(UsageError, match="is read by one worker, not by 2: set num_workers=1"):
        next(iter(many))

"""Ranks of one attempt meet, whatever an attempt before has left in the store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from quintsched.errors import StallError
from quintsched.runtime.watch.rendezvous.rendezvous_store import Attempt, meet


def new_store() -> dist.Store:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=20))
    return store


def all_meet(store: dist.Store, ranks: int, order: list[int] | None = None) -> list[Attempt]:
    with ThreadPoolExecutor(ranks) as pool:
        made = {rank: pool.submit(meet, store, rank, ranks, 20.0) for rank in order or range(ranks)}
        return [made[rank].result() for rank in range(ranks)]


def test_attempts_are_numbered_and_have_keys_of_their_own() -> None:
    store = new_store()
    for number in (1, 2, 3):
        attempts = all_meet(store, 3, order=[2, 0, 1] if number == 2 else None)
        assert [attempt.number for attempt in attempts] == [number] * 3
        assert not attempts[0].store.check(["address"])
        attempts[0].store.set("address", f"of attempt {number}")
        assert attempts[2].store.get("address").decode() == f"of attempt {number}"


def test_an_attempt_goes_on_with_a_run_that_had_begun() -> None:
    """One that failed before it had opened its folder leaves nothing to go on with."""
    store = new_store()
    first = all_meet(store, 2)
    second = all_meet(store, 2)
    assert not any(attempt.goes_on for attempt in (*first, *second))
    second[0].record_begin()
    assert all(attempt.goes_on for attempt in all_meet(store, 2))


def test_ranks_that_come_after_a_hello_of_a_dead_one_are_answered() -> None:
    """Rank 1 said hello and was killed; rank 0 answers that, and then what comes instead."""
    store = new_store()
    store.set("quintsched/hello/1", "left by the dead")
    late = threading.Timer(0.3, lambda: meet(store, 1, 2, 20.0))
    late.start()
    assert meet(store, 0, 2, 20.0).number == 1
    late.join()


def test_who_does_not_come_is_named() -> None:
    store = new_store()
    with ThreadPoolExecutor(2) as pool:
        there = [pool.submit(meet, store, rank, 4, 20.0) for rank in (1,)]
        with pytest.raises(StallError, match=r"waiting 0\.2 s for all ranks to come together: ranks 2 and 3 did not"):
            meet(store, 0, 4, 0.2)
        there[0].result()
    store = new_store()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(StallError, match="rank 0 did not"):
        meet(store, 1, 2, 0.2)

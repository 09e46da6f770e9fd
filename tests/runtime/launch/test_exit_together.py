"""Ranks that find a fault before they are connected: one word of all, or one of each that is not of all."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from quintsched.errors import UsageError
from quintsched.runtime.launch import worker
from quintsched.runtime.launch.worker import leave_together
from quintsched.runtime.watch.hang_monitor import Hub

ERROR = UsageError("model.py:3: the import failed: ValueError")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what ranks say, of two that meet in a store."""
    words, store = list[str](), dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("QUINTSCHED_WATCH", raising=False)
    monkeypatch.setattr(worker, "WAIT_S", 0.3)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker, "_open_store", lambda: store)
    monkeypatch.setattr(worker, "write_error", lambda error: words.append(str(error)))
    return words


def test_what_all_ranks_find_is_said_once_and_of_nobody(said: list[str]) -> None:
    with ThreadPoolExecutor(2) as ranks:
        codes = list(ranks.map(leave_together, [ERROR, ERROR], [0, 1]))
    assert (codes, said) == ([2, 2], [str(ERROR)])


def test_what_one_rank_finds_is_said_of_that_rank(said: list[str]) -> None:
    assert (leave_together(ERROR, 1), said) == (2, [f"rank 1: {ERROR}"])


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_what_the_launcher_says_no_rank_says_as_well(
    said: list[str], monkeypatch: pytest.MonkeyPatch, ranks: list[int]
) -> None:
    late_s = 0.3 if len(ranks) == 1 else 20.0
    monkeypatch.setattr("quintsched.runtime.watch.verdict_timing.LATE_REFUSAL_S", late_s)
    monkeypatch.setattr(worker, "HEARD_WAITS_S", late_s + 1.0)
    hub = Hub(2, tell=lambda verdict: said.append(verdict.message))
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    hub.start()
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(leave_together, [ERROR] * len(ranks), ranks)) == {2}
    hub.close()
    (words,) = said
    assert words == str(ERROR) if len(ranks) == 2 else words.startswith(f"rank {ranks[0]} (host ")

"""Accelerators, on made-up machines as there is none here; links between a rank's memory and its host's."""

import time

import pytest
import torch

import quintsched as qs
from quintsched.runtime.comm import Transport, device
from quintsched.runtime.comm.choose_transport import choose_library, connect_for
from quintsched.runtime.comm.host_copies import HostLink, TimedLink


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int) -> list[torch.device]:
    """Let the machine have `count` accelerators of a kind; returns those that are made the current one."""
    chosen: list[torch.device] = []
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setenv(device.QUEUES, "32")
    return chosen


@pytest.mark.parametrize(
    ("kind", "count", "local_ranks", "library"),
    [
        (None, 0, 1, "gloo"),
        ("cuda", 1, 1, "nccl"),
        ("cuda", 8, 8, "nccl"),
        ("cuda", 8, 4, "nccl"),
        ("cuda", 1, 4, "gloo"),
        ("cuda", 7, 8, "gloo"),
        ("xpu", 2, 2, "xccl"),
        ("xpu", 1, 2, "gloo"),
        ("mps", 1, 1, "gloo"),
    ],
)
def test_gloo_takes_over_where_ranks_would_share_a_device(kind, count, local_ranks, library, monkeypatch):
    pretend(monkeypatch, kind, count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    assert choose_library() == library


def test_nccl_may_share_a_device_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pretend(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_library() == "gloo"
    with pytest.raises(qs.MisfitError, match=r"local rank 3 wants a device to itself and there are 1; .* choose gloo"):
        device.claim_device("nccl")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_library() == "nccl"
    assert device.claim_device("nccl") == torch.device("cuda", 0) == chosen[-1]


@pytest.mark.parametrize(("kind", "expected"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")])
def test_one_process_takes_the_device_that_there_is(kind, expected, monkeypatch):
    pretend(monkeypatch, kind, 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    transport: Transport = connect_for(qs.compile("1f1b", mesh="pp=1", microbatches=1), 1.0)
    assert transport.device.type == expected


BYTES = [torch.arange(400, dtype=torch.uint8), torch.zeros(600, dtype=torch.uint8)]


@pytest.mark.parametrize("link", [HostLink(), TimedLink(1e9)])
def test_what_goes_comes_back_in_memory_of_its_own(link: HostLink) -> None:
    on_host, away = link.to_host(BYTES)
    away.wait()
    link.release(away)
    on_device, back = link.to_device(on_host)
    back.wait()
    for there, home in zip(on_device, BYTES, strict=True):
        assert torch.equal(there, home)
        assert there.data_ptr() != home.data_ptr()
    assert away.begin <= away.end
    assert back.begin <= back.end


def test_copies_of_one_way_queue_and_the_other_way_is_free() -> None:
    link = TimedLink(50e3)  # 1000 bytes in 20 ms
    began = time.perf_counter()
    on_host, first = link.to_host(BYTES)
    _, second = link.to_host(BYTES)
    _, back = link.to_device(on_host)
    assert first.begin == pytest.approx(began, abs=0.01)
    assert first.end - first.begin == pytest.approx(0.02)
    assert second.begin == first.end
    assert back.begin < second.begin
    second.wait()
    assert time.perf_counter() >= second.end == pytest.approx(first.begin + 0.04)

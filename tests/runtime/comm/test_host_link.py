"""Links between a rank's memory and its host's: a timed one carries one copy at a time each way."""

from __future__ import annotations

import math
import time

import pytest
import torch

import quintsched as qs
from quintsched.runtime.comm import LocalWorld
from quintsched.runtime.comm.host_copies import HostLink, TimedLink

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


def test_what_comes_back_waits_for_room_that_was_released() -> None:
    link = TimedLink(50e3)
    on_host, away = link.to_host(BYTES)
    link.release(away)
    _, back = link.to_device(on_host)
    assert back.begin == away.end


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_speed_is_refused(bandwidth: float) -> None:
    with pytest.raises(qs.UsageError, match="a link to the host cannot move"):
        LocalWorld(2, host_bandwidth=bandwidth)

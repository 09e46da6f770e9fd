"""Accelerator interface of the runtime, on made-up machines, as there is none here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, device, random_generators
from quintsched.runtime.comm.choose_transport import choose_library, connect_for

CPU = torch.device("cpu")


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
def test_gloo_takes_over_where_ranks_would_share_a_device(
    kind: str | None, count: int, local_ranks: int, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind, count)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    assert choose_library() == library


def test_nccl_may_share_a_device_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = pretend(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_library() == "gloo"
    with pytest.raises(MisfitError, match=r"local rank 3 wants a device to itself and there are 1; .* choose gloo"):
        device.claim_device("nccl")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert choose_library() == "nccl"
    assert device.claim_device("nccl") == torch.device("cuda", 0) == chosen[-1]


def test_streams_must_have_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.QUEUES, "8")
    device.require_queues(0, 8)
    with pytest.raises(MisfitError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=8, but rank 2 has 9 streams"):
        device.require_queues(2, 9)


def test_generators_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the generators of the host and, by way of its module, those of a device."""
    gpu, kept = torch.device("xpu", 1), {torch.device("xpu", 1): torch.tensor([7])}
    module = SimpleNamespace(get_rng_state=kept.__getitem__, set_rng_state=lambda state, of: kept.update({of: state}))
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    for of in (CPU, gpu):
        states = random_generators.generator_states(of)
        first, kept[gpu] = torch.rand(3), torch.tensor([8])
        random_generators.restore_generators(of, states)
        assert torch.equal(torch.rand(3), first)
        assert kept[gpu].item() == (7 if of == gpu else 8)
        kept[gpu] = torch.tensor([7])


@pytest.mark.parametrize(("kind", "expected"), [("cuda", "cuda"), ("xpu", "xpu"), ("mps", "cpu"), (None, "cpu")])
def test_one_process_takes_the_device_that_there_is(
    kind: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind, 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    transport: Transport = connect_for(qs.compile("1f1b", mesh="pp=1", microbatches=1), 1.0)
    assert transport.device.type == expected


def test_a_library_of_several_backends_stands_for_the_cpu() -> None:
    assert device.current_device("cpu:gloo,cuda:nccl") == device.current_device("gloo") == CPU

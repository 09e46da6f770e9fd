"""Real processes over gloo, four of them and two by NCCL's rules; and what can be said of connecting without any."""

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quintsched.errors import MisfitError, StallError, UsageError
from quintsched.runtime.comm import Group, SelfGroup, Transport, as_group, connect
from quintsched.runtime.comm.torch_backends import require_same_backend
from quintsched.runtime.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

from ..ranks import free_port, run_ranks
from .group_checks import CHAIN, WORLD, check_collectives, make_groups


def check_groups(t: Transport) -> None:
    trio, pair, world = make_groups(t)
    assert trio.ranks == ((0, 1, 2) if t.rank < 3 else (3,))
    assert isinstance(pair, SelfGroup) == (t.rank < 2)
    for group in (trio, pair, world):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            check_collectives(t, group, dtype)


def check_messages(t: Transport) -> None:
    """Rank 0 sends three tags forward, each rank passes them on; receives are posted in another order."""
    t.open_channels(CHAIN)
    buffers = {tag: torch.full((2, 2), float(tag), dtype=torch.bfloat16) for tag in (1, 2, 70_000)}
    if t.rank > 0:
        works = [t.recv(buffer.zero_(), t.rank - 1, tag) for tag, buffer in reversed(buffers.items())]
        for work in works:
            work.wait()
        assert all(buffer.eq(tag).all() for tag, buffer in buffers.items() if tag < 256)
    if t.rank < WORLD - 1:
        works = [t.send(buffer, t.rank + 1, tag) for tag, buffer in buffers.items()]
        for work in works:
            work.wait()


def check_process_groups() -> None:
    """A plain ProcessGroup will do for tensor parallelism."""
    torch.manual_seed(0)
    full = nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)})
    x = torch.randn(3, 4)
    expected = full["fc2"](full["fc1"](x))
    assert dist.group.WORLD is not None
    assert as_group(dist.group.WORLD).ranks == tuple(range(WORLD))
    cut = apply_tensor_parallel(full, dist.group.WORLD)
    torch.testing.assert_close(cut["fc2"](cut["fc1"](x)), expected)


def fall_over(t: Transport) -> dict[str, object]:
    """Rank 3 is gone at a stroke, rank 2 sees it and fails for a reason of its own; all name rank 3 as the first."""
    if t.rank == 3:
        os._exit(9)
    began = time.monotonic()
    try:
        t.recv(torch.zeros(2), t.rank + 1, 5).wait()
    except StallError as error:
        told = {"error": str(error), "cause": type(error.__cause__).__name__, "after_s": time.monotonic() - began}
        t.abort(ValueError("bad batch") if t.rank == 2 else error)
        began = time.monotonic()
        t.close()
        return {**told, "close_s": time.monotonic() - began}
    return {}


def run_rank(folder: Path) -> None:
    transport, rank = connect("gloo", timeout_s=60), int(os.environ["RANK"])
    assert (transport.name, transport.profile, transport.rank, transport.world_size) == ("gloo", "tagged", rank, WORLD)
    check_groups(transport)
    check_messages(transport)
    check_process_groups()
    (folder / f"{rank}.json").write_text(json.dumps(fall_over(transport)))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_four_processes_over_gloo_until_one_dies(tmp_path: Path) -> None:
    assert run_ranks(run_rank, WORLD, tmp_path) == [0, 0, 0, 9]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(t["after_s"] < 20 and t["close_s"] < 5 and t["cause"] == "RuntimeError" for t in told)
    assert {t["error"] for t in told} & {  # as far as the system still knew what became of it
        f"rank 3 (host {socket.gethostname()}) {ended} setting up"
        for ended in ("ended with exit code 9", "ended, nobody saw how,")
    }
    assert len({t["error"] for t in told}) == 1


def check_order(t: Transport) -> None:
    """The k-th send meets the k-th receive though their tags say otherwise, and waits may come in any order."""
    tensors = [torch.full((3,), float(i)) for i in range(4)]
    if t.rank == 1:
        for tensor in tensors:
            tensor.zero_()
    move = t.send if t.rank == 0 else t.recv
    works = [move(tensor, 1 - t.rank, tag if t.rank == 0 else 3 - tag) for tag, tensor in enumerate(tensors)]
    for work in reversed(works):
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0, 3.0]


def check_rendezvous(t: Transport, group: Group) -> None:
    """A send is done when its receive is there, not before; the other direction does not wait for it."""
    posted, token = torch.zeros(1, dtype=torch.float64), torch.ones(1)
    if t.rank == 0:
        work = t.send(token, 1, 0)
        t.recv(token.clone(), 1, 0).wait()
        work.wait()
        done = time.monotonic()
    else:
        t.send(token, 0, 0).wait()
        time.sleep(0.1)
        posted += time.monotonic()
        t.recv(token, 0, 0).wait()
        done = time.monotonic()
    group.broadcast(posted, 1).wait()
    assert done >= posted.item()


def stall(t: Transport) -> dict[str, object]:
    """Both ranks send before they receive: a deadlock where a send is a rendezvous."""
    began = time.monotonic()
    try:
        t.send(torch.zeros(2), 1 - t.rank, 7).wait()
    except StallError as error:
        told = {"error": str(error), "after_s": time.monotonic() - began}
        t.abort(error)
        began = time.monotonic()
        t.close()
        return {**told, "close_s": time.monotonic() - began, "threads": threading.active_count()}
    return {}


def run_fifo_rank(folder: Path) -> None:
    transport = connect("gloo", timeout_s=3, rules="nccl")
    assert (transport.name, transport.profile) == ("gloo", "channel")
    group = transport.make_group([(0, 1)])
    transport.open_channels([(0, 1), (1, 0)])
    check_order(transport)
    check_rendezvous(transport, group)
    check_collectives(transport, group, torch.float32)
    (folder / f"{transport.rank}.json").write_text(json.dumps(stall(transport)))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_gloo_by_the_rules_of_nccl_until_it_stalls(tmp_path: Path) -> None:
    assert run_ranks(run_fifo_rank, 2, tmp_path) == [0, 0]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(t["after_s"] < 10 and t["close_s"] < 5 and t["threads"] == 1 for t in told)
    assert max(t["after_s"] for t in told) >= 3
    for rank in range(2):
        assert f"rank {rank} sending to rank {1 - rank}: float32 (2,), tag 0: " in told[rank]["error"]


def test_a_backend_is_held_to_rules_that_it_can_follow() -> None:
    with pytest.raises(UsageError, match="gloo cannot follow the rules 'mailbox', only rendezvous, nccl"):
        connect("gloo", rules="mailbox")
    with pytest.raises(UsageError, match="nccl cannot follow the rules 'rendezvous', only nccl"):
        connect("nccl", rules="rendezvous")


def test_connecting_without_torchrun_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match=r"RANK.* not in the environment; start the ranks with torchrun"):
        connect("gloo")


def test_unknown_backends_are_refused_and_one_of_ours_suggested() -> None:
    with pytest.raises(UsageError, match=r"unknown transport 'ncl'; did you mean 'nccl'"):
        connect("ncl")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_device_says_so() -> None:
    with pytest.raises(MisfitError, match="nccl wants a CUDA device"):
        connect("nccl")


def test_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    transport = connect("gloo", timeout_s=10)
    assert isinstance(transport.make_group([(0,)]), SelfGroup)
    transport.open_channels([])
    transport.close()
    transport.close()
    assert not dist.is_initialized()


def test_ranks_that_come_with_different_backends_are_refused_at_once() -> None:
    """As where one node has a GPU for each of its ranks and another has not."""
    for first, second in (("nccl", "gloo"), ("gloo", "nccl")):
        store = dist.HashStore()  # type: ignore[attr-defined]
        require_same_backend(first, store, rank=0)
        require_same_backend(first, store, rank=1)
        with pytest.raises(MisfitError, match=f"rank 2 connects over {second}, but rank 0 over {first}; give every"):
            require_same_backend(second, store, rank=2)

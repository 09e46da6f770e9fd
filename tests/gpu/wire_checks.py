"""Checks that four ranks of a transport run on the guarantees of its channels and streams."""

from collections.abc import Callable

import torch

from quintsched.runtime.comm import Transport
from tests.runtime.comm.group_checks import WORLD

# In clock cycles of a device at 1.5 to 2 GHz.
ONE_SECOND = 2_000_000_000


def check_both_directions_at_once(t: Transport) -> None:
    """All send before they receive, on all channels: deadlocks where two directions share a queue."""
    peers = [peer for peer in (t.rank - 1, t.rank + 1) if 0 <= peer < WORLD]
    for step in range(5):
        outgoing = [torch.full((1 << 20,), float(10 * t.rank + step), device=t.device) for _ in peers]
        incoming = [torch.empty(1 << 20, device=t.device) for _ in peers]
        works = [t.send(tensor, peer, step) for tensor, peer in zip(outgoing, peers, strict=True)]
        works += [t.recv(tensor, peer, step) for tensor, peer in zip(incoming, peers, strict=True)]
        for work in works:
            work.wait()
        for tensor, peer in zip(incoming, peers, strict=True):
            assert tensor.eq(10 * peer + step).all()


def check_dropped_tensors(t: Transport) -> None:
    """The memory of a tensor under way must not be given to the next one."""
    if t.rank == 0:
        works = [t.send(torch.full((1 << 20,), float(i), device=t.device), 1, i) for i in range(8)]
        for work in works:
            torch.empty(1 << 20, device=t.device).fill_(-1)
            work.wait()
    if t.rank == 1:
        for i in range(8):
            buffer = torch.empty(1 << 20, device=t.device)
            t.recv(buffer, 0, i).wait()
            assert buffer.eq(i).all()


def check_a_message_waits_for_what_came_before(t: Transport) -> None:
    """A send goes when its tensor is ready, and the host waits neither for that nor for the receiver."""
    tensor = torch.zeros(1 << 20, device=t.device)
    if t.rank == 0:
        torch.cuda._sleep(ONE_SECOND)
        tensor.fill_(7.0)
        work = t.send(tensor, 1, 0)
        assert not torch.cuda.current_stream().query()
        work.wait()
    if t.rank == 1:
        t.recv(tensor, 0, 0).wait()
        assert tensor.eq(7.0).all()


def check_a_message_does_not_wait_for_what_comes_after(t: Transport) -> None:
    """The message is there while both ends still compute what was issued after the call."""
    tensor = torch.full((1 << 20,), float(t.rank), device=t.device)
    computing, waiting = torch.cuda.current_stream(), torch.cuda.Stream()
    if t.rank > 1:
        return
    work = t.send(tensor, 1, 0) if t.rank == 0 else t.recv(tensor, 0, 0)
    torch.cuda._sleep(3 * ONE_SECOND)
    with torch.cuda.stream(waiting):
        work.wait()
        assert tensor.eq(0.0).all()
    assert not computing.query()


def check_one_tensor_to_two_peers(t: Transport) -> None:
    tensor = torch.full((1 << 20,), float(t.rank), device=t.device)
    if t.rank == 1:
        works = [t.send(tensor, peer, 0) for peer in (0, 2) for _ in range(3)]
    elif t.rank in (0, 2):
        works = [t.recv(torch.empty_like(tensor), 1, 0), t.recv(torch.empty_like(tensor), 1, 0), t.recv(tensor, 1, 0)]
    else:
        works = []
    for work in works:
        work.wait()
    assert tensor.eq(1.0 if t.rank < 3 else 3.0).all()


CHECKS: list[Callable[[Transport], None]] = [
    check_both_directions_at_once,
    check_dropped_tensors,
    check_one_tensor_to_two_peers,
]
STREAM_CHECKS: list[Callable[[Transport], None]] = [
    check_a_message_waits_for_what_came_before,
    check_a_message_does_not_wait_for_what_comes_after,
]
"""Checks for devices with streams only."""

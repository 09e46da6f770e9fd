"""Rings and trees between three processes over gloo: the library's own sums, and training as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quintsched as qs
from quintsched.collectives import Wire
from quintsched.collectives.gradient_exchange import Call, spelled_out
from quintsched.ir.communication import Means
from quintsched.runtime.comm import Transport, Work, connect
from quintsched.runtime.comm.message_collectives import SPELLED_TAG, SpelledGroup

from ..ranks import run_ranks
from ..toys import Task, sgd, tiny_vit, train_plainly, train_rank, worst_difference

WORLD = 3
CALLS: list[tuple[Means, list[Call]]] = [
    ("ring", [("all_reduce", WORLD), ("reduce_scatter", WORLD), ("all_gather", WORLD)]),
    ("tree", [("all_reduce", WORLD)]),
]


def check_spelled(transport: Transport) -> None:
    """Compare a ring and a tree of all ranks with the library's collectives."""
    native = transport.make_group([tuple(range(WORLD))])
    found = [spelled_out(means, calls, Wire()) for means, calls in CALLS]
    messages = [message for c in found for plan in c.plans.values() for message in plan.messages]
    transport.open_channels(sorted({(m.sent.rank, m.received.rank) for m in messages}))
    ring, tree = (SpelledGroup(native, communication, transport) for communication in found)
    mine = torch.arange(3000.0, device=transport.device) * (transport.rank + 1)
    sums = [mine.clone() for _ in range(5)]
    works = [group.all_reduce(tensor) for group, tensor in zip((ring, tree, ring, tree), sums[1:], strict=True)]
    native.all_reduce(sums[0]).wait()
    parts = [mine.new_empty(1000) for _ in range(2)]
    works += [group.reduce_scatter(part, mine) for group, part in zip((ring, native), parts, strict=True)]
    wholes = [mine.new_empty(9000) for _ in range(2)]
    works += [group.all_gather(whole, mine) for group, whole in zip((ring, native), wholes, strict=True)]
    for work in works:
        work.wait()
    for tensor in sums[1:]:
        assert torch.equal(tensor, sums[0])
    assert torch.equal(*parts)
    assert torch.equal(*wholes)


def count_chunks(transport: Transport) -> list[int]:
    """Return a list that grows by the peer of each chunk that the transport sends."""
    sent: list[int] = []
    send = transport.send

    def counted(tensor: Tensor, peer: int, tag: int) -> Work:
        if tag == SPELLED_TAG:
            sent.append(peer)
        return send(tensor, peer, tag)

    transport.send = counted  # type: ignore[method-assign]
    return sent


def check_training(transport: Transport) -> None:
    plan = qs.compile("1f1b", mesh=f"dp={WORLD}", microbatches=2, communication="ring")
    task = Task.make(2, 6 * WORLD, torch.float64)
    sent = count_chunks(transport)
    outcome = train_rank(transport, plan, task, tiny_vit())
    assert worst_difference([outcome], train_plainly(task, tiny_vit(), 2, sgd)) < 1e-10
    assert sent == [(transport.rank + 1) % WORLD] * (len(task.inputs) * 2 * (WORLD - 1))


def run_rank() -> None:
    transport = connect("gloo", timeout_s=60)
    check_spelled(transport)
    check_training(transport)
    transport.close()


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_three_processes_over_gloo() -> None:
    assert run_ranks(run_rank, WORLD) == [0] * WORLD

"""Checks that ranks of any transport run on rings and trees of all of them."""

import torch

from quintsched.collectives import Wire
from quintsched.collectives.gradient_exchange import CollectiveCall, spelled_out
from quintsched.ir.communication import Means
from quintsched.runtime.comm import Transport
from quintsched.runtime.comm.message_collectives import SpelledGroup

WORLD = 3
CALLS: list[tuple[Means, list[CollectiveCall]]] = [
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

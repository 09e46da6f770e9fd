"""Checks that ranks of any transport run on their groups, four of them, and on rings and trees of all of them."""

import torch

from quintsched.collectives import Wire
from quintsched.collectives.gradient_exchange import spelled_out
from quintsched.ir.collective_means_and_wire import Means
from quintsched.runtime.comm import Group, ReduceOp, Transport
from quintsched.runtime.comm.message_collectives import SpelledGroup

WORLD = 4
CHAIN = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
"""The channels of a pipeline of four, both ways."""


def make_groups(t: Transport) -> list[Group]:
    """Return a trio, a pair and the world: ranks take part in different numbers of them, which must confuse nobody."""
    return [t.make_group(ranks) for ranks in ([(0, 1, 2), (3,)], [(0,), (1,), (2, 3)], [(0, 1, 2, 3)])]


def check_collectives(t: Transport, group: Group, dtype: torch.dtype = torch.float32) -> None:
    """All at once, each waited for twice."""
    x = torch.full((group.size, 3), t.rank, dtype=dtype, device=t.device)
    most, least, total, source = x.clone(), x.clone(), x.clone(), x.clone()
    gathered, scattered = x.new_empty(group.size * group.size, 3), x.new_empty(1, 3)
    swapped, parts = torch.empty_like(x), x * 10 + torch.arange(group.size, device=x.device)[:, None].to(x.dtype)
    sent, received = [*range(group.size)], [group.index] * group.size  # member k gets k rows of each
    uneven = x.new_empty(sum(received), 3)
    large, many = x.new_full((1200,), t.rank), x.new_full((2**16, 2), t.rank)
    whole = many.new_empty(group.size * len(many), 2)
    works = [
        group.all_reduce(large),
        group.all_reduce(most, ReduceOp.MAX),
        group.all_reduce(least, ReduceOp.MIN),
        group.all_reduce(total),
        group.all_gather(gathered, x),
        group.all_gather(whole, many),
        group.reduce_scatter(scattered, x),
        group.all_to_all(swapped, parts),
        group.broadcast(source, group.size - 1),
        group.all_to_all(uneven, x.new_full((sum(sent), 3), t.rank), received, sent),
    ]
    for work in works:
        work.wait()
        work.wait()
    assert most.eq(max(group.ranks)).all()
    assert least.eq(min(group.ranks)).all()
    assert total.eq(sum(group.ranks)).all()
    assert large.eq(sum(group.ranks)).all()
    assert scattered.eq(sum(group.ranks)).all()
    assert swapped[:, 0].tolist() == [10 * rank + group.index for rank in group.ranks]
    assert uneven[:, 0].tolist() == [rank for rank in group.ranks for _ in range(group.index)]
    assert source.eq(group.ranks[-1]).all()
    assert gathered[:: group.size, 0].tolist() == list(group.ranks)
    assert whole.view(group.size, -1).aminmax(dim=1).min.tolist() == list(group.ranks)
    assert whole.view(group.size, -1).aminmax(dim=1).max.tolist() == list(group.ranks)


IN_HALVES = ("ring", "two-level")
"""Means that also spell out reduce-scatters and all-gathers."""


def check_spelled(transport: Transport, *means: Means, nodes: int = 1) -> None:
    """Compare the collectives that means spell out, all of them under way at once, with the library's."""
    size = transport.world_size
    native = transport.make_group([tuple(range(size))])
    kinds = [("all_reduce", "reduce_scatter", "all_gather") if one in IN_HALVES else ("all_reduce",) for one in means]
    found = [
        spelled_out(one, [(kind, size) for kind in some], Wire(nodes=nodes))
        for one, some in zip(means, kinds, strict=True)
    ]
    messages = [message for one in found for plan in one.plans.values() for message in plan.messages]
    transport.open_channels(sorted({(m.sent.rank, m.received.rank) for m in messages}))
    spelled = [SpelledGroup(native, one, transport) for one in found]
    mine = torch.arange(1000.0 * size, device=transport.device) * (transport.rank + 1)
    sums = [[mine[:count].clone() for count in (1, size - 1, 1000, len(mine))] for _ in (native, *spelled)]
    works = [group.all_reduce(one) for group, own in zip(spelled, sums[1:], strict=True) for one in own]
    for one in sums[0]:
        native.all_reduce(one).wait()
    halves = [native, *(group for group, some in zip(spelled, kinds, strict=True) if len(some) > 1)]
    parts, wholes = ([mine.new_empty(count) for _ in halves] for count in (1000, 1000 * size**2))
    works += [group.reduce_scatter(part, mine) for group, part in zip(halves, parts, strict=True)]
    works += [group.all_gather(whole, mine) for group, whole in zip(halves, wholes, strict=True)]
    for work in works:
        work.wait()
    for found_of in (*zip(*sums, strict=True), parts, wholes):
        assert all(torch.equal(one, found_of[0]) for one in found_of)

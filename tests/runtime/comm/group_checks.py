"""Checks that four ranks of any transport run on their groups: every collective gives the right result."""

import torch

from quintsched.runtime.comm import Group, ReduceOp, Transport

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

"""Collectives spelled out in messages equal the library's own, and mutants that pass the proof keep their promise."""

from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from quintsched.collectives import CollectivePlan, Communication
from quintsched.ir.collective_means_and_wire import Means
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.comm.message_collectives import SpelledGroup

from ...planner.collectives.mini_mutants import mini_mutant, small_collectives
from .group_checks import check_spelled


def drawn(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(97 * rank + seed), dtype=torch.float64)


CASES = [
    *product(("ring",), (2, 3, 5, 8), (1,)),
    *product(("tree", "auto"), (2, 3, 4, 7), (1,)),
    *(("two-level", size, nodes) for size, nodes in ((4, 2), (6, 3), (6, 2))),
]  # fmt: skip


@pytest.mark.parametrize("rules", ["nccl", "rendezvous"])
@pytest.mark.parametrize(("means", "size", "nodes"), CASES)
def test_spelled_collectives_equal_the_library(means: Means, size: int, nodes: int, rules: Rules) -> None:
    run_local(size, lambda transport: check_spelled(transport, means, nodes=nodes), rules=rules)


SEEDS = small_collectives()
RULES: tuple[Rules, ...] = ("nccl", "rendezvous", "mailbox")
PARTS = (0, 1, 5, 64)
"""Elements of a rank's part: none, fewer than there are chunks, and parts that chunks do not divide."""


def accepted(seed: int, count: int) -> list[CollectivePlan]:
    """Return mutants that the proof lets pass and that do something else than what they were made from."""
    random, found = Random(seed), {}
    while len(found) < count:
        changed = mini_mutant(random.choice(SEEDS), random)
        if changed.check().sound and changed not in SEEDS:
            found[changed.kind, changed.programs] = changed
    return list(found.values())


def require_promise(plan: CollectivePlan, rules: Rules) -> None:
    """Carry a collective out on every rank, for all sizes, in place and not, and compare with what is promised."""
    size = plan.size

    def run(transport: Transport) -> list[Tensor]:
        rank, left, native = transport.rank, [], transport.make_group([tuple(range(size))])
        transport.open_channels(sorted({(message.sent.rank, message.received.rank) for message in plan.messages}))
        group = SpelledGroup(native, Communication(plan.algorithm, {"mine": plan}), transport)
        for part in PARTS:
            whole, rest = drawn(rank, size * part, part), 1e6 * drawn(rank, size * part, 1000 + part)
            if plan.kind == "all_reduce":
                group.all_reduce(whole).wait()
                left.append(whole)
            elif plan.kind == "reduce_scatter":
                own = rest[:part].clone()
                group.reduce_scatter(own, whole).wait()
                in_place = whole.view(size, part)[rank]
                group.reduce_scatter(in_place, whole).wait()
                left += [own, in_place]
            else:
                own = whole[:part].clone()
                group.all_gather(whole.copy_(rest), own).wait()
                rest.view(size, part)[rank].copy_(own)
                group.all_gather(rest, rest.view(size, part)[rank]).wait()
                left += [whole, rest]
        return left

    results = run_local(size, run, rules=rules)
    expected = [_expected(plan, part) for part in PARTS for _ in range(1 if plan.kind == "all_reduce" else 2)]
    for rank, left in enumerate(results):
        for found, wanted, first in zip(left, expected, results[0], strict=True):
            torch.testing.assert_close(found, wanted.chunk(size)[rank] if plan.kind == "reduce_scatter" else wanted)
            assert plan.kind == "reduce_scatter" or torch.equal(found, first)


def _expected(plan: CollectivePlan, part: int) -> Tensor:
    brought = [drawn(rank, plan.size * part, part) for rank in range(plan.size)]
    return torch.cat([x[:part] for x in brought]) if plan.kind == "all_gather" else torch.stack(brought).sum(0)


@pytest.mark.parametrize("rules", RULES)
def test_collectives_and_sound_mutants_keep_their_promise(rules: Rules) -> None:
    for plan in [*SEEDS, *(accepted(0, 30) if rules == "nccl" else [])]:
        require_promise(plan, rules)

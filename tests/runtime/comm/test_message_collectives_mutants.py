"""Mutants of collectives that pass the proof keep their promise when run: garbage in the buffers, strict wires."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from quintsched.collectives import CollectivePlan, Communication
from quintsched.runtime.comm import Rules, Transport, run_local
from quintsched.runtime.comm.message_collectives import SpelledGroup

from ...planner.collectives.mini_mutants import mini_mutant, small_collectives

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


def drawn(rank: int, count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(97 * rank + seed), dtype=torch.float64)


def require_promise(plan: CollectivePlan, rules: Rules) -> None:
    """Carry a collective out on every rank, for all sizes, in place and not, and compare with what is promised."""
    size = plan.size

    def run(transport: Transport) -> list[Tensor]:
        native = transport.make_group([tuple(range(size))])
        transport.open_channels(sorted({(m.sent.rank, m.received.rank) for m in plan.messages}))
        communication = Communication(plan.algorithm, {"mine": plan})
        group, rank, left = SpelledGroup(native, communication, transport), transport.rank, []
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


@pytest.mark.parametrize("plan", SEEDS, ids=lambda plan: plan.title)
def test_what_is_not_changed_keeps_its_promise(plan: CollectivePlan) -> None:
    for rules in RULES:
        require_promise(plan, rules)


def test_mutants_that_are_sound_keep_their_promise() -> None:
    for plan in accepted(0, 30):
        require_promise(plan, "nccl")


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES)
def test_many_mutants_that_are_sound_keep_their_promise(rules: Rules) -> None:
    for plan in accepted(1, 300):
        require_promise(plan, rules)

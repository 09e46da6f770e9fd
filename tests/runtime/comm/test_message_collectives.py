"""Collectives spelled out in messages equal the library's own, on every rule a wire may have."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
from torch import Tensor

from quintsched.collectives import Wire
from quintsched.collectives.collective_timing import spelled_seconds
from quintsched.collectives.gradient_exchange import CollectiveCall, spelled_out
from quintsched.ir.communication import Means
from quintsched.runtime.comm import Group, ReduceOp, Rules, Transport, run_local
from quintsched.runtime.comm.message_collectives import SpelledGroup, cut_chunks

STRICT: tuple[Rules, ...] = ("nccl", "rendezvous")
SIZES = range(2, 9)


def spelled(
    transport: Transport, means: Means, calls: list[CollectiveCall], wire: Wire | None = None
) -> tuple[Group, Group]:
    """Return a group of all ranks whose collectives are spelled out, and one of the same ranks whose are not."""
    communication = spelled_out(means, calls, wire or Wire())
    native = transport.make_group([tuple(range(transport.world_size))])
    transport.open_channels(
        sorted({(m.sent.rank, m.received.rank) for plan in communication.plans.values() for m in plan.messages})
    )
    return SpelledGroup(native, communication, transport), native


def own(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(97 * rank + seed), dtype=torch.float64)


@pytest.mark.parametrize("rules", STRICT)
@pytest.mark.parametrize(("means", "size"), [*product(("ring", "tree", "auto"), SIZES)])
def test_all_reduce_equals_the_library(means: Means, size: int, rules: Rules) -> None:
    def run(transport: Transport) -> list[tuple[Tensor, Tensor]]:
        group, native = spelled(transport, means, [("all_reduce", size)])
        found = [own(transport.rank, count, count) for count in (0, 1, size - 1, 1000, 64 * size)]
        expected = [tensor.clone() for tensor in found]
        works = [group.all_reduce(tensor) for tensor in found]
        for tensor in expected:
            native.all_reduce(tensor).wait()
        for work in works:
            work.wait()
        return list(zip(found, expected, strict=True))

    results = run_local(size, run, rules=rules)
    for result in results:
        for (found, expected), (first, _) in zip(result, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
            assert torch.equal(found, first)


@pytest.mark.parametrize("rules", STRICT)
@pytest.mark.parametrize("size", SIZES)
def test_the_halves_equal_the_library(size: int, rules: Rules) -> None:
    def run(transport: Transport) -> tuple[Tensor, ...]:
        group, native = spelled(transport, "ring", [("reduce_scatter", size), ("all_gather", size)])
        whole, part = own(transport.rank, 3 * size).view(size, 3), own(transport.rank, 6).view(2, 3)
        before = whole.clone()
        sums = [torch.zeros(1, 3, dtype=torch.float64) for _ in range(2)]
        parts = [torch.zeros(2 * size, 3, dtype=torch.float64) for _ in range(2)]
        works = [group.reduce_scatter(sums[0], whole), group.all_gather(parts[0], part)]
        works += [native.reduce_scatter(sums[1], whole), native.all_gather(parts[1], part)]
        for work in works:
            work.wait()
        assert torch.equal(whole, before)
        return *sums, *parts

    for sums, expected_sums, parts, expected_parts in run_local(size, run, rules=rules):
        torch.testing.assert_close(sums, expected_sums, rtol=0, atol=1e-13)
        assert torch.equal(parts, expected_parts)


LEVELS = ((4, 2), (6, 3), (6, 2))
"""Ranks and nodes of collectives of two levels."""


@pytest.mark.parametrize("rules", STRICT)
@pytest.mark.parametrize(("size", "nodes"), LEVELS)
def test_two_levels_equal_the_library(size: int, nodes: int, rules: Rules) -> None:
    def run(transport: Transport) -> list[tuple[Tensor, Tensor]]:
        calls: list[CollectiveCall] = [(kind, size) for kind in ("all_reduce", "reduce_scatter", "all_gather")]
        both = spelled(transport, "two-level", calls, Wire(nodes=nodes))
        whole, part = own(transport.rank, 7 * size).view(size, 7), own(transport.rank, 6).view(2, 3)
        totals = [whole.clone() for _ in both]
        sums, parts = [part.new_zeros(1, 7) for _ in both], [part.new_zeros(2 * size, 3) for _ in both]
        for group, total, share, gathered in zip(both, totals, sums, parts, strict=True):
            works = [group.all_reduce(total), group.reduce_scatter(share, whole), group.all_gather(gathered, part)]
            for work in works:
                work.wait()
        return [(totals[0], totals[1]), (sums[0], sums[1]), (parts[0], parts[1])]

    for result in run_local(size, run, rules=rules):
        for found, expected in result:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_two_levels_take_as_long_as_predicted_on_slow_links() -> None:
    """On a wire of 60 ms between two nodes and 12 inside, where a ring over all ranks waits for the slow links."""
    wire = Wire(latency_s=0.06, bandwidth=1e12, nodes=2, node_latency_s=0.012, node_bandwidth=1e12)
    links = {(a, b): 0.012 if a // 2 == b // 2 else 0.06 for a in range(4) for b in range(4)}

    def run(transport: Transport) -> list[float]:
        means: tuple[Means, ...] = ("ring", "two-level")
        groups, took = [spelled(transport, one, [("all_reduce", 4)], wire)[0] for one in means], []
        for group in groups * 3:
            begin = time.perf_counter()
            group.all_reduce(torch.ones(4)).wait()
            took.append(time.perf_counter() - begin)
        return took

    took = [max(times) for times in zip(*run_local(4, run, wire_s=links), strict=True)]
    predicted = [spelled_seconds("all_reduce", one, 4, 4, 0.0, wire) for one in ("ring", "two-level")]
    assert predicted == pytest.approx([6 * 0.06, 4 * 0.012 + 2 * 0.06])
    for wanted, real in zip(predicted, (min(took[::2]), min(took[1::2])), strict=True):
        assert 0.95 * wanted <= real <= 1.4 * wanted, took


def test_a_wait_takes_the_steps_of_all_that_came_before() -> None:
    def run(transport: Transport) -> list[float]:
        group, _ = spelled(transport, "tree", [("all_reduce", 3)])
        tensors = [torch.full((8,), float(10**k)) for k in range(4)]
        works = [group.all_reduce(tensor) for tensor in tensors]
        for k in (2, 3, 0, 1):
            works[k].wait()
            works[k].wait()
        return [float(tensor.sum()) for tensor in tensors]

    assert run_local(3, run, rules="nccl") == [[24.0, 240.0, 2400.0, 24000.0]] * 3


def test_what_is_no_sum_and_what_no_plan_spells_out_is_the_librarys() -> None:
    def run(transport: Transport) -> tuple[float, list[float], float]:
        group, _ = spelled(transport, "ring", [("all_gather", 3)])
        most, total = torch.tensor([float(transport.rank)]), torch.ones(1)
        group.all_reduce(most, ReduceOp.MAX).wait()
        group.all_reduce(total).wait()
        told = torch.tensor([float(transport.rank)])
        group.broadcast(told, 1).wait()
        swapped = torch.zeros(3)
        group.all_to_all(swapped, torch.arange(3.0) + 10 * transport.rank).wait()
        return float(most + total), swapped.tolist(), float(told)

    results = run_local(3, run, rules="nccl")
    assert results == [(5.0, [r, 10.0 + r, 20.0 + r], 1.0) for r in range(3)]


def test_chunks_cover_a_tensor_once() -> None:
    for count, chunks in product((0, 1, 5, 12, 100), (1, 2, 3, 8)):
        cut = cut_chunks(torch.arange(count), chunks)
        assert torch.cat(cut).tolist() == list(range(count))
        assert max(map(len, cut)) - min(map(len, cut)) <= 1

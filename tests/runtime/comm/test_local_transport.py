"""Ranks that are threads of one process: messages, collectives, NCCL's rules, and what would hang or go wrong there."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir.instruction_set import ShareMetrics, SyncTied
from quintsched.runtime.comm import Group, LocalTransport, LocalWorld, ReduceOp, Rules, Transport, run_local
from quintsched.runtime.comm import autograd_collectives as collectives
from quintsched.runtime.comm.local.rank_threads_in_turns import run_in_turns

from ...planner.verify.judge import Judge
from ...planner.verify.judge_hosts import Hosts
from .group_checks import WORLD, check_collectives, make_groups


def test_the_first_error_wakes_all_and_is_the_one_raised() -> None:
    stopped: dict[int, str] = {}

    def body(t: Transport) -> None:
        t.open_channels([(0, 1), (0, 2)])
        if t.rank == 0:
            time.sleep(0.05)
            raise ZeroDivisionError("mine")
        try:
            t.recv(torch.zeros(1), 0, 3).wait()
        except qs.StallError as error:
            stopped[t.rank] = str(error)
            raise

    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="mine") as info:
        run_local(3, body)
    assert time.monotonic() - began < 5
    assert info.value.__notes__ == ["on rank 0 of 3"]
    assert stopped.keys() == {1, 2}
    assert "rank 1 stopped waiting for message 0 from rank 0 with tag 3" in stopped[1]
    assert "rank 0 failed first: ZeroDivisionError: mine" in stopped[1]


@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
def test_every_collective_gives_what_it_says(rules: Rules) -> None:
    run_local(WORLD, lambda t: [check_collectives(t, group) for group in make_groups(t)], rules=rules)


@pytest.mark.parametrize("shape", [(3,), (2,)])
def test_collectives_that_disagree_name_the_ranks(shape: tuple[int, ...]) -> None:
    def body(t: Transport) -> None:
        group = t.world_group()
        if t.rank == 0:
            group.all_reduce(torch.zeros(2), ReduceOp.MAX).wait()
        else:
            group.all_reduce(torch.zeros(shape)).wait()

    with pytest.raises(qs.MisfitError, match=r"collective 0: rank . issued all_reduce .*, rank . all_reduce"):
        run_local(2, body)


CPU = torch.device("cpu")


def test_members_run_one_at_a_time_and_meet_in_forward_and_backward() -> None:
    running: list[int] = []

    def work(group: Group) -> tuple[float, float]:
        running.append(group.index)
        x = torch.full((1,), 2.0, requires_grad=True)
        entered = collectives.copy_to_group(x, group) * (group.index + 1)
        assert running == [group.index]
        running.clear()
        y = collectives.reduce_from_group(entered, group)
        y.backward()
        running.clear()
        return float(y.detach()), float(x.grad)

    before = threading.active_count()
    assert run_in_turns(3, CPU, work) == [(12.0, 6.0)] * 3
    assert threading.active_count() == before


BOTH_WAYS = [(0, 1), (1, 0)]


def numbered(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


@settings(max_examples=20)
@given(tags=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
def test_the_kth_send_meets_the_kth_receive_whatever_the_tags(tags: list[tuple[int, int]]) -> None:
    def body(t: Transport) -> list[float]:
        t.open_channels(BOTH_WAYS)
        tensors = [numbered(i if t.rank == 0 else -1.0) for i in range(len(tags))]
        move = t.send if t.rank == 0 else t.recv
        works = [move(tensor, 1 - t.rank, tag[t.rank]) for tensor, tag in zip(tensors, tags, strict=True)]
        for work in reversed(works):
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_local(2, body, rules="nccl")[1] == list(range(len(tags)))


@pytest.mark.parametrize("rules", ["rendezvous", "nccl"])
def test_two_blocking_sends_are_a_deadlock_that_says_who_waits_for_what(rules: Rules) -> None:
    def body(t: Transport) -> None:
        t.open_channels(BOTH_WAYS)
        t.send(numbered(0), 1 - t.rank, 0).wait()
        t.recv(numbered(0), 1 - t.rank, 0).wait()

    with pytest.raises(qs.StallError, match=r"deadlock(.|\n)*rank 0 waits for rank 1 to receive message 0") as info:
        run_local(2, body, rules=rules)
    assert ("tag" in str(info.value)) == (rules == "rendezvous")
    run_local(2, body)


GROUPS = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
TIED = qs.compile("1f1b", mesh="pp=3", microbatches=1, tied=GROUPS)


def issue(plan: qs.Plan) -> None:
    """Issue the sums of ties and the metrics of a plan, in its order, and nothing else; then wait for all of them."""

    def body(t: Transport) -> None:
        groups = [t.make_group([ranks, *((r,) for r in range(3) if r not in ranks)]) for ranks in GROUPS.values()]
        found = dict(zip(GROUPS, groups, strict=True))
        issued = [i for i in plan.programs[t.rank] if isinstance(i, SyncTied | ShareMetrics)]
        places = [found[i.params] if isinstance(i, SyncTied) else t.world_group() for i in issued]
        for work in [group.all_reduce(torch.ones(1)) for group in places]:
            work.wait()

    run_local(3, body, rules="nccl")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", [*permutations(["a", "c", ""])])
def test_the_proof_the_judge_and_this_wire_ask_for_one_order_of_all_groups(first: tuple[str, ...]) -> None:
    """Two groups that share two ranks, and three that share one each, in every order."""
    free = 0
    for orders in product([first], permutations(["a", "b", ""]), permutations(["b", "c", ""])):
        sums = {i.params: i for p in TIED.programs for i in p if isinstance(i, SyncTied)} | {"": ShareMetrics()}
        kept = [[i for i in p if not isinstance(i, SyncTied | ShareMetrics)] for p in TIED.programs]
        programs = [(*p[:-2], *(sums[name] for name in o), *p[-2:]) for p, o in zip(kept, orders, strict=True)]
        plan = replace(TIED, programs=tuple(programs))
        assert Judge(plan).good == Hosts(plan, "channel").finish() == plan.check(profile="channel").sound
        assert plan.check(profile="tagged").sound
        free += plan.check().sound
        issued = r"rank . issued collective 0 of ranks \[.*\] before collective 0 of ranks \[.*\]; .*one launch order"
        with nullcontext() if plan.check().sound else pytest.raises(qs.MisfitError, match=issued):
            issue(plan)
    assert 0 < free < 18


@pytest.mark.parametrize(("rules", "arrives"), [("mailbox", 1.0), ("rendezvous", 1.0), ("nccl", 9.0)])
def test_a_tensor_that_is_changed_before_its_send_is_done_arrives_changed(rules: Rules, arrives: float) -> None:
    def body(t: Transport) -> float:
        t.open_channels(BOTH_WAYS)
        tensor, go = numbered(1.0 - t.rank), torch.zeros(1)
        work = (t.recv if t.rank else t.send)(tensor, 1 - t.rank, 0)
        if t.rank == 0:
            tensor.fill_(9.0)
        (t.send if t.rank else t.recv)(go, 1 - t.rank, 1).wait()
        work.wait()
        return tensor[0].item()

    assert run_local(2, body, rules=rules)[1] == arrives


def test_what_waits_for_a_collective_behind_another_one_waits_for_both() -> None:
    """Rank 0 holds up its first collective till it hears from rank 1, which waits for the second before it speaks."""

    def body(t: Transport) -> None:
        everyone, pair = t.world_group(), t.make_group([(1, 2), (0,)])
        t.open_channels([(1, 0)])
        if t.rank == 0:
            t.recv(torch.zeros(2), 1, 0).wait()
        works = [everyone.all_reduce(torch.ones(1)), pair.all_reduce(torch.ones(1))]
        if t.rank == 1:
            works[1].wait()
            t.send(torch.zeros(2), 0, 0).wait()
        for work in works:
            work.wait()

    run_local(3, body, rules="rendezvous")
    with pytest.raises(qs.StallError, match="deadlock: nothing that is waited for can come"):
        run_local(3, body, rules="nccl")


@pytest.mark.parametrize(("rules", "tag"), [("mailbox", " with tag 4"), ("nccl", "")])
@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_message_that_does_not_fit_its_buffer_is_named(wrong: torch.Tensor, rules: Rules, tag: str) -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        (t.send(wrong, 1, 4) if t.rank == 0 else t.recv(torch.zeros(2), 0, 4)).wait()

    with pytest.raises(qs.MisfitError, match=rf"rank 1 expected message 0 from rank 0{tag}, float32 \(2,\)") as info:
        run_local(2, body, rules=rules)
    assert info.value.__notes__ == ["on rank 1 of 2"]


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        if t.rank == 1:
            t.recv(torch.zeros(1), 0, 0).wait()

    with pytest.raises(qs.StallError, match="rank 0 has ended"):
        run_local(2, body)


def test_what_would_be_silent_on_a_real_wire_is_refused() -> None:
    transport = LocalTransport(LocalWorld(3), 0)
    transport.open_channels([(0, 1)])
    for call, words in (
        (lambda: transport.send(torch.ones(1), 2, 0), "rank 0, channel 0 to 2 was never opened"),
        (lambda: transport.recv(torch.ones(1), 1, 0), "channel 1 to 0 was never opened"),
        (lambda: transport.send(torch.ones(2, 3).t(), 1, 0), r"float32 \(3, 2\) is not contiguous"),
        (lambda: transport.send(torch.ones(1, device="meta"), 1, 0), "on meta"),
        (lambda: transport.open_channels([(1, 1)]), "no channel from rank 1 to rank 1"),
    ):
        with pytest.raises(qs.MisfitError, match=words):
            call()
    group = transport.make_group([(0, 1), (2,)])
    for call in (
        lambda: group.all_reduce(torch.ones(2, 3).t()),
        lambda: group.all_gather(torch.empty(3), torch.empty(2)),
        lambda: group.all_gather(torch.empty(4, dtype=torch.float64), torch.empty(2)),
        lambda: group.reduce_scatter(torch.empty(2, 3), torch.empty(4, 2)),
        lambda: group.all_to_all(torch.empty(4, 3), torch.empty(4, 2)),
        lambda: group.all_to_all(torch.empty(3, 2), torch.empty(3, 2)),
        lambda: group.all_to_all(torch.empty(3, 2), torch.empty(3, 2), [1, 2]),
        lambda: group.all_to_all(torch.empty(3, 2), torch.empty(3, 2), [1, 2], [1, 1]),
        lambda: group.all_to_all(torch.empty(3, 2), torch.empty(3, 2), [1, 2], [3]),
        lambda: group.all_to_all(torch.empty(3, 2), torch.empty(3, 2), [1, 2], [4, -1]),
        lambda: group.broadcast(torch.empty(1), 2),
    ):
        with pytest.raises(qs.MisfitError, match=r"group of ranks \[0, 1\]"):
            call()


ALONG = ("gather_from_group", "scatter_to_group", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives along a dimension of a tensor."""


@pytest.mark.parametrize("name", ["copy_to_group", "reduce_from_group", *ALONG])
def test_second_derivatives_pass(name: str) -> None:
    """The backward of a backward is the collective itself, as each is linear."""
    xs = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(transport: Transport) -> None:
        group, x = transport.make_group([(0, 1)]), xs[transport.rank].clone().requires_grad_()
        y: torch.Tensor = getattr(collectives, name)(x, group, *([0] if name in ALONG else []))
        gradient = torch.ones_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        (again,) = torch.autograd.grad(back, gradient, xs[transport.rank])
        torch.testing.assert_close(again, y.detach(), rtol=0, atol=1e-14)

    run_local(2, run)

"""NCCL's rules in one process, and a wire that takes its time: what would hang or go wrong there does so here."""

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.errors import MisfitError, StallError, UsageError
from quintsched.ir.instruction_set import ShareMetrics, SyncTied
from quintsched.runtime.comm import LocalTransport, LocalWorld, Rules, Transport, run_local
from quintsched.runtime.comm.local.simulated_nccl import LocalChannels

from ...planner.verify.judge import Judge
from ...planner.verify.judge_hosts import Hosts
from .group_checks import launch

BOTH_WAYS = [(0, 1), (1, 0)]
STRICT: tuple[Rules, ...] = ("rendezvous", "nccl")


def numbered(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def test_rules_say_for_what_profile_a_plan_must_be_proved() -> None:
    profiles = {"mailbox": "tagged", "rendezvous": "tagged", "nccl": "channel"}
    for rules in ("mailbox", "rendezvous", "nccl"):
        assert LocalTransport(LocalWorld(2, rules=rules), 0).profile == profiles[rules]
    with pytest.raises(UsageError, match="unknown rules 'ncl'; did you mean 'nccl'"):
        LocalWorld(2, rules="ncl")  # type: ignore[arg-type]
    for wire_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="cannot be under way"):
            LocalWorld(2, wire_s=wire_s)
        with pytest.raises(UsageError, match="cannot be under way"):
            LocalWorld(2, wire_s={(0, 1): 0.0, (1, 0): wire_s})
    for channel in ((0, 2), (-1, 0)):
        with pytest.raises(UsageError, match="ranks are 0 to 1"):
            LocalWorld(2, wire_s={channel: 0.0})


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


@pytest.mark.parametrize("rules", STRICT)
def test_a_send_is_done_when_its_receive_is_there(rules: Rules) -> None:
    def body(t: Transport) -> float:
        t.open_channels(BOTH_WAYS)
        if t.rank == 0:
            t.send(numbered(1), 1, 0).wait()
        else:
            time.sleep(0.05)
            t.recv(numbered(0), 0, 0).wait()
        return time.perf_counter()

    began = time.perf_counter()
    assert min(run_local(2, body, rules=rules)) - began >= 0.05


@pytest.mark.parametrize("rules", STRICT)
def test_two_blocking_sends_are_a_deadlock_that_says_who_waits_for_what(rules: Rules) -> None:
    def body(t: Transport) -> None:
        t.open_channels(BOTH_WAYS)
        t.send(numbered(0), 1 - t.rank, 0).wait()
        t.recv(numbered(0), 1 - t.rank, 0).wait()

    with pytest.raises(StallError, match=r"deadlock(.|\n)*rank 0 waits for rank 1 to receive message 0") as info:
        run_local(2, body, rules=rules)
    assert ("tag" in str(info.value)) == (rules == "rendezvous")
    run_local(2, body)


@pytest.mark.parametrize(("rules", "arrives"), [("mailbox", 1.0), ("rendezvous", 1.0), ("nccl", 9.0)])
def test_a_tensor_that_is_changed_before_its_send_is_done_arrives_changed(rules: Rules, arrives: float) -> None:
    def body(t: Transport) -> float:
        t.open_channels(BOTH_WAYS)
        tensor = numbered(1.0 if t.rank == 0 else 0.0)
        go = torch.zeros(1)
        if t.rank == 0:
            work = t.send(tensor, 1, 0)
            tensor.fill_(9.0)
            t.recv(go, 1, 1).wait()
            work.wait()
        else:
            work = t.recv(tensor, 0, 0)
            t.send(go, 0, 1).wait()
            work.wait()
        return tensor[0].item()

    assert run_local(2, body, rules=rules)[1] == arrives


def test_collectives_of_two_groups_in_opposite_orders_are_refused() -> None:
    def order(rank: int) -> str:
        return "ab" if rank == 0 else "ba"

    assert launch(order, "rendezvous") == [4, 4]
    name = r"collective 0 of ranks \[0, 1\]"
    said = (
        rf"rank (.) issued {name} before {name}; rank (?!\1). issued {name} before {name}; NCCL wants one launch order"
    )
    with pytest.raises(MisfitError, match=said):
        launch(order, "nccl")


@settings(max_examples=30)
@given(st.permutations("aabbp"), st.permutations("aabbp"))
def test_two_ranks_pass_if_and_only_if_they_issue_the_same_order(first: list[str], second: list[str]) -> None:
    assert launch(lambda _: "".join(first), "nccl") == [10, 10]
    if first != second:
        with pytest.raises(MisfitError, match="one launch order"):
            launch(lambda rank: "".join((first, second)[rank]), "nccl")


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
        with nullcontext() if plan.check().sound else pytest.raises(MisfitError, match="one launch order"):
            issue(plan)
    assert 0 < free < 18


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
    with pytest.raises(StallError, match="deadlock: nothing that is waited for can come"):
        run_local(3, body, rules="nccl")


def test_a_channel_carries_one_message_at_a_time_and_each_direction_is_its_own() -> None:
    wire = LocalChannels("mailbox", 1.0)
    began = time.perf_counter()
    ends = [(0, 1, 5), (0, 1, 6), (0, 1, 5), (1, 0, 5), (0, 2, 5)]
    first, second, third, back, other = (wire.send(*end, numbered(0)).arrival_s or 0.0 for end in ends)
    assert began + 1.0 <= first <= back <= other <= time.perf_counter() + 1.0
    assert (second, third) == (first + 1.0, first + 1.0 + 1.0)


def test_every_channel_may_have_its_own_wire() -> None:
    """Channels that are not named have no wire."""
    wire = LocalChannels("mailbox", {(0, 1): 1.0, (1, 0): 3.0})
    ends = [(0, 1, 5), (1, 0, 5), (0, 1, 6), (1, 2, 5)]
    first, back, second, other = (wire.send(*end, numbered(0)).arrival_s or 0.0 for end in ends)
    assert first + 2.0 <= back <= time.perf_counter() + 3.0
    assert (second, other) == (first + 1.0, 0.0)

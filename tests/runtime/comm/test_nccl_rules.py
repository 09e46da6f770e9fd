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
from quintsched.runtime.comm import LocalTransport, LocalWorld, Rules, Transport, Work, run_local
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


def test_receives_in_an_order_that_only_tags_make_good_get_each_others_messages() -> None:
    def body(t: Transport) -> list[float]:
        t.open_channels(BOTH_WAYS)
        tensors = [numbered(1), numbered(2)]
        if t.rank == 0:
            works = [t.send(tensor, 1, tag) for tag, tensor in enumerate(tensors)]
        else:
            works = [t.recv(tensors[tag], 0, tag) for tag in (1, 0)]
        for work in works:
            work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_local(2, body, rules="rendezvous")[1] == [1, 2]
    assert run_local(2, body, rules="nccl")[1] == [2, 1]


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


def test_a_tensor_may_be_reused_once_its_send_is_done() -> None:
    def body(t: Transport) -> list[float]:
        t.open_channels(BOTH_WAYS)
        tensor, buffers = numbered(0), [numbered(-1) for _ in range(5)]
        if t.rank == 0:
            for value in range(5):
                t.send(tensor.fill_(value), 1, 0).wait()
            return []
        works = [t.recv(buffer, 0, 0) for buffer in buffers]
        time.sleep(0.05)
        for work in works:
            work.wait()
        return [buffer[0].item() for buffer in buffers]

    assert run_local(2, body, rules="nccl")[1] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rules", ["mailbox", "rendezvous", "nccl"])
def test_one_tensor_may_be_under_way_several_times(rules: Rules) -> None:
    def body(t: Transport) -> list[float]:
        t.open_channels([(0, 1), (0, 2)])
        tensor, buffers = numbered(3), [numbered(0) for _ in range(3)]
        if t.rank == 0:
            works = [t.send(tensor, peer, 0) for peer in (1, 2) for _ in range(3)]
        else:
            works = [t.recv(buffer, 0, 0) for buffer in buffers]
        for work in works:
            work.wait()
        return [buffer[0].item() for buffer in buffers]

    assert run_local(3, body, rules=rules)[1:] == [[3, 3, 3], [3, 3, 3]]


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_ends_that_do_not_fit_are_both_named(wrong: torch.Tensor) -> None:
    def body(t: Transport) -> None:
        t.open_channels(BOTH_WAYS)
        (t.send(wrong, 1, 4) if t.rank == 0 else t.recv(torch.zeros(2), 0, 4)).wait()

    expected = r"rank 1 expected message 0 from rank 0, float32 \(2,\), but it is float"
    with pytest.raises(MisfitError, match=expected):
        run_local(2, body, rules="nccl")


def test_a_collective_reads_what_is_there_when_the_last_member_comes() -> None:
    def body(t: Transport) -> float:
        group = t.make_group([(0, 1)])
        t.open_channels(BOTH_WAYS)
        tensor = numbered(1)
        if t.rank == 0:
            work = group.all_reduce(tensor)
            tensor.fill_(10)
            t.send(torch.zeros(1), 1, 0).wait()
        else:
            t.recv(torch.zeros(1), 0, 0).wait()
            work = group.all_reduce(tensor)
        work.wait()
        return tensor[0].item()

    assert run_local(2, body, rules="nccl") == [11, 11]


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


def test_only_ranks_that_share_two_groups_must_agree() -> None:
    """Ranks 0 and 1 do their pair's collective early, 2 and 3 late: no two ranks that share the pair disagree."""
    assert launch(lambda rank: "pab" if rank < 2 else "abp", "nccl", ranks=4) == [10] * 4
    with pytest.raises(MisfitError, match="one launch order"):
        launch(lambda rank: "pab" if rank != 3 else "abp", "nccl", ranks=4)


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


def timed(work: Work) -> float:
    work.wait()
    return time.perf_counter()


def test_a_channel_carries_one_message_at_a_time_and_each_direction_is_its_own() -> None:
    wire = LocalChannels("mailbox", 1.0)
    began = time.perf_counter()
    ends = [(0, 1, 5), (0, 1, 6), (0, 1, 5), (1, 0, 5), (0, 2, 5)]
    first, second, third, back, other = (wire.send(*end, numbered(0)).arrival_s or 0.0 for end in ends)
    assert began + 1.0 <= first <= back <= other <= time.perf_counter() + 1.0
    assert (second, third) == (first + 1.0, first + 1.0 + 1.0)


def test_a_channel_that_was_idle_starts_at_once() -> None:
    wire = LocalChannels("nccl", 0.001)
    assert wire.send(0, 1, 0, numbered(0)).arrival_s is None
    assert wire.receive(0, 1, 0, numbered(0)).arrival_s is not None
    time.sleep(0.01)
    later = time.perf_counter()
    wire.receive(0, 1, 0, numbered(0))
    message = wire.send(0, 1, 0, numbered(0))
    assert message.arrival_s is not None
    assert message.arrival_s >= later + 0.001


def test_sends_do_not_wait_for_the_wire_and_receives_do() -> None:
    wire_s = 0.03

    def body(t: Transport) -> tuple[float, float, list[float]]:
        t.open_channels(BOTH_WAYS)
        works = [t.recv(numbered(0), 1 - t.rank, tag) for tag in range(4)]
        began = time.perf_counter()
        for tag in range(4):
            t.send(numbered(tag), 1 - t.rank, tag).wait()
        return began, time.perf_counter(), [timed(work) for work in works]

    def late_s() -> float:
        """Check that nothing is early; return by how much the latest of all was late."""
        ends = run_local(2, body, wire_s=wire_s)
        late = [sent - began for began, sent, _ in ends]
        for (began, _, _), (_, _, arrivals) in zip(ends, reversed(ends), strict=True):
            assert all(arrival - began >= number * wire_s for number, arrival in enumerate(arrivals, 1))
            late += [arrival - began - number * wire_s for number, arrival in enumerate(arrivals, 1)]
        return max(late)

    assert min(late_s() for _ in range(5)) < wire_s / 2


def test_every_channel_may_have_its_own_wire() -> None:
    """Channels that are not named have no wire."""
    wire = LocalChannels("mailbox", {(0, 1): 1.0, (1, 0): 3.0})
    ends = [(0, 1, 5), (1, 0, 5), (0, 1, 6), (1, 2, 5)]
    first, back, second, other = (wire.send(*end, numbered(0)).arrival_s or 0.0 for end in ends)
    assert first + 2.0 <= back <= time.perf_counter() + 3.0
    assert (second, other) == (first + 1.0, 0.0)


@pytest.mark.parametrize("rules", STRICT)
def test_a_message_starts_when_its_receive_is_there(rules: Rules) -> None:
    wire_s, late_s = 0.03, 0.06

    def body(t: Transport) -> tuple[float, float]:
        t.open_channels(BOTH_WAYS)
        if t.rank == 1:
            time.sleep(late_s)
        began = time.perf_counter()
        move = t.send if t.rank == 0 else t.recv
        works = [move(numbered(0), 1 - t.rank, 0) for _ in range(2)]
        return began, [timed(work) for work in works][-1]

    (_, sent), (posted, received) = run_local(2, body, rules=rules, wire_s=wire_s)
    assert min(sent, received) - posted >= 2 * wire_s


def test_work_done_while_a_message_is_under_way_hides_it() -> None:
    def body(t: Transport) -> float:
        t.open_channels(BOTH_WAYS)
        if t.rank == 0:
            t.send(numbered(1), 1, 0).wait()
            return 0.0
        work = t.recv(numbered(0), 0, 0)
        time.sleep(0.06)
        began = time.perf_counter()
        return timed(work) - began

    assert min(run_local(2, body, wire_s=0.05, rules="nccl")[1] for _ in range(3)) < 0.02


@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
def test_ranks_that_all_wait_for_messages_under_way_are_no_deadlock(rules: Rules) -> None:
    def body(t: Transport) -> float:
        t.open_channels([(0, 1), (1, 2), (2, 0)])
        token = numbered(t.rank)
        for _ in range(4):
            incoming = numbered(-1)
            works = [t.recv(incoming, (t.rank - 1) % 3, 0), t.send(token, (t.rank + 1) % 3, 0)]
            for work in works:
                work.wait()
            token = incoming + 1
        return token[0].item()

    assert run_local(3, body, rules=rules, wire_s=0.01) == [6, 4, 5]


def test_a_deadlock_is_seen_while_the_wire_is_slow() -> None:
    def body(t: Transport) -> None:
        t.open_channels(BOTH_WAYS)
        if t.rank == 0:
            t.send(numbered(0), 1, 0).wait()
        else:
            t.recv(numbered(0), 0, 0).wait()
        t.recv(numbered(0), 1 - t.rank, 1).wait()

    began = time.monotonic()
    with pytest.raises(StallError, match=r"deadlock(.|\n)*rank 0 waits for message 0 from rank 1"):
        run_local(2, body, rules="nccl", wire_s=0.02)
    assert time.monotonic() - began < 5

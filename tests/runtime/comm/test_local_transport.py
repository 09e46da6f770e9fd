"""Ranks that are threads of one process, all at once or in turns: messages, collectives, and what is refused."""

import copy
import threading
import time

import pytest
import torch

from quintsched.errors import MisfitError, StallError
from quintsched.runtime.comm import Group, LocalTransport, LocalWorld, ReduceOp, Rules, Transport, run_local
from quintsched.runtime.comm.autograd_collectives import copy_to_group, reduce_from_group
from quintsched.runtime.comm.local.threads_in_turns import run_in_turns

from .group_checks import WORLD, check_collectives, make_groups


def world_group(transport: Transport) -> Group:
    return transport.make_group([tuple(range(transport.world_size))])


def test_messages_match_by_tag_and_are_first_in_first_out_within_one() -> None:
    def body(t: Transport) -> list[float]:
        t.open_channels([(0, 1)])
        if t.rank == 0:
            for value, tag in ((1.0, 7), (2.0, 7), (3.0, 5)):
                t.send(torch.tensor([value]), 1, tag).wait()
            return []
        buffers = [torch.zeros(1) for _ in range(3)]
        works = [t.recv(b, 0, tag) for b, tag in zip(buffers, (5, 7, 7), strict=True)]
        for work in reversed(works):
            work.wait()
            work.wait()
        return [b.item() for b in buffers]

    assert run_local(2, body)[1] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(("rules", "tag"), [("mailbox", " with tag 4"), ("nccl", "")])
@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_message_that_does_not_fit_its_buffer_is_named(wrong: torch.Tensor, rules: Rules, tag: str) -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        (t.send(wrong, 1, 4) if t.rank == 0 else t.recv(torch.zeros(2), 0, 4)).wait()

    with pytest.raises(MisfitError, match=rf"rank 1 expected message 0 from rank 0{tag}, float32 \(2,\)") as info:
        run_local(2, body, rules=rules)
    assert info.value.__notes__ == ["on rank 1 of 2"]


def test_the_first_error_wakes_all_and_is_the_one_raised() -> None:
    stopped: dict[int, str] = {}

    def body(t: Transport) -> None:
        t.open_channels([(0, 1), (0, 2)])
        if t.rank == 0:
            time.sleep(0.05)
            raise ZeroDivisionError("mine")
        try:
            t.recv(torch.zeros(1), 0, 3).wait()
        except StallError as error:
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


def test_a_wait_ends_with_the_timeout() -> None:
    world = LocalWorld(2, timeout_s=0.05)
    transport = LocalTransport(world, 1)
    transport.open_channels([(0, 1)])
    with pytest.raises(StallError, match=r"rank 1 waited 0.05 s for message 0 from rank 0"):
        transport.recv(torch.zeros(1), 0, 0).wait()


@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
def test_every_collective_gives_what_it_says(rules: Rules) -> None:
    run_local(WORLD, lambda t: [check_collectives(t, group) for group in make_groups(t)], rules=rules)


def test_parts_that_are_not_what_the_other_expects_are_refused() -> None:
    def body(t: Transport) -> None:
        world_group(t).all_to_all(torch.empty(3), torch.empty(3), [2, 1], [2, 1]).wait()

    with pytest.raises(MisfitError, match="member 0 sends 1 row to member 1, which expects 2"):
        run_local(2, body)


@pytest.mark.parametrize("shape", [(3,), (2,)])
def test_collectives_that_disagree_name_the_ranks(shape: tuple[int, ...]) -> None:
    def body(t: Transport) -> None:
        group = world_group(t)
        if t.rank == 0:
            group.all_reduce(torch.zeros(2), ReduceOp.MAX).wait()
        else:
            group.all_reduce(torch.zeros(shape)).wait()

    with pytest.raises(MisfitError, match=r"collective 0: rank . issued all_reduce .*, rank . all_reduce"):
        run_local(2, body)


def test_partitions_that_disagree_or_do_not_cover_the_world_are_refused() -> None:
    with pytest.raises(MisfitError, match="splits the world into"):
        run_local(2, lambda t: t.make_group([(0,), (1,)] if t.rank else [(0, 1)]))
    for partition in ([(0,)], [(0, 1), (1,)], [(1, 0)]):
        with pytest.raises(MisfitError):
            LocalTransport(LocalWorld(2), 0).make_group(partition)


def test_what_would_be_silent_on_a_real_wire_is_refused() -> None:
    transport = LocalTransport(LocalWorld(3), 0)
    transport.open_channels([(0, 1)])
    with pytest.raises(MisfitError, match="rank 0, channel 0 to 2 was never opened"):
        transport.send(torch.ones(1), 2, 0)
    with pytest.raises(MisfitError, match="channel 1 to 0 was never opened"):
        transport.recv(torch.ones(1), 1, 0)
    with pytest.raises(MisfitError, match=r"float32 \(3, 2\) is not contiguous"):
        transport.send(torch.ones(2, 3).t(), 1, 0)
    with pytest.raises(MisfitError, match="on meta"):
        transport.send(torch.ones(1, device="meta"), 1, 0)
    with pytest.raises(MisfitError, match="no channel from rank 1 to rank 1"):
        transport.open_channels([(1, 1)])
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
        with pytest.raises(MisfitError, match=r"group of ranks \[0, 1\]"):
            call()


def test_a_function_may_go_on_behind_the_end_of_its_rank() -> None:
    def body(t: Transport) -> int:
        t.close()
        time.sleep(0.05)
        return t.rank

    assert run_local(2, body) == [0, 1]


CPU = torch.device("cpu")


def test_members_run_one_at_a_time_and_meet_in_forward_and_backward() -> None:
    running: list[int] = []

    def work(group: Group) -> tuple[float, float]:
        running.append(group.index)
        x = torch.full((1,), 2.0, requires_grad=True)
        entered = copy_to_group(x, group) * (group.index + 1)
        assert running == [group.index]
        running.clear()
        y = reduce_from_group(entered, group)
        y.backward()
        running.clear()
        assert x.grad is not None
        return float(y.detach()), float(x.grad)

    before = threading.active_count()
    assert run_in_turns(3, CPU, work) == [(12.0, 6.0)] * 3
    assert threading.active_count() == before


def test_members_that_do_unlike_things_get_an_error_and_none_waits_for_ever() -> None:
    def ends(group: Group) -> None:
        if group.index:
            group.all_reduce(torch.ones(1)).wait()

    def fails(group: Group) -> None:
        if group.index:
            raise ValueError("as its code is wrong")
        group.all_reduce(torch.ones(1)).wait()

    with pytest.raises(StallError, match="deadlock"):
        run_in_turns(2, CPU, ends)
    with pytest.raises(ValueError, match="as its code is wrong"):
        run_in_turns(2, CPU, fails)


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        if t.rank == 1:
            t.recv(torch.zeros(1), 0, 0).wait()

    with pytest.raises(StallError, match="rank 0 has ended"):
        run_local(2, body)


def test_a_copied_module_keeps_its_group() -> None:
    group = LocalTransport(LocalWorld(2), 0).make_group([(0, 1)])
    assert copy.deepcopy({"group": group})["group"] is group


def test_threads_take_over_the_grad_mode() -> None:
    with torch.no_grad():
        assert run_local(2, lambda t: torch.is_grad_enabled()) == [False, False]
    assert run_local(2, lambda t: torch.is_grad_enabled()) == [True, True]

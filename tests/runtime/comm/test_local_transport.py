import copy
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import MisfitError, StallError
from quintsched.runtime.comm import Group, LocalTransport, LocalWorld, ReduceOp, SelfGroup, Transport, run_local


def world_group(transport: Transport) -> Group:
    return transport.make_group([tuple(range(transport.world_size))])


def test_results_come_in_the_order_of_ranks_from_threads_named_after_them() -> None:
    names = run_local(3, lambda t: (t.rank, threading.current_thread().name))
    assert names == [(0, "rank0"), (1, "rank1"), (2, "rank2")]


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


def test_a_sender_may_reuse_its_tensor_after_the_wait() -> None:
    def body(t: Transport) -> float:
        t.open_channels([(0, 1)])
        tensor = torch.ones(2)
        if t.rank == 0:
            t.send(tensor, 1, 0).wait()
            tensor.fill_(9.0)
            return 1.0
        time.sleep(0.02)
        t.recv(tensor.zero_(), 0, 0).wait()
        return tensor[0].item()

    assert run_local(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_message_that_does_not_fit_its_buffer_is_named(wrong: torch.Tensor) -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        (t.send(wrong, 1, 4) if t.rank == 0 else t.recv(torch.zeros(2), 0, 4)).wait()

    with pytest.raises(MisfitError, match=r"rank 1 expected message 0 from rank 0 with tag 4, float32 \(2,\)") as info:
        run_local(2, body)
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


def test_a_deadlock_is_seen_at_once_and_told() -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1), (1, 0)])
        t.recv(torch.zeros(1), 1 - t.rank, 0).wait()

    began = time.monotonic()
    with pytest.raises(StallError, match=r"deadlock(.|\n)*rank 0 waits for message 0 from rank 1 (.|\n)*rank 1 waits"):
        run_local(2, body)
    assert time.monotonic() - began < 5


def test_waiting_for_a_rank_that_has_ended_is_a_deadlock() -> None:
    def body(t: Transport) -> None:
        t.open_channels([(0, 1)])
        if t.rank == 1:
            t.recv(torch.zeros(1), 0, 0).wait()

    with pytest.raises(StallError, match="rank 0 has ended"):
        run_local(2, body)


def test_a_wait_ends_with_the_timeout() -> None:
    world = LocalWorld(2, timeout_s=0.05)
    transport = LocalTransport(world, 1)
    transport.open_channels([(0, 1)])
    with pytest.raises(StallError, match=r"rank 1 waited 0.05 s for message 0 from rank 0"):
        transport.recv(torch.zeros(1), 0, 0).wait()


def test_groups_reduce_gather_scatter_and_broadcast() -> None:
    def body(t: Transport) -> None:
        group = t.make_group([(0, 2), (1, 3)])
        first, second = group.ranks
        assert group.index == group.ranks.index(t.rank)
        x = torch.full((2, 3), float(t.rank))
        maximum, minimum = x.clone(), x.clone()
        gathered, scattered = torch.empty(4, 3), torch.empty(1, 3)
        swapped, parts = torch.empty(2, 3), x + torch.tensor([[0.0], [0.5]])
        source = x.clone()
        works = [
            group.all_reduce(maximum, ReduceOp.MAX),
            group.all_reduce(minimum, ReduceOp.MIN),
            group.all_gather(gathered, x),
            group.reduce_scatter(scattered, x),
            group.all_to_all(swapped, parts),
            group.broadcast(source, 1),
        ]
        for work in reversed(works):
            work.wait()
        assert maximum.eq(second).all()
        assert minimum.eq(first).all()
        assert gathered[:, 0].tolist() == [first, first, second, second]
        assert scattered.eq(first + second).all()
        assert swapped[:, 0].tolist() == [first + group.index / 2, second + group.index / 2]
        assert source.eq(second).all()
        assert x.eq(t.rank).all()

    run_local(4, body)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 4), data=st.data())
def test_parts_of_any_size_are_swapped(size: int, data: st.DataObject) -> None:
    parts = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    rows = data.draw(st.lists(parts, min_size=size, max_size=size))

    def body(t: Transport) -> list[float]:
        sent, received = rows[t.rank], [row[t.rank] for row in rows]
        parcel = [t.rank + peer / 8 for peer, count in enumerate(sent) for _ in range(count)]
        swapped = torch.empty(sum(received), 1)
        world_group(t).all_to_all(swapped, torch.tensor(parcel).view(-1, 1), received, sent).wait()
        found: list[float] = swapped.flatten().tolist()
        return found

    for rank, found in enumerate(run_local(size, body, rules="nccl")):
        assert found == [peer + rank / 8 for peer in range(size) for _ in range(rows[peer][rank])]


def test_parts_that_are_not_what_the_other_expects_are_refused() -> None:
    def body(t: Transport) -> None:
        world_group(t).all_to_all(torch.empty(3), torch.empty(3), [2, 1], [2, 1]).wait()

    with pytest.raises(MisfitError, match="member 0 sends 1 row to member 1, which expects 2"):
        run_local(2, body)


@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 4), calls=st.integers(1, 4), seed=st.integers(0, 99))
def test_sums_are_bitwise_the_same_on_all_ranks_and_in_rank_order(size: int, calls: int, seed: int) -> None:
    values = torch.randn(calls, size, 33, generator=torch.Generator().manual_seed(seed))

    def body(t: Transport) -> torch.Tensor:
        group = world_group(t)
        mine = [values[call, t.rank].clone() for call in range(calls)]
        for work in [group.all_reduce(x) for x in mine]:
            work.wait()
        return torch.stack(mine)

    expected = values[:, 0].clone()
    for rank in range(1, size):
        expected += values[:, rank]
    assert all(torch.equal(result, expected) for result in run_local(size, body))


def test_finished_collectives_and_messages_leave_nothing_behind() -> None:
    world = LocalWorld(1)
    transport = LocalTransport(world, 0)
    assert isinstance(world_group(transport), SelfGroup)

    def body(t: Transport) -> None:
        assert isinstance(t, LocalTransport)
        t.open_channels([(0, 1)])
        world_group(t).all_reduce(torch.ones(2)).wait()
        (t.send(torch.ones(1), 1, 0) if t.rank == 0 else t.recv(torch.ones(1), 0, 0)).wait()
        world_group(t).all_reduce(torch.ones(2)).wait()
        assert t.rank == 0 or t._world.wire.num_open == 0
        worlds.append(t._world)

    worlds: list[LocalWorld] = []
    run_local(2, body)
    assert worlds[0].meetings.num_open == 0


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


def test_a_group_of_one_is_done_at_once() -> None:
    group = SelfGroup(5, torch.device("cpu"))
    x, out = torch.arange(3.0), torch.empty(3)
    for work in (
        group.all_gather(out, x),
        group.reduce_scatter(out, x),
        group.all_reduce(out),
        group.broadcast(out, 0),
    ):
        work.wait()
    assert group.ranks == (5,)
    assert torch.equal(out, x)


def test_threads_take_over_the_grad_mode() -> None:
    with torch.no_grad():
        assert run_local(2, lambda t: torch.is_grad_enabled()) == [False, False]
    assert run_local(2, lambda t: torch.is_grad_enabled()) == [True, True]


def test_a_copied_module_keeps_its_group() -> None:
    group = LocalTransport(LocalWorld(2), 0).make_group([(0, 1)])
    assert copy.deepcopy({"group": group})["group"] is group


def test_a_function_may_go_on_behind_the_end_of_its_rank() -> None:
    def body(t: Transport) -> int:
        t.close()
        time.sleep(0.05)
        return t.rank

    assert run_local(2, body) == [0, 1]

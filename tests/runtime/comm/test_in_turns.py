"""A group whose members are all in one process, of which one runs at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from quintsched.errors import StallError
from quintsched.runtime.comm import Group
from quintsched.runtime.comm.autograd_collectives import copy_to_group, reduce_from_group
from quintsched.runtime.comm.local.threads_in_turns import run_in_turns

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

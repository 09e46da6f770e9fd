"""Rings and trees between three processes over gloo: the library's own sums, and training as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quintsched as qs
from quintsched.runtime.comm import Transport, Work, connect
from quintsched.runtime.comm.message_collectives import SPELLED_TAG

from ..ranks import run_ranks
from ..toys import Task, sgd, tiny_vit, train_plainly, train_rank, worst_difference
from .spelled_checks import WORLD, check_spelled


def count_chunks(transport: Transport) -> list[int]:
    """Return a list that grows by the peer of each chunk that the transport sends."""
    sent: list[int] = []
    send = transport.send

    def counted(tensor: Tensor, peer: int, tag: int) -> Work:
        if tag == SPELLED_TAG:
            sent.append(peer)
        return send(tensor, peer, tag)

    transport.send = counted  # type: ignore[method-assign]
    return sent


def check_training(transport: Transport) -> None:
    plan = qs.compile("1f1b", mesh=f"dp={WORLD}", microbatches=2, communication="ring")
    task = Task.make(2, 6 * WORLD, torch.float64)
    sent = count_chunks(transport)
    outcome = train_rank(transport, plan, task, tiny_vit())
    assert worst_difference([outcome], train_plainly(task, tiny_vit(), 2, sgd)) < 1e-10
    assert sent == [(transport.rank + 1) % WORLD] * (len(task.inputs) * 2 * (WORLD - 1))


def run_rank() -> None:
    transport = connect("gloo", timeout_s=60)
    check_spelled(transport)
    check_training(transport)
    transport.close()


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.slow
def test_three_processes_over_gloo() -> None:
    assert run_ranks(run_rank, WORLD) == [0] * WORLD

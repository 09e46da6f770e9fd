"""Rings and trees of three ranks over NCCL, carried out on a stream of their own; ranks share a GPU where need be."""

from __future__ import annotations

import os

import pytest
import torch

from quintsched.runtime.comm import connect
from tests.runtime.comm.test_message_collectives_processes import WORLD, check_spelled
from tests.runtime.ranks import run_ranks

from .sharing import environment, wants_ranks


def run_rank() -> None:
    os.environ.update(environment(WORLD))
    transport = connect("nccl", timeout_s=120)
    check_spelled(transport)
    torch.cuda.synchronize()
    transport.close()


@pytest.mark.processes
@wants_ranks(WORLD)
def test_rings_and_trees_over_nccl() -> None:
    assert run_ranks(run_rank, WORLD) == [0] * WORLD

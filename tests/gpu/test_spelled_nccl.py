"""Rings and trees of three ranks over NCCL, carried out on a stream of their own; ranks share a GPU where need be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quintsched.runtime.comm import connect
from tests.runtime.comm.test_message_collectives_processes import WORLD, check_spelled
from tests.runtime.comm.test_torch_backends import run_ranks

from .sharing import environment, wants_ranks


def run_rank(rank: int, port: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environment(WORLD))
    transport = connect("nccl", timeout_s=120)
    check_spelled(transport)
    torch.cuda.synchronize()
    transport.close()


@pytest.mark.processes
@wants_ranks(WORLD)
def test_rings_and_trees_over_nccl(tmp_path: Path) -> None:
    assert run_ranks(run_rank, WORLD, tmp_path) == [0] * WORLD

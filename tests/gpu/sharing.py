"""Ranks on one machine over NCCL, several to a GPU where there are fewer GPUs than ranks.

NCCL 2.30 and newer let ranks share a GPU if they are told to; older ones refuse. Processes that share a GPU take turns
on it, unless NVIDIA's multi-process service runs: a message then takes milliseconds.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.launch.test_processes import run

ROOT = Path(__file__).parents[2]
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded: it may be newer than the one that torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is part of torch's own library
        return tuple(torch.cuda.nccl.version())
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def reason_to_skip(world_size: int) -> str:
    """Say why so many ranks cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    devices = torch.cuda.device_count()
    if devices < world_size and nccl_version() < (2, 30):
        found = ".".join(map(str, nccl_version()))
        return f"{world_size} ranks on {devices} GPUs want NCCL 2.30, this is {found}"
    return ""


def wants_ranks(world_size: int) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where so many ranks cannot run."""
    reason = reason_to_skip(world_size)
    return pytest.mark.skipif(bool(reason), reason=reason)


def environment(world_size: int) -> dict[str, str]:
    """Return what has to be in the environment of so many ranks."""
    return QUEUES | (SHARING if torch.cuda.device_count() < world_size else {})


def torchrun(monkeypatch: pytest.MonkeyPatch, world_size: int, *worker: str | Path, timeout_s: float) -> None:
    """Run `-m worker…` on so many ranks, from where they find the tests as modules; they have to end well."""
    monkeypatch.chdir(ROOT)
    for name, value in environment(world_size).items():
        monkeypatch.setenv(name, value)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    code, _, err = run(sys.executable, *launcher, "-m", *worker, timeout_s=timeout_s)
    assert code == 0, err

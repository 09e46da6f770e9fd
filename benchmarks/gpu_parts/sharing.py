"""Ranks on one machine over NCCL, several to a GPU where there are fewer GPUs than ranks.

    GPUs >= ranks     a GPU each
    GPUs <  ranks     NCCL 2.30 and newer let ranks share a GPU if configured to; older ones refuse

The loaded library counts, not the one that torch was built with: `LD_PRELOAD` brings another. Processes that share
a GPU take turns on it, and a message takes milliseconds, unless NVIDIA's multi-process service runs. NCCL's
transports between two processes of one GPU depend on the machine (containers may forbid some), so they are probed once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from .world import WorldFailedError, run_world

LEAST_VERSION = (2, 30)
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
WIRES: Mapping[str, Mapping[str, str]] = {
    "as NCCL chooses": {},
    "through the host's memory": {"NCCL_P2P_DISABLE": "1"},
    "through sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
}
"""Environment variables for NCCL's transports, in the order in which they are tried."""

PROBE = Path(__file__).with_name("probe.py")
PROBE_LIMIT_S = 60.0


class CannotShareError(Exception):
    """Ranks cannot share the GPUs of this machine; has the reason, and advice."""


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that is loaded: it may be newer than the one that torch was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # it is part of torch's own library
        return tuple(int(part) for part in torch.cuda.nccl.version()[:3])
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def how_to_share() -> str:
    """Return advice on installing an NCCL that lets ranks share a GPU."""
    package = f"nvidia-nccl-cu{(torch.version.cuda or '13').partition('.')[0]}"
    return (
        f"pip install --no-deps --target out/nccl '{package}>=2.30', then run with "
        "LD_PRELOAD=$PWD/out/nccl/nvidia/nccl/lib/libnccl.so.2 (make gpu NCCL=…)"
    )


def reason_to_skip(world_size: int) -> str:
    """Return the reason why so many ranks cannot run here over NCCL; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    devices = torch.cuda.device_count()
    if devices < world_size and nccl_version() < LEAST_VERSION:
        found = ".".join(map(str, nccl_version()))
        return f"{world_size} ranks on {devices} GPU(s) want NCCL 2.30, this is {found}: {how_to_share()}"
    return ""


def environment(world_size: int) -> dict[str, str]:
    """Return the environment variables for so many ranks.

    Raises:
        CannotShareError: they would share a GPU, and NCCL cannot connect two processes of one GPU.
    """
    shares = 1 <= torch.cuda.device_count() < world_size
    return QUEUES | (SHARING | dict(WIRES[find_wire()]) if shares else {})


def find_wire() -> str:
    """Return the first of `WIRES` by which two processes of one GPU can communicate; tried once."""
    found, refusals = _try_wires()
    if not found:
        raise CannotShareError("two processes of one GPU cannot connect over NCCL\n" + "\n".join(refusals))
    return found


@cache
def _try_wires() -> tuple[str, tuple[str, ...]]:
    refusals: list[str] = []
    for name, variables in WIRES.items():
        try:
            run_world(2, [str(PROBE)], timeout_s=PROBE_LIMIT_S, variables={**QUEUES, **SHARING, **variables})
        except WorldFailedError as error:
            refusals.append(f"{name}: {error}")
        else:
            return name, tuple(refusals)
    return "", tuple(refusals)

"""Which wires a run takes: those that torchrun has laid, or this process alone."""

from __future__ import annotations

import os

import torch

from quintsched.errors import MisfitError
from quintsched.plan import Plan

from . import LocalTransport, LocalWorld, Rules, Transport, connect


def connect_for(plan: Plan, timeout_s: float, name: str = "auto", rules: Rules | None = None) -> Transport:
    """Return the transport that a run of `plan` wants: NCCL or gloo under torchrun, else this process alone.

    "auto" and "nccl" stand for a GPU also where there is one process.

    Raises `MisfitError` for a mesh of several ranks outside torchrun, or a world size that is not the mesh's.
    """
    launched = "WORLD_SIZE" in os.environ
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan.mesh.require_world_size(world_size)
    wants_nccl = torch.cuda.is_available() if name == "auto" else name == "nccl"
    if not launched:
        if wants_nccl and not torch.cuda.is_available():
            raise MisfitError("transport nccl wants a CUDA device and there is none; choose gloo")
        device = "cuda" if wants_nccl else "cpu"
        return LocalTransport(LocalWorld(1, device, timeout_s=timeout_s, rules=rules or "mailbox"), 0)
    return connect("nccl" if wants_nccl else "gloo", timeout_s, rules=rules)

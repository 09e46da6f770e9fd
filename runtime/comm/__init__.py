"""The wires between ranks: in one process, over gloo, or over NCCL, behind one interface."""

from ..job.choices import Rules
from .base import DoneWork, Group, ReduceOp, SelfGroup, Transport, Work, describe
from .local.transport import LocalTransport, run_local
from .local.world import LocalWorld
from .torch_backends import as_group, connect

__all__ = [
    "DoneWork",
    "Group",
    "LocalTransport",
    "LocalWorld",
    "ReduceOp",
    "Rules",
    "SelfGroup",
    "Transport",
    "Work",
    "as_group",
    "connect",
    "describe",
    "run_local",
]

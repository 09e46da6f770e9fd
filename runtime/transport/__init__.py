"""The wires between ranks: in one process, over gloo, or over NCCL, behind one interface."""

from .base import DoneWork, Group, ReduceOp, Rules, SelfGroup, Transport, Work, describe
from .distributed import as_group, connect
from .local import LocalTransport, run_local
from .local_world import LocalWorld

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

"""What ranks say to each other, behind one interface: over NCCL or gloo, or from thread to thread in one process.

`base` is the interface, `torch_backends` and `local` are what is behind it, `connection` picks one for a run;
`host_link` goes to the host's memory; `autograd_collectives` have backwards, `message_collectives` are spelled out in
messages; `device` is all that knows of accelerators, `clock` all that knows the time. Imports `job`, for the names of
wires.
"""

from ..settings.run_settings import Rules
from .base import DoneWork, Group, ReduceOp, SelfGroup, Transport, Work, describe
from .local.transport import EchoGroup, LocalTransport, run_local
from .local.world import LocalWorld
from .torch_backends import connect
from .torch_groups import as_group

__all__ = [
    "DoneWork",
    "EchoGroup",
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

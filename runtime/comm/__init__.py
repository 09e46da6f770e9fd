"""Communication between ranks behind one interface: over NCCL or gloo, or between threads of one process.

`transport_interface` is the interface, `gloo_and_nccl_transports` and `local` implement it, `choose_transport` picks
one for a run; `host_copies` copies to host memory; `autograd_collectives` are differentiable, `message_collectives`
are built from point-to-point messages; `device` is the only module that knows accelerators, `clocks` the only one that
reads time. Imports `settings`, for the names of transports, and `watch`.
"""

from ..settings.allowed_setting_values import Rules
from .gloo_and_nccl_transports import connect
from .local.in_process_transport import EchoGroup, LocalTransport, run_local
from .local.rank_threads_and_deadlocks import LocalWorld
from .torch_process_groups import as_group
from .transport_interface import DoneWork, Group, ReduceOp, SelfGroup, Transport, Work, describe

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

"""Choice of the transport of a run: process groups under torchrun, or this process alone.

torchrun, a device per local rank                  NCCL, or the accelerator's counterpart
torchrun, fewer devices or none                    gloo
one process                                        a local transport, on an accelerator if there is one
"""

from __future__ import annotations

import os
from pathlib import Path

from quintsched.check_call_arguments import NUMBER, PLAN, TEXT, takes
from quintsched.plan import Plan

from ..settings.allowed_setting_values import Rules, WireName
from ..settings.engine_settings import RunSettings
from ..watch.connect_to_monitor import WatchOptions
from ..watch.rendezvous.end_with_parent import end_with_launcher
from . import LocalTransport, LocalWorld, Transport, connect
from .device import device_kind, find_accelerator, has_device_for_each, library_of

COMPILING_S = 1800.0


@takes("connect_for(plan, timeout_s=60)", plan=PLAN, timeout_s=NUMBER, name=TEXT)
def connect_for(
    plan: Plan,
    timeout_s: float,
    name: WireName = "auto",
    rules: Rules | None = None,
    watch: WatchOptions | None = None,
) -> Transport:
    """Return the transport for a run of `plan`: NCCL or gloo under torchrun, else this process alone.

    `watch` has the options of hang detection over several processes. A rank of torchrun ends with torchrun from now on.

    "auto" and "nccl" choose a GPU also for a single process.

    Raises `MisfitError` for a mesh of several ranks outside torchrun, or a world size that is not the mesh's.
    """
    plan.mesh.require_world_size(int(os.environ.get("WORLD_SIZE", 1)))
    library = choose_library() if name == "auto" else name
    if "WORLD_SIZE" in os.environ:
        end_with_launcher()
        return connect(library, timeout_s, rules=rules, watch=watch, plan=plan)
    kind = device_kind(library)
    return LocalTransport(LocalWorld(1, kind, timeout_s=timeout_s, rules=rules or "mailbox"), 0)


def watch_by(settings: RunSettings, folder: Path | None = None) -> WatchOptions:
    """Return the watch options for the settings of a run; a verdict is written into `folder`.

    Where ranks compile, a wait may take half an hour at least without counting as a stall. A rank that dies is still
    detected, by its closed connection.
    """
    timeout_s = max(settings.timeout_s, COMPILING_S) if settings.compiled else settings.timeout_s
    return WatchOptions(
        timeout_s, settings.stall_after, settings.compiled, str((folder or Path()) / WatchOptions.report)
    )


def choose_library() -> str:
    """Return the accelerator's library where every rank of this machine has a device, else "gloo"."""
    accelerator = find_accelerator()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return library_of(accelerator) if accelerator is not None and has_device_for_each(local_ranks) else "gloo"

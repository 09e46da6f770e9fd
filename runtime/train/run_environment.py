"""Environment of a run, for its log: versions, device and host, so that a report of the run says where it ran."""

from __future__ import annotations

import os
import platform

import torch

from quintsched.errors import counted

from ..agreement.run_records import own_version
from ..comm import Transport
from ..comm.device import device_name, is_accelerator


def environment_of(transport: Transport) -> dict[str, object]:
    """Return the environment of this rank."""
    device = transport.device
    return {
        "quintsched": own_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": device_name(device) if is_accelerator(device) else f"cpu, {counted(os.cpu_count() or 1, 'core')}",
        "system": f"{platform.system()} {platform.machine()}",
        "host": platform.node(),
    }

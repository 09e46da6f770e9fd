"""End of a process together with its parent, however that ends.

Linux        parent death signal: the kernel kills this process, even while it hangs in a library, or is stopped
elsewhere    a thread polls whether the parent still exists, and kills the process if not

    python -m quintsched.runtime.watch.rendezvous.end_with_parent PID MODULE ARGUMENT …   runs a module like this
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
from time import sleep

ORPHANED = 4
"""Exit code where the parent is gone from the start: that of a run whose peer died."""

LOOK_AT_PARENT_S = 1.0
_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def end_with(parent: int) -> None:
    """End this process with its parent, a process id; at once if it is not its parent any more."""
    if not _asks_kernel():
        threading.Thread(target=_look_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ORPHANED)


def end_with_launcher() -> None:
    """End this process with the launcher that started it as a rank, such as torchrun's agent; else do nothing."""
    if has_launcher():
        end_with(os.getppid())


def has_launcher() -> bool:
    """Whether this process was started as a rank, by torchrun or as torchrun does it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _asks_kernel() -> bool:
    if sys.platform != "linux":
        return False
    failed: int = ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    return not failed


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        sleep(LOOK_AT_PARENT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that ends with this one."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    of, module, *rest = sys.argv[1:]
    end_with(int(of))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

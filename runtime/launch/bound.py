"""Runs a module in a process that does not outlive the one that started it, however that one ends.

python -m quintsched.runtime.launch.bound PID MODULE ARGUMENT …

Linux        the kernel kills this process when its parent ends: also while it hangs in a library, or is stopped
elsewhere    a thread looks whether the parent is still there, and kills the process if not
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
"""The exit code where the parent was gone from the start: that of a run whose peer died."""

LOOK_S = 1.0
_SET_DEATH_SIGNAL = 1
"""Linux's PR_SET_PDEATHSIG."""


def main() -> None:
    """Run the module of the command line, with the rest as its arguments."""
    parent, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with(parent: int) -> None:
    """Let this process end with its parent, a process id; at once if that is its parent no more."""
    if not _asks_kernel():
        threading.Thread(target=_look_after, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(ORPHANED)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that ends with this one."""
    return [sys.executable, "-m", "quintsched.runtime.launch.bound", str(os.getpid()), module, *arguments]


def _asks_kernel() -> bool:
    if sys.platform != "linux":
        return False
    failed: int = ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    return not failed


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

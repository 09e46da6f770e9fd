"""Runs a module in a process that does not outlive the one that started it; see `rendezvous.parent`.

python -m quintsched.runtime.launch.bound PID MODULE ARGUMENT …
"""

from __future__ import annotations

import os
import runpy
import sys

from ..watch.rendezvous.parent import end_with


def main() -> None:
    """Run the module of the command line, with the rest as its arguments."""
    parent, module, *arguments = sys.argv[1:]
    end_with(int(parent))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that ends with this one."""
    return [sys.executable, "-m", "quintsched.runtime.launch.bound", str(os.getpid()), module, *arguments]


if __name__ == "__main__":
    main()

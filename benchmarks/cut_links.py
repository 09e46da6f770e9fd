"""A run of a host per rank, one of whose links is cut when that rank has come to the place of the fault.

    rank r    comes to it ─▶ "fired" ─▶ waits for "cut" ─▶ goes on, as far as it comes
    test                        └─▶ takes the wire of host r out of the switch ─▶ "cut"

Launchers are forked, as in `launched`, and enter the network of their host; who asks is told that it is a machine of
its own, with a name of its own.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

from tests.runtime.faults.injection import Injection, as_arguments
from tests.runtime.faults.launched import Outcome, end_all, launch, left_of, outcome_of
from tests.runtime.launch.hosts import Hosts, hosts
from tests.runtime.ranks import PRELOADED

TIMEOUT_S, LAUNCHERS_WAIT_S = 20.0, 3.0
"""Of waits of ranks, and of launchers for each other: a link counts as cut after 10 s."""
_NETWORK, _NAME = 0x40000000, 0x04000000
"""Linux's CLONE_NEWNET and CLONE_NEWUTS."""


def run_with_cut(
    num_hosts: int, injection: Injection, folder: Path, settings: dict[str, Any], limit_s: float = 90.0
) -> Outcome:
    """Run a job on so many hosts, cut the link of one, and return how it ended; nothing is left running.

    The exit code is that of all launchers, None if these differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings["runtime"]["timeout_s"] = TIMEOUT_S
    (folder / "job.yaml").write_text(json.dumps(settings))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with hosts(num_hosts, folder) as net:
        arguments = str(folder), as_arguments(injection), net.addresses[0], num_hosts
        launchers = [
            context.Process(target=_launch_on, args=(f"/run/netns/{name}", number, *arguments))
            for number, name in enumerate(net.names)
        ]
        for launcher in launchers:
            launcher.start()
        until = time.monotonic() + limit_s
        _cut_when_asked(net, injection.rank, folder, until)
        for launcher in launchers:
            launcher.join(max(until - time.monotonic(), 0.1))
        codes = {launcher.exitcode for launcher in launchers}
        time.sleep(0.3)
        left = left_of(folder)
        end_all(folder)
    return outcome_of(folder, codes.pop() if len(codes) == 1 else None, left)


def _cut_when_asked(net: Hosts, number: int, folder: Path, until: float) -> None:
    while not (folder / "fired").exists():
        if time.monotonic() > until:
            return
        time.sleep(0.005)
    net.cut(number)
    (folder / "cut").touch()


def _launch_on(network: str, number: int, folder: str, injected: dict[str, Any], master: str, num_hosts: int) -> None:
    """Be the launcher on a host."""
    from quintsched.runtime.launch import supervise
    from quintsched.runtime.watch import watch_thread

    enter_host(network, number)
    supervise.FAILED_WAITS_S = LAUNCHERS_WAIT_S
    watch_thread.machine = lambda: f"host{number}"  # type: ignore[attr-defined]
    where = ["--nnodes", str(num_hosts), "--node-rank", str(number), "--master", f"{master}:29517"]
    with contextlib.chdir(folder):
        launch(folder, injected, where)


def enter_host(network: str, number: int) -> None:
    """Have this process be in a network, under a host's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = os.open(network, os.O_RDONLY)
    if libc.setns(opened, _NETWORK) or libc.unshare(_NAME):
        raise OSError(ctypes.get_errno(), "cannot enter the host")
    os.close(opened)
    socket.sethostname(f"host{number}")

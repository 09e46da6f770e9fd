"""`python -m quintsched.runtime.calibrate.doctor_facts`: what a run finds on this machine, as JSON, for `doctor`.

    torch      its version, torchvision's        network    the name of this machine, interfaces, ports
    devices    kind, number, memory              links      two processes: a small all-reduce, and a large one
    threads    cores, and OMP_NUM_THREADS        memory     of the machine, and of /dev/shm

Prints a list of (name, found, state, advice); see `quintsched.cli.run_commands.doctor`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from quintsched.errors import QuintschedError, counted, import_advice

from ..comm import Transport
from ..comm.clocks import now_s
from ..comm.device import LIBRARIES, find_accelerator, library_of, library_version, memory_bytes, num_devices
from ..watch.rendezvous.network_addresses import LOOPBACK, interface_of, listen, own_addresses, require_interfaces
from .time_links import count_cores, run_processes

OLDEST_TORCH = (2, 9)
SHARING = (2, 30)
"""The version of NCCL from which on ranks can share a GPU."""
TORCHRUN_PORT = 29500
CALLS, SMALL, LARGE = 20, 256, 4 * 2**20
"""Number of timed all-reduces, and their float32 numbers."""
LINKS_TIMEOUT_S = 60.0

Row = tuple[str, str, str, str]


def main() -> None:
    """Print all findings."""
    rows = [*_torch(), *_torchvision(), *_devices(), *_threads(), *_memory(), *_network(), *_links()]
    json.dump(rows, sys.stdout)


def _torch() -> Iterator[Row]:
    found = torch.__version__  # with the build: +cpu, +cu130
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        yield "torch", found, "missing", "runs need torch 2.9 or newer"
    elif not dist.is_available():
        yield "torch", found, "missing", "this build has no torch.distributed; install another build"
    else:
        yield "torch", found, "good", ""


def _torchvision() -> Iterator[Row]:
    """Yield whether an installed torchvision imports beside this torch: timm and transformers import it."""
    if importlib.util.find_spec("torchvision") is not None:
        try:
            yield "torchvision", str(importlib.import_module("torchvision").__version__), "good", ""
        except Exception as error:
            yield "torchvision", str(error), "note", import_advice(error).removeprefix("; ")


def _devices() -> Iterator[Row]:
    kind = find_accelerator()
    if kind is None:
        unused = [library for library in LIBRARIES if dist.is_backend_available(library)]
        advice = f"torch is built with {unused[0]} and finds no device: does the driver see one?" if unused else ""
        yield "devices", "no accelerator: runs use the CPU, over gloo", "note" if unused else "good", advice
        return
    names = {torch.get_device_module(kind).get_device_name(index) for index in range(num_devices(kind) or 0)}
    memory = memory_bytes(torch.device(kind.type, 0)) / 1e9
    yield "devices", f"{num_devices(kind)} × {', '.join(sorted(names))}, {memory:.0f} GB each", "good", ""
    if version := library_version(kind):
        advice = "from 2.30 on ranks can share a GPU" if tuple(map(int, version.split("."))) < SHARING else ""
        yield library_of(kind), version, "good", advice


def _threads() -> Iterator[Row]:
    cores, said = count_cores(), os.environ.get("OMP_NUM_THREADS")
    found = f"{counted(cores, 'core')}, OMP_NUM_THREADS={said or 'unset'}"
    if said is not None and said.isdigit() and int(said) > cores:
        yield "threads", found, "note", "more threads than cores: ranks on the CPU slow each other"
    else:
        yield "threads", found, "good", "" if said else "set to 1 in each rank by `quintsched run`"


def _memory() -> Iterator[Row]:
    yield "memory", f"{memory_bytes(torch.device('cpu')) / 1e9:.0f} GB", "good", ""
    shared = Path("/dev/shm")
    if shared.is_dir():
        total = shutil.disk_usage(shared).total / 1e9
        advice = "" if total >= 0.5 else "data workers need more: --shm-size of the container"
        yield "/dev/shm", f"{total:.1f} GB", "note" if advice else "good", advice


def _network() -> Iterator[Row]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        yield "host name", f"{name} is {address}", "good", ""
    except OSError:
        advice = "runs over several machines: --master with an address, not with this name"
        yield "host name", f"{name} is unknown", "note", advice
    try:
        require_interfaces()
        interfaces = sorted({interface for address in own_addresses() if (interface := interface_of(address))})
        yield "interfaces", ", ".join(interfaces) or "loopback alone", "good", ""
    except QuintschedError as error:
        yield "interfaces", str(error), "missing", "unset it, or name one of these"
    try:
        with listen(LOOPBACK):
            pass
    except OSError as error:
        yield "ports", f"{LOOPBACK}: {error.strerror or error}", "missing", "ranks meet at a port of this address"
        return
    try:
        with listen(LOOPBACK, TORCHRUN_PORT):
            yield "ports", "free", "good", ""
    except OSError:
        advice = f"torchrun's port {TORCHRUN_PORT} is in use: torchrun --standalone, or --master-port"
        yield "ports", "free, but for one", "note", advice


def _links() -> Iterator[Row]:
    kinds = [torch.device("cpu")]
    found = find_accelerator()
    if found is not None and (num_devices(found) or 0) > 1:
        kinds.append(found)
    for kind in kinds:
        name = f"links ({kind.type})"
        try:
            small_s, large_s = run_processes(all_reduce_s, 2, kind, LINKS_TIMEOUT_S)[0]
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            yield name, said, "missing", "two processes cannot exchange tensors; docs/guide.md#ports-and-networks"
            continue
        rate = 4 * LARGE / large_s / 1e9
        yield name, f"all-reduce of 2 ranks: {small_s * 1e6:.0f} µs for 1 kB, {rate:.2f} GB/s", "good", ""


def all_reduce_s(transport: Transport) -> tuple[float, float]:
    """Return the mean seconds of a small and of a large all-reduce over all ranks."""
    world = transport.make_group([tuple(range(transport.world_size))])
    times = []
    for numbers in (SMALL, LARGE):
        tensor = torch.zeros(numbers, device=transport.device)
        world.all_reduce(tensor).wait()
        began = now_s()
        for _ in range(CALLS):
            world.all_reduce(tensor).wait()
        tensor.sum().item()
        times.append((now_s() - began) / CALLS)
    return times[0], times[1]


if __name__ == "__main__":
    main()

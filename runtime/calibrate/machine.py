"""Description of this machine from all measurements.

parts, one after the other  ──▶  Hardware(measured=Measured(…))  ──▶  cpu.json
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from quintsched.errors import MisfitError
from quintsched.files.atomic import write_whole
from quintsched.files.progress_line import progress
from quintsched.files.terminal import write_line
from quintsched.strategies.descriptions.hardware import Curve, Hardware, Measured

from ..comm.device import find_accelerator, is_accelerator, memory_bytes
from .measured_parts import MeasuredParts


def calibrate(device: torch.device, file: Path) -> Hardware:
    """Measure this machine for up to a minute, write its description into `file`, and return it.

    What was measured is kept beside it until all is there, so that an interrupted measurement goes on.
    Raises `MisfitError` where there is no such device; `UsageError` where a file cannot be written.
    """
    _require(device)
    torch.set_num_threads(1)  # as in the ranks of a run
    parts = MeasuredParts(file, device)
    if parts.done:
        write_line(f"going on with what {parts.path} has: {', '.join(parts.done)}; without it, all is measured anew")
    try:
        with progress("measuring this machine") as found:
            described = _described(device, parts.measure(found))
    except KeyboardInterrupt:
        write_line(_stopped(parts))
        raise
    write_whole(file, described.model_dump_json(indent=1, exclude_none=True) + "\n", "the description")
    parts.remove()
    return described


def _stopped(parts: MeasuredParts) -> str:
    if not parts.done:
        return "stopped before anything was measured"
    done, missing = ", ".join(parts.done), ", ".join(parts.missing)
    return f"stopped: {done} kept in {parts.path}; the same command measures what is missing: {missing}"


def _described(device: torch.device, measured: Measured) -> Hardware:
    accelerated = is_accelerator(device)
    memory_gbps = _most(measured.memory) / 1e9 if measured.memory else 1.0
    link_gbps = _most(measured.link) / 1e9 if measured.link else memory_gbps
    neighbours = max(measured.all_reduce, default=1)
    return Hardware(
        name=device.type,
        tflops={name: _most(curve) / 1e12 for name, curve in measured.matmul.items()},
        memory_gb=memory_bytes(device) / (1 if accelerated else neighbours) / 1e9,
        memory_gbps=memory_gbps,
        gpus_per_node=neighbours,
        link_gbps=link_gbps,
        network_gbps=link_gbps,
        pcie_gbps=memory_gbps,
        reserved_gb=1.0 if accelerated else 0.0,
        measured=measured,
        sources={"measured": f"quintsched calibrate on {platform.machine()}, torch {torch.__version__}"},
    )


def _most(curve: Curve) -> float:
    return max(curve.rates)


def _require(device: torch.device) -> None:
    found = find_accelerator()
    if device.type != "cpu" and (found is None or found.type != device.type):
        there = f"an accelerator of the kind {found.type}" if found else "no accelerator"
        raise MisfitError(f"this machine cannot measure {device.type!r}: there is {there}; choose --device cpu")

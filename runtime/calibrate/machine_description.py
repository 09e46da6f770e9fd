"""Description of this machine from all measurements.

parts, one after the other  ──▶  Hardware(measured=MeasuredRates(…))  ──▶  cpu.json

Parts of a measurement, kept as each is done, so that one that was interrupted goes on where it stopped.

    attention ✓   links ✓   matmul   memory   …          mine.json.partial, until all are there; then mine.json

The file beside the description says of which machine it is, what was measured, and what is missing. Parts of another
machine, or of another torch, are measured anew.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from quintsched.errors import InputError, MisfitError, counted
from quintsched.files.atomic import read_whole, write_whole
from quintsched.files.strictjson import parse_strict
from quintsched.files.terminal import write_line
from quintsched.files.terminal_progress import ProgressLine, progress
from quintsched.strategies.descriptions.hardware import Curve, Hardware, MeasuredRates

from ..comm.device import find_accelerator, is_accelerator, memory_bytes
from . import time_operations
from .time_links import count_cores, measure_links


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


def _described(device: torch.device, measured: MeasuredRates) -> Hardware:
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


MOST_PARTS_BYTES = 2**20
"""Limit of the size of a file of parts."""


def _attention(device: torch.device) -> dict[str, Any]:
    forward, backward = time_operations.attention_curves(device)
    return {"attention": forward, "attention_backward": backward}


def _links(device: torch.device) -> dict[str, Any]:
    found = measure_links(device)
    return found._asdict() if found else {}


def _operations(device: torch.device) -> dict[str, Any]:
    return {
        "memory": time_operations.memory_curve(device),
        "optimizer": time_operations.optimizer_curve(device),
        "kernel_s": time_operations.kernel_s(device),
        **({} if is_accelerator(device) else {"cores": count_cores()}),
    }


PARTS: Mapping[str, tuple[Callable[[torch.device], dict[str, Any]], float]] = {
    "matrix products": (lambda device: {"matmul": time_operations.matmul_curves(device)}, 0.15),
    "attention": (_attention, 0.15),
    "memory and optimizer": (_operations, 0.05),
    "messages and sums between processes": (_links, 0.65),
}
"""Each part: what gives its fields of `MeasuredRates`, and its share of the time on two cores."""


class MeasuredParts:
    """Measured parts of one machine, in a file beside the description `file`.

    Raises `InputError` where that file is none of ours, `UsageError` where it cannot be written.
    """

    def __init__(self, file: Path, device: torch.device) -> None:
        self.path = file.with_name(f"{file.name}.partial")
        self._device = device
        self._machine = f"{platform.node()}, {counted(count_cores(), 'core')}, torch {torch.__version__}, {device.type}"
        self._found = self._read()

    @property
    def done(self) -> list[str]:
        """Names of the measured parts."""
        return [name for name in PARTS if name in self._found]

    @property
    def missing(self) -> list[str]:
        """Names of the others."""
        return [name for name in PARTS if name not in self._found]

    def measure(self, progress: ProgressLine) -> MeasuredRates:
        """Measure what is missing, keep each part as soon as it is there, and return all."""
        for name in self.missing:
            shares = {part: share for part, (_, share) in PARTS.items()}
            progress.show_done(sum(shares[part] for part in self.done), sum(shares.values()), name)
            measured = MeasuredRates(**PARTS[name][0](self._device))
            self._found[name] = measured.model_dump(mode="json", exclude_unset=True, exclude_none=True)
            self._write()
        return self._all()

    def remove(self) -> None:
        """Remove the file, once the description is written."""
        self.path.unlink(missing_ok=True)

    def _all(self) -> MeasuredRates:
        return MeasuredRates.model_validate_json(
            json.dumps({k: v for part in self._found.values() for k, v in part.items()})
        )

    def _write(self) -> None:
        said = {"machine": self._machine, "missing": self.missing, "measured": self._found}
        write_whole(self.path, json.dumps(said, indent=1) + "\n", "what was measured")

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return the parts of the file, if there is one and it is of this machine."""
        if not self.path.is_file():
            return {}
        try:
            said: Any = parse_strict(read_whole(self.path, MOST_PARTS_BYTES, "what was measured"))
            if said["machine"] != self._machine:
                return {}
            self._found = {name: dict(said["measured"][name]) for name in PARTS if name in said["measured"]}
            self._all()
        except (InputError, ValidationError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self.path}: not what calibrate has left of a measurement; remove it") from error
        return self._found

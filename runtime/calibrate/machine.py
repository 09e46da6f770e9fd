"""Description of this machine from all measurements.

cores, memory     ─┐
operations        ─┼──▶ Hardware(measured=Measured(…))   ──▶ cpu.json
links, if any     ─┘
"""

from __future__ import annotations

import platform

import torch

from quintsched.errors import MisfitError
from quintsched.strategies.descriptions.hardware import Curve, Hardware, Measured

from ..comm.device import find_accelerator, is_accelerator, memory_bytes
from . import operations
from .links import Links, count_cores, measure_links


def calibrate(device: torch.device) -> Hardware:
    """Measure this machine for up to a minute and return its description.

    Raises `MisfitError` where there is no such device.
    """
    _require(device)
    torch.set_num_threads(1)  # as in the ranks of a run
    forward, backward = operations.attention_curves(device)
    links = measure_links(device)
    measured = Measured(
        matmul=operations.matmul_curves(device),
        attention=forward,
        attention_backward=backward,
        memory=operations.memory_curve(device),
        optimizer=operations.optimizer_curve(device),
        kernel_s=operations.kernel_s(device),
        cores=None if is_accelerator(device) else count_cores(),
        **(links._asdict() if links else {}),
    )
    return _described(device, measured, links)


def _described(device: torch.device, measured: Measured, links: Links | None) -> Hardware:
    accelerated = is_accelerator(device)
    memory_gbps = _most(measured.memory) / 1e9 if measured.memory else 1.0
    link_gbps = _most(links.link) / 1e9 if links else memory_gbps
    neighbours = max(links.all_reduce) if links else 1
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

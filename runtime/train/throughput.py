"""Rates of a training: tokens per second, model FLOPs utilisation, peak memory.

    tokens/s   token ids of the inputs, over all replicas
    MFU        3 x FLOPs of the forward / (seconds x ranks x peak of a rank)   Chowdhery et al. 2022, PaLM, appendix B
    memory     the most that the fullest rank has allocated (GPU), or its process's peak resident set (CPU)

FLOPs of a forward are counted by torch on the meta device (products, convolutions, attention); a backward takes twice
as many. The peak is `log.peak_tflops`, a known GPU's by its datasheet, or this CPU's by `quintsched calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import QuintschedError
from quintsched.strategies.descriptions.presets_and_files import calibrated_file, find_hardware, hardware_names

from ..comm.device import device_name, peak_bytes
from ..engine import Engine
from ..settings.allowed_setting_values import DTYPE_NAMES, Precision
from ..stage.batches.microbatches import most_rows

_BACKWARD_AND_FORWARD = 3


class Throughput:
    """Counts what a run processes; `read_rates` gives the rates of the steps since the last call.

    Args:
        engine: the engine whose steps they are.
        precision: the type that it computes in.
        peak_tflops: peak of one rank in 10^12 FLOP/s; None: that of its device, where that is known.
        forward_flops: returns the FLOPs of one sample's forward; None where they cannot be counted.
    """

    def __init__(
        self,
        engine: Engine,
        precision: Precision,
        peak_tflops: float | None,
        forward_flops: Callable[[], float | None],
    ) -> None:
        self._engine, self._forward_flops = engine, forward_flops
        self._peak = peak_tflops or peak_tflops_of(engine.transport.device, precision)
        self._flops: float | None = None
        self._tokens = self._samples = 0
        self._per_step: tuple[int, int] | None = None

    def note_batch(self, inputs: Any, targets: Any) -> None:
        """Count a replica's batch of one step; collective in the first step, whose sizes all ranks are told."""
        engine = self._engine
        ids = isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
        tokens = inputs.numel() if ids and engine.needs_inputs else 0
        samples = (most_rows((inputs, targets)) or 0) if engine.needs_inputs else 0
        self._tokens += tokens
        self._samples += samples
        if self._per_step is None:
            self._per_step = self._over_replicas(tokens, samples)

    def tokens_per_step(self) -> int:
        """Return the tokens of the run's first step, over all replicas; 0 of other inputs, or before it."""
        return self._per_step[0] if self._per_step else 0

    @property
    def samples_per_step(self) -> int:
        """The samples of the run's first step, over all replicas; 0 before it."""
        return self._per_step[1] if self._per_step else 0

    def _over_replicas(self, tokens: int, samples: int) -> tuple[int, int]:
        """Return the sums over replicas of what each rank that needs inputs has counted (collective)."""
        engine = self._engine
        all_tokens, all_samples, holders = engine.everyone.add_numbers(tokens, samples, engine.needs_inputs)
        share = engine.num_replicas / max(holders, 1)
        return round(all_tokens * share), round(all_samples * share)

    def read_rates(self, seconds: float) -> dict[str, float]:
        """Return the rates since the last call, in which so many seconds have passed (collective)."""
        tokens, samples = self._over_replicas(self._tokens, self._samples)
        self._tokens = self._samples = 0
        found: dict[str, float] = {"samples_per_s": samples / seconds}
        if tokens:
            found["tokens_per_s"] = tokens / seconds
        if self._peak is not None:
            if self._flops is None:
                self._flops = self._forward_flops() or 0.0
            if self._flops:
                work = _BACKWARD_AND_FORWARD * self._flops * samples
                found["mfu"] = work / (seconds * self._engine.plan.mesh.size * self._peak * 1e12)
        return found

    def read_ranks(self, seconds: float) -> dict[str, Any]:
        """Return the figures of ranks since the last call, in which so many seconds have passed (collective).

        The bubble is the share of all ranks' time in which they did not compute: waits and all between instructions.
        """
        busy, device = self._engine.clock.read_s() / seconds, self._engine.transport.device
        told = self._engine.everyone.share_bytes(f"{busy} {peak_bytes(device)}".encode())
        of_ranks, peaks = zip(*(map(float, text.split()) for text in told), strict=True)
        return {
            "bubble": 1 - sum(of_ranks) / len(of_ranks),
            "rank_busy": [round(share, 4) for share in of_ranks],
            "memory_gb": max(peaks) / 1e9,
            "rank_memory_gb": [round(peak / 1e9, 4) for peak in peaks],
        }


def peak_tflops_of(device: torch.device, precision: Precision) -> float | None:
    """Return the peak of a device by its datasheet, or as this CPU was calibrated; None where it is not known."""
    try:
        if device.type == "cpu":
            hardware = find_hardware("cpu") if calibrated_file().is_file() else None
        else:
            words = device_name(device).lower().replace("-", " ").split()
            known = [name for name in hardware_names() if name.partition("-")[0] in words]
            hardware = find_hardware(known[0]) if known else None
    except (QuintschedError, RuntimeError, AttributeError, OSError):
        return None
    if hardware is None:
        return None
    if (curve := hardware.measured.matmul.get(DTYPE_NAMES[precision])) is not None:
        return max(curve.rates) / 1e12
    return hardware.tflops.get(DTYPE_NAMES[precision])

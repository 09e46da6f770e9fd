"""Cutting what a replica gets of a batch into units: microbatches, or their slices along the sequence.

(samples, sequence, …) ──▶ this rank's chunks of the sequence, where the mesh has cp
                       ──▶ microbatches, equal numbers of samples ──▶ slices, equal stretches of the sequence
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan, ScheduleSpec

from ..parallel.context.context import WHOLE, SequenceShard
from .forward import Extras


@dataclass(frozen=True)
class Batch:
    """What a rank gets of a batch, cut into units (microbatches or their slices); what it does not need is empty."""

    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    extras: Sequence[Extras]


NOTHING = Batch((), (), ())
"""What a rank keeps of a batch when its step is over."""


class BatchCutter:
    """Moves what a rank needs of a batch to its device, and cuts it.

    Args:
        device: where the rank computes.
        dtype: of floating-point inputs; None leaves them.
        inputs: whether the rank needs inputs.
        targets: whether it needs targets.
        rank: its global rank, for error messages.
        shard: what of each sequence it gets.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        *,
        inputs: bool,
        targets: bool,
        rank: int,
        shard: SequenceShard,
    ) -> None:
        self._shard = shard
        self._device, self._dtype, self._rank = device, dtype, rank
        self._needs_inputs, self._needs_targets = inputs, targets

    def __call__(
        self, plan: Plan, inputs: Tensor | None, targets: Tensor | None, extras: Mapping[str, Tensor]
    ) -> Batch:
        """Return the units of a batch as the plan's schedule has them.

        Raises:
            UsageError: something that the rank needs is not given.
            MisfitError: samples or sequence cannot be cut evenly.
        """
        spec = plan.schedule
        of_extras = {name: self._extra_units(spec, name, tensor, inputs) for name, tensor in extras.items()}
        units = range(spec.num_units)
        return Batch(
            inputs=self._units(spec, "inputs", inputs) if self._needs_inputs else (),
            targets=self._units(spec, "targets", targets) if self._needs_targets else (),
            extras=[{name: cut[unit] for name, cut in of_extras.items()} for unit in units]
            if of_extras
            else [{}] * len(units),
        )

    def _units(self, spec: ScheduleSpec, name: str, tensor: Tensor | None) -> Sequence[Tensor]:
        microbatches = self._microbatches(spec.microbatches, name, tensor, self._shard)
        if spec.slices == 1:
            return microbatches
        first = microbatches[0]
        if first.dim() < 2 or first.shape[1] % spec.slices:
            raise MisfitError(f"{name} of shape {tuple(first.shape)} cannot be cut into {spec.slices} equal slices")
        return [unit for whole in microbatches for unit in whole.split(first.shape[1] // spec.slices, 1)]

    def _extra_units(self, spec: ScheduleSpec, name: str, tensor: Tensor, inputs: Tensor | None) -> Sequence[Tensor]:
        """One number per sample goes to every slice; all else runs along the sequence, as the inputs do."""
        cuts = spec.slices * self._shard.size
        if cuts == 1 or tensor.dim() > 1:
            if cuts > 1 and self._needs_inputs and inputs is not None and tensor.shape[1] != inputs.shape[1]:
                raise MisfitError(
                    f"{name} of shape {tuple(tensor.shape)} does not run along the sequence of {inputs.shape[1]}, and "
                    "cannot be cut along it"
                )
            return self._units(spec, name, tensor)
        return [unit for unit in self._microbatches(spec.microbatches, name, tensor) for _ in range(spec.slices)]

    def _microbatches(
        self, count: int, name: str, tensor: Tensor | None, shard: SequenceShard = WHOLE
    ) -> Sequence[Tensor]:
        if tensor is None:
            raise UsageError(f"rank {self._rank} needs {name}; see engine.needs_inputs and engine.needs_targets")
        if tensor.dim() == 0 or tensor.shape[0] % count or not tensor.shape[0]:
            raise MisfitError(f"{name} of shape {tuple(tensor.shape)} cannot be cut into {count} equal microbatches")
        dtype = self._dtype if name == "inputs" and tensor.is_floating_point() else None
        moved: Tensor = shard.cut(name, tensor).to(self._device, dtype, non_blocking=tensor.device.type == "cpu")
        units: Sequence[Tensor] = moved.split(tensor.shape[0] // count)
        return units

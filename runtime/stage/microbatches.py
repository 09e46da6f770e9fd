"""Cutting what a replica gets of a batch into units: microbatches, or their slices along the sequence.

(samples, sequence, …) ──▶ this rank's chunks of the sequence, where the mesh has cp
                       ──▶ microbatches, equal numbers of samples ──▶ slices, equal stretches of the sequence

Inputs, targets and extras may be trees (see `blocks.trees`): their tensors are cut, all else goes to every unit as it
is. A tensor of one row, or of no dimensions, belongs to all samples: every unit gets it whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.plan import Plan

from ..blocks.trees import PLAIN, Tensors, TensorSpec, Tree, TreeSpec, flatten, require_known
from ..parallel.context.context import WHOLE, SequenceShard
from .forward import Extras


@dataclass(frozen=True)
class Batch:
    """What a rank gets of a batch, cut into units (microbatches or their slices); what it does not need is empty.

    Attributes:
        inputs: the tensors of each unit's inputs, in order.
        targets: each unit's targets, built as they were given.
        extras: each unit's extras.
        input_tree: how inputs are built.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Any]
    extras: Sequence[Extras]
    input_tree: Tree = PLAIN

    def input_spec(self) -> TreeSpec:
        """Return the spec of the first unit of inputs."""
        return TreeSpec(self.input_tree, tuple(map(TensorSpec.of, self.inputs[0])))


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
        self, plan: Plan, inputs: Any, targets: Any, extras: Mapping[str, Any], *, needs_loss: bool = True
    ) -> Batch:
        """Return the units of a batch as the plan's schedule has them; unless it `needs_loss`, targets may be None.

        Raises:
            UsageError: something that the rank needs is not given.
            MisfitError: samples or sequence cannot be cut evenly.
        """
        spec = plan.schedule
        length = _length(inputs) if self._needs_inputs and inputs is not None else None
        tree, rows = self._rows(spec, "inputs", inputs) if self._needs_inputs else (PLAIN, ())
        of_extras = {name: self._extra_units(spec, name, extra, length) for name, extra in extras.items()}
        units = range(spec.num_units)
        return Batch(
            inputs=rows,
            targets=self._targets(spec, targets, needs_loss) if self._needs_targets else (),
            extras=[{name: cut[unit] for name, cut in of_extras.items()} for unit in units]
            if of_extras
            else [{}] * len(units),
            input_tree=tree,
        )

    def _targets(self, spec: ScheduleSpec, targets: Any, are_needed: bool) -> Sequence[Any]:
        if targets is None and not are_needed:
            return [None] * spec.num_units
        if isinstance(targets, Tensor):
            return self._units(spec, "targets", targets)
        tree, rows = self._rows(spec, "targets", targets)
        return [tree.build(row) for row in rows]

    def _rows(self, spec: ScheduleSpec, name: str, given: Any) -> tuple[Tree, Sequence[Tensors]]:
        """Return how a tree is built, and the tensors of each of its units."""
        if given is None:
            raise UsageError(f"rank {self._rank} needs {name}; see engine.needs_inputs and engine.needs_targets")
        tree, tensors = flatten(given)
        if tree.is_tensor:
            return tree, [(unit,) for unit in self._units(spec, name, given)]
        require_known(name, tree)
        _require_as_many_samples(name, tree, tensors)
        length = _length(given)
        cuts = [
            self._tree_units(spec, f"{name}{path}", tensor, length)
            for path, tensor in zip(tree.paths, tensors, strict=True)
        ]
        return tree, list(zip(*cuts, strict=True)) if cuts else [()] * spec.num_units

    def _extra_units(self, spec: ScheduleSpec, name: str, extra: Any, length: int | None) -> Sequence[Any]:
        if isinstance(extra, Tensor):
            return self._tree_units(spec, name, extra, length)
        tree, tensors = flatten(extra)
        require_known(name, tree)
        _require_as_many_samples(name, tree, tensors)
        if not tensors:
            return [extra] * spec.num_units
        cuts = [self._tree_units(spec, name + path, t, length) for path, t in zip(tree.paths, tensors, strict=True)]
        return [tree.build(row) for row in zip(*cuts, strict=True)]

    def _tree_units(self, spec: ScheduleSpec, name: str, tensor: Tensor, length: int | None) -> Sequence[Tensor]:
        """One number per sample goes to every slice; all else runs along the sequence, as the inputs do."""
        cuts = spec.slices * self._shard.size
        if cuts == 1 or tensor.dim() > 1:
            if cuts > 1 and length is not None and tensor.shape[1] != length:
                raise MisfitError(
                    f"{name} of shape {tuple(tensor.shape)} does not run along the sequence of {length}, and cannot be "
                    "cut along it"
                )
            return self._units(spec, name, tensor)
        return [unit for unit in self._microbatches(spec.microbatches, name, tensor) for _ in range(spec.slices)]

    def _units(self, spec: ScheduleSpec, name: str, tensor: Tensor) -> Sequence[Tensor]:
        microbatches = self._microbatches(spec.microbatches, name, tensor, self._shard)
        if spec.slices == 1:
            return microbatches
        first = microbatches[0]
        if first.dim() < 2 or first.shape[1] % spec.slices:
            raise MisfitError(f"{name} of shape {tuple(first.shape)} cannot be cut into {spec.slices} equal slices")
        return [unit for whole in microbatches for unit in whole.split(first.shape[1] // spec.slices, 1)]

    def _microbatches(self, count: int, name: str, tensor: Tensor, shard: SequenceShard = WHOLE) -> Sequence[Tensor]:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise MisfitError(f"{name} is a tensor of layout {tensor.layout}, which cannot be cut; give a dense one")
        is_input = name.startswith("inputs")
        dtype = self._dtype if is_input and tensor.is_floating_point() else None
        is_for_all = name not in ("inputs", "targets") and (tensor.dim() == 0 or (tensor.shape[0] == 1 < count))
        if not is_for_all and (tensor.dim() == 0 or tensor.shape[0] % count or not tensor.shape[0]):
            raise MisfitError(f"{name} of shape {tuple(tensor.shape)} cannot be cut into {count} equal microbatches")
        mine = shard.cut(name, tensor) if tensor.dim() else tensor
        moved: Tensor = mine.to(self._device, dtype, non_blocking=tensor.device.type == "cpu")
        if is_for_all:
            return [moved] * count
        units: Sequence[Tensor] = moved.split(tensor.shape[0] // count)
        return units


def _length(inputs: Any) -> int | None:
    """Return how long the sequences of inputs are: dimension 1 of the first tensor that has one."""
    return next((tensor.shape[1] for tensor in flatten(inputs)[1] if tensor.dim() > 1), None)


def _require_as_many_samples(name: str, tree: Tree, tensors: Tensors) -> None:
    """Raise `MisfitError` unless the tensors of a tree have as many rows, one row, or no dimensions."""
    rows = {path: len(t) for path, t in zip(tree.paths, tensors, strict=True) if t.dim() and len(t) != 1}
    if len(set(rows.values())) > 1:
        named = ", ".join(f"{name}{path} has {count}" for path, count in rows.items())
        raise MisfitError(
            f"the tensors of {name} have to have as many samples, dimension 0, to be cut into microbatches: {named}"
        )

"""Cutting of a replica's batch into units: microbatches, or their slices along the sequence.

(samples, sequence, …) ──▶ this rank's chunks of the sequence, where the mesh has cp
                       ──▶ microbatches, as even as possible ──▶ slices, equal parts of the sequence

Inputs, targets and extras may be trees (see `blocks.trees`): their tensors are cut, other values go to every unit
unchanged. A tensor of one row where there are more samples, or of no dimensions, belongs to all samples: every unit
gets it whole. Targets and extras may have several rows per sample, as `ids.view(-1)` has. With fewer samples than
microbatches, the last microbatches have none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...blocks.trees import (
    ONE_TENSOR,
    Tensors,
    TensorSpec,
    Tree,
    TreeSpec,
    attribute_of,
    flatten,
    map_tensors,
    require_known,
)
from ...parallel.context.context_parallel import WHOLE_SEQUENCE, SequenceShard
from ..stage_forward import Extras
from .sample_count_checks import fewest_rows, require_as_many_samples, require_no_rows


@dataclass(eq=False, slots=True)
class Batch:
    """A rank's share of a batch, cut into units (microbatches or their slices); data it does not need is empty.

    Attributes:
        inputs: the tensors of each unit's inputs, in order.
        targets: each unit's targets, in their original structure.
        extras: each unit's extras.
        microbatches: their number; a plan of more has no samples for the rest.
        input_tree: the structure of inputs.
        num_samples: number of samples; None where this rank's data does not show it.
        kind: batches with the identical object here differ in their numbers alone; None: unknown.
    """

    inputs: Sequence[Tensors]
    targets: Sequence[Any]
    extras: Sequence[Extras]
    microbatches: int
    input_tree: Tree = ONE_TENSOR
    num_samples: int | None = None
    kind: object = None

    def input_spec(self, unit: int = 0) -> TreeSpec:
        """Return the spec of a unit of inputs."""
        return TreeSpec(self.input_tree, tuple(map(TensorSpec.from_tensor, self.inputs[unit])))

    def target_spec(self, unit: int = 0) -> TreeSpec:
        """Return the spec of a unit of targets."""
        return TreeSpec.from_tree(self.targets[unit])

    def extra_specs(self, unit: int = 0) -> tuple[tuple[str, TreeSpec], ...]:
        """Return the specs of a unit of extras, by name."""
        return tuple([(name, TreeSpec.from_tree(extra)) for name, extra in sorted(self.extras[unit].items())])

    def cut_extras(self, slices: int) -> frozenset[str]:
        """Return the names of extras of which the second microbatch gets other tensors than the first."""
        if len(self.extras) <= slices:
            return frozenset()
        first, second = self.extras[0], self.extras[slices]
        pairs = {name: (flatten(one)[1], flatten(second[name])[1]) for name, one in first.items()}
        return frozenset(
            n
            for n, (mine, its) in pairs.items()
            if any(a is not b and b.numel() for a, b in zip(mine, its, strict=True))
        )

    def structure(self) -> Hashable | None:
        """Return a key of its structure and shapes; None for a batch with opaque objects."""
        tree, tensors = self._flatten()
        if tree.unknown() is not None or self.input_tree.unknown() is not None:
            return None
        specs = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]
        return tree, self.input_tree, tuple(specs), self.microbatches

    def tensors(self) -> Tensors:
        """Return all of its tensors, in the same order for the same structure."""
        return self._flatten()[1]

    def copy(self) -> Batch:
        """Return a copy with tensors in memory of its own."""
        tree, tensors = self._flatten()
        inputs, targets, extras = tree.build([tensor.detach().clone() for tensor in tensors])
        return replace(self, inputs=inputs, targets=targets, extras=extras)

    def _flatten(self) -> tuple[Tree, Tensors]:
        extras = [dict(sorted(of_unit.items())) for of_unit in self.extras]
        return flatten((list(map(tuple, self.inputs)), list(self.targets), extras))


NO_BATCH = Batch((), (), (), 0)
"""The batch between steps: no step's data is kept."""


MicrobatchSizes = tuple[int, ...]
"""Number of samples of each microbatch."""


@lru_cache
def sizes_of(samples: int, count: int, planned: int) -> MicrobatchSizes:
    """Return the sizes of `count` microbatches: as even as possible, larger ones first.

    The remaining ones, up to `planned`, have none.
    """
    each, rest = divmod(samples, count)
    return tuple([each + (number < rest) for number in range(count)] + [0] * (planned - count))


@dataclass(frozen=True)
class Division:
    """Division of a batch: samples into microbatches of some sizes, each of these into slices."""

    samples: int | None
    sizes: MicrobatchSizes
    slices: int

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.sizes) * self.slices


class _Cut(NamedTuple):
    """Row counts of a cut batch of plain tensors, reused for the next batch of its kind and plan.

    Attributes:
        plan: the plan; `kind`: the number of microbatches, and the kinds of inputs and targets.
        inputs, targets: number of rows in each unit.
        num_samples: number of samples.
    """

    plan: Plan
    kind: tuple[int, Hashable, Hashable]
    inputs: Sequence[int]
    targets: Sequence[int]
    num_samples: int | None


class BatchCutter:
    """Moves the parts of a batch that a rank needs to its device, and cuts them.

    Args:
        device: the rank's device.
        dtype: dtype for floating-point inputs; None: unchanged.
        inputs: whether the rank needs inputs.
        targets: whether it needs targets.
        rank: its global rank, for error messages.
        shard: this rank's part of each sequence.
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
        self._latest: _Cut | None = None
        self._nothing: Batch | None = None

    def __call__(
        self,
        plan: Plan,
        inputs: Any,
        targets: Any,
        extras: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        needs_loss: bool = True,
    ) -> Batch:
        """Return the units of a batch, by the plan's schedule or with fewer microbatches.

        Without `needs_loss`, targets may be None.

        Raises:
            UsageError: data that the rank needs is missing.
            MisfitError: samples or sequences that cannot be cut.
        """
        spec, count = plan.schedule, microbatches or plan.schedule.microbatches
        if not extras and not self._needs_inputs and not self._needs_targets:
            found, num_units = self._nothing, spec.microbatches * spec.slices
            if found is None or found.microbatches != count or len(found.extras) != num_units:
                found = self._nothing = Batch((), (), [{}] * num_units, count, kind=(count, False, False))
            return found
        kind = count, self._needs_inputs and _kind(inputs), self._needs_targets and _kind(targets)
        is_plain, latest = not extras and spec.slices == 1 and None not in kind, self._latest
        if is_plain and latest is not None and latest.kind == kind and latest.plan is plan:
            return self._cut_alike(latest, inputs, targets)
        needed = {
            **({"inputs": inputs} if self._needs_inputs else {}),
            **({"targets": targets} if self._needs_targets and (needs_loss or targets is not None) else {}),
        }
        samples = self._num_samples(needed, extras)
        into = Division(samples, sizes_of(samples or 0, min(count, spec.microbatches), spec.microbatches), spec.slices)
        length = _length(inputs) if self._needs_inputs else None
        tree, rows = self._rows(into, "inputs", inputs) if self._needs_inputs else (ONE_TENSOR, ())
        units = range(spec.num_units)
        of_extras = dict[str, Sequence[Any]]()
        for name, extra in extras.items():
            of_extras[name] = self._extra_units(into, name, extra, length)
        batch = Batch(
            inputs=rows,
            targets=self._targets(into, targets) if self._needs_targets else (),
            extras=[{name: cut[unit] for name, cut in of_extras.items()} for unit in units]
            if of_extras
            else [{}] * len(units),
            microbatches=count,
            input_tree=tree,
            num_samples=samples,
            kind=kind if is_plain else None,
        )
        if is_plain:
            self._latest = _Cut(plan, kind, [len(unit) for (unit,) in rows], [*map(len, batch.targets)], samples)
        return batch

    def _cut_alike(self, latest: _Cut, inputs: Tensor, targets: Tensor) -> Batch:
        rows = self._cut("inputs", inputs, latest.inputs, self._dtype, self._shard) if self._needs_inputs else ()
        shard = self._shard if self._needs_targets and targets.dim() > 1 else WHOLE_SEQUENCE
        return Batch(
            inputs=list(zip(rows, strict=True)),
            targets=self._cut("targets", targets, latest.targets, None, shard) if self._needs_targets else (),
            extras=[{}] * latest.plan.schedule.microbatches,
            microbatches=latest.kind[0],
            num_samples=latest.num_samples,
            kind=latest.kind,
        )

    def _num_samples(self, needed: Mapping[str, Any], extras: Mapping[str, Any]) -> int | None:
        """Return the number of samples; None where this rank's data does not show it."""
        for name, given in needed.items():
            if given is None:
                raise UsageError(f"rank {self._rank} needs {name}; see engine.needs_inputs and engine.needs_targets")
        for name, given in needed.items():
            if name == "targets" and not isinstance(given, Tensor) and not flatten(given)[1]:
                continue
            samples = most_rows(given)
            if samples is None:
                shape = f"of shape {tuple(given.shape)} " if isinstance(given, Tensor) else ""
                what = f"a {type(given).__name__} has no tensors of samples"
                raise MisfitError(f"{name} {shape}cannot be cut into microbatches: {what}")
            is_alone = name == "inputs" or (isinstance(given, Tensor) and not extras)
            return samples if is_alone else fewest_rows([given, *extras.values()], samples)
        samples = most_rows(list(extras.values()))
        return None if samples == 1 else samples  # a single row may belong to all samples

    def _targets(self, into: Division, targets: Any) -> Sequence[Any]:
        if targets is None:
            return [None] * into.num_units
        if isinstance(targets, Tensor):
            if targets.dim() == 1 and into.slices == 1:  # one per sequence, the same for all its slices
                return self._microbatches(into, "targets", targets)
            return self._units(into, "targets", targets)
        tree, rows = self._rows(into, "targets", targets)
        return [tree.build(row) for row in rows]

    def _rows(self, into: Division, name: str, given: Any) -> tuple[Tree, Sequence[Tensors]]:
        """Return the structure of a tree, and the tensors of each of its units."""
        if isinstance(given, Tensor):
            return ONE_TENSOR, [(unit,) for unit in self._units(into, name, given)]
        tree, tensors = flatten(given)
        require_known(name, tree)
        require_as_many_samples(name, tree, tensors)
        if name != "targets":  # losses of these are examined
            require_no_rows(name, given, into.samples, into.sizes)
        length = _length(given)
        cuts = [
            self._tree_units(into, f"{name}{path}", tensor, length)
            for path, tensor in zip(tree.paths, tensors, strict=True)
        ]
        return tree, list(zip(*cuts, strict=True)) if cuts else [()] * into.num_units

    def _extra_units(self, into: Division, name: str, extra: Any, length: int | None) -> Sequence[Any]:
        if isinstance(extra, Tensor):
            return self._tree_units(into, name, extra, length)
        tree, tensors = flatten(extra)
        require_known(name, tree)
        require_as_many_samples(name, tree, tensors)
        require_no_rows(name, extra, into.samples, into.sizes)
        if not tensors:
            return [extra] * into.num_units
        cuts = [self._tree_units(into, name + path, t, length) for path, t in zip(tree.paths, tensors, strict=True)]
        return [tree.build(row) for row in zip(*cuts, strict=True)]

    def _tree_units(self, into: Division, name: str, tensor: Tensor, length: int | None) -> Sequence[Tensor]:
        """Cut a tensor of a tree into units; one number per sample goes to every slice, the rest along the sequence."""
        cuts = into.slices * self._shard.size
        if cuts == 1 or tensor.dim() > 1:
            if cuts > 1 and length is not None and tensor.shape[1] != length:
                raise MisfitError(
                    f"{name} of shape {tuple(tensor.shape)} does not run along the sequence of {length}, and cannot be "
                    "cut along it"
                )
            return self._units(into, name, tensor)
        return [unit for unit in self._microbatches(into, name, tensor) for _ in range(into.slices)]

    def _units(self, into: Division, name: str, tensor: Tensor) -> Sequence[Tensor]:
        microbatches = self._microbatches(into, name, tensor, self._shard)
        if into.slices == 1:
            return microbatches
        first = microbatches[0]
        if first.dim() < 2 or first.shape[1] % into.slices:
            raise MisfitError(f"{name} of shape {tuple(first.shape)} cannot be cut into {into.slices} equal slices")
        return [unit for whole in microbatches for unit in whole.split(first.shape[1] // into.slices, 1)]

    def _microbatches(
        self, into: Division, name: str, tensor: Tensor, shard: SequenceShard = WHOLE_SEQUENCE
    ) -> Sequence[Tensor]:
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise MisfitError(f"{name} is a tensor of layout {tensor.layout}, which cannot be cut; give a dense one")
        if tensor.is_meta:
            raise MisfitError(f"{name}, which this rank needs, is a tensor on the meta device, which has no numbers")
        if tensor.__dict__ and (attribute := attribute_of(tensor)) is not None:
            raise MisfitError(
                f"{name} has an attribute {attribute!r}, which microbatches of it have not; give it by itself: "
                f"engine.step(…, {attribute}=…), which blocks take by name, or for the loss, targets=(y, {attribute})"
            )
        rows = tensor.shape[0] if tensor.dim() else None
        is_for_all = name not in ("inputs", "targets") and (rows is None or rows == 1 != into.samples)
        several, odd = divmod(rows or 0, into.samples) if into.samples else (1, rows or 0)
        if not is_for_all and (rows is None or odd or (several != 1 and name == "inputs")):
            raise MisfitError(
                f"{name} of shape {tuple(tensor.shape)} cannot be cut into microbatches: "
                + (f"there are {into.samples} samples" if tensor.dim() else "it has no samples")
            )
        dtype = self._dtype if name.startswith("inputs") else None
        if is_for_all:
            return list(self._cut(name, tensor, None, dtype, shard)) * len(into.sizes)
        return self._cut(name, tensor, [several * size for size in into.sizes], dtype, shard)

    def _cut(
        self, name: str, tensor: Tensor, sizes: Sequence[int] | None, dtype: torch.dtype | None, shard: SequenceShard
    ) -> Sequence[Tensor]:
        """Move this rank's shard of sequences to its device, and split it into these row counts, or not at all."""
        mine = shard.cut(name, tensor) if shard.size > 1 and tensor.dim() else tensor
        to = dtype if tensor.is_floating_point() else None
        is_here = mine.device == self._device and (to is None or mine.dtype is to)
        moved = mine if is_here else mine.to(self._device, to, non_blocking=mine.is_cpu)
        return (moved,) if sizes is None else moved.split_with_sizes(sizes)


def _kind(tensor: Any) -> Hashable | None:
    """Return a key by which plain tensors that are cut alike are equal; None for any other object."""
    if type(tensor) is not Tensor or tensor.__dict__ or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def without_samples(tree: Any) -> Any:
    """Return a tree of the same structure, with zero samples."""
    return map_tensors(lambda tensor: tensor.new_empty((0, *tensor.shape[1:])) if tensor.dim() else tensor, tree)


def most_rows(tree: Any) -> int | None:
    """Return the largest number of rows of a tree's tensors; None where no tensor has a dimension."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.dim() else None
    return max((len(tensor) for tensor in flatten(tree)[1] if tensor.dim()), default=None)


def shape_of(tree: Any) -> tuple[int, int]:
    """Return the number of rows of a tree, and the length of its sequences; 0: unknown."""
    if isinstance(tree, Tensor):
        return (tree.shape[0], tree.shape[1] if tree.dim() > 1 else 0) if tree.dim() else (0, 0)
    return (0, 0) if tree is None else (most_rows(tree) or 0, _length(tree) or 0)


def _length(inputs: Any) -> int | None:
    """Return the sequence length of inputs: dimension 1 of the first tensor that has one."""
    if isinstance(inputs, Tensor):
        return inputs.shape[1] if inputs.dim() > 1 else None
    return next((tensor.shape[1] for tensor in flatten(inputs)[1] if tensor.dim() > 1), None)

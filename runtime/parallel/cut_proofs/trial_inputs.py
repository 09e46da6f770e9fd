"""Arrivals: trial inputs for proofs, with the shapes of the first step, but two samples and whole sequences.

inputs of the model        integer inputs (ids, masks) from the batch, so that they are valid; others are random
inputs of later blocks     random, in the shapes inferred on the meta device
extras                     from the batch; under cp and slices, joined to whole sequences
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...blocks.block_builders import TARGETS, TOKENS_DIM, Parcel, takes_targets
from ...blocks.shape_inference import lengthened, trace_shapes, wants_data
from ...blocks.trees import ONE_TENSOR, Tensors, TensorSpec, Tree, TreeSpec, flatten
from ...comm import Group, SelfGroup
from ...comm.host_collectives import reduce_numbers
from ..context.context_parallel import whole_sequences
from .block_twins import FEW, SEED, at_work, other_numbers

TRIAL_SAMPLES = 2
_TOKENS = 16


@dataclass(frozen=True)
class TrialInput:
    """An input tensor of a block, for whole sequences; `tokens` is the dimension along which sequences are cut."""

    tensor: Tensor
    tokens: int | None = None

    def scaled(self, factor: float, *, late: bool) -> TrialInput:
        """Return it with numbers multiplied by a factor; `late`: only in the last quarter of its tokens."""
        if not self.tensor.is_floating_point() or (late and self.tokens is None):
            return self
        tensor = self.tensor.clone(memory_format=torch.contiguous_format)
        length = 0 if self.tokens is None else tensor.shape[self.tokens]
        (tensor.narrow(self.tokens or 0, length - length // 4, length // 4) if late else tensor).mul_(factor)
        return TrialInput(tensor, self.tokens)

    def other(self, factor: float) -> TrialInput:
        """Return it with other values if it has at most `FEW` elements; integers, which may be indices, only on CPU."""
        tensor = self.tensor
        if tensor.numel() > FEW or (tensor.device.type != "cpu" and not tensor.is_floating_point()):
            return self
        return TrialInput(other_numbers(tensor, factor), self.tokens)


@dataclass(frozen=True)
class GivenTree:
    """An input tree of a block: its tensors and its structure."""

    parts: Sequence[TrialInput]
    tree: Tree = ONE_TENSOR

    def build(self, take: Callable[[TrialInput], Tensor]) -> Any:
        """Return the tree with `take` applied to each tensor."""
        return self.tree.build([take(part) for part in self.parts])

    def changed(self, change: Callable[[TrialInput], TrialInput]) -> GivenTree:
        """Return the tree with `change` applied to each tensor."""
        return GivenTree([change(part) for part in self.parts], self.tree)


@dataclass(frozen=True)
class Arrival:
    """Inputs of a block: activation, riders and extras by name; `inputs` is the spec of the model's inputs."""

    activation: GivenTree
    riders: Mapping[str, TrialInput] = field(default_factory=dict)
    extras: Mapping[str, GivenTree] = field(default_factory=dict)
    inputs: TensorSpec | None = None

    @property
    def tensors(self) -> dict[str, TrialInput]:
        """Tensors that get gradients: of the activation by path ("" if it is a single tensor), and riders by name."""
        return {**dict(zip(self.activation.tree.paths, self.activation.parts, strict=True)), **self.riders}

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.activation.parts[0].tensor.shape[0]

    def of_sample(self, number: int = 0) -> Arrival:
        """Return the inputs of one sample."""

        def first(given: TrialInput) -> TrialInput:
            has_samples = given.tensor.dim() and given.tensor.shape[0] == self.samples
            return replace(given, tensor=given.tensor[number : number + 1]) if has_samples else given

        return self.changed(first)

    def changed(self, change: Callable[[TrialInput], TrialInput]) -> Arrival:
        """Return the inputs with `change` applied to each tensor, in the order of activation, riders and extras."""
        return replace(
            self,
            activation=self.activation.changed(change),
            riders={name: change(rider) for name, rider in self.riders.items()},
            extras={name: extra.changed(change) for name, extra in self.extras.items()},
        )

    def scaled(self, factor: float, *, late: bool = False) -> Arrival:
        """Return the inputs with a scaled activation, and with other values in small extras: see `TrialInput`."""
        activation = self.activation.changed(lambda part: part.scaled(factor, late=late))
        others = {name: extra.changed(lambda part: part.other(factor)) for name, extra in self.extras.items()}
        return replace(self, activation=activation, extras=self.extras if late else others)


@dataclass(frozen=True)
class FirstUnits:
    """Units of the first microbatch on one rank; the specs are those of one unit, the same on all ranks.

    `inputs` and `targets` are empty on ranks that do not need them; `cut_extras` are those that are cut with samples.
    """

    spec: TreeSpec
    extra_specs: Mapping[str, TreeSpec]
    inputs: Sequence[Tensors]
    targets: Sequence[Any]
    extras: Sequence[Mapping[str, Any]]
    cut_extras: frozenset[str] = frozenset()

    @classmethod
    def of_batch(cls, spec: TreeSpec, extras: Mapping[str, TreeSpec], batch: Any, count: int) -> FirstUnits:
        """Return the first `count` units of a `stage.batches.microbatches.Batch`."""
        inputs, targets, given = batch.inputs[:count], batch.targets[:count], batch.extras[:count]
        return cls(spec, extras, inputs, targets, given, batch.cut_extras(count))

    @property
    def first(self) -> FirstUnits:
        """The first unit alone."""
        return FirstUnits(self.spec, self.extra_specs, self.inputs[:1], self.targets[:1], self.extras[:1])


class Arrivals:
    """Trial inputs of all blocks of a model.

    Args:
        units: the first microbatch.
        outlines: the blocks, on the meta device.
        parcels: output specs of the blocks for one unit.
        group: the ranks that hold slices of the same sequences.
        slices: number of units that a microbatch is cut into.
        dtype: of the weights; None: as they are built.
        samples: maximum number of samples; None: all, for units of whole sequences.
        repeats: whether the samples of a smaller unit are repeated up to `samples`.

    Attributes:
        num_samples: number of samples.
    """

    def __init__(
        self,
        units: FirstUnits,
        outlines: Sequence[nn.Module],
        parcels: Sequence[Parcel],
        group: Group,
        slices: int,
        dtype: torch.dtype | None,
        *,
        samples: int | None = TRIAL_SAMPLES,
        repeats: bool = False,
    ) -> None:
        self._group, self._cuts, self._of_unit, self._units = group, slices * group.size, parcels, units
        self._of_unit_samples = units.spec.samples.shape[0]
        most = self._of_unit_samples
        self.num_samples = samples if samples and repeats else min(samples or most, most)
        self._whole = list(parcels) if samples is None else self._trace(outlines, parcels, dtype, repeats)
        self._extras = {name: self._whole_tree([unit[name] for unit in units.extras]) for name in units.extras[0]}
        self._targets = self._whole_tree(units.targets) if units.targets else None
        self._inputs = list(map(self._whole_of, zip(*units.inputs, strict=True))) if units.inputs else None

    @classmethod
    def guess(cls, outlines: Sequence[nn.Module], group: Group, dtype: torch.dtype | None) -> Arrivals | None:
        """Guess the inputs of all blocks, before any batch is known; None if no guess runs through all of them.

        Collective: a guess must run on all ranks of the group.
        """
        built = (p.dtype for block in outlines for p in block.parameters() if p.is_floating_point())
        for spec in map(TreeSpec.plain, _likely_inputs(outlines[0], dtype or next(built, torch.float32))):
            failed, parcels = False, list[Parcel]()
            try:
                parcels = trace_shapes(outlines, spec, {}, dtype)
            except MisfitError:
                failed = True
            if not any(reduce_numbers(group, [failed])):
                alone = SelfGroup(0, group.device)
                return cls(FirstUnits(spec, {}, [], [], [{}]), outlines, parcels, alone, 1, dtype)
        return None

    def _trace(
        self, outlines: Sequence[nn.Module], parcels: Sequence[Parcel], dtype: torch.dtype | None, repeats: bool
    ) -> list[Parcel]:
        """Infer the blocks' output specs for whole sequences, with few samples, or all if blocks need as many.

        If inference needs data, the specs of a unit are taken with the tokens multiplied, and with `num_samples` if
        samples may be repeated (`repeats`).
        """
        wanted = self.num_samples
        for samples in (wanted, self._of_unit_samples):
            self.num_samples = samples
            extras = {name: self._tree_spec(spec) for name, spec in self._units.extra_specs.items()}
            try:
                return trace_shapes(outlines, self._tree_spec(self._units.spec), extras, dtype)
            except MisfitError as error:
                found = error
        if not wants_data(found):
            raise found
        self.num_samples = wanted if repeats else self.num_samples
        return [self._lengthened(parcel) for parcel in parcels]

    def _lengthened(self, parcel: Parcel) -> Parcel:
        row = TreeSpec(parcel.output.tree, parcel.specs)
        row = lengthened(row, self._units.spec.samples.shape[1:2], self._cuts)
        longer = [s if k in parcel.apart else self._of_samples(s) for k, s in enumerate(row.tensors)]
        output = TreeSpec(row.tree, tuple(longer[: parcel.width]))
        return replace(parcel, output=output, riders=tuple(zip(parcel.names, longer[parcel.width :], strict=True)))

    def _tree_spec(self, unit: TreeSpec) -> TreeSpec:
        return TreeSpec(unit.tree, tuple(map(self._spec, unit.tensors)))

    def _spec(self, unit: TensorSpec) -> TensorSpec:
        if len(unit.shape) > 1 and self._cuts > 1:
            unit = TensorSpec((unit.shape[0], unit.shape[1] * self._cuts, *unit.shape[2:]), unit.dtype)
        return self._of_samples(unit)

    def _of_samples(self, unit: TensorSpec) -> TensorSpec:
        is_of_samples = unit.shape[:1] == (self._of_unit_samples,)
        return TensorSpec((self.num_samples, *unit.shape[1:]), unit.dtype) if is_of_samples else unit

    def _whole_tree(self, units: Sequence[Any]) -> GivenTree:
        """Join the slices of each tensor of a tree."""
        tree = flatten(units[0])[0]
        parts = zip(*(flatten(unit)[1] for unit in units), strict=True)
        return GivenTree([self._whole_of(slices) for slices in parts], tree)

    def _whole_of(self, units: Sequence[Tensor]) -> TrialInput:
        """Join a tensor's slices, from other ranks (collective) or other units, for the first samples."""
        first = units[0]
        is_cut = self._cuts > 1 and first.dim() > 1
        whole = first
        if is_cut and self._group.size > 1:
            whole = whole_sequences(first, self._group, TOKENS_DIM)
        elif is_cut:
            whole = torch.cat(list(units[: self._cuts]), TOKENS_DIM)
        if first.dim() and first.shape[0] == self._of_unit_samples:
            whole = whole[torch.arange(self.num_samples, device=whole.device) % len(whole)]
        return TrialInput(whole.to(at_work(first.dtype)), TOKENS_DIM if is_cut else None)

    def block_arrival(self, number: int, block: nn.Module) -> Arrival:
        """Return the trial inputs of block `number`."""
        device, spec = self._group.device, self._units.spec
        extras = {**self._extras, **({TARGETS: self._targets} if self._targets and takes_targets(block) else {})}
        inputs = TensorSpec((self.num_samples, *spec.samples.shape[1:]), spec.samples.dtype)
        if number == 0:
            parts = [
                self._inputs[k]
                if self._inputs is not None and not unit.dtype.is_floating_point
                else TrialInput(
                    draw(self._spec(unit), k, device), TOKENS_DIM if self._cuts > 1 and len(unit.shape) > 1 else None
                )
                for k, unit in enumerate(spec.tensors)
            ]
            return Arrival(GivenTree(parts, spec.tree), {}, extras, inputs)
        whole, unit = self._whole[number - 1], self._of_unit[number - 1]
        specs = zip(whole.specs, unit.specs, strict=True)
        drawn = [TrialInput(draw(w, k, device), self._tokens(w, u)) for k, (w, u) in enumerate(specs)]
        riders = dict(zip(whole.names, drawn[whole.width :], strict=True))
        return Arrival(GivenTree(drawn[: whole.width], whole.output.tree), riders, extras, inputs)

    def specs_at(self, number: int) -> tuple[TreeSpec, dict[str, TreeSpec]]:
        """Return the specs of activation and extras of block `number`, in the dtypes of a real run."""
        extras = {name: self._tree_spec(spec) for name, spec in self._units.extra_specs.items()}
        return specs_of(number, self._tree_spec(self._units.spec), extras, self._whole)

    def _tokens(self, whole: TensorSpec, unit: TensorSpec) -> int | None:
        return cut_dimension(whole.shape, unit.shape, self._cuts)


def specs_of(
    number: int, inputs: TreeSpec, extras: Mapping[str, TreeSpec], parcels: Sequence[Parcel]
) -> tuple[TreeSpec, dict[str, TreeSpec]]:
    """Return the specs of a block's activation, and of extras and riders, from the parcels of all blocks."""
    if not number:
        return inputs, dict(extras)
    before = parcels[number - 1]
    return before.output, {**extras, **{name: TreeSpec.plain(spec) for name, spec in before.riders}}


def cut_dimension(whole: Sequence[int], part: Sequence[int], cuts: int) -> int | None:
    """Return the first dimension after the samples along which `whole` is `cuts` times `part`; None if none is."""
    if cuts == 1 or len(whole) != len(part):
        return None
    return next((dim for dim in range(1, len(whole)) if part[dim] * cuts == whole[dim]), None)


def draw(spec: TensorSpec, number: int, device: torch.device) -> Tensor:
    """Return a random tensor of this spec, the same on all ranks."""
    generator = torch.Generator().manual_seed(SEED + 1 + number)
    dtype = at_work(spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(spec.shape, generator=generator, dtype=dtype).to(device)
    return torch.randint(0, 2, spec.shape, generator=generator).to(device, dtype)


def _likely_inputs(first: nn.Module, dtype: torch.dtype) -> list[TensorSpec]:
    """Guess input specs of a model's first block: ids, images, or tokens as wide as its weights."""
    specs = []
    if any(isinstance(module, nn.Embedding) for module in first.modules()):
        specs.append(TensorSpec((TRIAL_SAMPLES, _TOKENS), torch.int64))
    for conv in (module for module in first.modules() if isinstance(module, nn.Conv2d)):
        specs += [TensorSpec((TRIAL_SAMPLES, conv.in_channels, size, size), dtype) for size in _image_sizes(first)]
        break
    widths = dict.fromkeys(p.shape[-1] for p in first.parameters() if prod(p.shape) > 1)
    return specs + [TensorSpec((TRIAL_SAMPLES, _TOKENS, width), dtype) for width in list(widths)[:3]]


def _image_sizes(first: nn.Module) -> list[int]:
    """Return candidate image sizes: from modules' attributes, then common ones."""
    said = [getattr(module, name, None) for module in first.modules() for name in ("img_size", "image_size")]
    sizes = [size[0] if isinstance(size, tuple | list) else size for size in said]
    return list(dict.fromkeys([size for size in sizes if isinstance(size, int)] + [32, 224]))


def guesses(block: nn.Module, device: torch.device, dtype: torch.dtype) -> list[Arrival]:
    """Guess inputs of a block, before any batch is known: tokens as wide as the inputs of its first weights."""
    widths = dict.fromkeys(p.shape[-1] for p in block.parameters() if prod(p.shape) > 1)
    specs = [TensorSpec((TRIAL_SAMPLES, 8, width), dtype) for width in list(widths)[:3]]
    return [Arrival(GivenTree([TrialInput(draw(spec, 0, device))])) for spec in specs]

"""What blocks are given when they are proved: shapes as in the first step, of two samples, sequences whole.

inputs of the model        ids and masks as they are in the batch, for they must be valid; all else is drawn
what blocks leave          drawn, in the shapes that are found on the meta device
extras                     as they are in the batch; under cp and slices joined to whole ones
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...blocks.blocks import TARGETS, TOKENS, Parcel, takes_targets
from ...blocks.shapes import lengthened, trace_shapes, wants_data
from ...blocks.trees import PLAIN, Tensors, TensorSpec, Tree, TreeSpec, flatten
from ...comm import Group, SelfGroup
from ...comm.control import greatest
from ..context.context import whole_sequences
from .twins import FEW, SEED, at_work, other_numbers

SAMPLES = 2
_TOKENS = 16


@dataclass(frozen=True)
class Given:
    """A tensor that a block is given, of whole sequences; along `tokens` it is cut where sequences are."""

    tensor: Tensor
    tokens: int | None = None

    def scaled(self, factor: float, *, late: bool) -> Given:
        """Return it with numbers so many times as large; `late`: in the last quarter of its tokens alone."""
        if not self.tensor.is_floating_point() or (late and self.tokens is None):
            return self
        tensor = self.tensor.clone(memory_format=torch.contiguous_format)
        length = 0 if self.tokens is None else tensor.shape[self.tokens]
        (tensor.narrow(self.tokens or 0, length - length // 4, length // 4) if late else tensor).mul_(factor)
        return Given(tensor, self.tokens)

    def other(self, factor: float) -> Given:
        """Return it with other numbers where it has a few; whole ones, that may be indices, on a CPU alone."""
        tensor = self.tensor
        if tensor.numel() > FEW or (tensor.device.type != "cpu" and not tensor.is_floating_point()):
            return self
        return Given(other_numbers(tensor, factor), self.tokens)


@dataclass(frozen=True)
class GivenTree:
    """A tree that a block is given."""

    parts: Sequence[Given]
    tree: Tree = PLAIN

    def build(self, take: Callable[[Given], Tensor]) -> Any:
        """Return the tree with what is taken of each tensor."""
        return self.tree.build([take(part) for part in self.parts])

    def changed(self, change: Callable[[Given], Given]) -> GivenTree:
        """Return the tree with each tensor changed."""
        return GivenTree([change(part) for part in self.parts], self.tree)


@dataclass(frozen=True)
class Arrival:
    """All that a block is given: the activation, what rode along, and extras, by name; `inputs` are the model's."""

    activation: GivenTree
    riders: Mapping[str, Given] = field(default_factory=dict)
    extras: Mapping[str, GivenTree] = field(default_factory=dict)
    inputs: TensorSpec | None = None

    @property
    def tensors(self) -> dict[str, Given]:
        """The tensors that get gradients: of the activation by their paths, "" where it is one, and riders."""
        return {**dict(zip(self.activation.tree.paths, self.activation.parts, strict=True)), **self.riders}

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.activation.parts[0].tensor.shape[0]

    def of_sample(self, number: int = 0) -> Arrival:
        """Return what the block is given of one sample."""

        def first(given: Given) -> Given:
            has_samples = given.tensor.dim() and given.tensor.shape[0] == self.samples
            return replace(given, tensor=given.tensor[number : number + 1]) if has_samples else given

        return self.changed(first)

    def changed(self, change: Callable[[Given], Given]) -> Arrival:
        """Return an arrival with each tensor changed, in the order of activation, riders and extras."""
        return replace(
            self,
            activation=self.activation.changed(change),
            riders={name: change(rider) for name, rider in self.riders.items()},
            extras={name: extra.changed(change) for name, extra in self.extras.items()},
        )

    def scaled(self, factor: float, *, late: bool = False) -> Arrival:
        """Return an arrival with other numbers in the activation, and in extras of a few: see `Given`."""
        activation = self.activation.changed(lambda part: part.scaled(factor, late=late))
        others = {name: extra.changed(lambda part: part.other(factor)) for name, extra in self.extras.items()}
        return replace(self, activation=activation, extras=self.extras if late else others)


@dataclass(frozen=True)
class FirstUnits:
    """The units of a first microbatch, as one rank has them; the specs are those of one unit, on all ranks.

    `inputs` and `targets` are there where the rank needs them.
    """

    spec: TreeSpec
    extra_specs: Mapping[str, TreeSpec]
    inputs: Sequence[Tensors]
    targets: Sequence[Any]
    extras: Sequence[Mapping[str, Any]]

    @property
    def first(self) -> FirstUnits:
        """The first of them alone."""
        return FirstUnits(self.spec, self.extra_specs, self.inputs[:1], self.targets[:1], self.extras[:1])


class Arrivals:
    """What the blocks of a model are given.

    Args:
        units: the first microbatch.
        outlines: the blocks, on the meta device.
        parcels: what blocks leave for one unit.
        group: the ranks that hold slices of the same sequences.
        slices: into how many units a microbatch is cut.
        dtype: of the weights; None: as they are built.
        samples: at most so many; None: all, of units that are whole.
        repeats: whether there are as many where a unit has fewer, those over and over.

    Attributes:
        num_samples: how many there are.
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
        samples: int | None = SAMPLES,
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
        """Return what blocks may be given, before any batch is known; None where no guess goes through all of them.

        Collective: a guess has to do on all ranks of the group.
        """
        built = (p.dtype for block in outlines for p in block.parameters() if p.is_floating_point())
        for spec in map(TreeSpec.plain, _likely_inputs(outlines[0], dtype or next(built, torch.float32))):
            failed, parcels = False, list[Parcel]()
            try:
                parcels = trace_shapes(outlines, spec, {}, dtype)
            except MisfitError:
                failed = True
            if not any(greatest(group, [failed])):
                alone = SelfGroup(0, group.device)
                return cls(FirstUnits(spec, {}, [], [], [{}]), outlines, parcels, alone, 1, dtype)
        return None

    def _trace(
        self, outlines: Sequence[nn.Module], parcels: Sequence[Parcel], dtype: torch.dtype | None, repeats: bool
    ) -> list[Parcel]:
        """Return what blocks leave of whole sequences: of few samples, or of all, for blocks that want as many.

        Where only data can tell, it is what they left of a unit, with as many times its tokens, and its samples if it
        `repeats` these.
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
        """Join the slices of a tree's tensors."""
        tree = flatten(units[0])[0]
        parts = zip(*(flatten(unit)[1] for unit in units), strict=True)
        return GivenTree([self._whole_of(slices) for slices in parts], tree)

    def _whole_of(self, units: Sequence[Tensor]) -> Given:
        """Join a tensor's slices, of the first samples: those of the other ranks, or those of the other units."""
        first = units[0]
        is_cut = self._cuts > 1 and first.dim() > 1
        whole = first
        if is_cut and self._group.size > 1:
            whole = whole_sequences(first, self._group, TOKENS)
        elif is_cut:
            whole = torch.cat(list(units[: self._cuts]), TOKENS)
        if first.dim() and first.shape[0] == self._of_unit_samples:
            whole = whole[torch.arange(self.num_samples, device=whole.device) % len(whole)]
        return Given(whole.to(at_work(first.dtype)), TOKENS if is_cut else None)

    def at(self, number: int, block: nn.Module) -> Arrival:
        """Return what block `number` is given."""
        device, spec = self._group.device, self._units.spec
        extras = {**self._extras, **({TARGETS: self._targets} if self._targets and takes_targets(block) else {})}
        inputs = TensorSpec((self.num_samples, *spec.samples.shape[1:]), spec.samples.dtype)
        if number == 0:
            parts = [
                self._inputs[k]
                if self._inputs is not None and not unit.dtype.is_floating_point
                else Given(
                    draw(self._spec(unit), k, device), TOKENS if self._cuts > 1 and len(unit.shape) > 1 else None
                )
                for k, unit in enumerate(spec.tensors)
            ]
            return Arrival(GivenTree(parts, spec.tree), {}, extras, inputs)
        whole, unit = self._whole[number - 1], self._of_unit[number - 1]
        specs = zip(whole.specs, unit.specs, strict=True)
        drawn = [Given(draw(w, k, device), self._tokens(w, u)) for k, (w, u) in enumerate(specs)]
        riders = dict(zip(whole.names, drawn[whole.width :], strict=True))
        return Arrival(GivenTree(drawn[: whole.width], whole.output.tree), riders, extras, inputs)

    def specs_at(self, number: int) -> tuple[TreeSpec, dict[str, TreeSpec]]:
        """Return the specs of what block `number` is given, in the types of a run."""
        extras = {name: self._tree_spec(spec) for name, spec in self._units.extra_specs.items()}
        return specs_of(number, self._tree_spec(self._units.spec), extras, self._whole)

    def _tokens(self, whole: TensorSpec, unit: TensorSpec) -> int | None:
        return cut_dimension(whole.shape, unit.shape, self._cuts)


def specs_of(
    number: int, inputs: TreeSpec, extras: Mapping[str, TreeSpec], parcels: Sequence[Parcel]
) -> tuple[TreeSpec, dict[str, TreeSpec]]:
    """Return the specs of a block's activation, and of what else it may be given, where blocks leave these parcels."""
    if not number:
        return inputs, dict(extras)
    before = parcels[number - 1]
    return before.output, {**extras, **{name: TreeSpec.plain(spec) for name, spec in before.riders}}


def cut_dimension(whole: Sequence[int], part: Sequence[int], cuts: int) -> int | None:
    """Return the dimension along which a part is one of so many, beyond that of the samples; None: there is none."""
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
    """Return what the first block of a model may be given: ids, images, or tokens as wide as its weights."""
    specs = []
    if any(isinstance(module, nn.Embedding) for module in first.modules()):
        specs.append(TensorSpec((SAMPLES, _TOKENS), torch.int64))
    for conv in (module for module in first.modules() if isinstance(module, nn.Conv2d)):
        specs += [TensorSpec((SAMPLES, conv.in_channels, size, size), dtype) for size in _image_sizes(first)]
        break
    widths = dict.fromkeys(p.shape[-1] for p in first.parameters() if prod(p.shape) > 1)
    return specs + [TensorSpec((SAMPLES, _TOKENS, width), dtype) for width in list(widths)[:3]]


def _image_sizes(first: nn.Module) -> list[int]:
    """Return how large images may be: as modules say, and then some usual ones."""
    said = [getattr(module, name, None) for module in first.modules() for name in ("img_size", "image_size")]
    sizes = [size[0] if isinstance(size, tuple | list) else size for size in said]
    return list(dict.fromkeys([size for size in sizes if isinstance(size, int)] + [32, 224]))


def guesses(block: nn.Module, device: torch.device, dtype: torch.dtype) -> list[Arrival]:
    """Return what a block may be given, before any batch is known: tokens as wide as its first weights take them."""
    widths = dict.fromkeys(p.shape[-1] for p in block.parameters() if prod(p.shape) > 1)
    specs = [TensorSpec((SAMPLES, 8, width), dtype) for width in list(widths)[:3]]
    return [Arrival(GivenTree([Given(draw(spec, 0, device))])) for spec in specs]

"""Gradients of stage inputs: `requires_grad` as in one process, and a check that a gradient is computed.

all earlier stages frozen     x.requires_grad is False, as in one process: code may read it, reentrant checkpoints do
a stage that detaches x       no gradient in the whole step: refused, since earlier weights would be stepped with zero
                              gradients (weight decay, momentum), and in one process not at all
a stage that uses h of (h, c) refused as well if weights get gradients through c alone; else zeros change nothing
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from quintsched.errors import MisfitError

from ..blocks.block_builders import Parcel
from ..blocks.shape_inference import Graphs, trace_graphs
from ..blocks.trees import DIFFERENTIABLE, TreeSpec


class UnitSpecs(Protocol):
    """Specs of a unit's inputs and extras, as all ranks of its pipeline know them."""

    @property
    def inputs(self) -> TreeSpec:
        """Specs of its inputs."""

    @property
    def extras(self) -> tuple[tuple[str, TreeSpec], ...]:
        """Specs of its extras, by name."""


class _Watched(NamedTuple):
    """Parameters before a stage up to the first trained one; `frozen` is the number of frozen ones before it."""

    parameters: Sequence[ref[nn.Parameter]]
    frozen: int


class BoundaryGradients:
    """Input gradients of one rank's stages, by the trained parameters before each.

    Args:
        blocks: the whole model; for blocks not built yet, the outlines show which parameters are trained.
        outlines: all blocks on the meta device.
        cuts: the blocks of each stage.
        stages: those of this rank.
        dtype: dtype of the weights.

    Attributes:
        constant: stages whose inputs require no gradient in this step.
        reached: stages all of whose inputs got gradients in backwards of this step.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        outlines: Sequence[nn.Module],
        cuts: Sequence[range],
        stages: Sequence[int],
        dtype: torch.dtype | None,
    ) -> None:
        self._outlines, self._dtype = outlines, dtype
        self._starts = {stage: cuts[stage].start for stage in stages if cuts[stage].start}
        whole = [block if isinstance(block, nn.Module) else outlines[number] for number, block in enumerate(blocks)]
        self._before = {
            stage: [ref(parameter) for block in whole[:start] for parameter in block.parameters()]
            for stage, start in self._starts.items()
        }
        self._watched = {stage: _Watched((), -1) for stage in self._starts}
        self._known: dict[tuple[int, TreeSpec, tuple[bool, ...]], bool] = {}
        self._missing: dict[int, set[int]] = {}
        self._alone: dict[tuple[int, UnitSpecs, frozenset[int]], dict[int, Sequence[int]]] = {}
        self.constant: set[int] = set()
        self.reached: set[int] = set()

    def begin_step(self, given: Callable[[], UnitSpecs | None], *, is_first: bool, is_last: bool) -> None:
        """Update which earlier stages are frozen, for a step, or one call of it, with the specs of a unit `given`."""
        self._given, self._is_last = given, is_last
        if is_first:
            self.reached.clear()
            self._missing.clear()
        for stage, watched in self._watched.items():
            frozen = 0
            for reference in watched.parameters:
                parameter = reference()
                if parameter is None or parameter.requires_grad:
                    break
                frozen += 1
            if frozen != watched.frozen:
                self._look_through(stage, given())

    def _look_through(self, stage: int, unit: UnitSpecs | None) -> None:
        """Find which parameters before a stage are trained, and whether its inputs require gradients."""
        before = self._before[stage]
        parameters = [reference() for reference in before]
        flags = tuple(map(_is_trained, before))
        frozen = flags.index(True) if True in flags else len(flags)
        self._watched[stage] = _Watched(before[: frozen + 1], frozen)
        self.constant.discard(stage)
        if unit is not None and None not in parameters and not all(flags) and not self._requires(stage, unit, flags):
            self.constant.add(stage)

    def _requires(self, stage: int, unit: UnitSpecs, flags: tuple[bool, ...]) -> bool:
        key = stage, unit.inputs, flags
        if key not in self._known:
            graphs = self._trace(stage, unit, flags)
            self._known[key] = graphs is None or any(t.requires_grad for t in (*graphs.output, *graphs.riders.values()))
        return self._known[key]

    def _trace(self, stage: int, unit: UnitSpecs, flags: Sequence[bool] | None = None) -> Graphs | None:
        before = self._outlines[: self._starts[stage]]
        return trace_graphs(before, flags, unit.inputs, dict(unit.extras), self._dtype)

    def note_gradients(self, stage: int, given: Sequence[Tensor]) -> None:
        """Record which inputs of a stage have got a gradient in a backward, as long as some have had none."""
        without = {place for place, tensor in enumerate(given) if tensor.grad is None and tensor.requires_grad}
        self._missing[stage] = missing = self._missing.get(stage, without) & without
        if not missing:
            self.reached.add(stage)

    def require_reached(self, stage: int, arriving: Parcel, parcels: Sequence[Parcel]) -> None:
        """Raise `MisfitError` where no backward of a step gave inputs of a stage gradients that trained weights need.

        `arriving` is the stage's input; `parcels` are the outputs of blocks, some of which bypass the stage.
        """
        missing, unit = frozenset(self._missing.get(stage, ())), self._given()
        if not (self._is_last and missing and unit is not None):
            return
        key = stage, unit, missing
        if key not in self._alone:
            self._alone[key] = self._only_through(stage, unit, missing, arriving, parcels)
        for place, numbers in self._alone[key].items():
            trained = [number for number in numbers if _is_trained(self._before[stage][number])]
            if trained:
                raise MisfitError(self._words(stage, arriving, place, trained))

    def _only_through(
        self, stage: int, unit: UnitSpecs, missing: Collection[int], arriving: Parcel, parcels: Sequence[Parcel]
    ) -> dict[int, Sequence[int]]:
        """Return, per missing input, the numbers of the weights that get gradients through missing inputs alone."""
        graphs, everything = self._trace(stage, unit), range(len(self._before[stage]))
        if graphs is None:
            has_none = len(missing) == sum(spec.dtype in DIFFERENTIABLE for spec in arriving.specs)
            return {min(missing): everything} if has_none else {}
        names = [*arriving.names, *set(parcels[self._starts[stage] - 1].names).difference(arriving.names)]
        row = [*graphs.output, *[graphs.riders[name] for name in names]]
        others = _behind(tensor for place, tensor in enumerate(row) if place not in missing)
        weights, alone = [id(weight) for weight in graphs.weights], dict[int, Sequence[int]]()
        for place in missing:
            nodes = _behind([row[place]]) - others
            found = {id(node.variable) for node in nodes if hasattr(node, "variable")}
            known = [number for number, weight in enumerate(weights) if weight in found]
            alone[place] = known if found.issubset(weights) else everything  # else a leaf is no weight
        return alone

    def _words(self, stage: int, arriving: Parcel, place: int, trained: Sequence[int]) -> str:
        start = self._starts[stage]
        path = [*arriving.output.tree.paths, *map(repr, arriving.names)][place]
        before = enumerate(self._outlines[:start])
        names = [f"{number}.{name}" for number, block in before for name, _ in block.named_parameters()]
        needing = ", ".join(names[number] for number in trained[:4]) + ", …" * (len(trained) > 4)
        return (
            f"blocks from {start} on give no gradient to {f'{path} of ' if path else ''}what they are given, as where "
            "its values are unused, or after `detach()`, `argmax`: in one process, weights with no other gradients "
            f"({needing}) are not stepped then, and here they would be, with gradients of zero; freeze blocks 0 to "
            f"{start - 1}, or these alone, while it is so: parameter.requires_grad_(False)"
        )


def _behind(tensors: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of the autograd graph that are reachable from these tensors."""
    todo, found = [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad], set[Any]()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [behind for behind, _ in node.next_functions if behind is not None]
    return found


def _is_trained(parameter: ref[nn.Parameter]) -> bool:
    weight = parameter()
    return weight is None or weight.requires_grad

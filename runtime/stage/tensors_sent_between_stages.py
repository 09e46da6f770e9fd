"""Messages between stages: each output with the tensors carried along, and skips that bypass stages in between.

    Carry(y, h=…, k=…)     y + k ─▶ the next stage ─▶ …         k is carried along
                           h ─▶ each rank that takes it, once   h is a skip of the plan; later takers there reuse it

Within a stage nothing differs: its inputs and outputs are those that it would have if h were carried along, less the
skips that it neither makes nor takes. So gradients are accumulated in the same order, and are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from torch import Tensor, nn

from quintsched.errors import MisfitError
from quintsched.ir.instruction_values import MAX_SKIPS, SKIPS, Value, ValueKind
from quintsched.plan import Plan

from ..blocks.block_builders import Parcel, accepted_extras
from ..blocks.trees import DIFFERENTIABLE, TensorSpec, Tree
from .stage_forward import chains_of


class Cargo:
    """Contents of the messages of a plan: the tensors of each value that is sent between stages.

    Args:
        plan: its skips are the carried tensors that bypass stages.
        cuts: the blocks of each stage.
        parcels: each block's output for the next, with all tensors carried along.

    Attributes:
        nbytes: size of the largest value sent between stages, in bytes.
        width: the largest number of tensors of a value.
        strides: per stage, strides of its inputs; only where some are not contiguous, which messages always are.
        keeping: stages whose forwards keep references to their inputs, such as receive buffers that are reused.
    """

    def __init__(self, plan: Plan, cuts: Sequence[range], parcels: Sequence[Parcel]) -> None:
        self._skips = [name for name, _ in plan.layout.skips]
        self._holders = {name: frozenset(stages) for name, stages in plan.skips.items()}
        self._parcels, self._cuts = list(parcels), cuts
        self._outputs: dict[int, Parcel] = {}
        for blocks in cuts[:-1]:
            _require_known(blocks.stop - 1, parcels[blocks.stop - 1].output.tree)
        self._left = [_without(parcels[blocks.stop - 1], plan.skips) for blocks in cuts]
        specs = [parcel.specs for parcel in self._left]
        self.width = max(map(len, specs))
        self.nbytes = max(sum(spec.nbytes for spec in row) for row in specs)
        self._goes = [{is_output: _goes(row, is_output=is_output) for is_output in (True, False)} for row in specs]
        self._rows = [
            {is_output: tuple(compress(row, flags)) for is_output, flags in goes.items()}
            for row, goes in zip(specs, self._goes, strict=True)
        ]
        self.strides = dict[int, list[tuple[int, ...] | None]]()
        for stage, blocks in enumerate(cuts):
            if blocks.start and blocks and parcels[blocks.start].strides:
                row = self.of_stage(stage)[blocks.start - 1]
                self.strides[stage] = list(map(parcels[blocks.start].strides.get, (*range(row.width), *row.names)))
        kept = [any(state.holds for state in parcel.state) for parcel in parcels]
        self.keeping = frozenset(stage for stage, blocks in enumerate(cuts) if any(kept[b] for b in blocks))
        behind_source = (parcels[cuts[plan.skips[name][0]].stop - 1] for name in self._skips)
        self._specs = [dict(parcel.riders)[name] for name, parcel in zip(self._skips, behind_source, strict=True)]

    def outputs_of(self, stage: int) -> Parcel:
        """Return the output of a stage's last block, with the carried tensors that concern the stage."""
        if stage not in self._outputs:
            self._outputs[stage] = self.of_stage(stage)[self._cuts[stage].stop - 1]
        return self._outputs[stage]

    def of_stage(self, stage: int) -> list[Parcel]:
        """Return each block's output, with the carried tensors that concern a stage."""
        others = {name for name, holders in self._holders.items() if stage not in holders}
        return [_without(parcel, others) for parcel in self._parcels] if others else [*self._parcels]

    def specs(self, value: Value) -> tuple[TensorSpec, ...]:
        """Return the specs of the tensors of a value that is sent."""
        if value.kind in SKIPS:
            return (self._specs[value.number % MAX_SKIPS],)
        return self._rows[value.stage][value.kind is ValueKind.OUTPUT]

    def places(self, value: Value, row: Parcel) -> tuple[int, ...]:
        """Return the places of a value's tensors in the row of a parcel."""
        if value.kind in SKIPS:
            return (row.place(self._skips[value.number % MAX_SKIPS]),)
        left = self._left[value.stage]
        places = (*range(len(left.output.tensors)), *map(row.place, dict(left.riders)))
        return tuple(compress(places, self._goes[value.stage][value.kind is ValueKind.OUTPUT]))


def _goes(specs: Sequence[TensorSpec], *, is_output: bool) -> list[bool]:
    """Return which tensors of a stage's output belong to a value: ids and masks have no gradient to send back.

    Where no tensor is differentiable, all are included: zeros are sent, as the plan has a message there.
    """
    numbers = [spec.dtype in DIFFERENTIABLE for spec in specs]
    return [True] * len(specs) if is_output or not any(numbers) else numbers


def _require_known(block: int, tree: Tree) -> None:
    """Raise `MisfitError` for an opaque object in an output that crosses a stage boundary."""
    found = tree.unknown()
    if found is not None:
        path, value = found
        raise MisfitError(
            f"block {block} leaves a {type(value).__module__}.{type(value).__qualname__} at {path}, which cannot go to "
            "another stage; leave it out, or let the stage hold the blocks that need it as well"
        )


class TakenSkips:
    """The skips among a stage's inputs, at some places of the row: later takers must get them unmodified."""

    def __init__(self, stage: int, arriving: Parcel, places: Sequence[int]) -> None:
        self._stage, self._arriving, self._places = stage, arriving, places

    def versions(self, given: Sequence[Tensor]) -> list[int]:
        """Return the version counter of each skip."""
        return [given[place]._version for place in self._places]

    def require_unchanged(self, given: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Raise `MisfitError` where a version counter has changed."""
        for place, version in zip(self._places, versions, strict=True):
            if given[place]._version != version:
                name = self._arriving.names[place - self._arriving.width]
                raise MisfitError(
                    f"a block of stage {self._stage} changes {name!r} in place, which the plan's skip gives to others "
                    f"as it was; let the block change {name}.clone(), or compile the plan without --skip {name}=…"
                )


def _without(parcel: Parcel, names: Mapping[str, object] | set[str]) -> Parcel:
    left = tuple([rider for rider in parcel.riders if rider[0] not in names]) if parcel.riders else ()
    return replace(parcel, riders=left) if len(left) < len(parcel.riders) else parcel


def require_planned_skips(
    plan: Plan, cuts: Sequence[range], parcels: Sequence[Parcel], blocks: list[nn.Module]
) -> None:
    """Raise `MisfitError` unless the skips of a plan connect the stages whose blocks make and take them."""
    if not plan.skips:
        return
    riders = {name for parcel in parcels for name in parcel.names}
    for name, planned in plan.skips.items():
        if name not in riders:
            raise MisfitError(
                f"the plan has a skip {name!r}, but no block sends a tensor of that name along, as `Carry` does"
            )
        found = tuple(dict.fromkeys(_stages_of(name, cuts, parcels, blocks)))
        if found != planned:
            others = (
                f"and stages {', '.join(map(str, found[1:]))} take it" if found[1:] else "and no other stage takes it"
            )
            wanted = f"with --skip {name}={','.join(map(str, found))}" if found[1:] else "without this skip"
            raise MisfitError(
                f"the plan's skip {name!r} goes from stage {planned[0]} to {', '.join(map(str, planned[1:]))}; in the "
                f"model stage {found[0]} makes it {others}: compile the plan {wanted}"
            )


def require_numbers_alone(
    plan: Plan, cuts: Sequence[range], parcels: Sequence[Parcel], blocks: list[nn.Module]
) -> None:
    """Raise `MisfitError` where a message, or recomputation, would lose a tensor's attributes or subclass."""
    for stage, numbers in enumerate(cuts):
        for chain, is_dropped in chains_of(numbers, plan.layout.recompute_every(stage)) if numbers else ():
            is_left = is_dropped or chain[-1] + 1 == numbers.stop
            for what, besides in parcels[chain[-1]].besides if is_left else ():
                later = blocks[numbers.stop :]
                if is_dropped or any(isinstance(what, int) or accepted_extras(block)(what) for block in later):
                    name = repr(what) if isinstance(what, str) else "what it leaves"
                    raise MisfitError(
                        f"behind block {chain[-1]} ({type(blocks[chain[-1]]).__name__}), {name} {besides}, which does "
                        "not go on to other stages, or from blocks that are recomputed; let each block find it by "
                        "itself, or pass it on as an output: return y, level; classes return y.as_subclass(Tensor)"
                    )


def _stages_of(name: str, cuts: Sequence[range], parcels: Sequence[Parcel], blocks: list[nn.Module]) -> Iterator[int]:
    """Yield the stage of the block that makes a carried tensor, then those of the blocks that take it."""
    stage_of = {block: stage for stage, numbers in enumerate(cuts) for block in numbers}
    source = next(number for number, parcel in enumerate(parcels) if name in parcel.names)
    yield stage_of[source]
    yield from (stage_of[number] for number in range(source + 1, len(blocks)) if accepted_extras(blocks[number])(name))

"""Shapes of blocks' outputs for a unit: traced on the meta device, or by a trial run where shapes depend on data.

Where a block fails on the meta device, a unit runs through the blocks for real.

    rank of stage 0    inputs ──▶ blocks 0 1 ──▶ specs of outputs, as text ──▶ all ranks of the pipeline
                                             └─▶ tensors ──▶ rank of stage 1 ──▶ blocks 2 3 ──▶ …

Each rank runs the stages that it holds, so that no rank needs the whole model. The trial leaves no side effects: no
autograd graph is kept, and generators, weights, buffers and attributes are restored. Shapes of outputs must follow
from shapes of inputs; a later step in which one differs raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.stalls.own_error_or_lost_peer import said

from ..autograd.slice_kv_cache import Past, Store
from ..blocks.block_builders import TARGETS, MutatedState, Parcel, accepted_extras
from ..blocks.shape_inference import changed_by, trace_shapes, wants_data
from ..blocks.tree_spec_text import from_words, to_words
from ..blocks.trees import Tree, TreeSpec, map_tensors, tensors_of
from ..blocks.without_side_effects import BlockResult, run_block, untouched
from ..comm import Group, ReduceOp
from ..stage.batches.microbatches import Batch
from ..stage.rank_stages import RankModel
from .block_examination_results import GatheredWeights
from .step_header import Announcer
from .unit_samples import UnitSpec


class ParcelFinder:
    """Finds the parcels (specs of outputs) of blocks for units.

    Args:
        model: this rank's stages.
        pipeline: the ranks of its pipeline.
        gathered: makes weights resident.

    Attributes:
        apart: paths of the model's output tensors that belong to no sample, whatever their rows: such as prototypes,
            whose number does not double with the number of samples.
        are_alike: whether all replicas run equally many trials; None: to be agreed on, as a mode's first step begins.
        some_fail: whether another rank could not begin that step.
    """

    def __init__(self, model: RankModel, pipeline: Group, gathered: GatheredWeights) -> None:
        self._model, self._trial = model, Trial(model, pipeline, gathered)
        self._known, self.apart = dict[tuple[Tree, ...], list[frozenset[int]]](), frozenset[str]()
        self._traced = dict[UnitSpec, list[Parcel] | MisfitError]()
        self.are_alike: bool | None = None
        self.some_fail = self._some_meet = False

    def agree_on_trials(self, world: Group, specs: Sequence[UnitSpec] | None = None) -> None:
        """Exchange whether all replicas run equally many trials, once in a first step (collective over all ranks).

        In a trial they gather weights together. `specs` are those of this replica's units; None where this rank cannot
        begin: then no rank runs a trial.
        """
        if self.are_alike is not None:
            return
        trials = 0
        for spec in specs or ():
            self._traced[spec] = found = self._trace(spec)
            trials += isinstance(found, MisfitError) and wants_data(found)
        mine = [trials, -trials] if not trials or self._meets else [-math.inf, -math.inf]
        mine = [math.inf, math.inf] if specs is None else mine
        numbers = torch.tensor(mine, dtype=torch.float64, device=world.device)
        world.all_reduce(numbers, ReduceOp.MAX).wait()
        most, least = numbers.tolist()
        self.are_alike, self.some_fail = most == -least, most == math.inf
        self._some_meet |= 0 < most < math.inf

    @property
    def _meets(self) -> bool:
        """Whether replicas exchange something within stages."""
        return self._model.computes_empty_units or self._model.plan.zero.shards_weights

    def find(self, spec: UnitSpec, batch: Batch, unit: int, *, is_first: bool) -> tuple[list[Parcel], bool]:
        """Return the parcel of every block for a unit, and whether that took data; raise `MisfitError` where it fails.

        `is_first`: no unit of the mode was settled before.
        """
        parcels = self._traced.pop(spec, None) or self._trace(spec)
        if needs_data := isinstance(parcels, MisfitError):
            if not wants_data(error := parcels):
                raise error
            if self.some_fail and is_first:
                raise error  # not said: the other rank's is
            if (self._meets or self._some_meet) and not (is_first and self.are_alike):
                raise MisfitError(
                    f"{error}; where replicas meet within a stage, blocks whose shapes depend on data take units of "
                    "one shape: pad sequences to one length, and give all of them as many samples, in every step"
                ) from error
            parcels = self._trial.run_unit(spec, batch, unit)
        if any(len(parcel.specs) > 1 for parcel in (parcels if needs_data else parcels[-1:])):
            parcels = self._with_apart(spec, parcels, _twice(batch, unit, spec.num_samples) if needs_data else None)
        return parcels, needs_data

    def _trace(self, spec: UnitSpec) -> list[Parcel] | MisfitError:
        """Return the parcels of a unit, or why it cannot be traced."""
        model = self._model
        try:
            return trace_shapes(model.outlines, spec.inputs, dict(spec.extras), model.options.dtype)
        except MisfitError as error:
            return error

    def _with_apart(self, spec: UnitSpec, parcels: list[Parcel], batch: Batch | None) -> list[Parcel]:
        """Return parcels with the tensors that belong to no sample marked; traced once per structure of outputs.

        `batch` has twice as many samples, where blocks take data.
        """
        structure = tuple(parcel.output.tree for parcel in parcels)
        if structure not in self._known:
            try:
                found = self._trace(spec.twice()) if batch is None else self._trial.run_unit(spec.twice(), batch, 0)
            except MisfitError as error:
                found = error
            every = [] if isinstance(found, MisfitError) else found  # blocks that take no other number of samples
            self._known[structure] = [_apart(*pair) for pair in zip(parcels, every, strict=False)]
        known, output = self._known[structure], parcels[-1].output
        if known:
            self.apart |= {path for place, path in enumerate(output.tree.paths) if place in known[-1]}
        return [replace(parcel, apart=its) for parcel, its in zip(parcels, known, strict=True)] if known else parcels


class Trial:
    """Trial run of units through the blocks of one rank and its pipeline.

    Args:
        model: this rank's stages.
        pipeline: the ranks of its pipeline.
        gathered: makes weights resident.
    """

    def __init__(self, model: RankModel, pipeline: Group, gathered: GatheredWeights) -> None:
        self._model, self._pipeline, self._gathered = model, pipeline, gathered

    def run_unit(self, spec: UnitSpec, batch: Batch, unit: int) -> list[Parcel]:
        """Return the parcel of every block for a unit (collective over the pipeline, and over replicas that
        communicate within stages).

        Raises `MisfitError` on all ranks for a block that cannot take its inputs.
        """
        model, results = self._model, list[tuple[BlockResult, list[MutatedState]]]()
        if model.pads_over_experts:
            raise MisfitError(
                "experts with pad_to_capacity over ep want shapes that all ranks know, but those of this model's "
                "blocks depend on data; take pad_to_capacity=False"
            )
        carried: tuple[Any, dict[str, Tensor]] = (None, {})
        for stage in model.plan.routes[0].stages:
            holder = model.plan.layout.rank_of(stage)
            if holder == model.pp_rank:
                if stage == model.plan.routes[0].stages[0]:
                    carried = batch.input_tree.build(batch.inputs[unit]), {}
                carried, found = self._run_stage(stage, carried, self._extras(spec, batch, unit), holder)
            else:
                words = Announcer(self._pipeline, holder, width=0).announce([], "")[1]
                found, given, riders = json.loads(words)
                carried = _empty(given, self._pipeline), {n: _empty(r, self._pipeline) for n, r in riders.items()}
            results += [_on_meta(*words) for words in found]
            for tensor in (*tensors_of(carried[0]), *carried[1].values()):
                sent = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
                self._pipeline.broadcast(sent, holder).wait()
        return trace_shapes(model.outlines, spec.inputs, dict(spec.extras), model.options.dtype, results)

    def _run_stage(
        self, stage: int, carried: tuple[Any, dict[str, Tensor]], extras: Mapping[str, Any], holder: int
    ) -> tuple[tuple[Any, dict[str, Tensor]], list[Any]]:
        """Run the blocks of a stage, and announce the specs of their outputs to the pipeline."""
        (given, riders), found, announcer = carried, list[Any](), Announcer(self._pipeline, holder, width=0)
        model = self._model
        with self._gathered(stage):
            for number, block in model.stages[stage].blocks.items():
                accepts = accepted_extras(block)
                taken = {name: extra for name, extra in {**extras, **riders}.items() if accepts(name)}
                try:
                    with untouched(block) as kept:
                        name = f"block {number} ({type(block).__name__})"
                        (given, fresh, auxiliary), records = run_block(
                            partial(model.tensor.run_whole, int(number), block), given, taken, name
                        )
                        state = [asdict(one) for one in changed_by(kept.snapshot, name)]
                except Exception as error:
                    where = type(block).__name__
                    if model.tensor.tokens.inside(int(number)):
                        where += ", which sequence_parallel gives a slice of the tokens: run without it"
                    words = f"block {number} cannot take {TreeSpec.from_tree(given)}: {said(error)} (in its {where})"
                    announcer.refuse(MisfitError(words))
                    raise MisfitError(words) from error
                riders = {**riders, **fresh}
                of_riders = {name: to_words(TreeSpec.from_tree(rider)) for name, rider in fresh.items()}
                found.append([to_words(TreeSpec.from_tree(given)), of_riders, auxiliary is not None, records, state])
        given, riders = map_tensors(Tensor.contiguous, given), {n: rider.contiguous() for n, rider in riders.items()}
        of_riders = {name: to_words(TreeSpec.from_tree(rider)) for name, rider in riders.items()}
        announcer.announce([], json.dumps([found, to_words(TreeSpec.from_tree(given)), of_riders]))
        return (given, riders), found

    def _extras(self, spec: UnitSpec, batch: Batch, unit: int) -> dict[str, Any]:
        extras, samples = dict(batch.extras[unit]), spec.inputs.samples
        if batch.targets:
            extras[TARGETS] = batch.targets[unit]
        context = self._model.sequences.context_of(samples)
        if context is not None:
            extras["context"] = context
        slices = self._model.plan.schedule.slices
        if slices > 1 and spec.mode == "train":
            extras["past"] = Past(Store(), 0, slices, samples.shape[1])
        return extras


def _apart(parcel: Parcel, of_twice: Parcel) -> frozenset[int]:
    """Return the indices of a parcel's specs whose rows do not double with the number of samples."""
    pairs = enumerate(zip(parcel.specs, of_twice.specs, strict=False))
    return frozenset(n for n, (one, twice) in pairs if one.shape and twice.shape[:1] != (2 * one.shape[0],))


def _twice(batch: Batch, unit: int, samples: int) -> Batch:
    """Return a batch of one unit, which repeats the samples of a unit of another batch."""

    def doubled(tensor: Tensor) -> Tensor:
        has_rows = tensor.dim() and len(tensor) and len(tensor) % samples == 0
        return torch.cat([tensor, tensor]) if has_rows else tensor

    rows = (batch.inputs, batch.targets, batch.extras)
    inputs, targets, extras = (map_tensors(doubled, list(row[unit : unit + 1])) for row in rows)
    return replace(batch, inputs=inputs, targets=targets, extras=extras)


def _empty(words: str, group: Group) -> Any:
    return from_words(words).empty(group.device)


def _on_meta(
    output: str, riders: Mapping[str, str], has_loss: bool, records: bool, state: Sequence[Mapping[str, Any]]
) -> tuple[BlockResult, list[MutatedState]]:
    """Return a block's result on the meta device, and the state that it changed."""
    fresh = {name: from_words(words).empty("meta") for name, words in riders.items()}
    loss = torch.zeros((), device="meta") if has_loss else None
    return ((from_words(output).empty("meta"), fresh, loss), records), [MutatedState(**one) for one in state]

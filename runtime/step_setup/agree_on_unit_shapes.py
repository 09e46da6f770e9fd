"""Units of a step, settled before anything is computed: the same on all ranks of a pipeline.

    inputs ──▶ specs, samples ──broadcast──▶ shapes of a unit's inputs ──meta device──▶ shapes of all messages
                                             (cached: steps of known shapes are neither traced nor agreed again)

Dropout masks are keyed by a sample's index in the whole batch. So where models draw, and several replicas divide the
batch, each replica needs the number of samples before its own: one small all-reduce. Replicas whose models draw
nothing do not communicate here, and may have other lengths and numbers of samples. The exception are mixtures of
experts that pad: all ranks of ep have to know whether their units are equal.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from quintsched.errors import MisfitError, UsageError, counted
from quintsched.ir.instruction_set import Overlap
from quintsched.plan import Plan

from ..blocks.block_builders import TARGETS, Parcel, on_meta, takes_targets
from ..blocks.shape_inference import trace_shapes
from ..blocks.tree_spec_text import from_words, to_words
from ..blocks.trees import TreeSpec
from ..comm import Group
from ..comm.host_collectives import CALLS, SAME_CALLS, is_same
from ..guards.state_changed_by_forwards import (
    changed_line,
    counters_made,
    norms_line,
    replicas_line,
    require_order,
    state_named,
    state_of_microbatches,
    state_of_replicas,
)
from ..parallel.mesh_groups import MeshGroups
from ..stage.batches.microbatches import Batch, MicrobatchSizes, sizes_of
from ..stage.in_place_copies import require_own_memory
from ..stage.rank_stages import RankModel
from ..stage.tensors_sent_between_stages import Cargo, require_numbers_alone, require_planned_skips
from .step_header import Announcer
from .unit_samples import MOST_SHAPES, Latest, Units, UnitShape, UnitSpec, samples_of

_logger = logging.getLogger("quintsched.runtime")

FindShapes = Callable[[UnitSpec, Batch, int], tuple[list[Parcel], bool]]
"""Function that returns the parcel of every block, for a unit of a batch by its number, and whether that took data."""

ExtraSpecs = tuple[tuple[tuple[str, TreeSpec], ...], ...]
"""Specs of the extras, by name, of a unit of each size."""


class StepSettler:
    """Settles the units of each step on one rank."""

    def __init__(
        self,
        model: RankModel,
        groups: MeshGroups,
        device: torch.device,
        find_shapes: FindShapes,
        agree_on_trials: Callable[[Group, Sequence[UnitSpec]], None],
    ) -> None:
        self._model, self._groups, self._device, self._find = model, groups, device, find_shapes
        self._agree_on_trials = agree_on_trials
        layout, route = model.plan.layout, model.plan.routes[0]
        first, last = layout.rank_of(route.stages[0]), layout.rank_of(route.stages[-1])
        self._has_inputs, self._has_targets = model.pp_rank == first, model.pp_rank == last
        self._inputs = Announcer(groups.pipeline, first, width=3)
        self._targets = Announcer(groups.pipeline, last, width=0) if any(map(takes_targets, model.outlines)) else None
        self._experts = groups.experts if model.pads_over_experts and groups.experts.size > 1 else None
        self._words, self._specs = Latest[str](MOST_SHAPES), Latest[list[TreeSpec]](MOST_SHAPES)
        self._shapes, self._units = Latest[UnitShape](MOST_SHAPES), Latest[Units](MOST_SHAPES)
        self._latest: UnitShape | None = None
        self.attempts = Counter[str]()  # to begin the first step of each mode: a refused one may have left shapes
        self._described: tuple[object, str] = None, ""
        self._same: tuple[Plan, tuple[object, ...], Units] | None = None
        model.masks.counts = model.may_draw
        self._has_warned = False

    def refuse(self, plan: Plan, error: MisfitError | UsageError) -> None:
        """Announce to the pipeline that this rank's batch cannot be split, if this rank is the source."""
        if self._inputs.refuse(error) and self._targets is not None:
            self._targets.refuse(error)
        self._fail(plan, error)

    def _fail(self, plan: Plan, error: MisfitError | UsageError) -> None:
        """Take part, with nothing, in what ranks exchange that can begin the step."""
        self._are_alike(str(error))
        if self._model.masks.counts and self._model.num_replicas > 1 and plan.mode == "train":
            with suppress(MisfitError):
                self._count_samples(0, 0)

    def settle_units(self, plan: Plan, batch: Batch) -> Units:
        """Return the units of a step (collective over the pipeline; and over replicas, where models draw).

        Raises `MisfitError` where blocks cannot take them, or ranks have other numbers of samples or microbatches.
        """
        model, slices, targets = self._model, plan.schedule.slices, ""
        try:
            kind, words = self._described if self._has_inputs else (None, "")
            if self._has_inputs and (batch.kind is None or kind is not batch.kind):
                words = self._describe(batch, slices, batch.input_spec)
                self._described = batch.kind, words
            here = self._groups.world.wait_cell.call, batch.microbatches, batch.num_samples or 0
            (call, microbatches, samples), inputs = self._inputs.announce(here, words)
            if call != here[0]:
                raise MisfitError(
                    f"this rank called {CALLS[here[0]]}, but the first stage's rank {CALLS[call]}; {SAME_CALLS}"
                )
            if self._targets is not None:
                words = self._describe(batch, slices, batch.target_spec) if self._has_targets else ""
                _, targets = self._targets.announce((), words)
        except (MisfitError, UsageError) as error:
            self._fail(plan, error)
            raise
        alike = self._experts is None or self._agree(plan, batch, (microbatches, samples, inputs, targets))
        first, of_all = model.replica * samples, model.num_replicas * samples  # as if they were even
        if model.masks.counts and model.num_replicas > 1 and plan.mode == "train":
            first, of_all = self._count_samples(batch.microbatches, samples)
        said = (
            batch.microbatches,
            batch.num_samples,
            microbatches,
            samples,
            first,
            of_all,
            inputs,
            targets,
            alike,
            self.attempts[plan.mode],
        )
        if self._same is not None and self._same[0] is plan and self._same[1] == said and not batch.extras[0]:
            return self._same[2]
        _require_alike(batch, microbatches, samples)
        sizes = sizes_of(samples, microbatches, plan.schedule.microbatches)
        extras = self._extras_of_each_size(batch, sizes, slices)
        key = (plan.mode, self.attempts[plan.mode], sizes, first, of_all, inputs, targets, extras, alike)

        def make() -> Units:
            given = self._given(plan, inputs, targets, extras)
            return replace(self._make(plan, batch, sizes, first, given), of_all=of_all, alike=alike)

        units = self._units.get(key, make)
        self._same = None if batch.extras[0] else (plan, said, units)
        return units

    def _agree(self, plan: Plan, batch: Batch, said: tuple[int, int, str, str]) -> bool:
        """Return whether all ranks of ep have the same units, where mixtures of experts pad (collective).

        Raises `MisfitError` where they differ and computations overlap: the exchanges of overlaps are fixed by then.
        """
        microbatches, samples, *_ = said
        sizes = sizes_of(samples, microbatches, plan.schedule.microbatches)
        extras = self._extras_of_each_size(batch, sizes, plan.schedule.slices)
        specs = [[(name, to_words(spec)) for name, spec in unit] for unit in extras]
        alike = self._are_alike(json.dumps([plan.mode, *said, specs]))
        if not alike and len(plan.columns.rows_where(Overlap)):
            raise MisfitError(
                "ranks of ep are given units of other shapes, so that experts with pad_to_capacity count their rows, "
                "which they did not when it was settled how computations overlap: give all replicas as many samples of "
                "the same length, or compile the plan without overlap"
            )
        return alike

    def _are_alike(self, words: str) -> bool:
        """Return whether all ranks of ep have the same text (collective); True without mixtures that pad."""
        return self._experts is None or is_same(self._experts, words)

    def _extras_of_each_size(self, batch: Batch, sizes: MicrobatchSizes, slices: int) -> ExtraSpecs:
        return tuple(batch.extra_specs(unit) for unit in self._first_of_each_size(sizes, slices).values())

    def any_shape(self) -> UnitShape:
        """Return the shape of the last units, for a rank that has none in this step.

        Raises `UsageError` where there were none.
        """
        if self._latest is None:
            raise UsageError("the first step of a replica needs samples, by which the shapes of what travels are found")
        return self._latest

    def _given(self, plan: Plan, inputs: str, targets: str, extras: ExtraSpecs) -> list[UnitSpec]:
        """Return the specs of the units of each size."""
        of_targets = self._read(targets) if targets else [None] * len(extras)
        return [
            UnitSpec(plan.mode, of_inputs, beside if target is None else (*beside, (TARGETS, target)))
            for of_inputs, beside, target in zip(self._read(inputs), extras, of_targets, strict=True)
        ]

    def _make(self, plan: Plan, batch: Batch, sizes: MicrobatchSizes, first: int, given: Sequence[UnitSpec]) -> Units:
        slices, shapes = plan.schedule.slices, dict[int, UnitShape]()
        if any(sizes) or self.any_shape():
            self._agree_on_trials(self._groups.world, given)
        for (size, unit), spec in zip(self._first_of_each_size(sizes, slices).items(), given, strict=True):
            shapes[size] = self._shapes.get(
                (spec, self.attempts[spec.mode]), partial(self._shape, plan, spec, batch, unit)
            )
        if any(sizes):
            self._latest = next(iter(shapes.values()))
        else:
            self.any_shape()
        by_unit = [shapes.get(size) for size in sizes for _ in range(slices)]
        empty = frozenset(unit for unit, shape in enumerate(by_unit) if shape is None)
        samples = samples_of(sizes, slices, first)
        return Units(by_unit, samples, empty, sum(sizes))

    def _shape(self, plan: Plan, spec: UnitSpec, batch: Batch, unit: int) -> UnitShape:
        model, samples = self._model, spec.inputs.samples
        parcels, needs_data = self._find(spec, batch, unit)
        blocks = list(map(on_meta, model.outlines))
        require_planned_skips(plan, model.cuts, parcels, blocks)
        require_own_memory(model.cuts, parcels, blocks)
        require_numbers_alone(plan, model.cuts, parcels, blocks)
        model.shared_state.require_one_stage(parcels)
        if self._latest is None:
            self._look_at_state(plan, spec, batch, parcels)
        cargo = Cargo(plan, model.cuts, model.tensor.travelling(parcels))
        context = model.sequences.context_of(samples)
        tokens = samples.shape[1] if len(samples.shape) > 1 else 0
        return UnitShape(spec, parcels, cargo, context, tokens, _structure(parcels), needs_data)

    def _look_at_state(self, plan: Plan, spec: UnitSpec, batch: Batch, parcels: Sequence[Parcel]) -> None:
        """Raise `MisfitError` for state that stages share or that needs another order; log what counts microbatches."""
        model = self._model
        run = partial(trace_shapes, model.outlines, spec.inputs, dict(spec.extras), model.options.dtype)
        model.shared_state.require_none_handed_on(parcels, lambda marks: run(marks=marks))
        blocks, buffers = list(map(on_meta, model.outlines)), model.options.buffers != "first"
        model.late_state.known = state_named(blocks, parcels)
        apart = state_of_replicas(blocks, parcels, buffers=buffers)
        model.late_state.known_apart = apart + counters_made(blocks, parcels)
        require_order(plan, of_microbatches := state_of_microbatches(blocks, parcels))
        lines = (
            changed_line(of_microbatches, batch.microbatches),
            replicas_line(apart, model.num_replicas),
            norms_line(blocks, batch.microbatches, model.num_replicas, synced=model.synced is not None),
        )
        if any(lines) and plan.mode == "train" and self._groups.world.index == 0 and not self._has_warned:
            self._has_warned = True
            for line in filter(None, lines):
                _logger.warning("%s", line)

    def _first_of_each_size(self, sizes: MicrobatchSizes, slices: int) -> dict[int, int]:
        """Return the first unit of each size that is computed."""
        found: dict[int, int] = {}
        for microbatch, size in enumerate(sizes):
            if size or self._model.computes_empty_units:
                found.setdefault(size, microbatch * slices)
        return found

    def _describe(self, batch: Batch, slices: int, spec_of: Callable[[int], TreeSpec]) -> str:
        """Return the specs of the units of each size, as text."""
        sizes = sizes_of(batch.num_samples or 0, batch.microbatches, len(batch.extras) // slices)
        specs = tuple(spec_of(unit) for unit in self._first_of_each_size(sizes, slices).values())
        return self._words.get(specs, lambda: json.dumps([to_words(spec) for spec in specs]))

    def _read(self, text: str) -> list[TreeSpec]:
        return self._specs.get(text, lambda: [from_words(words) for words in json.loads(text)])

    def _count_samples(self, microbatches: int, samples: int) -> tuple[int, int]:
        """Return this replica's first sample in the batch, and all its samples (collective over the replicas).

        A replica that cannot begin the step has no microbatches; then `MisfitError` is raised on all.
        """
        model = self._model
        table = torch.zeros(2, model.num_replicas, dtype=torch.int64, device=self._device)
        if self._has_inputs and self._groups.context.index == 0:
            table[:, model.replica] = torch.tensor([samples, microbatches])
        self._groups.metrics.all_reduce(table).wait()
        counts, of_replicas = table.tolist()
        if 0 in of_replicas:
            raise MisfitError(f"replica {of_replicas.index(0)} cannot begin this step: its own error says why")
        if len(set(of_replicas)) > 1:
            raise MisfitError(
                f"the replicas have {counted(of_replicas, 'microbatch')}; give every rank the same `microbatches`"
            )
        return sum(counts[: model.replica]), sum(counts)


def _require_alike(batch: Batch, microbatches: int, samples: int) -> None:
    """Raise `MisfitError` where this rank's step differs from that of the first stage's rank."""
    if batch.microbatches != microbatches:
        raise MisfitError(
            f"this rank's step has {counted(batch.microbatches, 'microbatch')}, but that of the first stage's rank "
            f"has {microbatches}; give every rank the same `microbatches`"
        )
    if batch.num_samples in (None, samples):
        return
    if batch.num_samples and samples and batch.num_samples % samples == 0:
        if samples % microbatches == 0:
            return  # several rows for each sample, cut alike
        raise MisfitError(
            f"this rank is given targets of {counted(batch.num_samples, 'row')} for {counted(samples, 'sample')}, "
            f"which {microbatches} microbatches cannot share evenly; give targets whose first dimension is that of the "
            "samples"
        )
    raise MisfitError(
        f"this rank is given targets or extras of {counted(batch.num_samples, 'sample')}, but the inputs have {samples}"
    )


def _structure(parcels: Sequence[Parcel]) -> str:
    """Return the structure of all parcels, without shapes, as text."""
    words = [
        (parcel.output.tree, *parcel.names, parcel.has_loss, *[spec.dtype for spec in parcel.specs])
        for parcel in parcels
    ]
    return " | ".join([" ".join(map(str, row)) for row in words])

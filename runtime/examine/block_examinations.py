"""Examination of blocks before the first step: backwards that are not linear, losses that are neither mean nor sum.

each kind of block here, run on a few samples ─▶ findings ──sent to all ranks──▶ refused if they do not
                                                                                 fit the loss function
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import nn

from quintsched.errors import MisfitError
from quintsched.ir.instruction_set import Compute, Fwd, Instruction, Overlap, Recompute

from ..blocks.block_builders import Parcel, accepted_extras
from ..blocks.dtensor import is_sharded
from ..blocks.shape_inference import trace_shapes
from ..blocks.trees import Tree
from ..comm import Group
from ..comm.host_collectives import first_said, reduce_numbers, share_texts
from ..losses.loss_reductions import LossWeight, Over
from ..parallel.cut_proofs.block_kinds import content_of
from ..parallel.cut_proofs.prove_features_independent import state_of_host
from ..parallel.cut_proofs.trial_inputs import TRIAL_SAMPLES as FEW
from ..parallel.cut_proofs.trial_inputs import Arrival, Arrivals, FirstUnits
from ..parallel.expert.moe import mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.tensor.cut_rules import is_built_in
from ..stage.rank_stages import RankModel
from ..step_setup.block_examination_results import BlockFindings, BlockLoss, GatheredWeights
from ..user_objects.host_state import HostState
from .altered_extra_inputs import OF_NO_SAMPLE, extra_of_no_sample
from .block_losses import DRAWN_SAMPLES, examine_block_loss
from .gradients.nonlinear_backwards import BlockBackwards
from .trial_block_runs import TriedBlock, drawing

_FREE_BYTES = 32 << 20


class _EqualBlocks(NamedTuple):
    """Equal blocks of one stage, represented by the first of them."""

    stage: int
    number: int
    block: nn.Module


class BlockExaminations(BlockFindings):
    """Examinations of the blocks of a rank's stages, before the first step and after changes."""

    def __init__(self, model: RankModel, groups: MeshGroups) -> None:
        super().__init__()
        self._model, self._groups = model, groups
        self._backwards: BlockBackwards | None = None
        self._evaluated: tuple[FirstUnits, Sequence[Parcel]] | None = None
        self._num_at_evaluation = -1
        self._kinds: list[_EqualBlocks] = []
        self._watched: dict[str, nn.Module] = {}
        self._state: HostState | None = None
        self._own = set[str]()
        self._versions: dict[str, int] = {}
        self._num_changes = 0
        self._trees: set[tuple[str, Tree]] | None = None
        self._given_others: list[int] = []
        self._arrivals: dict[tuple[int | None, bool, int], Arrivals] = {}

    def examine_backwards(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Try the backward of each kind of block here."""
        model, self._first = self._model, (units, parcels)

        def arrival_of(number: int, has_few: bool) -> Arrival:
            few = FEW if has_few or self._cut[0].size * self._cut[1] > 1 else None
            return self._given_of(few, repeats=few is not None).block_arrival(number, model.outlines[number])

        blocks = {stage: {int(n): block for n, block in held.blocks.items()} for stage, held in model.stages.items()}
        overtaken = _overtaken(model.plan.programs[model.pp_rank])
        self._backwards = BlockBackwards(blocks, self._tried, gathered, self._agree, overtaken)
        self._backwards.examine(arrival_of)
        self.unlinear = self._backwards.found

    def follow_units(self, units: FirstUnits, parcels: Sequence[Parcel]) -> None:
        """Schedule the blocks that take extras which are new."""
        known, now = self._trees, {(name, spec.tree) for name, spec in units.extra_specs.items()}
        self._trees = now | (known or set())
        new = sorted(name for name, _ in self._trees - known) if known is not None else []
        suspects = {} if self._backwards is None else self._backwards.suspects
        blocks = {**{kind.number: kind.block for kind in self._kinds}, **suspects}
        taking = {name: [n for n, block in blocks.items() if accepted_extras(block)(name)] for name in new}
        if any(taking.values()):
            self._first = units, parcels
            self._arrivals.clear()
            self._given_others = [number for numbers in taking.values() for number in numbers if number in suspects]
            self.since = self.since or next(f"{name!r}, which the step is given," for name in new if taking[name])

    def examine_changed(self) -> None:
        """Try the backwards of changed blocks again."""
        if self._backwards is not None:
            told = share_texts(self._groups.world, " ".join(map(str, self.changed)))
            self._backwards.again({int(number) for text in told for number in text.split()})
            self.changed, self.unlinear = [], self._backwards.found

    def examine_losses(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Run each kind of block here with a loss on samples that are drawn, and share the findings."""
        self._examine_extras(units, parcels, gathered)
        self._gathered, self._first = gathered, (units, parcels)
        if self._find_kinds(parcels):
            self._examine()

    def expect_evaluation(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Store the first units of evaluations."""
        self._gathered = gathered
        self._evaluated = (units, parcels) if self._find_kinds(parcels) else None

    def examine_evaluation(self) -> bool:
        """Run the blocks with a loss in eval mode, if state may have changed."""
        if self._evaluated is None or self._num_at_evaluation == self._num_changes:
            return False
        self._num_at_evaluation = self._num_changes
        self.in_evaluations = self._found_of(self._evaluated, is_brief=self._is_brief, evaluates=True)
        return True

    def _examine_extras(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: GatheredWeights) -> None:
        """Refuse extras that are cut with the samples, but that a block uses as a whole (collective).

        Raises `MisfitError`. Blocks that communicate with other replicas in their forwards are not tried.
        """
        self._first, why = (units, parcels), ""
        if not units.cut_extras:
            return
        for name in sorted(units.cut_extras if units.spec.samples.shape[0] == 1 else ()):
            self._require_two_rows(units, name)
        try:
            arrivals = self._given_of(FEW, repeats=True)
        except MisfitError:  # blocks that take no other number of samples; so on all ranks
            return
        for stage, held in sorted(self._model.stages.items()):
            for number, block in ((int(n), block) for n, block in held.blocks.items()):
                names = sorted(filter(accepted_extras(block), units.cut_extras))
                if why or not names or arrivals.num_samples != FEW or mixtures(block) or is_sharded(block):
                    continue
                arrival = arrivals.block_arrival(number, self._model.outlines[number])
                with gathered(stage):
                    found = extra_of_no_sample(self._tried(number, block), arrival, names)
                if found is not None:
                    why = OF_NO_SAMPLE.format(number, type(block).__name__, found, found)
        if why := first_said(why, self._groups.world):
            raise MisfitError(why)

    def _require_two_rows(self, units: FirstUnits, name: str) -> None:
        """Raise `MisfitError` where blocks can run on two samples with one row of an extra, but not with two."""
        outlines, dtype = self._model.outlines, self._model.options.dtype
        works = []
        for apart in ((), (name,)):
            extras = {n: spec if n in apart else spec.twice(1) for n, spec in units.extra_specs.items()}
            try:
                trace_shapes(outlines, units.spec.twice(1), extras, dtype)
                works.append(True)
            except MisfitError:
                works.append(False)
        if works == [False, True]:
            takers = (n for n, block in enumerate(outlines) if accepted_extras(block)(name))
            number = next(takers, 0)
            raise MisfitError(OF_NO_SAMPLE.format(number, type(outlines[number]).__name__, name, name))

    def _find_kinds(self, parcels: Sequence[Parcel]) -> bool:
        """Find the kinds of blocks here that are examined; return whether any rank has some."""
        model, self._kinds = self._model, []
        wanted = {n for n, parcel in enumerate(parcels) if parcel.has_loss and not is_built_in(model.outlines[n])}
        known = list[object]()
        for stage, held in sorted(model.stages.items()):
            for number, block in held.blocks.items():
                if int(number) in wanted and (content := content_of(block)) not in known:
                    known.append(content)
                    self._kinds.append(_EqualBlocks(stage, int(number), block))
        self._watched = {
            f"block {n}": block
            for held in model.stages.values()
            for n, block in held.blocks.items()
            if int(n) in wanted
        }
        return bool(wanted)

    def examine_again(self) -> None:
        """Run the blocks with a loss anew."""
        self._num_changes += 1
        self._examine()
        self.since = ""

    @property
    def _is_brief(self) -> bool:
        return self._num_changes & (self._num_changes - 1) > 0

    def _examine(self) -> None:
        self.losses = self._found_of(self._first, is_brief=self._is_brief)
        self._state = state_of_host(self._watched)

    def _found_of(
        self, first: tuple[FirstUnits, Sequence[Parcel]], *, is_brief: bool, evaluates: bool = False
    ) -> list[BlockLoss]:
        """Return the findings about losses on all ranks (collective), with the given first units as inputs."""
        found = list[BlockLoss]()
        try:
            arrivals = self._given_of(_count(*first), first, repeats=True)
        except MisfitError:  # blocks that take no other number of samples
            arrivals = self._given_of(None, first)
        for kind in self._kinds:
            number, block = kind.number, kind.block
            with self._gathered(kind.stage):
                given = arrivals.block_arrival(number, self._model.outlines[number]), arrivals.num_samples
                records = not evaluates or first[1][number].records
                examine = partial(examine_block_loss, agree=self._agree, is_brief=is_brief, records=records)
                found.append(examine(self._tried(number, block), *given))
        told = json.dumps([[*one[:2], list(map(asdict, one.over)), one.why, one.where] for one in found])
        return [
            BlockLoss(number, kind, tuple(LossWeight(**{**rule, "over": Over(rule["over"])}) for rule in over), *why)
            for text in share_texts(self._groups.world, told)
            for number, kind, over, *why in json.loads(text)
        ]

    def begin_step(self) -> None:
        """Compare the state that code of blocks with a loss reads."""
        if self._state is not None and not self.since:
            found = (*self._moved(), *self._filled())
            self.since = next((name for name in found if name not in self._own), "")

    def end_step(self) -> None:
        """Record what forwards of blocks with a loss have changed."""
        if self._backwards is not None:
            self.changed, self._given_others = [*self._backwards.changed(), *self._given_others], []
        if self._state is not None and not self.since:
            self._own.update(self._moved(), self._filled())

    def _filled(self) -> Iterator[str]:
        """Yield the names of buffers that were changed in place since the last call, by their version counters."""
        for name, block in self._watched.items():
            for path, buffer in block.named_buffers():
                label, version = f"{name}.{path}", buffer._version
                if self._versions.setdefault(label, version) != version:
                    self._versions[label] = version
                    yield label

    def _moved(self) -> Iterator[str]:
        assert self._state is not None  # hooks come and go in the first step, which watches them
        return (place.name for place in self._state.moved(hooks=False))

    def _given_of(
        self,
        samples: int | None,
        first: tuple[FirstUnits, Sequence[Parcel]] | None = None,
        *,
        repeats: bool = False,
    ) -> Arrivals:
        """Return the inputs of blocks for a unit of `samples`, cached; `first`: other first units than training's."""
        units, parcels = first or self._first
        key = samples, repeats, id(units)
        if key not in self._arrivals:
            given = Arrivals(units, self._model.outlines, parcels, *self._cut, samples=samples, repeats=repeats)
            self._arrivals[key] = given
        return self._arrivals[key]

    def _agree(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise maximum over the ranks that run a block together (collective over tp)."""
        return reduce_numbers(self._groups.tensor, numbers)

    @property
    def _cut(self) -> tuple[Group, int, torch.dtype | None]:
        return self._groups.context, self._model.plan.schedule.slices, self._model.options.dtype

    def _tried(self, number: int, block: nn.Module) -> TriedBlock:
        model = self._model
        alike = partial(drawing, model.masks, number, block, sliced=model.tensor.tokens.group_of)
        return TriedBlock(model.tensor.run_whole, number, block, alike)


def _overtaken(program: Sequence[Instruction]) -> set[int]:
    """Return the stages where a forward of another microbatch runs between a forward and its backward."""
    latest, found = dict[int, int](), set[int]()
    for side in [side for one in program for side in (one.sides if isinstance(one, Overlap) else (one,))]:
        if isinstance(side, Fwd | Recompute):
            latest[side.stage] = side.microbatch
        elif isinstance(side, Compute) and latest.get(side.stage) != side.microbatch:
            found.add(side.stage)
    return found


def _count(units: FirstUnits, parcels: Sequence[Parcel]) -> int:
    """Return the number of samples to examine losses: `DRAWN_SAMPLES` if memory allows it, else about two microbatches.

    It divides no first dimension of the parcels, so that rows of samples can be told from other sizes.
    """
    here = max(1, units.spec.samples.shape[0])
    nbytes = max(sum(spec.nbytes for spec in parcel.specs) for parcel in parcels) // here
    least = DRAWN_SAMPLES if nbytes * DRAWN_SAMPLES <= _FREE_BYTES else min(DRAWN_SAMPLES, max(3, 2 * here))
    rows = {spec.shape[0] for parcel in parcels for spec in parcel.specs if spec.shape} - {0}
    return next(number for number in count(least) if all(some % number for some in rows))

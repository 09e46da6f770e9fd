"""What blocks are found to do before the first step: backwards that are not linear, losses that are no mean or sum.

each kind of block here, run on a few samples ─▶ what is found ──said to all ranks──▶ refused beside a loss function
                                                                                      that it does not go with
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from quintsched.errors import MisfitError
from quintsched.ir.instructions import Compute, Fwd, Instruction, Overlap, Recompute

from ..blocks.blocks import Parcel
from ..blocks.host_state import HostState
from ..comm import Group
from ..comm.control import gather_texts
from ..examine.block_losses import SAMPLES, BlockLoss, examine_block_loss
from ..examine.block_runs import RunBlock, drawing
from ..examine.gradients.backwards import BlockBackwards, Unlinear
from ..examine.losses.rules import LossWeight, Over
from ..parallel.mesh_groups import MeshGroups
from ..parallel.proof.arrivals import SAMPLES as FEW
from ..parallel.proof.arrivals import Arrival, Arrivals, FirstUnits
from ..parallel.proof.features_apart import state_of_host
from ..parallel.proof.kinds import content_of
from ..parallel.tensor.rules import is_built_in
from ..stage.mean_losses import SUMS
from ..stage.rank_model import RankModel

Gathered = Callable[[int], AbstractContextManager[None]]

_FREE_BYTES = 32 << 20
NO_BLOCK_LOSS = (
    "{} gives a loss beside its output, and of microbatches it is not that of the batch: {}; return {} over "
    "samples of what each of them has by itself"
)


class _Kind(NamedTuple):
    """Blocks of one stage that are alike, by the first of them."""

    stage: int
    number: int
    block: nn.Module


class BlockExaminations:
    """What is found of the blocks of a run.

    Attributes:
        changed: the numbers of the blocks that may have other backwards since they were examined.
        losses: what is known of the losses of blocks, here and elsewhere: the same on all ranks.
        since: what somebody has changed that they may go by; "": nothing.
    """

    def __init__(self, model: RankModel, groups: MeshGroups) -> None:
        self._model, self._groups = model, groups
        self._backwards: BlockBackwards | None = None
        self.changed: list[int] = []
        self.losses: list[BlockLoss] = []
        self.since = ""
        self._kinds: list[_Kind] = []
        self._given: dict[int, Arrival] = {}
        self._watched: dict[str, nn.Module] = {}
        self._state: HostState | None = None
        self._own = set[str]()
        self._num_changes = 0

    def examine_backwards(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: Gathered) -> None:
        """Find out which blocks are not linear in gradients (collective over those who have the same).

        Args:
            units: the first microbatch.
            parcels: what blocks leave of one unit.
            gathered: makes the weights of a stage resident.
        """
        model = self._model

        @cache
        def arrivals(samples: int | None) -> Arrivals:
            return Arrivals(units, model.outlines, parcels, *self._cut, samples=samples)

        def arrival_of(number: int, has_few: bool) -> Arrival:
            is_cut = self._cut[0].size * self._cut[1] > 1
            return arrivals(FEW if has_few or is_cut else None).at(number, model.outlines[number])

        blocks = {stage: {int(n): block for n, block in held.blocks.items()} for stage, held in model.stages.items()}
        overtaken = _overtaken(model.plan.programs[model.pp_rank])
        self._backwards = BlockBackwards(blocks, self._run, self._alike, gathered, overtaken)
        self._backwards.examine(arrival_of)

    @property
    def unlinear(self) -> Unlinear:
        """Why the backward of a block here is not linear."""
        return Unlinear() if self._backwards is None else self._backwards.found

    def examine_changed(self) -> None:
        """Examine the backwards of blocks that have changed on any rank (collective)."""
        if self._backwards is not None:
            told = gather_texts(self._groups.world, " ".join(map(str, self.changed)))
            self._backwards.again({int(number) for text in told for number in text.split()})
            self.changed = []

    def examine_losses(self, units: FirstUnits, parcels: Sequence[Parcel], gathered: Gathered) -> None:
        """Find out what the losses of blocks that are not built in are over (collective); see `examine_backwards`."""
        model, self._gathered = self._model, gathered
        wanted = {n for n, parcel in enumerate(parcels) if parcel.has_loss and not is_built_in(model.outlines[n])}
        if not wanted:
            return
        known = list[object]()
        for stage, held in sorted(model.stages.items()):
            for number, block in held.blocks.items():
                if int(number) in wanted and (content := content_of(block)) not in known:
                    known.append(content)
                    self._kinds.append(_Kind(stage, int(number), block))
        try:
            arrivals = Arrivals(
                units, model.outlines, parcels, *self._cut, samples=_count(units, parcels), repeats=True
            )
        except MisfitError:  # of blocks that take no other number
            arrivals = Arrivals(units, model.outlines, parcels, *self._cut, samples=None)
        given = {kind.number: arrivals.at(kind.number, model.outlines[kind.number]) for kind in self._kinds}
        self._given, self._num_samples = given, arrivals.num_samples
        self._watched = {
            f"block {n}": block
            for held in model.stages.values()
            for n, block in held.blocks.items()
            if int(n) in wanted
        }
        self._examine()

    def examine_again(self) -> None:
        """Find out what they are over now, ever more rarely by all experiments (collective)."""
        self._num_changes += 1
        self._examine(is_brief=self._num_changes & (self._num_changes - 1) > 0)
        self.since = ""

    def _examine(self, *, is_brief: bool = False) -> None:
        found = list[BlockLoss]()
        for kind in self._kinds:
            number, block = kind.number, kind.block
            with self._gathered(kind.stage):
                alike = partial(self._alike, number, block)
                given = self._given[number], self._num_samples, alike
                found.append(examine_block_loss(self._run, number, block, *given, is_brief=is_brief))
        self._state = state_of_host(self._watched)
        told = json.dumps([[one.name, list(map(asdict, one.over)), one.why] for one in found])
        self.losses = [
            BlockLoss(name, tuple(LossWeight(**{**rule, "over": Over(rule["over"])}) for rule in over), why)
            for text in gather_texts(self._groups.world, told)
            for name, over, why in json.loads(text)
        ]

    def begin(self) -> None:
        """Begin a step: look whether somebody has changed what the code of these blocks goes by."""
        if self._state is not None and not self.since:
            self.since = next((name for name in self._moved() if name not in self._own), "")

    def end(self) -> None:
        """End a step: what forwards have changed themselves goes by microbatches, as all state within blocks."""
        if self._backwards is not None:
            self.changed = self._backwards.changed()
        if self._state is not None and not self.since:
            self._own.update(self._moved())

    def _moved(self) -> Iterator[str]:
        assert self._state is not None  # hooks come and go in the first step, which watches them
        return (slot.name for slot in self._state.moved() if ", its hooks" not in slot.name)

    def over_targets(self) -> list[LossWeight]:
        """Return what losses of blocks are means over that are none over samples."""
        of_samples = (Over.SUM, Over.SAMPLES)
        kinds = [one.over for one in self.losses if one.over and not any(w.over in of_samples for w in one.over)]
        return [over[0] for over in kinds]

    def why_wrong(self, rule: LossWeight | None) -> str:
        """Return which loss of a block does not go with a loss function that is over this; "": all do."""
        if rule is None or rule.over is Over.MICROBATCH:
            return ""
        wants_sum = rule.over in SUMS
        for one in self.losses:
            fits = [weight for weight in one.over if (weight.over is Over.SUM) == wants_sum]
            if not fits:
                what = "it is neither a sum over samples nor a mean over them"
                if one.over:
                    what = f"it is {one.over[0]}, and the loss function gives {rule}"
                return NO_BLOCK_LOSS.format(one.name, one.why or what, "a sum" if wants_sum else "a mean")
        return ""

    @property
    def _run(self) -> RunBlock:
        return self._model.tensor.run_whole

    @property
    def _cut(self) -> tuple[Group, int, torch.dtype | None]:
        return self._groups.context, self._model.plan.schedule.slices, self._model.options.dtype

    def _alike(self, number: int, block: nn.Module, samples: range) -> AbstractContextManager[None]:
        return drawing(self._model.masks, number, block, samples, self._model.tensor.tokens.group_of)


def _overtaken(program: Sequence[Instruction]) -> set[int]:
    """Return the stages where a forward of one microbatch runs between that of another and its backward."""
    latest, found = dict[int, int](), set[int]()
    sides = (side for one in program for side in (one.sides if isinstance(one, Overlap) else (one,)))
    for side in sides:
        if isinstance(side, Fwd | Recompute):
            latest[side.stage] = side.microbatch
        elif isinstance(side, Compute) and latest.get(side.stage) != side.microbatch:
            found.add(side.stage)
    return found


def _count(units: FirstUnits, parcels: Sequence[Parcel]) -> int:
    """Return of how many samples losses are examined: no more than two microbatches have, unless these are small."""
    here = max(1, units.spec.samples.shape[0])
    nbytes = max(sum(spec.nbytes for spec in parcel.specs) for parcel in parcels) // here
    return SAMPLES if nbytes * SAMPLES <= _FREE_BYTES else min(SAMPLES, max(3, 2 * here))

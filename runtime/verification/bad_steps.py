"""Steps whose gradients are not finite: one is skipped; after some in a row the run stops and says where that arose.

    step 7 skipped, step 8 skipped, … ──▶ the last one runs again, with checks on ──▶ the first finding
                                          its batch is written down: safetensors                     of all ranks

The weights are still those that the step began with, since it was skipped, and so are its masks. A step is known by the
skipped one that counts; where a loss scale above 1 may be what made gradients overflow, it does not.

Where the first number of a step that is not finite arose, found by running the step again with checks on.

    weights ─▶ inputs, targets ─▶ outputs of block 0, 1, … ─▶ loss ─▶ gradients, from the last block to the first
               per microbatch                                        of what a block is given, and of its weights

Each rank looks at what it holds. Of all findings the first is the one that no other can have caused: weights before
inputs, inputs before what is computed of them, and so on; within these the earliest microbatch, and the earliest block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from quintsched.errors import NotFiniteError, QuintschedError
from quintsched.files.atomic import whole_path, write_whole
from quintsched.plan import Plan

from ..blocks.blocks import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..comm import Group
from ..comm.control import share_bytes
from ..interpreter.interpreter import PreparedStep
from ..interpreter.plan_runner import PlanRunner
from ..interpreter.tally import StepResult, Tally
from ..saving.rank_tensors import HeldTensor
from ..stage.batches.microbatches import Batch
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from .recording import ALL, Call, StepWatch

KINDS = ("weights", "inputs", "targets", "activations", "loss", "gradients")
"""What may not be finite, in the order in which one makes the next so."""

LOSS = 2**30
"""Stands for the block behind the last one: the loss function."""

UNKNOWN = 2**30
"""Stands for a unit: what nobody knows the unit of."""


@dataclass(frozen=True)
class NotFinite:
    """Numbers that are not finite.

    Attributes:
        kind: what they are, one of `KINDS`.
        unit: the batch's unit, counted over all replicas; or `ALL`, or `UNKNOWN`.
        block: which block they belong to; `LOSS`; -1: to none.
        what: in words.
        rank: the global rank that found them.
    """

    kind: str
    unit: int
    block: int
    what: str
    rank: int = 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Of several findings, the least is the first."""
        along = -self.block if self.kind == "gradients" else self.block
        return KINDS.index(self.kind), self.unit, along, self.rank


def describe(tensor: Tensor) -> str:
    """Say how many numbers of a tensor are not finite: "3 of 64 numbers are nan, 1 is inf"."""
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    found = [f"{count} nan" for count in [nans] if count] + [f"{count} inf" for count in [infinities] if count]
    return f"{' and '.join(found)} among {tensor.numel()} numbers"


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; integers are."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats or bool(tensor.isfinite().all())


class FiniteChecks(StepWatch):
    """Looks at all that one rank makes in a step, for numbers that are not finite.

    `tally` has the losses that were collected so far, and what they weigh; other arguments are those of `StepWatch`.

    Attributes:
        found: what was not finite.
    """

    def __init__(self, plan: Plan, model: RankModel, *held: Any, tally: Tally) -> None:
        super().__init__(plan, model, *held)
        self._tally, self._num_blocks = tally, len(model.outlines)
        self.found: list[NotFinite] = []

    def look_at_weights(self) -> None:
        """Look at the weights that the step begins with."""
        for held in self._held():
            if isinstance(held.tensor, nn.Parameter) and held.numbers is not None:
                numbers = local_of(held.numbers.detach())
                self._look_at(numbers, "weights", ALL, _block_of(held), f"{held.name}: ")

    def look_at_batch(self, batch: Batch) -> None:
        """Look at what the rank is given."""
        for kind, units in (("inputs", batch.inputs), ("targets", batch.targets), ("inputs", batch.extras)):
            for unit, given in enumerate(units):
                for tensor in tensors_of(given):
                    self._look_at(tensor, kind, self._first_unit + unit, -1)

    def _look_at(self, tensor: Tensor, kind: str, unit: int, block: int, words: str = "") -> None:
        if not is_finite(tensor):
            self.found.append(NotFinite(kind, unit, block, f"{words}{describe(tensor)}"))

    def _run(self, unit: int, is_forward: bool, call: Call) -> None:
        of_losses = (self._tally.losses, "the loss is"), (self._tally.weights, "the weight that it gives is")
        known = [len(numbers) for numbers, _ in of_losses]
        super()._run(unit, is_forward, call)
        for count, (numbers, words) in zip(known, of_losses, strict=True):
            for _, number in numbers[count:]:
                if not is_finite(torch.as_tensor(number)):
                    what = f"{words} {float(number)}"
                    self.found.append(NotFinite("loss", self._first_unit + unit, LOSS, what))

    def _look_at_sum(self, held: HeldTensor, gradient: Tensor) -> None:
        """Look at a sum of gradients: nobody knows of which unit it comes."""
        self._look_at(local_of(gradient), "gradients", UNKNOWN, _block_of(held), f"gradient of {held.name}: ")

    def _handles(self, number: str, block: nn.Module, *, is_last: bool) -> Iterator[Any]:
        yield block.register_forward_hook(partial(self._gave, int(number), is_last))
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                look = partial(self._look_at_gradient, int(number), f"gradient of its {name}: ", None)
                yield parameter.register_hook(look)

    def _gave(self, number: int, is_last: bool, block: nn.Module, given: Any, result: Any) -> None:
        unit = self._unit
        output, riders, loss = split_result(result)
        gives = [*tensors_of(output), *riders.values()]
        if self._is_forward:
            for tensor in gives:
                self._look_at(tensor, "activations", unit, number, "its output: ")
            if loss is not None:
                self._look_at(loss, "loss", unit, number, "the loss that it returns: ")
        taken = "gradient of what it is given: "
        behind = (LOSS, taken) if number + 1 == self._num_blocks else (number + 1, taken)
        if is_last and number + 1 < self._num_blocks:  # who takes it is elsewhere, and looks at what it sends back
            behind = number, "gradient of its output, which was finite as the next stage sent it: "
        for (at, words), tensors in (((number, taken), tensors_of(given)), (behind, gives)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, at, words, unit))

    def _look_at_gradient(self, number: int, words: str, unit: int | None, gradient: Tensor) -> None:
        self._look_at(local_of(gradient), "gradients", self._unit if unit is None else unit, number, words)


def _block_of(held: HeldTensor) -> int:
    return int(held.name.partition(".")[0])


MOST_FINDINGS = 3
"""So many findings of each rank are compared: they are sorted."""


class BadSteps:
    """Counts the steps in a row that were skipped, and stops the run; the same on all ranks.

    Args:
        runner: runs steps.
        model: this rank's stages.
        state: their weights, and what their optimizers work on.
        held: returns what it holds of the model.
        world: all ranks.
        most: how many are too many; 0: any number is allowed.
        directory: where the batch of the last one is written; None: nowhere.
    """

    def __init__(
        self,
        runner: PlanRunner,
        model: RankModel,
        state: TrainingState,
        held: Callable[[], list[HeldTensor]],
        world: Group,
        most: int,
        directory: str | Path | None,
    ) -> None:
        self._runner, self._model, self._state, self._held = runner, model, state, held
        self._world, self._most = world, most
        self._directory = None if directory is None else whole_path(directory)
        self._parts: list[PreparedStep] = []
        self._in_row = 0

    def note(self, step: PreparedStep, result: StepResult, *, last: bool) -> None:
        """Take note of a step, or of a part of one whose gradients are accumulated (collective).

        Raises `NotFiniteError` where it is one too many of those that were skipped.
        """
        if not self._most:
            return
        self._parts.append(step)
        if not last:
            return
        parts, self._parts = self._parts, []
        if result.empty or (result.skipped and step.interpreter.state.step_end.scale.may_overflow):
            return
        self._in_row = self._in_row + 1 if result.skipped else 0
        if self._in_row >= self._most:
            self._stop(parts, float(result.weight))

    def _stop(self, parts: list[PreparedStep], weight: float) -> None:
        found = self._first([finding for part in self._look_again(parts) for finding in part.found])
        number, unit_count = self._runner.steps.total, parts[-1].interpreter.state.flows.plan.schedule.num_units
        paths = self._write(parts, number, found, unit_count)
        times = "a step" if self._most == 1 else f"{self._most} steps in a row"
        where = self._where(found, parts[-1], weight)
        raise NotFiniteError(
            f"the gradients of {times} were not finite, so that nothing is learnt; the last is step {number}. {where}. "
            f"{paths}. Allow more of them, or any number, by train.max_skipped (Engine: max_skipped); 0 is any number"
        )

    def _look_again(self, parts: list[PreparedStep]) -> list[FiniteChecks]:
        """Run the step again, and return what was looked at in each of its parts."""
        runner, model = self._runner, self._model
        runner.steps.take_back()
        looked = []
        for part in parts:
            state = part.interpreter.state
            plan, tally = state.flows.plan, state.compute.tally
            checks = FiniteChecks(plan, model, self._state.masters, self._held, tally=tally)
            if part is parts[0]:
                checks.look_at_weights()
            checks.look_at_batch(part.batch)
            with checks.watching():
                calls = part.interpreter.watched(checks)
                runner.run(part, calls, last=part is parts[-1])
            looked.append(checks)
        return looked

    def _first(self, mine: list[NotFinite]) -> NotFinite | None:
        """Return the first finding of all ranks; None where nobody found anything."""
        data = [asdict(finding) for finding in sorted(mine, key=lambda finding: finding.order)[:MOST_FINDINGS]]
        found = [
            NotFinite(**{**finding, "rank": rank})
            for rank, said in enumerate(share_bytes(self._world, json.dumps(data).encode()))
            for finding in json.loads(said)
        ]
        return min(found, key=lambda finding: finding.order, default=None)

    def _where(self, found: NotFinite | None, step: PreparedStep, weight: float) -> str:
        """Say in words where the first finding is."""
        if not weight and (found is None or found.unit == UNKNOWN):
            return "No target counts for the loss: its total weight is 0, by which gradients are divided"
        if found is None:
            return "Run again, all that was looked at is finite: what it computes is not the same in every run"
        plan, slices = self._model.plan, step.interpreter.state.flows.plan.schedule.slices
        place = ", ".join(f"{axis}={at}" for axis, at in plan.mesh.coordinates(found.rank).items())
        words = [f"rank {found.rank} ({place})"]
        if found.block in (LOSS, ALL):
            words += ["the loss function"] * (found.block == LOSS)
        else:
            stage = next((s for s, blocks in enumerate(self._model.cuts) if found.block in blocks), None)
            name = type(self._model.outlines[found.block]).__name__
            words += [f"stage {stage}", f"block {found.block} ({name})"]
        if found.unit not in (ALL, UNKNOWN):
            replica, unit = divmod(found.unit, step.interpreter.state.flows.plan.schedule.num_units)
            words += [f"microbatch {unit // slices}"]
            words += [f"slice {unit % slices}"] * (slices > 1) + [f"replica {replica}"] * (self._model.num_replicas > 1)
        first = f"Run again, the first numbers that are not finite are in the {found.kind}"
        return f"{first}: {', '.join(words)}: {found.what}"

    def _write(self, parts: list[PreparedStep], step: int, found: NotFinite | None, num_units: int) -> str:
        """Write down the batch of the replica in which it arose, and say where (collective)."""
        said = ""
        coordinates = self._model.plan.mesh.coordinates(self._world.ranks[self._world.index])
        replica = 0 if found is None or not 0 <= found.unit < UNKNOWN else found.unit // num_units
        is_mine = replica == self._model.replica and not coordinates.get("tp", 0)
        given = _tensors([part.batch for part in parts])
        if self._directory is not None and is_mine and given:
            path = self._directory / f"not-finite-step-{step:08d}-rank-{self._world.index:05d}.safetensors"
            said = _written(path, given)
        all_said = [text.decode() for text in share_bytes(self._world, said.encode())]
        if self._directory is None:
            return "Its batch is not written down, as there is no directory for it (log.path, or Engine: spike_dir)"
        return f"Its batch is in {', '.join(filter(None, all_said))}"


def _tensors(batches: list[Batch]) -> dict[str, Tensor]:
    """Return what a rank was given, by unit and place: "inputs.2.0" is the first tensor of unit 2."""
    found: dict[str, Tensor] = {}
    for part, batch in enumerate(batches):
        before = f"part{part}." if len(batches) > 1 else ""
        for name, units in (("inputs", batch.inputs), ("targets", batch.targets), ("extras", batch.extras)):
            for unit, given in enumerate(units):
                for place, tensor in enumerate(tensors_of(given)):
                    found[f"{before}{name}.{unit}.{place}"] = tensor.detach().cpu().clone().contiguous()
    return found


def _written(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to a file, and return its path; or why that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(tensors), "the batch")
    except (OSError, ValueError, QuintschedError) as error:
        return f"no file, as {path} cannot be written ({error})"
    return str(path)

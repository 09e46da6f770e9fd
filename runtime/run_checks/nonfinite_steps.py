"""Steps with gradients that are inf or nan: skipped; after `most` in a row the run stops, and reports the first cause.

    step 7 skipped, step 8 skipped, … ──▶ the last one runs again, with checks on ──▶ the first finding
                                          its batch is saved: safetensors                        of all ranks

The step was skipped, so weights and dropout masks are still those that it began with. With a loss scale that may be
too large, overflow of gradients is expected, and such a step is not counted.

The rerun checks tensors in the order of their data flow, to find the first one that is not finite:

    weights ─▶ inputs, targets ─▶ outputs of block 0, 1, … ─▶ loss ─▶ gradients, from the last block to the first
               per microbatch                                        of the inputs of a block, and of its weights

Each rank checks the tensors that it holds. The first finding is the one that no other can have caused: weights before
inputs, inputs before activations, and so on; within a kind the earliest microbatch, and the earliest block.
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

from ..blocks.block_builders import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..comm import Group
from ..comm.host_collectives import share_bytes
from ..comm.overlap_threads import BoundCall
from ..interpreter.bind_and_run_plans import PlanRunner
from ..interpreter.handler_table_and_loop import PreparedStep
from ..interpreter.step_losses.sum_losses_across_ranks import StepResult, Tally
from ..saving.rank_tensor_inventory import HeldTensor
from ..stage.batches.microbatches import Batch
from ..stage.rank_stages import RankModel
from ..weights_and_gradients.training_state import TrainingState
from .record_steps import ALL_UNITS, StepWatch

TENSOR_KINDS = ("weights", "inputs", "targets", "activations", "loss", "gradients")
"""Kinds of tensors that may not be finite, in the order in which one causes the next."""

OF_LOSS_FUNCTION = 2**30
"""Index of the loss function, as the block behind the last one."""

UNKNOWN_UNIT = 2**30
"""Index of a unit that is unknown: of a sum over units."""


@dataclass(frozen=True)
class NotFinite:
    """Tensor that is not finite.

    Attributes:
        kind: one of `TENSOR_KINDS`.
        unit: the batch's unit, counted over all replicas; or `ALL_UNITS`, or `UNKNOWN_UNIT`.
        block: number of the block it belongs to; `OF_LOSS_FUNCTION`; -1: none.
        what: description, in words.
        rank: the global rank that found it.
    """

    kind: str
    unit: int
    block: int
    what: str
    rank: int = 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sort key of findings: the least is the first cause."""
        along = -self.block if self.kind == "gradients" else self.block
        return TENSOR_KINDS.index(self.kind), self.unit, along, self.rank


def describe(tensor: Tensor) -> str:
    """Return the numbers of nan and inf in a tensor, in words: "3 nan and 1 inf among 64 numbers"."""
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    found = [f"{count} nan" for count in [nans] if count] + [f"{count} inf" for count in [infinities] if count]
    return f"{' and '.join(found)} among {tensor.numel()} numbers"


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite; integers always are."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats or bool(tensor.isfinite().all())


class FiniteChecks(StepWatch):
    """Checks all tensors that a rank computes in one step for inf and nan.

    `tally` has the losses collected so far, and their weights; the other arguments are those of `StepWatch`.

    Attributes:
        found: the tensors that were not finite.
    """

    def __init__(self, plan: Plan, model: RankModel, *held: Any, tally: Tally) -> None:
        super().__init__(plan, model, *held)
        self._tally, self._num_blocks = tally, len(model.outlines)
        self.found: list[NotFinite] = []

    def look_at_weights(self) -> None:
        """Check the weights at the start of the step."""
        for held in self._held():
            if isinstance(held.tensor, nn.Parameter) and held.numbers is not None:
                numbers = local_of(held.numbers.detach())
                self._look_at(numbers, "weights", ALL_UNITS, _block_of(held), f"{held.name}: ")

    def look_at_batch(self, batch: Batch) -> None:
        """Check the rank's inputs, targets and extras."""
        for kind, units in (("inputs", batch.inputs), ("targets", batch.targets), ("inputs", batch.extras)):
            for unit, given in enumerate(units):
                for tensor in tensors_of(given):
                    self._look_at(tensor, kind, self._first_unit + unit, -1)

    def _look_at(self, tensor: Tensor, kind: str, unit: int, block: int, words: str = "") -> None:
        if not is_finite(tensor):
            self.found.append(NotFinite(kind, unit, block, f"{words}{describe(tensor)}"))

    def _run(self, unit: int, is_forward: bool, call: BoundCall) -> None:
        of_losses = (self._tally.losses, "the loss is"), (self._tally.weights, "the weight that it gives is")
        known = [len(numbers) for numbers, _ in of_losses]
        super()._run(unit, is_forward, call)
        for count, (numbers, words) in zip(known, of_losses, strict=True):
            for _, number in numbers[count:]:
                if not is_finite(torch.as_tensor(number)):
                    what = f"{words} {float(number)}"
                    self.found.append(NotFinite("loss", self._first_unit + unit, OF_LOSS_FUNCTION, what))

    def _look_at_sum(self, held: HeldTensor, gradient: Tensor) -> None:
        """Check an accumulated gradient: it is a sum over units, so its unit is unknown."""
        self._look_at(local_of(gradient), "gradients", UNKNOWN_UNIT, _block_of(held), f"gradient of {held.name}: ")

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
        behind = (OF_LOSS_FUNCTION, taken) if number + 1 == self._num_blocks else (number + 1, taken)
        if is_last and number + 1 < self._num_blocks:  # the next stage's rank checks the gradient that it sends
            behind = number, "gradient of its output, which was finite as the next stage sent it: "
        for (at, words), tensors in (((number, taken), tensors_of(given)), (behind, gives)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, at, words, unit))

    def _look_at_gradient(self, number: int, words: str, unit: int | None, gradient: Tensor) -> None:
        self._look_at(local_of(gradient), "gradients", self._unit if unit is None else unit, number, words)


def _block_of(held: HeldTensor) -> int:
    return int(held.name.partition(".")[0])


MOST_RANK_FINDINGS = 3
"""Findings of each rank that are compared: the first ones of its sorted list."""


class BadSteps:
    """Counter of consecutive skipped steps, the same on all ranks, which stops the run when there are too many.

    Args:
        runner: runs steps.
        model: this rank's stages.
        state: their weights, and the optimizers' masters of them.
        held: returns the tensors of the model that the rank holds.
        world: all ranks.
        most: the number of consecutive skipped steps at which the run stops; 0: it never does.
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

    def note_step(self, step: PreparedStep, result: StepResult, *, last: bool) -> None:
        """Count a step, or a part of one with gradient accumulation (collective).

        Raises `NotFiniteError` where too many consecutive steps were skipped.
        """
        if not self._most:
            return
        self._parts.append(step)
        if not last:
            return
        parts, self._parts = self._parts, []
        if result.empty or (
            result.skipped and step.interpreter.state.step_end.scale.may_overflow(float(result.weight))
        ):
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
        """Run the step again, and return the checks of each of its parts."""
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
                calls = part.interpreter.wrapped_by(checks)
                runner.run_step(part, calls, last=part is parts[-1])
            looked.append(checks)
        return looked

    def _first(self, mine: list[NotFinite]) -> NotFinite | None:
        """Return the first finding over all ranks (collective); None where there is none."""
        data = [asdict(finding) for finding in sorted(mine, key=lambda finding: finding.order)[:MOST_RANK_FINDINGS]]
        found = [
            NotFinite(**{**finding, "rank": rank})
            for rank, said in enumerate(share_bytes(self._world, json.dumps(data).encode()))
            for finding in json.loads(said)
        ]
        return min(found, key=lambda finding: finding.order, default=None)

    def _where(self, found: NotFinite | None, step: PreparedStep, weight: float) -> str:
        """Return the place of the first finding, in words."""
        if not weight and (found is None or found.unit == UNKNOWN_UNIT):
            return "No target counts for the loss: its total weight is 0, by which gradients are divided"
        if found is None:
            return "Run again, all that was looked at is finite: what it computes is not the same in every run"
        plan, slices = self._model.plan, step.interpreter.state.flows.plan.schedule.slices
        place = ", ".join(f"{axis}={at}" for axis, at in plan.mesh.coordinates(found.rank).items())
        words = [f"rank {found.rank} ({place})"]
        if found.block in (OF_LOSS_FUNCTION, ALL_UNITS):
            words += ["the loss function"] * (found.block == OF_LOSS_FUNCTION)
        else:
            stage = next((s for s, blocks in enumerate(self._model.cuts) if found.block in blocks), None)
            name = type(self._model.outlines[found.block]).__name__
            words += [f"stage {stage}", f"block {found.block} ({name})"]
        if found.unit not in (ALL_UNITS, UNKNOWN_UNIT):
            replica, unit = divmod(found.unit, step.interpreter.state.flows.plan.schedule.num_units)
            words += [f"microbatch {unit // slices}"]
            words += [f"slice {unit % slices}"] * (slices > 1) + [f"replica {replica}"] * (self._model.num_replicas > 1)
        first = f"Run again, the first numbers that are not finite are in the {found.kind}"
        return f"{first}: {', '.join(words)}: {found.what}"

    def _write(self, parts: list[PreparedStep], step: int, found: NotFinite | None, num_units: int) -> str:
        """Save the batch of the replica of the finding, and return where, in words (collective)."""
        said = ""
        coordinates = self._model.plan.mesh.coordinates(self._world.ranks[self._world.index])
        replica = 0 if found is None or not 0 <= found.unit < UNKNOWN_UNIT else found.unit // num_units
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
    """Return a rank's batch by unit and position: "inputs.2.0" is the first tensor of unit 2."""
    found: dict[str, Tensor] = {}
    for part, batch in enumerate(batches):
        before = f"part{part}." if len(batches) > 1 else ""
        for name, units in (("inputs", batch.inputs), ("targets", batch.targets), ("extras", batch.extras)):
            for unit, given in enumerate(units):
                for place, tensor in enumerate(tensors_of(given)):
                    found[f"{before}{name}.{unit}.{place}"] = tensor.detach().cpu().clone().contiguous()
    return found


def _written(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors to a file, and return its path; or the reason why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, save(tensors), "the batch")
    except (OSError, ValueError, QuintschedError) as error:
        return f"no file, as {path} cannot be written ({error})"
    return str(path)
